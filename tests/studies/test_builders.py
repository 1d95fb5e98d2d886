"""Builders: which variants, which data, which epochs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import InvalidInput
from datastates.studies.plan import Plan
from datastates.studies.plan_builders import (
    Choice,
    Distribution,
    LogUniform,
    Uniform,
    cut,
    ensemble,
    epochs_at,
    grid,
    kfold,
    leave_out,
    repeat,
    sample,
)

ABC = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}


# --- grids, samples, ensembles --------------------------------------------------------------------


def test_grid_has_every_combination_once_named_by_its_values() -> None:
    plan = grid(
        {"lr": [0.1, 0.01], "act": ["relu", "gelu"]},
        epochs=3,
        subsets=ABC,
        train=["a", "b"],
        validation=["c"],
        seen=["a"],
    )
    assert [variant.name for variant in plan.variants] == [
        "lr=0.1,act=relu",
        "lr=0.1,act=gelu",
        "lr=0.01,act=relu",
        "lr=0.01,act=gelu",
    ]
    assert plan["lr=0.01,act=relu"].config == {"lr": 0.01, "act": "relu"}
    assert {
        (variant.parent, variant.epochs, variant.train, variant.validation)
        for variant in plan.variants
    } == {(None, 3, ("a", "b"), ("c",))}
    assert (plan.subsets, plan.seen) == (ABC, ("a",))


def test_a_text_is_one_subset_and_not_its_letters() -> None:
    (variant,) = grid(
        {"lr": [0.1]}, epochs=1, subsets={"ab": (0, 1), "c": (2,)}, train="ab", validation="c"
    ).variants
    assert (variant.train, variant.validation) == (("ab",), ("c",))


@pytest.mark.parametrize("values", [["a b", "c"], ["x" * 99, "y"], ["a/", "b"]])
def test_grid_numbers_its_variants_where_values_cannot_be_names(values: list[str]) -> None:
    plan = grid({"text": values}, epochs=1)
    assert [(variant.name, variant.config["text"]) for variant in plan.variants] == [
        ("grid-1", values[0]),
        ("grid-2", values[1]),
    ]


DISTRIBUTIONS: dict[str, Distribution] = {
    "lr": LogUniform(1e-4, 1e-1),
    "dropout": Uniform(0, 0.5),
    "width": Choice(range(2, 9)),
}


def test_sample_is_the_same_for_a_seed_and_grows_without_changing() -> None:
    small, large = (
        sample(DISTRIBUTIONS, 5, seed=1, epochs=2),
        sample(DISTRIBUTIONS, 9, seed=1, epochs=2),
    )
    assert large.variants[:5] == small.variants
    assert (
        sample({"width": DISTRIBUTIONS["width"]}, 1, 1, 2).variants[0].config["width"]
        == small.variants[0].config["width"]
    )
    assert sample(DISTRIBUTIONS, 5, seed=2, epochs=2) != small
    first = {"lr": 0.00010445631267567237, "dropout": 0.05940140007459199, "width": 5}
    assert small["sample-1"].config == pytest.approx(first), "for good, in every process"


def test_sample_draws_over_the_whole_range_and_never_outside() -> None:
    plan = sample(DISTRIBUTIONS, 600, seed=0, epochs=1)
    # numbers
    lrs, dropouts = ([float(v.config[key]) for v in plan.variants] for key in ("lr", "dropout"))  # type: ignore[arg-type]
    assert 1e-4 <= min(lrs) < 1.2e-4
    assert 0.8e-1 < max(lrs) <= 1e-1
    for low in (1e-4, 1e-3, 1e-2):
        assert 150 < sum(low <= lr < 10 * low for lr in lrs) < 250, (
            "a third in each order of magnitude"
        )
    assert 0 <= min(dropouts) < 0.02
    assert 0.48 < max(dropouts) <= 0.5
    assert 0.22 < math.fsum(dropouts) / 600 < 0.28
    assert {variant.config["width"] for variant in plan.variants} == set(range(2, 9))


@given(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300), st.integers(0, 10))
def test_log_uniform_rounds_to_no_value_outside(low: float, high: float, seed: int) -> None:
    low, high = min(low, high), max(low, high) * 1.0001
    drawn = sample({"x": LogUniform(low, high)}, 3, seed, 1)
    # a number
    assert all(low <= float(variant.config["x"]) <= high for variant in drawn.variants)  # type: ignore[arg-type]


def test_ensemble_has_a_variant_for_each_seed() -> None:
    plan = ensemble([7, 3], epochs=4)
    assert [(variant.name, dict(variant.config), variant.epochs) for variant in plan.variants] == [
        ("seed-7", {"seed": 7}, 4),
        ("seed-3", {"seed": 3}, 4),
    ]
    assert [variant.name for variant in ensemble(3, 1).variants] == ["seed-0", "seed-1", "seed-2"]


def test_repeat_seeds_each_copy_of_a_tree_at_its_root() -> None:
    plan = repeat(leave_out(cut(8, 4), depth=2, epochs=2), seeds=[5, 6])
    assert len(plan) == 12
    assert plan["seed-6/1.2"].parent == "seed-6/1"
    assert (plan["seed-6/1"].config, plan["seed-6/1.2"].config, plan.config("seed-6/1.2")) == (
        {"seed": 6},
        {},
        {"seed": 6},
    )
    assert plan["seed-5/1.2"].validation == plan["seed-6/1.2"].validation


# --- data -----------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.data())
def test_cut_is_even_and_whole(samples: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, samples))
    parts = cut(samples, count, seed=data.draw(st.integers(0, 3)))
    assert sorted(row for rows in parts.values() for row in rows) == list(range(samples))
    assert {len(rows) for rows in parts.values()} <= {samples // count, -(-samples // count)}
    assert list(parts) == sorted(parts), "in the order of their names"
    assert all(list(rows) == sorted(rows) for rows in parts.values())


def test_cut_is_random_by_its_seed_and_takes_indices() -> None:
    assert cut(100, 4) == cut(100, 4)
    assert cut(100, 4) != cut(100, 4, seed=1)
    assert cut(100, 4)["1"] != tuple(range(25))
    assert sorted(sum(cut([5, 50, 500], 2).values(), ())) == [5, 50, 500]


def test_kfold_validates_each_sample_once_and_never_trains_on_it() -> None:
    plan = kfold(5, samples=23, epochs=2, seed=3)
    assert [variant.name for variant in plan.variants] == [
        f"without-{number}" for number in range(1, 6)
    ]
    held = [plan.rows(variant.validation) for variant in plan.variants]
    assert sorted(sum(held, ())) == list(range(23))
    for variant, out in zip(plan.variants, held, strict=True):
        assert set(plan.rows(variant.train or ())) == set(range(23)) - set(out)
    assert kfold(ABC, epochs=2, seen=["a"]).leaks() == {"without-a": ("a",)}


# --- the leave-out tree ---------------------------------------------------------------------------


def held_out(plan: Plan, name: str) -> set[int]:
    return set(plan.rows(plan[name].validation))


@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 30))
def test_tree_leaves_out_ever_smaller_parts_and_never_validates_on_what_an_ancestor_saw(
    depth: int, fan_out: int, more: int
) -> None:
    count = fan_out**depth + more
    plan = leave_out(cut(3 * count, count), depth=depth, fan_out=fan_out, epochs=8)
    everything = set(range(3 * count))
    for variant in plan.variants:
        out = held_out(plan, variant.name)
        assert set(plan.rows(variant.train or ())) == everything - out
        parent_out = everything if variant.parent is None else held_out(plan, variant.parent)
        assert out < parent_out
        assert all(
            out.isdisjoint(plan.rows(above.train or ())) for above in plan.path(variant.name)
        )
    for parent in (None, *(variant.name for variant in plan.variants)):
        children = [held_out(plan, variant.name) for variant in plan.children(parent)]
        if children:
            assert len(children) == fan_out
            assert set().union(*children) == (
                everything if parent is None else held_out(plan, parent)
            )
            assert sum(map(len, children)) == len(set().union(*children)), (
                "no sample in two of them"
            )
            assert max(map(len, children)) - min(map(len, children)) <= 3, "one subset"
    assert len(plan) == sum(fan_out**stage for stage in range(1, depth + 1))


def test_what_the_start_has_seen_leaks_nothing_where_it_is_never_left_out() -> None:
    plan = leave_out(ABC, depth=1, epochs=1, seen=["b"], always=["b"])
    assert [(variant.train, variant.validation) for variant in plan.variants] == [
        (("b", "c"), ("a",)),
        (("a", "b"), ("c",)),
    ]
    assert plan.leaks() == {}
    assert leave_out(ABC, depth=1, epochs=1, seen=["b"]).leaks() == {"2": ("b",)}


def test_variants_are_named_by_their_path() -> None:
    plan = leave_out(cut(8, 8), depth=3, epochs=1)
    names = [
        "1",
        "1.1",
        "1.1.1",
        "1.1.2",
        "1.2",
        "1.2.1",
        "1.2.2",
        "2",
        "2.1",
        "2.1.1",
        "2.1.2",
        "2.2",
        "2.2.1",
        "2.2.2",
    ]
    assert [variant.name for variant in plan.variants] == names
    assert [variant.parent for variant in plan.variants[:4]] == [None, "1", "1.1", "1.1"]
    assert plan["2.1"].validation == ("5", "6")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("flat", [10, 10, 10, 10]),
        ("linear", [10, 7, 5, 2]),
        ("log", [10, 5, 2, 1]),
        ("sqrt", [10, 7, 6, 5]),
    ],
)
def test_epochs_fall_by_schedule(schedule: str, expected: list[int]) -> None:
    # one of them
    assert [epochs_at(schedule, 10, stage, 4) for stage in range(1, 5)] == expected  # type: ignore[arg-type]
    plan = leave_out(cut(16, 16), depth=4, epochs=10, schedule=schedule)  # type: ignore[arg-type]
    assert [plan[name].epochs for name in ("1", "1.1", "1.1.1", "1.1.1.1")] == expected


@pytest.mark.parametrize("schedule", ["flat", "linear", "log", "sqrt"])
def test_no_stage_has_less_than_one_epoch(schedule: str) -> None:
    # one of them
    assert {epochs_at(schedule, 1, stage, 9) for stage in range(1, 10)} == {1}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: grid({"lr": []}, epochs=1), r"lr=\[\]: give a sequence"),
        (lambda: grid({"act": "relu"}, epochs=1), "act='relu': give a sequence"),
        (lambda: grid({"lr": [1, 1]}, epochs=1), "lr has a value twice"),
        (lambda: sample({}, 0, 0, 1), "a sample of 0 variants"),
        (lambda: Uniform(1, 1), "Uniform from 1 to 1"),
        (lambda: LogUniform(0, 1), "LogUniform from 0 to 1"),
        (lambda: Choice([]), "Choice of no values"),
        (lambda: ensemble([1, 1], 1), "two variants are called 'seed-1'"),
        (lambda: kfold({"a": (0,)}, epochs=1), "1 folds: give it at least 2"),
        (lambda: kfold(3, epochs=1), "3 folds of nothing"),
        (lambda: kfold(ABC, epochs=1, samples=3), "both subsets and samples"),
        (lambda: kfold({"a": (0, 1), "b": (1, 2)}, epochs=1), "validated on 1 samples"),
        (lambda: leave_out(ABC, depth=2, epochs=1), "3 subsets to leave out, for 4 leaves"),
        (
            lambda: leave_out(ABC, depth=1, epochs=1, always=["a", "b"]),
            "1 subsets to leave out, for 2 leaves",
        ),
        (
            lambda: leave_out(ABC, depth=1, epochs=1, always=["x"]),
            "always names 'x', which is no subset: there are 'a', 'b', 'c'",
        ),
        (lambda: leave_out(ABC, depth=0, epochs=1), "a tree of depth 0"),
        (lambda: leave_out(ABC, depth=1, fan_out=1, epochs=1), "fan-out 1"),
        (
            lambda: leave_out(ABC, depth=1, epochs=1, schedule="cubic"),  # type: ignore[arg-type]
            "no schedule 'cubic': choose one of flat, linear, log, sqrt",
        ),
        (lambda: epochs_at("flat", 1, 3, 2), "stage 3 of 2"),
        (lambda: cut(3, 4), "3 samples cannot be cut into 4"),
        (lambda: repeat(ensemble(2, 1), 2), "variant 'seed-0' has a seed of its own"),
    ],
)
def test_what_makes_no_plan_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()
