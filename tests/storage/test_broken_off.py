"""Memory takes a state over wholly or not at all, at whichever line that is broken off; what it
did not take stays the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.memory import Held, MemoryTier
from datastates.storage.tier import Payload
from datastates.testing.states import small
from tests.support.interrupting import NEVER, Interruption, codes_of

_CODES = codes_of(
    *(
        MemoryTier.adopt,
        MemoryTier.settle,
        MemoryTier._wholly,
        MemoryTier._settle,
        MemoryTier._check_same,
    ),
    *(
        MemoryTier._place,
        MemoryTier._enter,
        MemoryTier._find,
        MemoryTier._unused,
        MemoryTier._are_equal,
    ),
)
_THEIRS = "a peer"
_Key = tuple[bytes, int]


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(16 * CHUNK_BYTES)
    yield arena
    arena.close()


def known(tier: MemoryTier, arena: Arena) -> object:
    """Everything that the tier and the arena know, but for whose bytes a chunk has: that is true
    of it wherever a state was broken off."""
    chunks = {
        key: [(chunk.slot, chunk.uses) for chunk in held] for key, held in tier._chunks.items()
    }
    return (
        {*tier.uids()},
        chunks,
        dict(tier._shared),
        tier.bytes_beside,
        arena.available,
        tier.slots_held,
    )


def filled(arena: Arena, state: Payload) -> list[int]:
    """Slots with the bytes of a state, as a capture brings them."""
    slots = arena.acquire([view.nbytes for view in state.chunks])
    assert slots is not None
    for slot, view in zip(slots, state.chunks, strict=True):
        arena.memory(slot, view.nbytes)[:] = view
    return slots


def adopt(tier: MemoryTier, arena: Arena, state: Payload, during: Interruption) -> None:
    """A capture or a merge comes in, or what was brought for it goes back."""
    was_here, slots = tier.has(state.manifest.origin.uid), filled(arena, state)
    try:
        with during.here():
            tier.adopt(state.manifest, slots)
    finally:
        assert during.place or not slots
        _leave(tier, arena, state, during, was_here)
        arena.take_back(slots)


def settle(tier: MemoryTier, arena: Arena, state: Payload, during: Interruption) -> None:
    """A clone comes in, of which some chunks may be here, or what was brought for it goes back."""
    was_here, keys = (
        tier.has(state.manifest.origin.uid),
        [(each.digest, each.length) for each in state.manifest.content.chunks],
    )
    held: dict[_Key, Held] = tier.hold(keys, _THEIRS)
    brought = {key: view for key, view in zip(keys, state.chunks, strict=True) if key not in held}
    slots: dict[_Key, int] = dict(
        zip(brought, arena.acquire([view.nbytes for view in brought.values()]) or [], strict=True)
    )
    for key, slot in slots.items():
        arena.memory(slot, key[1])[:] = brought[key]
    try:
        with during.here():
            tier.settle(state.manifest, held, slots, _THEIRS)
    finally:
        assert during.place or not (held or slots)
        _leave(tier, arena, state, during, was_here)
        tier.release(held.values())
        arena.take_back(slots)


def _leave(
    tier: MemoryTier, arena: Arena, state: Payload, during: Interruption, was_here: bool
) -> None:
    if during.place and not was_here:
        tier.remove(state.manifest.origin.uid)


def room(arena: Arena, others: str) -> MemoryTier:
    """Memory with what is there before."""
    tier = MemoryTier(arena)
    if others in ("ours", "both"):
        tier.put(small("ours", 1, 3, 7))
    if others in ("theirs", "both"):
        settle(
            tier, arena, small("theirs", 2, 3, 8), Interruption(frozenset(), NEVER, lambda: None)
        )
    if others == "itself":
        tier.put(small("a", 1, 2, 3, 3))
    return tier


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("take", [adopt, settle])
@pytest.mark.parametrize("others", ["none", "ours", "theirs", "both", "itself"])
def test_a_state_that_is_broken_off_on_its_way_into_memory_leaves_it_as_it_was(
    arena: Arena,
    take: Callable[[MemoryTier, Arena, Payload, Interruption], None],
    others: str,
    error: type[BaseException],
) -> None:
    def broken_off() -> None:
        raise error

    state = small("a", 1, 2, 3, 3)
    counted = Interruption(_CODES, NEVER, broken_off)
    tier = room(arena, others)
    take(tier, arena, state, counted)
    assert tier.has("a")
    tier.close()
    for at in range(counted.steps):
        tier = room(arena, others)
        before, during = known(tier, arena), Interruption(_CODES, at, broken_off)
        with pytest.raises(error):
            take(tier, arena, state, during)
        assert known(tier, arena) == before, f"{error.__name__} in {during.place}"
        tier.close()
    assert counted.steps > 5
    assert arena.available == arena.capacity
