"""The contract of a custom tier, and its optional capabilities.

Names are imported when they are first used, so that reading a manifest's envelope needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datastates.state.digest import decode, encode
    from datastates.state.manifest import Manifest
    from datastates.storage.keyed import KeyedTier
    from datastates.storage.reading import HeldReader
    from datastates.storage.remote import FolderTier, ObjectTier, RedisTier
    from datastates.storage.tier import (
        Payload,
        Placed,
        Reader,
        SupportsDirectWrite,
        SupportsManifests,
        SupportsRemoval,
        Tier,
    )

__all__ = [
    "FolderTier",
    "HeldReader",
    "KeyedTier",
    "Manifest",
    "ObjectTier",
    "Payload",
    "Placed",
    "Reader",
    "RedisTier",
    "SupportsDirectWrite",
    "SupportsManifests",
    "SupportsRemoval",
    "Tier",
    "decode",
    "encode",
]

_MODULES = {
    "HeldReader": "datastates.storage.reading",
    "KeyedTier": "datastates.storage.keyed",
    **dict.fromkeys(("FolderTier", "ObjectTier", "RedisTier"), "datastates.storage.remote"),
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
