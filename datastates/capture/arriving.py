"""Numbers that lie on a device when a state is captured: they cross with its bytes, and nobody waits for them before these are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from datastates.content.tree import Flat, Number, encode_values
from datastates.system.devices import devices

__all__ = ["Arriving", "is_late"]


def is_late(value: object) -> bool:
    """Whether this is one number, and reading it would wait for a device."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex() and devices().is_on(value)


@dataclass(frozen=True, slots=True)
class Arriving:
    """The numbers of one capture that lie on devices: ``tensors`` are copies of those of the metrics, by name, and then of the values."""

    names: Sequence[str]
    flat: Flat
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, metrics: Mapping[str, torch.Tensor], flat: Flat) -> Arriving | None:
        """What is late of a capture; None: nothing. On the training thread, which may change all of it once this returns."""
        if not metrics and not flat.has_numbers:
            return None
        found = [*metrics.values(), *(value.tensor for value in flat.values if isinstance(value, Number))]
        return cls([*metrics], flat, [each.detach().clone() for each in found])

    def metrics_with(self, metrics: Mapping[str, float], found: Sequence[float]) -> dict[str, float]:
        """All metrics, with the numbers that have arrived."""
        return {**metrics, **dict(zip(self.names, map(float, found), strict=False))}

    def values_with(self, values: msgspec.Raw, found: Sequence[float]) -> msgspec.Raw:
        """The values, with the numbers that have arrived; as they were where none were late."""
        if not self.flat.has_numbers:
            return values
        numbers = iter(found[len(self.names) :])
        whole = [value.kind(next(numbers)) if isinstance(value, Number) else value for value in self.flat.values]
        return msgspec.Raw(encode_values(whole))
