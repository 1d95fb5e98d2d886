"""A module's state as a plain tree under canonical names, and the way back to the names of a live module."""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from datastates.content.layouts import is_storable
from datastates.errors import InvalidInput, Unsupported

from .names import canonical_name, join

__all__ = ["FROZEN", "MODES", "ModelState", "Seen", "check_module_form", "metadata_for"]

FROZEN = "frozen_parameters"
"""The top-level name of the names that a state leaves out, each on a line: ``frozen_parameters/<module>``."""

MODES = "module_modes"
"""The top-level name of the paths of modules in eval mode, as ``ModelState.in_eval`` returns them."""

_PLAIN_METADATA = {"version": 1}


class ModelState:
    """One tracked module. Its names are computed once and kept until the module's keys change.

    As long as every member of every part is the same object, ``tree`` returns the very same tree, without calling ``state_dict``.
    ``whole`` is the tree that was made last.

    ``trained``, unless it is None, are the names of parameters that have required a gradient here or were restored: ``kept`` leaves the
    others out, and ``left_out`` are their names.
    """

    __slots__ = (
        "_flags",
        "_in_eval",
        "_kept",
        "_kept_of",
        "_kinds",
        "_metadata",
        "_parts",
        "_raw",
        "_raw_metadata",
        "_seen",
        "keys",
        "left_out",
        "module",
        "path",
        "trained",
        "whole",
    )

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self._raw: tuple[str, ...] = ()
        self.keys: tuple[str, ...] = ()
        self._raw_metadata: Mapping[str, Any] | None = None
        self._metadata: OrderedDict[str, Any] = OrderedDict()
        self._parts: list[dict[str, Any]] | None = None
        self._kinds: frozenset[type[nn.Module]] = frozenset()
        self._seen: Seen | None = None
        self._flags: list[object] = []
        self._in_eval = ""
        self.whole: OrderedDict[str, object] = OrderedDict()
        self.trained: set[str] | None = None
        self.left_out: set[str] = set()
        self._kept_of: object = None
        self._kept: OrderedDict[str, object] = OrderedDict()

    def tree(self) -> OrderedDict[str, object]:
        """The live tensors (and extra state) by canonical name, in the module's order; do not change it.

        ``_metadata`` leaves out modules of version 1, which almost all are, because it is stored with every state.

        :raises InvalidInput: a lazy module was not yet called.
        """
        if self._parts is not None and self._seen is not None and self._seen.is_still(_look(self._parts)) and self._is_made_by_torch():
            return self.whole
        self._parts = self._seen = None
        self._flags = []
        if _has_plain_state(self.module):
            self._parts = [part.__dict__ for part in self.module.modules()]
            self._kinds = frozenset(map(type, self.module.modules()))
            self._seen = _look(self._parts)
        state: dict[str, object] = self.module.state_dict(keep_vars=True)
        raw = tuple(state)
        if raw != self._raw:
            self._learn(raw, state)
        tree = OrderedDict(zip(self.keys, state.values(), strict=True))
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            if metadata != self._raw_metadata:
                self._raw_metadata, self._metadata = metadata, _compact(self.module, metadata)
            tree._metadata = self._metadata  # type: ignore[attr-defined]  # as nn.Module.state_dict sets it
        self.whole = tree
        return tree

    def in_eval(self) -> str:
        """The paths of the parts in eval mode as of the last ``tree``, each on a line."""
        parts = self._parts or [{"training": part.training} for part in self.module.modules()]
        flags: list[object] = [*map(dict.get, parts, repeat("training"))]  # it takes 10 us for 300 parts
        if flags != self._flags:
            self._flags = flags
            self._in_eval = "\n".join(path for path, part in self.parts() if not part.training)
        return self._in_eval

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Every part of the module by path. A wrapper has the path of what it wraps."""
        for name, part in self.module.named_modules():
            canonical = canonical_name(self.module, name)
            yield join(self.path, canonical) if canonical else self.path, part

    @property
    def references(self) -> tuple[object, ...]:
        """What ``tree`` and ``kept`` keep for the next call, which refers to the members of the module."""
        return self.whole, self._seen, self._kept

    def kept(self) -> OrderedDict[str, object]:
        """The ``tree`` as a state holds it: without parameters that were frozen from the start, if these are left out."""
        tree = self.tree()
        if self.trained is None:
            return tree
        trained = {name for name, leaf in tree.items() if getattr(leaf, "requires_grad", False)}  # isinstance takes ten times as long
        if tree is not self._kept_of or not trained <= self.trained:
            self.trained |= trained
            frozen = {name for name, leaf in tree.items() if isinstance(leaf, nn.Parameter) and name not in self.trained}
            # What a quantized parameter adds to the ``state_dict`` of its module goes with it.
            owners = tuple(name[: name.rfind(".") + 1] for name in frozen if not is_storable(tree[name]))
            known = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
            added = {
                name
                for name, leaf in tree.items()
                if name.startswith(owners) and id(leaf) not in known and not name.endswith("_extra_state")
            }
            self.left_out, self._kept_of = frozen | added, tree
            self._kept = OrderedDict((name, leaf) for name, leaf in tree.items() if name not in self.left_out)
            self._kept._metadata = self._metadata  # type: ignore[attr-defined]  # as nn.Module.state_dict sets it
        return self._kept

    def keep(self, names: Iterable[str]) -> None:
        """From now on, a state holds these parameters even if they are frozen."""
        if self.trained is not None:
            self.trained, self._kept_of = self.trained.union(names), None

    def _is_made_by_torch(self) -> bool:
        """Whether nobody has put a method of their own into a part, or into a class, since the last look."""
        parts = self._parts or ()
        has_own = any(any(map(operator.contains, parts, repeat(name))) for name in _METHODS)
        return not has_own and all(map(_is_plain_kind, self._kinds))

    def raw_names(self) -> dict[str, str]:
        """The module's own name for each canonical one, as of the last ``tree``."""
        return dict(zip(self.keys, self._raw, strict=True))

    def _learn(self, raw: tuple[str, ...], state: Mapping[str, object]) -> None:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and is_lazy(value):
                raise InvalidInput(f"{self.path}/{key} of a lazy module has no shape yet: run the model once on a batch, then go on")
        keys = tuple(canonical_name(self.module, key) for key in raw)
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InvalidInput(f"{self.path} has two entries named {twice!r} once wrappers are left out: track the wrapped module instead")
        self._raw, self.keys = raw, keys


def check_module_form(path: str, module: nn.Module) -> None:
    """Raise unless the module's state has an entry for each parameter.

    :raises Unsupported: it is, or contains, a ``FullyShardedDataParallel``, whose parameters are flat.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(part, kind) for part in module.modules()):
        raise Unsupported(
            f"{path} is a model of FullyShardedDataParallel, which is not supported: shard it with torch.distributed.fsdp.fully_shard"
            " instead"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The objects that containers held, in order, and how many each of them held."""

    objects: list[object]
    counts: list[int]

    def is_still(self, now: Seen) -> bool:
        """Whether ``now`` has the same objects in the same places."""
        return now.counts == self.counts and len(now.objects) == len(self.objects) and all(map(operator.is_, now.objects, self.objects))


def _look(parts: list[dict[str, Any]]) -> Seen:
    """Look at every member of the modules with these ``__dict__``s, by name and object."""
    named = [*chain.from_iterable(map(_NAMED, parts))]
    others = [*chain.from_iterable(map(_OTHERS, parts))]
    full = [*filter(None, named)]
    objects, counts = [*chain.from_iterable(full), *chain.from_iterable(map(dict.values, full))], [*map(len, named)]
    if any(others):
        objects += chain.from_iterable(others)
        counts += map(len, others)
    return Seen(objects, counts)


_NAMED = operator.itemgetter("_parameters", "_buffers", "_modules")
_OTHERS = operator.itemgetter("_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks")  # almost all are empty
_METHODS = ("state_dict", "_save_to_state_dict")


def _has_plain_state(module: nn.Module) -> bool:
    """Whether torch alone makes the module's ``state_dict``, of parameters and buffers only, or of FSDP2's shards of them."""
    return all(
        _is_plain_kind(type(part))
        and not isinstance(part, torch.jit.ScriptModule)  # its members are not in its ``__dict__``
        and not part._state_dict_hooks
        and all(map(_only_shards, part._state_dict_pre_hooks.values()))
        and not any(name in part.__dict__ for name in _METHODS)
        and all(isinstance(members, dict) for members in _NAMED(part.__dict__))
        for part in module.modules()
    )


def _only_shards(hook: object) -> bool:
    """Whether it is the hook with which FSDP2 puts its shards back in place of gathered parameters: always the same objects."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")


def _is_plain_kind(kind: type[nn.Module]) -> bool:
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
    )


def metadata_for(module: nn.Module, metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state's ``_metadata`` under the names of a live module, with what ``ModelState.tree`` left out."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    return OrderedDict((name, dict(metadata.get(canonical_name(module, name), _PLAIN_METADATA))) for name in names)


def _compact(module: nn.Module, metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    # A wrapper and what it wraps share a name: the wrapped one comes later and stays.
    named = OrderedDict((canonical_name(module, name), value) for name, value in metadata.items())
    return OrderedDict((name, value) for name, value in named.items() if value != _PLAIN_METADATA)
