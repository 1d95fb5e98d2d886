"""Every stock optimizer of this torch in every form that it has on CPU, on models whose weights
are large enough to be deferred."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.optim import Optimizer

WIDTH = 128
"""128 x 128 float32 are 64 KiB: just deferred."""


class Net(nn.Module):
    """Four weights of 64 KiB, and BatchNorm, whose buffers change in every forward pass."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH, affine=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        normed: torch.Tensor = self.norm(x)
        return normed


class SparseNet(nn.Module):
    """Four tables of 64 KiB with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WIDTH, WIDTH, sparse=True) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0].abs() * 1000).long() % WIDTH
        total = torch.zeros(())
        for table in self.tables:
            total = total + table(rows)
        normed: torch.Tensor = self.norm(total)
        return normed


@dataclass(frozen=True)
class Form:
    """An optimizer and what it is made with."""

    name: str
    make: Callable[..., Optimizer]
    options: dict[str, Any]

    @property
    def id(self) -> str:
        return "-".join(
            [
                self.name,
                *(
                    key if value is True else f"{key}={value}"
                    for key, value in self.options.items()
                ),
            ]
        )

    def build(self) -> tuple[nn.Module, Optimizer]:
        """A model of its own, and the optimizer on it."""
        torch.manual_seed(0)
        model = SparseNet() if self.name == "SparseAdam" else Net(bias=self.name != "Muon")
        return model, self.make(model.parameters(), **self.options)


def _forms() -> Iterator[Form]:
    extra: dict[str, list[dict[str, Any]]] = {
        "SGD": [{"momentum": 0.0}, {"momentum": 0.9}],
        "Adam": [{}, {"amsgrad": True}],
        "RMSprop": [{"momentum": 0.9, "centered": True}],
        "LBFGS": [{"max_iter": 2, "history_size": 3}],
    }
    names = [
        *(
            "SGD",
            "Adam",
            "AdamW",
            "NAdam",
            "RAdam",
            "Adagrad",
            "Adadelta",
            "Adamax",
            "RMSprop",
            "Rprop",
            "ASGD",
        ),
        *("LBFGS", "SparseAdam", "Adafactor", "Muon"),
    ]
    for name in names:
        make = getattr(torch.optim, name, None)
        if make is None:
            continue
        known = inspect.signature(make).parameters
        forms: list[dict[str, Any]] = (
            [{"foreach": False}, {"foreach": True}] if "foreach" in known else [{}]
        )
        if "fused" in known:
            forms.append({"fused": True})
        for options in extra.get(name, [{}]):
            yield from (Form(name, make, {"lr": 0.01, **options, **form}) for form in forms)


FORMS = list(_forms())


def train_step(model: nn.Module, optimizer: Optimizer) -> None:
    """One update from random data."""
    x = torch.randn(4, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(x) ** 2).mean() + (model(x)[:, 0] ** 3).mean()
        loss.backward()
        return loss

    # torch wants a float, its own examples give the loss
    optimizer.step(closure)  # type: ignore[arg-type]


def large_weights(model: nn.Module) -> list[nn.Parameter]:
    """The four that are deferred."""
    return [parameter for parameter in model.parameters() if parameter.numel() == WIDTH * WIDTH]
