"""Young's, Daly's and the two-level intervals beside a simulation of failures, and beside the
best interval of a sweep."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates import Daly, TwoLevel, Young
from datastates.errors import InvalidInput
from datastates.policy.computed import (
    Level,
    daly,
    daly_first,
    expected_waste,
    mtbf_of,
    two_level,
    young,
)
from datastates.policy.contract import Costs
from tests.policy.trainings import Training

SETTINGS = 200
MTBF_S = 10_000.0


def simulated_waste(
    interval_s: float,
    near: Level,
    far: Level | None = None,
    every: int = 1,
    *,
    failures: int,
    seed: int,
) -> float:
    """Event after event: work, near and far checkpoints, failures of two kinds at random,
    recoveries. Counts what was saved in the end."""
    drawn = random.Random(seed)
    far_mtbf = math.inf if far is None else far.mtbf_s
    next_near, next_far = (
        drawn.expovariate(1 / near.mtbf_s),
        drawn.expovariate(1 / far_mtbf) if far is not None else math.inf,
    )
    now, in_pattern, saved, failed = 0.0, 0, 0, 0
    while failed < failures:
        is_last = in_pattern == every - 1
        ends = now + interval_s + near.cost_s + (far.cost_s if far is not None and is_last else 0.0)
        if ends <= min(next_near, next_far):
            now, in_pattern, saved = ends, (0 if is_last else in_pattern + 1), saved + 1
            continue
        failed += 1
        if next_far <= next_near:
            assert far is not None
            saved -= in_pattern  # all since the last far one is gone
            now, in_pattern = next_far + far.recovery_s, 0
        else:
            now = next_near + near.recovery_s
        next_near, next_far = (
            now + drawn.expovariate(1 / near.mtbf_s),
            now + (drawn.expovariate(1 / far_mtbf) if far is not None else math.inf),
        )
    return 1 - saved * interval_s / now


def ratios() -> list[float]:
    """The delay of a checkpoint against the time between failures: 200 of them, from a
    hundred-thousandth to twice."""
    return [10 ** (-5 + index / (SETTINGS - 1) * (math.log10(2) + 5)) for index in range(SETTINGS)]


def swept(near: Level) -> float:
    """The least waste of 800 intervals."""
    top = math.log(20 * near.mtbf_s)
    low = math.log(young(near.cost_s, near.mtbf_s) / 10)
    return min(
        expected_waste(math.exp(low + (top - low) * index / 799), near) for index in range(800)
    )


def excess(interval_s: float, near: Level, best: float) -> float:
    return expected_waste(interval_s, near) / best - 1


def test_dalys_higher_order_wastes_at_most_2_percent_more_than_the_best_interval_of_a_sweep_and_young_where_it_holds() -> (
    None
):
    for ratio in ratios():
        near = Level(ratio * MTBF_S, MTBF_S, recovery_s=30.0)
        best = swept(near)
        assert excess(daly(near.cost_s, MTBF_S), near, best) <= 0.02, ratio
        if ratio <= 0.45:
            assert excess(young(near.cost_s, MTBF_S), near, best) <= 0.02, ratio
            assert excess(daly_first(near.cost_s, MTBF_S), near, best) <= 0.02, ratio


def test_young_and_dalys_first_order_waste_more_where_a_checkpoint_costs_as_much_as_there_is_between_failures() -> (
    None
):
    near = Level(MTBF_S, MTBF_S)
    best = swept(near)
    assert excess(young(MTBF_S, MTBF_S), near, best) > 0.02
    assert excess(daly_first(MTBF_S, MTBF_S), near, best) > 0.02
    assert excess(daly(MTBF_S, MTBF_S), near, best) < 0.0002


def test_expected_waste_is_what_a_simulation_of_failures_wastes() -> None:
    """Fewer settings than of the formulas, each with so many failures that chance moves the mean
    by less than the tolerance."""
    drawn = random.Random(11)
    for seed in range(12):
        near = Level(10 ** drawn.uniform(-3.5, -0.5) * MTBF_S, MTBF_S, drawn.uniform(0, 300))
        interval_s = daly(near.cost_s, MTBF_S) * drawn.choice([0.5, 1.0, 2.0])
        far, every = (
            (None, 1)
            if seed % 2
            else (
                Level(near.cost_s * drawn.uniform(1, 20), MTBF_S * drawn.uniform(2, 20), 600.0),
                drawn.randint(1, 8),
            )
        )
        found = simulated_waste(interval_s, near, far, every, failures=20_000, seed=seed)
        assert found == pytest.approx(expected_waste(interval_s, near, far, every), rel=0.03), (
            seed,
            near,
            far,
            every,
        )


def test_two_levels_waste_at_most_2_percent_more_than_the_best_of_a_sweep() -> None:
    drawn = random.Random(5)
    for _ in range(SETTINGS):
        near = Level(10 ** drawn.uniform(-5, -1) * MTBF_S, MTBF_S, drawn.uniform(0, 100))
        far = Level(
            near.cost_s * 10 ** drawn.uniform(0, 3), MTBF_S * 10 ** drawn.uniform(0, 3), 600.0
        )
        found = two_level(near, far)
        middle = daly(near.cost_s, MTBF_S * far.mtbf_s / (MTBF_S + far.mtbf_s))
        counts = sorted(
            {max(1, round(found.every * factor)) for factor in (0.3, 0.6, 0.9, 1, 1.1, 1.7, 3)}
            | {1, 2, 3, 10, 100}
        )
        sweep = min(
            expected_waste(middle * 10 ** (step / 15), near, far, every)
            for every in counts
            for step in range(-15, 30)
        )
        assert found.waste <= sweep * 1.02, (near, far, found)


def test_a_level_that_fails_as_often_as_the_other_is_one_level() -> None:
    found = two_level(Level(1e-9, 1e12), Level(100.0, MTBF_S))
    assert found.waste == pytest.approx(
        expected_waste(daly(100.0, MTBF_S), Level(100.0, MTBF_S)), rel=0.01
    )


@given(st.floats(1e-3, 1e7), st.floats(1e-6, 1e5), st.floats(1e-2, 1e8), st.integers(1, 1000))
def test_waste_is_a_share(interval_s: float, cost_s: float, mtbf_s: float, every: int) -> None:
    near = Level(cost_s, mtbf_s)
    for far in (None, Level(cost_s * 3, mtbf_s * 7, 1.0)):
        assert 0 <= expected_waste(interval_s, near, far, every) <= 1


# --- as policies ----------------------------------------------------------------------------------


COSTS = Costs(interval_s=0.1, write_s=0.5, overhead_s=0.02, held_s=0.001, captures=100, writes=10)


@pytest.mark.parametrize(
    ("made", "expected"),
    [(Young(3600.0), 12.02), (Daly(3600.0, is_first_order=True), 12.0), (Daly(3600.0), 12.0067)],
)
def test_the_interval_is_the_formulas_and_says_what_it_was_computed_from(
    made: Young | Daly, expected: float
) -> None:
    choice = made.choose(COSTS, None)
    assert choice is not None
    assert choice.interval_s == pytest.approx(expected, abs=0.001)
    assert "a write delays by 20 ms and takes 0.5 s, and a failure comes every 60 min" in choice.why
    assert made.choose(COSTS, choice) is choice


def test_a_write_has_ended_before_the_next_begins() -> None:
    choice = Daly(1.0).choose(COSTS, None)
    assert choice is not None
    assert choice.interval_s == COSTS.write_s
    assert choice.why.endswith("before the last has ended")


def test_what_was_observed_is_reckoned_with_unless_somebody_said_more() -> None:
    assert Young().informed(500.0).choose(COSTS, None) == Young(500.0, is_observed=True).choose(
        COSTS, None
    )
    assert "as observed here" in str(
        getattr(Young().informed(500.0).choose(COSTS, None), "why", "")
    )
    assert str(Young().informed(500.0)) == "young"
    assert Young(7.0).informed(500.0) == Young(7.0)
    assert mtbf_of(0.0, 0) == 86400.0
    assert mtbf_of(86400.0 * 9, 4) == 2 * 86400.0


def test_a_training_writes_as_often_as_the_interval_says() -> None:
    training = Training(Daly(mtbf_s=1000.0), 0.1, 0.25, slowdown=0.2, noise=0.01)
    training.run(4000)
    choice = training.choice
    assert choice is not None
    assert choice.interval_s == pytest.approx(math.sqrt(2 * 0.04 * 1000), rel=0.25)
    late = [began for began, _ in training.writes[-10:]]
    gaps = [later - earlier for earlier, later in pairwise(late)]
    assert all(gap == pytest.approx(choice.interval_s, abs=0.2) for gap in gaps)


def test_of_two_levels_every_nth_state_goes_on_where_there_is_somewhere_to_go() -> None:
    assert TwoLevel(3600.0).choose(COSTS, None) == TwoLevel(3600.0).choose(COSTS, None)
    near = TwoLevel(3600.0, 36_000.0).choose(COSTS, None)
    both = TwoLevel(3600.0, 36_000.0).choose(
        Costs(0.1, 0.5, 0.02, 0.001, 100, 10, further_s=50.0), None
    )
    assert near is not None
    assert both is not None
    assert near.further_every == 1
    assert both.further_every > 10
    assert f"every {both.further_every}th of them goes on" in both.why


def test_no_time_between_failures_is_refused() -> None:
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(InvalidInput, match="mtbf_s is"):
            Young(wrong)
    with pytest.raises(InvalidInput, match="node_mtbf_s is 0"):
        TwoLevel(node_mtbf_s=0)
