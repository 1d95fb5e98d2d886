"""What Ray trains in the tests: functions that its worker processes import."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from datastates.integrations.ray import report, track

Job = tuple[nn.Module, torch.optim.Optimizer, "DataLoader[tuple[torch.Tensor, ...]]"]


def job(rate: float, workers: int = 0) -> Job:
    """The same weights and items each time, in an order that is drawn at random; so is the dropout.

    An epoch has three batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    loader = DataLoader(
        TensorDataset(torch.randn(24, 8)), batch_size=8, shuffle=True, num_workers=workers
    )
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), loader


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    *,
    is_last: bool = True,
    is_half: bool = False,
) -> float:
    """The loss of a batch; the last of a step has the optimizer step."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        loss: torch.Tensor = (
            (model(inputs) - inputs.sum(dim=1, keepdim=True)).float().square().mean()
        )
    loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(config: dict[str, Any]) -> None:
    """Epochs, with a report of each step; in the steps ``dies_at`` the process is gone, once.

    ``score`` is what schedulers look at."""
    torch.set_num_threads(1)
    how: dict[str, Any] = config.get("how", {})
    model, optimizer, loader = job(config["lr"], how.get("workers", 0))
    with track(config["runs"], model=model, optimizer=optimizer, config=config) as run:
        optimizer.param_groups[0]["lr"] = config["lr"]
        for _ in run.epochs(config["epochs"]):
            for (inputs,) in run.steps(loader, accumulate=how.get("accumulate", 1)):
                loss = step(
                    model,
                    optimizer,
                    inputs,
                    is_last=not run.micro_step,
                    is_half=how.get("is_half", False),
                )
                if run.micro_step:
                    continue
                mark = Path(config["runs"]) / f"died-{run.step}"
                if run.step in config.get("dies_at", []) and not mark.exists():
                    run.capture(metrics={"loss": loss}).wait("durable")  # and is never reported
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                report(run, {"loss": loss, "hex": loss.hex(), "score": config.get("score", 0)})
