"""The contract of a custom tier, and its optional capabilities.

Names are imported when they are first used, so that reading a manifest's envelope needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datastates.state.digest import decode, encode
    from datastates.state.manifest import Manifest
    from datastates.storage.reading import HeldReader
    from datastates.storage.tier import (
        Payload,
        Placed,
        Reader,
        SupportsDirectWrite,
        SupportsManifests,
        SupportsRemoval,
        Tier,
    )
    from datastates.storage.tiers import KeyedTier

__all__ = [
    "HeldReader",
    "KeyedTier",
    "Manifest",
    "Payload",
    "Placed",
    "Reader",
    "SupportsDirectWrite",
    "SupportsManifests",
    "SupportsRemoval",
    "Tier",
    "decode",
    "encode",
]

_MODULES = {
    "HeldReader": "datastates.storage.reading",
    "KeyedTier": "datastates.storage.tiers",
    "Manifest": "datastates.state.manifest",
    "decode": "datastates.state.digest",
    "encode": "datastates.state.digest",
}
"""The module in which each public name lives; names that are not listed are in the contract."""


def __getattr__(name: str) -> object:
    """Import a name when it is first used, and keep it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(
        import_module(_MODULES.get(name, "datastates.storage.tier")), name
    )
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
