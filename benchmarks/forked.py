"""The cost of a copy of the state by a forked child, compared with a copy by the training.

    python benchmarks/forked.py [--quick] [--rounds N] [--sizes 100,400,1250,4000]

Sizes are in MB. The floor copies the state into memory that was touched before, as a capture
without a fence does. The fork is the method of CRUM: the child copies into the same memory, and
ends. The cost of both has two parts: the time that the training waits, and the additional time of
its next update of the whole state. After a fork each page is write-protected, and the first write
to it faults. The update comes at once, while the child copies, or after the child has ended. Every
measurement has fresh memory, because an update after a fork leaves small pages.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import machine, out, spread, table

MB = 10**6
PIECES = 64


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall and CPU seconds of the training's thread for its wait and its next update, and the time
    until the copy is complete."""

    blocked: float
    blocked_cpu: float
    update: float
    update_cpu: float
    copied: float


class State:
    """Tensors of a training, and touched memory that is shared with children."""

    def __init__(self, size: int, target: mmap.mmap) -> None:
        self.tensors = [torch.ones(size // PIECES // 4) for _ in range(PIECES)]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        torch._foreach_add_(self.tensors, 1.0)

    def copy(self) -> None:
        """Without torch, because a child has none of its threads."""
        place = self.address
        for tensor in self.tensors:
            ctypes.memmove(place, tensor.data_ptr(), tensor.nbytes)
            place += tensor.nbytes

    def update(self) -> None:
        torch._foreach_add_(self.tensors, 1.0)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and CPU time of this thread."""
    clock, cpu = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - clock, time.thread_time() - cpu


def undisturbed(state: State) -> Cost:
    return Cost(0.0, 0.0, *timed(state.update), 0.0)


def copied(state: State) -> Cost:
    blocked = timed(state.copy)
    return Cost(*blocked, *timed(state.update), blocked[0])


def forked(state: State, *, waits: bool) -> Cost:
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            state.copy()
            os._exit(0)
        children.append(child)

    start = time.perf_counter()
    blocked = timed(fork)
    ended = [0.0]

    def reap() -> None:
        os.waitpid(children[0], 0)
        ended[0] = time.perf_counter() - start

    waiting = threading.Thread(target=reap)
    waiting.start()
    if waits:
        waiting.join()
    update = timed(state.update)
    waiting.join()
    return Cost(*blocked, *update, ended[0])


METHODS: dict[str, Callable[[State], Cost]] = {
    "undisturbed": undisturbed,
    "copy": copied,
    "fork, updated at once": lambda state: forked(state, waits=False),
    "fork, updated when the child has ended": lambda state: forked(state, waits=True),
}


def measure(size: int, rounds: int) -> list[list[str]]:
    """A row for each method."""
    target = mmap.mmap(-1, size)
    for place in range(0, size, mmap.PAGESIZE):
        target[place] = 1
    found: dict[str, list[Cost]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, method in METHODS.items():
            state = State(size, target)
            cost = method(state)
            if number:
                found[name].append(cost)
            del state
            gc.collect()
    usual, usual_cpu = (
        statistics.median(getattr(cost, name) for cost in found["undisturbed"])
        for name in ("update", "update_cpu")
    )
    rows = []
    for name, costs in found.items():
        whole = [cost.blocked + cost.update - usual for cost in costs]
        of_cpu = [cost.blocked_cpu + cost.update_cpu - usual_cpu for cost in costs]
        each = [[cost.blocked for cost in costs], whole, of_cpu, [cost.copied for cost in costs]]
        rows.append([str(size // MB), name, *(spread(values, 1e3) for values in each)])
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one small size, once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="100,400,1250,4000", help="MB, by commas")
    given = parser.parse_args()
    torch.set_num_threads(1)
    idle = threading.Event()
    threads = [threading.Thread(target=idle.wait, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    sizes, rounds = (
        ([8], 1) if given.quick else ([int(size) for size in given.sizes.split(",")], given.rounds)
    )
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages = huge.read_text().strip() if huge.exists() else "unknown"
    out(f"{machine()}\nhuge pages: {pages}; {rounds} rounds, medians in ms [least .. greatest]\n")
    rows = [row for size in sizes for row in measure(size * MB, rounds)]
    out(
        table(
            [
                "MB",
                "what",
                "blocked",
                "whole cost to the training",
                "the same, processor time",
                "until copied",
            ],
            rows,
        )
    )
    idle.set()


if __name__ == "__main__":
    main()
