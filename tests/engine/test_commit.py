"""Whatever interrupts a commit, and wherever: engine, memory, arena and lineage agree
afterwards, and the repository goes on."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

import pytest
import torch
from sqlalchemy import select

import datastates
from datastates import Config, Conflict, State, Status, Tracker, Unavailable
from datastates.compare import merge
from datastates.engine import commit, outbox, periodic, runner
from datastates.engine import handle as work
from datastates.engine.commit import Commits
from datastates.engine.copy import CopyJob, Stager
from datastates.engine.in_flight import InFlight
from datastates.engine.runner import Runner
from datastates.errors import Torn
from datastates.lineage.database import Database
from datastates.lineage.schema import REPLICA, STATE
from datastates.lineage.write import refs
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.memory import MemoryTier
from datastates.system import at_exit
from datastates.transport import peer, receive_states, transfer
from datastates.transport.receive_states import StateSink
from tests.support.effort import part
from tests.support.interrupting import NEVER, Interruption, codes_of

if TYPE_CHECKING:
    from datastates.engine.handle import StagedCapture
    from datastates.lineage.session import Session

_COMMIT = codes_of(
    commit,
    outbox,
    Runner._adopt,
    InFlight.place,
    InFlight.adopt,
    InFlight.refuse,
    InFlight.note,
    InFlight._on_recorded,
)
_CAPTURE = _COMMIT | codes_of(work)
_MEMORY = codes_of(
    MemoryTier.adopt,
    MemoryTier.settle,
    MemoryTier._wholly,
    MemoryTier._settle,
    MemoryTier._place,
    MemoryTier._enter,
)
_MERGE = _COMMIT | _MEMORY | codes_of(merge._make)
_LANDING = (
    _COMMIT
    | _MEMORY
    | codes_of(
        receive_states.land,
        StateSink.adopt,
        transfer.IntoRepository.commit,
        transfer.Transfer._finish,
    )
)
_ANYWHERE = _COMMIT | codes_of(merge, receive_states, receive_states, peer, transfer, transfer)

TIMEOUT_S = 60.0
FEWEST = 3
"""More places than that are interrupted, also in a part of the cases, where three captures are
refused alike, and in newer versions of Python, where comprehensions are no functions of their
own."""

pytestmark = pytest.mark.long


def out_of_memory() -> None:
    raise MemoryError


def interrupt() -> None:
    """As Ctrl-C does in the main thread, but at once, in a section of ``undisturbed`` as well."""
    raise KeyboardInterrupt


def leave() -> None:
    """As a handler does that ends the process."""
    raise SystemExit


def ctrl_c() -> None:
    """Its handler runs as soon as Python looks; inside a section of ``undisturbed`` when that
    ends."""
    signal.raise_signal(signal.SIGINT)


class Room:
    """A repository with two trainings that go on, however often something is interrupted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repo = datastates.open(
            folder, config=Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)
        )
        self.weights = {name: torch.zeros(300) for name in ("main", "side")}
        self.runs: dict[str, Tracker] = {
            name: self.repo.track(branch=name, rng=False, model={"w": self.weights[name]})
            for name in self.weights
        }
        for name in self.runs:
            self.capture(name)

    def begin(self, name: str = "main") -> datastates.Capture:
        """The next state, which is another one than the last.

        The error of an earlier one comes out first, now or at the capture."""
        self.weights[name] += 1.0
        with suppress(MemoryError, Conflict):
            return self.runs[name].capture()
        return self.runs[name].capture()

    def capture(self, name: str = "main") -> State:
        return self.begin(name).wait(timeout_s=TIMEOUT_S)

    def check(self, where: str) -> None:
        """All that know of the states in memory say the same, and another capture of each
        training becomes durable."""
        core = self.repo.core
        runner, memory, arena = core.engage().runner, core.engage().memory, core.engage().arena
        runner.drain()
        assert isinstance(memory, MemoryTier)
        self.wait_for_what_was_lost()
        runner.outbox.record_evictions()
        here = set(memory.uids())
        assert self.told() == here, f"the lineage does not agree with memory: {where}"
        assert set(runner._engine._entries) == here, (
            f"the engine does not agree with memory: {where}"
        )
        assert set(runner.in_flight._lines) == here, (
            f"the register does not agree with memory: {where}"
        )
        assert set(runner.in_flight._progress) <= here, f"a capture is on its way for ever: {where}"
        assert len(arena._taken) == memory.slots_held, f"slots are lost: {where}"
        uses = Counter(chunk for state in memory._states.values() for chunk in state.chunks)
        assert uses == {chunk: chunk.uses for held in memory._chunks.values() for chunk in held}, (
            f"chunks are held for nobody: {where}"
        )
        assert not any(state.readers for state in memory._states.values()), (
            f"a state is read for ever: {where}"
        )
        for name, run in self.runs.items():
            assert run._training.line.tip == self.head(name), (
                f"a line does not agree with its branch: {where}"
            )
            assert self.begin(name).wait("durable", timeout_s=TIMEOUT_S).status is Status.DURABLE

    def wait_for_what_was_lost(self) -> None:
        """What a clone had of memory when it was lost comes back, once nothing moves any more."""
        memory, arena = self.repo.core.engage().memory, self.repo.core.engage().arena
        deadline = time.monotonic() + TIMEOUT_S
        while len(arena._taken) != memory.slots_held and time.monotonic() < deadline:
            os.sched_yield()
            gc.collect()
            at_exit.settle()

    def head(self, name: str) -> tuple[str, str]:
        state = self.repo.state(name)
        return state.uid, state.digest

    def told(self) -> set[str]:
        """What the lineage says of this process's memory."""
        core = self.repo.core
        query = (
            select(STATE.c.uid)
            .join(REPLICA, REPLICA.c.state_id == STATE.c.id)
            .where(REPLICA.c.node == core.engage().runner.commits.holder)
        )
        with core.database.read() as session:
            return set(session.execute(query).scalars())

    def close(self) -> None:
        """End it, and see that each branch can be read."""
        for run in self.runs.values():
            with suppress(MemoryError, Conflict):
                run._training.raise_background_error()
            run.close()
        self.repo.close()
        with datastates.open(self.folder) as again:
            for name, weights in self.weights.items():
                torch.testing.assert_close(again.load(name)["model"]["w"], weights)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    torch.set_num_threads(1)
    room = Room(tmp_path / "here")
    yield room
    room.close()


def each_step(
    act: Callable[[Interruption], None],
    check: Callable[[str], None],
    codes: frozenset[CodeType],
    error: Callable[[], None],
) -> list[str]:
    """Interrupt ``act`` at its first step, at its second one, and so on; where that was.

    In the gate at a twelfth of them."""
    counted = Interruption(codes, NEVER, error)
    act(counted)
    check("nothing was interrupted")
    places: list[str] = []
    for at in part(range(counted.steps)):
        interruption = Interruption(codes, at, error)
        act(interruption)
        if interruption.place is not None:
            places.append(interruption.place)
        check(f"{error.__name__} at step {at}, {interruption.place}")
    return places


@contextmanager
def _survived(interruption: Interruption) -> Iterator[None]:
    try:
        with interruption.here():
            yield
    except (MemoryError, KeyboardInterrupt, SystemExit):
        assert interruption.place is not None


# --- captures -------------------------------------------------------------------------------------


class Rounds:
    """Three captures of two lines are finished in one round; it is interrupted, and something
    else is wrong besides."""

    def __init__(self, room: Room, patch: pytest.MonkeyPatch, trouble: str) -> None:
        self.room, self._trouble = room, trouble
        self._is_on = False
        nothing = type(None)
        kinds: dict[str, list[type]] = {
            "refused": [Conflict, nothing, Conflict],
            "torn": [Torn, Torn, Torn],
        }
        self._errors = kinds.get(trouble, [nothing, nothing, nothing])
        self._next: Interruption | None = None
        self._is_ready, self._is_copied = threading.Event(), threading.Semaphore(0)
        commit_round, put, write, check = (
            Commits.commit_round,
            periodic.Rounds.put,
            Database.write,
            Stager._check,
        )

        def interrupted(commits: Commits, captures: Sequence[StagedCapture]) -> None:
            interruption, self._next = self._next, None
            with ExitStack() as stack:
                if interruption is not None:
                    stack.enter_context(interruption.here())
                commit_round(commits, captures)

        def copied(ready: periodic.Rounds, staged: StagedCapture) -> None:
            put(ready, staged)
            self._is_copied.release()

        @contextmanager
        def writing(database: Database, durable: bool = False) -> Iterator[Session]:
            if self._is_on and trouble == "away":
                raise Unavailable("the database does not answer")
            with write(database, durable) as session:
                yield session
            if self._is_on and trouble == "mute":
                raise Unavailable("the connection was closed")

        def checked(stager: Stager, job: CopyJob) -> None:
            if self._is_on and trouble == "torn":
                raise Torn("it was changed", paths=())
            check(stager, job)

        patch.setattr(Commits, "commit_round", interrupted)
        patch.setattr(periodic.Rounds, "put", copied)
        patch.setattr(Database, "write", writing)
        patch.setattr(Stager, "_check", checked)
        patch.setattr(periodic, "ROUND_S", 3600.0)
        patch.setattr(runner, "CHECK_EVERY_S", 0.01)

    def take(self, interruption: Interruption) -> None:
        """Three captures, of which all handles are told what became of them."""
        room = self.room
        for name in room.runs:
            room.capture(name)
        head, _ = room.head("main")
        if self._trouble == "refused":
            self._move("main", head, room.repo.state("main~1").uid)
        while self._is_copied.acquire(blocking=False):
            pass
        handles = []
        self._is_on, self._next = True, interruption
        for name in ("main", "side", "main"):
            handles.append(room.begin(name))
            assert self._is_copied.acquire(timeout=TIMEOUT_S)
        room.repo.core.engage().runner.flush()
        self._is_on = False
        if self._trouble == "refused":
            self._move("main", room.repo.state("main").uid, head)
        for handle in handles:
            try:
                assert handle.wait(timeout_s=TIMEOUT_S).uid == handle.uid
            except (MemoryError, KeyboardInterrupt, SystemExit, Conflict, Torn):
                assert handle.error is not None
        if interruption.place is None:
            assert [type(handle.error) for handle in handles] == self._errors

    def _move(self, branch: str, old: str, new: str) -> None:
        with self.room.repo.core.database.write() as session:
            refs.move(session, branch, new, expected=old)


@pytest.mark.parametrize("error", [out_of_memory, interrupt])
@pytest.mark.parametrize("trouble", ["", "refused", "torn", "away", "mute"])
def test_captures_that_are_interrupted_are_there_for_all_or_for_none(
    room: Room, monkeypatch: pytest.MonkeyPatch, error: Callable[[], None], trouble: str
) -> None:
    with monkeypatch.context() as patch:
        places = each_step(Rounds(room, patch, trouble).take, room.check, _CAPTURE, error)
    assert len(places) > FEWEST


# --- merges and clones ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [out_of_memory, interrupt, leave])
def test_captures_that_are_interrupted_as_memory_takes_them_are_there_or_not(
    room: Room, monkeypatch: pytest.MonkeyPatch, error: Callable[[], None]
) -> None:
    with monkeypatch.context() as patch:
        places = each_step(Rounds(room, patch, "").take, room.check, _MEMORY, error)
    assert len(places) > FEWEST


@pytest.mark.parametrize(
    ("error", "codes"),
    [(out_of_memory, _MERGE), (interrupt, _MERGE), (leave, _MEMORY), (ctrl_c, _ANYWHERE)],
)
def test_a_merge_that_is_interrupted_is_there_for_all_or_for_none(
    room: Room, error: Callable[[], None], codes: frozenset[CodeType]
) -> None:
    members = [room.capture(), room.capture()]
    for name, member in zip("ab", members, strict=True):
        room.repo.tag(name, member)

    def act(interruption: Interruption) -> None:
        with _survived(interruption):
            room.repo.merge(members, method="mean", into=None)

    assert len(each_step(act, room.check, codes, error)) > FEWEST


@pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning"
)  # Ctrl-C came just before it was
@pytest.mark.parametrize(
    ("error", "codes"),
    [(out_of_memory, _LANDING), (interrupt, _LANDING), (leave, _MEMORY), (ctrl_c, _ANYWHERE)],
)
def test_a_clone_that_is_interrupted_is_there_for_all_or_for_none(
    room: Room, tmp_path: Path, error: Callable[[], None], codes: frozenset[CodeType]
) -> None:
    with ExitStack() as stack:
        theirs = Room(tmp_path / "theirs")
        stack.callback(theirs.close)
        there = stack.enter_context(
            datastates.connect(stack.enter_context(theirs.repo.serve("memory://")).url)
        )

        def act(interruption: Interruption) -> None:
            uid = theirs.capture().uid
            with _survived(interruption):
                there.clone(uid, repo=room.repo)

        assert len(each_step(act, room.check, codes, error)) > FEWEST
