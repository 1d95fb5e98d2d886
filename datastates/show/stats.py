"""A repository in numbers: what its lineage holds, and what this process did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.lineage.show.stats import Counts, count
from datastates.lineage.show.texts import plural, size_text
from datastates.system.recorder import Activity

if TYPE_CHECKING:
    from datastates.opening.core import Core

__all__ = ["RepositoryStats", "stats"]


@dataclass(frozen=True, slots=True)
class RepositoryStats:
    """``lineage`` is what all processes recorded, ``bytes_stored`` is what its packs take on disk.

    ``activity`` is that of this process alone, since it opened the repository. ``trouble`` is what keeps it from writing, if anything does.
    """

    lineage: Counts
    bytes_stored: int
    activity: Activity
    trouble: str | None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def stats(core: Core) -> RepositoryStats:
    """Count everything; waits for the captures so far to be recorded."""
    with core.reading() as session:
        counts = count(session)
    host = core.running
    activity, trouble = (Activity(), None) if host is None else (host.recorder.activity(), host.trouble)
    return RepositoryStats(counts, core.tiers.durable.bytes_stored, activity, trouble)


def _lines(found: RepositoryStats) -> Iterator[str]:
    counts, done = found.lineage, found.activity
    statuses = ", ".join(f"{number:,} {status}" for status, number in counts.statuses.items())
    states = plural(counts.states, "state") + f" ({statuses})" * bool(statuses)
    yield f"{states}, {plural(counts.branches, 'branch')}, {plural(counts.tags, 'tag')}"
    yield f"{size_text(found.bytes_stored)} in packs"
    if done != Activity():
        yield (
            f"here {plural(done.captures, 'capture')}: {size_text(done.bytes_copied)} copied, {size_text(done.bytes_new)} of it new; "
            f"{done.written:,} written, {size_text(done.bytes_written)} new on disk"
        )
    rare = (("skipped", done.skipped), ("failed", done.failed), ("tried again", done.retries), ("left memory", done.evicted))
    if done.snapshots:
        yield f"{plural(done.snapshots, 'capture')} stayed on the device, too"
    if any(number for _, number in rare):
        yield ", ".join(f"{number:,} {what}" for what, number in rare if number)
    for timing in done.timings:
        yield f"{timing.stage:>10}  {timing.count:>9,} x {timing.mean_s * 1e3:>10.3f} ms, at most {timing.most_s * 1e3:.3f} ms"
    if found.trouble is not None:
        yield found.trouble
