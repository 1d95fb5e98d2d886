"""The values that the lineage takes and returns: plain values, without SQL and without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from datastates import values
from datastates.errors import InvalidInput
from datastates.system import logs
from datastates.values import Value

EXACT_INT = 2**53
"""Floats hold all integers up to here exactly."""


class Status(StrEnum):
    """The safety of a state's bytes.

    ``evicted`` and ``lost`` states keep their place in the lineage, without bytes."""

    CAPTURED = "captured"
    DURABLE = "durable"
    REPLICATED = "replicated"
    EXTERNAL = "external"
    EVICTED = "evicted"
    LOST = "lost"

    @property
    def is_restorable(self) -> bool:
        """Whether some tier still holds the bytes."""
        return self not in (Status.EVICTED, Status.LOST)


GONE = [status.value for status in Status if not status.is_restorable]
"""The statuses of states without bytes, as the database has them."""


class Why(StrEnum):
    """Why a state of several ranks was given up: what became of the part of one rank.

    - ``skipped``: the rank had no memory for its part
    - ``torn``: the sources changed while they were copied
    - ``failed``: another error occurred
    - ``late``: the rank reported nothing for too long
    - ``gone``: the part was lost with its process
    - ``refused``: all parts were there, and the lineage refused the state
    """

    SKIPPED = "skipped"
    TORN = "torn"
    FAILED = "failed"
    LATE = "late"
    GONE = "gone"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A state of several parts that will never be complete: which rank is the cause, and why."""

    uid: str
    rank: int
    why: Why
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.why}): {self.reason}"


class RefKind(StrEnum):
    """A branch moves with captures, a tag does not."""

    BRANCH = "branch"
    TAG = "tag"


class EdgeKind(StrEnum):
    """Why a state has a further parent after the first one."""

    MERGE = "merge"
    SOUP = "soup"
    CLONE = "clone"


@dataclass(frozen=True, slots=True)
class Edge:
    """A further parent: its uid, the kind of edge, and its weight."""

    parent: str
    kind: EdgeKind
    weight: float = 1.0


OURS = "datastates."
"""The prefix of the settings in a run's configuration that nobody chose: which process it was,
where its files were."""


DIED = f"{OURS}died"
"""True in the configuration of a process that ended without saying so, once another process has
found that out."""


GIT_ROOT = f"{OURS}git_root"
GIT_REMOTE = f"{OURS}git_remote"
"""In the configuration of a run: the folder of the checkout that its main script is in, and the
URL that it came from."""


SAVES = f"{OURS}saves"
"""True in the configuration of a training that only saves trees: it holds its branch during each
save, not between two."""


TAKEN = f"{OURS}taken_over"
"""In the configuration of a training whose branch another process took over: that process, as
people read it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training of a process: its branch, its user and host, its code and configuration.

    ``process`` is the uid of the run of the whole process. That run has no ``process`` itself; it
    made the states that no training captured, such as merges. ``is_imported``: its record came with
    states of another lineage. Then ``branch`` is the name there.
    """

    uid: str
    host: str
    user: str
    pid: int
    argv: tuple[str, ...]
    git_commit: str | None
    git_dirty: bool | None
    config: dict[str, Value]
    versions: dict[str, str]
    started_at: datetime
    finished_at: datetime | None = None
    process: str | None = None
    branch: str | None = None
    is_imported: bool = False

    @property
    def chosen(self) -> dict[str, Value]:
        """The part of its configuration that a user chose."""
        return {key: value for key, value in self.config.items() if not key.startswith(OURS)}


@dataclass(frozen=True, slots=True)
class StateFacts:
    """The facts about a state before its bytes are there: its identity, its place in the graph, and
    what the user gave with it.

    ``parent`` is the uid of the first parent; ``edges`` are the further ones. ``branch`` is the
    branch that moves to the state, if any. ``created_at`` is None for the moment of recording.
    ``config`` is the configuration of the run.
    """

    uid: str
    parent: str | None
    branch: str | None
    run: str | None
    step: int
    micro_step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    message: str | None = None
    created_at: datetime | None = None
    edges: tuple[Edge, ...] = ()
    world_size: int = 1
    config: dict[str, Value] = field(default_factory=dict)

    @property
    def parents(self) -> tuple[str, ...]:
        """The uids of all parents, the first parent first."""
        first = () if self.parent is None else (self.parent,)
        return (*first, *(edge.parent for edge in self.edges)) if self.edges else first


@dataclass(frozen=True, slots=True)
class State:
    """An immutable snapshot; a node of the lineage. ``parents`` are uids, the first parent first.
    ``config`` is the configuration of its run.

    ``bytes_new`` is the part of ``bytes_total`` that this state added: to the disk once it is
    durable, until then to the memory of its process.
    """

    uid: str
    digest: str
    step: int
    micro_step: int
    metrics: dict[str, float]
    attributes: dict[str, Value]
    message: str | None
    created_at: datetime
    status: Status
    parents: tuple[str, ...]
    edges: tuple[Edge, ...]
    run: str | None
    generation: int
    bytes_total: int
    bytes_new: int
    world_size: int = 1
    config: dict[str, Value] = field(default_factory=dict)

    @property
    def facts(self) -> StateFacts:
        """The facts of this state, for recording it elsewhere; no branch moves to it there."""
        return StateFacts(
            uid=self.uid,
            parent=self.parents[0] if len(self.parents) > len(self.edges) else None,
            branch=None,
            run=self.run,
            step=self.step,
            micro_step=self.micro_step,
            metrics=self.metrics,
            attributes=self.attributes,
            message=self.message,
            created_at=self.created_at,
            edges=self.edges,
            world_size=self.world_size,
            config=self.config,
        )

    def _repr_html_(self) -> str:
        from datastates.lineage.views.cards import state_html  # only notebooks ask

        return state_html(self)


Revision = Annotated[str | State, values.revision]
"""What names one state."""


@dataclass(frozen=True, slots=True)
class NewState:
    """A state for ``record``: its facts, and what has become of its bytes. The branch moves from
    the first parent to it.

    ``tier`` and ``node`` are the place of its bytes, if they are anywhere.
    """

    facts: StateFacts
    digest: str
    status: Status = Status.CAPTURED
    bytes_total: int = 0
    bytes_new: int = 0
    tier: str = ""
    node: str = ""

    @property
    def uid(self) -> str:
        """The uid of the state."""
        return self.facts.uid

    def without_branch(self) -> NewState:
        """The same state, but no branch moves to it."""
        return replace(self, facts=replace(self.facts, branch=None))


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or a tag. ``version`` counts its moves; ``move`` compares and swaps on ``state``."""

    name: str
    kind: RefKind
    state: str
    version: int
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RefEvent:
    """One line of the reflog: ``old`` is None when the ref was made, ``new`` is None when it was
    deleted."""

    id: int
    name: str
    kind: RefKind
    old: str | None
    new: str | None
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Note:
    """A text about a state or a branch, in Markdown. One of ``state`` (a uid) and ``branch`` is
    given.

    ``author`` is the name that the writer gave; it is not verified. ``edited_at`` is None if the
    note was never changed.
    """

    uid: str
    state: str | None
    branch: str | None
    author: str
    text: str
    created_at: datetime
    edited_at: datetime | None = None


# How trainings ended: what is recorded with a run when it ends, and how that is read later.


_HOW = f"{OURS}ended"
_ERROR = f"{OURS}error"
_STEP = f"{OURS}ended_at_step"
_SIGNALLED = {128 + number for number in (1, 2, 15)}  # exit codes of SIGHUP, SIGINT and SIGTERM
_LONGEST = 200  # characters kept of an error's message


class How(StrEnum):
    """How a training ended."""

    ENDED = "ended"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a training ended. If it failed or was interrupted, ``step`` is the step that it had
    reached; if it failed, ``error`` is the class of the error and the first line of its message.
    """

    how: How
    error: str | None = None
    step: int | None = None


def facts_of(error: BaseException | None, step: int) -> dict[str, Value]:
    """What is recorded of a training that an error ended at a step; nothing for one that ended
    well."""
    how = _how(error)
    if error is None or how is How.ENDED:
        return {}
    facts: dict[str, Value] = {_HOW: how.value, _STEP: step}
    return {**facts, _ERROR: _said(error)} if how is How.FAILED else facts


def ending_of(run: Run, died: Mapping[str, datetime], *, is_over: bool) -> Ending | None:
    """How a run ended; None if it is running, or may be. ``is_over``: its process is known to have
    ended.

    :param died: when processes were found dead, by uid: their trainings that were not over by then
        ended with them.
    """
    if run.finished_at is None:
        return Ending(How.KILLED) if is_over else None
    how, error, step = (run.config.get(key) for key in (_HOW, _ERROR, _STEP))
    if how in (How.FAILED, How.INTERRUPTED):
        return Ending(
            How(how),
            error if isinstance(error, str) else None,
            step if isinstance(step, int) else None,
        )
    was_killed = run.config.get(DIED) is True or (
        run.process is not None and died.get(run.process) == run.finished_at
    )
    return Ending(How.KILLED if was_killed else How.ENDED)


def _how(error: BaseException | None) -> How:
    match error:
        case None:
            return How.ENDED
        case SystemExit():
            if not error.code:
                return How.ENDED
            return How.INTERRUPTED if error.code in _SIGNALLED else How.FAILED
        case Exception():
            return How.FAILED
        case _:  # Ctrl-C, a cancelled task
            return How.INTERRUPTED


def _said(error: BaseException) -> str:
    """The class of an error and the first line of its message, without secrets and without
    anything that a database could refuse."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # an error of the user's, whose methods may do anything
        text = ""
    name = type(error).__name__
    shown = "".join(
        each if each.isprintable() else " "
        for each in logs.text(f"{name}: {text}" if text else name)
    )
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


# The summary of a series of values of one metric: how many, their extremes, ends and sum, and the
# states of those.


STATES = 64
"""How many generations one stretch of a curve covers."""

_SHIFT = 6

WHOLE = -1
"""The place of the stretch that covers all states of a segment."""


def place_of(generation: int) -> int:
    """The place of the stretch that contains a state of this generation."""
    return generation >> _SHIFT


@dataclass(slots=True)
class Tally:
    """``count`` values, of which ``gaps`` are not finite; the sum and the extremes leave those out.
    The earliest of equal extremes counts.

    States are row ids. ``first`` and ``last`` are None where they are NaN; ``gap_id`` is the first
    state whose value is a gap.
    """

    count: int = 0
    gaps: int = 0
    total: float = 0.0
    least: float | None = None
    least_id: int | None = None
    most: float | None = None
    most_id: int | None = None
    first: float | None = None
    first_id: int | None = None
    last: float | None = None
    last_id: int | None = None
    gap_id: int | None = None

    def add(self, id_: int, value: float | None) -> None:
        """Add a later state's value; None and NaN are the same."""
        value = None if value is None or math.isnan(value) else value
        self.count += 1
        self.last, self.last_id = value, id_
        if self.first_id is None:
            self.first, self.first_id = value, id_
        if value is None or math.isinf(value):
            self.gaps += 1
            self.gap_id = self.gap_id or id_
            return
        self.total += value
        if self.least is None or value < self.least:
            self.least, self.least_id = value, id_
        if self.most is None or value > self.most:
            self.most, self.most_id = value, id_

    def extend(self, later: Tally) -> None:
        """Add everything of another tally, which comes after this one."""
        if not later.count:
            return
        self.count += later.count
        self.gaps += later.gaps
        self.total += later.total
        self.last, self.last_id = later.last, later.last_id
        self.gap_id = self.gap_id or later.gap_id
        if self.first_id is None:
            self.first, self.first_id = later.first, later.first_id
        if later.least is not None and (self.least is None or later.least < self.least):
            self.least, self.least_id = later.least, later.least_id
        if later.most is not None and (self.most is None or later.most > self.most):
            self.most, self.most_id = later.most, later.most_id

    def row(self) -> dict[str, float | None]:
        """Its fields by name, as in the table of stretches."""
        return dict(zip(PLACES, astuple(self), strict=True))


PLACES = tuple(field.name for field in fields(Tally))
"""The columns of a tally, in order."""


# Plain values as typed columns, for attributes and settings: ``number`` for numbers and booleans,
# ``text`` for strings.


def columns_of(key: str, value: Value, what: str) -> dict[str, object]:
    """The columns for a value, by its name; ``what`` is the noun for it in messages.

    :raises InvalidInput: it cannot be stored.
    """
    type_, number, text = "none", None, None
    match value:
        case str():
            type_, text = "str", values.text(value, f"{what} {key!r}")
        case bool():
            type_, number = "bool", float(value)
        case int():
            values.plain(value, f"{what} {key!r}")  # at most 64 bits
            type_, number, text = (
                "int",
                float(value),
                None if abs(value) <= EXACT_INT else str(value),
            )
        case float():
            type_, number = "float", None if math.isnan(value) else value
        case None:
            pass
        case _:
            raise InvalidInput(
                f"{what} {key!r} is a {type(value).__name__}: store a str, int, float, bool or None"
            )
    return {"key": key, "type": type_, "number": number, "text": text}


def value_of(type_: str, number: float | None, text: str | None) -> Value:
    """The stored value, as it was given."""
    match type_:
        case "str":
            return text
        case "int":
            return int(text) if text is not None else int(number or 0)
        case "bool":
            return bool(number)
        case "float":
            return math.nan if number is None else number
    return None


class Life(StrEnum):
    """Whether the process of a branch's training runs or has ended, or whether that is unknown
    here."""

    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"
