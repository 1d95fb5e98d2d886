"""The models that benchmarks capture: GPTs with AdamW whose state exists, and what one training
step of them is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW

from datastates.demo.model import GPT, Shape

LARGE = Shape(layers=12, heads=12, width=768, context=1024, vocabulary=24_000)
"""104.3M parameters, 148 tensors; with AdamW 592 tensors, 1.25 GB."""

MEDIUM = Shape(layers=8, heads=8, width=512, context=128, vocabulary=8_000)
"""29.4M parameters; with AdamW 337 MiB."""

SMALL = Shape(layers=4, heads=4, width=128, context=32, vocabulary=1_500)
"""1.0M parameters; with AdamW 12 MiB."""

TINY = Shape(layers=2, heads=2, width=64, context=32, vocabulary=256)
"""For a quick look at whether all of it runs."""


@dataclass(slots=True)
class Trainer:
    """A model and its optimizer on random tokens, new at each step, so that gradients never
    vanish into denormal numbers."""

    model: GPT
    optimizer: AdamW
    shape: Shape

    @classmethod
    def make(cls, shape: Shape) -> Trainer:
        """With the optimizer's state made and a gradient in place, as after a first step."""
        torch.manual_seed(0)
        model = GPT(shape)
        trainer = cls(model, AdamW(model.parameters(), lr=1e-4), shape)
        trainer.backward()
        trainer.optimizer.step()
        return trainer

    def backward(self) -> None:
        """Forward and backward of a new step, on one window of at most 128 tokens."""
        self.optimizer.zero_grad()
        self.model(
            torch.randint(0, self.shape.vocabulary, (1, min(self.shape.context, 128) + 1))
        ).backward()

    @property
    def objects(self) -> dict[str, Any]:
        """What is captured."""
        return {"model": self.model, "optimizer": self.optimizer}
