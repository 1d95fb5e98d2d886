"""A job of two ranks, replicated or sharded, loses every process to SIGKILL, and a fresh job
goes on bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import datastates
from datastates.state.geometry import local_of
from tests.support.jobs import Say, job, run

HERE = "tests.ranks.test_resume"
EPOCHS, ITEMS, BATCH, ACCUMULATE = 3, 48, 4, 2


class Items(Dataset[torch.Tensor]):
    """Inputs that depend on their index alone; the first number is the index."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat(
            [torch.tensor([float(index)]), torch.sin(torch.arange(31) * (index + 1) * 0.1)]
        )


def replicated() -> nn.Module:
    """Under DistributedDataParallel, with buffers that each forward pass sends to all."""
    model = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)
    )
    return nn.parallel.DistributedDataParallel(model)


def sharded() -> nn.Module:
    """Under FSDP2, layer by layer; two ranks share 33 rows unevenly, and 1 row."""
    model = nn.Sequential(
        nn.Linear(32, 33), nn.LayerNorm(33), nn.ReLU(), nn.Dropout(0.3), nn.Linear(33, 1)
    )
    fully_shard(model[0], reshard_after_forward=False)
    fully_shard(model)
    return model


WAYS = {"replicated": replicated, "sharded": sharded}


def step_of(model: nn.Module, batch: torch.Tensor, *, is_last: bool) -> torch.Tensor:
    """The loss of a batch, whose gradients are added up; sharded ones are reduced with the last
    batch of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    loss: torch.Tensor = model(batch).square().mean()
    (loss / ACCUMULATE).backward()
    return loss


def train(folder: str, way: str, say: Say, stop_after: int) -> None:
    """Train with dropout, gradient accumulation and workers; say each batch, and its loss
    exactly."""
    import torch.distributed as dist

    torch.manual_seed(100 + (dist.get_rank() if way == "replicated" else 0))
    model = WAYS[way]()
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Items(), seed=5)
    loader = DataLoader(Items(), batch_size=BATCH, sampler=sampler, num_workers=1)
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        run = repo.track(model=model, optimizer=optimizer, durable_every=1, reduce={"loss": "mean"})
        say("from", run.step, run.epoch)
        for _ in run.epochs(EPOCHS):
            for batch in run.steps(loader, accumulate=ACCUMULATE):
                loss = step_of(model, batch, is_last=not run.micro_step)
                say(
                    "batch",
                    run.step,
                    run.micro_step,
                    ",".join(str(int(item)) for item in batch[:, 0].tolist()),
                    float(loss).hex(),
                )
                if not run.micro_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    taken = run.capture(metrics={"loss": float(loss)})
                    if run.step == stop_after:
                        taken.wait("durable")
                        say("reached", run.step)  # and goes on, until it is killed somewhere
        held = [local_of(value.detach()) for value in model.state_dict().values()]
        weights = b"".join(each.numpy().tobytes() for each in held if each is not None)
        say("weights", hashlib.sha256(weights).hexdigest())
        run.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_job_whose_ranks_were_all_killed_goes_on_bit_for_bit(tmp_path: Path, way: str) -> None:
    whole = run(2, f"{HERE}:train", folder=str(tmp_path / "whole"), way=way, stop_after=0)
    with job(2, f"{HERE}:train", folder=str(tmp_path / "killed"), way=way, stop_after=4) as ranks:
        for rank in range(2):
            ranks.heard(rank, "reached")
        for rank in range(2):
            ranks.kill(rank)
        killed = ranks.lines()
    rest = run(2, f"{HERE}:train", folder=str(tmp_path / "killed"), way=way, stop_after=0)
    steps = [int(said[0].split()[1]) for said in rest]
    assert 4 <= steps[0] == steps[1]
    for rank in range(2):
        assert rest[rank][1:] == whole[rank][1 + steps[rank] * ACCUMULATE :]
        batches = [line for line in killed[rank] if line.startswith("batch")]
        assert batches == whole[rank][1 : 1 + len(batches)]
    per_epoch = ITEMS // (2 * BATCH)
    for epoch in range(EPOCHS):
        lines = [
            line
            for said in whole
            for line in said[1 + epoch * per_epoch : 1 + (epoch + 1) * per_epoch]
        ]
        assert sorted(int(item) for line in lines for item in line.split()[3].split(",")) == list(
            range(ITEMS)
        )


def unfreeze(folder: str, say: Say, until: int) -> None:
    """Train a sharded model whose first layer is frozen for four steps; say each loss exactly."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1))
    model[0].requires_grad_(False)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(10 + dist.get_rank())
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        run = repo.track(model=model, optimizer=optimizer)
        for step in range(run.step, until):
            if step == 4:
                model[0].requires_grad_(True)
            loss = model(torch.randn(8, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say("step", step, float(loss.detach()).hex(), model[0].weight.grad is not None)
            run.capture()
        run.close()


def test_a_sharded_training_goes_on_with_what_it_had_unfrozen(tmp_path: Path) -> None:
    whole = run(2, f"{HERE}:unfreeze", folder=str(tmp_path / "whole"), until=9)
    stopped = run(2, f"{HERE}:unfreeze", folder=str(tmp_path / "stopped"), until=6)
    rest = run(2, f"{HERE}:unfreeze", folder=str(tmp_path / "stopped"), until=9)
    for rank in range(2):
        assert [line.endswith("True") for line in whole[rank]] == [False] * 4 + [True] * 5
        assert stopped[rank] + rest[rank] == whole[rank]
