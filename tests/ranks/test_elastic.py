"""A job that is started again with more ranks or fewer goes on within its epoch: no sample is
lost, none comes twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# torchdata has no types
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

# likewise
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # type: ignore[import-untyped]

import datastates
from datastates import PermutationSampler
from datastates.errors import InvalidInput
from datastates.state.geometry import local_of
from tests.support.jobs import Say, run

HERE = "tests.ranks.test_elastic"
LENGTH, BATCH = 48, 2


def train(folder: str, stop: int, say: Say) -> None:
    """Three branches: one with our sampler, of which workers fetch ahead, one with torch's, and one
    with torchdata's loader, which is tracked. They stop after so many steps.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    data = TensorDataset(torch.arange(LENGTH))
    sampler = PermutationSampler(LENGTH, seed=3, rank=rank, num_replicas=size)
    theirs: DistributedSampler[Any] = DistributedSampler(data, seed=3)
    loaders = {
        "ours": DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=1),
        "theirs": DataLoader(data, batch_size=BATCH, sampler=theirs),
        "kept": StatefulDataLoader(
            data,
            batch_size=BATCH,
            sampler=StatefulDistributedSampler(data, seed=3),
            num_workers=int(rank == 0),
        ),
    }
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        for name, loader in loaders.items():
            model = nn.Linear(5, 7)
            if name == "ours":
                fully_shard(model)
            optimizer = torch.optim.Adam(model.parameters())
            tracked: dict[str, object] = (
                {"sampler": sampler}
                if name == "ours"
                else {"loader": loader}
                if name == "kept"
                else {}
            )
            with repo.track(
                branch=name, model=model, optimizer=optimizer, check=None, objects=tracked
            ) as tracker:
                report, seen, taken = tracker.report, [], 0
                say(name, "noted", len(report.notes) if report else None)
                say(name, "random", torch.rand(1).item())
                try:
                    for _ in tracker.epochs(2):
                        for (rows,) in tracker.steps(loader):
                            model(torch.ones(5)).sum().backward()
                            optimizer.step()
                            seen += [(tracker.epoch, row) for row in rows.tolist()]
                            last = tracker.capture()
                            taken += 1
                            if taken == stop:
                                break
                        if taken == stop:
                            break
                    last.wait("durable")
                except InvalidInput as exc:
                    say(name, "refused", str(exc))
                say(name, "seen", json.dumps(seen))
            if name == "ours":
                fresh = nn.Linear(5, 7)
                fully_shard(fresh)
                report = repo.restore("ours", model=fresh, only="model", group=tracker.group)
                say("restored", bool(report), bits(fresh) == bits(model))


def bits(model: nn.Module) -> list[bytes]:
    found = [local_of(parameter.detach()) for parameter in model.parameters()]
    return [local.numpy().tobytes() for local in found if local is not None]


def seen(said: list[list[str]], name: str) -> list[tuple[int, int]]:
    found = [
        line.removeprefix(f"{name} seen ")
        for lines in said
        for line in lines
        if line.startswith(f"{name} seen ")
    ]
    return [(epoch, row) for line in found for epoch, row in json.loads(line)]


def words(said: list[list[str]], start: str) -> list[str]:
    return [
        line.removeprefix(start).strip()
        for lines in said
        for line in lines
        if line.startswith(start)
    ]


@pytest.mark.parametrize("sizes", [(2, 3), (4, 1), (1, 2), (2, 3, 1)], ids=str)
def test_an_epoch_goes_on_with_another_number_of_ranks(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    said = []
    for number, size in enumerate(sizes):
        stop = 100 if number == len(sizes) - 1 else 3 - number
        said.append(run(size, f"{HERE}:train", folder=str(tmp_path), stop=stop, timeout_s=60))
    every = Counter((epoch, row) for epoch in range(2) for row in range(LENGTH))
    assert Counter(pair for each in said for pair in seen(each, "ours")) == every
    for name in ("theirs", "kept"):
        refused = words(said[-1], f"{name} refused")
        if sizes == (1, 2):  # 3 batches of 2, of which 2 ranks cannot have had equally many
            assert len(refused) == 2
            assert all(
                "PermutationSampler(len(data), rank=rank, num_replicas=processes)" in each
                for each in refused
            )
        else:
            assert not refused
            assert Counter(pair for each in said for pair in seen(each, name)) == every, name
    assert len(set(words(said[1], "ours random"))) == sizes[1], "each rank draws numbers of its own"
    assert all(int(count) for count in words(said[1], "ours noted")), (
        "the report says what is begun anew"
    )
    assert words([*said[0], *said[1]], "restored") == ["True True"] * (sizes[0] + sizes[1])
