"""Ranks that know each other through torch.distributed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from datastates.errors import InvalidInput, Unavailable

from .groups import PATIENCE_S, Group, bytes_of, check

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["TorchGroup", "initialized"]


class TorchGroup(Group):
    """The ranks of torch.distributed, all of them or those of ``of``; making one is collective among all ranks of the job.

    It communicates over gloo in a group of its own, on the CPU. So it never interferes with the collectives of the training, and works
    where those are NCCL's. When a rank dies, the others raise as soon as one of them misses it; when one hangs, after ``timeout_s``.

    :param of: a group of torch.distributed, whose ranks are the ranks of this one.
    :raises InvalidInput: torch.distributed is not initialised, or this process is not in ``of``.
    """

    def __init__(self, of: ProcessGroup | None = None, *, timeout_s: float = PATIENCE_S) -> None:
        dist = initialized()
        if dist is None:
            raise InvalidInput("torch.distributed is not initialised: call torch.distributed.init_process_group() before")
        if of is not None and dist.get_rank(of) < 0:
            raise InvalidInput("this process is not in the group of torch.distributed that was given: give it one that it is in")
        self._dist = dist
        self._ranks = dist.get_process_group_ranks(dist.group.WORLD if of is None else of)
        self._group: Any = dist.new_group(
            self._ranks, backend="gloo", timeout=timedelta(seconds=timeout_s), use_local_synchronization=of is not None
        )
        self._rank: int = dist.get_rank(self._group)
        self._size = len(self._ranks)
        is_everyone = self._ranks == list(range(dist.get_world_size()))
        self._members = None if is_everyone else tuple(self._ranks)
        self._is_closed, self._is_broken = False, False
        # its name since torch 2.13, where the older one warns
        self._gather: Any = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

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
        self._wait(self._gather, lengths, torch.tensor([len(value)]))
        longest = int(lengths.max())
        if not longest:
            return [b""] * self._size
        given, got = torch.zeros(longest, dtype=torch.uint8), torch.empty(self._size * longest, dtype=torch.uint8)
        if value:
            given[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self._wait(self._gather, got, given)
        return [row[: int(length)].numpy().tobytes() for row, length in zip(got.view(-1, longest), lengths, strict=True)]

    def pass_on(self, buffer: memoryview | bytearray | bytes | torch.Tensor, root: int, to: Collection[int] | None = None) -> None:
        check(is_closed=self._is_closed)
        data = _as_tensor(bytes_of(buffer))
        if to is None:
            self._wait(self._dist.broadcast, data, group_src=root)
        elif self._rank == root:
            for rank in sorted({*to} - {root}):
                self._wait(self._dist.send, data, group_dst=rank)
        elif self._rank in to:
            self._wait(self._dist.recv, data, group_src=root)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._let_go()

    def _wait(self, collective: Callable[..., object], *tensors: torch.Tensor, **options: int) -> None:
        if self._is_broken:
            raise Unavailable("a rank of this group did not come before: make another group, on every rank")
        try:
            collective(*tensors, group=self._group, **options)
        except RuntimeError as exc:
            self._is_broken = True
            self._let_go()  # closes this rank's connections, so ranks that wait for it notice now
            raise Unavailable(f"rank {self._rank} of {self._size} lost another one, which hangs or died: {exc}") from exc

    def _let_go(self) -> None:
        if self._dist.is_initialized() and self._group is not None:
            self._dist.destroy_process_group(self._group)
        self._group = None


def initialized() -> Any:
    """``torch.distributed`` if this process initialised it, else None; never imports it for that."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


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
