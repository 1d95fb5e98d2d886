"""The models that benchmarks capture: GPTs with AdamW whose state exists, and what one training step of them is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import AdamW

from datastates.demo_model import GPT, Shape

__all__ = ["LARGE", "MEDIUM", "TINY", "Trainer"]

LARGE = Shape(layers=12, heads=12, width=768, context=1024, vocabulary=24_000)
"""104.3M parameters, 148 tensors; with AdamW 592 tensors, 1.25 GB."""

MEDIUM = Shape(layers=8, heads=8, width=512, context=128, vocabulary=8_000)
"""29.4M parameters; with AdamW 337 MiB."""

TINY = Shape(layers=2, heads=2, width=64, context=32, vocabulary=256)
"""For a quick look at whether all of it runs."""


@dataclass(slots=True)
class Trainer:
    """A model and its optimizer on random tokens: their values do not change what a step or a capture costs."""

    model: GPT
    optimizer: AdamW
    tokens: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, *, batch: int = 1) -> Trainer:
        """With the optimizer's state made and a gradient in place, as after a first step."""
        torch.manual_seed(0)
        model = GPT(shape)
        tokens = torch.randint(0, shape.vocabulary, (batch, min(shape.context, 128) + 1))
        trainer = cls(model, AdamW(model.parameters(), lr=1e-4), tokens)
        trainer.backward()
        trainer.optimizer.step()
        return trainer

    def backward(self) -> None:
        """Forward and backward of a new step."""
        self.optimizer.zero_grad()
        self.model(self.tokens).backward()

    @property
    def objects(self) -> dict[str, object]:
        """What is captured."""
        return {"model": self.model, "optimizer": self.optimizer}
