"""The handle that ``run.capture`` returns at once, and the states of a capture behind it.

``Capture`` waits for a status. ``Work`` is a capture whose bytes are in memory. ``Line`` is one
 tracker on one branch, and ``LateNumbers`` has numbers that are still on devices.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import torch

from datastates.errors import InvalidInput, ProcessorFailed, Unavailable
from datastates.lineage.schema import to_us
from datastates.lineage.states import NewState, Run, State, StateFacts, Status
from datastates.lineage.write.parts import form_after
from datastates.lineage.write.record import FIRST, Reduce
from datastates.policy.contract import CadenceChoice, Costs
from datastates.state.digest import digest_of
from datastates.state.encoding import encode_values
from datastates.state.manifest import VERSION, Content, Manifest, Origin
from datastates.state.tree import Flat, Number
from datastates.storage.tier import Tier
from datastates.system.devices import devices
from datastates.system.threads import Notifier
from datastates.values import Seconds, checked

from .cadence_stats import CaptureFacts
from .copy import CopyJob
from .plan import Layout
from .rank_reports import PendingRecord
from .tear_check import TornTensors

_RANK = {Status.CAPTURED: 0, Status.DURABLE: 1, Status.REPLICATED: 2, Status.EXTERNAL: 3}

SAY_AGAIN_S = 1.0
"""How often a waiting caller repeats that it waits, in seconds."""


class Progress:
    """How far a capture has come.

    The engine updates it, from any thread, and wakes callers that wait on the ``Capture``."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.is_skipped = False
        self.why_skipped: str | None = None
        self.state: State | None = None
        self.error: BaseException | None = None
        self.processor_error: ProcessorFailed | None = None
        self.given_up: str | None = None
        self.held_up: Unavailable | None = None
        self.changed = Notifier()
        self.asked: weakref.ref[Capture] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a caller waited for the state to become durable, and still has the handle."""
        return self.asked is not None and self.asked() is not None

    def advance(self, state: State) -> None:
        """Note that the state is recorded, or has reached a later status."""
        self.state, self.held_up = state, None
        self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Note that the background failed: callers that wait for a later status get this error."""
        self.error = error
        self.changed.notify_all()

    def note(self, error: ProcessorFailed) -> None:
        """Note that a user's processor failed, which does not hold the state up.

        The first such error is kept."""
        self.processor_error = self.processor_error or error

    def hold_up(self, why: Unavailable) -> None:
        """Note that the capture cannot continue for now. Waiting callers get this error, and may
        wait again."""
        self.held_up = why
        self.changed.notify_all()

    def skip(self, why: str | None = None) -> None:
        """Note that there was no memory, so the capture will have no state.

        ``why`` is the reason, unless the back-pressure was ``skip``.
        """
        self.is_skipped, self.why_skipped = True, why
        self.changed.notify_all()

    def give_up(self, why: str) -> None:
        """Note that the state's bytes left memory before they were on disk.

        The first reason is kept, since it is the one that helps."""
        self.given_up = self.given_up or why
        self.changed.notify_all()


class Capture:
    """A capture in progress. Any thread may read it and wait on it. The engine advances it.

    ``uid`` names the state from the start, and ``step`` is the step of the training. ``is_skipped``
    is true when there was no memory and the back-pressure was ``skip``, or nothing could be written
    to free memory. Such a capture has no state.
    """

    def __init__(
        self,
        progress: Progress,
        step: int,
        *,
        want: Callable[[str], None],
        hurry: Callable[[], None],
        trouble: Callable[[], str | None] = lambda: None,
        missing: Callable[[str], str | None] = lambda uid: None,
        check: Callable[[Status], None] = lambda goal: None,
    ) -> None:
        self.uid, self.step = progress.uid, step
        self._progress, self._want, self._hurry, self._trouble, self._missing = (
            progress,
            want,
            hurry,
            trouble,
            missing,
        )
        self._check = check

    @property
    def is_skipped(self) -> bool:
        """Whether the capture was skipped: there was no memory (by ``skip``, or because nothing
        could be written), or a rank has no part."""
        return self._progress.is_skipped

    @property
    def status(self) -> Status | None:
        """The status that the state has reached; None while it is being copied and digested, or
        after the capture failed."""
        state = self._progress.state
        return None if state is None else state.status

    @property
    def state(self) -> State | None:
        """The recorded state; None until it is recorded."""
        return self._progress.state

    @property
    def error(self) -> BaseException | None:
        """The error of the background, as it was raised; else the ``ProcessorFailed`` of one of
        your processors, which ``wait`` does not raise."""
        return self._progress.error or self._progress.processor_error

    @checked
    def wait(self, status: str = "captured", timeout_s: Seconds | None = None) -> State:
        """Block until the state has reached ``status`` (or a later one), and return it.

        Waiting for ``durable`` requests it: the state is written even if no policy chose it. While
        the disk is full or away, the write is retried for as long as you wait (unless
        ``on_failure="raise"``).

            with repo.track(branch="waited-for", model=model, optimizer=optimizer) as run:
                train_step(next(iter(loader)))
                state = run.capture().wait("durable", timeout_s=60)

        :raises Torn: or any other error of the background, as it was raised.
        :raises Unavailable: the capture was skipped, or its bytes were given up before they reached
            the status; or the lineage has been away for a minute (the state is in memory: wait
            again when the lineage is back).
        :raises TimeoutError: ``timeout_s`` seconds have passed. The text has the reason, if nothing
            can be written or parts of other ranks are missing.
        :raises InvalidInput: there is no such status, or no tier of the repository that gives it.
        :raises Closed: this is a forked child, where nothing is captured.
        """
        goal = _goal(status)
        if goal is not Status.CAPTURED:
            self._progress.asked = weakref.ref(self)
            self._check(goal)
            self._want(self.uid)
        if not self._wait_for(goal, timeout_s):
            why = self._missing(self.uid) or (None if goal is Status.CAPTURED else self._trouble())
            raise TimeoutError(
                f"state {self.uid} (step {self.step}) is not {goal} after {timeout_s} s; it is"
                f" {self.status or 'being copied'}" + ("" if why is None else f"; {why}")
            )
        state = self._progress.state
        assert state is not None
        return state

    def _wait_for(self, goal: Status, timeout_s: float | None) -> bool:
        """Wait until the state has reached ``goal``, repeating every second that a caller waits;
        False if ``timeout_s`` passes first."""
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._hurry()
            left = ends_at - time.monotonic()
            if self._progress.changed.wait_for(
                lambda: self._has_reached(goal), min(left, SAY_AGAIN_S)
            ):
                return True
            if left <= SAY_AGAIN_S:
                return False

    def _has_reached(self, goal: Status) -> bool:
        now = self._progress
        state = now.state
        if state is not None and state.status in _RANK and _RANK[state.status] >= _RANK[goal]:
            return True
        if now.error is not None:
            raise now.error
        if now.is_skipped:
            why = now.why_skipped or "the arena had no room (back_pressure='skip')"
            raise Unavailable(f"the capture of step {self.step} was skipped: {why}")
        if now.given_up is not None:
            raise Unavailable(now.given_up)
        if now.held_up is not None:
            raise now.held_up
        return False

    def __repr__(self) -> str:
        what = (
            "skipped"
            if self.is_skipped
            else (
                type(self._progress.error).__name__
                if self._progress.error
                else self.status or "in flight"
            )
        )
        return f"<Capture {self.uid[:10]} step {self.step}: {what}>"


def _goal(status: str) -> Status:
    try:
        goal = Status(status)
    except ValueError:
        goal = Status.LOST
    if goal not in _RANK:
        raise InvalidInput(f"cannot wait for {status!r}: wait for one of {', '.join(_RANK)}")
    return goal


# --- The uid of the next state ---
# A single tracker draws it at random. Several ranks that capture the same state derive it.


_DIGITS = 24


class Uids(Protocol):
    """Gives uids: one for each capture, on the training thread, even if the capture is skipped
    afterwards."""

    def next(self, branch: str, step: int, micro_step: int) -> str:
        """The uid of the state that is captured at this step: 24 lower-case hex digits."""


class RandomUids:
    """A random uid for each state."""

    def next(self, branch: str, step: int, micro_step: int) -> str:
        """A uid that no other state has."""
        return secrets.token_hex(_DIGITS // 2)


class DerivedUids:
    """The same uids on every rank that captures at the same steps in the same order. All trackers
    of a process share one.

    ``run`` is the uid of the current job, which its ranks share and no other job ever has. A step
    that comes again on a branch, as after a restore, counts as another turn and gets another uid.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._turns: dict[str, tuple[int, tuple[int, int]]] = {}

    def next(self, branch: str, step: int, micro_step: int) -> str:
        """The uid that every rank derives at this step."""
        turn, last = self._turns.get(branch, (0, (-1, -1)))
        if (step, micro_step) <= last:
            turn += 1
        self._turns[branch] = turn, (step, micro_step)
        said = json.dumps(["datastates state uid 1", self._run, branch, turn, step, micro_step])
        return hashlib.sha256(said.encode()).hexdigest()[:_DIGITS]


# --- Numbers on devices, copied with the state's bytes without a wait before that ---


def is_late(value: object) -> bool:
    """Whether this is one number, and reading it would wait for a device."""
    return (
        isinstance(value, torch.Tensor)
        and value.numel() == 1
        and not value.is_complex()
        and devices().is_on(value)
    )


@dataclass(frozen=True, slots=True)
class LateNumbers:
    """The numbers of one capture that are on devices.

    ``tensors`` has copies of the metrics' tensors, by name, then of the values' tensors.
    """

    names: Sequence[str]
    flat: Flat
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, metrics: Mapping[str, torch.Tensor], flat: Flat) -> LateNumbers | None:
        """The late numbers of a capture; None if there are none. Runs on the training thread,
        which may change them once this returns."""
        if not metrics and not flat.has_numbers:
            return None
        found = [
            *metrics.values(),
            *(value.tensor for value in flat.values if isinstance(value, Number)),
        ]
        return cls([*metrics], flat, [each.detach().clone() for each in found])

    def metrics_with(
        self, metrics: Mapping[str, float], found: Sequence[float]
    ) -> dict[str, float]:
        """All metrics, including the numbers that have arrived."""
        return {**metrics, **dict(zip(self.names, map(float, found), strict=False))}

    def values_with(self, values: msgspec.Raw, found: Sequence[float]) -> msgspec.Raw:
        """The values, including the numbers that have arrived; unchanged if none were late."""
        if not self.flat.has_numbers:
            return values
        numbers = iter(found[len(self.names) :])
        whole = [
            value.kind(next(numbers)) if isinstance(value, Number) else value
            for value in self.flat.values
        ]
        return msgspec.Raw(encode_values(whole))


# --- A capture whose bytes are in memory, and its manifest ---


@dataclass(slots=True)
class Work:
    """A state whose bytes are in ``slots``, one for each of ``lengths``.

    ``parent_digests`` belong to ``facts.parents``. ``content`` lacks the chunks, which ``digest``
    adds (``manifest``). ``before`` is the tip of its line, on which the state depends. The maker of
    this object owns the slots until ``dedup`` takes them out of the list. ``bytes_new`` of them
    were then new in memory. There is an ``entry`` once the lineage may have received the state.
    ``rank`` is the part of several that it is, ``reduce`` how the metrics of all parts are
    combined, ``form`` what they have in common. ``known`` are chunks that were digested before:
    those that the memory tier holds need not be in their slots. ``is_from_device``: a device
    computes, and cores of the host are free.
    """

    facts: StateFacts
    parent_digests: tuple[str, ...]
    content: Content
    lengths: Sequence[int]
    slots: list[int]
    before: tuple[str, str] | None = None
    manifest: Manifest | None = None
    bytes_new: int = 0
    entry: PendingRecord | None = None
    rank: int | None = None
    reduce: Reduce = FIRST
    form: str = ""
    known: Mapping[int, bytes] = field(default_factory=dict)
    is_from_device: bool = False

    def digested(self) -> Manifest:
        """The manifest, once the chunks are digested."""
        assert self.manifest is not None, "digest comes first"
        return self.manifest

    def make_record(self, tier: Tier, holder: str) -> PendingRecord:
        """The ``entry`` for the outbox, now that the state is in a tier of which ``holder``
        names the place."""
        digest, total = self.digested().digest, sum(self.lengths)
        new = NewState(
            self.facts,
            digest,
            tier.gives,
            bytes_total=total,
            bytes_new=self.bytes_new,
            tier=tier.name,
            node=holder,
        )
        self.entry = PendingRecord(new, self.before, self.rank, self.reduce, self.form)
        return self.entry


def manifest_of(
    facts: StateFacts, content: Content, parent_digests: tuple[str, ...], *, rank: int = 0
) -> Manifest:
    """The manifest that is kept with the bytes of a state made here. ``parent_digests`` belong to
    ``facts.parents``, in order.

    A part of several names no parents yet, because they are unknown: see ``finished``.
    """
    is_part = facts.world_size > 1
    origin = Origin(
        uid=facts.uid,
        parents=() if is_part else facts.parents,
        parent_digests=() if is_part else parent_digests,
        run=facts.run,
        branch=facts.branch,
        step=facts.step,
        micro_step=facts.micro_step,
        created_at_us=to_us(facts.created_at),
        message=facts.message,
        metrics=facts.metrics,
        attributes=facts.attributes,
        rank=rank,
        world_size=facts.world_size,
    )
    return Manifest(VERSION, digest_of(content, origin), origin, content)


def finished(part: Manifest, state: State, parent_digests: tuple[str, ...]) -> Manifest:
    """The manifest of a part once its state is whole. It has the lineage's facts of the state, so
    that they can be read from any part."""
    origin = msgspec.structs.replace(
        part.origin,
        parents=state.parents,
        parent_digests=parent_digests,
        created_at_us=to_us(state.created_at),
        message=state.message,
        metrics=state.metrics,
        attributes=state.attributes,
    )
    return msgspec.structs.replace(part, origin=origin)


# --- Lines: one tracker on one branch, and its captures before they are digested ---


@dataclass(frozen=True, slots=True)
class Part:
    """The part of each state that one of several ranks captures: which rank, of how many.

    ``job`` is the uid that all ranks share."""

    rank: int
    size: int
    job: str


@dataclass(slots=True)
class Line:
    """One tracker on one branch. ``tip`` is the parent of the next capture. ``base`` is the last
    manifest on disk.

    ``has_placed`` is whether ``base`` is a capture of this line. Any other state may hold other
    bytes under the same digests. ``kin`` is the line from which this one started, if it started
    from a state that was in memory only. The line that writes second refers to the bytes of the
    other one. ``run`` is the training in the lineage. ``is_patient``: the training continues when
    its states cannot be written for now. ``uids`` gives its captures their uids. ``costs`` are the
    measured costs of its captures and writes, and ``choice`` is what its policy chose by them.
    ``keeps_bests``: the best by each metric whose name has a direction becomes durable. ``bound``
    is the bound on the disk, as the end of a sentence. ``listeners`` are called for each state once
    it is recorded, on any thread. They return at once and raise nothing. The engine thread owns the
    line while captures are in flight.

    With ``part`` it captures one rank's part of each state, and ``reduce`` defines how the metrics
    of all ranks are combined. Its ``tip`` is then the newest whole state. ``named`` is the state
    that it captured, or skipped, last. The next part names it as its parent. ``arrived`` are the
    ranks whose parts came with a state that no line captured.
    """

    name: str
    branch: str
    tip: tuple[str, str] | None
    base: Manifest | None
    run: Run | None = None
    has_placed: bool = False
    error: BaseException | None = None
    edits: TornTensors = field(default_factory=TornTensors, repr=False)
    is_patient: bool = True
    kin: Line | None = field(default=None, repr=False)
    uids: Uids = field(default_factory=RandomUids, repr=False)
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
        """The uid that this part names as its parent; the next part will name ``uid``.

        None for whole states, whose parent is the tip."""
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
class StagedCapture:
    """A capture on its way: what is known of it before its bytes are digested, and ``work``, the
    result of the engine's steps.

    Once there is ``work``, what memory has under its uid belongs to this capture. ``taken_at`` is
    when it began, and ``held_s`` is for how long the capture before it held the training up.
    ``updates``: how many steps the optimizers had taken, if all ranks must have taken as many.
    """

    line: Line
    progress: Progress
    layout: Layout
    values: msgspec.Raw
    facts: StateFacts
    job: CopyJob | None = field(default=None, repr=False)
    late_numbers: LateNumbers | None = field(default=None, repr=False)
    work: Work | None = field(default=None, repr=False)
    taken_at: float | None = None
    held_s: float | None = None
    updates: int | None = None

    def settle(self) -> None:
        """Fill in, now that the bytes are there, the numbers that were still on a device when
        the capture was taken."""
        if self.late_numbers is not None and self.job is not None and self.job.error is None:
            found = [tensor.item() for tensor in self.job.numbers]
            self.facts = replace(
                self.facts, metrics=self.late_numbers.metrics_with(self.facts.metrics, found)
            )
            self.values = self.late_numbers.values_with(self.values, found)

    def taken(self) -> CaptureFacts:
        """The facts of this capture for its training's policy."""
        return CaptureFacts(
            self.taken_at, self.held_s, self.facts.step, self.facts.metrics, self.layout.bytes_total
        )

    @property
    def form(self) -> str:
        """The properties that all parts of its state must share; see
        ``lineage.write.parts.PartReport``."""
        return (
            self.layout.form if self.updates is None else form_after(self.layout.form, self.updates)
        )

    @property
    def held_bytes(self) -> int:
        """The memory that it takes until it is recorded."""
        return sum(self.layout.chunk_lengths) + memoryview(self.values).nbytes
