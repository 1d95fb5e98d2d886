"""Restoring a state's tree into live objects: first everything is checked, then everything is
written, in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from datastates.errors import InvalidInput, OverBudget

from . import in_place
from .adapters import (
    FILES,
    GRADIENTS,
    IN_BACKWARD,
    Adapted,
    has_state,
    holds_state,
    is_replaced,
    parts,
)
from .data_position import LOOPS
from .generators import RngState, is_generator, kind_of, load_generator, state_of
from .geometry import are_alike
from .in_place import shared
from .loaders import is_prepared, load_loader
from .model import FROZEN, MODES, check_gradients, check_module
from .optimizer import INNER, bare, check_optimizer, why_anew
from .report import (
    Findings,
    Mismatch,
    NewValue,
    RestoreReport,
    Selection,
    describe,
    leaf_paths,
    own,
    write_tensor,
)
from .tree import join

_RECORDS = (FILES, FROZEN, GRADIENTS, LOOPS, MODES)
_path = partial(join, "")


def restore_into(
    objects: Mapping[str, object],
    tree: Mapping[str, object],
    *,
    only: str | Sequence[str] | None = None,
    strict: bool = True,
) -> RestoreReport:
    """Put ``tree``, which ``Adapted.tree`` made, into ``objects``. Returns what was restored.

    Parts of the state that are not in ``objects`` are left out. ``only`` takes names and patterns
    of whole paths (``"model"``, ``"model/layers.0.*"``). Modules and optimizers must fit by name,
    shape and dtype. With ``strict`` anything else is refused before the first write. Without it,
    what fits is restored, and floating-point tensors are converted to the module's dtype. Plain
    containers become what the state has: tensors of the same geometry are overwritten in place, and
    all other items are replaced. No returned object shares memory with ``tree``.

    Objects that restore themselves are loaded first, one by one, because only they can fail. Random
    number generators are loaded last.

    :raises InvalidInput: something does not fit, and nothing was changed. Or an object's own
        ``load_state_dict`` failed, and the text names the objects that had been changed by then.
    """
    return write(check_into(objects, tree, only=only, strict=strict))


def check_into(
    objects: Mapping[str, object],
    tree: Mapping[str, object],
    *,
    only: str | Sequence[str] | None = None,
    strict: bool = True,
    has_values: bool = True,
    owned: Collection[int] = (),
    adapted: Adapted | None = None,
) -> Findings:
    """The first half of ``restore_into``: nothing is written.

    Without ``has_values`` the elements of the tensors in ``tree`` are not looked at. Misfits are
    then found before the bytes are there. ``owned`` are ids of tensors in ``tree`` that ``write``
    may return without a copy. ``adapted`` are the objects as an earlier check saw them, which makes
    this check cheap.

    :raises InvalidInput: something does not fit.
    """
    adapted = Adapted(objects) if adapted is None else adapted

    def look(apart: Collection[tuple[str, int]] = ()) -> Findings:
        found = Findings(
            Selection(only), is_strict=strict, has_values=has_values, owned=owned, apart=apart
        )
        _Check(adapted, found).top(tree)
        return found

    findings = look()
    if has_values:
        sharing = shared(findings.targets)
        if sharing.apart:
            findings = look({target.place for target in sharing.apart})
        findings.note_shared(sharing.misfits, sharing.hints)
    if findings.selection.patterns is not None:
        known = [
            *map(_path, adapted.objects),
            *(leaf for name, child in tree.items() for leaf in leaf_paths(child, _path(name))),
        ]
        findings.selection.refuse_unused(known)
    findings.refuse_misfits()
    return findings


def write(findings: Findings) -> RestoreReport:
    """The second half of ``restore_into``: do the writes that ``check_into`` noted.

    :raises OverBudget: a device ran out of memory, and the tensors are dirty.
    """
    # Tensors made here, such as an optimizer's state, will be trained on; only tensors of inference
    # mode are written in that mode.
    with torch.inference_mode(any(target.live.is_inference() for target in findings.targets)):
        _write(findings)
    in_place.clean(chain((target.live for target in findings.targets), findings.kept_in_place))
    return findings.report()


def reads(objects: Mapping[str, object], only: str | Sequence[str] | None) -> Callable[[str], bool]:
    """Which tensors of a state, by path, ``restore_into`` looks at: any other may be ``None`` in
    its tree, and need not be read."""
    names, selection = {*map(_path, objects), GRADIENTS, IN_BACKWARD}, Selection(only)
    return lambda path: path.split("/", 1)[0] in names and selection.wants(path)


def _write(findings: Findings) -> None:
    done: list[str] = []
    for path, load in findings.loads:
        _load(path, load, done)
    try:
        for write in findings.writes:
            write()
        findings.values = {
            name: findings.new_value(value) for name, value in findings.values.items()
        }
    except BaseException as exc:
        in_place.mark(((target.path, target.live) for target in findings.targets), findings)
        if isinstance(exc, torch.OutOfMemoryError):
            raise OverBudget(
                f"a device ran out of memory while a state was put into live objects ({exc}). They"
                " are half old, half new: free memory there, and restore a state before you use"
                " them"
            ) from exc
        raise
    done += ["all tensors"] * bool(findings.writes)
    for path, load in findings.last_loads:
        _load(path, load, done)


def _load(path: str, load: Callable[[], None], done: list[str]) -> None:
    try:
        load()
    except Exception as exc:
        changed = f"it and {', '.join(done)}" if done else "it"
        reason = f"{type(exc).__name__}: {exc}"
        raise InvalidInput(
            f"{path} did not take its state ({reason}): {changed} may be changed, the rest is not"
        ) from exc
    done.append(path)


class _Check:
    """The walk over live objects and stored tree side by side."""

    def __init__(self, adapted: Adapted, findings: Findings) -> None:
        self.adapted, self.findings = adapted, findings
        self._optimizers: list[Callable[[], None]] = []
        self._frozen: dict[str, object] = {}

    def top(self, tree: Mapping[str, object]) -> None:
        findings, record = self.findings, tree.get(FROZEN)
        self._frozen = record if isinstance(record, dict) else {}
        for name, live in self.adapted.objects.items():
            path = _path(name)
            if name not in tree:
                if not getattr(live, "is_optional", False) and findings.selection.names(path):
                    findings.selection.wants(path)
                    findings.missing.append(path)
                continue
            if isinstance(live, torch.Tensor):
                # No other tensor could take the place of a separately tracked one.
                if findings.wants(path) and findings.fits(path, tree[name], live):
                    findings.restored.append(path)
                    # `fits` saw a tensor
                    self._overwrite(path, live, tree[name])  # type: ignore[arg-type]
            elif not is_replaced(live):
                self._in_place(path, live, tree[name])
            elif findings.selection.wants_some(path, leaf_paths(tree[name], path)):
                findings.values[name] = self.place(path, live, tree[name])
            else:
                findings.skipped.append(path)
        for check in self._optimizers:  # they depend on which parameters are restored
            check()
        findings.hints += self._hints(tree)
        gradients = tree.get(GRADIENTS)
        if isinstance(gradients, dict) and GRADIENTS not in self.adapted.objects:
            for path, model in self.adapted.models():
                if path in gradients:
                    check_gradients(join(GRADIENTS, path), model, gradients[path], findings)
        findings.skipped += [
            _path(name)
            for name in tree
            if name not in self.adapted.objects and name not in _RECORDS
        ]

    def _hints(self, tree: Mapping[str, object]) -> list[str]:
        """The names that the state has in place of the objects that it lacks entirely."""
        lost = [
            name
            for name in self.adapted.objects
            if name not in tree and _path(name) in self.findings.missing
        ]
        left = [name for name in tree if name not in self.adapted.objects and name not in _RECORDS]
        both = [_path(name) for name in self.adapted.objects if name in tree]
        if not lost or not self.findings.is_strict:
            return []
        hints = [f"the state has {', '.join(map(_path, tree)) or 'nothing'}"]
        live = self.adapted.outlook()
        for name in lost:
            close = [
                other for other in left if _has_same_keys(live.get(name), tree[other])
            ] or get_close_matches(name, left, n=1)
            if close:
                hints.append(
                    f"its {_path(close[0])} looks like your {_path(name)}: call it"
                    f" {_path(close[0])} as well"
                )
        if len(hints) == 1:
            hints.append(
                f"only={both} restores what both have, and leaves {', '.join(map(_path, lost))} as"
                " it is"
            )
        return hints

    def place(self, path: str, live: Any, stored: Any, *, is_replaceable: bool = True) -> object:
        """The value at ``path`` after the writes: ``live`` itself if it can be changed in place.
        ``is_replaceable``: another value may take its place.
        """
        if isinstance(live, nn.Module):
            check_module(
                path,
                self.adapted.model_state(path, live),
                stored,
                self.findings,
                self._frozen.get(path),
            )
        elif isinstance(live, Optimizer):
            self._optimizers.append(partial(self._optimizer, path, live, stored))
        elif has_state(live):
            self._opaque(path, live, stored)
        elif is_generator(live):
            self._generator(path, live, stored)
        elif isinstance(live, dict) and isinstance(stored, dict):
            self._mapping(path, live, stored)
        elif (isinstance(live, list) and isinstance(stored, list)) or (
            isinstance(live, deque) and isinstance(stored, deque)
        ):
            self._list(path, live, stored)
        elif isinstance(live, tuple) and isinstance(stored, tuple) and len(live) == len(stored):
            pairs = enumerate(zip(live, stored, strict=True))
            placed = [
                self.place(join(path, index), *pair, is_replaceable=is_replaceable)
                for index, pair in pairs
            ]
            return (
                live
                if all(new is old for new, old in zip(placed, live, strict=True))
                else tuple(placed)
            )
        else:
            return self._leaf(path, live, stored, is_replaceable=is_replaceable)
        return live

    def _in_place(self, path: str, live: Any, stored: object) -> None:
        """Restore in place a separately tracked object that no other object can replace."""
        findings = self.findings
        notes: tuple[list[Any], ...] = (findings.restored, findings.targets, findings.writes)
        before, misfits = [*map(len, notes)], len(findings.mismatched)
        if (
            self.place(path, live, stored, is_replaceable=False) is not live
            and len(findings.mismatched) == misfits
        ):
            for note, count in zip(notes, before, strict=True):
                del note[count:]
            findings.mismatched.append(Mismatch(path, describe(stored), describe(live)))

    def _overwrite(
        self, path: str, live: torch.Tensor, stored: torch.Tensor, *, is_replaceable: bool = False
    ) -> None:
        self.findings.overwrites(path, stored, live, is_replaceable=is_replaceable)
        self.findings.writes.append(partial(write_tensor, live, stored))

    def _optimizer(self, path: str, live: Optimizer, stored: object) -> None:
        own, kept = stored, {}
        if isinstance(stored, dict) and isinstance(stored.get(INNER), dict):
            own, kept = {key: value for key, value in stored.items() if key != INNER}, stored[INNER]
        lost = self._lost()
        check_optimizer(path, live, self.adapted.names_of(live), own, self.findings, lost)
        inner = self.adapted.left_out_of(bare(live))
        for name, found in inner.items():
            here = join(join(path, INNER), name)
            if name in kept:
                check_optimizer(
                    here, found, self.adapted.names_of(found), kept[name], self.findings, lost
                )
            elif self.findings.selection.wants(path):
                self.findings.anew.append(
                    f"{path}: the state has nothing of its {name}, which begins anew"
                )
        gone = [join(join(path, INNER), name) for name in kept if name not in inner]
        self.findings.unexpected += [here for here in gone if self.findings.selection.wants(here)]

    def _lost(self) -> set[int]:
        """The ids of tracked tensors that are selected and not restored."""
        paths = {*self.findings.missing, *(misfit.path for misfit in self.findings.mismatched)}
        models = self.adapted.models() if paths else []
        return {id(found) for path, found in parts(self.adapted.objects) if path in paths} | {
            id(tensor)
            for path, model in models
            for name, tensor in model.tree().items()
            if path in paths or join(path, name) in paths
        }

    def _opaque(self, path: str, live: Any, stored: object) -> None:
        leaves = leaf_paths(stored, path)
        if not self.findings.is_wanted_whole(path, leaves):
            return
        why = why_anew(live, stored)
        if why is not None:
            self.findings.anew.append(f"{path} {why}")
            return
        self.findings.restored += leaves
        loads = self.findings.last_loads if isinstance(live, RngState) else self.findings.loads
        loads.append((path, partial(_load_opaque, live, stored)))

    def _generator(self, path: str, live: Any, stored: Any) -> None:
        leaves = leaf_paths(stored, path)
        if not self.findings.is_wanted_whole(path, leaves):
            return
        if is_generator(stored):  # by an encoder of the user's own
            stored = state_of(stored)
        kind = stored.get("generator") if isinstance(stored, dict) else None
        if kind != kind_of(live):
            self.findings.mismatched.append(Mismatch(path, kind or describe(stored), kind_of(live)))
            return
        self.findings.restored += leaves
        self.findings.last_loads.append((path, partial(load_generator, live, stored)))

    def _mapping(self, path: str, live: dict[Any, Any], stored: dict[Any, Any]) -> None:
        is_whole = self.findings.selection.wants(path)
        placed: dict[Any, object] = {}
        for key, value in stored.items():
            here = join(path, key)
            if key in live:
                placed[key] = self.place(here, live[key], value)
            elif is_whole or self.findings.selection.wants_some(here, leaf_paths(value, here)):
                placed[key] = NewValue(value)
                self.findings.restored += leaf_paths(value, here)
        gone = [key for key in live if key not in stored]
        self.findings.missing += [
            join(path, key) for key in gone if is_whole and holds_state(live[key])
        ]
        if not is_whole or any(holds_state(live[key]) for key in gone):
            gone = []
        self.findings.writes.append(partial(self._write_mapping, live, placed, gone))

    def _list(
        self, path: str, live: list[Any] | deque[Any], stored: list[Any] | deque[Any]
    ) -> None:
        if isinstance(live, deque) and live.maxlen is not None and len(stored) > live.maxlen:
            self.findings.mismatched.append(
                Mismatch(path, f"a deque of {len(stored)}", f"a deque that takes {live.maxlen}")
            )
            return
        if len(live) != len(stored) and (
            holds_state(live) or not self.findings.selection.wants(path)
        ):
            self.findings.mismatched.append(
                Mismatch(path, f"a list of {len(stored)}", f"a list of {len(live)}")
            )
            return
        placed = [
            self.place(join(path, index), old, new)
            for index, (old, new) in enumerate(zip(live, stored, strict=False))
        ]
        for index in range(len(placed), len(stored)):
            placed.append(NewValue(stored[index]))
            self.findings.restored += leaf_paths(stored[index], join(path, index))
        self.findings.writes.append(partial(self._write_list, live, placed))

    def _leaf(self, path: str, live: Any, stored: Any, *, is_replaceable: bool) -> object:
        if not self.findings.selection.wants_some(path, leaf_paths(stored, path)):
            self.findings.skipped.append(path)
            return live
        if holds_state(live):
            self.findings.mismatched.append(Mismatch(path, describe(stored), describe(live)))
            return live
        self.findings.restored += leaf_paths(stored, path)
        if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor):
            if (
                are_alike(live, stored)
                and not live.is_meta
                and not self.findings.is_apart(path, live)
            ):
                self._overwrite(path, live, stored, is_replaceable=is_replaceable)
                return live
            return NewValue(stored, live)
        if isinstance(live, set) and isinstance(stored, set):
            self.findings.writes += (live.clear, partial(live.update, stored))
            return live
        if isinstance(live, bytearray) and isinstance(stored, bytearray):
            self.findings.writes.append(partial(live.__setitem__, slice(None), stored))
            return live
        is_array = (
            isinstance(live, np.ndarray) and isinstance(stored, np.ndarray) and live.flags.writeable
        )
        if (
            is_array
            and (live.shape, live.dtype) == (stored.shape, stored.dtype)
            and not self.findings.is_apart(path, live)
        ):
            self.findings.overwrites_array(path, stored, live, is_replaceable=is_replaceable)
            self.findings.writes.append(partial(np.copyto, live, stored))
            return live
        return NewValue(stored)

    def _write_mapping(
        self, live: dict[Any, Any], placed: Mapping[Any, object], gone: Sequence[Any]
    ) -> None:
        for key in gone:
            del live[key]
        fresh = {key: self.findings.new_value(value) for key, value in placed.items()}
        if live.keys() <= fresh.keys():
            live.clear()  # the order matters too: it shows which entry of a cache is the oldest
        for key, value in fresh.items():
            live[key] = value  # noqa: PERF403  # a Counter's update adds

    def _write_list(self, live: list[Any] | deque[Any], placed: Sequence[object]) -> None:
        fresh = [self.findings.new_value(value) for value in placed]
        live.clear()
        live.extend(fresh)


def _has_same_keys(live: object, stored: object) -> bool:
    return (
        isinstance(live, dict)
        and isinstance(stored, dict)
        and bool(live)
        and live.keys() == stored.keys()
    )


def _load_opaque(live: Any, stored: object) -> None:
    if is_prepared(live):
        load_loader(live, own(stored))
        return
    live.load_state_dict(own(stored))
    if any(
        kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(live).__mro__
    ):
        # Its iterator is made now, not when the loop begins: making it draws random numbers, and
        # the generators come last.
        live.state_dict()
