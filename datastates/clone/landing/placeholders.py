"""The tensors of a state before its bytes are there, over the memory into which the bytes will come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from datastates.content.geometry import rebuild
from datastates.content.manifest import TensorSpec
from datastates.content.shards import assemble, bytes_of, empty, is_whole

from .shadow import Extent, Shadow

if TYPE_CHECKING:
    import torch

__all__ = ["gather", "givable", "holders", "placeholders", "tie"]

_GIVEN_BYTES = 64 << 10
"""Tensors of at least this size that the objects do not have yet become part of them as they are, without a copy."""


def holders(specs: Sequence[TensorSpec], wanted: Sequence[bool]) -> dict[int, None]:
    """The indices of wanted tensors, and of those to which they are tied."""
    found = dict.fromkeys(index for index, is_wanted in enumerate(wanted) if is_wanted)
    found.update((alias, None) for index in list(found) if (alias := specs[index].alias) is not None)
    return found


def placeholders(specs: Sequence[TensorSpec], wanted: Collection[int], shadow: Shadow) -> list[torch.Tensor | None]:
    """Every wanted tensor, over untouched memory: of the shadow or, for a tensor of several shards, its own."""
    tensors = [_placeholder(spec, shadow) if spec.alias is None and index in wanted else None for index, spec in enumerate(specs)]
    tie(specs, tensors, wanted)
    return tensors


def gather(specs: Sequence[TensorSpec], tensors: list[torch.Tensor | None], wanted: Collection[int], shadow: Shadow) -> None:
    """Put in its place each wanted tensor of several shards, assembled from the shards in the shadow."""
    for index in wanted:
        if specs[index].alias is None and not is_whole(specs[index]):
            flat = assemble(specs[index], lambda shard: shadow.tensor(shard.start, shard.length))
            tensors[index] = rebuild(flat, specs[index])


def _placeholder(spec: TensorSpec, shadow: Shadow) -> torch.Tensor:
    if is_whole(spec):
        return rebuild(shadow.tensor(spec.shards[0].start, spec.shards[0].length), spec)
    return rebuild(empty(spec), spec)


def tie(specs: Sequence[TensorSpec], tensors: list[torch.Tensor | None], wanted: Collection[int]) -> None:
    """Put the same tensor in every place where tied ones are wanted."""
    for index in wanted:
        alias = specs[index].alias
        if alias is not None:
            tensors[index] = tensors[alias]


def givable(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], wanted: Collection[int], homes: Mapping[int, object]
) -> dict[int, Extent]:
    """Placeholders that may become part of the objects, by id, with the places where they lie."""
    found = {}
    for index in wanted:
        spec, tensor = specs[index], tensors[index]
        if spec.alias is not None or index in homes or tensor is None or not is_whole(spec) or bytes_of(spec) < _GIVEN_BYTES:
            continue
        if all(stride or size == 1 for stride, size in zip(spec.strides, spec.shape, strict=True)):
            found[id(tensor)] = (spec.shards[0].start, spec.shards[0].length)
    return found
