"""Peers as a place from which states are repaired: each state is opened there, and only the chunks that are asked for are moved."""

from __future__ import annotations

from functools import partial

from datastates.errors import NotFound
from datastates.store.tier import Reader
from datastates.transport import loop

from .parts import fetch_part
from .peer import Peer
from .reading import PeerReader
from .sources import OpenState, Sources

__all__ = ["PeerPlace"]


class PeerPlace:
    """A peer's states, part by part. ``party`` says whose bytes they are."""

    def __init__(self, peer: Peer) -> None:
        self.party = ", ".join(peer.urls)
        self._sources: Sources = peer.sources

    def open_part(self, uid: str, rank: int, *, verify: bool = True) -> Reader:
        """The part of a state that one of its ranks captured, held open there until the reader is closed; chunks are checked as they
        arrive.

        :raises NotFound: it is not there.
        :raises Disconnected: the peer does not answer.
        """
        del verify
        opened = loop.run(self._sources.open(uid))
        try:
            return _reader(opened, rank, self._sources.timeout_s)
        except BaseException:
            loop.run(opened.close())
            raise


def _reader(opened: OpenState, rank: int, timeout_s: float) -> Reader:
    if opened.parts is None:
        if rank:
            raise NotFound(f"state {opened.state.uid} has one part at {opened.source}, and not that of rank {rank}")
        return _Reader(opened, PeerReader(opened.manifest.manifest, partial(opened.fetch, timeout_s=timeout_s)))
    part = next((each for each in opened.parts.parts if each.rank == rank), None)
    if part is None:
        raise NotFound(f"rank {rank} of state {opened.state.uid} is not at {opened.source}")
    return _Reader(opened, PeerReader(part.manifest, partial(fetch_part, part=part, timeout_s=timeout_s)))


class _Reader(Reader):
    """A reader that also closes what was opened for it."""

    def __init__(self, opened: OpenState, inner: PeerReader) -> None:
        self.manifest = inner.manifest
        self._opened, self._inner = opened, inner
        self._is_closed = False

    def chunk(self, index: int) -> memoryview:
        return self._inner.chunk(index)

    def span(self, start: int, length: int) -> memoryview | None:
        return self._inner.span(start, length)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._inner.close()
            loop.run(self._opened.close())
