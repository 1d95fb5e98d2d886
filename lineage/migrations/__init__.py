"""The schema's history. A new revision is appended to ``KNOWN``; opening a database then migrates it there."""

from __future__ import annotations

__all__ = ["AS_IS", "HEAD", "KNOWN"]

# Every project has a revision 0001: ours carry the project's name, so that a database of another program is not taken for ours.
KNOWN = (
    "datastates_0001",
    "datastates_0002",
    "datastates_0003",
    "datastates_0004",
    "datastates_0005",
    "datastates_0006",
    "datastates_0007",
    "datastates_0008",
    "datastates_0009",
    "datastates_0010",
    "datastates_0011",
    "datastates_0012",
)
HEAD = KNOWN[-1]

AS_IS = frozenset({"datastates_0011", HEAD})
"""The versions that SQLite files have the newest tables with: one that may only be read needs no copy to migrate."""
