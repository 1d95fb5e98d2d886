"""A state that arrives in the memory tier: only what is missing is asked for, and what is there
stays while it is needed."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

import datastates
from datastates.engine.commit import IncomingState
from datastates.errors import Closed, Conflict, OverBudget, Unavailable
from datastates.lineage.states import StateFacts
from datastates.lineage.write import record
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.local import LocalTier
from datastates.storage.memory import MemoryTier
from datastates.storage.reading import read_tree
from datastates.storage.tier import Payload
from datastates.testing import fail_at
from datastates.transport.receive_states import StateSink
from tests.support.cloning import Sent, feed, fill, sent

torch.set_num_threads(1)

_PER_CHUNK = CHUNK_BYTES // 4


def state(uid: str, *values: float, parents: tuple[str, ...] = ()) -> Sent:
    """A state of one full chunk for each value."""
    return sent(
        {
            "box": {
                str(i): torch.full((_PER_CHUNK,), float(value)) for i, value in enumerate(values)
            }
        },
        uid,
        parents=parents,
    )


class Room:
    """A memory tier of so many slots."""

    def __init__(self, slots: int) -> None:
        self.arena = Arena(slots * CHUNK_BYTES)
        self.memory = MemoryTier(self.arena)

    def sink(self, source: Sent, **options: object) -> StateSink:
        # for lender and relatives
        return StateSink(source.checked, self.memory, self.arena, self.arena.acquire, **options)  # type: ignore[arg-type]

    def clone(self, source: Sent) -> list[int]:
        sink = self.sink(source)
        asked = feed(sink, source.chunks)
        sink.adopt()
        return asked

    def holds(self, source: Sent) -> bool:
        with self.memory.open(source.manifest.origin.uid) as reader:
            return [bytes(reader.chunk(i)) for i in range(len(source.chunks))] == source.chunks


def test_a_state_arrives_whole() -> None:
    room, source = Room(4), state("a", 1, 2, 3)
    sink = room.sink(source)
    assert [sink.pieces(index) for index in range(3)] == [None] * 3
    assert feed(sink, source.chunks) == [0, 1, 2]
    assert [
        bytes(piece) for index in range(3) for piece in sink.pieces(index) or ()
    ] == source.chunks
    placed = sink.adopt()
    assert (placed.bytes_new, placed.manifest.packs, placed.manifest.refs) == (
        3 * CHUNK_BYTES,
        (),
        (),
    )
    assert room.holds(source)
    assert room.arena.available == CHUNK_BYTES
    with pytest.raises(Closed):
        sink.adopt()
    sink.abandon()
    assert room.holds(source)


def test_chunks_that_other_states_have_are_not_asked_for_and_take_no_room() -> None:
    room = Room(4)
    room.clone(state("a", 1, 2, 3))
    source = state("b", 2, 7, 3)
    assert room.clone(source) == [1]
    assert room.arena.available == 0
    assert room.holds(source)


def test_a_chunk_that_is_in_a_state_twice_is_asked_for_once() -> None:
    room, source = Room(2), state("a", 5, 6, 5, 5)
    assert room.clone(source) == [0, 1]
    assert room.holds(source)
    room.memory.remove("a")
    assert room.arena.available == 2 * CHUNK_BYTES


def test_a_shared_chunk_stays_while_the_clone_is_under_way() -> None:
    room = Room(4)
    room.clone(state("a", 1, 2))
    source = state("b", 1, 3)
    sink = room.sink(source)
    room.memory.remove("a")
    assert room.arena.available == 2 * CHUNK_BYTES
    feed(sink, source.chunks)
    sink.adopt()
    assert room.holds(source)


def test_an_abandoned_clone_gives_everything_back() -> None:
    room = Room(4)
    room.clone(state("a", 1, 2))
    source = state("b", 1, 3, 4)
    sink = room.sink(source)
    feed(sink, source.chunks, [1])
    assert room.arena.available == 0
    sink.abandon()
    sink.abandon()
    assert room.arena.available == 2 * CHUNK_BYTES
    with pytest.raises(Closed):
        sink.buffers(2)
    with pytest.raises(Closed):
        sink.adopt()
    assert sink.pieces(1) is None
    room.memory.remove("a")
    assert room.arena.available == 4 * CHUNK_BYTES


def test_a_state_that_can_never_fit_is_refused() -> None:
    room = Room(2)
    with pytest.raises(OverBudget, match=f"takes {3 * CHUNK_BYTES} bytes.*has {2 * CHUNK_BYTES}"):
        room.sink(state("a", 1, 2, 3))
    room.clone(state("b", 1))
    with pytest.raises(OverBudget, match="not free"):
        room.sink(state("c", 2, 3))
    room.memory.remove("b")
    assert room.arena.available == 2 * CHUNK_BYTES


def test_wrong_bytes_are_asked_for_again_and_a_part_is_not_adopted() -> None:
    room, source = Room(2), state("a", 1, 2)
    sink = room.sink(source)
    fill(sink.buffers(0), bytes(CHUNK_BYTES))
    assert list(sink.missing()) == [1]
    assert not sink.accept(0)
    assert sorted(sink.missing()) == [0, 1]
    sink.buffers(1)
    sink.forget(1)
    feed(sink, source.chunks, [0])
    with pytest.raises(Unavailable, match="1 chunks"):
        sink.adopt()
    feed(sink, source.chunks)
    sink.adopt()
    assert room.holds(source)


def test_two_clones_of_one_state_at_once_are_one_state() -> None:
    room, source = Room(4), state("a", 1, 2)
    first, second = room.sink(source), room.sink(source)
    threads = [
        threading.Thread(target=feed, args=(sink, source.chunks)) for sink in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.adopt().bytes_new == 2 * CHUNK_BYTES
    assert second.adopt().bytes_new == 0
    assert room.arena.available == 2 * CHUNK_BYTES
    assert room.holds(source)
    room.memory.remove("a")
    assert room.arena.available == 4 * CHUNK_BYTES


def test_what_somebody_else_brought_meanwhile_gives_its_slot_back() -> None:
    room, source = Room(5), state("a", 1, 2)
    sink = room.sink(source)
    feed(sink, source.chunks)
    room.clone(state("b", 2, 3))
    assert sink.adopt().bytes_new == CHUNK_BYTES
    assert room.arena.available == 2 * CHUNK_BYTES
    assert room.holds(source)
    room.memory.remove("b")
    assert room.holds(source)


def test_a_state_of_the_same_uid_and_other_content_is_a_conflict() -> None:
    room = Room(4)
    room.clone(state("a", 1))
    sink = room.sink(other := state("a", 2))
    feed(sink, other.chunks)
    with pytest.raises(Conflict, match="another state"):
        sink.adopt()
    sink.abandon()
    assert room.arena.available == 3 * CHUNK_BYTES
    assert room.holds(state("a", 1))


# --- from disk ------------------------------------------------------------------------------------


def test_chunks_that_a_parent_has_on_disk_are_read_from_there(tmp_path: Path) -> None:
    local, room = LocalTier(tmp_path), Room(4)
    parent = state("parent", 1, 2, 3)
    local.put(Payload(parent.manifest, [memoryview(chunk) for chunk in parent.chunks]))
    source = state("b", 3, 9, 1, parents=("parent", "unknown"))
    sink = room.sink(source, lender=local, relatives=["parent", "unknown"])
    assert [bytes(piece) for index in (0, 2) for piece in sink.pieces(index) or ()] == [
        source.chunks[0],
        source.chunks[2],
    ]
    assert feed(sink, source.chunks) == [1]
    sink.adopt()
    assert room.holds(source)
    assert room.sink(state("c", 1, 2), lender=local, relatives=["parent"]).missing() == []


def test_damage_on_disk_is_fetched_instead(tmp_path: Path) -> None:
    local, room = LocalTier(tmp_path), Room(4)
    parent = state("parent", 1, 2)
    local.put(Payload(parent.manifest, [memoryview(chunk) for chunk in parent.chunks]))
    (pack,) = tmp_path.glob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-CHUNK_BYTES - 1] ^= 1
    pack.write_bytes(data)
    source = state("b", 1, 2, 5, parents=("parent",))
    sink = room.sink(source, lender=local, relatives=["parent"])
    assert list(sink.missing()) == [0, 2]
    feed(sink, source.chunks)
    sink.adopt()
    assert room.holds(source)


# --- the engine -----------------------------------------------------------------------------------


CLONE, LOOSE = "c" * 24, "1" * 24


def adopted(repo: datastates.Repository, source: Sent) -> None:
    """A clone, recorded as a root."""
    host, memory, arena = repo.core.runner(), repo.core.tiers.captured, repo.core.arena
    assert memory is not None
    assert arena is not None
    sink = StateSink(
        source.checked,
        memory,
        arena,
        lambda lengths: host.slots.acquire(lengths, datastates.BackPressure.WAIT),
    )
    feed(sink, source.chunks)
    facts = StateFacts(
        source.manifest.origin.uid, None, None, repo.core.run_uid, source.manifest.origin.step
    )
    host.commits.adopt_incoming(
        IncomingState(facts, source.manifest.digest, sum(map(len, source.chunks)), sink.adopt),
        record.record,
    )
    host.refs_changed()


def test_a_clone_stays_through_captures_and_ends_with_the_process_unless_it_is_named(
    tmp_path: Path,
) -> None:
    named, loose = state(CLONE, 1, 2), state(LOOSE, 3)
    with datastates.open(tmp_path, memory_bytes=32 * CHUNK_BYTES) as repo:
        adopted(repo, named)
        adopted(repo, loose)
        repo.branch("cloned", CLONE)
        assert float(repo.load(LOOSE)["box"]["0"][0]) == 3.0
    with datastates.open(tmp_path) as repo:
        assert [str(repo.state(uid).status) for uid in (CLONE, LOOSE)] == ["durable", "evicted"]
        assert float(repo.load("cloned")["box"]["1"][7]) == 2.0


def test_a_clone_is_written_when_memory_runs_short(tmp_path: Path) -> None:
    weights = torch.zeros(3 * _PER_CHUNK)
    with datastates.open(tmp_path, memory_bytes=4 * CHUNK_BYTES) as repo:
        adopted(repo, state(CLONE, 1, 2))
        run = repo.track(weights=weights, rng=False, durable_interval_s=None)
        for _ in range(3):
            weights.uniform_()
            run.capture().wait()
        assert str(repo.state(CLONE).status) == "durable"
        assert repo.core.tiers.captured is not None
        assert CLONE not in set(repo.core.tiers.captured.uids())
        assert float(repo.load(CLONE)["box"]["1"][0]) == 2.0


def test_a_clone_that_cannot_be_written_is_said_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = datastates.Config(memory_bytes=8 * CHUNK_BYTES, on_step=fail_at("pack-written"))
    with datastates.open(tmp_path, config=config) as repo, caplog.at_level(logging.WARNING):
        adopted(repo, state(CLONE, 1))
        repo.tag("kept", CLONE)
        repo.core.runner().drain()
        assert CLONE in caplog.text
        with repo.core.open_payload(repo.state(CLONE)) as reader:
            assert float(read_tree(reader)["box"]["0"][0]) == 1.0
