"""The values that the lineage takes and returns: plain values, without SQL and without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from datastates.values import Value

__all__ = [
    "DIED",
    "GIT_REMOTE",
    "GIT_ROOT",
    "OURS",
    "SAVES",
    "TAKEN",
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
    """Why a state of several ranks was given up: what became of the part of one rank.

    The rank had no room for its part (``skipped``); the sources changed while they were copied (``torn``); another error occurred
    (``failed``); the rank reported nothing for too long (``late``); the part went with its process (``gone``). Or all parts were there, and
    the lineage refused the state (``refused``).
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
    """Why a state has a further parent beside the first one."""

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
"""The prefix of the settings in a run's configuration that nobody chose: which process it was, where its files were."""


DIED = f"{OURS}died"
"""True in the configuration of a process that ended without saying so, once another process has found that out."""


GIT_ROOT, GIT_REMOTE = f"{OURS}git_root", f"{OURS}git_remote"
"""In the configuration of a run: the folder of the checkout that its main script is in, and the URL that it came from."""


SAVES = f"{OURS}saves"
"""True in the configuration of a training that only saves trees: it holds its branch during each save, not between two."""


TAKEN = f"{OURS}taken_over"
"""In the configuration of a training whose branch another process took over: that process, as people read it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training of a process: its branch, its user and host, its code and configuration.

    ``process`` is the uid of the run that stands for the whole process. That run has no ``process`` itself; it made the states that no
    training captured, such as merges. ``is_imported``: its record came with states of another lineage; ``branch`` is the name there.
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
        """The part of its configuration that somebody chose."""
        return {key: value for key, value in self.config.items() if not key.startswith(OURS)}


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What is known of a state before its bytes are there: its identity, its place in the graph, and the facts that were given with it.

    ``parent`` is the uid of the first parent; ``edges`` are the further ones. ``branch`` is the branch that moves to the state, if any.
    ``created_at`` may be left out: the moment of recording then stands for it. ``config`` is what the run's record says.
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

    ``bytes_new`` is the part of ``bytes_total`` that this state added: to the disk once it is durable, until then to the memory of its
    process.
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
        from .show.card import state_html  # only notebooks ask

        return state_html(self)


@dataclass(frozen=True, slots=True)
class NewState:
    """A state for ``record``: its facts, and what has become of its bytes. The branch moves from the first parent to it.

    ``tier`` and ``node`` say where its bytes are, if they are anywhere.
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
    """What somebody wrote about a state or a branch, in Markdown. One of ``state`` (a uid) and ``branch`` is given.

    ``author`` is the name that the writer gave; it is not verified. ``edited_at`` is None if the note was never changed.
    """

    uid: str
    state: str | None
    branch: str | None
    author: str
    text: str
    created_at: datetime
    edited_at: datetime | None = None
