"""Cadences by count, time and metric: what each picks, what several pick together, and their
texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import Cadence, CheckFreq, Daly, OnImprovement, TwoLevel, Young
from datastates.engine.cadence_stats import CadenceFacts, CaptureFacts
from datastates.errors import InvalidInput
from datastates.policy.auto import Auto
from datastates.policy.contract import AnyOf, CadenceChoice, Moment, Policy
from datastates.policy.text import parse, policy
from tests.support.effort import examples

SPANS = st.floats(1e-3, 1e9)
FIXED = st.builds(
    Cadence,
    st.none() | st.integers(1, 10**9),
    st.none() | st.floats(0, 1e12),
    st.none() | st.integers(1, 10**9),
)
KEYS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40
)
IMPROVEMENTS = st.builds(OnImprovement, KEYS, st.sampled_from([None, True, False]))
COMPUTED = st.one_of(
    st.builds(Auto, st.floats(1e-6, 1), st.integers(1, 10**15)),
    st.builds(CheckFreq, st.floats(1e-6, 1)),
    st.builds(Young, st.none() | SPANS),
    st.builds(Daly, st.none() | SPANS, st.booleans()),
    st.builds(TwoLevel, st.none() | SPANS, SPANS),
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any policy, of any parts."""
    made: Policy = draw(st.one_of(FIXED, IMPROVEMENTS, COMPUTED))
    for other in draw(st.lists(st.one_of(FIXED, IMPROVEMENTS), max_size=3)):
        made = made | other
    return made


def picked(made: Policy, *metrics: dict[str, float], steps: int = 1) -> list[int]:
    """Which of these captures, a second apart, are written."""
    pacing = CadenceFacts(made)
    return [
        index
        for index, found in enumerate(metrics)
        if pacing.is_due_at_capture(
            CaptureFacts(float(index), None, index * steps, found), float(index), waiting=0
        )
    ]


@settings(max_examples=examples(300))
@given(policies())
def test_the_text_of_a_policy_means_the_policy(made: Policy) -> None:
    again = parse(str(made))
    assert set(str(again).split("|")) == set(str(made).split("|")), "two cadences may be one again"
    if not isinstance(made, AnyOf):
        assert again == made


@settings(max_examples=examples(200))
@given(
    policies(),
    policies(),
    st.lists(st.fixed_dictionaries({}, optional={"a": st.floats(), "b": st.floats()}), max_size=12),
)
def test_several_pick_what_any_of_them_picks_of_the_same_moment(
    one: Policy, other: Policy, found: list[dict[str, float]]
) -> None:
    if one.is_computed and other.is_computed:
        with pytest.raises(InvalidInput, match="each compute a cadence: choose one of them"):
            _ = one | other
        return
    both = one | other
    for index, metrics in enumerate(found):
        moment = Moment(
            float(index),
            index,
            last_write=0.0,
            last_index=0,
            last_step=0,
            step=index,
            count=index + 1,
            metrics=metrics,
        )
        assert both.is_due(moment) == (one.is_due(moment) or other.is_due(moment))
        dues = [due for due in (one.next_due(moment), other.next_due(moment)) if due is not None]
        assert both.next_due(moment) == min(dues, default=None)


def test_two_cadences_that_say_different_things_are_one() -> None:
    assert Cadence(10, None) | Cadence(interval_s=5.0) == Cadence(10, 5.0)
    assert isinstance(Cadence(10, None) | Cadence(4, None), AnyOf)

    class Seventh(Cadence):
        """Picks what its fields do not say."""

        __slots__ = ()

        def is_due(self, moment: Moment, /) -> bool:
            return moment.step == 7

    for both in (Seventh(None, None) | Cadence(10, None), Cadence(10, None) | Seventh(None, None)):
        assert picked(both, *[{}] * 13) == [7, 9]
    assert picked(Cadence(10, None) | Cadence(4, None), *[{}] * 13) == [3, 7, 9, 11]


def test_a_policy_of_the_user_s_need_not_be_hashable() -> None:
    @dataclass
    class Thursdays(Policy):
        def is_due(self, moment: Moment, /) -> bool:
            return False

        def next_due(self, moment: Moment, /) -> float | None:
            return None

        def told(self) -> CadenceChoice:
            return CadenceChoice(str(self), "on Thursdays")

        def __str__(self) -> str:
            return "thursdays"

    assert (
        Thursdays() | Cadence(2, None)
    ).told().why == "on Thursdays; or every 2 captures, as it was told"


@pytest.mark.parametrize("every", [1, 2, 5])
def test_captures_are_counted_from_one(every: int) -> None:
    assert [index + 1 for index in picked(Cadence(every, None), *[{}] * 15)] == [
        *range(every, 16, every)
    ]


def test_the_first_state_at_or_after_each_multiple_of_steps_is_written() -> None:
    assert [
        4 * index for index in picked(Cadence(interval_s=None, steps=10), *[{}] * 9, steps=4)
    ] == [12, 20, 32]
    assert picked(Cadence(interval_s=None, steps=5), *[{}] * 16) == [5, 10, 15]


def test_steps_are_counted_on_after_a_resume_and_after_going_back() -> None:
    pacing, steps = (
        CadenceFacts(Cadence(interval_s=None, steps=10)),
        [13, 14, 19, 20, 21, 12, 13, 20, 21],
    )
    assert [
        step
        for step in steps
        if pacing.is_due_at_capture(CaptureFacts(0.0, None, step), 0.0, waiting=0)
    ] == [13, 20, 12, 20]


def test_every_nth_pick_goes_on_to_further_tiers() -> None:
    pacing = CadenceFacts(
        Cadence(1, None), choice=CadenceChoice("mine", "for a test", every=1, further_every=3)
    )
    near = []
    for number in range(1, 10):
        pacing.is_due_at_capture(CaptureFacts(), 0.0, waiting=0)
        near += [number] * pacing.keeps_near
    assert near == [1, 2, 4, 5, 7, 8]


def test_a_better_value_is_written_by_the_name_of_the_metric_or_as_told() -> None:
    values = [
        {"x_loss": 3.0},
        {"x_loss": 3.0},
        {},
        {"x_loss": 2.0},
        {"x_loss": math.nan},
        {"x_loss": 2.5},
        {"x_loss": 1.0},
    ]
    assert picked(OnImprovement("x_loss"), *values) == [0, 3, 6]
    assert picked(OnImprovement("x_loss", is_rising=True), *values) == [0]
    assert picked(
        OnImprovement("accuracy"), *({"accuracy": each} for each in (0.1, 0.3, 0.2, 0.4))
    ) == [0, 1, 3]


def test_a_value_counts_though_its_state_was_written_for_another_reason() -> None:
    made = Cadence(2, None) | OnImprovement("loss")
    assert picked(made, {"loss": 5.0}, {"loss": 5.0}, {"loss": 1.0}, {"loss": 2.0}) == [0, 1, 2, 3]
    assert picked(made, {"loss": 5.0}, {"loss": 1.0}, {"loss": 2.0}) == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "say every:10"),
        ("daily", "'daily' means nothing"),
        ("every:0", "must be at least 1"),
        ("every:1:2", "'every:1:2' means nothing"),
        ("seconds:soon", "'soon' is no time span"),
        ("best:loss:up", "'up' is neither max nor min"),
        ("checkfreq:200%", "give a share of the time"),
        ("daly:6h:third", "neither first nor higher"),
        ("young:0", "give a number of seconds above 0"),
        ("young|daly", "young and daly each compute a cadence"),
        ("every:10|", "say every:10"),
    ],
)
def test_a_text_that_means_nothing_is_refused_by_its_part(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(text)


def test_a_policy_is_given_as_itself_or_as_text() -> None:
    assert policy("checkfreq:5%|best:loss") == CheckFreq(0.05) | OnImprovement("loss")
    assert policy("two-level:90m:2d") == TwoLevel(5400.0, 172800.0)
    wrong: list[Any] = [None, 3, Cadence, b"every:10"]
    for each in wrong:
        with pytest.raises(InvalidInput, match=r"give a datastates\.Cadence, such as"):
            policy(each)
    with pytest.raises(InvalidInput, match=r"joined by \| with 'every:10'"):
        _ = CheckFreq() | "every:10"


def test_a_count_beyond_all_floats_is_spelled_too() -> None:
    assert parse(str(Cadence(10**60, None))) == Cadence(10**60, None)
