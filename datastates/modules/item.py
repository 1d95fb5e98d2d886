"""A recorded state as a user's module gets it: its facts, and its bytes as long as the module holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from datastates import values
from datastates.content.manifest import Manifest
from datastates.errors import Closed, NotFound, Unavailable
from datastates.lineage.states import State
from datastates.objects.report import Selection
from datastates.store.reading import read_tree
from datastates.store.roles import CaptureTier
from datastates.store.tier import Reader

__all__ = ["HeldItem"]


class HeldItem:
    """An ``Item`` whose bytes stay in memory until ``let_go``. ``current`` returns how far the state has come by now."""

    def __init__(self, memory: CaptureTier, current: Callable[[], State], branch: str | None) -> None:
        self._current, self._branch = current, branch
        self._reader: Reader | None = None
        self._is_over = False
        with suppress(Closed, NotFound):  # it was recorded late; only its facts are left
            self._reader = memory.open(self.state.uid, verify=False)  # its digests were made from this very memory

    @property
    def state(self) -> State:
        """What the lineage knows of the state."""
        return self._current()

    @property
    def branch(self) -> str | None:
        """The branch on which the state was captured."""
        return self._branch

    @property
    def manifest(self) -> Manifest:
        """What the state consists of."""
        return self._open().manifest

    @values.takes(only=values.patterns)
    def tree(self, only: str | Sequence[str] | None = None) -> Any:
        """Copies of the state's tensors, in its containers; None for tensors that were not asked for.

        A pattern that selects nothing is no error here: a module sees the states of whatever is trained.
        """
        return read_tree(self._open(), wants=Selection(only).wants)

    def chunks(self) -> Iterator[memoryview]:
        """The state's bytes where they lie."""
        reader = self._open()
        return (reader.chunk(index) for index in range(len(reader.manifest.content.chunks)))

    def let_go(self) -> None:
        """Release the bytes, so that they may leave memory."""
        self._is_over = True
        if self._reader is not None:
            self._reader.close()

    def _open(self) -> Reader:
        if self._is_over:
            raise Closed(f"the item of state {self.state.uid} is over: a module reads it before process returns")
        if self._reader is None:
            raise Unavailable(
                f"state {self.state.uid} left memory before it was recorded, because the lineage was away: its facts are left, and its "
                "bytes where Repository.load finds them"
            )
        return self._reader
