"""Live tensors that a restore or a clone writes in place.

The file finds tensors that share memory and are to become different stored ones, for example an
average of weights that began as their alias. It marks tensors as dirty while a write is unfinished.
It also finds the tensors that can receive bytes directly as they arrive.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from datastates.errors import Dirty
from datastates.system.devices import devices

from .geometry import dense_view, dtype_of, is_spread, local_of, memory_key
from .manifest import TensorSpec
from .model import only_waits
from .optimizer import with_inner
from .per_rank import cut_for, is_laid_out_as
from .report import Mismatch, Target
from .tree import split_wrappers

Extent = tuple[str, int, int, int]
"""A device, by kind and number, and the addresses there at which memory begins and ends."""

_PLAIN = frozenset({torch.Tensor, nn.Parameter})


@dataclass(slots=True)
class Sharing:
    """The targets that cannot become what the state has, because of the memory that they share.

    ``apart`` can have another tensor in their place. ``misfits`` cannot, and ``hints`` are
    remedies.
    """

    apart: list[Target] = field(default_factory=list)
    misfits: list[Mismatch] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


def shared(targets: Sequence[Target]) -> Sharing:
    """The targets that share memory and are to become different stored tensors.

    Targets that cannot be replaced keep their memory. If all can be replaced, the first one keeps
    it. Tensors that share only a part of their memory, as a view and its base do, stay unchanged if
    the state has the same there.
    """
    found = Sharing()
    placed = [
        (target, extent) for target in targets if (extent := extent_of(target.live)) is not None
    ]
    touching = _touching(extent for _, extent in placed)
    kept: defaultdict[Extent, list[_PlacedTarget]] = defaultdict(list)
    for target, extent in sorted(placed, key=lambda pair: pair[0].is_replaceable):
        placed_target = _PlacedTarget(target)
        others = (each for near in touching[extent] for each in kept[near])
        other = next((each.target for each in others if each.differs_from(placed_target)), None)
        if other is None:
            kept[extent].append(placed_target)
        elif target.is_replaceable:
            found.apart.append(target)
        else:
            found.misfits.append(
                Mismatch(target.path, f"another value than {other.path}", "one memory for both")
            )
            found.hints.append(
                f"{target.path} shares memory with {other.path}: give it its own (clone it), or"
                " leave one of the two out"
            )
    return found


def extent_of(live: torch.Tensor) -> Extent | None:
    """The device and addresses of a tensor on this rank. None if its memory cannot be found, as for
    a subclass that wraps other tensors."""
    local = local_of(live)
    if local is None or local.layout is not torch.strided or not local.numel():
        return None
    try:
        begin = local.data_ptr()
    except (RuntimeError, NotImplementedError):  # some subclasses without memory
        return None
    if not begin:  # all other such subclasses
        return None
    where = devices().of(local)
    if local.is_contiguous():
        return where.type, where.index or 0, begin, begin + local.nbytes
    reach = 1 + sum(
        (size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)
    )
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


class _PlacedTarget:
    """A target, and the bytes that it is to have at its place."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @cached_property
    def image(self) -> _Image:
        return _image_of(self.target)

    def differs_from(self, other: _PlacedTarget) -> bool:
        """Whether the memory cannot hold both."""
        mine, its = self.target, other.target
        if _is_one(mine, its):
            return False
        is_copied = all(
            each.is_as_stored or each.stored.dtype != each.live.dtype for each in (mine, its)
        )
        if not is_copied and not its.is_replaceable:
            return False  # a part of a model that loads its state with its own method
        if (
            its.is_replaceable
            and _are_plain(mine, its)
            and memory_key(mine.live) == memory_key(its.live)
        ):
            # the state would have them as one tensor if they had been one, whatever their values
            return True
        return self.image.differs_from(other.image)


@dataclass(frozen=True, slots=True)
class _Image:
    """Bytes from an address on. ``is_set`` marks those that count."""

    begin: int
    data: np.ndarray[Any, Any]
    is_set: np.ndarray[Any, Any]

    def differs_from(self, other: _Image) -> bool:
        begin, end = (
            max(self.begin, other.begin),
            min(self.begin + len(self.data), other.begin + len(other.data)),
        )
        if begin >= end:
            return False
        mine, its = (slice(begin - each.begin, end - each.begin) for each in (self, other))
        return bool(
            ((self.data[mine] != other.data[its]) & self.is_set[mine] & other.is_set[its]).any()
        )


def _image_of(target: Target) -> _Image:
    if target.arrays is not None:
        live, stored = target.arrays
        content = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        return _image(live.ctypes.data, live.shape, live.strides, live.itemsize, content)
    here, stored_here = local_of(target.live), target.stored
    assert here is not None, "it has an extent"
    if is_spread(target.live):
        found = local_of(
            stored_here
            if is_laid_out_as(stored_here, target.live)
            else cut_for(target.live, stored_here)
        )
        assert found is not None, "it is laid out as the live one"
        stored_here = found
    for dim, stride in enumerate(here.stride()):
        if stride == 0 and here.shape[dim] > 1:
            here, stored_here = here.narrow(dim, 0, 1), stored_here.narrow(dim, 0, 1)
    size = here.element_size()
    with torch.no_grad():
        plain = stored_here.detach().to("cpu", here.dtype).resolve_conj().resolve_neg().contiguous()
    content = plain.view(-1).view(torch.uint8).numpy()
    return _image(
        here.data_ptr(),
        tuple(here.shape),
        [stride * size for stride in here.stride()],
        size,
        content,
    )


def _image(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    size: int,
    content: np.ndarray[Any, Any],
) -> _Image:
    """The image of ``content``, elements of ``size`` bytes in the usual order, with ``strides``
    in bytes from ``address`` on."""
    reaches = [(side - 1) * stride for side, stride in zip(shape, strides, strict=True)]
    below, above = -sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    data = np.zeros(below + above + size, np.uint8)
    is_set = np.zeros(len(data), np.bool_)
    sides, steps = (*shape, size), (*strides, 1)
    np.ndarray(sides, np.uint8, data, below, steps)[...] = content.reshape(sides)
    np.ndarray(sides, np.bool_, is_set, below, steps)[...] = True
    return _Image(address - below, data, is_set)


def _is_one(one: Target, other: Target) -> bool:
    if one.stored is other.stored:
        return True
    key = memory_key(one.stored) if _are_plain(one, other) else None
    return key is not None and key == memory_key(other.stored)


def _are_plain(*targets: Target) -> bool:
    """Whether all tensors are whole in memory, live and stored."""
    found = [tensor for target in targets for tensor in (target.live, target.stored)]
    return all(target.arrays is None for target in targets) and all(
        tensor.layout is torch.strided and not is_spread(tensor) for tensor in found
    )


# --- Dirty tensors: half old, half new, because a clone or a restore into them did not end ---


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    tensor: weakref.ref[torch.Tensor]
    path: str
    by: object


_marked: dict[int, _Mark] = {}
_lock = threading.Lock()


def is_any() -> bool:
    """Whether any tensor of this process is dirty."""
    return bool(_marked)


def mark(tensors: Iterable[tuple[str, torch.Tensor]], by: object) -> None:
    """Mark tensors, by path, as neither old nor new from here on; ``by`` is the writer."""
    with _lock:
        for path, tensor in tensors:
            _marked[id(tensor)] = _Mark(weakref.ref(tensor, partial(_forget, id(tensor))), path, by)


def are_marked(tensors: Iterable[torch.Tensor], by: object) -> bool:
    """Whether these tensors are all dirty, and by ``by`` alone. Its writes are then still there."""
    with _lock:
        return all(
            (mark := _marked.get(id(tensor))) is not None and mark.by is by for tensor in tensors
        )


def clean(tensors: Iterable[torch.Tensor]) -> None:
    """Mark these tensors as whole again."""
    if not _marked:
        return
    with _lock:
        for tensor in tensors:
            _marked.pop(id(tensor), None)


def check(tensors: Iterable[torch.Tensor]) -> None:
    """Raise ``Dirty`` if one of these tensors is dirty.

    :raises Dirty: names those that are.
    """
    if not _marked:
        return
    found = [mark.path for tensor in tensors if (mark := _marked.get(id(tensor))) is not None]
    if found:
        names = ", ".join(sorted({path.split("/", 1)[0] for path in found}))
        raise Dirty(
            f"{names}: half old, half new, as a clone or a restore into {len(found)} tensors"
            f" ({found[0]}, …) did not end: resume the clone, clone again, or restore a state"
        )


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it is not in this process


def _forget(key: int, gone: weakref.ref[torch.Tensor], marked: dict[int, _Mark] = _marked) -> None:
    """Forget a collected tensor.

    Uses no globals, because a module loses them as the interpreter ends.
    """
    mark = marked.get(key)
    if mark is not None and mark.tensor is gone:
        marked.pop(key, None)


os.register_at_fork(after_in_child=_after_fork)


# --- Live tensors that have the stored layout and can receive bytes as they arrive ---


@dataclass(frozen=True, slots=True, eq=False)
class LiveTensor:
    """A live tensor into which a stored one is received; ``flat`` is its bytes in memory order."""

    path: str
    live: torch.Tensor
    flat: torch.Tensor


def live_tensors_for(
    targets: Sequence[Target], index_of: Mapping[int, int], specs: Sequence[TensorSpec]
) -> dict[int, LiveTensor]:
    """The live tensor into which each tensor of the state can be received in place, by index.

    ``index_of`` gives the index of a stored tensor by its id. If live tensors overlap in memory and
    must become different stored ones, none of them is used: the order in which they are written
    then matters.
    """
    found: dict[int, LiveTensor] = {}
    for target in targets:
        index = index_of.get(id(target.stored))
        if (
            index is not None
            and index not in found
            and target.is_as_stored
            and _has_layout_of(target.live, specs[index])
        ):
            flat = dense_view(target.live)
            if flat is not None:
                found[index] = LiveTensor(target.path, target.live, flat)
    for index in _overlapping(targets, index_of):
        found.pop(index, None)
    return found


def wait_for_copies(objects: Mapping[str, object]) -> None:
    """Return once no tracker's capture reads the objects any more."""
    for part in _hooked(objects):
        if isinstance(part, nn.Module):
            for hook in filter(only_waits, part._load_state_dict_pre_hooks.values()):
                hook(part, {}, "", {}, True, [], [], [])
        else:
            waiting: Any = getattr(part, "_optimizer_load_state_dict_pre_hooks", {})
            for hook in filter(only_waits, waiting.values()):
                hook(part, {})
        # where torch's hooks cannot be put
        wait = getattr(vars(part).get("load_state_dict"), "waits", None)
        if wait is not None:
            wait()


def _hooked(found: object) -> Iterator[nn.Module | Optimizer]:
    if isinstance(found, nn.Module):
        yield from split_wrappers(found)
    elif isinstance(found, Optimizer):
        yield from with_inner(found)
    elif isinstance(found, Mapping | list | tuple):
        for child in found.values() if isinstance(found, Mapping) else found:
            if not isinstance(child, torch.Tensor):
                yield from _hooked(child)


def _has_layout_of(live: torch.Tensor, spec: TensorSpec) -> bool:
    if type(live) not in _PLAIN or live.layout is not torch.strided or live.is_quantized:
        return False
    if live.device.type != "cpu" and not devices().is_on(live):
        return False
    if live.dtype != dtype_of(spec.dtype) or tuple(live.shape) != spec.shape or not live.numel():
        return False
    strides = [
        pair
        for pair, size in zip(
            zip(live.stride(), spec.strides, strict=True), spec.shape, strict=True
        )
        if size > 1
    ]
    return all(here == there != 0 for here, there in strides)


def _overlapping(targets: Sequence[Target], index_of: Mapping[int, int]) -> set[int]:
    """The stored tensors whose live ones share memory with the live one of another stored
    tensor."""
    extents = []
    for target in targets:
        extent = extent_of(target.live)
        if extent is not None:
            extents.append((*extent, index_of.get(id(target.stored), -1)))
    extents.sort()
    shared: set[int] = set()
    last: tuple[object, int, int] | None = (
        None  # the device, the furthest end on it so far, and the tensor that ends there
    )
    for *device, begin, end, index in extents:
        if last is not None and last[0] == device and begin < last[1] and index != last[2]:
            shared |= {index, last[2]}
        if last is None or last[0] != device or end > last[1]:
            last = (device, end, index)
    return shared
