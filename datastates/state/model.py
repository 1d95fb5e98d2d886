"""A module's state as a plain tree under canonical names, and restoring it into a live module."""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from datastates.errors import Corrupt, InvalidInput, Unsupported

from .geometry import are_alike, is_spread, is_storable, is_wrapping, local_of, plain_tensors
from .per_rank import cut_for, is_laid_out_as
from .report import Findings, Mismatch, describe, own, write_tensor
from .tree import canonical_name, join

FROZEN = "frozen_parameters"
"""The top-level name of the names that a state leaves out, each on a line:
``frozen_parameters/<module>``."""

MODES = "module_modes"
"""The top-level name of the paths of modules in eval mode, as ``ModelState.in_eval`` returns
them."""

_PLAIN_METADATA = {"version": 1}
_EXTRA = "_extra_state"


class ModelState:
    """One tracked module. Its names are computed once and kept until the module's keys change.

    As long as every member of every part is the same object, ``tree`` returns the very same tree,
    without calling ``state_dict``. ``whole`` is the tree that was made last.

    ``trained``, unless it is None, are the names of parameters that have required a gradient here
    or were restored. ``kept`` has only these parameters, and ``left_out`` are the names of the
    missing ones.
    """

    __slots__ = (
        "_flags",
        "_in_eval",
        "_is_plain",
        "_kept",
        "_kept_of",
        "_kinds",
        "_load_hooks",
        "_metadata",
        "_parts",
        "_paths",
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
        self._seen: Members | None = None
        self._flags: list[object] = []
        self._in_eval = ""
        self._load_hooks: list[dict[Any, Any]] | None = None
        self._is_plain = False
        self._paths: list[str] | None = None
        self.whole: OrderedDict[str, object] = OrderedDict()
        self.trained: set[str] | None = None
        self.left_out: set[str] = set()
        self._kept_of: object = None
        self._kept: OrderedDict[str, object] = OrderedDict()

    def tree(self) -> OrderedDict[str, object]:
        """The live tensors (and extra state) by canonical name, in the module's order. Do not
        change it.

        ``_metadata`` leaves out modules of version 1, which almost all are, because it is stored
        with every state.

        :raises InvalidInput: a lazy module was not yet called.
        """
        if (
            self._parts is not None
            and self._seen is not None
            and self._seen.is_same_as(_look(self._parts))
            and self._is_made_by_torch()
        ):
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
            # as nn.Module.state_dict sets it
            tree._metadata = self._metadata  # type: ignore[attr-defined]
        self.whole = tree
        return tree

    def in_eval(self) -> str:
        """The paths of the parts in eval mode as of the last ``tree``, each on a line."""
        parts = self._parts or [{"training": part.training} for part in self.module.modules()]
        # it takes 10 us for 300 parts
        flags: list[object] = [*map(dict.get, parts, repeat("training"))]
        if flags != self._flags:
            self._flags = flags
            self._in_eval = "\n".join(path for path, part in self.parts() if not part.training)
        return self._in_eval

    def holds(self, stored: Mapping[str, object]) -> bool:
        """Whether the module has these very objects, and would load them by copying each onto
        itself: there is nothing to do then."""
        live = self.tree()
        if not (
            self._parts is not None
            and tuple(stored) == self.keys
            and all(map(operator.is_, stored.values(), live.values()))
            and not any(map(dict.__contains__, self._parts, repeat("load_state_dict")))
        ):
            return False
        hooks = [*map(dict, filter(None, chain.from_iterable(map(_LOAD_HOOKS, self._parts))))]
        if hooks != self._load_hooks:
            self._load_hooks = hooks
            self._is_plain = all(
                loads_plainly(part) and not part._load_state_dict_post_hooks
                for part in self.module.modules()
            )
        return self._is_plain

    @property
    def paths(self) -> list[str]:
        """The path of each entry of ``tree``."""
        if self._paths is None or len(self._paths) != len(self.keys):
            self._paths = [join(self.path, key) for key in self.keys]
        return self._paths

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Every part of the module by path. A wrapper has the path of what it wraps."""
        for name, part in self.module.named_modules():
            canonical = canonical_name(self.module, name)
            yield join(self.path, canonical) if canonical else self.path, part

    @property
    def references(self) -> tuple[object, ...]:
        """What ``tree`` and ``kept`` keep for the next call, which refers to the members of the
        module."""
        return self.whole, self._seen, self._kept

    def kept(self) -> OrderedDict[str, object]:
        """The ``tree`` as a state holds it: without parameters that were frozen from the start,
        if these are left out."""
        tree = self.tree()
        if self.trained is None:
            return tree
        # isinstance takes ten times as long
        trained = {name for name, leaf in tree.items() if getattr(leaf, "requires_grad", False)}
        if tree is not self._kept_of or not trained <= self.trained:
            self.trained |= trained
            frozen = {
                name
                for name, leaf in tree.items()
                if isinstance(leaf, nn.Parameter) and name not in self.trained
            }
            # What a quantized parameter adds to the ``state_dict`` of its module goes with it.
            owners = tuple(
                name[: name.rfind(".") + 1] for name in frozen if not is_storable(tree[name])
            )
            known = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
            added = {
                name
                for name, leaf in tree.items()
                if name.startswith(owners)
                and id(leaf) not in known
                and not name.endswith("_extra_state")
            }
            self.left_out, self._kept_of = frozen | added, tree
            self._kept = OrderedDict(
                (name, leaf) for name, leaf in tree.items() if name not in self.left_out
            )
            # as nn.Module.state_dict sets it
            self._kept._metadata = self._metadata  # type: ignore[attr-defined]
        return self._kept

    def keep(self, names: Iterable[str]) -> None:
        """From now on, a state holds these parameters even if they are frozen."""
        if self.trained is not None:
            self.trained, self._kept_of = self.trained.union(names), None

    def _is_made_by_torch(self) -> bool:
        """Whether no method was replaced in a part, or in a class, since the last call."""
        parts = self._parts or ()
        has_own = any(any(map(operator.contains, parts, repeat(name))) for name in _METHODS)
        return not has_own and all(map(_is_plain_kind, self._kinds))

    def raw_names(self) -> dict[str, str]:
        """The module's own name for each canonical one, as of the last ``tree``."""
        return dict(zip(self.keys, self._raw, strict=True))

    def _learn(self, raw: tuple[str, ...], state: Mapping[str, object]) -> None:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and is_lazy(value):
                raise InvalidInput(
                    f"{self.path}/{key} of a lazy module has no shape yet: run the model once on a"
                    " batch first"
                )
        keys = tuple(canonical_name(self.module, key) for key in raw)
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InvalidInput(
                f"{self.path} has two entries named {twice!r} once wrappers are left out: track the"
                " wrapped module instead"
            )
        self._raw, self.keys = raw, keys


def check_module_form(path: str, module: nn.Module) -> None:
    """Raise unless the module's state has an entry for each parameter.

    :raises Unsupported: it is, or contains, a ``FullyShardedDataParallel``, whose parameters are
        flat.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(part, kind) for part in module.modules()):
        raise Unsupported(
            f"{path} is a model of FullyShardedDataParallel, which is not supported: shard it with"
            " torch.distributed.fsdp.fully_shard instead"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The objects that containers held, in order, and how many each of them held."""

    objects: list[object]
    counts: list[int]

    def is_same_as(self, now: Members) -> bool:
        """Whether ``now`` has the same objects in the same places."""
        return (
            now.counts == self.counts
            and len(now.objects) == len(self.objects)
            and all(map(operator.is_, now.objects, self.objects))
        )


def _look(parts: list[dict[str, Any]]) -> Members:
    """Look at every member of the modules with these ``__dict__``s, by name and object."""
    named = [*chain.from_iterable(map(_NAMED, parts))]
    others = [*chain.from_iterable(map(_OTHERS, parts))]
    full = [*filter(None, named)]
    objects, counts = (
        [*chain.from_iterable(full), *chain.from_iterable(map(dict.values, full))],
        [*map(len, named)],
    )
    if any(others):
        objects += chain.from_iterable(others)
        counts += map(len, others)
    return Members(objects, counts)


_NAMED = operator.itemgetter("_parameters", "_buffers", "_modules")
# almost all are empty
_OTHERS = operator.itemgetter(
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"
)
_LOAD_HOOKS = operator.itemgetter("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_METHODS = ("state_dict", "_save_to_state_dict")


def _has_plain_state(module: nn.Module) -> bool:
    """Whether torch alone makes the module's ``state_dict``, of parameters and buffers only, or
    of FSDP2's shards of them."""
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
    """Whether it is the hook with which FSDP2 puts its shards back in place of gathered
    parameters: always the same objects."""
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")


def _is_plain_kind(kind: type[nn.Module]) -> bool:
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
    )


def metadata_for(module: nn.Module, metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A state's ``_metadata`` under the names of a live module, with what ``ModelState.tree``
    left out."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    return OrderedDict(
        (name, dict(metadata.get(canonical_name(module, name), _PLAIN_METADATA))) for name in names
    )


def _compact(module: nn.Module, metadata: Mapping[str, Any]) -> OrderedDict[str, Any]:
    # A wrapper and what it wraps share a name: the wrapped one comes later and stays.
    named = OrderedDict((canonical_name(module, name), value) for name, value in metadata.items())
    return OrderedDict((name, value) for name, value in named.items() if value != _PLAIN_METADATA)


# --- Parts of a model with their own loading, such as observers and quantized layers ---


class OwnLoading:
    """The outermost parts of a module that load in their own way, by canonical name.

    Such a part may accept entries of other shapes or entries that are not tensors. To find out, the
    entries are loaded into a copy of the part. The part may also keep the given tensors, instead of
    copying them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: dict[str, nn.Module] = {}
        for name, part in module.named_modules():
            known = canonical_name(module, name)
            if not loads_plainly(part) and self.part_of(known) is None:
                self._parts[known] = part

    def __bool__(self) -> bool:
        return bool(self._parts)

    def part_of(self, name: str) -> str | None:
        """The part that loads the entry ``name``, or the part of that name; None if torch loads
        it."""
        return next(
            (
                part
                for part in self._parts
                if not part or name == part or name.startswith(part + ".")
            ),
            None,
        )

    def takes(self, part: str, stored: Mapping[str, Any]) -> bool:
        """Whether a part accepts its own entries in the state of the whole module.

        The part does not change, and keeps no reference.
        """
        start = f"{part}." if part else ""
        mine = OrderedDict(
            (name.removeprefix(start), own(value))
            for name, value in stored.items()
            if self.part_of(name) == part
        )
        metadata = getattr(stored, "_metadata", None)
        if metadata is not None:
            whole = metadata_for(self._module, metadata)
            # as nn.Module.state_dict sets it
            mine._metadata = OrderedDict(  # type: ignore[attr-defined]
                (name.removeprefix(start) if name != part else "", value)
                for name, value in whole.items()
                if (name + ".").startswith(start)
            )
        try:
            deepcopy(self._parts[part]).load_state_dict(mine, strict=False)
        except Exception:  # whatever it raises, it does not accept them
            return False
        return True


def loads_plainly(part: nn.Module) -> bool:
    """Whether a module copies the entries of its own parameters and buffers, and does not use other
    tensors."""
    return (
        type(part).load_state_dict is nn.Module.load_state_dict
        and type(part)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and all(map(only_waits, part._load_state_dict_pre_hooks.values()))
        and "load_state_dict" not in part.__dict__
        and "_load_from_state_dict" not in part.__dict__
    )


def only_waits(hook: object) -> bool:
    """Whether a hook on loading is a fence's: it waits for copies, and leaves what is loaded
    alone."""
    return bool(getattr(getattr(hook, "hook", hook), "only_waits", False))


# --- Restoring into a live module in place, through its own ``load_state_dict`` ---


def check_module(
    path: str, model: ModelState, stored: object, findings: Findings, frozen: object = None
) -> None:
    """Find out what of ``stored`` fits, and note the write that puts it into the module.

    Hooks, extra state and versions work as in ``load_state_dict``. A tied tensor of the module is
    satisfied by any of its names. Entries that a part loads with its own method fit if that part
    takes them. ``frozen`` are the names that the state leaves out, each on a line. None of them
    counts as missing.
    """
    if not isinstance(stored, dict):
        findings.mismatched.append(Mismatch(path, describe(stored), type(model.module).__name__))
        return
    if findings.selection.patterns is None and model.holds(stored):
        findings.keeps(model.paths, stored.values())
        return
    live = model.tree()
    raw_names = model.raw_names()
    chosen: dict[str, object] = {}
    ties = _ties(live)
    metadata = getattr(stored, "_metadata", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(each, dict) for each in metadata.values())
    ):
        raise Corrupt(
            f"{path} has versions of modules in a form that no module wrote: restore another state"
        )
    own_loading = OwnLoading(model.module)
    left = {*frozen.split("\n")} if isinstance(frozen, str) else set()
    taken = _taken(own_loading, live, stored, findings)
    for name, target in live.items():
        here = join(path, name)
        if name in stored:
            if findings.wants(here) and (
                _is_extra(name) or name in taken or findings.fits(here, stored[name], target)
            ):
                chosen[name] = stored[name]
        elif (
            name not in left
            and not any(other in stored for other in ties.get(name, ()))
            and findings.selection.wants(here)
        ):
            findings.missing.append(here)
    findings.unexpected += [
        here
        for name in stored
        if name not in live and findings.selection.wants(here := join(path, name))
    ]
    _check_ties(path, chosen, ties, findings)
    findings.restored += [join(path, name) for name in chosen]
    if chosen:
        raw = {raw_names[name]: value for name, value in chosen.items()}
        targets = {raw_names[name]: live[name] for name in chosen}
        kept = {raw_names[name] for name in chosen if own_loading.part_of(name) is not None}
        for name, value in chosen.items():
            if name not in taken:
                findings.overwrites(
                    join(path, name), value, live[name], is_as_stored=not own_loading
                )
        findings.writes.append(partial(_load, path, model.module, raw, targets, metadata, kept))


def check_gradients(path: str, model: ModelState, stored: object, findings: Findings) -> None:
    """Note the writes that set every parameter's gradient; a parameter without one in the state
    gets ``None``."""
    if not isinstance(stored, dict):
        findings.mismatched.append(Mismatch(path, describe(stored), "gradients by parameter"))
        return
    for name, parameter in model.tree().items():
        if not isinstance(parameter, nn.Parameter):
            continue
        here, gradient = join(path, name), stored.get(name)
        if name not in stored:
            if findings.selection.wants(here):
                findings.writes.append(partial(setattr, parameter, "grad", None))
        elif findings.wants(here) and findings.fits(here, gradient, parameter):
            findings.restored.append(here)
            if parameter.grad is not None:
                findings.overwrites(here, gradient, parameter.grad)
            elif is_spread(parameter):
                findings.made_like(gradient, parameter)
            findings.writes.append(partial(_set_gradient, parameter, gradient, findings))


def _taken(
    own_loading: OwnLoading,
    live: Mapping[str, object],
    stored: Mapping[str, object],
    findings: Findings,
) -> set[str]:
    """The names of entries that differ from the module's, but that the parts which load them
    accept."""
    unlike: dict[str, list[str]] = {}
    for name, target in live.items() if own_loading else ():
        part = own_loading.part_of(name)
        if (
            part is not None
            and name in stored
            and not _is_extra(name)
            and not are_alike(target, stored[name])
        ):
            unlike.setdefault(part, []).append(name)
    # The bytes are missing here, so no part can be tried. The check with the values does it.
    return {
        name
        for part, names in unlike.items()
        if not findings.has_values or own_loading.takes(part, stored)
        for name in names
    }


def _load(
    path: str,
    module: nn.Module,
    raw: Mapping[str, Any],
    targets: Mapping[str, Any],
    metadata: Mapping[str, Any] | None,
    kept: Collection[str],
) -> None:
    """Load the state into the module; ``kept`` are names of entries that a part may keep as they
    are."""
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in raw.items():
        if not isinstance(value, torch.Tensor):
            state[name] = own(value)
        elif _repeats(targets[name]) or is_wrapping(targets[name]):
            write_tensor(targets[name], value)
        elif is_spread(targets[name]):
            state[name] = (
                value if is_laid_out_as(value, targets[name]) else cut_for(targets[name], value)
            )
        else:
            state[name] = own(value) if name in kept or _is_extra(name) else value
    if metadata is not None:
        # as nn.Module.state_dict sets it
        state._metadata = metadata_for(module, metadata)  # type: ignore[attr-defined]
    try:
        module.load_state_dict(state, strict=False)
    except Exception as exc:
        raise InvalidInput(
            f"{path} ({type(module).__name__}) did not take its state and may be half changed:"
            f" {exc}"
        ) from exc


def _set_gradient(parameter: nn.Parameter, stored: Any, findings: Findings) -> None:
    if parameter.grad is not None and parameter.grad.dtype == stored.dtype:
        write_tensor(parameter.grad, stored)
    else:
        found = (
            cut_for(parameter, stored) if is_spread(parameter) and not is_spread(stored) else stored
        )
        parameter.grad = findings.own(found.to(parameter.dtype), parameter.device)


def _ties(live: Mapping[str, object]) -> dict[str, list[str]]:
    """All names of each tied tensor, by each of its names."""
    by_id: dict[int, list[str]] = {}
    for name, leaf in live.items():
        if isinstance(leaf, torch.Tensor):
            by_id.setdefault(id(leaf), []).append(name)
    return {name: names for names in by_id.values() if len(names) > 1 for name in names}


def _check_ties(
    path: str, chosen: Mapping[str, object], ties: Mapping[str, list[str]], findings: Findings
) -> None:
    for name, names in ties.items():
        first = next((other for other in names if other in chosen), name)
        if (
            name in chosen
            and name != first
            and not _is_same(chosen[first], chosen[name], has_values=findings.has_values)
        ):
            tied = f"one tensor for {join(path, first)} and {join(path, name)}"
            findings.mismatched.append(
                Mismatch(join(path, name), f"another value than {join(path, first)}", tied)
            )


def _is_same(one: object, other: object, *, has_values: bool) -> bool:
    if one is other or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True
    if not are_alike(one, other):
        return False
    if not has_values:
        return True
    # ranks see what they hold themselves, and exchange no messages
    if is_spread(one) or is_spread(other):
        return not is_laid_out_as(one, other) or _is_same(
            local_of(one), local_of(other), has_values=True
        )
    # As bytes: a NaN equals itself.
    return all(
        torch.equal(
            mine.detach().contiguous().view(-1).view(torch.uint8),
            theirs.detach().contiguous().view(-1).view(torch.uint8),
        )
        for mine, theirs in zip(plain_tensors(one), plain_tensors(other), strict=True)
    )


def _repeats(target: object) -> bool:
    if not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
        return False
    return any(
        stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape, strict=True)
    )


def _is_extra(name: str) -> bool:
    return name.rsplit(".", 1)[-1] == _EXTRA
