"""Buffers that differ from rank to rank, such as the running statistics of a batch norm: one tensor for each rank holds those of all
models.

A model's tree has them too, with the values of the first rank that holds them: a restore elsewhere needs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from datastates.content.layouts import is_wrapping
from datastates.content.spread import give, is_spread, stand_in
from datastates.system.notices import say

from .names import join

__all__ = ["OWN_BUFFERS", "OwnBuffers", "part_of", "put_back"]

OWN_BUFFERS = "own_buffers"
"""The top-level name: ``bytes`` are those of each rank, ``places`` say whose they are and where each begins."""

MOST_BYTES = 64 << 10
"""A larger buffer is not a statistic but a mask or a table: those are equal on all ranks, and stored once."""

_ALIGNED = 16


class OwnBuffers:
    """The buffers of this rank of ``size``, gathered at each capture on the training thread. Rank 0 logs once that there are some."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._form: object = None
        self._views: list[torch.Tensor] = []
        self._tree: dict[str, object] = {}

    def tree(self, models: Iterable[tuple[str, Mapping[str, object]]]) -> dict[str, object]:
        """The buffers as a state holds them, as they are now; empty if the models, given by path as their trees, have none."""
        found = [(path, name, buffer) for path, tree in models for name, buffer in _buffers(tree)]
        if not found:
            return {}
        form = [(path, name, buffer.shape, buffer.dtype) for path, name, buffer in found]
        if form != self._form:
            self._lay_out(found)
            if self._form is None and self._rank == 0:
                say(f"{len(found)} small buffers, such as {join(*found[0][:2])}, may differ from rank to rank: states keep those of each")
            self._form = form
        with torch.no_grad():
            torch._foreach_copy_(self._views, [buffer for _, _, buffer in found])
        return self._tree

    def _lay_out(self, found: list[tuple[str, str, torch.Tensor]]) -> None:
        places, begin = [], 0
        for path, name, buffer in found:
            places.append((path, name, begin))
            begin += -(-buffer.nbytes // _ALIGNED) * _ALIGNED
        mine = torch.zeros(begin, dtype=torch.uint8, device=found[0][2].device)
        self._views = [_view(mine, begin, buffer) for (_, _, begin), (_, _, buffer) in zip(places, found, strict=True)]
        held = [give(mine, [rank]) if rank == self._rank else stand_in(mine, [rank]) for rank in range(self._size)]
        self._tree = {"places": places, "bytes": held}


def part_of(path: str) -> int | None:
    """The rank to which a stored tensor belongs, by its path; None if it is not such a tensor."""
    start = f"{OWN_BUFFERS}/bytes/"
    return int(path.removeprefix(start)) if path.startswith(start) else None


def put_back(tree: dict[str, Any], rank: int | None) -> None:
    """Take the buffers of all ranks out of a stored tree; those of ``rank``, if any, replace the ones that its models have."""
    kept = tree.pop(OWN_BUFFERS, None)
    mine = kept["bytes"][rank] if kept and rank is not None else None
    if kept is None or mine is None:
        return
    for path, name, begin in kept["places"]:
        holder = _holder(tree, path)
        stored = holder.get(name) if holder is not None else None
        if isinstance(stored, torch.Tensor):
            holder[name] = _view(mine, begin, stored)


def _holder(tree: dict[str, Any], path: str) -> Any:
    """The model's own part of a stored tree."""
    here: Any = tree
    for part in path.split("/"):
        children = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list | tuple) else ()
        here = next((child for key, child in children if join("", key) == part), None)
    return here if isinstance(here, dict) else None


def _buffers(tree: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, found in tree.items():
        if (
            not isinstance(found, torch.Tensor)
            or isinstance(found, torch.nn.Parameter)
            or is_spread(found)
            or is_wrapping(found)
            or found.is_meta
        ):
            continue
        if found.layout is torch.strided and not found.is_quantized and found.dtype is not torch.bool and 0 < found.nbytes <= MOST_BYTES:
            yield name, found


def _view(flat: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return flat[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
