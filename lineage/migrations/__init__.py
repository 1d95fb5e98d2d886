"""The schema's history.

A new revision is appended to ``KNOWN``; opening a database then migrates it there."""

from __future__ import annotations

# Every project has a revision 0001: ours carry the project's name, so that a database of another
# program is not taken for ours.
KNOWN = ("datastates_0001",)
HEAD = KNOWN[-1]
