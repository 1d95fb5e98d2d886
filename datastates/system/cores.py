"""How many threads of ours may work at once beside a training."""

from __future__ import annotations

import os

__all__ = ["beside"]


def beside(share: int, *, least: int, most: int) -> int:
    """One thread for each ``share`` cores that this process may use, within these bounds."""
    return min(most, max(least, len(os.sched_getaffinity(0)) // share))
