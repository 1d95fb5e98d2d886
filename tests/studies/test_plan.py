"""Plans: what is refused, what survives JSON, what decides an outcome, what leaks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import InvalidInput
from datastates.lineage.write.refs import check_name
from datastates.studies.plan import Plan, Variant

SUBSETS = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "b2": (3, 6)}


def tree(**changes: Any) -> Plan:
    """Two stages; ``changes`` are of the child."""
    parent = Variant("1", None, 2, {"lr": 0.1, "width": 8}, ("a",), ("b", "c"))
    child = Variant("1.1", "1", 3, {"lr": 0.2}, ("a", "b"), ("c",))
    return Plan((parent, replace(child, **changes)), SUBSETS, ("a",))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "1"}, "two variants are called '1'"),
        ({"name": "one two"}, "cannot name a branch"),
        ({"parent": "2"}, "comes from '2', which is no variant before it"),
        ({"parent": "1.1"}, "comes from '1.1', which is no variant before it"),
        ({"epochs": 0}, "has 0 epochs"),
        ({"epochs": 1.5}, r"has 1\.5 epochs"),
        ({"epochs": True}, "has True epochs"),
        ({"config": {"lr": float("nan")}}, "lr=nan: give a finite number"),
        ({"config": {"lr": [1]}}, "lr=a list: give a text"),
        ({"config": {"seed": 2**63}}, "seed=9223372036854775808: whole numbers have 64 bits"),
        ({"train": ("a", "d")}, "uses 'd', which is no subset: there are 'a', 'b'"),
        ({"validation": ("d",)}, "uses 'd', which is no subset"),
        ({"train": ()}, "is trained on nothing"),
        (
            {"validation": ("b",)},
            "validated on 2 samples that it or an ancestor is trained on, 2 among them",
        ),
        (
            {"train": ("b",), "validation": ("a",)},
            "validated on 2 samples that it or an ancestor is trained on, 0 among them",
        ),
        (
            {"validation": ("b2",)},
            "validated on 1 samples that it or an ancestor is trained on, 3 among them",
        ),
        ({"train": None, "validation": ("a",)}, "validated on 2 samples"),
    ],
)
def test_variant_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        tree(**changes)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Plan(()), "no variants"),
        (
            lambda: Plan((Variant("1"),), {}, ("a",)),
            "seen names 'a', which is no subset: there are none",
        ),
        # what is refused
        (lambda: Plan((Variant("1"),), {"a": (0.5,)}), "subset 'a' holds what is no index"),  # type: ignore[dict-item]
        (lambda: Plan((Variant("1"),), {"a": (-1,)}), "subset 'a' holds -1"),
        (lambda: tree()["2"], "no variant '2': it has '1', '1.1'"),
        (lambda: tree().rows(["z"]), "no subset 'z'"),
    ],
)
def test_what_no_plan_can_mean_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        make()


def test_leak_is_found_in_an_ancestor_however_far_above() -> None:
    chain = [Variant("v0", None, 1, {}, ("a",))]
    chain += [Variant(f"v{number}", f"v{number - 1}", 1, {}, ("b",)) for number in range(1, 3000)]
    assert len(Plan(tuple(chain), SUBSETS).path("v2999")) == 3000
    with pytest.raises(InvalidInput, match="'v2999' is validated on 2 samples"):
        Plan((*chain[:-1], replace(chain[-1], validation=("a",))), SUBSETS)


# --- what it says ---------------------------------------------------------------------------------


def test_path_config_and_rows_are_those_of_the_whole_path() -> None:
    plan = tree()
    assert [step.name for step in plan.path("1.1")] == ["1", "1.1"]
    assert plan.config("1.1", {"lr": 9.0, "dropout": 0.5}) == {
        "lr": 0.2,
        "width": 8,
        "dropout": 0.5,
    }
    assert [variant.name for variant in plan.children(None)] == ["1"]
    assert [variant.name for variant in plan.children("1")] == ["1.1"]
    assert plan.rows(("b2", "b")) == (2, 3, 6)
    assert (plan.size, plan.samples("1"), plan.samples("1.1")) == (7, 2, 4)


def test_variant_without_data_of_its_own_has_all_of_the_samples() -> None:
    assert Plan((Variant("1"),), SUBSETS).samples("1") == 7
    assert Plan((Variant("1"),)).samples("1") == 0


def test_leaks_names_validation_that_the_start_has_seen_in_part() -> None:
    variants = (
        Variant("1", validation=("a", "c")),
        Variant("2", validation=("b",)),
        Variant("3", validation=("c",)),
    )
    assert Plan(variants, SUBSETS, ("a", "b2")).leaks() == {"1": ("a",), "2": ("b",)}
    assert Plan(variants, SUBSETS).leaks() == {}


def test_any_integers_are_indices_and_later_changes_of_them_are_not_seen() -> None:
    rows = torch.tensor([3, 1])
    # wider than it says
    plan = Plan((Variant("1"),), {"a": range(2), "b": np.array([4]), "c": rows})  # type: ignore[dict-item]
    rows[0] = 7
    assert plan.subsets == {"a": (0, 1), "b": (4,), "c": (3, 1)}
    assert plan == Plan.from_dict(json.loads(json.dumps(plan.to_dict())))


# --- JSON -----------------------------------------------------------------------------------------


def is_name(text: str) -> bool:
    try:
        check_name(text)
    except InvalidInput:
        return False
    return True


NAMES = st.text(min_size=1, max_size=8).filter(is_name)
VALUES = st.one_of(
    st.text(max_size=5),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Trees over disjoint subsets, each variant trained on some of them and validated on what
    its path leaves over."""
    subset_names = draw(st.lists(st.text(max_size=4), min_size=1, max_size=5, unique=True))
    subsets = {
        name: tuple(range(number * 10, number * 10 + draw(st.integers(1, 4))))
        for number, name in enumerate(subset_names)
    }
    variants: list[Variant] = []
    trained: dict[str | None, frozenset[str]] = {None: frozenset()}
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        parent = draw(st.sampled_from([None, *(variant.name for variant in variants)]))
        train = draw(
            st.none() | st.lists(st.sampled_from(subset_names), min_size=1, unique=True).map(tuple)
        )
        known = trained[parent] | frozenset(train or ())
        validation = tuple(
            each for each in subset_names if each not in known and draw(st.booleans())
        )
        variants.append(
            Variant(
                name,
                parent,
                draw(st.integers(1, 99)),
                draw(st.dictionaries(st.text(max_size=4), VALUES, max_size=3)),
                train,
                validation,
            )
        )
        trained[name] = known
    return Plan(
        tuple(variants), subsets, tuple(draw(st.lists(st.sampled_from(subset_names), unique=True)))
    )


@given(plans(), st.dictionaries(st.text(max_size=4), VALUES, max_size=2))
def test_plan_survives_json_and_pickle_with_every_digest(
    plan: Plan, base: Mapping[str, Any]
) -> None:
    through_json = Plan.from_dict(json.loads(msgspec.json.encode(plan.to_dict())))
    for again in (through_json, pickle.loads(pickle.dumps(plan))):
        assert again == plan
        assert msgspec.json.encode(again.to_dict()) == msgspec.json.encode(plan.to_dict()), (
            "types and order too"
        )
        assert [again.digest(variant.name, base) for variant in again.variants] == [
            plan.digest(each.name, base) for each in plan.variants
        ]


def without(plain: dict[str, Any], *path: Any, **values: Any) -> dict[str, Any]:
    """The plan as JSON with values changed somewhere in it."""
    at: Any = plain
    for part in path:
        at = at[part]
    at.update(values)
    return plain


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ([], "Expected `object`"),
        ({}, "missing required field `variants`"),
        ({"variants": []}, "no variants"),
        (
            without(tree().to_dict(), "variants", 1, epochs="3"),
            r"Expected `int`, got `str`.*\$\.variants\[1\]\.epochs",
        ),
        (
            without(tree().to_dict(), "variants", 1, epoch=3),
            r"variants\[1\] has 'epoch'; a variant has 'name', 'parent', 'epochs'",
        ),
        (without(tree().to_dict(), "subsets", a=[0.5]), r"\$\.subsets\[\.\.\.\]"),
        (without(tree().to_dict(), variant=[]), "unknown field `variant`"),
        (without(tree().to_dict(), version=2), "version 2: this release reads version 1"),
        (without(tree().to_dict(), "variants", 1, validation=["a"]), "validated on 2 samples"),
    ],
)
def test_what_is_no_plan_is_refused_and_says_where(plain: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Plan.from_dict(plain)


# --- what decides an outcome ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        tree(epochs=4),
        tree(config={"lr": 0.3}),
        tree(config={"lr": 0.2, "dropout": 0.1}),
        tree(config={}),
        tree(config={"lr": 0.2, "seed": 1}),
        tree(train=("a",)),
        tree(train=None),
        tree(validation=()),
        tree(parent=None, config={"lr": 0.2, "width": 8}),
        Plan((replace(tree()["1"], epochs=9), tree()["1.1"]), SUBSETS),
        Plan((replace(tree()["1"], config={"lr": 0.7, "width": 8}), tree()["1.1"]), SUBSETS),
        Plan((replace(tree()["1"], train=("b2",), validation=("c",)), tree()["1.1"]), SUBSETS),
        Plan(tree().variants, {**SUBSETS, "a": (0, 9)}),
        Plan(tree().variants, {**SUBSETS, "c": (4,)}),
    ],
)
def test_digest_changes_with_all_that_can_change_an_outcome(changed: Plan) -> None:
    assert changed.digest("1.1") != tree().digest("1.1")


@pytest.mark.parametrize(
    "same",
    [
        Plan((*tree().variants, Variant("other", epochs=7)), SUBSETS),
        Plan(tree().variants, {**SUBSETS, "more": (50,), "a": (1, 0)}),
        Plan(tree().variants, SUBSETS, ("a", "b")),
        tree(train=("b", "a")),
        tree(config={"lr": 0.2, "width": 8}),
        Plan((replace(tree()["1"], name="x"), replace(tree()["1.1"], parent="x")), SUBSETS),
        Plan(
            (replace(tree()["1"], train=("z",)), replace(tree()["1.1"], train=("z", "b"))),
            {**SUBSETS, "z": (0, 1)},
        ),
    ],
)
def test_digest_stays_with_what_cannot(same: Plan) -> None:
    assert same.digest("1.1") == tree().digest("1.1")


def test_digest_knows_of_the_base_only_what_no_variant_changes() -> None:
    plan = tree()
    assert plan.digest("1", {"lr": 5.0}) == plan.digest("1")
    assert plan.digest("1", {"dropout": 0.5}) != plan.digest("1")


def test_seed_said_again_decides_because_its_variant_is_seeded_where_it_forks() -> None:
    root = Variant("1", None, 1, {"seed": 3})
    inherits, says = (Plan((root, Variant("2", "1", 1, config))) for config in ({}, {"seed": 3}))
    assert inherits.digest("2") != says.digest("2")


def test_digest_tells_types_apart() -> None:
    values: list[Any] = [1, 1.0, True, "1", None, -0.0, 0.0]
    assert len({Plan((Variant("1", config={"x": value}),)).digest("1") for value in values}) == len(
        values
    )


@pytest.mark.parametrize(
    "value",
    [np.float64(0.5), np.float32(0.5), torch.tensor(0.5)],
    ids=lambda value: type(value).__name__,
)
def test_a_configuration_takes_numbers_of_any_sort_and_means_the_same(value: Any) -> None:
    rows: Any = np.arange(3)
    epochs: Any = np.int64(2)
    # so it is typed
    plan = Plan((Variant("only", epochs=epochs, config={"lr": value}, train=["a"]),), {"a": rows})  # type: ignore[arg-type]
    assert plan["only"] == Variant("only", epochs=2, config={"lr": 0.5}, train=("a",))
    assert type(plan["only"].config["lr"]) is float
    assert plan.digest("only") == Plan(
        (Variant("only", epochs=2, config={"lr": 0.5}, train=("a",)),), {"a": (0, 1, 2)}
    ).digest("only")
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 3},
        {"epochs": True},
        {"epochs": 1.5},
        {"config": [1]},
        {"config": {1: 2}},
        {"config": {"a": b"x"}},
        {"train": 3},
    ],
    ids=str,
)
def test_a_variant_of_the_wrong_sort_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Plan((Variant(**{"name": "only", **wrong}),), {"a": (0,)})
