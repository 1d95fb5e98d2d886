"""The values that the lineage hands out and takes in: plain values, no SQL, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

__all__ = [
    "DIED",
    "OURS",
    "Edge",
    "EdgeKind",
    "GivenUp",
    "NewState",
    "Note",
    "Ref",
    "RefEvent",
    "RefKind",
    "Run",
    "State",
    "StateFacts",
    "Status",
    "Value",
    "Why",
]

Value = str | int | float | bool | None
"""What an attribute may hold."""


class Status(StrEnum):
    """The safety of a state's bytes. ``evicted`` and ``lost`` states keep their place in the lineage, without bytes."""

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


class Why(StrEnum):
    """What became of the part of one rank, so that the state of all of them is given up.

    It had no room; what it copied was changed meanwhile; another error; it told nothing for too long; it went with its process. Or the
    lineage refused the state, although all parts were there.
    """

    SKIPPED = "skipped"
    TORN = "torn"
    FAILED = "failed"
    LATE = "late"
    GONE = "gone"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A state of several parts that will never be whole: because of which rank, and why."""

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
    """The reason why a state has a further parent, beside the first one."""

    MERGE = "merge"
    SOUP = "soup"
    CLONE = "clone"


@dataclass(frozen=True, slots=True)
class Edge:
    """A further parent: its uid, why, and with what weight."""

    parent: str
    kind: EdgeKind
    weight: float = 1.0


OURS = "datastates."
"""How the names begin of what a run's configuration says that nobody chose: which process it was, where its files were."""


DIED = f"{OURS}died"
"""True in the configuration of a process that ended without saying so, once somebody has found out."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training of a process: its branch, its user and host, its code and configuration.

    ``process`` is the uid of the run that stands for the whole process, which has none itself: it made what no training captured,
    such as merges.
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

    @property
    def chosen(self) -> dict[str, Value]:
        """What of its configuration somebody chose."""
        return {key: value for key, value in self.config.items() if not key.startswith(OURS)}


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What is known of a state before its bytes are: its identity, its place in the graph, and what was said of it.

    ``parent`` is the uid of the first parent, ``edges`` are the further ones. ``branch`` is the one that moves to the state, if any.
    ``created_at`` may be left out: it is then the moment at which the state is recorded. ``config`` is what the run's record says.
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
    """An immutable snapshot; a node of the lineage. ``parents`` are uids, the first parent first. ``config`` is the configuration of
    its run.

    ``bytes_new`` are those of ``bytes_total`` that it added: to the disk once it is durable, before that to the memory of its process.
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
        """The facts of this state for recording it elsewhere; no branch is moved to it there."""
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
        from .show.card import state_html  # only notebooks ask

        return state_html(self)


@dataclass(frozen=True, slots=True)
class NewState:
    """A state for ``record``: its facts, and what has become of its bytes. The branch moves from the first parent to it.

    ``tier`` and ``node`` are where its bytes are, if they are anywhere.
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
        """Whose facts these are."""
        return self.facts.uid

    def without_branch(self) -> NewState:
        """The same state, to which no branch moves."""
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
    """One line of the reflog: ``old`` is None when the ref was made, ``new`` is None when it was deleted."""

    id: int
    name: str
    kind: RefKind
    old: str | None
    new: str | None
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Note:
    """What somebody wrote of a state or of a branch, in Markdown: one of ``state`` (a uid) and ``branch`` is given.

    ``author`` is who said that they wrote it: nobody checks that. ``edited_at`` is None of what was never changed.
    """

    uid: str
    state: str | None
    branch: str | None
    author: str
    text: str
    created_at: datetime
    edited_at: datetime | None = None
