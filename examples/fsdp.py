"""A model that is sharded over the processes. Each process captures its shards, and any number of
processes can resume.

torchrun --nproc-per-node 2 examples/fsdp.py [FOLDER] [STEPS]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import datastates


def main(folder: str, steps: int) -> None:
    """Train ``steps`` more steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    sampler = datastates.PermutationSampler(
        len(inputs), rank=dist.get_rank(), num_replicas=dist.get_world_size()
    )

    with (
        datastates.open(folder) as repo,
        repo.track(model=model, optimizer=optimizer, sampler=sampler, reduce="mean") as run,
    ):
        end = run.step + steps
        for rows in run.steps(sampler.batches(16, epochs=None)):
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state = run.capture(metrics={"loss": loss.item()}).wait()
            if run.group.rank == 0:
                sys.stdout.write(
                    f"step {state.step}, {run.group.size} ranks: loss {state.metrics['loss']:.4f}\n"
                )
            if run.step == end:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/fsdp",
        int(sys.argv[2]) if len(sys.argv) > 2 else 10,
    )
