"""Which live tensors can receive a state's bytes directly as they arrive: those that lie in memory exactly as the stored ones do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from datastates.content.geometry import dense_view, dtype_of
from datastates.content.manifest import TensorSpec
from datastates.system.devices import devices

from .names import split_wrappers
from .optimizers import with_inner
from .own_loading import only_waits
from .report import Target
from .sharing import extent_of

__all__ = ["Home", "live_homes", "wait_for_copies"]

_PLAIN = frozenset({torch.Tensor, nn.Parameter})


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """A live tensor into which a stored one is received; ``flat`` is its bytes in memory order."""

    path: str
    live: torch.Tensor
    flat: torch.Tensor


def live_homes(targets: Sequence[Target], index_of: Mapping[int, int], specs: Sequence[TensorSpec]) -> dict[int, Home]:
    """The live tensor into which each tensor of the state can be received in place, by index.

    ``index_of`` gives the index of a stored tensor by its id. If live tensors overlap in memory and must become different
    stored ones, none of them is a home: the order in which they are written then matters.
    """
    found: dict[int, Home] = {}
    for target in targets:
        index = index_of.get(id(target.stored))
        if index is not None and index not in found and target.is_as_stored and _lies_as(target.live, specs[index]):
            flat = dense_view(target.live)
            if flat is not None:
                found[index] = Home(target.path, target.live, flat)
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
        wait = getattr(vars(part).get("load_state_dict"), "waits", None)  # where torch's hooks cannot be put
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


def _lies_as(live: torch.Tensor, spec: TensorSpec) -> bool:
    if type(live) not in _PLAIN or live.layout is not torch.strided or live.is_quantized:
        return False
    if live.device.type != "cpu" and not devices().is_on(live):
        return False
    if live.dtype != dtype_of(spec.dtype) or tuple(live.shape) != spec.shape or not live.numel():
        return False
    strides = [pair for pair, size in zip(zip(live.stride(), spec.strides, strict=True), spec.shape, strict=True) if size > 1]
    return all(here == there != 0 for here, there in strides)


def _overlapping(targets: Sequence[Target], index_of: Mapping[int, int]) -> set[int]:
    """The stored tensors whose live ones share memory with that of another stored one."""
    extents = []
    for target in targets:
        extent = extent_of(target.live)
        if extent is not None:
            extents.append((*extent, index_of.get(id(target.stored), -1)))
    extents.sort()
    shared: set[int] = set()
    last: tuple[object, int, int] | None = None  # the device, the furthest end on it so far, and the tensor that ends there
    for *device, begin, end, index in extents:
        if last is not None and last[0] == device and begin < last[1] and index != last[2]:
            shared |= {index, last[2]}
        if last is None or last[0] != device or end > last[1]:
            last = (device, end, index)
    return shared
