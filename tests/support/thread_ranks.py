"""Ranks that are threads of this process: a group as any other, over memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from datastates.collective import Group, bytes_of, check
from datastates.errors import Unavailable

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
PATIENCE_S = 60


@dataclass
class _Hall:
    """Where the ranks meet.

    ``passed`` notes what was passed on: root and receiver; ``damage`` may change it on the way."""

    size: int
    said: dict[int, bytes] = field(default_factory=dict)
    passed: list[tuple[int, int, int]] = field(default_factory=list)
    damage: Callable[[int, int, bytes], bytes] = lambda root, to, data: data

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=PATIENCE_S)
        self.ways = {
            (root, to): SimpleQueue[bytes]() for root in range(self.size) for to in range(self.size)
        }


class ThreadGroup(Group):
    """One rank of a group of threads."""

    def __init__(self, hall: _Hall, rank: int) -> None:
        self.hall, self.rank, self.size = hall, rank, hall.size

    def exchange(self, value: bytes) -> list[bytes]:
        check(value, is_closed=False)
        self.hall.said[self.rank] = bytes(value)
        self._wait()
        found = [self.hall.said[rank] for rank in range(self.size)]
        self._wait()
        return found

    def pass_on(
        self,
        buffer: memoryview | bytearray | bytes | torch.Tensor,
        root: int,
        to: Collection[int] | None = None,
    ) -> None:
        view = bytes_of(buffer)
        receivers = set(range(self.size) if to is None else to) - {root}
        if self.rank == root:
            for rank in sorted(receivers):
                self.hall.passed.append((root, rank, view.nbytes))
                self.hall.ways[root, rank].put(self.hall.damage(root, rank, bytes(view)))
        elif self.rank in receivers:
            try:
                view[:] = self.hall.ways[root, self.rank].get(timeout=PATIENCE_S)
            except Empty:
                raise Unavailable(f"rank {root} passed nothing on to rank {self.rank}") from None

    def close(self) -> None:
        """Nothing is held."""

    def _wait(self) -> None:
        try:
            self.hall.barrier.wait()
        except threading.BrokenBarrierError:
            raise Unavailable(f"a rank did not come to rank {self.rank}") from None


def on_threads(
    size: int,
    work: Callable[[ThreadGroup], T],
    damage: Callable[[int, int, bytes], bytes] | None = None,
) -> tuple[list[T | Exception], list[tuple[int, int, int]]]:
    """Do the work as each rank; what it returned or raised, by rank, and what was passed on:
    root, receiver, bytes."""
    hall = _Hall(size)
    if damage is not None:
        hall.damage = damage

    def one(rank: int) -> T | Exception:
        try:
            return work(ThreadGroup(hall, rank))
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size))), hall.passed
