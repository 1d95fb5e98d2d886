"""Likely mistakes of a script: refused if they are certain, otherwise reported once."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import TensorWeakRef

from datastates.errors import InvalidInput

from .adapters import has_state, parts
from .rng import RngState
from .sharing import extent_of

__all__ = ["Oversights", "refuse_misspelt"]

_logger = logging.getLogger(__name__)

_IDLE = 3
"""How many captures in a row must find an optimizer idle while its parameters change."""

_OFTEN = 64
"""Buffers are checked at each of the first captures, and then at every one in this many: there may be hundreds."""

_KNOWN = (nn.Module, Optimizer, LRScheduler, RngState, torch.amp.GradScaler)
"""Objects that do not have the parameters of others in their state."""


def refuse_misspelt(given: Iterable[str], options: Collection[str]) -> None:
    """Refuse a plain value whose name is nearly that of an option.

    :raises InvalidInput: names the option.
    """
    for name in given:
        close = get_close_matches(name, options, n=1, cutoff=0.82) or [each for each in options if sorted(each) == sorted(name)]
        if close and name not in options:
            raise InvalidInput(f"{name} is no option and would be tracked as a value: did you mean {close[0]}? If not, rename it")


class Oversights:
    """Checks what is tracked at every capture; costs microseconds."""

    def __init__(
        self,
        objects: Mapping[str, object],
        outlook: Mapping[str, object],
        has_stepped: Callable[[Optimizer], bool],
        *,
        has_gradients: bool = False,
    ) -> None:
        self._has_stepped = has_stepped
        self._optimizers = [_Watched(path, found) for path, found in parts(objects) if isinstance(found, Optimizer)]
        self._buffers = [each for path, found in parts(objects) if isinstance(found, nn.Module) for each in _left_out(path, found)]
        self._looks = 0
        self._stamps: list[object] | None = None
        self._modules = [found for _, found in parts(objects) if isinstance(found, nn.Module)]
        is_asked = all(tree is not None for tree in outlook.values())
        held = [found for _, found in parts(outlook) if isinstance(found, torch.Tensor)]
        self._held = {_memory_of(tensor) for tensor in held} if is_asked else None
        self._others = [
            (found, _shapes_in(outlook.get(name)))
            for name, tracked in objects.items()
            for _, found in parts({name: tracked})
            if has_state(found) and not isinstance(found, _KNOWN)
        ]
        is_scaled = any(isinstance(found, torch.amp.GradScaler) for _, found in parts(objects))  # a scaler leaves out steps
        self._heeds_gradients = not has_gradients and not is_scaled
        self._clipped = {id(part.weight) for module in self._modules for part in module.modules() if _clips_its_weight(part)}
        self._warn_of_metrics([each for path, found in parts(objects) if isinstance(found, nn.Module) for each in _metrics(path, found)])
        empty = [name for name, tree in outlook.items() if isinstance(tree, dict) and not tree]
        self._warn_of_empty([name for name in empty if name in objects and _keeps_something(objects[name])])

    def look(self) -> None:
        """Report what is seen now for the first time."""
        self._looks += 1
        if self._buffers and (self._looks < _OFTEN or not self._looks % _OFTEN):
            self._look_at_buffers()
        if self._optimizers:
            self._look_for_owners()
            self._look_at_optimizers()

    def _warn_of_metrics(self, names: list[str]) -> None:
        if names:
            said = "%s: what it has counted is not in its state_dict, so no state has it; call its persistent(True) before it is tracked"
            _logger.warning(said, ", ".join(names))

    def _warn_of_empty(self, names: list[str]) -> None:
        if names:
            _logger.warning("%s: its state_dict is empty, so no state has anything of it", ", ".join(names))

    def _look_at_buffers(self) -> None:
        stamps = [_stamp(buffers.get(name)) for _, buffers, name in self._buffers]
        changed = [self._buffers[i][0] for i, stamp in enumerate(stamps) if self._stamps is not None and stamp != self._stamps[i]]
        self._stamps = stamps
        if changed:
            self._buffers = []
            _logger.warning(
                "%s: registered with persistent=False, and changed since the last capture: no state has it; register it without that if"
                " training depends on it",
                ", ".join(changed[:6]),
            )

    def _look_for_owners(self) -> None:
        """Report parameters that an optimizer trains and that nothing tracked has: at first, and when it has got others."""
        for watched in self._optimizers:
            rows = [(len(params), id(params[0]) if params else 0) for params in map(_PARAMS, watched.optimizer.param_groups)]
            if watched.rows == rows:
                continue
            watched.rows, watched.ends, watched.sample = rows, (), None
            if self._held is None:
                continue
            owned = {id(tensor) for module in self._modules for tensor in module.parameters()}
            lost = [each for each in _parameters(watched.optimizer) if id(each) not in owned and _memory_of(each) not in self._held]
            lost = [each for each in lost if not any(_may_have(each, *other) for other in self._others)]
            if lost:
                _logger.warning(
                    "%s trains %s that nothing tracked has, of shape %s: no state has them; track the module that they are in, too",
                    watched.path, "a parameter" if len(lost) == 1 else f"{len(lost)} parameters",
                    ", ".join(str(tuple(each.shape)) for each in lost[:3]) + (", …" if len(lost) > 3 else ""),
                )  # fmt: skip

    def _look_at_optimizers(self) -> None:
        stepped = [watched for watched in self._optimizers if self._has_stepped(watched.optimizer)]
        for watched in self._optimizers:
            if not watched.ends or not all(map(_REQUIRES_GRAD, watched.ends)):
                watched.ends = self._ends_of(watched.optimizer)
            versions = [*map(_stamp, watched.ends)]
            before = versions if watched.versions is None else watched.versions
            watched.versions = versions
            if self._heeds_gradients:
                self._look_at_gradient(watched, is_still=not stepped and versions == before)
            if watched in stepped:
                watched.idle = 0
            elif versions and len(versions) == len(before) and all(map(operator.ne, versions, before)):
                watched.idle += 1
            if watched.idle == _IDLE and not _is_shared(watched, stepped):
                _logger.warning(
                    "%s takes no step although its parameters change: if another optimizer took its place, no state has that one; track it"
                    " instead",
                    watched.path,
                )

    def _look_at_gradient(self, watched: _Watched, *, is_still: bool) -> None:
        """Report gradients that were added to since the last capture, without a step. ``is_still``: nothing has stepped since.

        The gradient of one parameter says it for all.
        """
        last, watched.gradient = watched.gradient, None
        if watched.sample is None or not watched.sample.requires_grad:
            watched.sample = next(filter(_REQUIRES_GRAD, _parameters(watched.optimizer)), None)
        gradient = None if watched.sample is None else watched.sample.grad
        if gradient is None or gradient.is_inference():
            return
        watched.gradient = TensorWeakRef(gradient), gradient._version
        # One change is a backward; several may be a gradient that was set to zero before it.
        if is_still and last is not None and last[0]() is gradient and gradient._version == last[1] + 1:
            self._heeds_gradients = False
            _logger.warning(
                "captured while %s accumulates gradients, which this state does not have: a training that goes on from it begins the"
                " accumulation with the next batch; capture after optimizer.step(), or track with gradients=True",
                watched.path,
            )

    def _ends_of(self, optimizer: Optimizer) -> Sequence[torch.Tensor]:
        """The first and the last of the parameters that only a step changes: an optimizer in its place would change both."""
        trained = [each for each in _parameters(optimizer) if each.requires_grad and id(each) not in self._clipped]
        return (trained[0], trained[-1]) if trained else ()


@dataclass(slots=True, eq=False)
class _Watched:
    """A tracked optimizer, and what the last capture saw of it.

    ``rows`` are the length and the id of the first parameter of each group: they differ once it has got other parameters. ``ends`` are the
    parameters by which a step is seen, and ``versions`` their stamps; ``gradient`` is that of the parameter ``sample``, and its version.
    ``idle`` counts the captures in a row that found it without a step while its parameters changed.
    """

    path: str
    optimizer: Optimizer
    rows: list[tuple[int, int]] | None = None
    ends: Sequence[torch.Tensor] = ()
    versions: list[object] | None = None
    sample: torch.Tensor | None = None
    gradient: tuple[TensorWeakRef, int] | None = None
    idle: int = 0


_PARAMS = operator.itemgetter("params")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def _is_shared(watched: _Watched, stepped: Iterable[_Watched]) -> bool:
    """Whether another tracked optimizer, which has stepped, trains the same parameters."""
    mine = {id(parameter) for parameter in _parameters(watched.optimizer)}
    return any(id(parameter) in mine for other in stepped for parameter in _parameters(other.optimizer))


def _shapes_in(tree: object) -> set[tuple[int, ...]]:
    """The shapes of the tensors and arrays in an object's state."""
    return {tuple(found.shape) for _, found in parts({"": tree}) if isinstance(found, torch.Tensor | np.ndarray)}


def _may_have(parameter: torch.Tensor, found: object, shapes: Collection[tuple[int, ...]]) -> bool:
    """Whether a copy of the parameter may be in the state of an object, which has these shapes in it."""
    return tuple(parameter.shape) in shapes or any(member is parameter for member in getattr(found, "__dict__", {}).values())


def _clips_its_weight(part: nn.Module) -> bool:
    """Whether a pass through the module changes its weight."""
    return isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None


def _keeps_something(found: object) -> bool:
    is_known = isinstance(found, nn.Module | RngState | torch.amp.GradScaler)  # a scaler that is switched off has no state
    is_asked_later = hasattr(found, "__iter__")  # not in the outlook
    return has_state(found) and not is_known and not is_asked_later and bool(getattr(found, "__dict__", None))


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _memory_of(tensor: torch.Tensor) -> object:
    """What two tensors of the same memory have in common; the tensor's own id if its memory cannot be told."""
    extent = None if is_lazy(tensor) else extent_of(tensor)
    return id(tensor) if extent is None else extent[:3]


def _left_out(path: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The buffers that ``state_dict`` leaves out: each one's name, where it is, and its key there."""
    for where, part in module.named_modules():
        for name in part._non_persistent_buffers_set:
            yield f"{path}/{where}.{name}" if where else f"{path}/{name}", part._buffers, name


def _metrics(path: str, module: nn.Module) -> Iterator[str]:
    """The metrics, of torchmetrics' kind, whose state is not in their ``state_dict``."""
    for where, part in module.named_modules():
        persistent = part.__dict__.get("_persistent")
        if part.__dict__.get("_defaults") and isinstance(persistent, dict) and not all(persistent.values()):
            yield f"{path}/{where}" if where else path


def _stamp(tensor: torch.Tensor | None) -> object:
    """A value that differs once the tensor was replaced or changed in place, as far as torch counts that."""
    return None if tensor is None else (id(tensor), None if is_lazy(tensor) or tensor.is_inference() else tensor._version)
