"""The arena: budget, reuse, threads, and processes forked from its owner."""

from __future__ import annotations

import ctypes
import itertools
import operator
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import Closed, InvalidInput
from datastates.store.arena import Arena
from datastates.store.pinning import DeviceRegistrar


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(20 * CHUNK_BYTES + 5)
    yield arena
    arena.close()


def acquire(arena: Arena, count: int) -> list[int]:
    slots = arena.acquire(count)
    assert slots is not None
    return slots


def test_the_budget_is_never_exceeded(arena: Arena) -> None:
    assert (arena.capacity, arena.available) == (20, 20)
    slots = acquire(arena, 19)
    assert len(set(slots)) == 19
    assert arena.acquire(2) is None
    assert arena.available == 1
    arena.release(slots)
    assert arena.available == 20


def test_a_budget_below_one_chunk_is_refused() -> None:
    with pytest.raises(InvalidInput, match=str(CHUNK_BYTES)):
        Arena(CHUNK_BYTES - 1)


def test_what_was_used_last_is_used_next(arena: Arena) -> None:
    acquire(arena, 2)
    warm = acquire(arena, 3)
    arena.release(warm)
    assert set(acquire(arena, 3)) == set(warm)


def test_preferred_slots_come_first_where_they_are_free(arena: Arena) -> None:
    slots = acquire(arena, 10)
    arena.release(slots[:8])
    preferred = arena.acquire(4, prefer=[slots[7], slots[9], slots[2], slots[7]])
    assert preferred is not None
    assert preferred[:2] == [slots[7], slots[2]]
    assert len(set(preferred)) == 4
    assert not {slots[8], slots[9]} & set(preferred)


def test_slots_are_pages_that_do_not_overlap(arena: Arena) -> None:
    slots = acquire(arena, 20)
    for slot in slots:
        tensor = arena.tensor(slot)
        assert tensor is arena.tensor(slot)
        assert tensor.data_ptr() % 4096 == 0
        assert tensor.shape == (CHUNK_BYTES,)
        tensor.fill_(slot)
    for slot in slots:
        assert torch.frombuffer(arena.memory(slot), dtype=torch.uint8).unique().tolist() == [slot]
        assert arena.memory(slot, 100).nbytes == 100
        assert arena.flat[slot * CHUNK_BYTES] == slot


def test_the_pieces_of_a_slot_are_the_same_objects_until_other_sizes_are_asked_for(arena: Arena) -> None:
    (slot,) = acquire(arena, 1)
    sizes, others = [3, 5], [3, 5]
    pieces = arena.pieces(slot, sizes)
    assert all(map(operator.is_, pieces, arena.pieces(slot, sizes)))
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    assert bytes(arena.memory(slot, 8)) == bytes([1, 1, 1, 2, 2, 2, 2, 2])
    anew = arena.pieces(slot, others)
    assert anew[0] is not pieces[0]
    assert [piece.tolist() for piece in anew] == [[1, 1, 1], [2, 2, 2, 2, 2]]


def test_a_slot_is_released_once(arena: Arena) -> None:
    slots = acquire(arena, 3)
    arena.release(slots[:1])
    with pytest.raises(InvalidInput, match=f"slot {slots[0]} "):
        arena.release([slots[1], slots[0]])
    with pytest.raises(InvalidInput):
        arena.release([19])
    assert arena.available == 18


def test_memory_is_warmed_up_ahead_of_need_as_far_as_the_budget_goes(arena: Arena) -> None:
    assert (arena.warm, arena.reach(0)) == (0, 0)
    assert arena.warm_up(3)
    assert (arena.warm, arena.reach(0), arena.available) == (3, 3, 20)
    assert arena.warm_up(500)
    assert not arena.warm_up()
    assert (arena.warm, arena.reach(0)) == (20, 20)
    assert len(acquire(arena, 20)) == 20


def test_only_so_much_becomes_warm_as_whoever_asks_allows(arena: Arena) -> None:
    arena.warm_up(2)
    assert arena.acquire(3, within=0) is None
    slots = arena.acquire(2, within=0)
    assert slots is not None
    assert arena.acquire(4, within=5) is None
    assert (arena.reach(5), arena.reach(500)) == (3, 18)
    assert arena.acquire(3, within=5) is not None
    assert arena.warm == 5
    arena.release(slots)
    assert set(acquire(arena, 2)) == set(slots), "what is warm is used before what is cold"
    assert arena.warm == 5


def pretend(monkeypatch: pytest.MonkeyPatch, taken_s: Iterable[float]) -> None:
    """Touching the next slots takes so long, as the arena sees it."""
    now = iter(itertools.accumulate(itertools.chain.from_iterable((1.0, each) for each in taken_s)))
    monkeypatch.setattr(time, "thread_time", lambda: next(now))


def advised_small(arena: Arena, slot: int) -> bool:
    """Whether the kernel is told to give a slot small pages."""
    return "nh" in mapped(arena, slot)["VmFlags"].split()


def huge_bytes(arena: Arena) -> int:
    """The bytes of huge pages in the mapping where the arena begins."""
    return int(mapped(arena, 0)["AnonHugePages"].split()[0]) << 10


def mapped(arena: Arena, slot: int) -> dict[str, str]:
    """What the kernel says of the mapping in which a slot lies."""
    address, within, said = arena.tensor(slot).data_ptr(), False, dict[str, str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(span[1], 16) <= address < int(span[2], 16)
        elif within:
            name, _, value = line.partition(":")
            said[name] = value
    return said


def merges_pages() -> bool:
    """Whether this kernel has huge pages, and merges small ones when it is told to: from Linux 6.1 on."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    numbers = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    return numbers >= [6, 1] and enabled.exists() and "[never]" not in enabled.read_text()


def test_slots_are_touched_before_they_are_copied_to_and_only_once(arena: Arena) -> None:
    slots = acquire(arena, 3)
    arena.tensor(slots[1]).fill_(7)
    arena.make_real([slots[0], slots[2]])
    assert arena.tensor(slots[1]).eq(7).all(), "what was not named may hold something"
    arena.tensor(slots[0]).fill_(7)
    arena.make_real([slots[0], slots[2]])
    assert arena.tensor(slots[0]).eq(7).all()
    arena.warm_up(1)
    arena.release(slots)
    arena.tensor(3).fill_(7)
    arena.make_real(acquire(arena, 4))
    assert arena.tensor(3).eq(7).all(), "what was warmed up was touched"


@pytest.mark.parametrize("slow", [False, True])
def test_slots_that_are_awaited_get_small_pages_once_huge_ones_come_slowly(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    pretend(monkeypatch, [0.0001, 0.009 if slow else 0.0002, 0.009, 0.0015, 0.0015])
    slots = acquire(arena, 3)
    arena.make_real(slots[:2])
    arena.make_real(slots[2:])
    arena.warm_up(1)
    arena.make_real(acquire(arena, 2))
    small = [advised_small(arena, slot) for slot in (*slots, 3, 4)]
    assert small == ([False, False, True, False, True] if slow else [False, False, False, False, True])


def test_pages_are_merged_and_their_contents_stay(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [0.009, 0.0015, 0.0015])
    slots = acquire(arena, 3)
    arena.make_real(slots)
    assert arena.has_small_pages
    arena.tensor(slots[1]).fill_(7)
    while arena.has_small_pages:
        arena.merge_pages()
    if merges_pages():
        assert huge_bytes(arena) >= 2 * CHUNK_BYTES
    assert not any(advised_small(arena, slot) for slot in slots)
    assert arena.tensor(slots[1]).eq(7).all()
    arena.merge_pages()


def test_pages_that_the_kernel_will_not_merge_are_left_in_the_end(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [0.009, 0.0015, 0.0015])
    asked: list[int] = []

    class Refusing:
        def madvise(self, address: ctypes.c_void_p, _length: object, _advice: int) -> int:
            asked.append(address.value or 0)
            return -1

    monkeypatch.setattr("datastates.store.arena._libc", Refusing())
    slots = acquire(arena, 3)
    arena.make_real(slots)
    while arena.has_small_pages:
        arena.merge_pages()
    addresses = [arena.tensor(slot).data_ptr() for slot in slots[1:]]
    assert asked == addresses * 8, "each in its turn"


def test_pages_of_a_closed_arena_are_left_alone(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [0.009, 0.0015])
    arena.make_real(acquire(arena, 2))
    arena.close()
    assert not arena.has_small_pages
    arena.merge_pages()


def test_whoever_needs_slots_that_are_being_touched_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(2 * CHUNK_BYTES)
    touching, may_end = threading.Event(), threading.Event()

    def register() -> None:
        touching.set()
        assert may_end.wait(30)

    monkeypatch.setattr(arena, "_register", register)
    threads = [threading.Thread(target=arena.warm_up, args=(2,))]
    threads[0].start()
    assert touching.wait(30)
    assert (arena.reach(0), arena.available) == (0, 2)
    found: list[list[int] | None] = []
    threads.append(threading.Thread(target=lambda: found.append(arena.acquire(2))))
    threads[1].start()
    assert arena.acquire(3) is None
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert found == [[0, 1]]
    arena.close()


def test_threads_never_get_the_same_slot(arena: Arena) -> None:
    errors: list[str] = []

    def work(mark: int) -> None:
        for _ in range(200):
            slots = arena.acquire(4)
            if slots is None:
                continue
            for slot in slots:
                arena.tensor(slot)[:8].fill_(mark)
            if any(arena.tensor(slot)[:8].ne(mark).any() for slot in slots):
                errors.append(f"{mark}: {slots}")
            arena.release(slots)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert arena.available == 20


def test_a_closed_arena_refuses_but_what_was_handed_out_stays(arena: Arena) -> None:
    (slot,) = acquire(arena, 1)
    view = arena.memory(slot)
    view[:3] = b"abc"
    sizes = [3, 5]
    arena.pieces(slot, sizes)
    arena.close()
    arena.close()
    assert bytes(view[:3]) == b"abc"
    for use in (lambda: arena.acquire(1), lambda: arena.memory(slot), lambda: arena.tensor(slot), lambda: arena.pieces(slot, sizes)):
        with pytest.raises(Closed):
            use()


_FORKED = """
import ctypes, gc, mmap, os, sys
from datastates.errors import Closed
from datastates.content.manifest import CHUNK_BYTES
from datastates.store.arena import Arena

arena = Arena(8 * CHUNK_BYTES)
(slot,) = arena.acquire(1)
arena.tensor(slot).fill_(7)
view = arena.memory(slot)
address, length = arena.tensor(slot).data_ptr(), CHUNK_BYTES

def mapped():
    for line in open("/proc/self/maps"):
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False

assert mapped()
child = os.fork()
if child == 0:
    assert not mapped(), "the child sees the arena"
    for use in (lambda: arena.acquire(1), lambda: arena.tensor(slot), lambda: arena.memory(slot)):
        try:
            use()
        except Closed:
            continue
        raise SystemExit("the child may use the arena")
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    mine = libc.mmap(address, length, 3, 0x22, -1, 0)
    assert mine == address, "the child has other memory at the arena's place"
    view.release()
    arena.release([slot])
    arena.close()
    del arena
    gc.collect()
    ctypes.memset(mine, 1, length)  # still mapped
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert arena.tensor(slot).eq(7).all()
arena.release([slot])
"""


def test_a_forked_child_neither_sees_nor_breaks_the_arena() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_pinned_arena_takes_asynchronous_copies() -> None:
    arena = Arena(20 * CHUNK_BYTES)
    arena.pin(DeviceRegistrar(torch.device("cuda")))
    for slot in acquire(arena, 20):
        assert arena.tensor(slot).is_pinned()
        source = torch.full((CHUNK_BYTES,), slot, dtype=torch.uint8, device="cuda")
        arena.tensor(slot).copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert arena.tensor(slot).eq(slot).all()
    arena.close()
