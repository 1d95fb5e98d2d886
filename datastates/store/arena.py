"""The arena: memory for states, prefaulted once and used again and again, in page-aligned slots of one chunk each.

Copying into memory that was touched before is an order of magnitude faster than into fresh pages. So the whole budget is
one reserved mapping, made real slab by slab as it is first needed, in huge pages where the kernel gives them, and never given
back before ``close``. Forked children (workers of a data loader) do not see it: neither do they pay for copy-on-write of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from datastates.errors import Closed, InvalidInput, OverBudget
from datastates.manifest import CHUNK_BYTES

__all__ = ["Arena"]

_LEAST_SLAB, _MOST_SLAB = 4, 16
"""Slots that are touched in one go: as many as are asked for, within these. Small states then take little memory."""

_HUGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_libc = ctypes.CDLL(None, use_errno=True)
_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Arena:
    """A pool of slots within a budget of bytes. Every method is safe from any thread; none waits for a slot.

    With ``pin`` slabs are registered with CUDA, so that copies from a device are asynchronous.
    """

    def __init__(self, budget_bytes: int, *, pin: bool = False) -> None:
        self.capacity = budget_bytes // CHUNK_BYTES
        if self.capacity < 1:
            raise InvalidInput(f"a memory budget of {budget_bytes} bytes holds no chunk: give at least {CHUNK_BYTES}")
        self._pin = pin
        reserved = _reserve(self.capacity * CHUNK_BYTES + _HUGE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        start = -address % _HUGE_BYTES
        self._address = address + start
        self._view = memoryview(reserved)[start : start + self.capacity * CHUNK_BYTES]
        with torch.inference_mode(False):  # whoever makes it in that mode could not write to it out of it
            self.flat = torch.frombuffer(self._view, dtype=torch.uint8)
        """All slots as one tensor; only what is acquired may be read."""
        self._tensors: list[torch.Tensor | None] = [None] * self.capacity
        self._free: dict[int, None] = {}
        self._warm = 0
        self._pinned: list[int] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        _arenas.add(self)

    @property
    def available(self) -> int:
        """How many slots are free, those that were never touched included."""
        with self._lock:
            return len(self._free) + self.capacity - self._warm

    @property
    def is_warm(self) -> bool:
        """Whether the whole budget has been touched."""
        with self._lock:
            return self._warm == self.capacity

    def acquire(self, count: int, prefer: Sequence[int] = ()) -> list[int] | None:
        """``count`` slots, or None when fewer are free; those released last come first, being warm.

        Slots of ``prefer`` that are free are among them, in front and in that order; the others rise, so that chunks which
        follow each other often lie together.

        :raises Closed: the arena was closed, or belongs to the parent of this forked process.
        """
        while True:
            with self._lock:
                self._check_open()
                if len(self._free) + self.capacity - self._warm < count:
                    return None
                if len(self._free) >= count:
                    return self._take(count, prefer)
            self._grow(count)

    def reserve(self, count: int) -> None:
        """Make ``count`` free slots warm ahead of time, as far as the budget goes; for a thread that has time."""
        self._grow(count)

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back; nothing once the arena is closed.

        :raises InvalidInput: one of them is free already; none is then given back.
        """
        with self._lock:
            if self._is_closed:
                return
            given = dict.fromkeys(slots)
            wrong = [slot for slot in given if slot in self._free or not 0 <= slot < self._warm]
            if wrong:
                raise InvalidInput(f"slot {wrong[0]} is not acquired: each slot is released once")
            self._free.update(given)

    def tensor(self, slot: int) -> torch.Tensor:
        """A slot as a ``uint8`` tensor of ``CHUNK_BYTES``; the same object every time."""
        tensor = self._tensors[slot]
        if tensor is None:
            self._check_open()
            tensor = self._tensors[slot] = self.flat[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]
        return tensor

    def memory(self, slot: int, length: int = CHUNK_BYTES) -> memoryview:
        """The first ``length`` bytes of a slot, and of those that lie behind it."""
        self._check_open()
        return self._view[slot * CHUNK_BYTES : slot * CHUNK_BYTES + length]

    def close(self) -> None:
        """Let go of the memory as soon as nobody's view of it is left; idempotent."""
        with self._growing, self._lock:
            if self._is_closed:
                return
            self._forget()
        while self._pinned:
            torch.cuda.check_error(int(_cuda().cudaHostUnregister(self._pinned.pop())))

    def _take(self, count: int, prefer: Sequence[int]) -> list[int]:
        """Runs under the lock, with ``count`` slots free."""
        taken = [slot for slot in dict.fromkeys(prefer) if slot in self._free][:count] if prefer else []
        for slot in taken:
            del self._free[slot]
        taken += sorted(self._free.popitem()[0] for _ in range(count - len(taken)))
        return taken

    def _grow(self, count: int) -> None:
        """Touch slabs until ``count`` slots are free and warm, or the budget is used up.

        The lock is let go between slabs: a capture that needs a few slots does not wait for who warms up many.
        """
        while True:
            with self._growing:
                with self._lock:
                    self._check_open()
                    first, free = self._warm, len(self._free)
                last = min(first + min(max(count - free, _LEAST_SLAB), _MOST_SLAB), self.capacity)
                if free >= count or first == last:
                    return
                self._populate(first, last)
                with self._lock:
                    self._warm = last
                    # Under what was used before, so that this is taken last, and from the bottom up.
                    self._free = dict.fromkeys((*range(last - 1, first - 1, -1), *self._free))

    def _populate(self, first: int, last: int) -> None:
        start, length = first * CHUNK_BYTES, (last - first) * CHUNK_BYTES
        if not _advise(self._address + start, length, _MADV_POPULATE_WRITE):
            self.flat[start : start + length : mmap.PAGESIZE].zero_()
        if self._pin:
            torch.cuda.check_error(int(_cuda().cudaHostRegister(self._address + start, length, 0)))
            self._pinned.append(self._address + start)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the arena was closed, or belongs to the parent of this process: open the repository here")

    def _forget(self) -> None:
        self._is_closed = True
        self._free, self._tensors = {}, [None] * self.capacity
        self._warm = self.capacity
        self._view = memoryview(b"")
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _leave_to_parent(self) -> None:
        """In a forked child: none of it is there, and a thread that held our locks is not either."""
        self._lock, self._growing = threading.Lock(), threading.Lock()
        self._pinned.clear()
        self._forget()


def _reserve(length: int) -> mmap.mmap:
    """Address space for the arena; a page of memory behind it only where one is touched."""
    try:
        reserved = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as exc:
        raise OverBudget(f"{length} bytes of memory cannot be reserved ({exc}): lower memory_bytes") from exc
    _maps.add(reserved)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                reserved.madvise(getattr(mmap, advice))
            except OSError:  # a kernel without huge pages
                continue
    return reserved


def _advise(address: int, length: int, advice: int) -> bool:
    """madvise without the interpreter's lock, which ``mmap.madvise`` holds; False where the kernel does not know the advice."""
    return sys.platform == "linux" and not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)


def _cuda() -> Any:
    runtime: Any = torch.cuda.cudart  # without types
    return runtime()


def _after_fork() -> None:
    # What the child maps next may lie where these did: they must never be unmapped there.
    for reserved in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reserved))
    for arena in list(_arenas):
        arena._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
