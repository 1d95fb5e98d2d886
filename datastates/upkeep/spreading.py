"""Restoring into live tensors that are spread over several ranks: each rank reads from the state only the boxes that are its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from datastates.content.geometry import dtype_of
from datastates.content.manifest import TensorSpec
from datastates.objects.adapters import Adapted, parts
from datastates.objects.locals import boxes_here, lies_as, put_together
from datastates.objects.placements import is_spread
from datastates.objects.report import Findings
from datastates.store.regions import Region, read_regions, whole
from datastates.store.tier import Reader

__all__ = ["Boxes", "has_spread"]


def has_spread(adapted: Adapted) -> bool:
    """Whether one of the objects is a DTensor, or has one as a parameter or buffer."""
    for _, found in parts(adapted.objects):
        if isinstance(found, nn.Module):
            tensors = [*found.parameters(), *found.buffers()]
        elif isinstance(found, Optimizer):
            tensors = [parameter for group in found.param_groups for parameter in group["params"]]
        else:
            tensors = [found]
        if any(map(is_spread, tensors)):
            return True
    return False


class Boxes:
    """The boxes of the stored tensors that go only into DTensors. ``tensors`` are the sketch that ``findings`` refers to."""

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], findings: Findings) -> None:
        self._specs, self._likes = specs, _likes(specs, tensors, findings)
        self._regions = {
            index: [Region(specs[index], box.offset, box.local_shape) for box in boxes_here(like)] for index, like in self._likes.items()
        }

    def with_whole(self, wants: Callable[[str], bool]) -> Iterator[Region]:
        """These boxes, and all of every other tensor that is wanted."""
        sources = {index if spec.alias is None else spec.alias for index, spec in enumerate(self._specs) if wants(spec.path)}
        for index in sorted(sources):
            yield from self._regions.get(index, [whole(self._specs[index])])

    def read(self, reader: Reader) -> dict[int, torch.Tensor]:
        """The stored tensors by index, laid out as the tensors into which they go. Their memory is lent, and valid while the reader is
        open.

        :raises Corrupt: a chunk fails its digest.
        """
        found = iter(read_regions(reader, [region for regions in self._regions.values() for region in regions], is_borrowing=True))
        return {
            index: put_together(like, [next(found) for _ in self._regions[index]], dtype_of(self._specs[index].dtype))
            for index, like in self._likes.items()
        }


def _likes(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], findings: Findings) -> dict[int, torch.Tensor]:
    """The layout for each stored tensor, by index; it is the same wherever the tensor stands in the tree."""
    index_of = {id(tensor): index for index, tensor in enumerate(tensors) if tensor is not None and specs[index].alias is None}
    stands = Counter(id(tensor) for tensor in tensors if tensor is not None)
    found: dict[int, list[torch.Tensor]] = {}
    for stored, live in (*((target.stored, target.live) for target in findings.targets), *findings.likes):
        if id(stored) in index_of and is_spread(live):
            found.setdefault(id(stored), []).append(live)
    return {
        index_of[key]: lives[0]
        for key, lives in found.items()
        if len(lives) >= stands[key] and all(lies_as(live, lives[0]) for live in lives)
    }
