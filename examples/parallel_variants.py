"""Variants of several processes each, forked from a prefix of several processes, to choose a
learning rate.

python examples/parallel_variants.py [FOLDER] [RANKS]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import datastates
from datastates import ranks
from datastates.studies import Job, Plan, Variant, explore

PLAN = Plan(
    (
        Variant("prefix", epochs=2, config={"lr": 1e-2}),
        *(
            Variant(f"lr={rate:g}", "prefix", epochs=2, config={"lr": rate})
            for rate in (3e-2, 1e-3)
        ),
    )
)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same in each process."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return inputs, inputs.sin().sum(1, keepdim=True)


def build(rate: float, group: ranks.Group) -> dict[str, Any]:
    """The tracked objects. The model is sharded if several ranks train it."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    if group.size > 1:
        fully_shard(model)
    sampler = datastates.PermutationSampler(256, rank=group.rank, num_replicas=group.size)
    return {"model": model, "optimizer": AdamW(model.parameters(), lr=rate), "sampler": sampler}


def train(job: Job) -> None:
    """Called on each rank of a variant, with torch.distributed initialized."""
    inputs, targets = data()
    # the plan has numbers
    tracked = build(float(job.config["lr"]), job.group)  # type: ignore[arg-type]
    run = job.track(**tracked, reduce="mean")  # restored, except the learning rate
    model, optimizer, sampler = tracked.values()
    for _ in job.epochs():
        for rows in run.steps(sampler.batches(16)):
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        job.report(loss=loss.item())  # each rank's part of the state


def main(folder: str, count: int) -> None:
    """Explore. The same call resumes an exploration that was stopped."""
    with datastates.open(folder) as repo:
        if not repo.refs():
            torch.manual_seed(0)
            with repo.track(**build(1e-2, ranks.SoloGroup())) as run:
                run.capture()
        report = explore(repo, "main", PLAN, train, study="rates", ranks=count, progress=False)
        for result in report:
            state = result.state
            if state is not None:
                sys.stdout.write(
                    f"{result.variant}: {state.world_size} ranks, step {state.step}, loss"
                    f" {state.metrics['loss']:.4f}\n"
                )
        sys.exit(0 if report else str(report.errors))


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/variants",
        int(sys.argv[2]) if len(sys.argv) > 2 else 2,
    )
