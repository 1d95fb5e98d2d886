"""Each training keeps so many of its newest states in memory: older ones leave unless something
needs them, and make room first."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Status, Unavailable
from datastates.config import BackPressure
from datastates.engine.scheduler import (
    Adopted,
    Engine,
    Evict,
    LineOpened,
    Recorded,
    RefsChanged,
    RoomNeeded,
    Wanted,
    Written,
)
from datastates.errors import InvalidInput
from datastates.policy.contract import FEW, FEWEST, Cadence, bytes_kept
from datastates.state.manifest import CHUNK_BYTES

NEVER = Cadence(every=None, interval_s=None)


def engine(latest: int | None = 2, *lines: str) -> Engine:
    made = Engine(memory_latest=latest)
    for line in lines or ("main",):
        made.handle(LineOpened(line, NEVER, line))
    return made


def evicted(made: Engine, *uids: str, line: str = "main") -> list[str]:
    """What leaves memory as these are recorded, carried out."""
    gone: list[str] = []
    for uid in uids:
        for action in made.handle(Recorded(uid, line, 0.0)):
            if isinstance(action, Evict):
                assert action.until is None
                gone += action.uids
                for each in action.uids:
                    made.forget(each)
    return gone


def room(made: Engine) -> tuple[str, ...]:
    return next(
        (
            action.uids
            for action in made.handle(RoomNeeded((9,), False, BackPressure.WAIT))
            if isinstance(action, Evict)
        ),
        (),
    )


def test_what_is_older_than_the_newest_leaves_as_the_next_is_recorded() -> None:
    assert evicted(engine(2), "a", "b", "c", "d") == ["a", "b"]
    assert evicted(engine(1), "a", "b", "c") == ["a", "b"]
    assert evicted(engine(None), "a", "b", "c", "d") == []


def test_each_training_keeps_its_own() -> None:
    made = engine(2, "main", "side")
    assert evicted(made, "a", "b", line="main") == []
    assert evicted(made, "x", "y", "z", line="side") == ["x"]
    assert evicted(made, "c", line="main") == ["a"]


def test_what_is_named_or_wanted_stays_until_it_is_on_disk() -> None:
    made = engine(1)
    evicted(made, "a")
    made.handle(RefsChanged(frozenset({"a"}), {"main": "a"}))
    assert evicted(made, "b", "c") == ["b"], "a is tagged, and is being written"
    made.handle(Written(("a",)))
    assert evicted(made, "d") == ["a", "c"]
    made.handle(Wanted("d"))
    assert evicted(made, "e") == []
    made.handle(Written(("d",)))
    assert evicted(made, "f") == ["d", "e"]


def test_a_clone_stays_however_many_states_are_captured() -> None:
    made = engine(1)
    made.handle(Adopted("clone"))
    assert evicted(made, "a", "b", "c") == ["a", "b"]


def test_room_is_made_of_what_is_not_to_be_kept_first() -> None:
    made = engine(2, "main", "side")
    evicted(made, "a", "b", line="main")
    evicted(made, "x", "y", line="side")
    made.handle(RefsChanged(frozenset(), {"main": "b", "side": "y", "kept": "x"}))
    assert evicted(made, "z", line="side") == [], "a branch names x"
    made.handle(RefsChanged(frozenset(), {"main": "b", "side": "z"}))
    assert room(made)[0] == "x"
    assert set(room(made)) == {"x", "a", "y"}


def test_room_for_as_many_is_made_warm() -> None:
    def kept(latest: int | None, capacity: int = 10_000) -> int:
        return (
            bytes_kept([100 * CHUNK_BYTES], capacity * CHUNK_BYTES, is_given=False, latest=latest)
            // CHUNK_BYTES
        )

    assert kept(None) == kept(2) == FEW * 100
    assert kept(1) == FEWEST * 100
    assert kept(10) == 1200
    assert kept(10, capacity=900) == 900


def test_a_training_keeps_that_many_and_any_of_them_is_restored(tmp_path: Path) -> None:
    weight = torch.zeros(100)
    config = Config(memory_bytes=64 << 20, memory_latest=3, durable_interval_s=None)
    with (
        datastates.open(tmp_path / "runs", config=config) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        states = []
        for number in range(8):
            weight.fill_(number)
            states.append(run.capture().wait())
            if number == 1:
                repo.tag("kept", states[-1])
        repo.flush()
        held = [repo.core.tiers.has(state.uid) for state in states]
        assert held == [False, True, False, False, False, True, True, True]
        for number in (1, 5, 6, 7):
            assert repo.load(states[number])["weight"][0] == number
        with pytest.raises(Unavailable):
            repo.load(states[4])
    with datastates.open(tmp_path / "runs", config=config) as repo:
        assert [repo.state(state.uid).status for state in (states[1], states[4], states[7])] == [
            Status.DURABLE,
            Status.EVICTED,
            Status.DURABLE,
        ]


def test_a_user_is_told_where_fewer_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.zeros(4 << 20)  # of 16 MiB
    config = Config(memory_bytes=64 << 20, memory_latest=20, durable_interval_s=None)
    with (
        caplog.at_level(logging.INFO),
        datastates.open(tmp_path / "runs", config=config) as repo,
        repo.track(w=weight, rng=False) as run,
    ):
        run.capture().wait()
    (said,) = [record for record in caplog.records if "kept in memory" in record.getMessage()]
    assert said.levelno == logging.WARNING
    assert "of the 20 that memory_latest asks for" in said.getMessage()
    assert "memory_bytes=" in said.getMessage()


def test_what_is_no_number_of_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (0, -1, 1.5, "many", True):
        with pytest.raises(InvalidInput, match="memory_latest"):
            Config(memory_latest=wrong)  # type: ignore[arg-type]  # what nobody should give
    assert Config.from_environment({"DATASTATES_MEMORY_LATEST": "5"}).memory_latest == 5
    with pytest.raises(InvalidInput, match="DATASTATES_MEMORY_LATEST"):
        Config.from_environment({"DATASTATES_MEMORY_LATEST": "0"})
