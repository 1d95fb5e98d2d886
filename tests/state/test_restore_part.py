"""Restoring what is named, and leaving the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from datastates.errors import InvalidInput
from datastates.state.restore import reads, restore_into
from tests.state.test_optimizer_state import bits, net, stored
from tests.state.test_restore import everything

torch.set_num_threads(1)


def test_only_a_name_restores_that_object() -> None:
    tree = stored(everything(1))
    objects = everything(2)
    before = bits(stored(objects))
    report = restore_into(objects, tree, only="model")
    after = bits(stored(objects))
    assert after["model"] == bits(tree)["model"]
    assert {**after, "model": None} == {**before, "model": None}
    assert {path.split("/")[0] for path in report.restored} == {"model"}
    assert "rng" in report.skipped
    assert "scheduler" in report.skipped


def test_a_name_does_not_choose_another_that_begins_with_it() -> None:
    objects: dict[str, Any] = {"ema": {"a": 1}, "ema2": {"a": 1}, "emas": [1]}
    assert restore_into(
        objects, {"ema": {"a": 2}, "ema2": {"a": 2}, "emas": [2]}, only="ema"
    ).restored == ("ema/a",)
    assert objects == {"ema": {"a": 2}, "ema2": {"a": 1}, "emas": [1]}


def test_patterns_choose_leaves_of_everything_that_is_divided() -> None:
    tree = stored(everything(1))
    objects = everything(2)
    before = stored(objects)
    report = restore_into(objects, tree, only=["model/first.*", "*/exp_avg", "ema/last.bias"])
    after, expected = bits(stored(objects)), bits(before)
    for name in ("first.weight", "first.bias"):
        expected["model"][name] = bits(tree)["model"][name]
    for name, entry in expected["optimizer"]["state"].items():
        entry["exp_avg"] = bits(tree)["optimizer"]["state"][name]["exp_avg"]
    expected["ema"]["last.bias"] = bits(tree)["ema"]["last.bias"]
    assert after == expected
    assert len(report.restored) == 2 + 6 + 1


def test_leaves_that_were_not_read_are_not_looked_at() -> None:
    tree = stored(everything(1))
    for name in tree["model"]:
        tree["model"][name] = None
    tree["optimizer"]["state"] = {
        name: dict.fromkeys(entry) for name, entry in tree["optimizer"]["state"].items()
    }
    objects = everything(2)
    assert restore_into(objects, tree, only="ema")
    assert bits(stored(objects))["ema"] == bits(tree)["ema"]


@pytest.mark.parametrize("only", [None, "model", "optimizer/state/first.*", "gradients", "*bias*"])
def test_tensors_that_are_not_read_are_not_needed(only: str | None) -> None:
    source = everything(1)
    source["model"](torch.ones(2, 3)).sum().backward()
    tree = stored(source, gradients=True)
    wants = reads({"model": 0, "optimizer": 0}, only)

    def unread(found: Any, path: str) -> Any:
        if isinstance(found, dict):
            return type(found)(
                (key, unread(child, f"{path}/{key}" if path else key))
                for key, child in found.items()
            )
        return None if isinstance(found, Tensor) and not wants(path) else found

    whole, part = ({key: everything(2)[key] for key in ("model", "optimizer")} for _ in range(2))
    restore_into(whole, tree, only=only)
    assert restore_into(part, unread(tree, ""), only=only)
    assert bits(stored(part, gradients=True)) == bits(stored(whole, gradients=True))


@pytest.mark.parametrize("only", ["modle", "model/frist.*", ["model", "nothing/*"]])
def test_a_pattern_that_selects_nothing_is_refused(only: Any) -> None:
    tree = stored(everything(1))
    objects = everything(2)
    before = bits(stored(objects))
    with pytest.raises(InvalidInput, match="selects nothing: try "):
        restore_into(objects, tree, only=only)
    assert bits(stored(objects)) == before


def test_a_part_of_what_restores_itself_is_refused() -> None:
    objects = everything(1)
    with pytest.raises(
        InvalidInput,
        match=r"scheduler takes its state as a whole.*scheduler/last_epoch: ask for 'scheduler'",
    ):
        restore_into(objects, stored(objects), only="*/last_epoch")


def test_objects_of_the_state_that_were_not_given_are_left_out() -> None:
    tree = stored(everything(1))
    made = net(2)
    report = restore_into({"model": made}, tree)
    assert report
    assert set(report.skipped) == set(tree) - {"model"}
