"""The parents of a merge, opened side by side, and the tensors that a recipe makes of them, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from datastates.content.carving import carve
from datastates.content.check import tensors_of
from datastates.content.digest import chunk_digest
from datastates.content.geometry import dtype_of, rebuild
from datastates.content.manifest import TensorSpec
from datastates.errors import Corrupt, InvalidInput, Unsupported
from datastates.objects.model_state import FROZEN
from datastates.objects.own_buffers import part_of
from datastates.objects.report import Selection, write_tensor
from datastates.opening.core import Core
from datastates.store.reading import read_flat
from datastates.store.tier import Reader

from .numeric import check_numeric
from .recipes import Recipe, combine

if TYPE_CHECKING:
    from datastates.lineage.states import State

__all__ = ["Blend"]

_SHOWN = 6
_OPAQUE = frozenset("ax")
"""Arrays and encoded objects: their bytes are not ours to average. Sparse and quantized tensors are refused."""


class _Parent:
    """An open state and the places of its tensors."""

    def __init__(self, state: State, reader: Reader) -> None:
        self.state, self.reader = state, reader
        self.specs = tensors_of(reader.manifest.content)
        self.index = {spec.path: index for index, spec in enumerate(self.specs)}

    def stored(self, path: str) -> int:
        """The index of the tensor whose bytes are those of ``path``."""
        alias = self.specs[self.index[path]].alias
        return self.index[path] if alias is None else alias

    def flat(self, path: str, like: TensorSpec) -> torch.Tensor:
        """The tensor's bytes in the memory order of ``like``; read-only."""
        spec = self.specs[self.stored(path)]
        flat = read_flat(self.reader, spec)
        if spec.strides == like.strides:
            return flat
        turned = torch.empty(flat.numel(), dtype=torch.uint8, device="cpu")
        write_tensor(rebuild(turned, like), rebuild(flat, spec))
        return turned


class Blend:
    """The parents and their result; a context manager. ``carved`` is the result without its chunks. Parts that are not combined come from
    the first parent.

    :raises InvalidInput: the parents do not fit together; lists names, shapes and dtypes.
    :raises Unsupported: a tensor that is asked for cannot be combined.
    :raises Unavailable: the bytes of a parent are gone; names the nearest ancestor that has them.
    """

    def __init__(self, core: Core, recipe: Recipe, states: Sequence[State]) -> None:
        self.recipe, self.states = recipe, tuple(states)
        self._stack = ExitStack()
        try:
            self._parents = [self._open(core, state) for state in states]
            selection = Selection(recipe.only)
            is_carved = recipe.rest == "drop" and recipe.only is not None
            self.carved = carve(self._parents[0].reader.manifest.content, _with_record(selection) if is_carved else None)
            self._combined = self._choose(selection)
            for other in self._parents[1:]:
                self._check_fit(other, Selection(recipe.only))
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Each tensor that is stored, in the order of its bytes, as flat ``uint8``: read-only, and valid until the next one is asked
        for.
        """
        stored = [
            (min((shard.start for shard in spec.shards), default=0), index)
            for index, spec in enumerate(self.carved.specs)
            if spec.alias is None
        ]
        for _, index in sorted(stored):
            yield self.carved.specs[index], self._flat(index)

    def compare(self, reader: Reader, state: State) -> None:
        """Raise unless an open state is what the parents make.

        :raises Corrupt: it is not; names the tensor.
        """
        manifest, carved = reader.manifest, self.carved
        content = manifest.content
        if manifest.origin.parent_digests != tuple(parent.digest for parent in self.states):
            raise Corrupt(f"state {state.uid} was made of other parents than {', '.join(parent.uid for parent in self.states)}")
        parts = ((content.skeleton, carved.skeleton), (content.values, carved.values), (content.tensors, carved.tensors))
        if any(bytes(one) != bytes(other) for one, other in parts):
            raise Corrupt(f"state {state.uid} has other names, values or shapes than its parents make")
        for spec, flat in self.tensors():
            try:
                found = chunk_digest(read_flat(reader, spec).numpy().data)
            except Corrupt as exc:
                raise Corrupt(f"{spec.path} of the merged state cannot be read: {exc}") from exc
            if found != chunk_digest(flat.numpy().data):
                raise Corrupt(f"{spec.path} of state {state.uid} is not what its parents make by method {self.recipe.method}")

    def close(self) -> None:
        """Release the parents; idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self, core: Core, state: State) -> _Parent:
        return _Parent(state, self._stack.enter_context(core.open_payload(state)))

    def _flat(self, index: int) -> torch.Tensor:
        first, spec = self._parents[0], self.carved.specs[index]
        flat = read_flat(first.reader, first.specs[self.carved.sources[index]])
        if index not in self._combined:
            return flat
        dtype = dtype_of(spec.dtype)
        real = dtype.to_real() if dtype.is_complex else dtype
        parts = [_aligned(flat, real), *(_aligned(parent.flat(spec.path, spec), real) for parent in self._parents[1:])]
        return combine(self.recipe, parts).view(torch.uint8)

    # What is combined, and whether it can be

    def _choose(self, selection: Selection) -> frozenset[int]:
        """The tensors with bytes of their own that are combined: floating-point ones of which any name is asked for."""
        chosen: set[int] = set()
        carved = self.carved
        for index, (spec, holder) in enumerate(zip(carved.specs, carved.holders, strict=True)):
            dtype = dtype_of(spec.dtype)
            if not selection.wants(spec.path) or (holder is not None and holder in _OPAQUE):
                continue
            if holder is not None:
                raise Unsupported(f"{spec.path} is part of a sparse or quantized tensor, which is not merged: leave it out with only=…")
            if (dtype.is_floating_point or dtype.is_complex) and not _is_counter(spec):
                check_numeric(spec, "leave it out with only=…")
                chosen.add(index if spec.alias is None else spec.alias)
        selection.refuse_unused([spec.path for spec in self._parents[0].specs])
        if not chosen:
            raise InvalidInput(f"only={self.recipe.only} asks for no floating-point tensor: there is nothing to merge")
        return frozenset(chosen)

    def _check_fit(self, other: _Parent, selection: Selection) -> None:
        first = self._parents[0]
        ours, theirs = (
            {spec.path: spec for spec in specs if selection.wants(spec.path) and part_of(spec.path) is None}
            for specs in (self.carved.specs, other.specs)
        )
        there = {spec.path for spec in other.specs}
        lines = [f"only in {first.state.uid[:10]}: {path}" for path in ours if path not in theirs]
        lines += [f"only in {other.state.uid[:10]}: {path}" for path in theirs if path not in ours]
        for path in (each for each in ours if each in theirs):
            if _geometry(ours[path]) != _geometry(theirs[path]):
                lines.append(f"{path}: {_describe(ours[path])} here, {_describe(theirs[path])} there")
                continue
            owner = first.specs[first.stored(path)].path
            if owner not in there or other.stored(path) != other.stored(owner):
                lines.append(f"{path}: tied to {owner} here, not there")
        if lines:
            more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise InvalidInput(
                "\n  ".join([f"state {other.state.uid[:10]} does not fit state {first.state.uid[:10]}:", *lines[:_SHOWN], *more])
                + "\nmerge states of one model, or choose what both have with only=…"
            )


def _with_record(selection: Selection) -> Callable[[str], bool]:
    return lambda path: selection.wants(path) or path.split("/", 1)[0] == FROZEN


def _aligned(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_aligned = not flat.data_ptr() % dtype.itemsize and not flat.storage_offset() % dtype.itemsize
    return (flat if is_aligned else flat.clone()).view(dtype)


def _geometry(spec: TensorSpec) -> tuple[object, ...]:
    """What parents must have in common: everything that is stored once for all of them, but not the order in memory."""
    return spec.dtype, spec.shape, tuple(stride == 0 and size > 1 for stride, size in zip(spec.strides, spec.shape, strict=True))


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape}{' expanded' if any(_geometry(spec)[2]) else ''}"  # type: ignore[arg-type]


def _is_counter(spec: TensorSpec) -> bool:
    """Whether the tensor counts steps: optimizers count theirs in tensors of one floating-point number."""
    return spec.shape == () and spec.path.endswith("/step")
