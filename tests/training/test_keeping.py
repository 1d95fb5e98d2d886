"""How many states stay in memory where nobody said, how memory for them is taken little by
little, and what the user is told of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import datastates
from datastates.config import Config
from datastates.engine import memory_budget
from datastates.engine.memory_budget import Prefaulter
from datastates.policy.contract import (
    AT_ONCE_BYTES,
    FEW,
    FEWEST,
    SMALL_BYTES,
    bytes_allowed,
    bytes_at_once,
    bytes_kept,
    is_tight,
)
from datastates.repository import Repository
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena

MANY = 1 << 20
SMALL = SMALL_BYTES // CHUNK_BYTES


def kept(*sizes: int, capacity: int = MANY, is_given: bool = False) -> int:
    return (
        bytes_kept(
            [size * CHUNK_BYTES for size in sizes], capacity * CHUNK_BYTES, is_given=is_given
        )
        // CHUNK_BYTES
    )


def at_once(*sizes: int, capacity: int = MANY, is_given: bool = False) -> int:
    return (
        bytes_at_once(
            [size * CHUNK_BYTES for size in sizes], capacity * CHUNK_BYTES, is_given=is_given
        )
        // CHUNK_BYTES
    )


def test_a_version_that_shares_most_takes_a_little_more_and_one_that_shares_nothing_takes_what_another_had() -> (
    None
):
    assert bytes_allowed(20, warm=64, at_once=64, kept=200) - 64 == 5
    assert bytes_allowed(20, warm=30, at_once=64, kept=200) == 64
    assert bytes_allowed(20, warm=198, at_once=64, kept=200) == 200


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody touches memory ahead."""
    monkeypatch.setattr(
        Arena, "warm_up", lambda arena, count=1: threading.Event().wait(0.01) or True
    )


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
    # a test's own
    return datastates.open(path / "runs", config=Config(durable_interval_s=None, **options))  # type: ignore[arg-type]


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
        assert repo.core.arena.capacity > 2 * SMALL_BYTES, (
            "this machine has too little memory for this test"
        )
        assert repo.core.arena.warm <= SMALL_BYTES
        assert repo.core.tiers.captured is not None
        assert len(list(repo.core.tiers.captured.uids())) == SMALL // 4 - 1


@pytest.mark.usefixtures("cold")
def test_what_is_warm_is_used_again_before_more_is_touched_than_a_few_states_need(
    tmp_path: Path,
) -> None:
    weight = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    most = at_once(4, is_given=True)
    with (
        open_by_default(tmp_path, memory_bytes=2 * AT_ONCE_BYTES) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        capture(run, weight, most // 4 + 5)
        assert repo.core.arena is not None
        assert most <= repo.core.arena.warm // CHUNK_BYTES <= most + 3
        assert repo.core.tiers.captured is not None
        assert len(list(repo.core.tiers.captured.uids())) == most // 4 - 1


@pytest.mark.usefixtures("cold")
def test_states_that_may_not_leave_take_more_memory_than_is_kept(tmp_path: Path) -> None:
    weight = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    started, may_write = threading.Event(), threading.Event()

    def on_step(name: str) -> None:
        started.set()
        assert may_write.wait(60)

    with (
        open_by_default(tmp_path, on_step=on_step) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        try:
            for number in range(SMALL // 4 + 3):
                capture(run, weight, 1)
                repo.tag(f"kept-{number}", run.head)
            assert started.wait(60)
            assert repo.core.arena is not None
            assert repo.core.arena.warm > SMALL_BYTES
        finally:
            may_write.set()


def test_captures_in_flight_are_waited_for_before_more_is_taken_than_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bytes_kept", "bytes_at_once"):
        monkeypatch.setattr(
            f"datastates.engine.memory_budget.{name}",
            lambda sizes, capacity, is_given, latest=None: 6 * CHUNK_BYTES,
        )
    weight = torch.arange(CHUNK_BYTES // 4, dtype=torch.float32)
    with open_by_default(tmp_path) as repo, repo.track(weight=weight, rng=False) as run:
        for _ in range(200):
            weight.add_(1)
            run.capture()
        assert repo.core.arena is not None
        assert repo.core.arena.warm <= 7 * CHUNK_BYTES, (
            "and one that was being warmed when a capture took the last"
        )


def test_one_line_says_how_many_states_are_kept_and_how_to_keep_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    with (
        caplog.at_level(logging.INFO, logger="datastates"),
        open_by_default(tmp_path) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        capture(run, weight, 3)
        said = [message for message in caplog.messages if "kept in memory" in message]
    (line,) = said
    assert line.startswith(
        f"the newest {SMALL // 4 - 1} states (16 MiB each) are kept in memory; memory_bytes= "
    )


class Watched(Arena):
    """Tells when so many slots are warm."""

    def __init__(self, slots: int, until: int) -> None:
        super().__init__(slots * CHUNK_BYTES)
        self.until, self.is_there, self.touched = until, threading.Event(), list[int]()

    def warm_up(self, count: int = 1) -> bool:
        found = super().warm_up(count)
        self.touched.append(count)
        if self.warm >= self.until * CHUNK_BYTES:
            self.is_there.set()
        return found


@pytest.fixture
def warmers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Prefaulter]]:
    monkeypatch.setattr(memory_budget, "_REST", 0.0)
    monkeypatch.setattr(memory_budget, "_MERGE_REST", 0.0)
    made: list[Prefaulter] = []
    yield made
    for prefaulter in made:
        prefaulter.close()


@pytest.mark.parametrize(("is_given", "until"), [(False, SMALL), (True, 60)])
def test_memory_becomes_warm_slot_by_slot_up_to_what_is_kept(
    is_given: bool, until: int, warmers: list[Prefaulter]
) -> None:
    arena = Watched(60, until)
    warmers.append(Prefaulter(arena, is_given=is_given))
    assert arena.warm == 0, "nothing is touched for nobody"
    warmers[0].expect("main", 2 * CHUNK_BYTES)
    assert arena.is_there.wait(60)
    warmers.pop().close()
    assert arena.warm == until * CHUNK_BYTES
    assert set(arena.touched) == {1}


def test_small_pages_are_merged_once_enough_memory_is_warm(
    warmers: list[Prefaulter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastates.storage.arena._SLOW_S", -1.0)
    arena = Arena(10 * CHUNK_BYTES)
    slots = arena.acquire([CHUNK_BYTES] * 4)
    assert slots is not None
    arena.make_real(slots)
    assert arena.has_small_pages
    warmers.append(Prefaulter(arena, is_given=True))
    warmers[0].expect("main", CHUNK_BYTES)
    deadline = time.monotonic() + 60
    while arena.has_small_pages:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert arena.warm == 10 * CHUNK_BYTES
    warmers.pop().close()
    arena.close()


def test_a_line_that_ended_needs_no_memory_any_more(warmers: list[Prefaulter]) -> None:
    arena = Watched(200, 200)
    warmers.append(Prefaulter(arena, is_given=False))
    warmers[0].expect("main", 20 * CHUNK_BYTES)
    assert warmers[0].ahead > (FEW * 20 - 1) * CHUNK_BYTES
    warmers[0].forget("main")
    assert warmers[0].ahead == 0
    warmers[0].expect("other", CHUNK_BYTES)
    assert warmers[0].ahead > SMALL_BYTES - CHUNK_BYTES


# --- memory runs short ----------------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "held", "expected"),
    [
        (8 * GIB, 0, False),
        (8 * GIB, 40 * GIB, False),
        (8 * GIB, 60 * GIB, True),
        (63 << 20, 0, True),
        (65 << 20, 0, False),
        (0, 0, True),
    ],
)
def test_memory_is_short_when_less_than_an_eighth_is_left_of_what_states_could_have(
    available: int, held: int, expected: bool
) -> None:
    assert is_tight(available, held) is expected


def test_no_more_memory_is_touched_where_it_runs_short_and_it_goes_on_when_there_is_some_again(
    warmers: list[Prefaulter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "_LOOK_S", 0.0)
    monkeypatch.setattr(memory_budget, "_SHORT_S", 0.0)
    arena, left = Watched(60, 60), [GIB]

    def available() -> int:
        return 0 if left[0] and arena.warm >= 20 * CHUNK_BYTES else GIB

    warmers.append(Prefaulter(arena, is_given=True, available=available))
    warmers[0].expect("main", 2 * CHUNK_BYTES)
    while warmers[0].within is None:
        assert not arena.is_there.is_set()
    assert arena.warm == warmers[0].within
    assert arena.warm - CHUNK_BYTES < warmers[0].ahead <= arena.warm
    assert arena.warm < 60 * CHUNK_BYTES
    left[0] = 0
    warmers[0].look()
    assert warmers[0].within is None
    assert arena.is_there.wait(60)


def test_states_are_written_to_make_room_where_memory_runs_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_budget, "_LOOK_S", 0.0)
    monkeypatch.setattr(memory_budget, "available_memory_bytes", lambda: 0)
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
        assert arena.warm < 16 * CHUNK_BYTES
        assert [float(repo.load(f"t{number}")["words"][0]) for number in range(8)] == [
            number + 1.0 for number in range(8)
        ]
    assert any("memory runs short" in record.getMessage() for record in caplog.records)


# --- small states share memory --------------------------------------------------------------------


def held(repo: Repository) -> tuple[int, int]:
    """How many states are in memory, and what they take of it."""
    memory = repo.core.tiers.captured
    assert memory is not None
    # of the memory tier
    return len(list(memory.uids())), memory.bytes_held + memory.bytes_beside


@pytest.mark.parametrize("size", [100_000, 240_000, 1_000_000, 2_202_008, 3 << 20, CHUNK_BYTES])
def test_128_mib_hold_100_mib_of_states_whatever_their_size(size: int, tmp_path: Path) -> None:
    weight = torch.arange(size // 4, dtype=torch.float32)
    with (
        open_by_default(tmp_path, memory_bytes=128 << 20) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        for _ in range((150 << 20) // size):
            weight.add_(1)
            run.capture()
        repo.flush()
        states, taken = held(repo)
        assert states * size <= taken
        assert 100 << 20 <= taken <= 132 << 20


def test_two_lines_of_other_sizes_hold_100_mib_together(tmp_path: Path) -> None:
    weights = [torch.arange(size // 4, dtype=torch.float32) for size in (2_202_008, CHUNK_BYTES)]
    with open_by_default(tmp_path, memory_bytes=128 << 20) as repo:
        runs = [
            repo.track(weight=weight, rng=False, branch=f"line-{index}")
            for index, weight in enumerate(weights)
        ]
        for number in range(60):
            weights[number % 2].add_(1)
            runs[number % 2].capture().wait(timeout_s=60)
        repo.flush()
        assert held(repo)[1] >= 100 << 20


@pytest.mark.long
def test_ten_thousand_small_states_stay_in_memory_and_any_of_them_is_restored(
    tmp_path: Path,
) -> None:
    parameters = [torch.zeros(54) for _ in range(18)]  # 3.9 kB
    captures = []
    with open_by_default(tmp_path) as repo, repo.track(parameters=parameters, rng=False) as run:
        for step in range(10_000):
            parameters[step % 18].fill_(step)
            captures.append(run.capture())
        repo.flush()
        states, taken = held(repo)
        assert states == 10_000
        assert taken < 128 << 20
        assert repo.core.arena is not None
        assert repo.core.arena.warm + taken < 256 << 20
        for step in (17, 4_321, 9_999):
            found = repo.load(captures[step].uid)["parameters"]
            assert sorted(float(value[0]) for value in found) == list(range(step - 17, step + 1))
