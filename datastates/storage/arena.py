"""The arena: memory for states, prefaulted once and used again and again.

The *slot* of a chunk is its first byte in the arena. Each run of chunks takes the shortest free
extent that is long enough (best fit), and extents that are free next to each other are merged. The
arena counts memory in bytes. It becomes warm in *blocks* of 4 MiB.

Copying into memory that was touched before is an order of magnitude faster than into fresh pages.
The whole budget is one reserved mapping. A growing part of it is *warm*: ``warm_up``, ``make_real``
or the first write makes it real. ``close`` gives it back. Forked children (workers of a data
loader) do not see the arena, so they do not pay for copy-on-write of it.

It uses huge pages, because writing a state from them takes a third of the processor time. A
physical machine makes them real at 22 GB/s, and small ones at 3 GB/s. A virtual machine may have to
ask its host for each huge page, at 0.5 to 1.1 GB/s. If huge pages come slowly, blocks that a
capture waits for get small pages. ``merge_pages`` makes them huge later.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch

from datastates.errors import Closed, InvalidInput, OverBudget, Unavailable
from datastates.state.manifest import CHUNK_BYTES
from datastates.system.devices import devices
from datastates.system.interrupts import Mutex
from datastates.system.threads import Notifier

from .shared_memory import SharedMemory

_logger = logging.getLogger(__name__)


class Registrar(Protocol):
    """Registers stretches of host memory.

    A stretch must stay mapped until it is unregistered; two never overlap."""

    def register(self, address: int, length: int) -> None:
        """Pin a stretch.

        :raises Unavailable: the driver refuses; says why.
        """

    def unregister(self, address: int) -> None:
        """Unpin the stretch that begins at this address. Raises nothing."""


class DeviceRegistrar:
    """Registers memory with the driver, in the context of a device that is in use, so that no
    other device gets a context."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._devices = device, devices()

    def register(self, address: int, length: int) -> None:
        """Pin a stretch, for all devices."""
        try:
            self._devices.register(self._device, address, length)
        except RuntimeError as exc:  # including torch's own CudaError
            raise Unavailable(
                f"{length} bytes of memory cannot be registered with {self._device} ({exc})"
            ) from exc

    def unregister(self, address: int) -> None:
        """Unpin a stretch.

        This fails only while the driver shuts down, which releases everything."""
        with suppress(RuntimeError):
            self._devices.unregister(self._device, address)


class Pinned:
    """The registered stretches of one mapping. ``owner`` keeps them mapped: it is held until all
    are unregistered.

    Once a registration is refused, no more are tried, and copies use pageable memory, which is
    slower but just as correct.
    """

    def __init__(self, registrar: Registrar, owner: object) -> None:
        self._registrar, self._owner = registrar, owner
        self._starts: list[int] = []
        self.is_refused = False
        self._lock = threading.Lock()

    def add(self, address: int, length: int) -> None:
        """Register the stretch that follows all others; does nothing once one was refused."""
        with self._lock:
            if self.is_refused or self._owner is None:
                return
            try:
                self._registrar.register(address, length)
            except Unavailable as exc:
                self.is_refused = True
                _logger.warning(
                    "%s: captures from a device go through pageable memory, and take longer", exc
                )
                return
            self._starts.append(address)

    def unregister_all(self) -> None:
        """Unregister all, then release the owner; idempotent."""
        with self._lock:
            starts, self._starts = self._starts, []
            for start in starts:
                self._registrar.unregister(start)
            self._owner = None

    def leave_to_parent(self) -> None:
        """Start afresh in a forked child, where nothing is registered, and where a thread that
        held the lock does not exist."""
        self._lock, self._starts, self._owner = threading.Lock(), [], None


_HUGE_BYTES = 2 << 20
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_ALIGNED_BYTES = 64
"""The alignment of short chunks."""

_PAGED_BYTES = 64 << 10
"""Chunks from this length on begin at a page, so that direct I/O takes them as they are."""

_libc = ctypes.CDLL(None)
_MADV_COLLAPSE = 25

_TRIES = 8
"""How often to try to make the pages of a block huge: the kernel refuses while a write to disk
reads from them."""

_SLOW_S = 0.003
"""The processor time, in seconds, from which a block counts as slow to become real: small pages
take half of it, huge ones a tenth or three times as much."""

_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Arena:
    """Slots for chunks within a budget of bytes. Every method is safe from any thread; none waits
    for memory to become free.

    ``capacity`` is the budget, in whole blocks. All sizes are in bytes.

    With ``shared`` memory, a slot is the same offset in every process that maps it. The arena does
    not close its descriptors. Memory that another process filled is taken over by ``occupy``.
    """

    def __init__(self, budget_bytes: int, shared: SharedMemory | None = None) -> None:
        self.shared = shared
        budget_bytes = budget_bytes if shared is None else shared.size
        self.capacity = budget_bytes // CHUNK_BYTES * CHUNK_BYTES
        if not self.capacity:
            raise InvalidInput(
                f"a memory budget of {budget_bytes} bytes holds no chunk: give at least"
                f" {CHUNK_BYTES}"
            )
        reserved = _reserve(self.capacity + _HUGE_BYTES, shared)
        address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        start = -address % _HUGE_BYTES if shared is None else 0
        self._address, self._start = address + start, start
        self._reserved: mmap.mmap | None = reserved
        self._are_huge_pages_slow = False
        self._small: dict[
            int, int
        ] = {}  # the blocks that were given small pages, and how often to try yet to make them huge
        self._view = memoryview(reserved)[start : start + self.capacity]
        with torch.inference_mode(False):
            # a tensor made in that mode cannot be written to outside of it
            self.flat = torch.frombuffer(self._view, dtype=torch.uint8)
        """The whole arena as one tensor; only acquired slots may be read."""
        self._pieces: dict[int, tuple[Sequence[int], Sequence[torch.Tensor]]] = {}
        self._taken: dict[int, int] = {}  # the size of what was acquired at each slot
        self._used = 0
        self._extents: dict[
            int, int
        ] = {}  # what is warm and free: the end of each extent, by its start
        self._starts: dict[int, int] = {}  # the start of each, by its end
        self._by_size: list[tuple[int, int]] = []  # the size and start of each, sorted
        self._untouched: set[int] = set()
        self._warm = 0
        self._coming = 0
        self._pinned: Pinned | None = None
        self._registered = 0
        self._edges: list[int] = []  # where registrations begin
        self._is_closed = False
        self._changed = Notifier()
        self._lock, self._registering = Mutex(), Mutex()
        _arenas.add(self)

    @property
    def available(self) -> int:
        """The bytes that are free, including those that were never touched."""
        return self.capacity - self._used

    @property
    def warm(self) -> int:
        """The size of the blocks that are or were in use, or were warmed up: these take memory
        of the machine."""
        with self._lock:
            return self._warm

    def fits(self, lengths: Sequence[int], *, within: int) -> bool:
        """Whether ``acquire`` would find slots for chunks of these lengths now."""
        return not self._missing(lengths, within)

    def acquire(self, lengths: Sequence[int], *, within: int | None = None) -> list[int] | None:
        """The slots of chunks of these lengths, or None if they do not all fit. Warm memory comes
        first.

        ``within`` bounds the bytes that are warm afterwards, rounded up to blocks. 0 gives only
        memory that is warm already. Consecutive chunks of one length are often adjacent. Memory
        that was never touched becomes real when it is written to.

        :raises Closed: the arena was closed, or belongs to the parent of this forked process.
        """
        most = self.capacity if within is None else within
        while True:
            with self._lock:
                self._check_open()
                before = self._warm
                slots, runs, missing = self._take(lengths, most)
                if not missing:
                    self._taken.update(
                        (slot, taken_by(length))
                        for slot, length in zip(slots, lengths, strict=True)
                    )
                    self._used += sum(map(taken_by, lengths))
                    if self._warm > before:
                        self._untouched.update(
                            slot
                            for slot in slots
                            if slot >= before and self._taken[slot] == CHUNK_BYTES
                        )
                    break
                self._undo(runs, before)
                if missing > self._coming:
                    return None
            # a few ms: another thread is touching them right now
            self._changed.wait_for(
                lambda: self._is_closed or not 0 < self._missing(lengths, most) <= self._coming
            )
        return slots

    def occupy(self, taken: Mapping[int, int]) -> None:
        """Acquire these slots, with their lengths, of shared memory that another process filled.
        Nothing may have been acquired before.

        :raises InvalidInput: they overlap, or are not all in this memory.
        """
        with self._lock:
            self._check_open()
            end = 0
            for slot, length in sorted(taken.items()):
                if slot < end or length <= 0 or slot + taken_by(length) > self.capacity:
                    raise InvalidInput(f"slot {slot} with {length} bytes is not in this memory")
                end = slot + taken_by(length)
            self._widen(-(-end // CHUNK_BYTES), self.capacity)
            end = 0
            for slot, length in sorted(taken.items()):
                self._add(end, slot)
                end = slot + taken_by(length)
                self._taken[slot] = taken_by(length)
                self._used += taken_by(length)
            self._add(end, self._warm)

    def make_real(self, slots: Iterable[int]) -> None:
        """Touch the acquired slots of whole chunks that were never touched. This is faster than
        copying to untouched memory."""
        if not self._untouched:
            return
        for block in slots:
            if block in self._untouched:
                self._touch(block, is_awaited=True)
                with self._lock:
                    self._untouched.discard(block)

    def warm_up(self, count: int = 1) -> bool:
        """Touch ``count`` more blocks before they are needed, on a background thread; False if none
        is cold any more.

        It writes to each page. ``MADV_POPULATE_WRITE`` would block every ``mmap`` and ``munmap`` of
        the process until all pages are touched (290 ms for 64 MiB). A training calls these all the
        time.
        """
        with self._lock:
            self._check_open()
            fresh = self._widen(count, self.capacity)
            self._coming += len(fresh) * CHUNK_BYTES
        try:
            for block in fresh:
                self._touch(block, is_awaited=False)
        finally:
            with self._lock:
                self._coming -= len(fresh) * CHUNK_BYTES
                if not self._is_closed:
                    self._join(fresh.start, fresh.stop)
            self._changed.notify_all()
        return bool(fresh)

    @property
    def has_small_pages(self) -> bool:
        """Whether ``merge_pages`` has something to do."""
        return bool(self._small) and self._pinned is None  # registered memory cannot move

    def merge_pages(self) -> bool:
        """Make the pages of one block huge, on a background thread. Its contents stay, and it may
        be used meanwhile. False if there is no such block, or if the kernel refuses for now.

        This takes as long as making fresh huge pages real. The kernel blocks each ``mmap`` and
        ``munmap`` of the process meanwhile, so call it rarely.
        """
        with self._lock:
            if self._is_closed or not self.has_small_pages:
                return False
            # ``flat`` keeps the memory until this returns
            block, reserved, flat = (
                next(iter(self._small)),
                self._reserved,
                self.flat,
            )
            tries = self._small.pop(block)
        assert reserved is not None
        start, length = self._start + block, CHUNK_BYTES
        with suppress(OSError):
            # the kernel may do it without the next call
            reserved.madvise(mmap.MADV_HUGEPAGE, start, length)
        if not _libc.madvise(
            ctypes.c_void_p(flat.data_ptr() + block), ctypes.c_size_t(length), _MADV_COLLAPSE
        ):
            return True
        if tries > 1:
            with self._lock:
                if not self._is_closed:
                    self._small[block] = tries - 1  # after the others
        return False

    def pin(self, registrar: Registrar) -> None:
        """``register`` with this registrar, so that copies from and to devices are asynchronous;
        only the registrar of the first call counts.

        Call it only if something is on a device already, since registering creates a context there.
        """
        with self._lock:
            self._check_open()
            if self._pinned is None:
                self._pinned = Pinned(registrar, self._view)
                weakref.finalize(self, self._pinned.unregister_all)
        self.register()

    def register(self) -> None:
        """Pin what is warm and not pinned yet, once ``pin`` was called. Whoever copies from or to a
        device calls it first. Captures do so in the background, because it makes memory real.

        Registrations begin and end at blocks, and no chunk crosses from one into another.
        """
        if self._pinned is None:
            return
        with self._registering:
            with self._lock:
                first, last = self._registered, self._warm
                if self._is_closed or first == last:
                    return
                if not self._pinned.is_refused:
                    self._edges.append(first)
                self._registered = last
            self._pinned.add(self._address + first, last - first)

    @property
    def is_pinned(self) -> bool:
        """Whether ``register`` registers warm blocks, as far as the driver allows."""
        return self._pinned is not None

    def is_joint(self, first: int, last: int) -> bool:
        """Whether the bytes from ``first`` to ``last`` are, or will be, in one registration. A copy
        from or to a device must not cross into another."""
        return self._pinned is None or (
            bisect_right(self._edges, first) == bisect_right(self._edges, last)
            and (first < self._registered) == (last < self._registered)
        )

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back; does nothing once the arena is closed.

        :raises InvalidInput: one of them is free already; then none is given back.
        """
        with self._lock:
            if self._is_closed:
                return
            given = dict.fromkeys(slots)
            wrong = [slot for slot in given if slot not in self._taken]
            if wrong:
                raise InvalidInput(f"slot {wrong[0]} is not acquired: each slot is released once")
            self._untouched.difference_update(given)
            for slot in sorted(given):
                size = self._taken.pop(slot)
                self._used -= size
                self._join(slot, slot + size)

    def take_back(self, slots: list[int] | dict[Any, int]) -> None:
        """``release`` the slots and empty the list or dict, so that a caller that was
        interrupted may call it again."""
        with self._lock:
            self.release(slots.values() if isinstance(slots, dict) else slots)
            slots.clear()

    def tensor(self, slot: int, length: int = CHUNK_BYTES) -> torch.Tensor:
        """The ``length`` bytes from a slot on as a ``uint8`` tensor."""
        self._check_open()
        return self.flat[slot : slot + length]

    def pieces(self, slot: int, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """A chunk as ``uint8`` tensors of these sizes, one after the other; for a whole chunk, the
        same objects as long as ``sizes`` is the same object.

        Making and dropping dozens of views costs as much as copying what they show.
        """
        known = self._pieces.get(slot)
        if known is None or known[0] is not sizes:
            known = sizes, torch.split(self.tensor(slot, sum(sizes)), list(sizes))
            if self._taken.get(slot) == CHUNK_BYTES:
                # there are few of these, but many short chunks
                if len(self._pieces) * CHUNK_BYTES >= self.capacity:
                    self._pieces.clear()
                self._pieces[slot] = known
        return known[1]

    def memory(self, slot: int, length: int = CHUNK_BYTES) -> memoryview:
        """The ``length`` bytes from a slot on, which may reach into the slots after it."""
        self._check_open()
        return self._view[slot : slot + length]

    def slot_of(self, view: memoryview) -> int:
        """The slot at which a view of this arena's memory begins."""
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return address - self._address

    def close(self) -> None:
        """Release the memory as soon as no view of it is left, after unregistering what is
        registered; idempotent."""
        with self._registering, self._lock:
            if self._is_closed:
                return
            self._forget()
        self._changed.notify_all()
        if self._pinned is not None:
            self._pinned.unregister_all()

    def _touch(self, block: int, *, is_awaited: bool) -> None:
        """Make one of the caller's blocks real; its contents are lost.

        ``is_awaited``: the training may have to wait for it."""
        with self._lock:
            reserved, flat = self._reserved, self.flat
        if reserved is None:
            return  # closed meanwhile
        is_small = is_awaited and self._are_huge_pages_slow
        if is_small:
            with suppress(OSError):  # a kernel without huge pages
                reserved.madvise(mmap.MADV_NOHUGEPAGE, self._start + block, CHUNK_BYTES)
        began = time.thread_time()
        flat[block : block + CHUNK_BYTES : mmap.PAGESIZE].zero_()
        is_shared = self.shared is not None  # its pages are of one size for good
        is_slow = time.thread_time() - began > _SLOW_S
        if is_slow and not is_shared and hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._are_huge_pages_slow = True
        if is_small:
            with self._lock:
                if not self._is_closed:
                    self._small[block] = _TRIES

    def _missing(self, lengths: Sequence[int], within: int) -> int:
        """How many bytes of chunks of these lengths find no slot."""
        with self._lock:
            before = self._warm
            _, runs, missing = self._take(lengths, within)
            self._undo(runs, before)
            return missing

    # All below runs under the lock

    def _take(
        self, lengths: Sequence[int], within: int
    ) -> tuple[list[int], list[tuple[int, int]], int]:
        """Take slots for chunks, the longest first; returns them, the extents that they take,
        and how many bytes have none."""
        sizes = [taken_by(length) for length in lengths]
        slots, runs, missing = [0] * len(sizes), list[tuple[int, int]](), 0
        for size, group in groupby(
            sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True), key=sizes.__getitem__
        ):
            indices = list(group)
            while indices:
                start, count = self._take_run(size, len(indices), within)
                if not count:
                    missing += size * len(indices)
                    break
                runs.append((start, start + size * count))
                for number in range(count):
                    slots[indices[number]] = start + size * number
                del indices[:count]
        return slots, runs, missing

    def _take_run(self, size: int, count: int, within: int) -> tuple[int, int]:
        """Take the slot of up to ``count`` chunks of one size: of all in one extent, or else of as
        many as the longest extent holds.

        Longer chunks begin at pages, at the low end of the extent. Short chunks are at its high
        end, so that its start stays at a page. Memory that is not warm is taken last.
        """
        unit = _ALIGNED_BYTES if size < _PAGED_BYTES else mmap.PAGESIZE
        while True:
            wanted = size * count
            for least in (wanted, wanted + unit, self.capacity):
                at = min(bisect_left(self._by_size, (least, 0)), len(self._by_size) - 1)
                if at < 0:
                    break
                length, start = self._by_size[at]
                first = start + -start % unit
                found = min(count, (start + length - first) // size)
                if found == count or (found > 0 and least == self.capacity):
                    if size < _PAGED_BYTES:
                        first = start + length - size * found
                    end = self._drop(start)[1]
                    self._add(start, first)
                    self._add(first + size * found, end)
                    return first, found
            top = self._warm
            if self._is_one(top):
                top = self._starts.get(top, top)
            fresh = self._widen(max(1, -(-(wanted - self._warm + top) // CHUNK_BYTES)), within)
            if not fresh:
                return 0, 0
            self._join(fresh.start, fresh.stop)

    def _undo(self, runs: Iterable[tuple[int, int]], warm: int) -> None:
        """Give back what ``_take`` took when so many bytes were warm."""
        for start, end in runs:
            self._join(start, end)
        while self._warm > warm:
            start, _ = self._drop(self._starts[self._warm])
            self._warm = max(start, warm)
            self._add(start, self._warm)

    def _widen(self, count: int, within: int) -> range:
        """Count up to ``count`` more blocks as warm, which they are or soon will be; returns
        them."""
        first = self._warm
        self._warm = max(
            first,
            min(
                first + count * CHUNK_BYTES, -(-within // CHUNK_BYTES) * CHUNK_BYTES, self.capacity
            ),
        )
        return range(first, self._warm, CHUNK_BYTES)

    def _join(self, start: int, end: int) -> None:
        """Make an extent free, together with those next to it."""
        if start in self._starts and self._is_one(start):
            start, _ = self._drop(self._starts[start])
        if end in self._extents and self._is_one(end):
            _, end = self._drop(end)
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if start < end:
            self._extents[start], self._starts[end] = end, start
            insort(self._by_size, (end - start, start))

    def _drop(self, start: int) -> tuple[int, int]:
        """Take out a free extent; returns where it begins and ends."""
        end = self._extents.pop(start)
        del self._starts[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        return start, end

    def _is_one(self, boundary: int) -> bool:
        """Whether a chunk may cross this byte."""
        return boundary % CHUNK_BYTES != 0 or self.is_joint(boundary - 1, boundary)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(
                "the arena was closed, or belongs to the parent of this process: open the"
                " repository here"
            )

    def _forget(self) -> None:
        self._is_closed = True
        self._taken, self._pieces, self._extents, self._starts, self._by_size = {}, {}, {}, {}, []
        self._warm = self.capacity
        self._view, self._reserved = memoryview(b""), None
        self._small = {}
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")


def taken_by(length: int) -> int:
    """The bytes of an arena that a chunk of this length takes."""
    unit = _ALIGNED_BYTES if length < _PAGED_BYTES else mmap.PAGESIZE
    return -(-length // unit) * unit


def _reserve(length: int, shared: SharedMemory | None) -> mmap.mmap:
    """Address space for the arena; a page takes memory only once it is touched."""
    try:
        if shared is not None:
            reserved = mmap.mmap(shared.fd, shared.size)
        else:
            reserved = mmap.mmap(
                -1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            )
    except OSError as exc:
        raise OverBudget(
            f"{length} bytes of memory cannot be reserved ({exc}): lower memory_bytes"
        ) from exc
    _maps.add(reserved)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
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
        if arena._pinned is not None:
            arena._pinned.leave_to_parent()
        arena._forget()


os.register_at_fork(after_in_child=_after_fork)
