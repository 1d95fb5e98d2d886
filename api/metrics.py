"""What the server counts about itself, and its text for Prometheus."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.system.telemetry import BOUNDS_S, COUNTERS, Activity

from .routing import API

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Send
    from starlette.types import Scope as Request

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Labels = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of all routes: answered requests, requests that were refused for their token,
    requests under way, and bytes sent."""

    requests: int
    refused: int
    under_way: int
    bytes_sent: int


class Meter:
    """Counts of requests, by route; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS_S) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._bytes_sent = 0
        self._under_way = 0

    def begin(self) -> None:
        with self._lock:
            self._under_way += 1

    def sent(self, count: int) -> None:
        with self._lock:
            self._bytes_sent += count

    def end(self, route: str, method: str, status: int, first_byte_s: float) -> None:
        """Count an answered request; ``first_byte_s`` is the time to its first byte, since a
        stream may last for hours."""
        with self._lock:
            self._under_way -= 1
            self._requests[route, method, status] += 1
            self._buckets[route][bisect_left(BUCKETS_S, first_byte_s)] += 1
            self._seconds[route] += first_byte_s

    def totals(self) -> Totals:
        with self._lock:
            refused = sum(
                count for (_, _, status), count in self._requests.items() if status in (401, 403)
            )
            return Totals(self._requests.total(), refused, self._under_way, self._bytes_sent)

    def lines(self) -> Iterator[str]:
        """All counts in Prometheus' text format."""
        with self._lock:
            requests, seconds = dict(self._requests), dict(self._seconds)
            buckets = {route: list(counts) for route, counts in self._buckets.items()}
            bytes_sent, under_way = self._bytes_sent, self._under_way
        counted = (
            ({"route": route, "method": method, "status": status}, count)
            for (route, method, status), count in requests.items()
        )
        yield from family(
            "datastates_http_requests_total", "counter", "Requests that were answered", counted
        )
        yield from family(
            "datastates_http_bytes_sent_total",
            "counter",
            "Bytes of bodies that were sent",
            [({}, bytes_sent)],
        )
        yield from family(
            "datastates_http_requests_under_way",
            "gauge",
            "Requests that are being answered",
            [({}, under_way)],
        )
        histograms = [
            ({"route": route}, counts, seconds[route]) for route, counts in buckets.items()
        ]
        yield from histogram(
            "datastates_http_first_byte_seconds",
            "From a request to the first byte of its answer",
            BUCKETS_S,
            histograms,
        )


class Metered:
    """Counts requests that pass; the outermost layer but one, so that refusals are counted too."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Request, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, is_counted = time.perf_counter(), 500, False
        first_byte_s: float | None = None

        def count() -> None:
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                # never a path that a client made up
                route = getattr(scope.get("route"), "path", "").removeprefix(API) or "unknown"
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._meter.end(
                    route,
                    method,
                    status,
                    time.perf_counter() - began if first_byte_s is None else first_byte_s,
                )

        async def counted(message: Message) -> None:
            nonlocal first_byte_s, status
            if message["type"] == "http.response.start":
                first_byte_s, status = time.perf_counter() - began, message["status"]
            elif message["type"] == "http.response.body":
                self._meter.sent(len(message.get("body", b"")))
                if not message.get("more_body", False):
                    # before the last piece leaves, so that a client that has the whole answer finds
                    # it counted
                    count()
            await send(message)

        self._meter.begin()
        try:
            await self._app(scope, receive, counted)
        finally:
            count()


_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"))


def family(
    name: str, kind: str, said: str, samples: Iterable[tuple[Labels, float]]
) -> Iterator[str]:
    yield f"# HELP {name} {said}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield _line(name, labels, value)


def histogram(
    name: str,
    said: str,
    bounds: Sequence[float],
    samples: Iterable[tuple[Labels, Sequence[int], float]],
) -> Iterator[str]:
    """The lines of one histogram.

    Each sample has the count within each bound and above the one before, and the sum of its
    values."""
    yield f"# HELP {name} {said}"
    yield f"# TYPE {name} histogram"
    for labels, counts, summed in samples:
        total = 0
        for bound, count in zip((*bounds, "+Inf"), counts, strict=True):
            total += count
            yield _line(f"{name}_bucket", {**labels, "le": bound}, total)
        yield _line(f"{name}_sum", labels, summed)
        yield _line(f"{name}_count", labels, total)


def _line(name: str, labels: Labels, value: float) -> str:
    said = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
    return f"{name}{{{said}}} {value}" if said else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# What trainings in the server's own process capture and write, in Prometheus' text format.


def activity_lines(activities: Mapping[str, Activity]) -> Iterator[str]:
    """The lines of every counter and timing, labelled by the repository's name."""
    for counter in COUNTERS:
        samples = [
            ({"repository": repository}, counter.of(activity))
            for repository, activity in activities.items()
        ]
        yield from family(
            f"datastates_{counter.name.replace('.', '_')}_total", "counter", counter.said, samples
        )
    timed = [
        ({"repository": repository, "stage": timing.stage}, timing.histogram, timing.total_s)
        for repository, activity in activities.items()
        for timing in activity.timings
    ]
    yield from histogram(
        "datastates_stage_seconds", "How long a stage of a capture took", BOUNDS_S, timed
    )
