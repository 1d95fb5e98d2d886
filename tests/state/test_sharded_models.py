"""The tree of a model that FSDP2 shards is of its shards, wherever the training stands, and is
not made anew for each capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import datastates
from datastates.errors import Unsupported
from datastates.state.adapters import Adapted
from datastates.state.tree import flatten
from tests.support.fake_ranks import as_rank


def test_shards_are_the_leaves_before_between_and_after_passes_and_the_tree_lasts() -> None:
    with as_rank(1, (2,)) as mesh:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        adapted = Adapted({"model": model, "optimizer": optimizer})
        shards = [*model.parameters()]
        flats = [flatten(adapted.tree(), None, adapted.lasting)]
        for is_gathered in (False, True, False, True, False):
            if is_gathered:
                model(torch.randn(2, 5))
                assert not isinstance(model[0].weight, DTensor)
            flat = flatten(adapted.tree(), flats[-1], adapted.lasting)
            assert all(
                leaf.tensor is shard for leaf, shard in zip(flat.tensors, shards, strict=True)
            )
            flats.append(flat)
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        flats = [flatten(adapted.tree(), flats[-1], adapted.lasting)]
        assert len(flats[0].tensors) == 4 + 3 * 4
        first, second = adapted.tree(), adapted.tree()
        assert second["model"] is first["model"]
        # trees
        assert second["optimizer"]["state"] is first["optimizer"]["state"]  # type: ignore[index]


@pytest.mark.filterwarnings("ignore")  # torch's own, about one rank and about torch.jit
def test_the_first_version_of_fsdp_and_a_divided_optimizer_are_refused_with_what_to_use_instead(
    tmp_path: Path,
) -> None:
    with as_rank(0, (1,)), datastates.open(tmp_path / "runs") as repo:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        plain = nn.Linear(5, 3)
        optimizer = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.Adam)
        with pytest.raises(
            Unsupported,
            match=(
                r"^optimizer is a ZeroRedundancyOptimizer, .*fully_shard, or use a plain optimizer"
            ),
        ):
            repo.track(model=plain, optimizer=optimizer)
        inside = nn.Sequential(
            FullyShardedDataParallel(nn.Linear(5, 3), device_id=torch.device("cpu"))
        )
        with pytest.raises(
            Unsupported,
            match=(
                r"^model is a model of FullyShardedDataParallel,"
                r" .*torch\.distributed\.fsdp\.fully_shard"
            ),
        ):
            repo.track(model=inside)
