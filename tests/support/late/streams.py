"""Streams and events of late devices: what runs when, by an adversary."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Lateness(Enum):
    """What the adversary puts off until a host thread insists on it.

    Each kind misses faults that another one finds."""

    COPIES = "copies late"
    COMPUTE = "compute late"
    BOTH = "both late"
    RANDOM = "random"


@dataclass(slots=True, eq=False)
class Op:
    """Something that a stream does in its turn, once what it ``needs`` is done.

    ``launches``: what it costs the thread that queues it."""

    stream: Stream
    name: str
    run: Callable[[], None] | None = None
    needs: list[Op] = field(default_factory=list)
    launches: int = 1
    is_done: bool = False


class Event:
    """A point in a stream."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def query(self) -> bool:
        """Whether it was reached."""
        return self.op.is_done

    def synchronize(self) -> None:
        """Wait on the host."""
        self.op.stream.schedule.wait(self.op)


class Stream:
    """Ops in order. ``is_side``: not the one that a device has from the beginning."""

    def __init__(self, schedule: Schedule, device: torch.device, *, is_side: bool) -> None:
        self.schedule, self.device, self.is_side = schedule, device, is_side
        self.ops: deque[Op] = deque()


class Schedule:
    """Decides which op runs when, and runs it, on whichever thread asks. Host threads that insist
    get what they need and nothing more.

    Threads of ours are of no haste: a training runs far ahead of them, or else everything that is
    late would be forced by them at once.
    """

    def __init__(self, lateness: Lateness, seed: int) -> None:
        self._lateness, self._random = lateness, random.Random(seed)
        self._has_caught_up = False
        self._launched = Counter[int]()
        self._changed = threading.Condition(threading.RLock())
        self.patience_s = 0.1
        """So long a thread of ours waits for what is put off, while nobody else wants it; then
        the device has caught up."""
        self.streams: list[Stream] = []
        self.errors: list[BaseException] = []
        self.host_waits: list[tuple[str, str]] = []
        """The thread that waited for a device, and for what."""

    def stream(self, device: torch.device, *, is_side: bool) -> Stream:
        """A stream more."""
        with self._changed:
            self.streams.append(Stream(self, device, is_side=is_side))
            return self.streams[-1]

    def put(self, op: Op) -> Op:
        """Queue an op, and let run what the adversary lets run."""
        with self._changed:
            self._launched[threading.get_ident()] += op.launches
            op.stream.ops.append(op)
            self._advance()
        return op

    def wait(self, op: Op) -> None:
        """Wait on the host until an op is done."""
        name = threading.current_thread().name
        with self._changed:
            self.host_waits.append((name, op.name))
            if name.startswith("datastates-"):
                self._changed.wait_for(lambda: op.is_done, self.patience_s)
            self._force(op)
            self._raise()

    def waits_of_this_thread(self) -> int:
        """How often it waited for a device."""
        return sum(name == threading.current_thread().name for name, _ in self.host_waits)

    def launches_of_this_thread(self) -> int:
        """How much it queued; a copy of many tensors in one call counts once for each."""
        return self._launched[threading.get_ident()]

    def catch_up(self) -> None:
        """Everything is done, and whatever comes is done at once.

        Raises what went wrong on the way."""
        with self._changed:
            self._has_caught_up = True
            for stream in self.streams:
                while stream.ops:
                    self._force(stream.ops[-1])
            self._raise()

    def be_late_again(self) -> None:
        """What comes from now on is put off as before ``catch_up``."""
        self._has_caught_up = False

    def _raise(self) -> None:
        if self.errors:
            raise self.errors[0]

    def _is_late(self, stream: Stream) -> bool:
        if self._has_caught_up:
            return False
        match self._lateness:
            case Lateness.COPIES:
                return stream.is_side
            case Lateness.COMPUTE:
                return not stream.is_side
            case Lateness.BOTH:
                return True
            case Lateness.RANDOM:
                return self._random.random() < 0.5

    def _advance(self) -> None:
        """Run what may run."""
        streams = (
            self.streams
            if self._lateness is not Lateness.RANDOM
            else self._random.sample(self.streams, len(self.streams))
        )
        has_run = True
        while has_run:
            has_run = False
            for stream in streams:
                while (
                    stream.ops
                    and all(need.is_done for need in stream.ops[0].needs)
                    and not self._is_late(stream)
                ):
                    self._run(stream.ops[0])
                    has_run = True

    def _force(self, op: Op) -> None:
        """Run an op, and before it what it has to come after."""
        while not op.is_done:
            first = op.stream.ops[0]
            for need in first.needs:
                self._force(need)
            if not first.is_done:
                self._run(first)

    def _run(self, op: Op) -> None:
        try:
            if op.run is not None:
                op.run()
        except BaseException as exc:  # a device says later what went wrong
            self.errors.append(exc)
        op.is_done, op.run = True, None
        assert op.stream.ops.popleft() is op
        self._changed.notify_all()
