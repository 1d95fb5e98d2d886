"""Ranks that know each other through torch.distributed."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections import Counter
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from datastates.errors import InvalidInput, Unavailable
from datastates.values import shown

from .groups import PATIENCE_S, Group, bytes_of, check

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["TorchGroup", "initialized"]

_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""How many groups were made over the same ranks, by torch's group of all ranks: each gets a name in its store that none had before."""


class TorchGroup(Group):
    """The ranks of torch.distributed, all of them or those of ``of``; making one is collective among these ranks, and the others need not
    call it.

    It communicates over gloo on connections of its own, on the CPU. So it never interferes with the collectives of the training, and works
    where those are NCCL's. When a rank dies, the others raise as soon as one of them misses it; when one hangs, after ``timeout_s``.

    :param of: a group of torch.distributed, whose ranks are the ranks of this one.
    :raises InvalidInput: torch.distributed is not initialised, or ``of`` is not one of its groups, or this process is not in it.
    :raises Unavailable: a rank did not come, or cannot be connected to.
    """

    def __init__(self, of: ProcessGroup | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        dist = initialized()
        if dist is None:
            raise InvalidInput("torch.distributed is not initialised: call torch.distributed.init_process_group() before")
        self._ranks = _ranks_of(dist, of)
        self._rank, self._size = self._ranks.index(dist.get_rank()), len(self._ranks)
        is_everyone = self._ranks == list(range(dist.get_world_size()))
        self._members = None if is_everyone else tuple(self._ranks)
        self._is_closed = False
        self._gloo: Any
        try:
            self._gloo = dist.ProcessGroupGloo(_store(dist, self._ranks), self._rank, self._size, timedelta(seconds=timeout_s))
        except RuntimeError as exc:
            raise Unavailable(
                f"rank {self._rank} of {self._size} did not meet the others: make the group again, on every rank: {exc}"
            ) from exc

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def members(self) -> tuple[int, ...] | None:
        return self._members

    def exchange(self, value: bytes) -> list[bytes]:
        import torch

        check(value, is_closed=self._is_closed)
        lengths = torch.zeros(self._size, dtype=torch.int64)
        self._wait("allgather", list(lengths.split(1)), torch.tensor([len(value)]))
        longest = int(lengths.max())
        if not longest:
            return [b""] * self._size
        given, got = torch.zeros(longest, dtype=torch.uint8), torch.empty(self._size, longest, dtype=torch.uint8)
        if value:
            given[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self._wait("allgather", list(got), given)
        return [row[: int(length)].numpy().tobytes() for row, length in zip(got, lengths, strict=True)]

    def pass_on(self, buffer: memoryview | bytearray | bytes | torch.Tensor, root: int, to: Collection[int] | None = None) -> None:
        check(is_closed=self._is_closed)
        data = _as_tensor(bytes_of(buffer))
        if to is None:
            self._wait("broadcast", data, root)
        elif self._rank == root:
            for rank in sorted({*to} - {root}):
                self._wait("send", [data], rank, 0)
        elif self._rank in to:
            self._wait("recv", [data], root, 0)

    def close(self) -> None:
        self._is_closed, self._gloo = True, None

    def _wait(self, collective: str, *arguments: object) -> None:
        if self._gloo is None:
            raise Unavailable("a rank of this group did not come before: make another group, on every rank")
        try:
            getattr(self._gloo, collective)(*arguments).wait()
        except RuntimeError as exc:
            self._gloo = None  # closes this rank's connections, so ranks that wait for it notice now
            raise Unavailable(f"rank {self._rank} of {self._size} lost another one, which hangs or died: {exc}") from exc


def initialized() -> Any:
    """``torch.distributed`` if this process initialised it, else None; never imports it for that."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _ranks_of(dist: Any, of: ProcessGroup | None) -> list[int]:
    """The numbers by which torch.distributed knows the ranks of the group, by rank.

    :raises InvalidInput: it is no group of torch.distributed, or this process is not in it.
    """
    if of is None:
        return list(range(dist.get_world_size()))
    try:
        is_in = dist.get_rank(of) >= 0
        ranks: list[int] = dist.get_process_group_ranks(of) if is_in else []
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise InvalidInput(
            f"of is {shown(of)}, which is no group of torch.distributed: give one that torch.distributed.new_group() made and nobody"
            " destroyed, or mesh.get_group() of a mesh"
        ) from exc
    if not is_in:
        raise InvalidInput("this process is not in the group of torch.distributed that was given: give it one that it is in")
    return ranks


def _store(dist: Any, ranks: list[int]) -> Any:
    """Where these ranks, and no group that was made before, tell each other their addresses."""
    made = _made.setdefault(dist.group.WORLD, Counter())
    made[tuple(ranks)] += 1
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()
    return dist.PrefixStore(f"datastates/{digest}/{made[tuple(ranks)]}", dist.distributed_c10d._get_default_store())


def _as_tensor(view: memoryview) -> torch.Tensor:
    """The bytes as a tensor, without a copy."""
    import numpy as np
    import torch

    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if not view.readonly:
        return torch.frombuffer(view, dtype=torch.uint8)
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data  # the root's, which is only read: torch warns of memory that is read-only
    return torch.frombuffer((ctypes.c_ubyte * view.nbytes).from_address(address), dtype=torch.uint8)
