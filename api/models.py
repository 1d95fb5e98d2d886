"""What the API answers with, and what ``--json`` writes: plain values, one shape for both. The lineage's own are used as they are.

Numbers that JSON cannot say (NaN, infinities) are written as null.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from datastates.lineage.endings import Ending
from datastates.lineage.search.holders import Replica
from datastates.lineage.search.incomplete import Incomplete, Part
from datastates.lineage.show.branches import Branch, Branches, Life
from datastates.lineage.show.comparison import Comparison
from datastates.lineage.show.holdings import Held
from datastates.lineage.show.merges import Ingredient, Merge, Merges
from datastates.lineage.show.parallels import Parallels
from datastates.lineage.show.reports import Report, ReportDetail, ReportSample
from datastates.lineage.show.stats import Counts, KeyStats
from datastates.lineage.show.studies import Stage, Studies, Study, StudyDetail, StudyVariant
from datastates.lineage.states import Note, Ref, RefEvent, RefKind, Run, State, Status, Value

__all__ = [
    "Annotations",
    "Branch",
    "Branches",
    "CloneInfo",
    "Comparison",
    "Dropping",
    "Evicted",
    "Forecast",
    "Fork",
    "GraphPage",
    "GraphRow",
    "Held",
    "Incomplete",
    "Ingredient",
    "KeyStats",
    "Merge",
    "Merges",
    "NewNote",
    "NewRef",
    "Note",
    "NoteText",
    "Overview",
    "Page",
    "Parallels",
    "Part",
    "ProcessInfo",
    "Processes",
    "Ref",
    "RefEvent",
    "RefMove",
    "Replica",
    "Report",
    "ReportDetail",
    "ReportSample",
    "RepositoryInfo",
    "Run",
    "RunInfo",
    "Series",
    "SeriesLine",
    "ServerInfo",
    "Span",
    "Stage",
    "State",
    "StateDetail",
    "Stats",
    "Storage",
    "StoredPack",
    "Studies",
    "Study",
    "StudyDetail",
    "StudyVariant",
    "TensorInfo",
    "TrainingInfo",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of many, in order. ``next`` is the cursor of those that follow; None after the last."""

    items: tuple[T, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class RepositoryInfo:
    """One of the repositories that a server serves. ``scope`` is what the asker's token allows: read, write or admin."""

    name: str
    uid: str
    scope: str


# States


@dataclass(frozen=True, slots=True)
class StoredPack:
    """A file of tensor bytes that a state needs, in the folder of packs that is served."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDetail(State):
    """Everything that is known of one state. ``children`` are uids, oldest first; ``run_record`` is the training that captured it;
    ``notes`` are those on the state, newest first. ``parts`` are those of its ranks, none where one process captured all of it.
    """

    refs: tuple[Ref, ...]
    children: tuple[str, ...]
    replicas: tuple[Replica, ...]
    packs: tuple[StoredPack, ...]
    run_record: Run | None
    notes: tuple[Note, ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a state. ``tied_to`` is the path of the tensor whose bytes it shares; ``norm`` is there when it was asked for."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    tied_to: str | None = None
    norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo(Run):
    """A process that tracked, whether it still runs, and the branches whose newest states it captured, by name.

    ``ending`` is how it ended; null while it goes on, as far as is known.
    """

    life: Life
    branches: tuple[str, ...]
    ending: Ending | None = None


# What goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInfo:
    """A training that goes on: its run and branch, and the ``state`` that it captured last, null before the first.

    ``last`` is that branch's last value of the metric; ``steps_per_s`` goes over its latest captures.
    """

    uid: str
    branch: str | None
    started_at: datetime
    state: str | None
    step: int | None
    status: Status | None
    captured_at: datetime | None
    steps_per_s: float | None
    last: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process that tracks. ``beat_at`` is when its engine last said that it is at work, which it does once a second; null where its
    lease is not to be seen, and then ``life`` may be unknown.
    """

    uid: str
    host: str
    pid: int
    user: str
    argv: tuple[str, ...]
    started_at: datetime
    life: Life
    beat_at: datetime | None
    trainings: tuple[TrainingInfo, ...]


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that track just now, the last begun first, of ``total``; ``metric`` is that of the last values."""

    items: tuple[ProcessInfo, ...]
    total: int
    metric: str | None


@dataclass(frozen=True, slots=True)
class CloneInfo:
    """A state that came here from another process or folder: from where, to which node, and how many bytes moved for it."""

    id: int
    state: str
    step: int
    source: str
    node: str
    bytes_moved: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server of the process that answers: its address, the connections of now and ever, what it sent, and what it turned away."""

    url: str
    peers: int
    peers_ever: int
    bytes_sent: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What lies where. ``bytes_stored`` are the sizes of all packs in the folder that is served, on a disk of ``disk_total`` bytes.

    ``memory_used`` of ``memory_total`` bytes of the answering process hold states; null where it captures nothing itself. ``trouble`` is
    what keeps states of that process from being written, if anything does; of other processes nobody but they themselves knows.
    """

    bytes_stored: int
    disk_total: int | None
    disk_free: int | None
    memory_total: int | None
    memory_used: int | None
    tiers: tuple[Held, ...]
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Dropping:
    """A state that retention would drop: how many bytes would be free for it, and why it, in words."""

    state: str
    branch: str
    step: int
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would lose its bytes here if retention were applied now, in its order; ``total`` states would.

    ``policy`` is that of branches whose trainings asked for none; ``kept`` says how many states stay for each reason. Bytes are those
    of the files that states need, before and after.
    """

    policy: str
    items: tuple[Dropping, ...]
    total: int
    bytes_before: int
    bytes_after: int
    kept: dict[str, int]


# The graph


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One state, or a stretch of states that only follow one another, and the lines around it, as ``lineage.lanes.Row`` has them.

    ``lane`` is the state's column, counted from 0; ``above`` and ``below`` have a line just above and just below it; ``joins`` are other
    columns whose lines end here, and lead to children; ``parents`` are where its parents will stand, the first parent's first.
    ``branch``, and ``above_branches`` and ``below_branches`` for each of these lines, are keys of the page's ``branches``, -1 where
    no branch leads there. ``refs`` are the branches and tags that name the state now. A row of several states has their ``count``, how
    many of them can be restored (null: not counted), the ``oldest`` of them, and the newest as its ``state``.
    """

    state: State
    lane: int
    above: tuple[int, ...]
    below: tuple[int, ...]
    joins: tuple[int, ...]
    parents: tuple[int, ...]
    branch: int = -1
    above_branches: tuple[int, ...] = ()
    below_branches: tuple[int, ...] = ()
    refs: tuple[Ref, ...] = ()
    count: int = 1
    restorable: int | None = None
    oldest: str | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Where a branch stands in a drawing: its column, its first and last row, and the row that it was forked from, if any."""

    branch: str
    lane: int
    first: int
    last: int
    forked: int | None


@dataclass(frozen=True, slots=True)
class Overview:
    """A whole drawing in small: a span for each branch. Rows are those of ``GraphPage`` with the same ``version``."""

    version: str
    total: int
    lanes: int
    states: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class GraphPage:
    """A window of the history of ``heads``, newest first. ``first`` is the index of its first row, ``total`` how many rows there are.

    ``lanes`` is how many columns the whole graph needs. ``version`` changes when the graph or a name does: rows of two versions do not
    fit together. ``branches`` are those that its rows speak of, ``states`` how many states the rows of the whole graph stand for.
    Where ``is_current`` is false the heads have moved on meanwhile, and a large graph is being drawn anew: ask again in some seconds.
    """

    heads: tuple[str, ...]
    version: str
    first: int
    total: int
    lanes: int
    rows: tuple[GraphRow, ...]
    is_current: bool = True
    branches: dict[int, str] = field(default_factory=dict)
    states: int = 0


# Curves


@dataclass(frozen=True, slots=True)
class SeriesLine:
    """One metric along the first parents of ``head``, steps rising. ``total`` points there are; these are those that a curve needs.

    ``xs`` are where the points stand when they were asked for over something else than steps: seconds since 1970, or epochs; None where
    a state says none. With times ``began`` is when the first state was captured that belongs to the head's branch. ``group`` is what
    the head's state has of what curves were to be grouped by.
    """

    head: str
    state: str
    key: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    uids: tuple[str, ...]
    total: int
    xs: tuple[float | None, ...] = ()
    began: float | None = None
    group: Value = None


@dataclass(frozen=True, slots=True)
class Fork:
    """The state where the paths of some heads part."""

    state: str
    step: int
    heads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Curves of several heads, and where they fork."""

    lines: tuple[SeriesLine, ...]
    forks: tuple[Fork, ...]


# The whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Counts):
    """What a repository holds, and its newest state. ``bytes_stored`` are the sizes of all packs in its folder."""

    bytes_stored: int
    newest: State | None


# What is sent


@dataclass(frozen=True, slots=True)
class NewRef:
    """A branch or a tag to make at ``rev``."""

    kind: RefKind
    rev: str
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RefMove:
    """The state at which a ref is to point."""

    rev: str


@dataclass(frozen=True, slots=True)
class NewNote:
    """A note to write, in Markdown: of a state (by its uid) or of a branch. ``author`` is who says that they wrote it."""

    text: str
    state: str | None = None
    branch: str | None = None
    author: str = ""


@dataclass(frozen=True, slots=True)
class NoteText:
    """The text that a note is to have."""

    text: str


@dataclass(frozen=True, slots=True)
class Annotations:
    """Attributes to set; None takes one away."""

    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Evicted:
    """A state whose bytes were dropped here, and how many of them nobody else needed."""

    uid: str
    bytes: int
