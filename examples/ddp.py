"""Start this, kill it, and start it again with any number of processes. The training resumes where
it stopped.

torchrun --nproc-per-node 2 examples/ddp.py [FOLDER] [EPOCHS]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import datastates


def main(folder: str, epochs: int) -> None:
    """Train until ``epochs`` epochs are complete."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    sampler = datastates.PermutationSampler(
        len(inputs), rank=dist.get_rank(), num_replicas=dist.get_world_size()
    )

    with (
        datastates.open(folder) as repo,
        repo.track(model=model, optimizer=optimizer, sampler=sampler, reduce="mean") as run,
    ):
        for epoch in run.epochs(epochs):
            for rows in run.steps(sampler.batches(16)):
                loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state = run.capture(
                    metrics={"loss": loss.item()}
                ).wait()  # complete: all ranks have reported their parts
                if run.group.rank == 0:
                    sys.stdout.write(
                        f"epoch {epoch}, step {state.step}, {run.group.size} ranks: loss"
                        f" {state.metrics['loss']:.4f}\n"
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/ddp",
        int(sys.argv[2]) if len(sys.argv) > 2 else 2,
    )
