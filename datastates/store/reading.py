"""Turns a tier's bytes back into a tree of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from datastates.content.geometry import dtype_of, rebuild, stored_bytes
from datastates.content.manifest import TensorSpec
from datastates.content.shards import assemble, bytes_of, is_whole
from datastates.content.tree import decode_skeleton, decode_values, unflatten
from datastates.errors import Corrupt
from datastates.lineage.states import State
from datastates.system.interrupts import checkpoint

from .tier import Reader

__all__ = ["of_state", "over", "read_flat", "read_tree", "sketch_tree", "specs_of"]


def of_state(reader: Reader, state: State) -> Reader:
    """The reader, if it reads what the lineage says of the state; otherwise it is closed.

    :raises Corrupt: it reads another state.
    """
    found = reader.manifest.digest
    if found == state.digest:
        return reader
    reader.close()
    raise Corrupt(
        f"state {state.uid} has the digest {found[:16]} where its bytes lie, and {state.digest[:16]} in the lineage: its manifest is "
        "another state's, forged or left by a clone or an import that was refused; restore another state, or clone this one again"
    )


def specs_of(reader: Reader) -> list[TensorSpec]:
    """The tensors of a state, in tree order."""
    return msgspec.msgpack.decode(reader.manifest.content.tensors, type=list[TensorSpec])


def read_tree(
    reader: Reader,
    *,
    wants: Callable[[str], bool] = lambda path: True,
    is_borrowing: bool = False,
    device: torch.device | str | None = None,
    on_progress: Callable[[int], None] | None = None,
    given: Mapping[int, torch.Tensor] | None = None,
    specs: Sequence[TensorSpec] | None = None,
) -> Any:
    """The state's tree, every byte of it checked against its digest.

    Tensors that are not wanted are ``None``. With ``is_borrowing`` tensors may lie in the tier's own memory: the caller may only read
    them, and only until the reader is closed. Without it they belong to the caller: private, writable and lasting.
    ``on_progress`` gets the number of bytes of each tensor once it is read. ``given`` has, by index, tensors to use instead of reading
    them. ``specs`` are ``specs_of(reader)``, if the caller has them.

    :raises Corrupt: a chunk fails its digest.
    """
    with torch.inference_mode(False):  # training must be able to use the tensors
        return _read_tree(reader, wants, is_borrowing, device, on_progress, given or {}, specs or specs_of(reader))


def _read_tree(
    reader: Reader,
    wants: Callable[[str], bool],
    is_borrowing: bool,
    device: torch.device | str | None,
    on_progress: Callable[[int], None] | None,
    given: Mapping[int, torch.Tensor],
    specs: Sequence[TensorSpec],
) -> Any:
    content = reader.manifest.content
    tensors: list[torch.Tensor | None] = []
    owners: dict[int, torch.Tensor] = {}  # those that are not wanted, and that wanted ones are tied to
    if is_borrowing:
        reader.prepare(_stretches(specs, wants, given))
    for index, spec in enumerate(specs):
        checkpoint()
        if index in given:
            tensors.append(given[index])
            continue
        if spec.alias is not None and tensors[spec.alias] is None and wants(spec.path):
            if spec.alias not in owners:
                owners[spec.alias] = _read(reader, specs[spec.alias], is_borrowing, device)
            tensors.append(owners[spec.alias])
        elif spec.alias is not None:
            tensors.append(tensors[spec.alias])
        elif wants(spec.path):
            tensors.append(_read(reader, spec, is_borrowing, device))
        else:
            tensors.append(None)
        if on_progress is not None and tensors[-1] is not None:
            on_progress(bytes_of(spec))
    return unflatten(decode_skeleton(content.skeleton), decode_values(content.values), tensors)


def _stretches(specs: Sequence[TensorSpec], wants: Callable[[str], bool], given: Mapping[int, torch.Tensor]) -> list[tuple[int, int]]:
    """The stretches of the stream with the tensors that are wanted and not given, each once."""
    sources = dict.fromkeys(index if spec.alias is None else spec.alias for index, spec in enumerate(specs) if wants(spec.path))
    return [(shard.start, shard.length) for index in sources if index not in given for shard in specs[index].shards if shard.length]


def sketch_tree(reader: Reader, specs: Sequence[TensorSpec], *, wants: Callable[[str], bool]) -> tuple[Any, list[torch.Tensor | None]]:
    """A tree of tensors with the state's shapes and types but without its values, in memory that is never touched; and its tensors by
    index."""
    content = reader.manifest.content
    sources = dict.fromkeys(index if spec.alias is None else spec.alias for index, spec in enumerate(specs) if wants(spec.path))
    sizes = {index: stored_bytes(dtype_of(specs[index].dtype), specs[index].shape, specs[index].strides) for index in sources}
    untouched = torch.from_numpy(np.empty(max((1, *sizes.values())), np.uint8))
    tensors: list[torch.Tensor | None] = [None] * len(specs)
    for index, spec in enumerate(specs):
        if index in sizes:
            tensors[index] = rebuild(untouched[: sizes[index]], spec)
        elif spec.alias is not None and wants(spec.path):
            tensors[index] = tensors[spec.alias]
    return unflatten(decode_skeleton(content.skeleton), decode_values(content.values), tensors, is_sketch=True), tensors


def read_flat(reader: Reader, spec: TensorSpec) -> torch.Tensor:
    """The stored bytes of a tensor that is not tied to an earlier one, checked. The caller may only read them, until the reader is closed.

    A tensor of several shards is put together in separate memory.
    """
    return assemble(spec, lambda shard: _flat(reader, shard.start, shard.length, is_borrowing=True))


def _read(reader: Reader, spec: TensorSpec, is_borrowing: bool, device: torch.device | str | None) -> torch.Tensor:
    is_lent = is_borrowing or not is_whole(spec)  # several shards are copied together anyway
    tensor = rebuild(assemble(spec, lambda shard: _flat(reader, shard.start, shard.length, is_lent)), spec)
    return tensor if device is None else tensor.to(device)


def _flat(reader: Reader, start: int, length: int, is_borrowing: bool) -> torch.Tensor:
    """The bytes of a tensor: in place if that is allowed, else gathered from their chunks."""
    if length == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    view = reader.loan(start, length) if is_borrowing else reader.span(start, length)
    if view is not None and (is_borrowing or not view.readonly):
        return over(view)
    flat = torch.empty(length, dtype=torch.uint8, device="cpu")
    reader.gather(start, memoryview(flat.numpy().data))
    return flat


def over(view: memoryview) -> torch.Tensor:
    """The bytes of ``view`` as a tensor over its memory. If that is read-only, which torch cannot express, callers must not write."""
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_ubyte * view.nbytes).from_address(address), dtype=torch.uint8)
