"""Each time that you start this, the training resumes exactly where it stopped, for whatever reason
it stopped.

python examples/resume.py [FOLDER] [STEPS]
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.optim import AdamW

import datastates


def main(folder: str, steps: int) -> None:
    """Train ``steps`` more steps."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    sampler = datastates.PermutationSampler(len(inputs))

    with (
        datastates.open(folder) as repo,
        repo.track(model=model, optimizer=optimizer, sampler=sampler) as run,
    ):
        end = run.step + steps
        for rows in run.steps(sampler.batches(16, epochs=None)):
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.capture(metrics={"loss": loss.item()})
            sys.stdout.write(f"step {run.step}: loss {loss.item()!r}\n")
            if run.step == end:
                break


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/resume",
        int(sys.argv[2]) if len(sys.argv) > 2 else 20,
    )
