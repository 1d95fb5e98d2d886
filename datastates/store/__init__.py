"""Places for payload: what a tier of your own has to do, and what it may.

from datastates.store import HeldReader, Payload, Placed, Reader, Tier
"""

from __future__ import annotations

from .held import HeldReader
from .tier import Payload, Placed, Reader, SupportsDirectWrite, SupportsManifests, SupportsRemoval, Tier

__all__ = ["HeldReader", "Payload", "Placed", "Reader", "SupportsDirectWrite", "SupportsManifests", "SupportsRemoval", "Tier"]
