"""Policies of retention: what they keep, why, and how they are said."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastates.errors import InvalidInput
from datastates.policy.retention import (
    DEFAULT,
    All,
    Best,
    Decision,
    Every,
    Fact,
    Interval,
    Latest,
    Ledger,
    Policies,
    Retention,
    Rule,
    Tagged,
    Thin,
    Within,
    decide,
    densities,
    retention_of,
)
from tests.support.effort import examples

NOW = 1_000_000.0

keys = st.sampled_from(["loss", "val accuracy", 'a"b:c', "x,y", "ü\\", "f1"]) | st.text(
    min_size=1, max_size=5
).filter(lambda key: "\0" not in key and key.isprintable())
times = st.integers(1, 10**7).map(float) | st.floats(1e-3, 1e9, allow_nan=False)
rules: st.SearchStrategy[Rule] = st.one_of(
    st.just(All()),
    st.just(Tagged()),
    st.builds(Latest, st.integers(1, 20)),
    st.builds(Best, keys, st.integers(1, 5), st.sampled_from([None, "min", "max"])),
    st.builds(Every, st.integers(1, 500)),
    st.builds(Interval, times),
    st.builds(Within, times),
    st.builds(Thin, st.integers(1, 20)),
)
bounds = st.none() | st.integers(1, 1 << 45)
policies = st.builds(Retention, st.lists(rules, max_size=3).map(tuple), bounds)


@st.composite
def histories(draw: st.DrawFn) -> list[Fact]:
    """States of some branches; each has files of its own, and some that others of its branch
    need too."""
    facts = []
    for line in range(draw(st.integers(1, 3))):
        indexes = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=25)))
        moments = sorted(
            draw(st.lists(st.floats(0, NOW), min_size=len(indexes), max_size=len(indexes)))
        )
        for index, moment in zip(indexes, moments, strict=True):
            shared = [
                (f"{line}-shared-{number}", 50)
                for number in draw(st.sets(st.integers(0, 2), max_size=2))
            ]
            files = ((f"{line}-{index}", draw(st.integers(1, 100))), *shared)
            value = draw(st.floats(-5, 5) | st.just(math.nan))
            held = draw(st.sampled_from([None, None, None, "tag 'warm'"]))
            facts.append(
                Fact(
                    f"{line}-{index}",
                    line,
                    f"b{line}",
                    index,
                    index * 10,
                    moment,
                    files,
                    {"loss": value, "f1": -value},
                    held,
                )
            )
    return facts


def kept(decisions: Sequence[Decision]) -> set[str]:
    """The uids of what stays."""
    return {each.fact.uid for each in decisions if each.is_kept}


def taken(decisions: Sequence[Decision]) -> int:
    """The bytes of what stays."""
    return Ledger(each.fact for each in decisions if each.is_kept).bytes


@given(policies)
@settings(max_examples=examples(200))
@example(DEFAULT)
@example(Retention.best('say "so": twice', 2, goal="max"))
@example(Retention())
def test_a_policy_comes_back_from_its_text(policy: Retention) -> None:
    assert Retention.parse(policy.text) == policy
    assert retention_of(policy.text) == policy


@given(histories(), policies, policies)
@settings(max_examples=examples(200), deadline=None)
def test_together_policies_keep_what_any_of_them_keeps(
    facts: list[Fact], one: Retention, other: Retention
) -> None:
    one, other = one.bounded(None), other.bounded(None)
    together = kept(decide(facts, Policies(one | other), NOW))
    assert together == kept(decide(facts, Policies(one), NOW)) | kept(
        decide(facts, Policies(other), NOW)
    )


@given(histories(), policies)
@settings(max_examples=examples(200), deadline=None)
def test_every_state_gets_one_decision_with_a_reason_and_what_is_held_stays(
    facts: list[Fact], policy: Retention
) -> None:
    decisions = decide(
        facts, Policies(policy, {"b1": Retention.latest(1) | Retention.at_most(1)}), NOW
    )
    assert sorted(each.fact.uid for each in decisions) == sorted(fact.uid for fact in facts)
    assert all(each.reason for each in decisions)
    assert all(
        each.is_kept and each.reason == each.fact.held for each in decisions if each.fact.held
    )


@given(histories(), policies)
@settings(max_examples=examples(200), deadline=None)
def test_pruning_again_at_the_same_moment_drops_nothing_more(
    facts: list[Fact], policy: Retention
) -> None:
    first = decide(facts, Policies(policy), NOW)
    again = decide([each.fact for each in first if each.is_kept], Policies(policy), NOW)
    assert kept(again) == kept(first)


@given(histories(), policies, st.integers(1, 2000), st.integers(1, 2000))
@settings(max_examples=examples(200), deadline=None)
def test_a_bound_holds_but_for_what_never_goes_and_a_wider_one_keeps_more(
    facts: list[Fact], policy: Retention, one: int, more: int
) -> None:
    free = decide(facts, Policies(policy.bounded(None)), NOW)
    narrow = decide(facts, Policies(policy.bounded(one)), NOW)
    wide = decide(facts, Policies(policy.bounded(one + more)), NOW)
    assert kept(narrow) <= kept(wide) <= kept(free)
    firm = {each.fact.uid for each in free if each.fact.held or each.reason.startswith("the best")}
    assert taken(narrow) <= one or kept(narrow) <= firm
    assert firm <= kept(narrow)


@given(histories(), st.integers(1, 500))
@settings(max_examples=examples(100), deadline=None)
def test_a_branch_has_a_bound_of_its_own(facts: list[Fact], bound: int) -> None:
    decisions = decide(facts, Policies(Retention.all(), {"b0": Retention.at_most(bound)}), NOW)
    own = [each for each in decisions if each.fact.line == 0]
    assert taken(own) <= bound or all(each.fact.held for each in own if each.is_kept)
    assert all(each.is_kept for each in decisions if each.fact.line != 0)


@given(histories(), st.integers(1, 8))
@settings(max_examples=examples(100), deadline=None)
def test_a_denser_thinning_keeps_more(facts: list[Fact], count: int) -> None:
    few, many = (
        kept(decide(facts, Policies(Retention.thin(number)), NOW)) for number in (count, count + 1)
    )
    assert few <= many


def history(count: int, *, size: int = 10, **changes: object) -> list[Fact]:
    """One branch of states, one a second."""
    return [
        Fact(
            f"u{number}",
            1,
            "main",
            number,
            number,
            float(number),
            ((f"u{number}", size),),
            {"loss": abs(number - count // 2)},
        )
        for number in range(count)
    ]


def test_thinning_keeps_about_as_many_for_each_doubling_and_can_go_on_for_ever() -> None:
    stays: list[Fact] = []
    for fact in history(4000):
        stays = [
            each.fact
            for each in decide([*stays, fact], Policies(Retention.thin(4)), NOW)
            if each.is_kept
        ]
    distances = [stays[-1].index - fact.index for fact in stays]
    for octave in range(3, 11):
        assert 2 <= sum(2**octave <= distance < 2 ** (octave + 1) for distance in distances) <= 8, (
            octave
        )
    once = [
        each.fact.index
        for each in decide(history(4000), Policies(Retention.thin(4)), NOW)
        if each.is_kept
    ]
    assert [fact.index for fact in stays] == once, "it makes no difference when it was thinned"


def test_densities_of_a_ruler() -> None:
    assert densities([]) == []
    found = densities(history(9))
    assert (found[0], found[-1]) == (0, 0)
    assert found[1:8] == [7 / 2, 6 / 4, 5 / 2, 4 / 8, 3 / 2, 2 / 4, 1 / 2]


def test_each_rule_keeps_what_it_says() -> None:
    facts = history(100)
    indexes = {
        text: [
            each.fact.index
            for each in decide(facts, Policies(Retention.parse(text)), 99.0)
            if each.is_kept
        ]
        for text in (
            "latest:3",
            "best:3:loss",
            "best:1:loss:max",
            "every:30",
            "interval:40s",
            "within:2s",
            "tagged",
            "all",
        )
    }
    assert indexes == {
        "latest:3": [97, 98, 99],
        "best:3:loss": [49, 50, 51],
        "best:1:loss:max": [0],
        "every:30": [0, 30, 60, 90],
        "interval:40s": [0, 40, 80],
        "within:2s": [97, 98, 99],
        "tagged": [],
        "all": list(range(100)),
    }


def test_the_newest_of_equally_good_states_is_the_best() -> None:
    facts = [
        Fact(f"u{number}", 1, "main", number, number, 0.0, (), {"f1": 1.0}) for number in range(3)
    ]
    (best,) = [each for each in decide(facts, Policies(Retention.best("f1")), NOW) if each.is_kept]
    assert (best.fact.index, best.reason) == (2, "the best f1 of branch main: 1")
    assert Best("f1").is_better(1.0, 1.0)
    assert not Best("f1").is_better(math.nan, None)


def test_a_bound_thins_old_states_before_new_ones_and_the_latest_last() -> None:
    decisions = decide(
        history(64), Policies(Retention.parse("all latest:4 best:1:loss at-most:160")), NOW
    )
    indexes = [each.fact.index for each in decisions if each.is_kept]
    assert len(indexes) == 16
    assert set(indexes) >= {0, 32, 60, 61, 62, 63}
    assert sum(index < 32 for index in indexes) < sum(index >= 32 for index in indexes)
    reasons = {each.reason for each in decisions if not each.is_kept}
    assert reasons == {"thinned: all states together may take 160"}


def test_a_file_that_a_kept_state_needs_counts_once() -> None:
    facts = [
        Fact(f"u{number}", 1, "main", number, number, 0.0, (("base", 1000), (f"u{number}", 1)))
        for number in range(10)
    ]
    decisions = decide(facts, Policies(Retention.at_most(1005)), NOW)
    assert taken(decisions) == 1005
    assert len(kept(decisions)) == 5
    ledger = Ledger(facts)
    assert (ledger.bytes, ledger.own_bytes(facts[3]), ledger.drop(facts[3]), ledger.bytes) == (
        1010,
        1,
        1,
        1009,
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "latest",
            "latest:",
            "latest:0",
            "latest:x",
            "latest:1:2",
            "latest:99999999999999999999",
            "latest:5;",
            "every:-1",
        ),
        *(
            "best:3",
            "best:x:loss",
            "best:1:loss:up",
            'best:1:"loss',
            'best:1:"a"b',
            r'best:1:"\q"',
            "keep:3",
            "all:1",
            "thin:0",
        ),
        *(
            "interval:0",
            "interval:5y",
            "within:inf",
            "within:nan",
            "at-most:",
            "at-most:x",
            "at-most:0",
            "at-most:1G at-most:2G",
        ),
    ],
)
def test_what_means_nothing_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput):
        Retention.parse(text)


@pytest.mark.parametrize("wrong", [None, 3, b"all", ["latest:3"], Latest, object()])
def test_what_is_no_policy_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput, match=r"datastates\.Retention"):
        retention_of(wrong)
    with pytest.raises(InvalidInput):
        Retention((wrong,))  # type: ignore[arg-type]  # that is what is tried


def test_bounds_and_goals_are_checked() -> None:
    assert (Retention.at_most("1K") | Retention.at_most("2K")).bound == 1024
    assert (DEFAULT | Retention.at_most("2K")).bound == 2048
    assert (DEFAULT | Retention.latest(2)).bound == "auto"
    assert Retention.parse(DEFAULT.text) == DEFAULT
    assert Retention.parse("latest:2,at-most:1.5G").text == "latest:2 at-most:1536M"
    with pytest.raises(InvalidInput, match="goal"):
        Retention.best("loss", goal="up")  # type: ignore[arg-type]  # that is what is tried
    with pytest.raises(InvalidInput, match="'third' is not a size"):
        Retention.at_most("third")
