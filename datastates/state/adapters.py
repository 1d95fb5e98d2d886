"""The objects that the user tracks, as one plain tree of live tensors.

Modules, optimizers, anything with a ``state_dict``, and containers can be tracked. The file also
finds which objects are values, and compares trained parameters and modes with a state.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from datastates.errors import InvalidInput

from .encoding import MAX_DEPTH, encoder_of
from .generators import RngState, is_generator, state_of
from .geometry import local_of, plain_tensors
from .loaders import is_prepared, is_stateful, loses_shuffle_buffer, state_of_loader
from .model import FROZEN, Members, ModelState, check_module_form
from .optimizer import (
    INNER,
    OptimizerState,
    check_optimizer_form,
    left_out,
    options_of,
    state_of_scaler,
    with_inner,
)
from .per_rank import OWN_BUFFERS, OwnBuffers, is_own
from .report import RestoreReport, own
from .tree import (
    MOST_OBJECTS,
    PerRank,
    canonical_name,
    expanded,
    join,
    parameter_names,
    split_wrappers,
)

GRADIENTS = "gradients"
"""The top-level name of gradients: ``gradients/<module>/<parameter>``."""

IN_BACKWARD = "in_backward"
"""The top-level name of optimizers that step during backward:
``in_backward/<module>/<parameter>/<index>``."""

FILES = "captured_files"
"""The top-level name of the files that were captured with a state: ``captured_files/<name>``, as
bytes."""

_LEAVES = frozenset({torch.Tensor, nn.Parameter, int, float, str, bool, bytes, type(None)})
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.CoroutineType,
    type,
)
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis)),
    *(frozenset, range, slice, np.generic, np.dtype, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme),
)


class Adapted:
    """The tracked objects. All methods belong to the training thread.

    Optimizers that torch runs inside backward are found on the parameters and tracked with their
    module.

    :raises InvalidInput: an object cannot be tracked. The text names it and what can be tracked.
    :raises Unsupported: a module or an optimizer keeps its state in a form that is not stored.
    """

    def __init__(
        self, objects: Mapping[str, object], *, gradients: bool = False, frozen: bool = True
    ) -> None:
        for path, found in parts(objects):
            _check_trackable(path, found)
        if gradients and GRADIENTS in objects:
            raise InvalidInput(
                f"the name {GRADIENTS!r} is taken by the gradients: rename that object"
            )
        self.objects = _with_hidden_optimizers(objects)
        self.has_gradients, self.has_frozen = gradients, frozen
        self._models: dict[int, ModelState] = {}
        self._optimizer_states: dict[int, OptimizerState] = {}
        self.lasting: list[object] = []
        self.own_buffers: OwnBuffers | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """Every tracked module, and the modules inside wrappers."""
        return [
            part
            for _, found in parts(self.objects)
            if isinstance(found, nn.Module)
            for part in split_wrappers(found)
        ]

    @property
    def optimizers(self) -> list[Optimizer]:
        return [found for _, found in parts(self.objects) if isinstance(found, Optimizer)]

    @property
    def optimizers_with_inner(self) -> list[Optimizer]:
        """Every tracked optimizer, each followed by the optimizers that it uses."""
        return [each for tracked in self.optimizers for each in with_inner(tracked)]

    def tree(self, *, is_shared: bool = False, is_waiting: bool = True) -> dict[str, object]:
        """Nested plain containers of everything tracked. The tensors are the live ones, not copies.

        ``is_waiting=False`` waits for no device: a number that an object would have to fetch from
        one is a ``Number`` instead.

        Random number generators are read last, because reading the state of a loader may draw from
        them. ``lasting`` then lists the parts of the tree that are the very same objects as long as
        they hold the same tensors under the same names. These parts need no second walk. With
        ``is_shared``, several ranks capture this state, and each rank's own parts are ``PerRank``.
        """
        walk = _Walk(self, is_shared=is_shared, is_waiting=is_waiting)
        tree = {name: walk.tree_of(join("", name), child) for name, child in self.objects.items()}
        self.lasting = [model for _, model in walk.trees]
        if walk.optimizers:
            self._add_optimizers(walk)
        if (
            is_shared
            and self.own_buffers is not None
            and (kept := self.own_buffers.tree(walk.trees))
        ):
            tree[OWN_BUFFERS] = kept
            self.lasting.append(kept)
        if self.has_gradients:
            tree[GRADIENTS] = {
                path: {
                    name: leaf.grad
                    for name, leaf in model.items()
                    if isinstance(leaf, nn.Parameter) and leaf.grad is not None
                }
                for path, model in walk.trees
            }
        if left := {
            path: "\n".join(sorted(model.left_out))
            for path, model in self.models()
            if model.left_out
        }:
            tree[FROZEN] = left
        for out, generator in walk.generators:
            out.update(
                generator.state_dict() if isinstance(generator, RngState) else state_of(generator)
            )
        return tree

    def outlook(self, *, is_shared: bool = False) -> dict[str, object]:
        """The tree as far as it can be inspected before the training begins. It shows what no state
        can hold.

        Objects that can be iterated over are not read: a loader that gives its position makes its
        iterator, and draws from the generators. ``is_shared`` as for ``tree``.
        """
        walk = _Walk(self, is_outlook=True, is_shared=is_shared)
        tree = {name: walk.tree_of(join("", name), child) for name, child in self.objects.items()}
        if walk.optimizers:
            self._add_optimizers(walk)
        return tree

    def _add_optimizers(self, walk: _Walk) -> None:
        trees, labels = (
            Members([tree for _, tree in walk.trees], []),
            (
                [path for path, _ in walk.trees],
                self._loose(),
            ),
        )
        for out, optimizer in walk.optimizers:
            found = self._add_optimizer(out, optimizer, trees, labels)
            for name, inner in self.left_out_of(found).items():
                self._add_optimizer(
                    out.setdefault(INNER, {}).setdefault(name, {}), inner, trees, labels
                )

    def _add_optimizer(
        self, out: dict[str, Any], optimizer: Optimizer, trees: Members, labels: object
    ) -> Optimizer:
        """Fill in the tree of an optimizer; returns the bare one."""
        state = self._optimizer_states.get(id(optimizer))
        if state is None:
            state = self._optimizer_states[id(optimizer)] = OptimizerState(optimizer)
        out.update(state.tree(partial(self._names_in, optimizer), trees, labels))
        self.lasting += state.lasting
        return state.optimizer

    def left_out_of(self, optimizer: Optimizer) -> dict[str, Optimizer]:
        """The optimizers that a bare one uses, whose state neither it nor anything else tracked
        has, by attribute."""
        tracked = self.optimizers if (found := left_out(optimizer)) else ()
        return {
            name: inner
            for name, inner in found.items()
            if all(each.state is not inner.state for each in tracked)
        }

    def _names_in(self, optimizer: Optimizer) -> list[list[str]]:
        owners = [(path, _by_id(model.whole)) for path, model in self.models()]
        return parameter_names(owners, self._loose, optimizer.param_groups)

    def model_state(self, path: str, module: nn.Module) -> ModelState:
        """The object that keeps the names of a tracked module."""
        model = self._models.get(id(module))
        if model is None:
            model = self._models[id(module)] = ModelState(path, module)
            model.trained = None if self.has_frozen else set()
        return model

    def models(self) -> list[tuple[str, ModelState]]:
        return [
            (path, self.model_state(path, found))
            for path, found in parts(self.objects)
            if isinstance(found, nn.Module)
        ]

    def names_of(self, optimizer: Optimizer) -> list[list[str]]:
        """The name of each parameter of each group, in the form of ``tree``."""
        owners = [(path, _by_id(model.tree())) for path, model in self.models()]
        return parameter_names(owners, self._loose, optimizer.param_groups)

    def fenced(self) -> list[torch.Tensor]:
        """The live tensors that only a tracked optimizer changes: its parameters and the tensors
        of its state."""
        found: dict[int, torch.Tensor] = {}
        for optimizer in self.optimizers_with_inner:
            for group in optimizer.param_groups:
                found.update((id(parameter), parameter) for parameter in group["params"])
            for _, value in parts({"": list(optimizer.state.values())}):
                if isinstance(value, torch.Tensor):
                    found[id(value)] = value
        return [plain for tensor in found.values() for plain in plain_tensors(tensor)]

    def size_bytes(self) -> int:
        """The approximate size of a state without asking objects for it: ``tensors_here``."""
        return sum(tensor.nbytes for tensor in self.tensors_here())

    def tensors_here(self) -> list[torch.Tensor]:
        """The tensors of modules and optimizers on this rank, each once."""
        left = {id(model.whole[name]) for model in self._models.values() for name in model.left_out}
        held = [
            each
            for module in self.modules
            for each in (*module.parameters(), *module.buffers())
            if id(each) not in left
        ]
        plain = (each for tensor in held for each in plain_tensors(tensor))
        here = {
            id(tensor): local
            for tensor in (*plain, *self.fenced())
            if (local := local_of(tensor)) is not None
        }
        # sparse ones have no count of bytes
        return [local for local in here.values() if local.layout is torch.strided]

    def frozen(self) -> list[torch.Tensor]:
        """The parameters that require no gradient, and what optimizers keep of them: they stay
        the same from state to state."""
        found: list[torch.Tensor] = []
        found += (
            parameter
            for module in self.modules
            for parameter in module.parameters()
            if not parameter.requires_grad
        )
        for optimizer in self.optimizers_with_inner:
            for parameter, kept in optimizer.state.items():
                if not parameter.requires_grad and isinstance(kept, dict):
                    found += (value for value in kept.values() if isinstance(value, torch.Tensor))
        return [plain for tensor in found for plain in plain_tensors(tensor)]

    def buffers(self) -> list[torch.Tensor]:
        """The tensors of modules that are not parameters: each replica may change its own, as
        batch norm does."""
        return [
            plain
            for module in self.modules
            for buffer in module.buffers()
            for plain in plain_tensors(buffer)
        ]

    def _loose(self) -> dict[int, str]:
        return {
            id(found): path
            for path, found in parts(self.objects)
            if isinstance(found, torch.Tensor)
        }


class _Walk:
    """One walk over the objects.

    Parts that need names, or must come last, are empty dicts until the walk is over."""

    def __init__(
        self,
        adapted: Adapted,
        *,
        is_outlook: bool = False,
        is_shared: bool = False,
        is_waiting: bool = True,
    ) -> None:
        self._adapted, self._is_outlook, self._is_shared, self._is_waiting = (
            adapted,
            is_outlook,
            is_shared,
            is_waiting,
        )
        self.trees: list[tuple[str, OrderedDict[str, object]]] = []
        self.optimizers: list[tuple[dict[str, Any], Optimizer]] = []
        self.generators: list[tuple[dict[str, object], object]] = []

    def tree_of(self, path: str, found: Any) -> object:
        if self._is_shared and is_own(found):
            return PerRank(self._tree_of(path, found))
        return self._tree_of(path, found)

    def _tree_of(self, path: str, found: Any) -> object:
        kind = type(found)
        if kind in _LEAVES:
            return found
        if self._is_outlook and not _is_ready(found):
            return None
        if isinstance(found, nn.Module):
            tree = self._adapted.model_state(path, found).kept()
            self.trees.append((path, tree))
            return tree
        if isinstance(found, Optimizer):
            return _later(self.optimizers, found)
        if isinstance(found, RngState):
            return _later(self.generators, found)
        if has_state(found):
            if not self._is_waiting and (state := state_of_scaler(found)) is not None:
                return state
            return (
                _peek(found)
                if self._is_outlook
                else state_of_loader(found)
                if is_prepared(found)
                else found.state_dict()
            )
        if kind is list or kind is tuple or kind is deque:
            items = [
                child if type(child) in _LEAVES else self.tree_of(join(path, i), child)
                for i, child in enumerate(found)
            ]
            return (
                items
                if kind is list
                else tuple(items)
                if kind is tuple
                else deque(items, found.maxlen)
            )
        if kind is dict or kind is OrderedDict or kind is defaultdict:
            plain = {
                key: child if type(child) in _LEAVES else self.tree_of(join(path, key), child)
                for key, child in found.items()
            }
            if isinstance(found, defaultdict):
                return defaultdict(found.default_factory, plain)
            return OrderedDict(plain) if kind is OrderedDict else plain
        return _later(self.generators, found) if is_generator(found) else found


def _is_ready(found: object) -> bool:
    """Whether the object's state can be read before the first step without changing the object."""
    if isinstance(found, nn.Module):
        return not any(
            is_lazy(tensor) or tensor.is_meta for tensor in (*found.parameters(), *found.buffers())
        )
    return not has_state(found) or not isinstance(found, Iterable)


def _peek(found: Any) -> object:
    try:
        return found.state_dict()
    except Exception:  # it may be ready by the first capture, which raises otherwise
        return None


def has_state(found: object) -> bool:
    """Whether ``found`` can save and load a state."""
    if is_prepared(found):
        return is_stateful(found)
    has_both = callable(getattr(found, "state_dict", None)) and callable(
        getattr(found, "load_state_dict", None)
    )
    return has_both and not isinstance(found, type)


def holds_state(found: object) -> bool:
    """Whether ``found`` holds something that no other value can replace: it is restored in
    place, or not at all."""
    if isinstance(found, dict):
        return any(map(holds_state, found.values()))
    if isinstance(found, list | tuple | deque):
        return any(map(holds_state, found))
    return has_state(found) or is_generator(found)


def parts(
    objects: Mapping[Any, object], path: str = "", _above: tuple[object, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Everything tracked that is not a container, with its path.

    :raises InvalidInput: a container holds itself, or containers are used so often that there are
        too many parts.
    """
    for key, found in objects.items():
        here = join(path, key)
        if not _above and expanded(found, lambda _: 1, {}) > MOST_OBJECTS:
            raise InvalidInput(
                f"{here.removeprefix('%') or 'the object'} has more than {MOST_OBJECTS} parts,"
                " counted as often as they are used: keep numbers in arrays, and use a container"
                " that holds others only once"
            )
        if not isinstance(found, dict | list | tuple | deque):
            yield here, found
            continue
        if len(_above) > MAX_DEPTH or any(found is each for each in _above):
            raise InvalidInput(
                f"{here[:80]} is a {type(found).__name__} that holds itself, or is nested too deep:"
                " break the cycle"
            )
        yield from parts(
            found if isinstance(found, dict) else dict(enumerate(found)), here, (*_above, found)
        )


def _check_trackable(path: str, found: object) -> None:
    if isinstance(found, nn.Module):
        check_module_form(path, found)
    if isinstance(found, Optimizer):
        check_optimizer_form(path, found)
    kind = type(found).__name__
    if has_state(found) and loses_shuffle_buffer(found):
        raise InvalidInput(
            f"{path} is a {kind} over a shuffle buffer, whose samples its state leaves out."
            " A resumed training would get other samples: leave it out and loop over"
            " run.steps(loader), which reads the stream again up to its place"
        )
    if has_state(found):
        return
    if isinstance(found, DataLoader):
        raise InvalidInput(
            f"{path} is a DataLoader, which does not know its position: leave it out and loop over"
            " run.steps(loader), which finds the place again. In a loop without run.steps, track"
            " torchdata's StatefulDataLoader instead"
        )
    if isinstance(found, _CODE):
        raise InvalidInput(
            f"{path} is {getattr(found, '__qualname__', kind)!r}, a {kind}, which has no state:"
            " leave it out"
        )
    if isinstance(found, Iterator):
        raise InvalidInput(
            f"{path} is a {kind}, whose position cannot be read: track what it iterates over"
        )
    if callable(getattr(found, "state_dict", None)):
        raise InvalidInput(
            f"{path} is a {kind} with state_dict and without load_state_dict: add that, or track"
            " its state_dict()"
        )


def _with_hidden_optimizers(objects: Mapping[str, object]) -> dict[str, object]:
    """The objects, and the optimizers that step in backward and are not tracked."""
    tracked = {id(found) for _, found in parts(objects) if isinstance(found, Optimizer)}
    hidden: dict[str, dict[str, list[Optimizer]]] = {}
    for path, module in parts(objects):
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            optimizers = [
                item
                for item in getattr(parameter, "_in_backward_optimizers", ())
                if id(item) not in tracked
            ]
            if optimizers:
                tracked.update(map(id, optimizers))
                hidden.setdefault(path, {})[canonical_name(module, name)] = optimizers
    if hidden and IN_BACKWARD in objects:
        raise InvalidInput(
            f"the name {IN_BACKWARD!r} is taken by the optimizers that step in backward: rename"
            " that object"
        )
    return {**objects, **({IN_BACKWARD: hidden} if hidden else {})}


def _later(waiting: list[tuple[dict[str, object], Any]], found: object) -> dict[str, object]:
    out: dict[str, object] = {}
    waiting.append((out, found))
    return out


def _by_id(tree: OrderedDict[str, object]) -> dict[int, str]:
    # Backwards, so that a tied parameter has the first of its names.
    return {id(tree[name]): name for name in reversed(tree)}


# --- Values among tracked objects: a restore returns new ones ---


def is_value(found: object) -> bool:
    """Whether only another object can replace ``found`` in a restore.

    That is so for plain values, for tuples that hold one, and for objects of a registered encoder
    whose type hashes by value, which means that they never change.
    """
    if isinstance(found, tuple) and not isinstance(found, torch.Size):
        return not found or any(map(is_value, found))
    kind = type(found)
    is_hashed_by_value = getattr(kind, "__hash__", None) not in (None, object.__hash__)
    return isinstance(found, _VALUES) or (encoder_of(kind) is not None and is_hashed_by_value)


def is_replaced(found: object) -> bool:
    """Whether a restore returns a new object to its caller, instead of changing ``found``. This
    holds for values and for objects that an encoder makes."""
    return is_value(found) or (encoder_of(type(found)) is not None and not holds_state(found))


def given_objects(
    more: Mapping[str, object], objects: Mapping[str, object] | None, call: Callable[..., object]
) -> dict[str, object]:
    """The objects that a user passes to ``call`` by keyword, and in ``objects=``.

    :raises InvalidInput: an object is given twice, or the name of a plain value resembles an option
        of ``call``.
    """
    objects = objects or {}
    if twice := sorted(more.keys() & objects.keys()):
        raise InvalidInput(
            f"{', '.join(twice)}: given by keyword and in objects=. Pass each of them once"
        )
    values = [name for name, found in more.items() if is_value(found)]
    options = signature(call).parameters if values else {}
    for name in values:
        close = get_close_matches(name, options, n=1, cutoff=0.82) or [
            each for each in options if sorted(each) == sorted(name)
        ]
        if close:
            raise InvalidInput(
                f"{name} is no option and would be taken for an object: did you mean {close[0]}? If"
                " not, rename it"
            )
    return {**more, **objects}


def split_values(objects: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The tracked objects that are values, and all other tracked objects.

    :raises InvalidInput: an object would be captured but never restored. The text explains how it
        can be tracked.
    """
    values = {name: found for name, found in objects.items() if is_value(found)}
    for name, found in values.items():
        if holds_state(found):
            raise InvalidInput(
                f"{name} is a tuple of plain values and of objects with a state: no restore could"
                " change the values in it, track a list or a dict"
            )
    others = {name: found for name, found in objects.items() if name not in values}
    for name, found in others.items():
        if is_replaced(found):
            kind = type(found).__name__
            raise InvalidInput(
                f"{name} is a {kind}, of which its encoder makes a new one: no restore could put it"
                f" back into yours. Give {kind} a state_dict and a load_state_dict, or track it in"
                " a list or a dict and read it from there"
            )
    return values, others


# --- Trained parameters and modes: differences from a state, and making them alike ---


def with_trained(
    report: RestoreReport, adapted: Adapted, stored: Mapping[str, bool], modes: str | None = None
) -> RestoreReport:
    """The report with ``frozen`` and ``unfrozen``, ``in_eval`` and ``in_train``.

    ``stored`` has for each tensor of the state, by path, whether it required a gradient. ``modes``
    come from the state. They are missing if all modules were in training mode.

    A state in which nothing required a gradient comes from a file, not from a training. It has no
    information about this.
    """
    restored = set(report.restored)
    models = [model for _, model in adapted.models()]
    if (
        "\n".join(filter(None, [model.in_eval() for model in models])) == (modes or "")
        and restored.issuperset(chain.from_iterable(model.paths for model in models))
        and all(map(_trains_as(stored), models))
    ):
        return report
    here = {
        path: parameter
        for path, parameter, _ in _parameters(adapted)
        if path in restored and path in stored
    }
    if any(stored[path] for path in here):
        frozen = tuple(
            path for path, parameter in here.items() if parameter.requires_grad and not stored[path]
        )
        unfrozen = tuple(
            path for path, parameter in here.items() if not parameter.requires_grad and stored[path]
        )
        report = replace(report, frozen=frozen, unfrozen=unfrozen)
    elif modes is None:
        return report
    was_eval = {*(modes or "").split("\n")}
    tops, others = (
        {path.rpartition("/")[0] for path in paths} for paths in (restored, report.skipped)
    )
    now = {
        each: part.training
        for path, model in adapted.models()
        if path in tops - others
        for each, part in model.parts()
    }
    in_eval = tuple(path for path, is_training in now.items() if is_training and path in was_eval)
    return replace(
        report,
        in_eval=in_eval,
        in_train=tuple(path for path in now if not now[path] and path not in was_eval),
    )


def _trains_as(stored: Mapping[str, bool]) -> Callable[[ModelState], bool]:
    """Whether each tensor of a model requires a gradient exactly if the stored one did."""

    def trains(model: ModelState) -> bool:
        here = [getattr(each, "requires_grad", None) for each in model.whole.values()]
        return here == [*map(stored.get, model.paths)]

    return trains


def put_back(report: RestoreReport, adapted: Adapted) -> list[str]:
    """Freeze and unfreeze live parameters, and set the modes of modules, as the state had them;
    returns the parameters that have to stay as they are.

    ``DistributedDataParallel`` chose the parameters whose gradients it exchanges when it was made.
    """
    was = dict.fromkeys((*report.frozen, *report.in_eval), False) | dict.fromkeys(
        (*report.unfrozen, *report.in_train), True
    )
    left = []
    for path, parameter, is_exchanged in _parameters(adapted):
        if path in was and is_exchanged:
            left.append(path)
        elif path in was:
            parameter.requires_grad_(was[path])
    for _, model in adapted.models():
        for path, part in model.parts():
            if path in was:
                part.training = was[path]
    return left


def divided(
    report: RestoreReport, adapted: Adapted, is_first: Callable[[object], bool], *, is_running: bool
) -> tuple[RestoreReport, RestoreReport]:
    """The report split in two by ``is_first``, which gets a differing parameter or module.

    Models whose mode only an evaluation changed are among the first. The state was captured during
    one if a model that is trained was in eval mode. If the script ``is_running`` and a model is in
    eval mode now, an evaluation is running.
    """
    found = (
        *((path, parameter) for path, parameter, _ in _parameters(adapted)),
        *(each for _, model in adapted.models() for each in model.parts()),
    )
    evaluated = [
        model
        for path, model in adapted.models()
        if (
            path in report.in_eval
            and any(parameter.requires_grad for parameter in model.module.parameters())
        )
        or (path in report.in_train and is_running)
    ]
    first = {path for path, each in found if is_first(each)}.union(
        path for model in evaluated for path, _ in model.parts()
    )

    def only(is_chosen: Callable[[str], bool]) -> RestoreReport:
        paths = (report.frozen, report.unfrozen, report.in_eval, report.in_train)
        frozen, unfrozen, in_eval, in_train = (tuple(filter(is_chosen, each)) for each in paths)
        return replace(report, frozen=frozen, unfrozen=unfrozen, in_eval=in_eval, in_train=in_train)

    return only(first.__contains__), only(lambda path: path not in first)


def add_groups(optimizer: Optimizer, stored: object, adapted: Adapted) -> int:
    """Give an optimizer the last of the ``stored`` parameter groups, as many as it lacks, of live
    parameters; returns how many.

    None is added unless each of their parameters is in a tracked module, and in no group yet.
    The restore checks whether they are right.
    """
    groups = optimizer.param_groups
    if not isinstance(stored, list) or len(stored) <= len(groups):
        return 0
    count = len(groups)
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    for named in _namings(adapted):
        present, new = (
            [[named.get(name) for name in group["params"]] for group in some]
            for some in (stored[:count], stored[count:])
        )
        if any(
            parameter is not None and id(parameter) not in taken
            for row in present
            for parameter in row
        ):
            continue  # of another model with the same parameter names
        if all(
            parameter is not None and id(parameter) not in taken for row in new for parameter in row
        ):
            break
    else:
        return 0
    for group, row in zip(stored[count:], new, strict=True):
        optimizer.add_param_group({**own(options_of(group)), "params": row})
    return len(new)


def _namings(adapted: Adapted) -> Iterator[dict[object, nn.Parameter]]:
    """The ways in which an optimizer's tree may name parameters: as one model does, or with the
    paths of several before their names."""
    models: list[tuple[str, dict[object, nn.Parameter]]] = [
        (
            path,
            {
                name: tensor
                for name, tensor in model.tree().items()
                if isinstance(tensor, nn.Parameter)
            },
        )
        for path, model in adapted.models()
    ]
    yield from (named for _, named in models)
    yield {
        f"{path.replace('/', '.')}.{name}": tensor
        for path, named in models
        for name, tensor in named.items()
    }


def _parameters(adapted: Adapted) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """The parameters of every tracked module by path, and whether their gradients are exchanged
    among replicas."""
    replicated = getattr(
        sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ()
    )
    for path, model in adapted.models():
        is_exchanged = any(isinstance(part, replicated) for part in split_wrappers(model.module))
        for name, tensor in model.tree().items():
            if isinstance(tensor, nn.Parameter) and tensor.is_leaf:
                yield join(path, name), tensor, is_exchanged
