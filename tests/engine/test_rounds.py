"""Captures that follow each other quickly are finished together: late, unless somebody asks; in
order, and each with its own outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

import datastates
from datastates.config import Config
from datastates.engine import periodic
from datastates.engine.handle import Capture, Line, Progress, StagedCapture
from datastates.engine.periodic import MOST_READY, Rounds
from datastates.engine.plan import Layout
from datastates.errors import Conflict
from datastates.lineage.database import Database
from datastates.lineage.states import StateFacts
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.training.tracker import Tracker

if TYPE_CHECKING:
    from datastates.lineage.session import Session

ROOM = 10 * CHUNK_BYTES


@pytest.fixture
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round begins by itself after an hour."""
    monkeypatch.setattr(periodic, "ROUND_S", 3600.0)


def staged(step: int, slots: int = 1) -> StagedCapture:
    layout = Layout(msgspec.Raw(b""), msgspec.Raw(b""), (CHUNK_BYTES,) * slots, slots * CHUNK_BYTES)
    progress = Progress(f"{step:024x}")
    return StagedCapture(
        Line("main", "main", None, None),
        progress,
        layout,
        msgspec.Raw(b""),
        StateFacts(progress.uid, None, "main", None, step),
    )


def begun(count: int, *, slots: int = 1) -> Rounds:
    """The first round is over; so many more are ready."""
    made = Rounds()
    made.room_bytes = ROOM
    for step in range(1 + count):
        made.begin()
        made.put(staged(step, slots))
        if not step:
            assert steps(made) == [0]
            made.end(1)
    return made


def steps(made: Rounds, timeout_s: float = 0.0) -> list[int] | None:
    taken = made.take(timeout_s)
    return None if taken is None else [each.facts.step for each in taken]


def test_captures_that_come_slowly_are_taken_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "ROUND_S", 0.0)
    made = begun(0)
    for step in range(3):
        made.begin()
        made.put(staged(step))
        assert steps(made) == [step]


def test_quick_ones_are_taken_together_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "ROUND_S", 3600.0)
    made = begun(5)
    assert steps(made) == []
    monkeypatch.setattr(periodic, "ROUND_S", 0.0)
    assert steps(made) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("_no_hurry")
def test_whoever_waits_is_waited_for_until_what_he_waits_for_is_done() -> None:
    made = begun(3)
    made.begin()
    made.hurry()
    assert steps(made) == [1, 2, 3]
    made.end(3)
    assert steps(made) == []
    made.put(staged(4))
    assert steps(made) == [4], "it had begun when somebody came to wait"
    made.end(1)
    made.begin()
    made.put(staged(5))
    assert steps(made) == [], "it had not"


@pytest.mark.usefixtures("_no_hurry")
def test_a_round_begins_before_there_is_no_room_for_two_more_and_a_head() -> None:
    made = begun(2, slots=2)
    assert steps(made) == [], "six slots are free for three"
    made.begin()
    made.put(staged(9, slots=2))
    assert steps(made) == [1, 2, 9]


@pytest.mark.usefixtures("_no_hurry")
def test_so_many_are_never_ready_that_training_would_wait_for_their_number() -> None:
    made = begun(MOST_READY - 1, slots=0)
    assert steps(made) == []
    made.begin()
    made.put(staged(0, slots=0))
    assert len(steps(made) or []) == MOST_READY


@pytest.mark.usefixtures("_no_hurry")
def test_what_is_ready_is_taken_before_the_end() -> None:
    made = begun(2)
    made.close()
    assert steps(made) == [1, 2]
    assert steps(made) is None


@pytest.mark.usefixtures("_no_hurry")
def test_a_thread_that_waits_is_woken_by_whatever_makes_a_round_due() -> None:
    made = begun(1)
    found: list[list[int] | None] = []
    thread = threading.Thread(target=lambda: found.append(steps(made, 60.0)))
    thread.start()
    made.hurry()
    thread.join(60)
    assert found == [[1]]


# --- in a repository ------------------------------------------------------------------------------


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path, config=Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)
    ) as opened:
        yield opened


def begin(repo: Repository) -> tuple[Tracker, torch.Tensor]:
    """One state is recorded; the next rounds are to be asked for."""
    weight = torch.zeros(1000)
    run = repo.track(weight=weight, rng=False)
    run.capture().wait(timeout_s=60)
    return run, weight


def capture(run: Tracker, weight: torch.Tensor, count: int) -> list[Capture]:
    made = []
    for _ in range(count):
        weight += 1
        made.append(run.capture())
    return made


@contextmanager
def commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Each transaction that wrote."""
    made: list[bool] = []
    write = Database.write

    @contextmanager
    def counted(self: Database, durable: bool = False) -> Iterator[Session]:
        with write(self, durable) as session:
            yield session
        made.append(durable)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", counted)
        yield made


@pytest.mark.usefixtures("_no_hurry")
def test_quick_captures_are_recorded_in_one_transaction_once_somebody_waits(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weight = begin(repo)
    with commits(monkeypatch) as made:
        handles = capture(run, weight, 6)
        assert not made
        assert [handle.state for handle in handles] == [None] * 6
        assert handles[2].wait(timeout_s=60).step == 4
        assert len(made) <= 2, "those that were copied by then, and the rest"
        assert handles[-1].wait(timeout_s=60).step == 7
    assert [state.uid for state in repo.log("main", limit=6)] == [
        handle.uid for handle in reversed(handles)
    ]
    assert [repo.load(handle.uid)["weight"][0].item() for handle in handles] == [
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
    ]


def flushed(repo: Repository, run: Tracker, last: Capture) -> object:
    repo.flush()
    return last.state


def closed(repo: Repository, run: Tracker, last: Capture) -> object:
    run.close()
    return last.state


ASK: dict[str, Callable[[Repository, Tracker, Capture], object]] = {
    "head": lambda repo, run, last: run.head,
    "log": lambda repo, run, last: repo.log("main", limit=1)[0],
    "state": lambda repo, run, last: repo.state(last.uid),
    "durable": lambda repo, run, last: last.wait("durable", timeout_s=60),
    "flush": flushed,
    "close": closed,
}


@pytest.mark.usefixtures("_no_hurry")
@pytest.mark.parametrize("ask", ASK)
def test_whoever_asks_sees_every_capture_so_far(repo: Repository, ask: str) -> None:
    run, weight = begin(repo)
    last = capture(run, weight, 3)[-1]
    seen = ASK[ask](repo, run, last)
    assert isinstance(seen, datastates.State)
    assert seen.uid == last.uid


@pytest.mark.usefixtures("_no_hurry")
def test_a_training_that_needs_room_asks_for_it_by_itself(tmp_path: Path) -> None:
    with datastates.open(
        tmp_path, config=Config(memory_bytes=4 * CHUNK_BYTES, durable_interval_s=None)
    ) as repo:
        run, weight = begin(repo)
        capture(run, weight, 30)
        assert run.head is not None
        assert run.head.step == 31


@pytest.mark.usefixtures("_no_hurry")
def test_a_branch_that_somebody_else_moved_fails_every_capture_of_the_round_and_the_line_goes_on_from_before(
    repo: Repository, tmp_path: Path
) -> None:
    run, weight = begin(repo)
    first = run.head
    assert first is not None
    second = capture(run, weight, 1)[0].wait(timeout_s=60)
    with datastates.open(tmp_path) as other:
        other.move("main", first.uid, expected=second.uid)
    handles = capture(run, weight, 3)
    for handle in handles:
        with pytest.raises(Conflict, match=f"branch 'main' is at {first.uid}, not at {second.uid}"):
            handle.wait(timeout_s=60)
    with pytest.raises(Conflict, match="branch 'main' is at"):
        run.capture()
    assert repo.core.tiers.captured is not None
    assert set(repo.core.tiers.captured.uids()) == {first.uid, second.uid}
    with datastates.open(tmp_path) as other:
        other.move("main", second.uid, expected=first.uid)
    weight += 1
    assert run.capture().wait(timeout_s=60).parents == (second.uid,)


@pytest.mark.usefixtures("_no_hurry")
def test_one_line_of_a_round_that_is_refused_keeps_no_other_from_being_recorded(
    repo: Repository, tmp_path: Path
) -> None:
    run, weight = begin(repo)
    other_weight = torch.zeros(1000)
    side = repo.track(branch="side", weight=other_weight, rng=False)
    at = side.capture().wait(timeout_s=60)
    with datastates.open(tmp_path) as other:
        other.move("side", repo.state("main").uid, expected=at.uid)
    late = [
        *capture(run, weight, 1),
        *capture(side, other_weight, 1),
        *capture(run, weight, 1),
        *capture(side, other_weight, 1),
    ]
    for handle in late[1::2]:
        with pytest.raises(Conflict, match="branch 'side' is at"):
            handle.wait(timeout_s=60)
    assert [late[place].wait(timeout_s=60).step for place in (0, 2)] == [2, 3]
    assert repo.state("main").uid == late[2].uid
    side.training.line.error = None  # told above
