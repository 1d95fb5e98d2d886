"""Counts and times of the work of this process. Its spans are kept if a trace was requested.

    recorder.span("digest", began, ended, uid, step)    # a piece of work of the calling thread
    recorder.count("evicted", 3)

A call appends to a queue, without a lock or a clock. The entries are added up on the engine thread
after each round, and when the numbers are read.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

from .interrupts import Mutex

MOST_SPANS = 100_000
"""The number of spans that are kept, the newest ones: some 30 MB of memory, 15 MB on disk."""


class Span(NamedTuple):
    """What a thread did from ``began`` to ``ended``, of the monotonic clock, and for which
    state."""

    name: str
    thread: int
    thread_name: str
    began: float
    ended: float
    uid: str
    step: int | None


def write_trace(path: Path, spans: Sequence[Span], *, left_out: int = 0) -> None:
    """Write the file, in place of an existing one. ``{pid}`` in its name is this process's number.

    :raises OSError: it cannot be written.
    """
    path = Path(str(path).replace("{pid}", str(os.getpid())))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(
                '{"displayTimeUnit": "ms", "otherData": '
                + json.dumps({"earlier spans left out": left_out})
                + ', "traceEvents": [\n'
            )
            file.write(",\n".join(json.dumps(event) for event in _events(spans)))
            file.write("\n]}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _events(spans: Sequence[Span]) -> Iterator[dict[str, object]]:
    """The names of process and threads, then the spans, each after the spans that contain it.
    Threads of one number follow each other.

    Times are whole microseconds, so that spans of a thread never overlap in programs that read the
    times as floats. If two spans overlap for a nanosecond, Perfetto shows one of them.
    """
    pid = os.getpid()
    threads = {
        thread: number
        for number, thread in enumerate(
            dict.fromkeys((span.thread, span.thread_name) for span in spans), 1
        )
    }
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "datastates"}}
    for (_, name), number in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": number,
            "args": {"sort_index": number},
        }
    for span in sorted(spans, key=lambda one: (one.began, -one.ended)):
        began, ended = round(span.began * 1e6), round(span.ended * 1e6)
        said = {
            key: value
            for key, value in (("step", span.step), ("state", span.uid))
            if value not in (None, "")
        }
        event = {
            "ph": "X",
            "name": span.name,
            "cat": "datastates",
            "ts": began,
            "dur": ended - began,
        }
        yield {**event, "pid": pid, "tid": threads[span.thread, span.thread_name], "args": said}


_logger = logging.getLogger(__name__)

BOUNDS_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
"""The upper bounds of the histogram of a stage, in seconds; its last place counts runs that took
longer than all of them."""

Counted = Literal[
    "skipped",
    "failed",
    "recorded",
    "snapshots",
    "copied",
    "bytes_further",
    "copies_failed",
    "requests",
    "bytes_copied",
    "bytes_new",
    "written",
    "bytes_written",
    "chunks_shared",
    "retries",
    "evicted",
]


@dataclass(frozen=True, slots=True)
class Timing:
    """One stage: how often it ran, the total, shortest and longest time, and a histogram over
    ``BOUNDS_S``."""

    stage: str
    count: int = 0
    total_s: float = 0.0
    least_s: float = float("inf")
    most_s: float = 0.0
    histogram: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)

    def plus(self, took_s: float) -> Timing:
        """The timing with one more run."""
        place = bisect_left(BOUNDS_S, took_s)
        histogram = (
            *self.histogram[:place],
            self.histogram[place] + 1,
            *self.histogram[place + 1 :],
        )
        least, most = min(self.least_s, took_s), max(self.most_s, took_s)
        return Timing(self.stage, self.count + 1, self.total_s + took_s, least, most, histogram)

    @property
    def mean_s(self) -> float:
        """The average time of a run; 0 if the stage never ran."""
        return self.total_s / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """What one process did with the states of one repository, since it opened the repository.

    ``captures`` were taken, and ``skipped`` were not, for lack of memory. ``failed`` were lost
    afterwards, ``recorded`` are in the lineage, ``written`` are on disk; ``snapshots`` left a copy
    on the device. ``bytes_copied`` of tensors were copied into memory, where ``bytes_new`` of them
    were new, and ``bytes_written`` went to disk; ``chunks_shared`` of what was written were there
    already. ``retries`` are writes that failed and are tried again. ``evicted`` are states that
    were removed from memory. ``copied`` states were put onto further tiers, where
    ``bytes_further`` were new; ``copies_failed`` are tried again, and ``requests`` were made for
    copies. ``timings`` are in the order in which stages first ran.
    """

    captures: int = 0
    skipped: int = 0
    failed: int = 0
    recorded: int = 0
    written: int = 0
    bytes_copied: int = 0
    bytes_new: int = 0
    bytes_written: int = 0
    chunks_shared: int = 0
    retries: int = 0
    evicted: int = 0
    snapshots: int = 0
    copied: int = 0
    bytes_further: int = 0
    copies_failed: int = 0
    requests: int = 0
    timings: tuple[Timing, ...] = ()

    def timing(self, stage: str) -> Timing:
        """The timing of a stage, even of one that never ran."""
        return next((timing for timing in self.timings if timing.stage == stage), Timing(stage))


class Counter(NamedTuple):
    """How one number of an ``Activity`` is exported: its name, unit and description."""

    field: str
    name: str
    unit: str
    said: str

    def of(self, activity: Activity) -> int:
        """The number in an activity."""
        return int(getattr(activity, self.field))


COUNTERS = (
    Counter("captures", "captures", "{capture}", "Captures that this process took"),
    Counter(
        "skipped", "captures.skipped", "{capture}", "Captures that were not taken for want of room"
    ),
    Counter("failed", "captures.failed", "{capture}", "Captures that came to nothing"),
    Counter("recorded", "states.recorded", "{state}", "Captures that are in the lineage"),
    Counter("written", "states.written", "{state}", "States that were written to disk"),
    Counter("bytes_copied", "bytes.copied", "By", "Bytes of tensors that were copied into memory"),
    Counter("bytes_new", "bytes.new", "By", "Those of them that no other state in memory had"),
    Counter("bytes_written", "bytes.written", "By", "Bytes of tensors that were written to disk"),
    Counter(
        "chunks_shared",
        "chunks.shared",
        "{chunk}",
        "Chunks of written states that were on disk already",
    ),
    Counter("retries", "writes.retried", "{write}", "Writes that failed and are tried again"),
    Counter("evicted", "states.evicted", "{state}", "States that left memory to make room"),
    Counter(
        "snapshots",
        "captures.snapshots",
        "{capture}",
        "Captures of which a copy stayed on the device",
    ),
    Counter("copied", "states.copied", "{state}", "States that were put onto further tiers"),
    Counter("bytes_further", "bytes.further", "By", "Bytes that were new on further tiers"),
    Counter(
        "copies_failed",
        "copies.failed",
        "{copy}",
        "Copies to further tiers that failed and are tried again",
    ),
    Counter("requests", "requests", "{request}", "Requests to further tiers for copies"),
)


class _Count(NamedTuple):
    name: str
    by: int


class Recorder:
    """Belongs to the engine of a repository. Safe from any thread; ``span`` and ``count`` never
    wait.

    With ``trace`` the newest spans are kept, and ``write`` writes them there: Chrome's JSON, which
    Perfetto opens.
    """

    def __init__(self, trace: str | os.PathLike[str] | None = None) -> None:
        self._trace = trace
        self._told: deque[Span | _Count] = deque()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._counts: dict[str, int] = {
            field.name: 0 for field in fields(Activity) if field.name != "timings"
        }
        self._timings: dict[str, Timing] = {}
        self._left_out = 0
        self._lock = Mutex()

    def span(
        self, name: str, began: float, ended: float, uid: str = "", step: int | None = None
    ) -> None:
        """Note that this thread did something from ``began`` to ``ended``, of the monotonic
        clock."""
        thread = threading.current_thread()
        self._told.append(Span(name, thread.ident or 0, thread.name, began, ended, uid, step))

    def count(self, name: Counted, by: int = 1) -> None:
        """Count an event, or several."""
        self._told.append(_Count(name, by))

    def add_up(self) -> None:
        """Add up the queued entries."""
        with self._lock:
            while self._told:
                told = self._told.popleft()
                if isinstance(told, _Count):
                    self._counts[told.name] += told.by
                    continue
                timing = self._timings.get(told.name, Timing(told.name))
                self._timings[told.name] = timing.plus(told.ended - told.began)
                if told.name == "capture":
                    self._counts["captures"] += 1
                if self._trace is not None:
                    self._left_out += len(self._spans) == MOST_SPANS
                    self._spans.append(told)

    def activity(self) -> Activity:
        """The activity so far."""
        self.add_up()
        with self._lock:
            return Activity(timings=tuple(self._timings.values()), **self._counts)

    def write(self) -> None:
        """Write the trace, if one was requested, in place of the earlier one. A failure is
        logged."""
        if self._trace is None:
            return
        self.add_up()
        with self._lock:
            spans, left_out = list(self._spans), self._left_out
        try:
            write_trace(Path(self._trace), spans, left_out=left_out)
        except OSError as error:
            _logger.warning("the trace was not written to %s: %s", self._trace, error)
