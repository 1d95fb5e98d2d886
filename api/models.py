"""The records of the API and of ``--json``: plain values, one shape for both. Records of the
lineage are used as they are.

Numbers that JSON cannot express (NaN, infinities) are written as null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from datastates.lineage import lookup
from datastates.lineage.query import walk
from datastates.lineage.query.incomplete import Part, parts_of
from datastates.lineage.query.names import Replica, notes, reflog, replicas_of
from datastates.lineage.states import (
    Ending,
    Life,
    Note,
    Ref,
    RefEvent,
    RefKind,
    Run,
    State,
    Status,
    ending_of,
)
from datastates.lineage.views import detail
from datastates.lineage.views.branch_rows import branches_of
from datastates.lineage.views.detail import Counts, Held
from datastates.lineage.write import runs
from datastates.maintenance.lease import PackFolder, life_of
from datastates.values import Value

if TYPE_CHECKING:
    from datastates.lineage.session import Session
    from datastates.state.manifest import PackInfo
    from datastates.storage.tier import Reader

T = TypeVar("T")

_EVER = 2**62
"""The log of most states has no line. With this bound, that is no error."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some of many, in order. ``next`` is the cursor for those that follow; None after the last."""

    items: tuple[T, ...]
    next: str | None


@dataclass(frozen=True, slots=True)
class RepositoryInfo:
    """One of the repositories that a server serves.

    ``scope`` is what the client's token allows: read, write or admin. ``location`` and ``packs``
    are the arguments of ``datastates.open`` on the server's machine. A token that only reads does
    not get them. ``packs`` is null where ``location`` is a folder."""

    name: str
    uid: str
    scope: str
    location: str | None = None
    packs: str | None = None


# States


@dataclass(frozen=True, slots=True)
class StoredPack:
    """A file of tensor bytes that a state needs, in the folder of packs that is served."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDetail(State):
    """Everything that is known of one state. ``children`` are uids, oldest first. ``origins`` has
    the branches to which it and its children belong, by uid: those that captured them.
    ``run_record`` is the training that captured it. ``notes`` are those on the state, newest first.
    ``parts`` has one part for each rank; none if one process captured all of it. ``added`` is the
    log of the metrics that were added after the capture, newest first. ``nearest`` is the nearest
    state by steps that can be restored, if the bytes of this one are gone: an ancestor, or a later
    state of its branch.
    """

    refs: tuple[Ref, ...]
    children: tuple[str, ...]
    origins: dict[str, str]
    replicas: tuple[Replica, ...]
    packs: tuple[StoredPack, ...]
    run_record: Run | None
    notes: tuple[Note, ...] = ()
    parts: tuple[Part, ...] = ()
    added: tuple[RefEvent, ...] = ()
    nearest: State | None = None


def detail_of(session: Session, uid: str, packs: Sequence[PackInfo] = ()) -> StateDetail:
    """The state of this uid, and everything that refers to it; ``packs`` are the files that it
    needs here.

    :raises NotFound: there is no such state.
    """
    state = lookup.state(session, uid)
    children = tuple(detail.child_uids(session, uid))
    return StateDetail(
        **_fields_of(state),
        refs=tuple(detail.refs_at(session, uid)),
        children=children,
        origins=branches_of(session, [uid, *children]),
        replicas=tuple(replicas_of(session, uid)),
        packs=tuple(
            StoredPack(pack.name, pack.size) for pack in sorted(packs, key=lambda pack: pack.name)
        ),
        run_record=None if state.run is None else runs.get(session, state.run),
        notes=tuple(notes(session, state=uid)),
        added=tuple(reflog(session, uid, before=_EVER)),
        parts=tuple(parts_of(session, uid)) if state.world_size > 1 else (),
        nearest=None if state.status.is_restorable else _nearest(session, state),
    )


def _nearest(session: Session, state: State) -> State | None:
    earlier = walk.nearest_restorable(session, state.uid)
    later = next(walk.later_restorable(session, state.uid), None)
    around = [earlier, None if later is None else lookup.state(session, later)]
    return min(filter(None, around), key=lambda one: abs(one.step - state.step), default=None)


def _fields_of(record: State | Run | Counts) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a state.

    ``tied_to`` is the path of the tensor whose bytes it shares; ``norm`` is set if it was
    requested."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    tied_to: str | None = None
    norm: float | None = None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file that was captured with a state. ``type`` is a picture's media type by its content, and
    ``application/octet-stream`` for any other file."""

    name: str
    bytes: int
    type: str


def file_infos(reader: Reader) -> tuple[FileInfo, ...]:
    """The files of an open state.

    :raises Corrupt: they are damaged.
    """
    from datastates.thumbnails import files_of, media_type  # imports torch

    return tuple(
        FileInfo(name, len(content), media_type(content) or "application/octet-stream")
        for name, content in files_of(reader).items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo(Run):
    """A process that tracked, whether it still runs, and the names of the branches whose newest
    states it captured.

    ``ending`` is how it ended. It is null while the process runs, as far as is known.
    """

    life: Life
    branches: tuple[str, ...]
    ending: Ending | None = None


def run_infos(session: Session, found: Sequence[Run], home: PackFolder) -> list[RunInfo]:
    """Describe these runs, in their order. ``home`` is the folder with their leases."""
    heads = runs.branches_of(session, [run.uid for run in found])
    died = runs.died(session, {run.process for run in found if run.process is not None})
    made = []
    for run in found:
        life = life_of(run, home)
        ending = ending_of(run, died, is_over=life is Life.ENDED)
        branches = tuple(heads.get(run.uid, ()))
        made.append(RunInfo(**_fields_of(run), life=life, branches=branches, ending=ending))
    return made


# What is running now


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInfo:
    """A running training: its run and branch, and the ``state`` that it captured last, null
    before the first.

    ``last`` is the branch's last value of the metric; ``steps_per_s`` is measured over its latest
    captures.
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
    """A process that tracks. ``beat_at`` is when its engine last reported that it is at work, which
    it does once a second. It is null where the process's lease cannot be seen; ``life`` may then be
    unknown.
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
    """The processes that are tracking now, the last begun first, out of ``total``; ``metric`` is
    the metric of the last values."""

    items: tuple[ProcessInfo, ...]
    total: int
    metric: str | None


@dataclass(frozen=True, slots=True)
class CloneInfo:
    """A state that came here from another process or folder: from where, to which node, and how
    many bytes were moved for it."""

    id: int
    state: str
    step: int
    source: str
    node: str
    bytes_moved: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server of the answering process: its address, its current and total connections, what it
    sent, and what it turned away."""

    url: str
    peers: int
    peers_ever: int
    bytes_sent: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What is stored where. ``bytes_stored`` is the size of all packs in the folder that is served,
    on a disk of ``disk_total`` bytes.

    ``memory_used`` of ``memory_total`` bytes of the answering process hold states; null if it
    captures nothing itself. ``trouble`` is what keeps states of that process from being written, if
    anything does; other processes are the only ones to know theirs.
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
    """A state that retention would drop: how many bytes that would free, and in words why this
    state."""

    state: str
    branch: str
    step: int
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """The states that would lose their bytes here if retention were applied now, in order.
    ``total`` is their number.

    ``policy`` applies to branches whose trainings have no policy. ``kept`` is the number of states
    that stay, by reason. The bytes are the sizes of the files that states need, before and after.
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
    """One state, or a stretch of states that only follow one another, and the lines around it, as
    ``lineage.show.lanes.Row`` has them.

    ``lane`` is the state's column, counted from 0. ``above`` and ``below`` are the columns with a
    line just above and just below it. ``joins`` are other columns whose lines end here, and lead to
    children. ``parents`` are the columns where its parents will stand, the first parent's first.
    ``branch``, and ``above_branches`` and ``below_branches`` for each of these lines, are keys of
    the page's ``branches``, or -1 where no branch leads there. ``refs`` are the branches and tags
    that name the state now. A row of several states has their ``count``, how many of them can be
    restored (null: not counted), the ``oldest`` of them, and the newest as its ``state``.
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
    """The place of a branch in a drawing: its column, its first and last row, and the row that
    it was forked from, if any."""

    branch: str
    lane: int
    first: int
    last: int
    forked: int | None


@dataclass(frozen=True, slots=True)
class Overview:
    """An overview of a whole drawing: a span for each branch.

    The rows are the same as in a ``GraphPage`` with the same ``version``."""

    version: str
    total: int
    lanes: int
    states: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class GraphPage:
    """A window of the history of ``heads``, newest first. ``first`` is the index of its first row,
    ``total`` how many rows there are.

    ``lanes`` is how many columns the whole graph needs. ``version`` changes when the graph or a
    name does: rows of different versions do not fit together. ``branches`` are those that its rows
    refer to. ``states`` is the number of states in all rows of the graph. If ``is_current``
    is false, the heads have moved on meanwhile and a large graph is being redrawn: ask again in
    some seconds.
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
    """One metric along the first parents of ``head``, steps rising. Out of ``total`` points these
    are the ones that a curve needs.

    ``xs`` are the positions of the points if the axis is not steps: seconds since 1970, or
    epochs. It is None where a state has none. With times, ``began`` is when the
    first state that belongs to the head's branch was captured. ``group`` is the value that the
    head's state has for the requested grouping.
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
    """The state where the paths of some heads fork."""

    state: str
    step: int
    heads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Curves of several heads, and where they fork.

    ``lost`` are the steps that the branches among the heads lost with a process that died: separate
    lines, with the same ``head``, each from the state at which the branch resumed.
    """

    lines: tuple[SeriesLine, ...]
    forks: tuple[Fork, ...]
    lost: tuple[SeriesLine, ...] = ()


# The whole repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(Counts):
    """What a repository holds, and its newest state.

    ``bytes_stored`` is the size of all packs in its folder."""

    bytes_stored: int
    newest: State | None


def stats_of(session: Session, counts: Counts, bytes_stored: int) -> Stats:
    """The counts, as last known, with the newest state of now."""
    newest = detail.newest_stats(session)
    return Stats(**_fields_of(counts), bytes_stored=bytes_stored, newest=newest)


# Request bodies


@dataclass(frozen=True, slots=True)
class NewRef:
    """A branch or a tag to create at ``rev``."""

    kind: RefKind
    rev: str
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RefMove:
    """The state to which a ref should point."""

    rev: str


@dataclass(frozen=True, slots=True)
class NewNote:
    """A note to write, in Markdown, on a state (by its uid) or on a branch.

    ``author`` is the name that the writer gives."""

    text: str
    state: str | None = None
    branch: str | None = None
    author: str = ""


@dataclass(frozen=True, slots=True)
class NoteText:
    """The new text of a note."""

    text: str


@dataclass(frozen=True, slots=True)
class Annotations:
    """Attributes to set; None removes one."""

    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Evicted:
    """A state whose bytes were dropped here, and how many of those bytes no other state needed."""

    uid: str
    bytes: int
