"""How many states stay in memory where nobody said, how memory for them is taken little by little, and what the user is told of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates.capture import warming
from datastates.capture.warming import Warmer
from datastates.config import Config
from datastates.content.manifest import CHUNK_BYTES
from datastates.policy.keeping import AT_ONCE_BYTES, FEW, FEWEST, SMALL_BYTES, is_tight, slots_allowed, slots_at_once, slots_kept
from datastates.repository import Repository
from datastates.store.arena import Arena

MANY = 1 << 20
SMALL = SMALL_BYTES // CHUNK_BYTES


def kept(*sizes: int, capacity: int = MANY, is_given: bool = False) -> int:
    return slots_kept(sizes, capacity, is_given=is_given)


def at_once(*sizes: int, capacity: int = MANY, is_given: bool = False) -> int:
    return slots_at_once(sizes, capacity, is_given=is_given)


def test_a_version_that_shares_most_takes_a_little_more_and_one_that_shares_nothing_takes_what_another_had() -> None:
    assert slots_allowed(20, warm=64, at_once=64, kept=200) - 64 == 5
    assert slots_allowed(20, warm=30, at_once=64, kept=200) == 64
    assert slots_allowed(20, warm=198, at_once=64, kept=200) == 200


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody touches memory ahead."""
    monkeypatch.setattr(Arena, "warm_up", lambda arena, count=1: threading.Event().wait(0.01) or True)


def test_small_states_share_what_is_small_beside_any_training() -> None:
    assert kept(1) == kept(4) == at_once(1) == at_once(4) == SMALL
    assert SMALL_BYTES <= 128 << 20


def test_a_few_large_states_are_kept_of_each_training() -> None:
    assert (at_once(300), kept(300)) == (FEWEST * 300, FEW * 300)
    assert (at_once(300, 100), kept(300, 100)) == (FEWEST * 400, FEW * 400)


def test_never_is_more_kept_than_there_is() -> None:
    assert at_once(300, capacity=700) == kept(300, capacity=700) == 700
    assert at_once(1, capacity=2) == kept(1, capacity=2) == 2


def test_all_that_somebody_gave_is_used_in_the_end() -> None:
    assert kept(1, is_given=True) == kept(300, is_given=True) == MANY
    assert at_once(1, is_given=True) == AT_ONCE_BYTES // CHUNK_BYTES
    assert at_once(300, is_given=True) == FEWEST * 300


def open_by_default(path: Path, **options: object) -> Repository:
    return datastates.open(path / "runs", config=Config(durable_interval_s=None, **options))  # type: ignore[arg-type]  # a test's own


def capture(run: datastates.Tracker, weight: torch.Tensor, times: int) -> None:
    for _ in range(times):
        weight.add_(1)
        run.capture().wait(timeout_s=60)
    run.training.core.settle()


def test_a_small_training_takes_little_memory_by_default(tmp_path: Path) -> None:
    weight = torch.arange(CHUNK_BYTES, dtype=torch.float32)  # 16 MiB
    with open_by_default(tmp_path) as repo, repo.track(weight=weight, rng=False) as run:
        capture(run, weight, 30)
        assert repo.core.arena is not None
        assert repo.core.arena.capacity > 2 * SMALL, "this machine has too little memory for this test"
        assert repo.core.arena.warm <= SMALL
        assert repo.core.tiers.captured is not None
        assert len(list(repo.core.tiers.captured.uids())) == SMALL // 4 - 1


@pytest.mark.usefixtures("cold")
def test_what_is_warm_is_used_again_before_more_is_touched_than_a_few_states_need(tmp_path: Path) -> None:
    weight = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    most = at_once(4, is_given=True)
    with open_by_default(tmp_path, memory_bytes=2 * AT_ONCE_BYTES) as repo, repo.track(weight=weight, rng=False) as run:
        capture(run, weight, most // 4 + 5)
        assert repo.core.arena is not None
        assert most <= repo.core.arena.warm <= most + 3
        assert repo.core.tiers.captured is not None
        assert len(list(repo.core.tiers.captured.uids())) == most // 4 - 1


@pytest.mark.usefixtures("cold")
def test_states_that_may_not_leave_take_more_memory_than_is_kept(tmp_path: Path) -> None:
    weight = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    started, may_write = threading.Event(), threading.Event()

    def on_step(name: str) -> None:
        started.set()
        assert may_write.wait(60)

    with open_by_default(tmp_path, on_step=on_step) as repo, repo.track(weight=weight, rng=False) as run:
        try:
            for number in range(SMALL // 4 + 3):
                capture(run, weight, 1)
                repo.tag(f"kept-{number}", run.head)
            assert started.wait(60)
            assert repo.core.arena is not None
            assert repo.core.arena.warm > SMALL
        finally:
            may_write.set()


def test_captures_in_flight_are_waited_for_before_more_is_taken_than_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slots_kept", "slots_at_once"):
        monkeypatch.setattr(f"datastates.capture.warming.{name}", lambda sizes, capacity, is_given, latest=None: 6)
    weight = torch.arange(CHUNK_BYTES // 4, dtype=torch.float32)
    with open_by_default(tmp_path) as repo, repo.track(weight=weight, rng=False) as run:
        for _ in range(200):
            weight.add_(1)
            run.capture()
        assert repo.core.arena is not None
        assert repo.core.arena.warm <= 7, "and one that was being warmed when a capture took the last"


def test_one_line_says_how_many_states_are_kept_and_how_to_keep_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    with (
        caplog.at_level(logging.INFO, logger="datastates"),
        open_by_default(tmp_path) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        capture(run, weight, 3)
        said = [message for message in caplog.messages if "kept in memory" in message]
    (line,) = said
    assert line.startswith(f"the newest {SMALL // 4 - 1} states (16 MiB each) are kept in memory; memory_bytes= ")


class Watched(Arena):
    """Tells when so many slots are warm."""

    def __init__(self, slots: int, until: int) -> None:
        super().__init__(slots * CHUNK_BYTES)
        self.until, self.is_there, self.touched = until, threading.Event(), list[int]()

    def warm_up(self, count: int = 1) -> bool:
        found = super().warm_up(count)
        self.touched.append(count)
        if self.warm >= self.until:
            self.is_there.set()
        return found


@pytest.fixture
def warmers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Warmer]]:
    monkeypatch.setattr(warming, "_REST", 0.0)
    monkeypatch.setattr(warming, "_MERGE_REST", 0.0)
    made: list[Warmer] = []
    yield made
    for warmer in made:
        warmer.close()


@pytest.mark.parametrize(("is_given", "until"), [(False, SMALL), (True, 60)])
def test_memory_becomes_warm_slot_by_slot_up_to_what_is_kept(is_given: bool, until: int, warmers: list[Warmer]) -> None:
    arena = Watched(60, until)
    warmers.append(Warmer(arena, is_given=is_given))
    assert arena.warm == 0, "nothing is touched for nobody"
    warmers[0].expect("main", 2)
    assert arena.is_there.wait(60)
    warmers.pop().close()
    assert arena.warm == until
    assert set(arena.touched) == {1}


def test_small_pages_are_merged_once_enough_memory_is_warm(warmers: list[Warmer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastates.store.arena._SLOW_S", -1.0)
    arena = Arena(10 * CHUNK_BYTES)
    slots = arena.acquire(4)
    assert slots is not None
    arena.make_real(slots)
    assert arena.has_small_pages
    warmers.append(Warmer(arena, is_given=True))
    warmers[0].expect("main", 1)
    deadline = time.monotonic() + 60
    while arena.has_small_pages:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert arena.warm == 10
    warmers.pop().close()
    arena.close()


def test_a_line_that_ended_needs_no_memory_any_more(warmers: list[Warmer]) -> None:
    arena = Watched(200, 200)
    warmers.append(Warmer(arena, is_given=False))
    warmers[0].expect("main", 20)
    assert warmers[0].kept == FEW * 20
    warmers[0].forget("main")
    assert warmers[0].kept == 0
    warmers[0].expect("other", 1)
    assert warmers[0].kept == SMALL


# --- memory runs short --------------------------------------------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "held", "expected"),
    [(8 * GIB, 0, False), (8 * GIB, 40 * GIB, False), (8 * GIB, 60 * GIB, True), (63 << 20, 0, True), (65 << 20, 0, False), (0, 0, True)],
)
def test_memory_is_short_when_less_than_an_eighth_is_left_of_what_states_could_have(available: int, held: int, expected: bool) -> None:
    assert is_tight(available, held) is expected


def test_no_more_memory_is_touched_where_it_runs_short_and_it_goes_on_when_there_is_some_again(
    warmers: list[Warmer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_LOOK_S", 0.0)
    monkeypatch.setattr(warming, "_SHORT_S", 0.0)
    arena, left = Watched(60, 60), [GIB]

    def available() -> int:
        return 0 if left[0] and arena.warm >= 20 else GIB

    warmers.append(Warmer(arena, is_given=True, available=available))
    warmers[0].expect("main", 2)
    while warmers[0].within is None:
        assert not arena.is_there.is_set()
    assert arena.warm == warmers[0].within == warmers[0].kept
    assert arena.warm < 60
    left[0] = 0
    warmers[0].look()
    assert warmers[0].within is None
    assert arena.is_there.wait(60)


def test_states_are_written_to_make_room_where_memory_runs_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warming, "_LOOK_S", 0.0)
    monkeypatch.setattr(warming, "available_memory_bytes", lambda: 0)
    config = Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)
    with caplog.at_level(logging.INFO), datastates.open(tmp_path, config=config) as repo:
        words = torch.zeros(CHUNK_BYTES // 4)
        run = repo.track(words=words, rng=False)
        for number in range(20):
            words += 1
            state = run.capture().wait(timeout_s=60)
            if number < 8:
                repo.tag(f"t{number}", state)
        arena = repo.core.arena
        assert arena is not None
        assert arena.warm < 16
        assert [float(repo.load(f"t{number}")["words"][0]) for number in range(8)] == [number + 1.0 for number in range(8)]
    assert any("memory runs short" in record.getMessage() for record in caplog.records)
