"""Places for payload: what a tier of your own has to do, and what it may.

    from datastates.store import HeldReader, Payload, Placed, Reader, Tier

Names are imported when they are first used: reading a manifest's frame does without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .held import HeldReader
    from .tier import Payload, Placed, Reader, SupportsDirectWrite, SupportsManifests, SupportsRemoval, Tier

__all__ = ["HeldReader", "Payload", "Placed", "Reader", "SupportsDirectWrite", "SupportsManifests", "SupportsRemoval", "Tier"]


def __getattr__(name: str) -> object:
    """Import a name when it is first used, and keep it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(".held" if name == "HeldReader" else ".tier", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
