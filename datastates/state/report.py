"""The findings of a restore: the report for people, and the notes from which it is made."""

from __future__ import annotations

import ctypes
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from datastates import values
from datastates.errors import InvalidInput

from .geometry import are_alike, inner, is_spread, is_wrapping, like, plain_tensors
from .per_rank import cut_for, write_local
from .tree import join

if TYPE_CHECKING:
    import numpy as np

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A leaf that both sides have and that does not fit: what the state holds and what the live
    object holds."""

    path: str
    state: str
    object: str

    def __str__(self) -> str:
        return f"{self.path}: the state has {self.state}, the object {self.object}"


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of a restore, by path. It is true if everything that was requested was restored
    exactly.

    - ``missing``: the objects have it and the state does not. ``unexpected``: the reverse.
    - ``mismatched``: it fits neither in shape nor by conversion.
    - ``converted``: it was restored in the object's own dtype.
    - ``skipped``: it was not requested.
    - ``values``: values that no restore can change in the caller (numbers, text, tuples), by name.
      The caller takes them from here.
    - ``notes``: what begins again because another number of ranks captured the state, such as
      random numbers or the place in the data.
    - ``anew``: what was left unchanged because only one side has it. Examples are a gradient scaler
      that was or is switched off, and an optimizer within another.
    - ``frozen``: restored parameters that required no gradient in the state and required one here.
      ``unfrozen``: the reverse.
    - ``in_eval``: restored modules that were in eval mode in the state and are in training mode
      here. ``in_train``: the reverse.

    A tracker that resumes at the newest state of its branch, or goes back, sets gradients and modes
    as they were in the state. It does not if the script that captured the state is still running.
    Every other restore leaves them.

    ``state`` is the uid of the state that was restored, and ``step`` is its step.
    """

    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    converted: tuple[Mismatch, ...] = ()
    skipped: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    unfrozen: tuple[str, ...] = ()
    in_eval: tuple[str, ...] = ()
    in_train: tuple[str, ...] = ()
    anew: tuple[str, ...] = ()
    state: str = ""
    step: int = 0

    def __bool__(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def summary(self) -> str:
        """The counts in one line."""
        names = ("missing", "unexpected", "mismatched", "converted", "skipped")
        counts = [f"{len(getattr(self, name))} {name}" for name in names if getattr(self, name)]
        return ", ".join([f"restored {len(self.restored)} leaves", *counts])

    def __str__(self) -> str:
        lines = [self.summary()]
        for name in ("missing", "unexpected", "mismatched", "converted"):
            lines += _lines(name, getattr(self, name))
        return "\n".join([*lines, *self.notes, *self.anew])


class Selection:
    """The selected paths: by name, by a name above them, or by a pattern over the whole path.

    An object that was tracked under a name that paths escape (``net/1`` is ``net%2F1`` there) can
    be selected by either.
    """

    def __init__(self, only: str | Sequence[str] | None) -> None:
        self.patterns = values.patterns(only)
        self._used: set[str] = set()

    def wants(self, path: str) -> bool:
        if self.patterns is None:
            return True
        hits = [
            p
            for p in self.patterns
            if _selects(p, path) or (("/" in p or "%" in p) and _selects(join("", p), path))
        ]
        self._used.update(hits)
        return bool(hits)

    def wants_some(self, path: str, paths: Iterable[str]) -> bool:
        """Whether ``path`` or one of ``paths`` below it is selected."""
        wanted = [p for p in paths if self.wants(p)]
        return self.wants(path) or bool(wanted)

    def names(self, name: str) -> bool:
        """Whether a pattern refers to the top-level object ``name``."""
        return self.patterns is None or any(
            fnmatchcase(name, p.split("/", 1)[0]) or name == join("", p) for p in self.patterns
        )

    def refuse_unused(self, known: Iterable[str]) -> None:
        """Refuse patterns that selected nothing.

        :raises InvalidInput: there are some. The text names the pattern and the available paths.
        """
        for pattern in self.patterns or ():
            if pattern not in self._used:
                names = sorted(set(known))
                close = get_close_matches(pattern, names, n=3) or sorted(
                    {name.split("/", 1)[0] for name in names}
                )
                raise InvalidInput(
                    f"only={pattern!r} selects nothing: try {', '.join(close)}, or a pattern like"
                    " 'model/*'"
                )

    def check(self, known: Iterable[str]) -> None:
        """Refuse patterns that select none of the ``known`` paths, and have not selected other
        paths.

        :raises InvalidInput: there are some. The text names the pattern and the available paths.
        """
        if self.patterns is not None:
            paths = list(known)
            for path in paths:
                self.wants(path)
            self.refuse_unused(paths)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A live tensor into which a stored one will be written, whole. ``is_as_stored``: only its
    elements are written, as they are.

    ``is_replaceable``: another tensor may take its place. An array has ``arrays``, the live and the
      stored one; ``live`` is then its memory
    as bytes.
    """

    path: str
    stored: torch.Tensor
    live: torch.Tensor
    is_as_stored: bool
    is_replaceable: bool = False
    arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    @property
    def place(self) -> tuple[str, int]:
        """The key that distinguishes it from other targets, in every check of the same objects."""
        return self.path, id(self.live if self.arrays is None else self.arrays[0])


@dataclass(frozen=True, slots=True, eq=False)
class NewValue:
    """A placeholder for a stored value that is returned after the writes. No value is read before.

    A tensor goes to the device of ``like``, if given. It becomes a parameter if ``like`` is one,
    and requires a gradient if ``like`` does. It is laid out over the ranks like ``like`` if both
    have the same shape.
    """

    value: object
    like: torch.Tensor | None = None


class Findings:
    """The findings of a check so far, and the writes that follow only if it succeeds.

    Without ``has_values`` the stored tensors are known only by shape and dtype, and the check uses
    nothing more. ``owned`` are ids of stored tensors whose memory is free for reuse. They are
    returned themselves instead of a copy. ``apart`` are the places of live tensors that stay
    unchanged: new ones take their place.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        is_strict: bool,
        has_values: bool = True,
        owned: Collection[int] = (),
        apart: Collection[tuple[str, int]] = (),
    ) -> None:
        self.selection, self.is_strict, self.has_values = selection, is_strict, has_values
        self._owned, self._apart = set(owned), apart
        self.targets: list[Target] = []
        self.likes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.restored: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[Mismatch] = []
        self.converted: list[Mismatch] = []
        self.converted_ids: set[int] = set()
        self.skipped: list[str] = []
        self.hints: list[str] = []
        self.anew: list[str] = []
        self.values: dict[str, object] = {}
        self.loads: list[tuple[str, Callable[[], None]]] = []
        self.writes: list[Callable[[], None]] = []
        self.last_loads: list[tuple[str, Callable[[], None]]] = []
        self.kept_in_place: list[torch.Tensor] = []

    def keeps(self, paths: Iterable[str], found: Iterable[object]) -> None:
        """Note that live objects are already what the state has, tensors once they are filled."""
        self.restored += paths
        self.kept_in_place += [each for each in found if isinstance(each, torch.Tensor)]

    def are_in_place(self, given: Iterable[torch.Tensor]) -> bool:
        """Whether each of these live tensors was given as a stored one, and is at the place of that
        one."""
        found = {*map(id, self.kept_in_place)}
        found.update([id(each.live) for each in self.targets if each.live is each.stored])
        return found.issuperset(map(id, given))

    def overwrites(
        self,
        path: str,
        stored: object,
        live: object,
        *,
        is_as_stored: bool = True,
        is_replaceable: bool = False,
    ) -> None:
        """Note that a write will put ``stored`` into the tensor ``live``."""
        if isinstance(stored, torch.Tensor) and isinstance(live, torch.Tensor):
            for part, new in zip(plain_tensors(live), plain_tensors(stored), strict=True):
                self.targets.append(
                    Target(
                        path, new, part, is_as_stored and new.dtype == part.dtype, is_replaceable
                    )
                )

    def overwrites_array(
        self,
        path: str,
        stored: np.ndarray[Any, Any],
        live: np.ndarray[Any, Any],
        *,
        is_replaceable: bool,
    ) -> None:
        """Note that a write will put ``stored`` into the array ``live``."""
        if (memory := _memory_of(live)) is not None:
            self.targets.append(
                Target(
                    path,
                    memory,
                    memory,
                    is_as_stored=True,
                    is_replaceable=is_replaceable,
                    arrays=(live, stored),
                )
            )

    def is_apart(self, path: str, live: object) -> bool:
        """Whether a live tensor or array must not be overwritten, because another one is in its
        memory."""
        return (path, id(live)) in self._apart

    def made_like(self, stored: object, live: torch.Tensor) -> None:
        """Note that a write will make a tensor from ``stored`` that is laid out as ``live``, a
        DTensor, is."""
        if isinstance(stored, torch.Tensor):
            self.likes.append((stored, live))

    def own(self, value: Any, device: torch.device | None = None) -> Any:
        """A value to hand over: ``own``'s copy, except for tensors whose memory is ours to give
        away."""
        return own(value, device, self._owned)

    def new_value(self, placed: Any) -> Any:
        """``placed`` with each ``NewValue`` in it replaced by its value."""
        if isinstance(placed, NewValue):
            value, like = placed.value, placed.like
            if like is None or not isinstance(value, torch.Tensor):
                return self.own(value)
            if is_spread(like) and not is_spread(value) and value.shape == like.shape:
                value = cut_for(like, value)
            return _trained_as(like, self.own(value, like.device))
        if type(placed) is not tuple:
            return placed
        fresh = tuple(map(self.new_value, placed))
        return placed if all(map(operator.is_, fresh, placed)) else fresh

    @property
    def kept(self) -> frozenset[int]:
        """The ids of owned tensors that were not handed over."""
        return frozenset(self._owned)

    def wants(self, path: str) -> bool:
        """Whether ``path`` is selected. Notes it as skipped if not."""
        if self.selection.wants(path):
            return True
        self.skipped.append(path)
        return False

    def is_wanted_whole(self, path: str, leaves: Sequence[str]) -> bool:
        """Whether an object that restores itself in one go is selected. Notes it as skipped if not.

        :raises InvalidInput: only a part of it is selected.
        """
        wanted = [leaf for leaf in leaves if self.selection.wants(leaf)]
        if self.selection.wants(path) or (leaves and len(wanted) == len(leaves)):
            return True
        if wanted:
            raise InvalidInput(
                f"{path} takes its state as a whole, and only={self.selection.patterns!r} asks for"
                f" {wanted[0]}: ask for {path!r}"
            )
        self.skipped.append(path)
        return False

    def fits(self, path: str, stored: object, live: object) -> bool:
        """Whether ``stored`` can be written into the tensor ``live``; notes what it found.

        Another floating-point dtype of the same shape is a mismatch under ``strict``; otherwise it
        is converted.
        """
        if (
            not isinstance(stored, torch.Tensor)
            or not isinstance(live, torch.Tensor)
            or stored.shape != live.shape
            or live.is_meta
            or ((is_wrapping(live) or is_wrapping(stored)) and not are_alike(live, stored))
        ):
            self.mismatched.append(Mismatch(path, describe(stored), describe(live)))
            return False
        if stored.dtype != live.dtype:
            note = Mismatch(path, describe(stored), describe(live))
            is_convertible = (
                not self.is_strict and stored.is_floating_point() and live.is_floating_point()
            )
            (self.converted if is_convertible else self.mismatched).append(note)
            self.converted_ids |= {id(live)} if is_convertible else set()
            return is_convertible
        return True

    def note_shared(self, misfits: Iterable[Mismatch], hints: Iterable[str]) -> None:
        """Note what cannot be restored because it shares memory with something else, unless it
        was noted as a misfit already."""
        known = {note.path for note in self.mismatched}
        for misfit, hint in zip(misfits, hints, strict=True):
            if misfit.path not in known:
                self.mismatched.append(misfit)
                self.hints.append(hint)

    def refuse_misfits(self) -> None:
        """With ``strict``, refuse anything that does not fit.

        :raises InvalidInput: something does not fit. The text lists the first few of each kind,
            with similar names.
        """
        if not self.is_strict or not (self.missing or self.unexpected or self.mismatched):
            return
        lines = ["the state does not fit, and nothing was changed"]
        lines += _lines("not in the state", self.missing, others=self.unexpected)
        lines += _lines("not in the objects", self.unexpected, others=self.missing)
        lines += _lines("of another kind", self.mismatched)
        lines += self.hints or [
            "write strict=False to restore the rest: what is listed stays as your script made it,"
            " its optimizer state begins anew, and the step counts on from the state's"
        ]
        raise InvalidInput("\n".join(lines))

    def report(self) -> RestoreReport:
        return RestoreReport(
            restored=tuple(self.restored),
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            mismatched=tuple(self.mismatched),
            converted=tuple(self.converted),
            skipped=tuple(self.skipped),
            values=self.values,
            anew=tuple(self.anew),
        )


def _selects(pattern: str, path: str) -> bool:
    return path == pattern or path.startswith(pattern + "/") or fnmatchcase(path, pattern)


def leaf_paths(tree: object, path: str) -> list[str]:
    """The paths of all leaves of nested containers; an empty container is a leaf."""
    if isinstance(tree, dict) and tree:
        return [leaf for key, child in tree.items() for leaf in leaf_paths(child, join(path, key))]
    if isinstance(tree, list | tuple | deque) and tree:
        return [
            leaf
            for index, child in enumerate(tree)
            for leaf in leaf_paths(child, join(path, index))
        ]
    return [path]


def describe(value: object) -> str:
    """A value in a few words, tensors by dtype, shape and a device that is not the CPU."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        kind = f"{type(value).__name__} of " if is_wrapping(value) else ""
        return f"{kind}{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}"
    if isinstance(value, dict | list | tuple):
        return type(value).__name__
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return type(value).__name__
    return text if len(text) <= 40 else type(value).__name__


def own(value: Any, device: torch.device | None = None, owned: set[int] | None = None) -> Any:
    """A copy that shares no memory with ``value``, which may be in a file. Tensors go to ``device``
    if one is given.

    A tensor whose id is in ``owned`` is itself used as the copy, once: its id is taken out.
    """
    if isinstance(value, torch.Tensor):
        if owned and id(value) in owned and device in (None, value.device):
            owned.discard(id(value))
            return value
        if is_wrapping(value):
            return like(value, [own(part, device, owned) for part in inner(value).values()])
        return value.detach().to(device or value.device, copy=True)
    kind = type(value)
    if kind is dict:
        return {key: own(child, device, owned) for key, child in value.items()}
    if kind is OrderedDict:
        copied = OrderedDict((key, own(child, device, owned)) for key, child in value.items())
        if hasattr(value, "_metadata"):
            # as nn.Module.state_dict sets it
            copied._metadata = deepcopy(value._metadata)  # type: ignore[attr-defined]
        return copied
    if kind is defaultdict:
        return defaultdict(
            value.default_factory,
            ((key, own(child, device, owned)) for key, child in value.items()),
        )
    if kind is list or kind is tuple:
        return kind(own(child, device, owned) for child in value)
    if kind is deque:
        return deque((own(child, device, owned) for child in value), value.maxlen)
    return deepcopy(value)


def write_tensor(live: torch.Tensor, stored: torch.Tensor) -> None:
    """Overwrite ``live`` in place; elements repeated by a stride of 0 are written once, and of a
    DTensor only what this rank holds."""
    with torch.no_grad():
        for part, new in zip(plain_tensors(live), plain_tensors(stored), strict=True):
            if is_spread(part):
                write_local(part, new)
                continue
            if part.layout is torch.strided:
                for dim, stride in enumerate(part.stride()):
                    if stride == 0 and part.shape[dim] > 1:
                        part, new = part.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
            part.copy_(new)


def _trained_as(like: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made``, which has no other owner, as a parameter if ``like`` is one. It gets a gradient if
    ``like`` requires one and it can have one."""
    is_trained = like.requires_grad and (made.is_floating_point() or made.is_complex())
    return (
        nn.Parameter(made, is_trained)
        if isinstance(like, nn.Parameter)
        else made.requires_grad_(is_trained)
    )


def _memory_of(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """The memory of an array, as bytes. None if it has none."""
    if not array.nbytes:
        return None
    reaches = [(side - 1) * stride for side, stride in zip(array.shape, array.strides, strict=True)]
    begin = array.ctypes.data + sum(min(reach, 0) for reach in reaches)
    length = sum(map(abs, reaches)) + array.itemsize
    return torch.frombuffer((ctypes.c_ubyte * length).from_address(begin), dtype=torch.uint8)


def _lines(
    title: str, items: Sequence[str] | Sequence[Mismatch], others: Sequence[str] = ()
) -> list[str]:
    if not items:
        return []
    lines = [f"  {title}:"]
    for item in items[:_SHOWN]:
        close = get_close_matches(str(item), others, n=1, cutoff=0.75) if others else []
        lines.append(f"    {item}" + (f" (close: {close[0]})" if close else ""))
    if len(items) > _SHOWN:
        lines.append(f"    … and {len(items) - _SHOWN} more")
    return lines
