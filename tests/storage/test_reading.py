"""Trees made of a tier's bytes: what is wanted of them, and what is tied."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import datastates
from datastates.storage.reading import over


@pytest.mark.parametrize("only", [None, ["second"], ["second", "third"]], ids=str)
def test_tied_tensors_are_one_tensor_whether_or_not_the_first_of_them_is_wanted(
    tmp_path: Path, only: list[str] | None
) -> None:
    weight = torch.arange(5.0)
    with datastates.open(tmp_path / "runs") as repo:
        with repo.track(
            rng=False, first={"w": weight}, second={"x": weight, "y": weight}, third={"z": weight}
        ) as run:
            run.capture().wait("durable")
        tree = repo.load("main", only=only)
    found = [
        tensor for name in only or ["first", "second", "third"] for tensor in tree[name].values()
    ]
    assert torch.equal(found[0], weight)
    assert all(tensor is found[0] for tensor in found)


def test_a_tensor_over_memory_keeps_it_alive() -> None:
    memory = np.arange(100, dtype=np.uint8)
    known = weakref.ref(memory)
    tensor = over(memory.data.toreadonly())
    del memory
    gc.collect()
    assert known() is not None
    assert tensor[99] == 99
    del tensor
    gc.collect()
    assert known() is None
