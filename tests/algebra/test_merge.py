"""The numbers of states that are made of others: against plain numpy, and a greedy soup against its rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import Conflict, Repository, State, Unavailable
from datastates.algebra.recipes import Method, Recipe, combine
from datastates.lineage.states import Edge, EdgeKind
from tests.algebra.parents import Training, Tree, arrays, bits, fork, net, track
from tests.support.effort import examples

# --- against numpy -----------------------------------------------------------------------------------------------------------


def ties_of(values: np.ndarray[Any, Any], base: np.ndarray[Any, Any], weights: list[float], density: float, scale: float) -> Any:
    """Element by element, as the paper says it."""
    changes = values - base
    for change in changes:
        kept = math.ceil(density * change.size)
        order = sorted(abs(change).ravel(), reverse=True)
        change[abs(change) < order[kept - 1]] = 0
    result = np.array(base)
    for place in np.ndindex(base.shape):
        column = [(float(change[place]), weight) for change, weight in zip(changes, weights, strict=True)]
        total = sum(value * weight for value, weight in column)
        agreeing = [(value, weight) for value, weight in column if value * total > 0]
        share = sum(weight for _, weight in agreeing)
        result[place] += scale * (sum(value * weight for value, weight in agreeing) / share if share else 0.0)
    return result


def slerp_of(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], t: float) -> Any:
    cosine = float(one.ravel() @ other.ravel() / (np.linalg.norm(one) * np.linalg.norm(other)))
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * one + np.sin(t * angle) * other) / np.sin(angle)


def test_a_mean_is_the_mean(repo: Repository) -> None:
    heads = fork(repo)
    weights = [0.5, 0.3, 0.2]

    plain, weighted = repo.merge(heads), repo.merge(heads, weights=weights)

    members = [arrays(repo, head) for head in heads]
    for name, value in arrays(repo, plain).items():
        assert np.allclose(value, np.mean([member[name] for member in members], axis=0), rtol=0, atol=1e-7)
        expected = sum(weight * member[name] for weight, member in zip(weights, members, strict=True))
        assert np.array_equal(arrays(repo, weighted)[name], np.float32(expected).astype(float)), "rounded once"
    assert plain.parents == tuple(head.uid for head in heads)
    assert weighted.edges == (Edge(heads[1].uid, EdgeKind.SOUP, 0.3), Edge(heads[2].uid, EdgeKind.SOUP, 0.2))
    assert weighted.attributes["merge.method"] == "mean"


def test_a_moving_average_moves_from_the_oldest_to_the_newest(repo: Repository) -> None:
    fork(repo, 1, steps=1)
    training = Training(0)
    with repo.track(model=training.model, optimizer=training.optimizer, branch="v0") as run:
        for _ in range(3):
            training.step()
            run.capture().wait()

    average = repo.merge(["v0~3", "v0~2", "v0~1", "v0"], method="ema", decay=0.8, into="v0")

    states = [arrays(repo, f"v0~{back}") for back in (4, 3, 2, 1)]
    for name, value in arrays(repo, average).items():
        expected = states[0][name]
        for state in states[1:]:
            expected = 0.8 * expected + 0.2 * state[name]
        assert np.allclose(value, expected, rtol=0, atol=1e-7)
    assert repo.state("v0").uid == average.uid
    assert average.step == repo.state("v0~1").step
    assert average.attributes["merge.decay"] == 0.8
    assert average.parents == tuple(repo.state(f"v0~{back}").uid for back in (1, 2, 3, 4))


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp_lies_on_the_arc(repo: Repository, t: float) -> None:
    one, other = (torch.randn(50, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    heads = [track(repo, name, model={"w": tensor}) for name, tensor in (("a", one), ("b", other))]

    merged = arrays(repo, repo.merge(heads, method="slerp", t=t))["w"]

    assert np.allclose(merged, slerp_of(one.double().numpy(), other.double().numpy(), t), rtol=0, atol=1e-6)


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_ties_trims_elects_and_averages(repo: Repository, density: float) -> None:
    heads = fork(repo)
    weights = [1.0, 2.0, 0.5]

    merged = repo.merge(heads, method="ties", weights=weights, density=density, scale=0.7)

    base, members, found = arrays(repo, "warm"), [arrays(repo, head) for head in heads], arrays(repo, merged)
    assert merged.attributes["merge.base"] == repo.state("warm").uid
    assert merged.edges[0].kind is EdgeKind.MERGE
    for name, value in found.items():
        expected = ties_of(np.array([member[name] for member in members]), base[name], weights, density, 0.7)
        assert np.allclose(value, expected, rtol=0, atol=1e-6), name
    assert any(not np.array_equal(found[name], base[name]) for name in base)


finite = st.floats(-100, 100, width=32)


@settings(max_examples=examples(60))
@given(data=st.data(), count=st.integers(2, 4), size=st.integers(1, 12), density=st.sampled_from([0.05, 0.4, 1.0]))
def test_ties_of_any_numbers(data: st.DataObject, count: int, size: int, density: float) -> None:
    rows = data.draw(st.lists(st.lists(finite, min_size=size, max_size=size), min_size=count + 1, max_size=count + 1))
    base, *parts = (torch.tensor(row, dtype=torch.float64) for row in rows)
    recipe = Recipe(Method.TIES, (1.0,) * count, None, "keep", density=density, scale=1.0, base="0" * 24)

    found = combine(recipe, parts, base)

    expected = ties_of(np.array([part.numpy() for part in parts]), base.numpy(), [1.0] * count, density, 1.0)
    assert np.allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"method": "slerp"}, {"method": "ties", "base": "base", "density": 0.2}], ids=str)
def test_what_is_not_a_number_stays_so(repo: Repository, options: dict[str, Any]) -> None:
    for name, value in (("base", 0.0), ("a", 1.0), ("b", 2.0)):
        weights = torch.linspace(0.5, 1.5, 20) * value
        weights[7] = math.nan if name == "b" else 0.0
        track(repo, name, model={"w": weights})
    found = arrays(repo, repo.merge(["a", "b"], **options))["w"]
    assert np.flatnonzero(np.isnan(found)).tolist() == [7]


@settings(max_examples=examples(60))
@given(data=st.data(), count=st.integers(2, 5), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
def test_a_mean_lies_among_its_parts_and_knows_no_order_of_pieces(data: st.DataObject, count: int, dtype: torch.dtype) -> None:
    rows = data.draw(st.lists(st.lists(finite, min_size=5, max_size=5), min_size=count, max_size=count))
    parts = [torch.tensor(row).to(dtype) for row in rows]
    recipe = Recipe(Method.MEAN, (1.0 / count,) * count, None, "keep")

    found = combine(recipe, parts)

    stacked = torch.stack(parts).double()
    slack = 1e-9
    assert found.dtype is dtype
    assert bool((found.double() >= stacked.amin(0) - slack).all())
    assert bool((found.double() <= stacked.amax(0) + slack).all())
    for at in range(5):  # alone, an element that is the same in all parts stays as it is, where here it may be rounded
        alone = combine(recipe, [part[at : at + 1] for part in parts])
        if len({bits(part[at : at + 1]) for part in parts}) > 1:
            assert bits(found[at : at + 1]) == bits(alone)


# --- greedy ------------------------------------------------------------------------------------------------------------------


def spread(repo: Repository, *values: float) -> list[State]:
    return [track(repo, f"m{number}", model={"w": torch.tensor([value])}) for number, value in enumerate(values)]


def distance(tree: Mapping[str, Tree]) -> float:
    return abs(float(tree["model"]["w"]) - 1.0)


@pytest.mark.parametrize(("better", "evaluate"), [("lower", distance), ("higher", lambda tree: -distance(tree))])
def test_a_greedy_soup_keeps_what_helps_and_only_that_are_parents(repo: Repository, better: Any, evaluate: Any) -> None:
    members = spread(repo, 5.0, 0.8, 1.3, 1.3, -7.0)

    soup = repo.merge(members, method="greedy", evaluate=evaluate, better=better, into="soup")

    # From 0.8 (0.2 off): 1.3 makes 1.05 (0.05 off), the second 1.3 would make 1.133, 5 and -7 are worse.
    assert soup.parents == (members[1].uid, members[2].uid)
    assert float(repo.load("soup")["model"]["w"]) == pytest.approx(1.05)
    sign = 1 if better == "lower" else -1
    assert soup.attributes["merge.score"] == pytest.approx(sign * 0.05)
    assert soup.attributes["merge.best_member_score"] == pytest.approx(sign * 0.2)
    assert soup.attributes["merge.candidates"] == 5
    repo.verify_merge("soup")


def test_a_greedy_soup_that_could_not_be_named_is_refused_before_anything_is_evaluated(repo: Repository) -> None:
    members = spread(repo, 5.0, 0.8)
    repo.tag("taken", members[0])
    track(repo, "elsewhere", model={"w": torch.tensor([0.0])})
    for name, kind in (("taken", "tag"), ("elsewhere", "branch")):
        with pytest.raises(Conflict, match=f"'{name}' is a {kind} at .*, which is none of the states to merge: name a new branch"):
            repo.merge(members, method="greedy", evaluate=lambda tree: pytest.fail("it came to that"), better="lower", into=name)
    assert repo.merge(members, method="greedy", evaluate=distance, better="lower", into="m1").parents == (members[1].uid,)


def test_a_greedy_soup_for_the_branch_of_a_worse_state_is_refused_at_the_first_better_one(repo: Repository) -> None:
    members = spread(repo, 0.5, 5.0, 0.8, 1.3)
    asked: list[float] = []

    def evaluate(tree: Mapping[str, Tree]) -> float:
        asked.append(float(tree["model"]["w"]))
        return distance(tree)

    better = (
        rf"'m1' is a branch at {members[1].uid[:10]}, for which evaluate gave 4, and for {members[0].uid[:10]} it gave 0.5: .* a new branch"
    )
    with pytest.raises(Conflict, match=better):
        repo.merge(members, method="greedy", evaluate=evaluate, better="lower", into="m1")
    assert asked == [5.0, 0.5]


def test_a_greedy_soup_goes_on_from_the_head_among_equals(repo: Repository) -> None:
    members = spread(repo, 2.0, 2.0)
    assert repo.merge(members, method="greedy", evaluate=distance, better="lower", into="m1").parents[0] == members[1].uid


def test_a_greedy_soup_that_cannot_be_recorded_is_refused_before_anything_is_evaluated(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = spread(repo, 5.0, 0.8)
    monkeypatch.setattr(repo.core, "home", replace(repo.core.home, read_only="it is on a read-only disk"))
    with pytest.raises(Unavailable, match="can only be read"):
        repo.merge(members, method="greedy", evaluate=lambda tree: pytest.fail("it came to that"), better="lower")


def test_a_member_that_changes_nothing_is_taken_and_a_best_one_may_stay_alone(repo: Repository) -> None:
    same = spread(repo, 2.0, 2.0)
    assert repo.merge(same, method="greedy", evaluate=lambda tree: 1.0, better="higher").parents == tuple(each.uid for each in same)
    lone = repo.merge([same[0], track(repo, "far", model={"w": torch.tensor([9.0])})], method="greedy", evaluate=distance, better="lower")
    assert lone.parents == (same[0].uid,)
    assert lone.edges == ()
    repo.verify_merge(lone.uid)


def test_what_evaluate_is_given_is_its_own_and_only_what_is_merged(repo: Repository) -> None:
    heads = fork(repo, 2)
    before = [bits(repo.load(head.uid)) for head in heads]
    seen: list[list[str]] = []

    def evaluate(tree: Any) -> float:
        seen.append(list(tree))
        model = net(1)
        model.load_state_dict(tree["model"])
        for tensor in tree["model"].values():
            tensor.zero_()
        return 1.0

    merged = repo.merge(heads, method="greedy", evaluate=evaluate, better="lower")

    assert seen == [["model"]] * 3
    assert [bits(repo.load(head.uid)) for head in heads] == before
    assert any(value.any() for value in arrays(repo, merged).values())
