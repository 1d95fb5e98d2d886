"""What trainings in the server's own process capture and write, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from datastates.system.recorder import BOUNDS_S, COUNTERS, Activity

from .meter import family, histogram

__all__ = ["activity_lines"]


def activity_lines(activities: Mapping[str, Activity]) -> Iterator[str]:
    """The lines of every counter and timing, labelled by the repository's name."""
    for counter in COUNTERS:
        samples = [({"repository": repository}, counter.of(activity)) for repository, activity in activities.items()]
        yield from family(f"datastates_{counter.name.replace('.', '_')}_total", "counter", counter.said, samples)
    timed = [
        ({"repository": repository, "stage": timing.stage}, timing.histogram, timing.total_s)
        for repository, activity in activities.items()
        for timing in activity.timings
    ]
    yield from histogram("datastates_stage_seconds", "How long a stage of a capture took", BOUNDS_S, timed)
