"""The measured state: a GPT with fused AdamW, 592 tensors and 1.25 GB, or a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from capture_peers import state_bytes, state_tensors
from gpt import LARGE, TINY
from torch import Tensor
from torch.optim import AdamW

import datastates
from datastates.config import Config
from datastates.demo.model import GPT, Shape

from .case import Skip
from .place import Place, timed


@dataclass(slots=True)
class Model:
    """A GPT on the device after its first step."""

    model: GPT
    optimizer: AdamW
    shape: Shape
    place: Place

    @classmethod
    def make(cls, place: Place) -> Model:
        """The large model, or a tiny one."""
        not_late(place)
        torch.manual_seed(0)
        shape = TINY if place.where.is_tiny else LARGE
        with place.device:
            model = GPT(shape)
        made = cls(model, AdamW(model.parameters(), lr=1e-4, fused=True), shape, place)
        made.backward(1)
        made.optimizer.step()
        return made

    def backward(self, windows: int) -> None:
        """Forward and backward on windows of random tokens."""
        self.optimizer.zero_grad()
        size = (windows, min(self.shape.context, 512) + 1)
        self.model(
            torch.randint(0, self.shape.vocabulary, size, device=self.place.device)
        ).backward()

    @property
    def objects(self) -> dict[str, Any]:
        """The captured objects."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def tensors(self) -> list[Tensor]:
        """Each tensor once."""
        return state_tensors(self.objects)

    @property
    def warm_up(self) -> int:
        """Captures that are not counted, after which all memory is touched."""
        return 1 if self.place.is_quick else 5

    @property
    def size(self) -> int:
        """Bytes."""
        return state_bytes(self.objects)


def not_late(place: Place) -> None:
    """:raises Skip: this case measures speed."""
    if place.where.kind == "late":
        raise Skip("late devices have no speed")


@contextmanager
def opened(size: int, states: float = 3.2, kept: float = 0.0) -> Iterator[datastates.Repository]:
    """A repository that holds the given numbers of states in memory and on the device. It writes
    states only on request."""
    with TemporaryDirectory(prefix="datastates-gpu-") as folder:
        config = Config(
            memory_bytes=int(states * size) + (64 << 20),
            durable_interval_s=None,
            device_bytes=int(kept * size),
        )
        with datastates.open(Path(folder) / "repository", config=config) as repo:
            yield repo


@dataclass(slots=True)
class Floor:
    """One contiguous copy, in either direction between the device and pinned memory."""

    place: Place
    here: Tensor
    there: Tensor

    @classmethod
    def make(cls, place: Place, size: int) -> Floor:
        """With touched memory."""
        there = torch.randint(0, 255, (size,), dtype=torch.uint8, device=place.device)
        made = cls(place, place.pinned(size), there)
        made.to_host()
        made.to_device()
        return made

    def to_host(self) -> float:
        """Seconds."""
        return timed(self.place, lambda: self.here.copy_(self.there, non_blocking=True))

    def to_device(self) -> float:
        """Seconds."""
        return timed(self.place, lambda: self.there.copy_(self.here, non_blocking=True))
