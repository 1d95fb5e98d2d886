"""Every rank of a ZeroRedundancyOptimizer has the same tree, in which what others keep stands without bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from datastates.content.spread import owners_of
from datastates.content.tree import Flat, flatten
from datastates.errors import Unsupported
from datastates.objects.adapters import Adapted
from datastates.objects.placements import holdings_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch.distributed.optim calls it on import


def as_each_rank(size: int, function: Callable[[], Any]) -> list[Any]:
    """What the function gives on each rank, one after the other; what is sent arrives nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            found.append(function())
        finally:
            dist.destroy_process_group()
    return found


def captured(*, steps: int = 1, kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> Flat:
    """A model of four parameters, one of which is frozen and one of which no loss depends on."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 4), "unused": nn.Linear(2, 5, bias=False)})
    model["used"].bias.requires_grad = False
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    adapted = Adapted({"model": model, "optimizer": optimizer})
    flat = flatten(adapted.tree())
    for _ in range(steps):
        model["used"].weight.grad = torch.ones(4, 3)
        optimizer.step()
        optimizer.zero_grad()
        flat = flatten(adapted.tree(), flat)
    return flat


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor, torch.optim.ASGD])
def test_all_ranks_have_one_tree_with_state_for_what_had_gradients_only(size: int, kind: type[torch.optim.Optimizer]) -> None:
    flats = as_each_rank(size, lambda: captured(kind=kind))
    kept = [leaf.path.split("/")[2] for leaf in flats[0].tensors if leaf.path.startswith("optimizer/state")]
    assert set(kept) <= {"used.weight"}
    assert bool(kept) is (kind is not torch.optim.SGD)
    for flat in flats:
        assert flat.skeleton == flats[0].skeleton
        assert [holdings_of(leaf.tensor, size) for leaf in flat.tensors] == [holdings_of(leaf.tensor, size) for leaf in flats[0].tensors]
        assert [leaf.tensor.dtype for leaf in flat.tensors] == [leaf.tensor.dtype for leaf in flats[0].tensors]
    for leaves in zip(*(flat.tensors for flat in flats), strict=True):
        owners = owners_of(leaves[0].tensor)
        assert [leaf.tensor.is_meta for leaf in leaves] == [owners is not None and rank not in owners for rank in range(size)]


def test_before_the_first_step_nobody_keeps_anything() -> None:
    for flat in as_each_rank(2, lambda: captured(steps=0)):
        assert [leaf.path for leaf in flat.tensors] == ["model/used.weight", "model/used.bias", "model/unused.weight"]


def test_what_stands_for_another_ranks_state_is_the_same_object_in_every_capture() -> None:
    first, second = (as_each_rank(2, partial(captured, steps=steps))[1] for steps in (1, 2))
    assert [leaf.path for leaf in first.tensors] == [leaf.path for leaf in second.tensors]

    def twice() -> bool:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.Linear(3, 3)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
        adapted = Adapted({"model": model, "optimizer": optimizer})
        model.weight.grad, model.bias.grad = torch.ones(3, 3), torch.ones(3)
        optimizer.step()
        one = flatten(adapted.tree())
        return flatten(adapted.tree(), one).tensors is one.tensors

    assert all(as_each_rank(2, twice))


def test_one_over_some_of_the_ranks_is_refused() -> None:
    def track() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.Linear(3, 3)
        Adapted({"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, dist.new_group([0, 1]))}).tree()

    with pytest.raises(Unsupported, match=r"over 2 of 4 ranks.*the process group of all ranks"):
        as_each_rank(4, track)
