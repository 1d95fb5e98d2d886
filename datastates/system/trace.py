"""Spans of threads as a trace file: the JSON of Chrome's trace events, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["MOST_SPANS", "Span", "write_trace"]

MOST_SPANS = 100_000
"""The number of spans that are kept, the newest ones: some 30 MB of memory, 15 MB on disk."""


class Span(NamedTuple):
    """What a thread did from ``began`` to ``ended``, of the monotonic clock, and for which state."""

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
                '{"displayTimeUnit": "ms", "otherData": ' + json.dumps({"earlier spans left out": left_out}) + ', "traceEvents": [\n'
            )
            file.write(",\n".join(json.dumps(event) for event in _events(spans)))
            file.write("\n]}\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _events(spans: Sequence[Span]) -> Iterator[dict[str, object]]:
    """The names of process and threads, then the spans, each after the spans that contain it. Threads of one number follow each other.

    Times are whole microseconds, so that spans of a thread lie within or beside each other for programs that read the times as floats. Of
    spans that overlap for a nanosecond Perfetto shows only one.
    """
    pid = os.getpid()
    threads = {thread: number for number, thread in enumerate(dict.fromkeys((span.thread, span.thread_name) for span in spans), 1)}
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "datastates"}}
    for (_, name), number in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": number, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": number, "args": {"sort_index": number}}
    for span in sorted(spans, key=lambda one: (one.began, -one.ended)):
        began, ended = round(span.began * 1e6), round(span.ended * 1e6)
        said = {key: value for key, value in (("step", span.step), ("state", span.uid)) if value not in (None, "")}
        event = {"ph": "X", "name": span.name, "cat": "datastates", "ts": began, "dur": ended - began}
        yield {**event, "pid": pid, "tid": threads[span.thread, span.thread_name], "args": said}
