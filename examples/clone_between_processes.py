"""One process trains and serves. Another process clones its state from memory, without a file, and
repeats the next ten losses bit for bit.

    python examples/clone_between_processes.py [FOLDER]

The first pack is written at the end of the training, because the head of a branch is kept.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import datastates

STEPS, FURTHER = 20, 10


class Training:
    """Everything that decides the next step, and the step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(512, 64)
        self.targets = self.inputs.sin().sum(1, keepdim=True)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(64, 1024),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(1024, 1024),
            nn.GELU(),
            nn.Linear(1024, 1),
        )
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = OneCycleLR(self.optimizer, 1e-2, total_steps=100)
        self.sampler = datastates.PermutationSampler(len(self.inputs))

    @property
    def objects(self) -> dict[str, Any]:
        """The tracked objects, which are also the target of a clone."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
        }

    def batches(self) -> Iterator[list[int]]:
        """Batches from the position of the sampler, without end."""
        return self.sampler.batches(32, epochs=None)

    def step(self, rows: list[int]) -> float:
        """One update; its loss."""
        loss = nn.functional.mse_loss(self.model(self.inputs[rows]), self.targets[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def further(self) -> list[str]:
        """The next losses, compared bit by bit."""
        return [
            self.step(rows).hex() for rows, _ in zip(self.batches(), range(FURTHER), strict=False)
        ]


def train_and_serve(folder: str) -> int:
    """Process A. Returns 1 if the losses of B differ."""
    ours = Training(seed=1)
    config = datastates.Config(durable_interval_s=None)  # nothing is written while it trains
    with datastates.open(folder, config=config) as repo, repo.track(**ours.objects) as run:
        for rows in run.steps(ours.batches()):
            loss = ours.step(rows)
            run.capture(metrics={"loss": loss})
            if run.step == STEPS:
                break
        with repo.serve("tcp://127.0.0.1:0") as server:
            command = [sys.executable, __file__, "--clone", server.url]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
                losses = ours.further()  # while the other process clones
                theirs = (other.communicate()[0] or "").splitlines()
    for step, (loss_here, loss_there) in enumerate(zip(losses, theirs, strict=False), STEPS + 1):
        _say(f"step {step}: A {float.fromhex(loss_here)!r}, B {float.fromhex(loss_there)!r}")
    is_equal = other.returncode == 0 and losses == theirs
    _say("equal, bit for bit" if is_equal else "the losses differ")
    return 0 if is_equal else 1


def clone_and_go_on(url: str) -> int:
    """Process B: its objects begin with other values, and continue from A's state. It opens no
    repository."""
    training = Training(seed=2)
    with datastates.connect(url) as peer:
        peer.clone("main", objects={**training.objects, "rng": datastates.RngState()})
    _say("\n".join(training.further()))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clone"]:
        sys.exit(clone_and_go_on(sys.argv[2]))
    sys.exit(train_and_serve(sys.argv[1] if len(sys.argv) > 1 else "runs/clone"))
