"""A line, which is one tracker on one branch, and what is known of its captures before they are digested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from datastates.content.manifest import Manifest
from datastates.lineage.change.parts import form_after
from datastates.lineage.change.reduction import FIRST, Reduce
from datastates.lineage.states import Run, State, StateFacts
from datastates.modules.work import Work
from datastates.policy.contract import CadenceChoice, Costs

from .arriving import Arriving
from .edits import Edits
from .handle import Progress
from .pacing import Taken
from .plan import Layout
from .stage import CopyJob
from .uids import Drawn, Uids

if TYPE_CHECKING:
    import msgspec

__all__ = ["Line", "Part", "Staged"]


@dataclass(frozen=True, slots=True)
class Part:
    """The part of each state that one of several ranks captures: which rank, of how many. ``job`` is the uid that all ranks share."""

    rank: int
    size: int
    job: str


@dataclass(slots=True)
class Line:
    """One tracker on one branch. ``tip`` is the parent of the next capture; ``base`` is the last manifest on disk.

    ``has_placed`` says whether ``base`` is a capture of this line; any other state may hold other bytes under the same
    digests. ``kin`` is the line from which this one started, if it started from a state that was in memory only:
    whichever writes first, the other's first write refers to it. ``run`` is the training in the lineage.
    ``is_patient``: the training goes on when its states cannot be written for now. ``uids`` gives its captures their
    uids. ``costs`` are the costs of its captures and writes as far as they were measured, and ``choice`` is what its
    policy chose by them. ``keeps_bests``: the best by each metric whose name has a direction becomes durable. ``bound``
    is the bound on the disk, as the end of a sentence. ``listeners`` are told of each state once it is recorded, on any
    thread; they return at once and raise nothing. The engine thread owns the line while captures are in flight.

    With ``part`` it captures one rank's part of each state, and ``reduce`` says how the metrics of all ranks are combined. Its ``tip`` is
    then the newest whole state, and ``named`` is the state that it captured, or skipped, last, which the next part names as its parent.
    ``arrived`` are the ranks whose parts came with a state that no line captured.
    """

    name: str
    branch: str
    tip: tuple[str, str] | None
    base: Manifest | None
    run: Run | None = None
    has_placed: bool = False
    error: BaseException | None = None
    edits: Edits = field(default_factory=Edits, repr=False)
    is_patient: bool = True
    kin: Line | None = field(default=None, repr=False)
    uids: Uids = field(default_factory=Drawn, repr=False)
    costs: Costs | None = field(default=None, repr=False)
    choice: CadenceChoice | None = field(default=None, repr=False)
    keeps_bests: bool = False
    bound: str = ""
    listeners: list[Callable[[State], None]] = field(default_factory=list, repr=False)
    part: Part | None = None
    arrived: Sequence[int] = (0,)
    reduce: Reduce = FIRST
    named: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.named = self.tip and self.tip[0]

    @property
    def size(self) -> int:
        """The number of parts that each of its states has."""
        return 1 if self.part is None else self.part.size

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose parts of its states this process has."""
        return self.arrived if self.part is None else (self.part.rank,)

    def follow(self, uid: str) -> str | None:
        """The uid that this part names as its parent; the next part will name ``uid``. None for whole states, whose parent is the tip."""
        if self.part is None:
            return None
        before, self.named = self.named, uid
        return before

    def stand(self, tip: tuple[str, str] | None) -> None:
        """Make this state the parent of the next capture. No capture may be in flight."""
        self.tip, self.named = tip, tip and tip[0]

    def related(self) -> Manifest | None:
        """The manifest on disk that shares the most with the next state, as far as is known."""
        line: Line | None = self
        while line is not None and line.base is None:
            line = line.kin
        return None if line is None else line.base

    def placed(self, manifest: Manifest) -> None:
        """Note that a state of this line is on disk now."""
        self.base, kin, self.kin = manifest, self.kin, None
        self.has_placed = bool(self.branch)  # the line of a clone has no branch
        while kin is not None and kin.base is None:
            kin.base, kin = manifest, kin.kin


@dataclass(slots=True)
class Staged:
    """A capture on its way: what is known of it before its bytes are digested, and ``work``, the result of the engine's steps.

    Once there is ``work``, what memory has under its uid belongs to this capture. ``taken_at`` is when it began, and ``held_s`` is for how
    long the capture before it held the training up. ``updates``: how many steps the optimizers had taken, if all ranks must have taken as
    many.
    """

    line: Line
    progress: Progress
    layout: Layout
    values: msgspec.Raw
    facts: StateFacts
    job: CopyJob | None = field(default=None, repr=False)
    arriving: Arriving | None = field(default=None, repr=False)
    work: Work | None = field(default=None, repr=False)
    taken_at: float | None = None
    held_s: float | None = None
    updates: int | None = None

    def settle(self) -> None:
        """Fill in, now that the bytes are there, the numbers that were still on a device when the capture was taken."""
        if self.arriving is not None and self.job is not None and self.job.error is None:
            found = [tensor.item() for tensor in self.job.numbers]
            self.facts = replace(self.facts, metrics=self.arriving.metrics_with(self.facts.metrics, found))
            self.values = self.arriving.values_with(self.values, found)

    def taken(self) -> Taken:
        """The facts of this capture with which its training's policy is asked."""
        return Taken(self.taken_at, self.held_s, self.facts.step, self.facts.metrics, self.layout.bytes_total)

    @property
    def form(self) -> str:
        """What all parts of its state must have alike; see ``lineage.change.parts.Telling``."""
        return self.layout.form if self.updates is None else form_after(self.layout.form, self.updates)

    @property
    def held_bytes(self) -> int:
        """The memory that it takes until it is recorded."""
        return sum(self.layout.chunk_lengths) + memoryview(self.values).nbytes
