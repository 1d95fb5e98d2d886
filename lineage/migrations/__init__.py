"""The schema's history. A new revision joins ``KNOWN`` at its end; opening a database then brings it there."""

from __future__ import annotations

__all__ = ["HEAD", "KNOWN"]

KNOWN = ("0001",)
HEAD = KNOWN[-1]
