"""The tensors of a state before its bytes are there: over the memory that they will come into."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from datastates.content.geometry import rebuild
from datastates.content.manifest import TensorSpec

from .shadow import Extent, Shadow

if TYPE_CHECKING:
    import torch

__all__ = ["givable", "holders", "placeholders", "tie"]

_GIVEN_BYTES = 64 << 10
"""Tensors from this size on that the objects do not have yet become part of them as they are, without a copy."""


def holders(specs: Sequence[TensorSpec], wanted: Sequence[bool]) -> dict[int, None]:
    """The indices of wanted tensors, and of those that they are tied to."""
    found = dict.fromkeys(index for index, is_wanted in enumerate(wanted) if is_wanted)
    found.update((alias, None) for index in list(found) if (alias := specs[index].alias) is not None)
    return found


def placeholders(specs: Sequence[TensorSpec], wanted: Collection[int], shadow: Shadow) -> list[torch.Tensor | None]:
    """Every wanted tensor, over memory that nobody has touched yet."""
    tensors: list[torch.Tensor | None] = []
    for index, spec in enumerate(specs):
        is_here = spec.alias is None and index in wanted
        tensors.append(rebuild(shadow.tensor(spec.shards[0].start, spec.shards[0].length), spec) if is_here else None)
    tie(specs, tensors, wanted)
    return tensors


def tie(specs: Sequence[TensorSpec], tensors: list[torch.Tensor | None], wanted: Collection[int]) -> None:
    """Put the same tensor where tied ones are wanted."""
    for index in wanted:
        alias = specs[index].alias
        if alias is not None:
            tensors[index] = tensors[alias]


def givable(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], wanted: Collection[int], homes: Mapping[int, object]
) -> dict[int, Extent]:
    """Placeholders that may become part of the objects, by id, and where they lie."""
    found = {}
    for index in wanted:
        spec, tensor = specs[index], tensors[index]
        if spec.alias is not None or index in homes or tensor is None or spec.shards[0].length < _GIVEN_BYTES:
            continue
        if all(stride or size == 1 for stride, size in zip(spec.strides, spec.shape, strict=True)):
            found[id(tensor)] = (spec.shards[0].start, spec.shards[0].length)
    return found
