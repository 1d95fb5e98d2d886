"""Data-parallel training over MPI: gradients are averaged by ``Allreduce``, and each process
captures its share of the states.

mpiexec -n 2 python examples/mpi_data_parallel.py [FOLDER] [STEPS]
"""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI
from torch import nn
from torch.optim import AdamW

import datastates


def average_gradients(model: nn.Module, comm: MPI.Intracomm) -> None:
    """Give each process the mean of all gradients."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy(), op=MPI.SUM)
        parameter.grad /= comm.Get_size()


def main(folder: str, steps: int) -> None:
    """Train ``steps`` more steps."""
    comm = MPI.COMM_WORLD
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    sampler = datastates.PermutationSampler(
        len(inputs), rank=comm.Get_rank(), num_replicas=comm.Get_size()
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
            average_gradients(model, comm)
            optimizer.step()
            state = run.capture(metrics={"loss": loss.item()}).wait()
            if run.group.rank == 0:
                sys.stdout.write(
                    f"step {state.step}, {run.group.size} ranks: loss {state.metrics['loss']:.4f}\n"
                )
            if run.step == end:
                break


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/mpi",
        int(sys.argv[2]) if len(sys.argv) > 2 else 10,
    )
