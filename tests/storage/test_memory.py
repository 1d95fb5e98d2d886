"""The memory tier: the suite, and what only it does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from datastates.errors import Conflict, Corrupt, InvalidInput, NotFound, OverBudget
from datastates.state.digest import join
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Payload, Tier
from datastates.testing import TierSuite
from datastates.testing.states import chunks_of, numbers, payload, small, stream
from tests.support.sharding import rows, sharded


@pytest.fixture(scope="module")
def big_arena() -> Iterator[Arena]:
    arena = Arena(140 * CHUNK_BYTES)
    yield arena
    arena.close()


class TestMemoryTier(TierSuite):
    @pytest.fixture
    def tier(self, big_arena: Arena) -> Iterator[MemoryTier]:
        tier = MemoryTier(big_arena)
        yield tier
        tier.close()
        assert big_arena.available == big_arena.capacity  # whatever the test did, no slot is lost

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        assert isinstance(tier, MemoryTier)
        with tier.open(uid, verify=False) as reader:
            torch.frombuffer(_writable(reader.chunk(chunk)), dtype=torch.uint8)[byte] ^= 1


def _writable(view: memoryview) -> memoryview:
    address = np.frombuffer(view, np.uint8).ctypes.data
    return memoryview((ctypes.c_ubyte * view.nbytes).from_address(address))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(8 * CHUNK_BYTES)
    yield arena
    arena.close()


def fill(arena: Arena, state: Payload) -> list[int]:
    """What the capture engine does: slots with the state's bytes in them."""
    slots = arena.acquire([view.nbytes for view in state.chunks])
    assert slots is not None
    for slot, view in zip(slots, state.chunks, strict=True):
        arena.memory(slot, view.nbytes)[:] = view
    return slots


def test_adopted_slots_are_the_state(arena: Arena) -> None:
    tier, state = MemoryTier(arena), small("a", 1, 2, 3)
    slots = fill(arena, state)
    assert tier.adopt(state.manifest, slots).bytes_new == 300
    assert (tier.slots_held, tier.bytes_held, arena.capacity - arena.available) == (3, 300, 3 * 128)
    with tier.open("a") as reader:
        assert stream(reader) == chunks_of(state)
        assert reader.manifest.refs == ()


def test_adopting_gives_back_slots_of_chunks_that_are_held(arena: Arena) -> None:
    tier = MemoryTier(arena)
    first, second = small("a", 1, 2), small("b", 1, 9, 9)
    tier.adopt(first.manifest, fill(arena, first))
    assert tier.adopt(second.manifest, fill(arena, second)).bytes_new == 100
    assert len(arena._taken) == 3
    with tier.open("b") as reader:
        assert stream(reader) == chunks_of(second)
    again = fill(arena, second)
    assert tier.adopt(second.manifest, again).bytes_new == 0
    assert len(arena._taken) == 3
    assert (tier.remove("a"), tier.remove("b")) == (100, 200)
    assert len(arena._taken) == 0


def test_slots_that_do_not_fit_the_manifest_stay_the_callers(arena: Arena) -> None:
    tier, state = MemoryTier(arena), small("a", 1, 2)
    slots = fill(arena, state)
    with pytest.raises(InvalidInput, match="2 chunks"):
        tier.adopt(state.manifest, slots[:1])
    arena.release(slots)
    assert len(arena._taken) == 0


def test_a_state_over_the_budget_leaves_no_trace(arena: Arena) -> None:
    tier = MemoryTier(arena)
    tier.put(small("a", 1, 2, 3))
    taken = arena.acquire([CHUNK_BYTES] * 7)
    assert taken is not None
    wide = payload("b", {"model/w": numbers(CHUNK_BYTES // 4)})
    with pytest.raises(
        OverBudget, match=f"needs {CHUNK_BYTES} bytes of memory, {CHUNK_BYTES - 3 * 128} are"
    ):
        tier.put(wide)
    arena.release(taken)
    assert list(tier.uids()) == ["a"]
    assert len(arena._taken) == 3
    assert tier.remove("a") == 300


class BusyArena(Arena):
    """An arena in which something else happens while a state is being copied in."""

    meanwhile: Callable[[], object] | None = None

    def memory(self, slot: int, length: int = CHUNK_BYTES) -> memoryview:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().memory(slot, length)


def test_a_state_that_another_thread_puts_meanwhile_is_held_once() -> None:
    arena = BusyArena(8 * CHUNK_BYTES)
    tier = MemoryTier(arena)
    tier.put(small("base", 1))
    arena.meanwhile = lambda: tier.put(small("s", 1, 2, 3))
    assert tier.put(small("s", 1, 2, 3)).bytes_new == 0
    assert (len(arena._taken), tier.slots_held) == (3, 3)
    assert tier.remove("s") == 200
    arena.close()


def test_chunks_that_come_and_go_while_a_state_is_copied_are_held_as_long_as_needed() -> None:
    arena = BusyArena(8 * CHUNK_BYTES)
    tier = MemoryTier(arena)
    tier.put(small("base", 1))

    def meanwhile() -> None:
        tier.put(small("other", 2, 2))
        tier.remove("base")

    arena.meanwhile = meanwhile
    state = small("s", 1, 2, 3, 2)
    assert tier.put(state).bytes_new == 100
    tier.remove("other")
    with tier.open("s") as reader:
        assert stream(reader) == chunks_of(state)
    assert len(arena._taken) == 3
    assert tier.remove("s") == 300
    assert len(arena._taken) == 0
    arena.close()


def test_slots_of_a_removed_state_return_when_its_last_reader_closes(arena: Arena) -> None:
    tier = MemoryTier(arena)
    tier.put(small("a", 1, 2))
    first, second = tier.open("a"), tier.open("a")
    assert tier.remove("a") == 0
    first.close()
    assert len(arena._taken) == 2
    second.close()
    assert len(arena._taken) == 0


def test_a_span_over_neighbouring_slots_is_not_copied(arena: Arena) -> None:
    tier = MemoryTier(arena)
    state = payload("a", {"model/w": numbers(CHUNK_BYTES // 4 * 3)})
    tier.put(state)
    with tier.open("a") as reader:
        view = reader.span(8, 3 * CHUNK_BYTES - 8)
        assert view is not None
        assert view.readonly
        assert bytes(view) == b"".join(chunks_of(state))[8:]


def test_damage_in_memory_names_the_chunk(arena: Arena) -> None:
    tier = MemoryTier(arena)
    state = small("a", 1, 2)
    slots = fill(arena, state)
    tier.adopt(state.manifest, list(slots))
    arena.tensor(slots[1])[5] ^= 4
    with tier.open("a") as reader, pytest.raises(Corrupt, match="state a: chunk 1"):
        reader.verify()


def test_fifty_versions_of_a_mostly_frozen_model_cost_little_more_than_one() -> None:
    frozen = {"model/frozen": numbers(CHUNK_BYTES // 4 * 9)}
    arena = Arena(80 * CHUNK_BYTES)
    tier = MemoryTier(arena)
    for version in range(50):
        state = payload(
            f"v{version}", frozen, {"model/head": numbers(CHUNK_BYTES // 8, 1000 + version)}
        )
        tier.adopt(state.manifest, fill(arena, state))
    assert tier.slots_held == 9 + 50
    for version in (0, 25, 49):
        with tier.open(f"v{version}") as reader:
            reader.verify()
    arena.close()


def test_all_parts_of_a_state_are_held_as_one_and_each_is_opened_by_itself(arena: Arena) -> None:
    tree = {"w": torch.arange(3 * CHUNK_BYTES // 4, dtype=torch.float32), "b": torch.ones(7)}
    parts = sharded(
        "whole",
        tree,
        {"w": [[box] for box in rows((3 * CHUNK_BYTES // 4,), CHUNK_BYTES // 2, CHUNK_BYTES // 4)]},
        2,
    )
    manifests = [part.manifest for part in parts]
    tier = MemoryTier(arena)

    def filled() -> dict[tuple[bytes, int], int]:
        slots = [slot for part in parts for slot in fill(arena, part)]
        keys = [(chunk.digest, chunk.length) for part in manifests for chunk in part.content.chunks]
        return dict(zip(keys, slots, strict=True))

    came = filled()
    tier.settle(join(manifests), {}, came, "a peer", manifests)
    assert (came, list(tier.ranks("whole"))) == ({}, [0, 1])
    with tier.open("whole") as reader:
        assert reader.manifest.digest == join(manifests).digest
        tier.remove("whole")
        with pytest.raises(NotFound):
            tier.open_part("whole", 0)
    assert arena.available == arena.capacity

    tier.settle(join(manifests), {}, filled(), "a peer", manifests)
    for rank, part in enumerate(parts):
        with tier.open_part("whole", rank) as reader:
            assert reader.manifest.digest == part.manifest.digest
            assert [reader.chunk(index) == chunk for index, chunk in enumerate(part.chunks)] == [
                True
            ] * len(part.chunks)
    with pytest.raises(NotFound, match="rank 2"):
        tier.open_part("whole", 2)
    tier.remove("whole")

    tier.adopt(manifests[1], fill(arena, parts[1]))  # what a rank captured
    assert list(tier.ranks("whole")) == [1]
    came = filled()
    with pytest.raises(Conflict, match="holds the part of rank 1"):
        tier.settle(join(manifests), {}, came, "a peer", manifests)
    assert len(came) == sum(len(part.chunks) for part in parts), "its slots stay the caller's"
    tier.close()
