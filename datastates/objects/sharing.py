"""Live tensors that lie in one memory and are to become different stored ones: which of them get memory of their own, and which cannot.

An average of weights that began as their alias is one tensor with them when a script starts, and another once it was updated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from datastates.content.geometry import memory_key
from datastates.content.spread import is_spread, local_of
from datastates.system.devices import devices

from .locals import cut_for, lies_as
from .report import Mismatch, Target

__all__ = ["Sharing", "extent_of", "shared"]

Extent = tuple[str, int, int, int]
"""A device, by kind and number, and the addresses there at which memory begins and ends."""


@dataclass(slots=True)
class Sharing:
    """The targets that cannot become what the state has in the memory that they share with others.

    ``apart`` can have another tensor in their place. ``misfits`` cannot; ``hints`` say what to do about them.
    """

    apart: list[Target] = field(default_factory=list)
    misfits: list[Mismatch] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


def shared(targets: Sequence[Target]) -> Sharing:
    """The targets that share memory and are to become different stored tensors.

    What cannot be replaced keeps its memory, and of the rest the first. Tensors that share only a part of their memory, as a view and its
    base do, stay as they are if the state has the same there.
    """
    found = Sharing()
    placed = [(target, extent) for target in targets if (extent := extent_of(target.live)) is not None]
    touching = _touching(extent for _, extent in placed)
    kept: defaultdict[Extent, list[_Lying]] = defaultdict(list)
    for target, extent in sorted(placed, key=lambda pair: pair[0].is_replaceable):
        lying = _Lying(target)
        others = (each for near in touching[extent] for each in kept[near])
        other = next((each.target for each in others if each.differs_from(lying)), None)
        if other is None:
            kept[extent].append(lying)
        elif target.is_replaceable:
            found.apart.append(target)
        else:
            found.misfits.append(Mismatch(target.path, f"another value than {other.path}", "one memory for both"))
            found.hints.append(f"{target.path} shares memory with {other.path}: give it its own (clone it), or leave one of the two out")
    return found


def extent_of(live: torch.Tensor) -> Extent | None:
    """Where a tensor lies on this rank; None if it has no memory that could be told, as a subclass that wraps other tensors."""
    local = local_of(live)
    if local is None or local.layout is not torch.strided or not local.numel():
        return None
    try:
        begin = local.data_ptr()
    except (RuntimeError, NotImplementedError):  # some subclasses without memory of their own
        return None
    if not begin:  # the others
        return None
    where = devices().of(local)
    if local.is_contiguous():
        return where.type, where.index or 0, begin, begin + local.nbytes
    reach = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return where.type, where.index or 0, begin, begin + reach * local.element_size()


def _touching(extents: Iterable[Extent]) -> dict[Extent, list[Extent]]:
    """Each of the extents with those that have some memory in common with it, itself among them."""
    found: dict[Extent, list[Extent]] = {}
    reaching: list[Extent] = []
    for extent in sorted(set(extents)):
        *device, begin, _ = extent
        reaching = [each for each in reaching if [*each[:2]] == device and each[3] > begin]
        for each in reaching:
            found[each].append(extent)
        reaching.append(extent)
        found[extent] = [*reaching]
    return found


class _Lying:
    """A target, and the bytes that it is to have where it lies."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._image: _Image | None = None

    @property
    def image(self) -> _Image:
        """The bytes; made when they are first asked for."""
        if self._image is None:
            self._image = _image_of(self.target)
        return self._image

    def differs_from(self, other: _Lying) -> bool:
        """Whether the memory cannot hold both."""
        mine, its = self.target, other.target
        if _is_one(mine, its):
            return False
        is_copied = all(each.is_as_stored or each.stored.dtype != each.live.dtype for each in (mine, its))
        if not is_copied and not its.is_replaceable:
            return False  # a part of a model loads it in a way of its own
        if its.is_replaceable and _are_plain(mine, its) and memory_key(mine.live) == memory_key(its.live):
            return True  # the state would have them as one tensor if they had been one, whatever their values
        return self.image.differs_from(other.image)


@dataclass(frozen=True, slots=True)
class _Image:
    """Bytes from an address on; ``is_set`` says which of them count."""

    begin: int
    data: np.ndarray[Any, Any]
    is_set: np.ndarray[Any, Any]

    def differs_from(self, other: _Image) -> bool:
        begin, end = max(self.begin, other.begin), min(self.begin + len(self.data), other.begin + len(other.data))
        if begin >= end:
            return False
        mine, its = (slice(begin - each.begin, end - each.begin) for each in (self, other))
        return bool(((self.data[mine] != other.data[its]) & self.is_set[mine] & other.is_set[its]).any())


def _image_of(target: Target) -> _Image:
    if target.arrays is not None:
        live, stored = target.arrays
        content = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        return _image(live.ctypes.data, live.shape, live.strides, live.itemsize, content)
    here, stored_here = local_of(target.live), target.stored
    assert here is not None, "it has an extent"
    if is_spread(target.live):
        found = local_of(stored_here if lies_as(stored_here, target.live) else cut_for(target.live, stored_here))
        assert found is not None, "it is laid out as the live one"
        stored_here = found
    for dim, stride in enumerate(here.stride()):
        if stride == 0 and here.shape[dim] > 1:
            here, stored_here = here.narrow(dim, 0, 1), stored_here.narrow(dim, 0, 1)
    size = here.element_size()
    with torch.no_grad():
        plain = stored_here.detach().to("cpu", here.dtype).resolve_conj().resolve_neg().contiguous()
    content = plain.view(-1).view(torch.uint8).numpy()
    return _image(here.data_ptr(), tuple(here.shape), [stride * size for stride in here.stride()], size, content)


def _image(address: int, shape: Sequence[int], strides: Sequence[int], size: int, content: np.ndarray[Any, Any]) -> _Image:
    """The image of ``content``, elements of ``size`` bytes in the usual order, with ``strides`` in bytes from ``address`` on."""
    reaches = [(side - 1) * stride for side, stride in zip(shape, strides, strict=True)]
    below, above = -sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    data = np.zeros(below + above + size, np.uint8)
    is_set = np.zeros(len(data), np.bool_)
    sides, steps = (*shape, size), (*strides, 1)
    np.ndarray(sides, np.uint8, data, below, steps)[...] = content.reshape(sides)
    np.ndarray(sides, np.bool_, is_set, below, steps)[...] = True
    return _Image(address - below, data, is_set)


def _is_one(one: Target, other: Target) -> bool:
    """Whether both become the same stored tensor."""
    if one.stored is other.stored:
        return True
    key = memory_key(one.stored) if _are_plain(one, other) else None
    return key is not None and key == memory_key(other.stored)


def _are_plain(*targets: Target) -> bool:
    """Whether all are tensors that lie whole in memory, live and stored."""
    found = [tensor for target in targets for tensor in (target.live, target.stored)]
    return all(target.arrays is None for target in targets) and all(
        tensor.layout is torch.strided and not is_spread(tensor) for tensor in found
    )
