"""A repository in a notebook: how much it holds, where its branches stand, and its newest states
as a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from datastates.lineage.states import Ref, State
from datastates.lineage.views.branches import Summary, summary
from datastates.lineage.views.cards import code, table_html, text
from datastates.lineage.views.detail import Counts, count
from datastates.lineage.views.html import graph_html, states_html
from datastates.lineage.views.text import (
    age_text,
    metrics_text,
    plural,
    short,
    size_text,
    step_text,
)
from datastates.maintenance.core import Core
from datastates.system.telemetry import Activity

from .errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd


_HEADS = 20
_NEWEST = 30
_METRICS = 100


def repository_html(core: Core) -> str:
    """HTML that uses the notebook's colours; for a closed repository only its name."""
    name = f"<p><strong>datastates</strong> {code(core.location)}"
    if core.is_closed:
        return f"{name}, closed</p>"
    with core.reading() as session:
        found = summary(session, heads=_HEADS, newest=_NEWEST)
    counts = (
        _count(found.states, "state"),
        _count(found.branches, "branch", "branches"),
        _count(found.tags, "tag"),
    )
    return f"{name}: {', '.join(counts)}</p>{_heads(found)}{_graph(found)}"


def _heads(found: Summary) -> str:
    if not found.heads:
        return ""
    made = table_html(
        ("branch", "head", "step", "metrics", "captured"),
        (_head(ref, state) for ref, state in found.heads),
    )
    more = found.branches - len(found.heads)
    return made + (f"<p>and {_count(more, 'more branch', 'more branches')}</p>" if more else "")


def _head(ref: Ref, state: State) -> tuple[str, ...]:
    return (
        f"<strong>{text(ref.name, most=60)}</strong>",
        code(short(state.uid)),
        text(step_text(state)),
        text(metrics_text(state.metrics, state.world_size), most=_METRICS),
        text(age_text(state.created_at)),
    )


def _graph(found: Summary) -> str:
    if not found.newest:
        return "<p>nothing was captured yet</p>"
    more = found.states - len(found.newest)
    return graph_html(found.newest, found.named) + (
        f"<p>and {_count(more, 'older state')}</p>" if more else ""
    )


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


# States as a list that a notebook shows as a table, and that pandas takes as a frame.


class States(list[State]):
    """A list of states; a slice of it is one too."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> State: ...
    @overload
    def __getitem__(self, index: slice, /) -> States: ...
    def __getitem__(self, index: Any, /) -> State | States:
        found = super().__getitem__(index)
        return found if isinstance(found, State) else States(found)

    def frame(self) -> pd.DataFrame:
        """The states as a pandas frame, one row for each by uid; see ``frame``.

        :raises Unsupported: pandas is not installed.
        """
        return frame(self)

    def _repr_html_(self) -> str:
        return states_html(self)


def frame(states: Sequence[State]) -> pd.DataFrame:
    """A frame with one row for each state, indexed by uid, in their order; columns are named as in
    a query: ``metrics.loss``, ``attr.seed``, ``config.lr``.

    A metric that a state lacks is NaN, an attribute or a setting None; ``parent`` is the first
    parent, and the time is in UTC.

    :raises Unsupported: pandas is not installed.
    """
    try:
        import pandas as pd  # takes half a second, so only callers that ask pay for it
    except ImportError as exc:
        raise Unsupported(
            "a frame needs pandas, which is not installed: pip install pandas"
        ) from exc
    columns: dict[str, Any] = {
        "step": pd.Series([state.step for state in states], dtype="int64"),
        "created": pd.Series([state.created_at for state in states], dtype="datetime64[us, UTC]"),
        "status": [state.status.value for state in states],
        "message": [state.message for state in states],
        "parent": [state.parents[0] if state.parents else None for state in states],
        "run": [state.run for state in states],
        "bytes_total": pd.Series([state.bytes_total for state in states], dtype="int64"),
        "bytes_new": pd.Series([state.bytes_new for state in states], dtype="int64"),
    }
    for key in sorted({key for state in states for key in state.metrics}):
        columns[f"metrics.{key}"] = pd.Series(
            [state.metrics.get(key) for state in states], dtype="float64"
        )
    for key in sorted({key for state in states for key in state.attributes}):
        columns[f"attr.{key}"] = pd.Series(
            [state.attributes.get(key) for state in states], dtype="object"
        )
    for key in sorted({key for state in states for key in state.config}):
        columns[f"config.{key}"] = pd.Series(
            [state.config.get(key) for state in states], dtype="object"
        )
    made = pd.DataFrame(columns)
    made.index = pd.Index([state.uid for state in states], name="uid")
    return made


# A repository in numbers: what its lineage holds, and what this process did.


@dataclass(frozen=True, slots=True)
class RepositoryStats:
    """``lineage`` is what all processes recorded, ``bytes_stored`` is what its packs take on disk.

    ``activity`` is that of this process alone, since it opened the repository. ``trouble`` is what
    keeps it from writing, if anything does. ``waiting`` copies to further tiers were not tried yet.
    """

    lineage: Counts
    bytes_stored: int
    activity: Activity
    trouble: str | None
    waiting: int = 0

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def stats(core: Core) -> RepositoryStats:
    """Count everything; waits for the captures so far to be recorded."""
    with core.reading() as session:
        counts = count(session)
    host = core.running
    activity, trouble = (
        (Activity(), None) if host is None else (host.recorder.activity(), host.trouble)
    )
    waiting = 0 if host is None else host.copies.pending
    return RepositoryStats(counts, core.tiers.durable.bytes_stored, activity, trouble, waiting)


def _lines(found: RepositoryStats) -> Iterator[str]:
    counts, done = found.lineage, found.activity
    statuses = ", ".join(f"{number:,} {status}" for status, number in counts.statuses.items())
    states = plural(counts.states, "state") + f" ({statuses})" * bool(statuses)
    yield f"{states}, {plural(counts.branches, 'branch')}, {plural(counts.tags, 'tag')}"
    yield f"{size_text(found.bytes_stored)} in packs"
    if done != Activity():
        yield (
            f"here {plural(done.captures, 'capture')}: {size_text(done.bytes_copied)} copied,"
            f" {size_text(done.bytes_new)} of it new; {done.written:,} written,"
            f" {size_text(done.bytes_written)} new on disk"
        )
    if done.copied or done.copies_failed or found.waiting:
        yield (
            f"{done.copied:,} copied to further tiers, {size_text(done.bytes_further)} new there,"
            f" {done.requests:,} requests; {done.copies_failed:,} failed, {found.waiting:,} waiting"
        )
    rare = (
        ("skipped", done.skipped),
        ("failed", done.failed),
        ("tried again", done.retries),
        ("left memory", done.evicted),
    )
    if done.snapshots:
        yield f"{plural(done.snapshots, 'capture')} stayed on the device, too"
    if any(number for _, number in rare):
        yield ", ".join(f"{number:,} {what}" for what, number in rare if number)
    for timing in done.timings:
        yield (
            f"{timing.stage:>10}  {timing.count:>9,} x {timing.mean_s * 1e3:>10.3f} ms, at most"
            f" {timing.most_s * 1e3:.3f} ms"
        )
    if found.trouble is not None:
        yield found.trouble
