"""States to merge, and what is looked at of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from datastates import Repository, State

if TYPE_CHECKING:
    import numpy as np

Tree = Mapping[str, torch.Tensor]


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 3))


class Training:
    """A small net with its optimizer."""

    def __init__(self, seed: int) -> None:
        self.model = net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 40)).square().sum().backward()
        self.optimizer.step()


def fork(repo: Repository, count: int = 3, steps: int = 2) -> list[State]:
    """Branches ``v0``, ``v1``, … of a start that is tagged ``warm``."""
    first = Training(0)
    with repo.track(model=first.model, optimizer=first.optimizer) as run:
        first.step()
        run.capture().wait()
    repo.tag("warm", "main")
    heads = []
    for number in range(count):
        each = Training(0)
        with repo.track(
            model=each.model, optimizer=each.optimizer, branch=f"v{number}", start="warm"
        ) as run:
            torch.manual_seed(number)
            for _ in range(steps + number):
                each.step()
            heads.append(run.capture().wait())
    return heads


def track(repo: Repository, branch: str, **objects: Any) -> State:
    """One state of plain tensors."""
    with repo.track(branch=branch, rng=False, **objects) as run:
        return run.capture().wait()


def arrays(repo: Repository, rev: str | State) -> dict[str, np.ndarray[Any, Any]]:
    tree: Tree = repo.load(rev if isinstance(rev, str) else rev.uid, only="model")["model"]
    return {
        name: tensor.double().numpy() for name, tensor in tree.items() if tensor.is_floating_point()
    }


def bits(tree: Any) -> bytes:
    """Every byte of the tensors in a tree."""
    if isinstance(tree, torch.Tensor):
        return tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    children = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    return b"".join(map(bits, children))
