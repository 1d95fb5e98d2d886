"""Into live tensors that lie over several ranks: of what a state holds each rank reads the boxes that are its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from datastates.content.geometry import dtype_of
from datastates.content.manifest import TensorSpec
from datastates.objects.adapters import Adapted, parts
from datastates.objects.locals import boxes_here, lies_as, put_together
from datastates.objects.placements import is_spread
from datastates.objects.report import Findings
from datastates.store.regions import Region, read_regions
from datastates.store.tier import Reader

__all__ = ["has_spread", "read_spread"]


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


def read_spread(
    reader: Reader, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], findings: Findings
) -> dict[int, torch.Tensor]:
    """The stored tensors that go into DTensors only, laid out as these, by index; ``tensors`` are the sketch that ``findings`` are of.

    Their memory is lent: it lasts as long as the reader is open.

    :raises Corrupt: a chunk fails its digest.
    """
    likes = _likes(specs, tensors, findings)
    boxes = {index: boxes_here(like) for index, like in likes.items()}
    regions = [Region(specs[index], box.offset, box.local_shape) for index in likes for box in boxes[index]]
    found = iter(read_regions(reader, regions, is_borrowing=True))
    return {index: put_together(like, [next(found) for _ in boxes[index]], dtype_of(specs[index].dtype)) for index, like in likes.items()}


def _likes(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], findings: Findings) -> dict[int, torch.Tensor]:
    """What each stored tensor is to be laid out as, by index: that is so wherever it stands in the tree."""
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
