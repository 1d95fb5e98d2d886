"""The arena: budget, reuse, threads, and processes forked from its owner."""

from __future__ import annotations

import ctypes
import itertools
import operator
import platform
import random
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from datastates.errors import Closed, InvalidInput
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena, DeviceRegistrar
from tests.support.effort import examples, part


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(20 * CHUNK_BYTES + 5)
    yield arena
    arena.close()


def acquire(arena: Arena, count: int) -> list[int]:
    slots = arena.acquire([CHUNK_BYTES] * count)
    assert slots is not None
    return slots


def reach(arena: Arena, blocks: int) -> int:
    """How many whole chunks find room while no more blocks than these are warm."""
    return max(
        count
        for count in range(21)
        if arena.fits([CHUNK_BYTES] * count, within=blocks * CHUNK_BYTES)
    )


def test_the_budget_is_never_exceeded(arena: Arena) -> None:
    assert arena.capacity == arena.available == 20 * CHUNK_BYTES
    slots = acquire(arena, 19)
    assert len(set(slots)) == 19
    assert arena.acquire([CHUNK_BYTES] * 2) is None
    assert arena.available == CHUNK_BYTES
    arena.release(slots)
    assert arena.available == 20 * CHUNK_BYTES


def test_a_budget_below_one_chunk_is_refused() -> None:
    with pytest.raises(InvalidInput, match=str(CHUNK_BYTES)):
        Arena(CHUNK_BYTES - 1)


def test_what_is_warm_is_used_before_what_is_not(arena: Arena) -> None:
    acquire(arena, 2)
    warm = acquire(arena, 3)
    arena.release(warm)
    assert acquire(arena, 3) == warm


def test_slots_are_pages_that_do_not_overlap(arena: Arena) -> None:
    slots = acquire(arena, 20)
    for number, slot in enumerate(slots):
        tensor = arena.tensor(slot)
        assert tensor.data_ptr() % 4096 == 0
        assert tensor.shape == (CHUNK_BYTES,)
        tensor.fill_(number)
    for number, slot in enumerate(slots):
        assert torch.frombuffer(arena.memory(slot), dtype=torch.uint8).unique().tolist() == [number]
        assert arena.memory(slot, 100).nbytes == 100
        assert arena.flat[slot] == number


MIX = [
    4096,
    5000,
    100_000,
    240_000,
    1_000_000,
    1_468_006,
    2_202_009,
    2_831_155,
    3 << 20,
    3_670_016,
    CHUNK_BYTES - 1,
    CHUNK_BYTES,
]
STATES = [
    *((size,) for size in MIX),
    (CHUNK_BYTES, 100_000),
    (CHUNK_BYTES, 2_202_009),
    (CHUNK_BYTES, 3 << 20, 1000),
]


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    "lines", part([STATES, *itertools.combinations_with_replacement(STATES, 2)]), ids=str
)
def test_at_least_100_of_128_mib_hold_states_whatever_their_sizes(
    lines: Sequence[tuple[int, ...]], is_warm: bool
) -> None:
    """The oldest leave for the newest, of lines that capture by turns and at random."""
    arena, chance = Arena(128 << 20), random.Random(5)
    if is_warm:
        arena.warm_up(32)
    held, total, least = deque[tuple[list[int], int]](), 0, 128 << 20
    for step in range(3 * (128 << 20) // max(50_000, *map(sum, lines))):
        lengths = lines[step % len(lines)] if step % 50 < 25 else chance.choice(lines)
        while (slots := arena.acquire(lengths)) is None:
            least = min(least, total)
            oldest, size = held.popleft()
            arena.release(oldest)
            total -= size
        held.append((slots, sum(lengths)))
        total += sum(lengths)
    assert least >= 100 << 20
    for slots, _ in held:
        arena.release(slots)
    assert arena.available == arena.capacity
    assert acquire(arena, 32) == [number * CHUNK_BYTES for number in range(32)]
    arena.close()


def test_a_failed_attempt_leaves_nothing_behind(arena: Arena) -> None:
    arena.acquire([100, 70_000])
    assert arena.warm == CHUNK_BYTES
    assert arena.acquire([70_000, 100, *[CHUNK_BYTES] * 20]) is None
    assert not arena.fits([CHUNK_BYTES] * 20, within=arena.capacity)
    assert arena.fits([CHUNK_BYTES] * 19, within=arena.capacity)
    assert arena.warm == CHUNK_BYTES
    assert len(acquire(arena, 19)) == 19


class ArenaMachine(RuleBasedStateMachine):
    """Chunks of any lengths come and go, and devices come; no two of them overlap, and none is
    lost."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(6 * CHUNK_BYTES)
        self.held: list[tuple[list[int], list[int]]] = []
        self.edges: list[int] = []

    @rule(
        lengths=st.lists(st.sampled_from([1, 64, 4000, 65_535, 65_536, 70_001, *MIX]), max_size=4),
        blocks=st.integers(0, 6),
    )
    def acquire(self, lengths: list[int], blocks: int) -> None:
        fits = self.arena.fits(lengths, within=blocks * CHUNK_BYTES)
        warm = self.arena.warm
        slots = self.arena.acquire(lengths, within=blocks * CHUNK_BYTES)
        assert (slots is not None) == fits
        assert self.arena.warm <= max(warm, blocks * CHUNK_BYTES)
        if slots is None:
            assert self.arena.warm == warm
        else:
            self.held.append((slots, lengths))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.arena.release(slots)
        if slots:
            with pytest.raises(InvalidInput):
                self.arena.release(slots)

    @rule()
    def warm_up(self) -> None:
        self.arena.warm_up()

    @rule()
    def pin(self) -> None:
        """Also what has become warm since."""
        self.arena.pin(self)

    def register(self, address: int, length: int) -> None:
        self.edges.append(address - self.arena.flat.data_ptr())

    def unregister(self, address: int) -> None:
        pass

    @invariant()
    def no_chunks_overlap_and_none_crosses_registrations(self) -> None:
        taken = sorted(
            (slot, slot + length)
            for slots, lengths in self.held
            for slot, length in zip(slots, lengths, strict=True)
        )
        for (start, end), (after, _) in itertools.pairwise([*taken, (self.arena.warm, 0)]):
            assert end <= after
            assert start % (4096 if end - start >= 65_536 else 64) == 0
            assert not any(start < edge < end for edge in self.edges)

    @invariant()
    def free_extents_are_what_is_not_taken_and_are_merged(self) -> None:
        extents = sorted(self.arena._extents.items())
        assert sorted((end - start, start) for start, end in extents) == self.arena._by_size
        assert {end: start for start, end in extents} == self.arena._starts
        assert (
            self.arena.available
            == sum(end - start for start, end in extents) + self.arena.capacity - self.arena.warm
        )
        assert all(
            end < after or end in {*self.edges, self.arena._registered}
            for (_, end), (after, _) in itertools.pairwise(extents)
        )

    def teardown(self) -> None:
        for slots, _ in self.held:
            self.arena.release(slots)
        assert self.arena.available == self.arena.capacity
        self.arena.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)


def test_the_pieces_of_a_whole_chunk_are_the_same_objects_until_other_sizes_are_asked_for(
    arena: Arena,
) -> None:
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


def test_the_pieces_of_short_chunks_are_not_kept(arena: Arena) -> None:
    slots = arena.acquire([8] * 1000)
    assert slots is not None
    sizes = [3, 5]
    for slot in slots:
        arena.pieces(slot, sizes)[1].fill_(slot // 64 % 100)
    assert all(bytes(arena.memory(slot, 8))[3:] == bytes([slot // 64 % 100] * 5) for slot in slots)
    assert len(arena._pieces) == 0


def test_a_slot_is_released_once(arena: Arena) -> None:
    slots = acquire(arena, 3)
    arena.release(slots[:1])
    with pytest.raises(InvalidInput, match=f"slot {slots[0]} "):
        arena.release([slots[1], slots[0]])
    with pytest.raises(InvalidInput):
        arena.release([19 * CHUNK_BYTES])
    assert arena.available == 18 * CHUNK_BYTES


def test_memory_is_warmed_up_ahead_of_need_as_far_as_the_budget_goes(arena: Arena) -> None:
    assert (arena.warm, reach(arena, 0)) == (0, 0)
    assert arena.warm_up(3)
    assert (arena.warm, reach(arena, 0), arena.available) == (3 * CHUNK_BYTES, 3, 20 * CHUNK_BYTES)
    assert arena.warm_up(500)
    assert not arena.warm_up()
    assert (arena.warm, reach(arena, 0)) == (20 * CHUNK_BYTES, 20)
    assert len(acquire(arena, 20)) == 20


def test_only_so_much_becomes_warm_as_whoever_asks_allows(arena: Arena) -> None:
    arena.warm_up(2)
    assert arena.acquire([CHUNK_BYTES] * 3, within=0) is None
    slots = arena.acquire([CHUNK_BYTES] * 2, within=0)
    assert slots is not None
    assert arena.acquire([CHUNK_BYTES] * 4, within=5 * CHUNK_BYTES) is None
    assert (reach(arena, 5), reach(arena, 500)) == (3, 18)
    assert arena.acquire([CHUNK_BYTES] * 3, within=5 * CHUNK_BYTES - 1) is not None
    assert arena.warm == 5 * CHUNK_BYTES
    arena.release(slots)
    assert set(acquire(arena, 2)) == set(slots), "what is warm is used before what is cold"
    assert arena.warm == 5 * CHUNK_BYTES


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
    """Whether this kernel has huge pages, and merges small ones when it is told to: from Linux
    6.1 on."""
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
    arena.tensor(3 * CHUNK_BYTES).fill_(7)
    arena.make_real(acquire(arena, 4))
    assert arena.tensor(3 * CHUNK_BYTES).eq(7).all(), "what was warmed up was touched"


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
    small = [advised_small(arena, slot) for slot in (*slots, 3 * CHUNK_BYTES, 4 * CHUNK_BYTES)]
    assert small == (
        [False, False, True, False, True] if slow else [False, False, False, False, True]
    )


def test_pages_are_merged_and_their_contents_stay(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_pages_that_the_kernel_will_not_merge_are_left_in_the_end(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, [0.009, 0.0015, 0.0015])
    asked: list[int] = []

    class Refusing:
        def madvise(self, address: ctypes.c_void_p, _length: object, _advice: int) -> int:
            asked.append(address.value or 0)
            return -1

    monkeypatch.setattr("datastates.storage.arena._libc", Refusing())
    slots = acquire(arena, 3)
    arena.make_real(slots)
    while arena.has_small_pages:
        arena.merge_pages()
    addresses = [arena.tensor(slot).data_ptr() for slot in slots[1:]]
    assert asked == addresses * 8, "each in its turn"


def test_pages_of_a_closed_arena_are_left_alone(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, [0.009, 0.0015])
    arena.make_real(acquire(arena, 2))
    arena.close()
    assert not arena.has_small_pages
    arena.merge_pages()


def test_whoever_needs_slots_that_are_being_touched_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena(2 * CHUNK_BYTES)
    touching, may_end = threading.Event(), threading.Event()

    def touch(block: int, *, is_awaited: bool) -> None:
        touching.set()
        assert may_end.wait(30)

    monkeypatch.setattr(arena, "_touch", touch)
    threads = [threading.Thread(target=arena.warm_up, args=(2,))]
    threads[0].start()
    assert touching.wait(30)
    assert (reach(arena, 0), arena.available) == (0, 2 * CHUNK_BYTES)
    found: list[list[int] | None] = []
    threads.append(threading.Thread(target=lambda: found.append(arena.acquire([CHUNK_BYTES] * 2))))
    threads[1].start()
    assert arena.acquire([CHUNK_BYTES] * 3) is None
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert found == [[0, CHUNK_BYTES]]
    arena.close()


def test_threads_never_get_the_same_slot(arena: Arena) -> None:
    errors: list[str] = []

    def work(mark: int) -> None:
        for _ in range(200):
            slots = arena.acquire([CHUNK_BYTES] * 3 + [mark * 1000])
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
    assert arena.available == 20 * CHUNK_BYTES


def test_a_closed_arena_refuses_but_what_was_handed_out_stays(arena: Arena) -> None:
    (slot,) = acquire(arena, 1)
    view = arena.memory(slot)
    view[:3] = b"abc"
    sizes = [3, 5]
    arena.pieces(slot, sizes)
    arena.close()
    arena.close()
    assert bytes(view[:3]) == b"abc"
    for use in (
        lambda: arena.acquire([1]),
        lambda: arena.memory(slot),
        lambda: arena.tensor(slot),
        lambda: arena.pieces(slot, sizes),
    ):
        with pytest.raises(Closed):
            use()


_FORKED = """
import ctypes, gc, mmap, os, sys
from datastates.errors import Closed
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena

arena = Arena(8 * CHUNK_BYTES)
(slot,) = arena.acquire([CHUNK_BYTES])
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
    for use in (lambda: arena.acquire([1]), lambda: arena.tensor(slot), lambda: arena.memory(slot)):
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
    done = subprocess.run(
        [sys.executable, "-c", _FORKED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_pinned_arena_takes_asynchronous_copies() -> None:
    arena = Arena(20 * CHUNK_BYTES)
    arena.pin(DeviceRegistrar(torch.device("cuda")))
    slots = acquire(arena, 20)
    arena.register()
    for number, slot in enumerate(slots):
        assert arena.tensor(slot).is_pinned()
        source = torch.full((CHUNK_BYTES,), number, dtype=torch.uint8, device="cuda")
        arena.tensor(slot).copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert arena.tensor(slot).eq(number).all()
    arena.close()
