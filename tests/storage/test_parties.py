"""Chunks of one digest and different bytes: whose digest is believed, and what is kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from datastates.errors import Conflict
from datastates.state.digest import chunk_digest, state_digest
from datastates.state.manifest import CHUNK_BYTES, Chunk, Manifest
from datastates.storage.arena import Arena
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Payload
from datastates.testing.states import payload, stream
from tests.support.colliding import collide_somewhere

LENGTH = 70_000
ZEROS = bytes(LENGTH)


def state(uid: str, *chunks: bytes) -> Payload:
    """A state of these chunks, and of no tensor."""
    bare = payload(uid).manifest
    listed = tuple(Chunk(chunk_digest(chunk), len(chunk)) for chunk in chunks)
    content = msgspec.structs.replace(bare.content, chunks=listed)
    return Payload(
        msgspec.structs.replace(bare, content=content, digest=state_digest(content, ())),
        [memoryview(chunk) for chunk in chunks],
    )


class Room:
    """A memory tier, and what is brought to it as a capture and as somebody else's."""

    def __init__(self, slots: int = 8) -> None:
        self.arena = Arena(slots * CHUNK_BYTES)
        self.memory = MemoryTier(self.arena)

    def _fill(self, chunks: Sequence[memoryview]) -> list[int]:
        slots = self.arena.acquire([chunk.nbytes for chunk in chunks])
        assert slots is not None
        for slot, chunk in zip(slots, chunks, strict=True):
            self.arena.memory(slot, chunk.nbytes)[:] = chunk
        return slots

    def capture(self, what: Payload) -> int:
        return self.memory.adopt(what.manifest, self._fill(what.chunks)).bytes_new

    def arrive(self, what: Payload, party: str) -> list[int]:
        """Which chunks had to be moved."""
        keys = [(chunk.digest, chunk.length) for chunk in what.manifest.content.chunks]
        held = self.memory.hold(keys, party)
        moved = [index for index, key in enumerate(keys) if key not in held]
        slots = self._fill([what.chunks[index] for index in moved])
        filled = {keys[index]: slot for index, slot in zip(moved, slots, strict=True)}
        try:
            self.memory.settle(what.manifest, held, filled, party)
        except BaseException:
            self.memory.release(held.values())
            self.arena.release(slots)
            raise
        return moved

    def holds(self, uid: str) -> list[bytes]:
        with self.memory.open(uid) as reader:
            return stream(reader)


@pytest.fixture
def room() -> Room:
    return Room()


def forged(seed: int = 1) -> bytes:
    return collide_somewhere(ZEROS, Random(seed))


def test_a_capture_never_refers_to_a_foreign_chunk_of_its_digest(room: Room) -> None:
    room.arrive(state("theirs", forged()), "a peer")
    assert room.capture(state("ours", ZEROS)) == LENGTH
    assert room.capture(state("next", ZEROS, ZEROS)) == 0
    assert (room.holds("ours"), room.holds("next"), room.holds("theirs")) == (
        [ZEROS],
        [ZEROS, ZEROS],
        [forged()],
    )
    room.memory.remove("theirs")
    assert len(room.arena._taken) == 1
    room.memory.remove("ours")
    assert room.holds("next") == [ZEROS, ZEROS]


def test_a_foreign_state_may_be_made_of_ours_and_not_of_another_party_s(room: Room) -> None:
    room.capture(state("ours", ZEROS))
    assert room.arrive(state("theirs", forged()), "a peer") == []
    assert room.holds("theirs") == [ZEROS]
    one, other = bytes([1]) * LENGTH, collide_somewhere(bytes([1]) * LENGTH, Random(2))
    assert room.arrive(state("x", other), "x") == [0]
    assert room.arrive(state("y", one), "y") == [0]
    assert room.arrive(state("y2", one, one), "y") == []
    assert (room.holds("x"), room.holds("y"), room.holds("y2")) == ([other], [one], [one, one])


def test_equal_bytes_share_a_slot_whoever_brought_them(room: Room) -> None:
    text = bytes(range(250)) * 280
    room.arrive(state("x", text), "x")
    assert room.arrive(state("y", text), "y") == [0]
    assert room.capture(state("ours", text)) == 0
    assert room.memory.slots_held == 1
    assert room.memory.bytes_held == LENGTH
    for uid in ("x", "ours", "y"):
        assert room.holds(uid) == [text]
        room.memory.remove(uid)
    assert len(room.arena._taken) == 0


def test_what_was_captured_while_a_state_arrives_is_kept_apart(room: Room) -> None:
    what = state("theirs", forged())
    keys = [(chunk.digest, chunk.length) for chunk in what.manifest.content.chunks]
    held = room.memory.hold(keys, "a peer")
    slots = room._fill(what.chunks)
    room.capture(state("ours", ZEROS))
    room.memory.settle(what.manifest, held, dict(zip(keys, slots, strict=True)), "a peer")
    assert (room.holds("ours"), room.holds("theirs")) == ([ZEROS], [forged()])


def test_a_state_that_was_forged_beforehand_does_not_pass_for_the_one_that_comes(
    room: Room,
) -> None:
    room.arrive(state("s", forged()), "x")
    with pytest.raises(Conflict, match="forged"):
        room.arrive(state("s", ZEROS), "y")
    assert room.arrive(state("s", forged()), "y") == [0]
    assert len(room.arena._taken) == 1
    assert room.holds("s") == [forged()]


@pytest.mark.parametrize("seed", range(4))
def test_wherever_it_differs_a_colliding_chunk_is_kept_apart(seed: int, tmp_path: Path) -> None:
    """A thousand in all: in memory, and on disk where the other one is the base."""
    random = Random(seed)
    room, local = Room(), LocalTier(tmp_path / "packs", direct=False)
    for number in range(250):
        original = random.randbytes(LENGTH)
        other = collide_somewhere(original, random)
        room.arrive(state("theirs", other), "a peer")
        assert room.capture(state("ours", original)) == LENGTH
        assert room.holds("ours") == [original]
        if number % 10 == 0:
            base = local.put(state("theirs", other)).manifest
            local.put(state("ours", original), base=base)
            assert (on_disk(local, "theirs"), on_disk(local, "ours")) == ([other], [original])
            for uid in ("theirs", "ours"):
                local.remove(uid)
        for uid in ("theirs", "ours"):
            room.memory.remove(uid)
    assert len(room.arena._taken) == 0


# --- on disk --------------------------------------------------------------------------------------


def on_disk(tier: LocalTier, uid: str) -> list[bytes]:
    with tier.open(uid) as reader:
        return stream(reader)


def test_a_state_refers_to_chunks_of_its_base_only_where_they_are_equal(tmp_path: Path) -> None:
    """After a restart it is the base that says where a chunk may lie; who wrote it nobody knows."""
    text = bytes(range(250)) * 280
    LocalTier(tmp_path).put(state("theirs", forged(), text))
    tier = LocalTier(tmp_path)
    base: Manifest = tier.manifest("theirs")
    placed = tier.put(state("ours", ZEROS, text), base=base)
    assert placed.bytes_new == LENGTH
    assert on_disk(tier, "ours") == [ZEROS, text]
    assert (
        tier.put(state("next", ZEROS, text), base=placed.manifest, is_of_base=True).bytes_new == 0
    )
    tier.remove("theirs")
    assert on_disk(LocalTier(tmp_path), "next") == [ZEROS, text]


def test_small_chunks_of_a_base_are_shared_when_they_are_equal(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    base = tier.put(state("a", b"small")).manifest
    assert tier.put(state("b", b"small"), base=base).bytes_new == 0
    assert on_disk(tier, "b") == [b"small"]


def test_a_state_that_is_on_disk_is_this_one_only_if_its_bytes_are(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(state("s", forged()))
    with pytest.raises(Conflict, match=r"is another state of that uid"):
        tier.put(state("s", ZEROS))
    assert tier.put(state("s", forged())).bytes_new == 0
    other = state("s", ZEROS)
    manifest = msgspec.structs.replace(other.manifest, digest="0" * 64)
    with pytest.raises(Conflict, match="forged"):
        tier.put(Payload(manifest, other.chunks))
