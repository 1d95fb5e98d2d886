"""A Hydra multirun in which each job forks from a shared prefix. Its configuration is recorded.

python examples/hydra_sweep.py --multirun lr=0.1,0.01 momentum=0.0,0.9

The first job trains the prefix. The same command continues a sweep that was killed.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import datastates

try:
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
except ModuleNotFoundError:
    sys.exit("this example needs Hydra: pip install hydra-core")


@dataclass
class Settings:
    lr: float = 0.05
    momentum: float = 0.9
    epochs: int = 4


def train(repo: datastates.Repository, settings: Settings, until: int, **place: Any) -> None:
    """Train a branch up to a step. Each step is an epoch."""
    torch.manual_seed(0)
    x, model = torch.randn(400, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    sgd = torch.optim.SGD(model.parameters(), settings.lr, settings.momentum)
    with repo.track(model=model, sgd=sgd, config=settings, **place) as run:
        while run.step < until:
            for rows in torch.randperm(400).split(20):
                loss = nn.functional.mse_loss(model(x[rows]), x[rows].sin())
                sgd.zero_grad()
                loss.backward()
                sgd.step()
            run.capture(metrics={"loss": loss.item()})


@hydra.main(version_base="1.3", config_path=None, config_name="settings")
def main(settings: Settings) -> None:
    """Train the prefix if it is not there, and one job."""
    name = HydraConfig.get().job.override_dirname or "default"  # such as lr=0.1,momentum=0.9
    with datastates.open("runs/hydra") as repo:
        train(repo, Settings(), 3, branch="prefix")
        train(repo, settings, 3 + settings.epochs, branch=f"sweep/{name}", start="prefix")


if __name__ == "__main__":
    ConfigStore.instance().store("settings", Settings)
    main()
