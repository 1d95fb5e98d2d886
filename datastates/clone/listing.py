"""Lists of states that a peer sends page by page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from datastates.errors import PeerFault
from datastates.lineage.states import State
from datastates.transport.limits import LISTED_BYTES, Budget, Share
from datastates.transport.protocol import StatePage

from .records import states_of

__all__ = ["PAGE", "Page", "all_pages", "enter"]

PAGE = 1000
"""States in a page."""


class Page(Protocol):
    """A question that is answered in pages."""

    async def __call__(self, *, limit: int, after: str | None, room: Share) -> StatePage:
        """At most ``limit`` states, those behind ``after``; they take ``room``."""


async def all_pages(page: Page, limit: int | None) -> list[State]:
    """The states of every page, up to ``limit``."""
    found: dict[str, State] = {}
    after: str | None = None
    room = Share(Budget(2 * LISTED_BYTES))
    while limit is None or len(found) < limit:
        got = await page(limit=PAGE if limit is None else min(PAGE, limit - len(found)), after=after, room=room)
        enter(found, states_of(got.states, got.runs))
        after = got.next
        if after is None or not got.states:
            break
    return list(found.values())


def enter(found: dict[str, State], page: Iterable[State]) -> None:
    """Add a page of a list that must come to an end: none of its states may have been there before.

    :raises PeerFault: one was.
    """
    for state in page:
        if state.uid in found:
            raise PeerFault(f"the peer lists state {state.uid[:10]} twice: its list does not come to an end")
        found[state.uid] = state
