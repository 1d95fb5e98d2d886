"""CheckFreq on a clock of its own: the interval that it finds, its bounds, and that it follows
when costs drift."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import Cadence, CheckFreq, OnImprovement
from datastates.policy.auto import Measures, fit
from datastates.policy.contract import Costs
from tests.policy.trainings import Training
from tests.support.effort import examples


def least_interval(share: float, interval_s: float, write_s: float, slowdown: float) -> int:
    """The smallest number of captures with which a write fits in, and costs at most the share,
    by arithmetic."""
    delay = write_s * slowdown / (1 + slowdown)
    return max(1, math.ceil(write_s / interval_s), math.ceil(delay / (share * interval_s)))


@settings(max_examples=examples(60), deadline=None)
@given(
    share=st.floats(0.01, 0.2),
    interval_s=st.floats(0.05, 2.0),
    length=st.floats(0.1, 20.0),
    slowdown=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
)
def test_without_noise_it_finds_the_smallest_interval(
    share: float, interval_s: float, length: float, slowdown: float
) -> None:
    training = Training(CheckFreq(share), interval_s, length * interval_s, slowdown)
    training.run(400)
    assert training.choice is not None
    assert training.choice.every is not None
    least = least_interval(share, interval_s, length * interval_s, slowdown)
    assert training.choice.every >= math.floor(0.88 * least), training.choice.why
    assert training.choice.every <= max(least + 1, math.ceil(least * 1.34)), training.choice.why


@pytest.mark.parametrize("seed", range(4))
def test_with_noise_the_share_is_kept_and_a_write_never_meets_the_next(seed: int) -> None:
    training = Training(CheckFreq(0.035), 0.1, 0.72, slowdown=0.08, noise=0.08, seed=seed)
    training.run(300)
    begun = training.captures, len(training.writes)
    training.run(2000)
    work = (training.captures - begun[0]) * 0.1
    delayed = sum(ended - began for began, ended in training.writes[begun[1] :]) * 0.08 / 1.08
    assert delayed / work <= 0.035 + 0.01
    assert training.most_pending == 1, "no state waited for another to be written"
    assert len(training.writes) - begun[1] > 2000 / (least_interval(0.035, 0.1, 0.72, 0.08) * 2), (
        "and it is used"
    )


def test_it_follows_when_the_disk_slows_down_and_when_it_recovers() -> None:
    training = Training(CheckFreq(), 0.1, 0.35, noise=0.02)
    training.run(200)
    assert [choice.every for choice in training.choices] == [4]
    training.write_s = 1.25
    training.run(300)
    assert training.choices[-1].every in (13, 14)
    assert (
        "more often the next write would begin before the last has ended"
        in training.choices[-1].why
    )
    training.write_s = 0.15
    training.run(600)
    assert training.choices[-1].every == 2


def test_what_cannot_be_told_from_noise_moves_nothing() -> None:
    training = Training(CheckFreq(), 0.1, 0.35, noise=0.1, seed=3)
    training.run(3000)
    assert len(training.choices) <= 6, [choice.every for choice in training.choices]


def test_states_are_written_apart_before_anything_is_known() -> None:
    training = Training(CheckFreq(), 0.1, 0.15)
    training.run(40)
    starts = [began for began, _ in training.writes]
    assert starts[0] == pytest.approx(100.1), "the first is safe at once"
    assert all(later - earlier > 0.8 for earlier, later in pairwise(starts[:3]))


def test_captures_that_come_rarely_are_not_left_in_memory_while_it_learns() -> None:
    training = Training(CheckFreq(), 20.0, 0.5)
    training.run(12)
    assert len(training.writes) == 6, "every second one, as by default: the newest every 30 s"


def test_it_joins_others() -> None:
    training = Training(
        CheckFreq() | Cadence(every=50, interval_s=None) | OnImprovement("loss"),
        0.1,
        0.55,
        slowdown=0.0,
    )
    training.run(300)
    choice = training.choice
    assert choice is not None
    assert (choice.every, choice.cadence) == (6, "checkfreq:3.5%|every:50|best:loss")
    assert choice.why.count("; or ") == 2
    assert len(training.choices) == 1


@given(st.floats(0.01, 10), st.floats(0, 2), st.lists(st.floats(0, 1), min_size=3, max_size=80))
def test_the_line_through_exact_samples_is_found(
    base: float, slope: float, shares: list[float]
) -> None:
    samples = [(base + slope * share * base, share * base) for share in shares]
    found_base, found_slope, _ = fit(samples)
    for duration, overlap in samples:
        assert found_base + found_slope * overlap == pytest.approx(duration, rel=1e-3, abs=1e-6)


def test_a_night_in_suspense_is_no_cost_of_writing() -> None:
    samples = [(0.1, 0.0), (0.11, 0.1)] * 40
    base, slope, _ = fit([*samples, (30_000.0, 0.1)])
    assert base == pytest.approx(0.1, rel=0.1)
    assert slope < 0.2


@pytest.mark.parametrize(("length", "slowdown"), [(7.0, 0.0), (7.0, 0.3), (0.4, 0.0), (0.4, 0.5)])
def test_steps_of_uneven_length_are_no_cost_of_writing(length: float, slowdown: float) -> None:
    found = []
    for seed in range(6):
        training = Training(CheckFreq(0.1), 0.1, 0.1 * length, slowdown, noise=0.3, seed=seed)
        training.run(800)
        costs = training.costs
        assert costs is not None
        found.append(costs.overhead_s / costs.write_s)
    true = slowdown / (1 + slowdown)
    off = 0.08 if length > 1 else 0.15  # a short write is seen in a small part of an interval
    assert true - off <= sum(found) / len(found) <= true + off, found


def test_a_write_that_takes_far_longer_than_the_others_puts_the_next_one_off() -> None:
    training = Training(CheckFreq(), 0.1, 0.35)
    training.run(200)
    training.write_s = 3.0
    training.run(25)
    assert training.most_pending == 1


def test_little_is_no_knowledge() -> None:
    measures = Measures()
    for index in range(40):
        measures.captured(index * 0.1)
    measures.wrote(1.0, 1.1)
    measures.wrote(2.0, 2.1)
    assert measures.costs() is None
    measures.wrote(3.0, 3.1)
    costs = measures.costs()
    assert isinstance(costs, Costs)
    assert (round(costs.interval_s, 3), round(costs.write_s, 3), round(costs.overhead_s, 6)) == (
        0.1,
        0.1,
        0.0,
    )
