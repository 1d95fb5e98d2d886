"""Likely mistakes of a script: refused if they are certain, otherwise reported once."""

from __future__ import annotations

import gc
import logging
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import TensorWeakRef

from datastates.state.adapters import has_state, parts
from datastates.state.generators import RngState
from datastates.state.in_place import extent_of
from datastates.state.optimizer import with_inner
from datastates.state.tree import join

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_logger = logging.getLogger(__name__)

_IDLE = 3
"""How many captures in a row must find an optimizer idle while its parameters change."""

_OFTEN = 64
"""Buffers are checked at each of the first captures, and then at every one in this many: there
may be hundreds."""

_KNOWN = (nn.Module, Optimizer, LRScheduler, RngState, torch.amp.GradScaler)
"""Objects that do not have the parameters of others in their state."""


class ScriptChecks:
    """Checks what is tracked at every capture; costs microseconds."""

    def __init__(
        self,
        objects: Mapping[str, object],
        outlook: Mapping[str, object],
        steps_of: Callable[[Optimizer], int],
        *,
        has_gradients: bool = False,
    ) -> None:
        self.gradients = Gradients(is_over=has_gradients)
        self._steps_of = steps_of
        self._objects = objects
        self._passed: set[str] | None = None
        self._optimizers = [
            _TrackedOptimizer(path, found)
            for path, found in parts(objects)
            if isinstance(found, Optimizer)
        ]
        self._buffers = [
            each
            for path, found in parts(objects)
            if isinstance(found, nn.Module)
            for each in _left_out(path, found)
        ]
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
        embeddings = [
            part
            for module in self._modules
            for part in module.modules()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        ]
        # a pass changes these weights
        self._clipped = {id(part.weight) for part in embeddings if part.max_norm is not None}
        for watched in self._optimizers:
            self._find_ends(watched)
        for path, found in () if self._optimizers else parts(objects):
            if isinstance(found, nn.Module):
                self.gradients.hook(
                    path, None, [each for each in found.parameters() if each.requires_grad][-1:]
                )
        metrics = [
            each
            for path, found in parts(objects)
            if isinstance(found, nn.Module)
            for each in _metrics(path, found)
        ]
        empty = [name for name, tree in outlook.items() if isinstance(tree, dict) and not tree]
        empty = [name for name in empty if name in objects and _keeps_something(objects[name])]
        for names, said in (
            (
                metrics,
                (
                    "what it has counted is not in its state_dict, so no state has it; call its"
                    " persistent(True) before it is tracked"
                ),
            ),
            (empty, "its state_dict is empty, so no state has anything of it"),
        ):
            if names:
                _logger.warning("%s: %s", ", ".join(names), said)

    def note_temporaries(self, ours: Callable[[], Iterable[object]]) -> None:
        """Note the objects to which the script has no reference when it first uses the tracker. It
        made them only to pass them, so none of its names is bound to another object later."""
        if self._passed is None and not self.gradients.captures:
            self._passed = {*self._alone(ours)}

    def look(self, ours: Callable[[], Iterable[object]] = tuple) -> None:
        """Report what is seen now for the first time.

        ``ours`` returns what the last capture keeps, which refers to tracked tensors."""
        self.gradients.captures += 1
        if self.gradients.captures > 1 and self.gradients.captures.bit_count() == 1:
            # at 2, 4, 8, …: it takes milliseconds in a large state
            self._look_for_rebound(ours)
        if self._buffers and (
            self.gradients.captures < _OFTEN or not self.gradients.captures % _OFTEN
        ):
            self._look_at_buffers()
        if self._optimizers:
            self._look_for_owners()
            self._look_at_optimizers()

    def _alone(self, ours: Callable[[], Iterable[object]]) -> list[str]:
        """The paths of the arrays, tensors and modules to which nothing but this tracker refers."""
        objects = self._objects
        named, modules = [*map(id, objects.values())], [*map(id, self._modules)]
        # in two dicts; in ``_modules`` and in a ModelState
        own = Counter[object]([*named, *named, *modules, *set(modules)])
        # by a capture
        most = {
            name: 8 * isinstance(found, torch.Tensor | np.ndarray)
            for name, found in objects.items()
        }
        if all(
            _references(objects, name) > own[id(objects[name])] + most[name] for name in objects
        ):
            return []
        _count_references(ours(), own)
        # Containers come first: their items may be tracked separately, too.
        names = sorted(
            objects, key=lambda name: not isinstance(objects[name], dict | list | tuple | deque)
        )
        return [path for name in names for path in _rebound(join("", name), objects, name, own)]

    def _look_for_rebound(self, ours: Callable[[], Iterable[object]]) -> None:
        """Report what the script cannot change any more, because it has no reference to it."""
        passed = self._passed = self._passed or set()
        for path in self._alone(ours):
            if path not in passed:
                passed.add(path)
                _logger.warning(
                    "%s: nothing but the tracker refers to what was tracked, so all states have it"
                    " unchanged. If the script bound its name to another object, change the object"
                    " in place instead: tensor.copy_(new), array[...] = new or"
                    " module.load_state_dict(new.state_dict()). Or track what holds it,"
                    " as in track(%s=vars(holder))",
                    path,
                    path.split("/")[0],
                )

    def _look_at_buffers(self) -> None:
        stamps = [_stamp(buffers.get(name)) for _, buffers, name in self._buffers]
        changed = [
            self._buffers[i][0]
            for i, stamp in enumerate(stamps)
            if self._stamps is not None and stamp != self._stamps[i]
        ]
        self._stamps = stamps
        if changed:
            self._buffers = []
            _logger.warning(
                "%s: registered with persistent=False, so no state has it, and changed since the"
                " last capture: register it without persistent=False if training depends on it",
                ", ".join(changed[:6]),
            )

    def _look_for_owners(self) -> None:
        """Report parameters that an optimizer trains and that nothing tracked has: at first, and
        when it has got others."""
        for watched in self._optimizers:
            rows = [
                (len(params), id(params[0]) if params else 0)
                for params in map(_PARAMS, watched.optimizer.param_groups)
            ]
            if watched.rows == rows:
                continue
            watched.rows, watched.ends = rows, ()
            if self._held is None:
                continue
            owned = {id(tensor) for module in self._modules for tensor in module.parameters()}
            lost = [
                each
                for each in _parameters(watched.optimizer)
                if id(each) not in owned
                and _memory_of(each) not in self._held
                and not any(_may_have(each, *other) for other in self._others)
            ]
            if lost:
                _logger.warning(
                    "%s trains %s that nothing tracked has, of shape %s: no state has them. Track"
                    " the module that they are in, too",
                    watched.path,
                    "a parameter" if len(lost) == 1 else f"{len(lost)} parameters",
                    ", ".join(str(tuple(each.shape)) for each in lost[:3])
                    + (", …" if len(lost) > 3 else ""),
                )

    def _look_at_optimizers(self) -> None:
        steps = [
            sum(map(self._steps_of, with_inner(watched.optimizer))) for watched in self._optimizers
        ]
        stepped = [
            watched
            for watched, count in zip(self._optimizers, steps, strict=True)
            if watched.steps != count
        ]
        for watched, count in zip(self._optimizers, steps, strict=True):
            if not watched.ends or not all(map(_REQUIRES_GRAD, watched.ends)):
                self._find_ends(watched)
            versions = [*map(_stamp, watched.ends)]
            before = versions if watched.versions is None else watched.versions
            watched.versions, watched.steps = versions, count
            if watched in stepped:
                watched.idle = 0
            elif (
                versions
                and len(versions) == len(before)
                and all(map(operator.ne, versions, before))
            ):
                watched.idle += 1
            if watched.idle == _IDLE and not _is_shared(watched, stepped):
                _logger.warning(
                    "%s takes no step although its parameters change. If another optimizer replaced"
                    " it, no state has that one: track it instead",
                    watched.path,
                )

    def _find_ends(self, watched: _TrackedOptimizer) -> None:
        """Find the first and the last of the parameters that only a step changes: an optimizer
        in its place would change both."""
        trained = [
            each
            for each in _parameters(watched.optimizer)
            if each.requires_grad and id(each) not in self._clipped
        ]
        watched.ends = (trained[0], trained[-1]) if trained else ()
        self.gradients.hook(watched.path, watched.optimizer, watched.ends)

    def __del__(self) -> None:
        self.gradients.unhook()  # a tracker may be dropped without a close


class Gradients:
    """Reports captures in the middle of an accumulation of gradients, which states do not have.

    ``captures`` is their number so far. Hooks on parameters refer to this, so it refers to nothing
    tracked: Python cannot collect a cycle that leads through a hook of a tensor.
    """

    def __init__(self, *, is_over: bool) -> None:
        self.captures, self._is_over = 0, is_over
        self._hooks: list[RemovableHandle] = []
        self._seen: dict[int, _Gradient] = {}
        self._trained: defaultdict[int, dict[int, _Gradient]] = defaultdict(dict)

    def hook(
        self, path: str, optimizer: Optimizer | None, parameters: Iterable[torch.Tensor]
    ) -> None:
        """Look at the gradients of these parameters after each backward pass.

        They represent all parameters of ``path``."""
        for parameter in () if self._is_over else parameters:
            if id(parameter) not in self._seen and not is_lazy(parameter):
                self._seen[id(parameter)] = _Gradient(path, is_stepped_unseen=optimizer is None)
                # Every optimizer has imported Dynamo. This must not import it without an
                # optimizer, because that takes seconds.
                hook = (
                    torch.compiler.disable(self._after_backward, reason="it reads versions")
                    if optimizer is not None
                    else self._after_backward
                )
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            for each in (
                with_inner(optimizer)
                if optimizer is not None and id(parameter) in self._seen
                else ()
            ):
                self._trained[id(each)][id(parameter)] = self._seen[id(parameter)]

    def unhook(self) -> None:
        """Remove the hooks permanently; idempotent."""
        self._is_over = True
        self._trained.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def _after_backward(self, parameter: torch.Tensor) -> None:
        """Compare a gradient with what the pass before it left.

        Runs on the thread of the backward pass."""
        seen, gradient = self._seen[id(parameter)], parameter.grad
        before, seen.last = seen.last, None
        if gradient is not None:
            seen.last = (
                now := (
                    TensorWeakRef(gradient),
                    (gradient._version, parameter._version),
                    self.captures,
                )
            )
            # Each pass adds 1 to the version. Setting the gradient to zero between two passes
            # adds 1 too.
            is_added = (
                before is not None
                and before[0]() is gradient
                and now[1] == (before[1][0] + 1, before[1][1])
            )
            seen.has_captured = is_added and (
                seen.has_captured or (before is not None and before[2] < self.captures)
            )
            if seen.has_captured and seen.is_stepped_unseen:
                self._tell(seen.path)

    def stepped(self, optimizer: object) -> None:
        """Called before a step of a tracked optimizer, or of one inside it: the step uses
        gradients that ``zero_grad`` left."""
        for seen in self._trained.get(id(optimizer), {}).values():
            last, seen.last = seen.last, None
            if seen.has_captured and last is not None and last[0]() is not None:
                self._tell(seen.path)
                break

    def _tell(self, path: str) -> None:
        self.unhook()
        _logger.warning(
            "captured while %s accumulates gradients, which this state does not have. A training"
            " that resumes from it begins the accumulation with the next batch. Capture after"
            " optimizer.step(), or track with gradients=True",
            path,
        )


@dataclass(slots=True, eq=False)
class _TrackedOptimizer:
    """A tracked optimizer, and what the last capture saw of it.

    ``rows`` are the length and the id of the first parameter of each group: they differ once it has
    got other parameters. ``ends`` are the parameters by which a step is seen, and ``versions``
    their stamps. ``steps`` is the number of steps. ``idle`` counts the captures in a row that found
    it without a step while its parameters changed.
    """

    path: str
    optimizer: Optimizer
    rows: list[tuple[int, int]] | None = None
    ends: Sequence[torch.Tensor] = ()
    versions: list[object] | None = None
    steps: int = 0
    idle: int = 0


@dataclass(slots=True)
class _Gradient:
    """What the last backward pass left of one parameter: its gradient, the versions of both, and
    the number of captures by then.

    ``has_captured``: a part of the gradient was there at a capture, and no step has used it yet.
    """

    path: str
    is_stepped_unseen: bool
    last: tuple[TensorWeakRef, tuple[int, int], int] | None = None
    has_captured: bool = False


_ASKED = sys.getrefcount(object())
"""The references to an object that asking for their number makes."""


def _references(holder: Any, key: Any) -> int:
    """How many references there are to ``holder[key]``. No variable of a caller may refer to it."""
    return sys.getrefcount(holder[key]) - _ASKED


def _count_references(ours: Iterable[object], own: Counter[object]) -> None:
    """Add the references from these objects, and from the containers and objects of this package
    inside them. A tensor in them also counts for the array whose memory it has.
    """
    waiting, seen = [*{id(each): each for each in ours}.values()], set[int]()
    while waiting:
        seen.update(map(id, waiting))
        found = gc.get_referents(*waiting)
        own.update(map(id, found))
        kinds = {
            kind
            for kind in set(map(type, found))
            if kind in _CONTAINERS or kind.__module__.startswith("datastates.")
        }
        waiting = [
            each
            for each in {id(each): each for each in found if type(each) in kinds}.values()
            if id(each) not in seen
        ]
        plain = (
            each
            for each in found
            if type(each) is torch.Tensor
            and each.dtype is torch.uint8
            and each.device.type == "cpu"
        )
        own |= Counter({("array", each.data_ptr()): 1 for each in plain})


_CONTAINERS = frozenset({dict, list, tuple, OrderedDict, deque})


def _rebound(path: str, holder: Any, key: Any, own: Counter[object]) -> Iterator[str]:
    """The paths of the arrays, tensors and modules in ``holder[key]`` to which only ``own``
    references lead."""
    memory = own["array", holder[key].ctypes.data] if isinstance(holder[key], np.ndarray) else 0
    if _references(holder, key) > own[id(holder[key])] + memory:
        return
    if isinstance(holder[key], dict | list | tuple | deque):
        inner = holder[key]
        own.update(map(id, inner.values() if isinstance(inner, dict) else inner))
        for each in inner if isinstance(inner, dict) else range(len(inner)):
            yield from _rebound(join(path, each), inner, each, own)
    elif _is_alone(holder[key], own):
        yield path


def _is_alone(found: Any, own: Counter[object]) -> bool:
    """Whether no view, and no part of a module, leads to an object that is itself not referred
    to."""
    if isinstance(found, np.ndarray):
        return found.base is None or sys.getrefcount(found.base) <= _ASKED + 1
    if isinstance(found, nn.Module):
        members = [
            (held, name)
            for part in found.modules()
            for held in _MEMBERS(part)
            for name in held
            if held[name] is not None
        ]
        own.update(id(held[name]) for held, name in members)
        return bool(members) and all(
            _references(held, name) <= own[id(held[name])] for held, name in members
        )
    is_plain = (
        isinstance(found, torch.Tensor)
        and type(found) in (torch.Tensor, nn.Parameter)
        and found.layout is torch.strided
    )
    # the storage of an array's memory cannot be resized
    return is_plain and found._base is None and found.untyped_storage().resizable()


_MEMBERS = operator.attrgetter("_parameters", "_buffers", "_modules")
_PARAMS = operator.itemgetter("params")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def _is_shared(watched: _TrackedOptimizer, stepped: Iterable[_TrackedOptimizer]) -> bool:
    """Whether another tracked optimizer, which has stepped, trains the same parameters."""
    mine = {id(parameter) for parameter in _parameters(watched.optimizer)}
    return any(
        id(parameter) in mine for other in stepped for parameter in _parameters(other.optimizer)
    )


def _shapes_in(tree: object) -> set[tuple[int, ...]]:
    """The shapes of the tensors and arrays in an object's state."""
    return {
        tuple(found.shape)
        for _, found in parts({"": tree})
        if isinstance(found, torch.Tensor | np.ndarray)
    }


def _may_have(parameter: torch.Tensor, found: object, shapes: Collection[tuple[int, ...]]) -> bool:
    """Whether a copy of the parameter may be in the state of an object, which has these shapes
    in it."""
    return tuple(parameter.shape) in shapes or any(
        member is parameter for member in getattr(found, "__dict__", {}).values()
    )


def _keeps_something(found: object) -> bool:
    # a scaler that is switched off has no state
    is_known = isinstance(found, nn.Module | RngState | torch.amp.GradScaler)
    is_asked_later = hasattr(found, "__iter__")  # not in the outlook
    return (
        has_state(found)
        and not is_known
        and not is_asked_later
        and bool(getattr(found, "__dict__", None))
    )


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _memory_of(tensor: torch.Tensor) -> object:
    """A key that is equal for tensors of the same memory. It is the tensor's own id if its memory
    is unknown."""
    extent = None if is_lazy(tensor) else extent_of(tensor)
    return id(tensor) if extent is None else extent[:3]


def _left_out(path: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The buffers that ``state_dict`` leaves out: each one's name, where it is, and its key
    there."""
    for where, part in module.named_modules():
        for name in part._non_persistent_buffers_set:
            yield f"{path}/{where}.{name}" if where else f"{path}/{name}", part._buffers, name


def _metrics(path: str, module: nn.Module) -> Iterator[str]:
    """The metrics, of torchmetrics' kind, whose state is not in their ``state_dict``."""
    for where, part in module.named_modules():
        persistent = part.__dict__.get("_persistent")
        if (
            part.__dict__.get("_defaults")
            and isinstance(persistent, dict)
            and not all(persistent.values())
        ):
            yield f"{path}/{where}" if where else path


def _stamp(tensor: torch.Tensor | None) -> object:
    """A value that differs once the tensor was replaced or changed in place, as far as torch
    counts that."""
    return (
        None
        if tensor is None
        else (id(tensor), None if is_lazy(tensor) or tensor.is_inference() else tensor._version)
    )
