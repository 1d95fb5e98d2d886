"""The arena: memory for states, prefaulted once and used again and again, in page-aligned slots of one chunk each.

Copying into memory that was touched before is an order of magnitude faster than into fresh pages. So the whole budget is
one reserved mapping, of which a growing part is *warm*: made real by ``warm_up``, ``make_real`` or by whoever writes to it first, and never
given back before ``close``. Forked children (workers of a data loader) do not see it: neither do they pay for copy-on-write of it.

Its pages are huge where the kernel gives them and that is quick. A machine of its own makes huge pages real at 22 GB/s and small ones at 3.
A virtual machine may have to ask its host for each huge page, at 0.5 to 1.1 GB/s. So when huge pages come slowly, small ones follow.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import Closed, InvalidInput, OverBudget
from datastates.system.bell import Bell
from datastates.system.interrupts import Mutex

from .pinning import Pinned, Registrar

__all__ = ["Arena"]

_HUGE_BYTES = 2 << 20
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_SLOW_S = 0.003
"""Processor time after which a slot was slow to become real: small pages take half of it, huge ones a tenth or three times as much."""

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Arena:
    """A pool of slots within a budget of bytes. Every method is safe from any thread; none waits for a slot."""

    def __init__(self, budget_bytes: int) -> None:
        self.capacity = budget_bytes // CHUNK_BYTES
        if self.capacity < 1:
            raise InvalidInput(f"a memory budget of {budget_bytes} bytes holds no chunk: give at least {CHUNK_BYTES}")
        reserved = _reserve(self.capacity * CHUNK_BYTES + _HUGE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        start = -address % _HUGE_BYTES
        self._address, self._start = address + start, start
        self._reserved: mmap.mmap | None = reserved
        self._has_small_pages = False
        self._view = memoryview(reserved)[start : start + self.capacity * CHUNK_BYTES]
        with torch.inference_mode(False):  # whoever makes it in that mode could not write to it out of it
            self.flat = torch.frombuffer(self._view, dtype=torch.uint8)
        """All slots as one tensor; only what is acquired may be read."""
        self._tensors: list[torch.Tensor | None] = [None] * self.capacity
        self._pieces: dict[int, tuple[Sequence[int], Sequence[torch.Tensor]]] = {}
        self._free: dict[int, None] = {}
        self._untouched: set[int] = set()
        self._warm = 0
        self._coming = 0
        self._pinned: Pinned | None = None
        self._registered = 0
        self._is_closed = False
        self._changed = Bell()
        self._lock, self._registering = Mutex(), Mutex()
        _arenas.add(self)

    @property
    def available(self) -> int:
        """The number of free slots, including those that were never touched."""
        with self._lock:
            return len(self._free) + self._coming + self.capacity - self._warm

    def reach(self, within: int) -> int:
        """The number of slots that ``acquire`` would give with this ``within``; ``reach(0)`` are free and warm."""
        with self._lock:
            return self._reach(within)

    @property
    def warm(self) -> int:
        """The number of slots that are or were in use, or were warmed up: what the arena takes of the machine's memory."""
        with self._lock:
            return self._warm

    def acquire(self, count: int, prefer: Sequence[int] = (), *, within: int | None = None) -> list[int] | None:
        """``count`` slots, or None when fewer are free; those released last come first, being warm.

        With ``within`` no more than so many slots are warm afterwards (0: only such as are warm already are given), unless they are now.
        Slots of ``prefer`` that are free are among them, in front and in that order; the others rise, so that chunks which
        follow each other often lie together. Slots that were never touched are made real as they are written to.

        :raises Closed: the arena was closed, or belongs to the parent of this forked process.
        """
        most = self.capacity if within is None else within
        while True:
            with self._lock:
                self._check_open()
                if not self._is_coming(count, most):
                    if self._reach(most) < count:
                        return None
                    fresh = self._widen(count - len(self._free)) if len(self._free) < count else range(0)
                    self._put_below(fresh)
                    self._untouched.update(fresh)
                    taken = self._take(count, prefer)
                    break
            self._changed.wait_for(lambda: not self._is_coming(count, most))  # a few ms: they are being touched this very moment
        if fresh:
            self._register()
        return taken

    def make_real(self, slots: Iterable[int]) -> None:
        """Touch those of these acquired slots that were never touched, before anything is copied to them: sooner done than by copying."""
        if not self._untouched or self._pinned is not None:  # what is registered is real
            return
        for slot in slots:
            if slot in self._untouched:
                self._touch(slot)
                with self._lock:
                    self._untouched.discard(slot)

    def warm_up(self, count: int = 1) -> bool:
        """Touch ``count`` more slots before they are needed, for a thread that has time; False if none is cold any more.

        Page by page and by writing: ``MADV_POPULATE_WRITE`` would hold up every ``mmap`` and ``munmap`` of the process, which a training
        makes all the time, until all of it is touched (290 ms for 64 MiB, where writing holds nobody up).
        """
        with self._lock:
            self._check_open()
            fresh = self._widen(count)
            self._coming += len(fresh)
        try:
            for slot in fresh:
                self._touch(slot)
            self._register()
        finally:
            with self._lock:
                self._coming -= len(fresh)
                if not self._is_closed:
                    self._put_below(fresh)
            self._changed.ring()
        return bool(fresh)

    def pin(self, registrar: Registrar) -> None:
        """Register warm slots from now on, so that copies from and to devices are asynchronous; only the first call counts.

        Not done before something lies on a device: registering makes a context there.
        """
        with self._lock:
            self._check_open()
            if self._pinned is not None:
                return
            self._pinned = Pinned(registrar, self._view)
            weakref.finalize(self, self._pinned.let_go)
        self._register()

    def is_joint(self, first: int, last: int) -> bool:
        """Whether all from slot ``first`` to slot ``last`` may be copied from or to a device in one go."""
        pinned = self._pinned
        return pinned is None or pinned.is_joint(self._address + first * CHUNK_BYTES, self._address + last * CHUNK_BYTES)

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

    def take_back(self, slots: list[int] | dict[Any, int]) -> None:
        """``release``, and the list or dict is empty afterwards: to be called again by callers that were interrupted."""
        with self._lock:
            self.release(slots.values() if isinstance(slots, dict) else slots)
            slots.clear()

    def tensor(self, slot: int) -> torch.Tensor:
        """A slot as a ``uint8`` tensor of ``CHUNK_BYTES``; the same object every time."""
        tensor = self._tensors[slot]
        if tensor is None:
            self._check_open()
            tensor = self._tensors[slot] = self.flat[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES]
        return tensor

    def pieces(self, slot: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """A slot as ``uint8`` tensors of these sizes, one behind the other; the same objects as long as the same ``sizes`` object asks.

        To make dozens of views, and to drop them, costs as much as to copy what they show.
        """
        known = self._pieces.get(slot)
        if known is None or known[0] is not sizes:
            known = self._pieces[slot] = sizes, torch.split(self.tensor(slot)[: sum(sizes)], list(sizes))
        return known[1]

    def memory(self, slot: int, length: int = CHUNK_BYTES) -> memoryview:
        """The first ``length`` bytes of a slot, and of those that lie behind it."""
        self._check_open()
        return self._view[slot * CHUNK_BYTES : slot * CHUNK_BYTES + length]

    def close(self) -> None:
        """Let go of the memory as soon as nobody's view of it is left; idempotent. What is registered is unregistered before."""
        with self._registering, self._lock:
            if self._is_closed:
                return
            self._forget()
        self._changed.ring()
        if self._pinned is not None:
            self._pinned.let_go()

    def _touch(self, slot: int) -> None:
        """Make a slot of the caller's real; whatever it holds is lost."""
        with self._lock:
            reserved, flat = self._reserved, self.flat
        if reserved is None:
            return  # closed meanwhile
        if self._has_small_pages:
            with suppress(OSError):  # a kernel without huge pages
                reserved.madvise(mmap.MADV_NOHUGEPAGE, self._start + slot * CHUNK_BYTES, CHUNK_BYTES)
        began = time.thread_time()
        flat[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES : mmap.PAGESIZE].zero_()
        if time.thread_time() - began > _SLOW_S and hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._has_small_pages = True

    # All below runs under the lock, but for ``_register``

    def _reach(self, within: int) -> int:
        return len(self._free) + max(0, min(within, self.capacity) - self._warm)

    def _is_coming(self, count: int, within: int) -> bool:
        return self._reach(within) < count <= self._reach(within) + self._coming

    def _widen(self, count: int) -> range:
        """Up to ``count`` more slots are warm, or soon will be."""
        first, self._warm = self._warm, min(self._warm + count, self.capacity)
        return range(first, self._warm)

    def _put_below(self, fresh: range) -> None:
        """Under what was used before, so that they are taken last, and from the bottom up."""
        self._free = dict.fromkeys((*reversed(fresh), *self._free))

    def _take(self, count: int, prefer: Sequence[int]) -> list[int]:
        """With ``count`` slots free."""
        taken = [slot for slot in dict.fromkeys(prefer) if slot in self._free][:count] if prefer else []
        for slot in taken:
            del self._free[slot]
        taken += sorted(self._free.popitem()[0] for _ in range(count - len(taken)))
        return taken

    def _register(self) -> None:
        """Pin what is warm and is not pinned yet; slots begin and end registrations, so that a chunk lies in one."""
        if self._pinned is None:
            return
        with self._registering:
            with self._lock:
                if self._is_closed:
                    return
                first, last = self._registered, self._warm
            if first < last:
                self._pinned.add(self._address + first * CHUNK_BYTES, (last - first) * CHUNK_BYTES)
                self._registered = last

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the arena was closed, or belongs to the parent of this process: open the repository here")

    def _forget(self) -> None:
        self._is_closed = True
        self._free, self._tensors, self._pieces = {}, [None] * self.capacity, {}
        self._warm = self.capacity
        self._view, self._reserved = memoryview(b""), None
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _leave_to_parent(self) -> None:
        """Forget the arena in a forked child: none of it is there."""
        if self._pinned is not None:
            self._pinned.leave_to_parent()
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


def _after_fork() -> None:
    # What the child maps next may lie where these did: they must never be unmapped there.
    for reserved in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reserved))
    for arena in list(_arenas):
        arena._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
