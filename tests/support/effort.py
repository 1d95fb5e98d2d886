"""How much the drivers of random cases try: in the gate a part, all of it with ``DATASTATES_THOROUGH=1``."""

from __future__ import annotations

import os

__all__ = ["effort"]

_IS_THOROUGH = os.environ.get("DATASTATES_THOROUGH") == "1"


def effort(thorough: int, gate: int) -> int:
    """So many cases, processes or deaths."""
    return thorough if _IS_THOROUGH else gate
