"""The arena: memory for states, prefaulted once and used again and again, in page-aligned slots of one chunk each.

Copying into memory that was touched before is an order of magnitude faster than into fresh pages. So the whole budget is
one reserved mapping, of which a growing part is *warm*: ``warm_up``, ``make_real`` or the first write makes it real, and it is not
given back before ``close``. Forked children (workers of a data loader) do not see the arena, so they do not pay for copy-on-write of it.

It uses huge pages, which a state is written from with a third of the processor time. A physical machine makes them real at 22 GB/s, and
small ones at 3 GB/s. A virtual machine may have to ask its host for each huge page, at 0.5 to 1.1 GB/s. So if huge pages come slowly,
slots that a capture waits for get small ones, which ``merge_pages`` makes huge later.
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
from itertools import islice
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

_libc = ctypes.CDLL(None)
_MADV_COLLAPSE = 25

_TRIES = 8
"""How often to try to make the pages of a slot huge: the kernel refuses while a write to disk reads from them."""

_SLOW_S = 0.003
"""The processor time, in seconds, from which a slot counts as slow to become real: small pages take half of it, huge ones a tenth or three
times as much."""

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
        self._are_huge_pages_slow = False
        self._small: dict[int, int] = {}  # the slots that were given small pages, and how often to try yet to make them huge
        self._view = memoryview(reserved)[start : start + self.capacity * CHUNK_BYTES]
        with torch.inference_mode(False):  # a tensor made in that mode cannot be written to outside of it
            self.flat = torch.frombuffer(self._view, dtype=torch.uint8)
        """All slots as one tensor; only acquired slots may be read."""
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
        """The number of slots that ``acquire`` would give with this ``within``; ``reach(0)`` counts those that are free and warm."""
        with self._lock:
            return self._reach(within)

    @property
    def warm(self) -> int:
        """The number of slots that are or were in use, or were warmed up: these take memory of the machine."""
        with self._lock:
            return self._warm

    def acquire(self, count: int, prefer: Sequence[int] = (), *, within: int | None = None) -> list[int] | None:
        """``count`` slots, or None if fewer are free; those released last come first, since they are warm.

        With ``within``, no more slots than that are warm afterwards, unless they are now (0: only slots that are warm already are given).
        Free slots of ``prefer`` come first, in that order. The others are in rising order, so that chunks that
        follow each other often lie together. Slots that were never touched become real when they are written to.

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
                    if fresh:
                        self._put_below(fresh)
                        self._untouched.update(fresh)
                    taken = self._take(count, prefer)
                    break
            self._changed.wait_for(lambda: not self._is_coming(count, most))  # a few ms: another thread is touching them right now
        if fresh:
            self._register()
        return taken

    def make_real(self, slots: Iterable[int]) -> None:
        """Touch those of these acquired slots that were never touched, before anything is copied to them, which is faster than copying."""
        if not self._untouched or self._pinned is not None:  # registered memory is real
            return
        for slot in slots:
            if slot in self._untouched:
                self._touch(slot, is_awaited=True)
                with self._lock:
                    self._untouched.discard(slot)

    def warm_up(self, count: int = 1) -> bool:
        """Touch ``count`` more slots before they are needed, on a background thread; False if none is cold any more.

        It writes to each page, because ``MADV_POPULATE_WRITE`` would hold up every ``mmap`` and ``munmap`` of the process, which a training
        calls all the time, until everything is touched (290 ms for 64 MiB, where writing holds nothing up).
        """
        with self._lock:
            self._check_open()
            fresh = self._widen(count)
            self._coming += len(fresh)
        try:
            for slot in fresh:
                self._touch(slot, is_awaited=False)
            self._register()
        finally:
            with self._lock:
                self._coming -= len(fresh)
                if not self._is_closed:
                    self._put_below(fresh)
            self._changed.ring()
        return bool(fresh)

    @property
    def has_small_pages(self) -> bool:
        """Whether ``merge_pages`` has something to do."""
        return bool(self._small) and self._pinned is None  # registered memory cannot move

    def merge_pages(self) -> bool:
        """Make the pages of one slot huge, on a background thread; its contents stay, and whoever uses it may go on. False if there is no
        such slot, or if the kernel refuses for now.

        That takes as long as it takes to make fresh huge pages real. The kernel holds up each ``mmap`` and ``munmap`` of the process
        meanwhile, so call it seldom.
        """
        with self._lock:
            if self._is_closed or not self.has_small_pages:
                return False
            slot, reserved, flat = next(iter(self._small)), self._reserved, self.flat  # ``flat`` keeps the memory until this returns
            tries = self._small.pop(slot)
        assert reserved is not None
        start, length = self._start + slot * CHUNK_BYTES, CHUNK_BYTES
        with suppress(OSError):
            reserved.madvise(mmap.MADV_HUGEPAGE, start, length)  # where the next call is not known, the kernel may do it by itself
        if not _libc.madvise(ctypes.c_void_p(flat.data_ptr() + slot * CHUNK_BYTES), ctypes.c_size_t(length), _MADV_COLLAPSE):
            return True
        if tries > 1:
            with self._lock:
                if not self._is_closed:
                    self._small[slot] = tries - 1  # after the others
        return False

    def pin(self, registrar: Registrar) -> None:
        """Register warm slots from now on, so that copies from and to devices are asynchronous; only the first call counts.

        Call it only once something lies on a device, since registering creates a context there.
        """
        with self._lock:
            self._check_open()
            if self._pinned is not None:
                return
            self._pinned = Pinned(registrar, self._view)
            weakref.finalize(self, self._pinned.let_go)
        self._register()

    @property
    def is_pinned(self) -> bool:
        """Whether warm slots are registered, as far as the driver allows."""
        return self._pinned is not None

    def is_joint(self, first: int, last: int) -> bool:
        """Whether the slots from ``first`` to ``last`` may be copied from or to a device in one go."""
        pinned = self._pinned
        return pinned is None or pinned.is_joint(self._address + first * CHUNK_BYTES, self._address + last * CHUNK_BYTES)

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back; does nothing once the arena is closed.

        :raises InvalidInput: one of them is free already; then none is given back.
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
        """``release`` the slots and empty the list or dict, so that a caller that was interrupted may call it again."""
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
        """A slot as ``uint8`` tensors of these sizes, one after the other; the same objects as long as ``sizes`` is the same object.

        Making and dropping dozens of views costs as much as copying what they show.
        """
        known = self._pieces.get(slot)
        if known is None or known[0] is not sizes:
            known = self._pieces[slot] = sizes, torch.split(self.tensor(slot)[: sum(sizes)], list(sizes))
        return known[1]

    def memory(self, slot: int, length: int = CHUNK_BYTES) -> memoryview:
        """The ``length`` bytes from the beginning of a slot on, which may reach into the slots after it."""
        self._check_open()
        return self._view[slot * CHUNK_BYTES : slot * CHUNK_BYTES + length]

    def close(self) -> None:
        """Release the memory as soon as no view of it is left, after unregistering what is registered; idempotent."""
        with self._registering, self._lock:
            if self._is_closed:
                return
            self._forget()
        self._changed.ring()
        if self._pinned is not None:
            self._pinned.let_go()

    def _touch(self, slot: int, *, is_awaited: bool) -> None:
        """Make one of the caller's slots real; its contents are lost. ``is_awaited``: the training may have to wait for it."""
        with self._lock:
            reserved, flat = self._reserved, self.flat
        if reserved is None:
            return  # closed meanwhile
        is_small = is_awaited and self._are_huge_pages_slow
        if is_small:
            with suppress(OSError):  # a kernel without huge pages
                reserved.madvise(mmap.MADV_NOHUGEPAGE, self._start + slot * CHUNK_BYTES, CHUNK_BYTES)
        began = time.thread_time()
        flat[slot * CHUNK_BYTES : (slot + 1) * CHUNK_BYTES : mmap.PAGESIZE].zero_()
        if time.thread_time() - began > _SLOW_S and hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._are_huge_pages_slow = True
        if is_small:
            with self._lock:
                if not self._is_closed:
                    self._small[slot] = _TRIES

    # All below runs under the lock, except ``_register``

    def _reach(self, within: int) -> int:
        return len(self._free) + max(0, min(within, self.capacity) - self._warm)

    def _is_coming(self, count: int, within: int) -> bool:
        return self._reach(within) < count <= self._reach(within) + self._coming

    def _widen(self, count: int) -> range:
        """Count up to ``count`` more slots as warm, which they are or soon will be; returns them."""
        first, self._warm = self._warm, min(self._warm + count, self.capacity)
        return range(first, self._warm)

    def _put_below(self, fresh: range) -> None:
        """Put fresh slots under those that were used before, so that they are taken last, and from the bottom up."""
        self._free = dict.fromkeys((*reversed(fresh), *self._free))

    def _take(self, count: int, prefer: Sequence[int]) -> list[int]:
        """Take ``count`` slots; that many must be free."""
        taken = [slot for slot in dict.fromkeys(prefer) if slot in self._free][:count] if prefer else []
        for slot in taken:
            del self._free[slot]
        last = sorted(islice(reversed(self._free), count - len(taken)))
        for slot in last:
            del self._free[slot]
        return [*taken, *last]

    def _register(self) -> None:
        """Pin what is warm and not pinned yet. Registrations begin and end at slots, so that each chunk lies in one."""
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
        self._small = {}
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _leave_to_parent(self) -> None:
        """Forget the arena in a forked child, where none of it exists."""
        if self._pinned is not None:
            self._pinned.leave_to_parent()
        self._forget()


def _reserve(length: int) -> mmap.mmap:
    """Address space for the arena; a page takes memory only once it is touched."""
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
    # The child may map other memory at the addresses of these: they must never be unmapped there.
    for reserved in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(reserved))
    for arena in list(_arenas):
        arena._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
