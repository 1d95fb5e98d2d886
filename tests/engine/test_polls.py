"""When ranks ask what became of their parts: soon where the others do the same, seldom where
they may only want something."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import datastates
from datastates import Cadence, OnImprovement
from datastates.engine import handle, runner
from datastates.engine.handle import Line, Part
from datastates.engine.periodic import HURRIED_S, LAST_S, PER_S, SELDOM_S, SOON_S, PollSchedule
from datastates.engine.runner import Runner
from datastates.policy.contract import Policy
from tests.support.ranks import ranks_of


class Own(Cadence):
    """A user's, of which nothing is known."""

    __slots__ = ()


def questions(polls: PollSchedule, within_s: float, *, is_awaiting: bool = True) -> list[float]:
    """When it asks, from 0 on, as long as nothing is heard."""
    polls.begin(0.0, is_awaiting=is_awaiting)
    now, asked = polls.delay(0.0), []
    while now <= within_s:
        asked.append(now)
        polls.asked(now, is_awaiting=is_awaiting)
        now += polls.delay(now)
    return asked


def test_pauses_double_and_whoever_waits_asks_sooner() -> None:
    assert questions(PollSchedule(), 0.2) == pytest.approx([SOON_S, 3 * SOON_S, 7 * SOON_S])
    assert questions(PollSchedule(), 1.0, is_awaiting=False) == pytest.approx(
        [SELDOM_S, 3 * SELDOM_S]
    )
    hurried = PollSchedule()
    hurried.hurry(0.0)
    assert questions(hurried, 0.02) == pytest.approx([HURRIED_S, 3 * HURRIED_S])
    waiting = PollSchedule()
    waiting.begin(0.0, is_awaiting=True)
    waiting.hurry(0.001)
    assert waiting.delay(0.001) == 0.0, "somebody began to wait"
    waiting.asked(0.001, is_awaiting=True)
    assert waiting.delay(0.001) == pytest.approx(HURRIED_S)


@pytest.mark.parametrize("askers", [1, 125, 1000, 10_000])
@pytest.mark.parametrize("is_hurried", [False, True])
def test_however_many_ask_the_database_is_asked_no_more_than_it_can_answer(
    askers: int, *, is_hurried: bool
) -> None:
    polls = PollSchedule(askers)
    if is_hurried:
        polls.hurry(0.0)
    asked = questions(polls, 60.0)
    assert askers * len([at for at in asked if at <= 1.0]) <= max(PER_S, 10)
    assert askers * len(asked) <= 60 * PER_S
    assert max(b - a for a, b in pairwise(asked)) <= max(LAST_S, askers / PER_S)


def test_nobody_asks_where_nothing_is_to_be_heard() -> None:
    polls = PollSchedule()
    polls.hurry(0.0)
    assert polls.is_off
    polls.begin(0.0, is_awaiting=True)
    polls.end()
    assert polls.is_off


def test_a_rank_asks_for_the_disks_of_the_others_once_its_part_is_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nothing else lets the engine thread look around,
    monkeypatch.setattr(runner, "CHECK_EVERY_S", 3600.0)
    monkeypatch.setattr(handle, "SAY_AGAIN_S", 3600.0)  # nor does whoever waits
    with ranks_of(tmp_path, None, 2) as ranks:
        for _ in range(3):
            for capture in [rank.capture() for rank in ranks]:
                assert capture.wait("durable", timeout_s=60).status == "durable"


@pytest.mark.parametrize(
    ("cadence", "own"),
    [
        (Cadence(every=2), Cadence(every=2, interval_s=None)),
        (Cadence(every=None, interval_s=5.0, steps=3), Cadence(every=None, interval_s=None)),
        (
            Cadence(every=3) | OnImprovement("loss"),
            Cadence(every=3, interval_s=None) | OnImprovement("loss"),
        ),
        (Cadence(every=3) | datastates.CheckFreq(), Cadence(every=None, interval_s=None)),
        (Own(every=4), Cadence(every=None, interval_s=None)),
    ],
    ids=str,
)
def test_what_counts_decide_every_rank_decides_and_the_first_decides_all_else(
    tmp_path: Path, cadence: Policy, own: Policy
) -> None:
    with datastates.open(tmp_path, memory_bytes=32 << 20) as repo:
        repo.core.engage()
        runner = repo.core.runner()
        assert isinstance(runner, Runner)
        for rank, decides in ((0, cadence), (1, own)):
            line = Line(f"rank {rank}", "main", None, None, part=Part(rank, 2, "job"))
            runner.open_line(line, cadence, [])
            assert str(runner._engine._lines[line.name].pacing.policy) == str(decides)
            runner.close_line(line)
