"""A tree that stood under one name comes out as it was, and no other tree loses its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from datastates.files.checkpoints import TAKEN, WRAPPED, unwrapped, wrapped

W = torch.ones(2)


@pytest.mark.parametrize(
    "found",
    [{"w": W, "b": W}, [W, 3], W, {}, {3: W}, {"": W, "x": 1}, {"rng": W, "n": 3}, {"x" * 256: 1}],
)
def test_what_was_wrapped_is_unwrapped(found: Any) -> None:
    tree, name = wrapped(found, TAKEN)
    assert name is not None
    assert unwrapped(tree, {WRAPPED: name}) is found


@pytest.mark.parametrize("name", ["state_dict", "model", "checkpoint"])
def test_a_name_of_the_tree_itself_is_kept_whatever_its_attribute_says(name: str) -> None:
    tree = {name: {"inner": {"w": W}}}
    assert wrapped(tree, TAKEN) == (tree, None)
    assert unwrapped(tree, {WRAPPED: name}) is tree
    assert unwrapped({name: [W], "epoch": 3}, {WRAPPED: name}) == {name: [W], "epoch": 3}


def test_tensors_that_were_not_read_change_nothing() -> None:
    for found in ({"w": None, "b": W}, {"w": None}):
        assert unwrapped({"model": found}, {WRAPPED: "model"}) is found
    assert unwrapped({"checkpoint": None}, {WRAPPED: "checkpoint"}) is None
