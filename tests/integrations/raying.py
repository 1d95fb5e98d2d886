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


def job(rate: float) -> Job:
    """The same weights and items each time, in an order that is drawn at random; so is the dropout. An epoch has three batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    loader = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=8, shuffle=True)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), loader


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    """One step, and its loss."""
    loss: torch.Tensor = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(config: dict[str, Any]) -> None:
    """Epochs, with a report each step; at step ``dies_at`` the process is gone, once. ``score`` is what schedulers look at."""
    torch.set_num_threads(1)
    model, optimizer, loader = job(config["lr"])
    with track(config["runs"], model=model, optimizer=optimizer, config=config) as run:
        optimizer.param_groups[0]["lr"] = config["lr"]
        for _ in run.epochs(config["epochs"]):
            for (inputs,) in run.steps(loader):
                loss = step(model, optimizer, inputs)
                if run.step == config.get("dies_at") and not (mark := Path(config["runs"]) / "died").exists():
                    run.capture(metrics={"loss": loss}).wait("durable")  # and is never reported
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                report(run, {"loss": loss, "hex": loss.hex(), "score": config.get("score", 0)})
