"""Numbers that lie on a device when a state is captured. They are copied with its bytes, and nothing waits for them before that."""

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
    """The numbers of one capture that lie on devices. ``tensors`` has copies of those in the metrics, by name, then those in the values."""

    names: Sequence[str]
    flat: Flat
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, metrics: Mapping[str, torch.Tensor], flat: Flat) -> Arriving | None:
        """The late numbers of a capture; None if there are none. Runs on the training thread, which may change them once this returns."""
        if not metrics and not flat.has_numbers:
            return None
        found = [*metrics.values(), *(value.tensor for value in flat.values if isinstance(value, Number))]
        return cls([*metrics], flat, [each.detach().clone() for each in found])

    def metrics_with(self, metrics: Mapping[str, float], found: Sequence[float]) -> dict[str, float]:
        """All metrics, including the numbers that have arrived."""
        return {**metrics, **dict(zip(self.names, map(float, found), strict=False))}

    def values_with(self, values: msgspec.Raw, found: Sequence[float]) -> msgspec.Raw:
        """The values, including the numbers that have arrived; unchanged if none were late."""
        if not self.flat.has_numbers:
            return values
        numbers = iter(found[len(self.names) :])
        whole = [value.kind(next(numbers)) if isinstance(value, Number) else value for value in self.flat.values]
        return msgspec.Raw(encode_values(whole))
