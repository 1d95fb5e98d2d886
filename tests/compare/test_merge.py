"""The numbers of states that are made of others, against plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates import Repository
from datastates.compare.merge import Method, Recipe, combine
from datastates.lineage.states import Edge, EdgeKind
from tests.compare.parents import Training, arrays, bits, fork, track
from tests.support.effort import examples


def test_a_mean_is_the_mean(repo: Repository) -> None:
    heads = fork(repo)
    weights = [0.5, 0.3, 0.2]

    plain, weighted = repo.merge(heads), repo.merge(heads, weights=weights)

    members = [arrays(repo, head) for head in heads]
    for name, value in arrays(repo, plain).items():
        assert np.allclose(
            value, np.mean([member[name] for member in members], axis=0), rtol=0, atol=1e-7
        )
        expected = sum(
            weight * member[name] for weight, member in zip(weights, members, strict=True)
        )
        assert np.array_equal(arrays(repo, weighted)[name], np.float32(expected).astype(float)), (
            "rounded once"
        )
    assert plain.parents == tuple(head.uid for head in heads)
    assert weighted.edges == (
        Edge(heads[1].uid, EdgeKind.SOUP, 0.3),
        Edge(heads[2].uid, EdgeKind.SOUP, 0.2),
    )
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


finite = st.floats(-100, 100, width=32)


@pytest.mark.parametrize("options", [{}, {"method": "ema", "decay": 0.5}], ids=str)
def test_what_is_not_a_number_stays_so(repo: Repository, options: dict[str, Any]) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        weights = torch.linspace(0.5, 1.5, 20) * value
        weights[7] = math.nan if name == "b" else 0.0
        track(repo, name, model={"w": weights})
    found = arrays(repo, repo.merge(["a", "b"], **options))["w"]
    assert np.flatnonzero(np.isnan(found)).tolist() == [7]


@settings(max_examples=examples(60))
@given(
    data=st.data(),
    count=st.integers(2, 5),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_a_mean_lies_among_its_parts_and_knows_no_order_of_pieces(
    data: st.DataObject, count: int, dtype: torch.dtype
) -> None:
    rows = data.draw(
        st.lists(st.lists(finite, min_size=5, max_size=5), min_size=count, max_size=count)
    )
    parts = [torch.tensor(row).to(dtype) for row in rows]
    recipe = Recipe(Method.MEAN, (1.0 / count,) * count, None, "keep")

    found = combine(recipe, parts)

    stacked = torch.stack(parts).double()
    slack = 1e-9
    assert found.dtype is dtype
    assert bool((found.double() >= stacked.amin(0) - slack).all())
    assert bool((found.double() <= stacked.amax(0) + slack).all())
    for at in range(5):
        # alone, an element that is the same in all parts stays as it is, where here it may be
        # rounded
        alone = combine(recipe, [part[at : at + 1] for part in parts])
        if len({bits(part[at : at + 1]) for part in parts}) > 1:
            assert bits(found[at : at + 1]) == bits(alone)
