"""Restores from disk read what they need at once, on several threads, and still check every byte
before the first one is written."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config
from datastates.errors import Corrupt
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.copying import Stage
from datastates.storage.local import LocalTier
from datastates.storage.pack_reader import MappedReader
from datastates.storage.reading import open_parts, specs_of
from datastates.testing.states import chunks_of, numbers, payload
from tests.support.sharding import rows, sharded

MIB = 1 << 20
STATE = {"w": numbers(5 * MIB + 77), "v": numbers(10)}


def threads_that_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that read a chunk ahead, one for each chunk."""
    names: list[str] = []
    read = MappedReader._read

    def noting(self: MappedReader, index: int, into: memoryview) -> None:
        if (name := threading.current_thread().name).startswith("datastates-read"):
            names.append(name)
        read(self, index, into)

    monkeypatch.setattr(MappedReader, "_read", noting)
    return names


def saved(folder: Path, tensor: torch.Tensor) -> Path:
    """A repository with a state of this tensor; its pack."""
    config = Config(memory_bytes=128 * MIB, durable_interval_s=None)
    with (
        datastates.open(folder, config=config) as repo,
        repo.track(rng=False, box={"w": tensor, "v": torch.ones(3)}) as run,
    ):
        run.capture().wait("durable")
    return next((folder / "packs").glob("*.safetensors"))


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_prepared_is_read_on_other_threads_and_lent_as_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    names = threads_that_read(monkeypatch)
    what = payload("a", {"u": numbers(3 * MIB + 5)}, STATE)
    tier = LocalTier(tmp_path)
    tier.put(what)
    chunks = [chunk.ljust(CHUNK_BYTES, b"\0") for chunk in chunks_of(what)]
    with tier.open("a", verify=verify) as reader:
        shards = [shard for spec in specs_of(reader) for shard in spec.shards]
        reader.prepare([(shard.start, shard.length) for shard in shards])
        assert len(names) == len(chunks)
        assert all(name.startswith("datastates-read") for name in names)
        stream = b"".join(chunks)
        monkeypatch.setattr(MappedReader, "chunk", None)
        for shard in shards:
            lent = reader.loan(shard.start, shard.length)
            assert lent is not None
            assert bytes(lent) == stream[shard.start : shard.start + shard.length]
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("datastates-read")
    ]


def test_a_restore_reads_ahead_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, STATE["w"])
    names = threads_that_read(monkeypatch)
    into = {"v": torch.zeros(3)}  # what is handed over has no place of its own yet
    with datastates.open(tmp_path) as repo:
        repo.restore("main", box=into)
    assert len(names) == 6
    assert torch.equal(into["w"], STATE["w"])
    assert torch.equal(into["v"], torch.ones(3))


@pytest.mark.parametrize(("chunk", "at"), [(1, 3), (3, 4 * MIB - 1), (6, 300)])
def test_a_wrong_byte_is_named_and_nothing_is_changed(tmp_path: Path, chunk: int, at: int) -> None:
    pack = saved(tmp_path, STATE["w"])
    with datastates.open(tmp_path) as repo:
        start = repo.core.tiers.durable.manifest(repo.state("main").uid).refs[chunk].offset
        with pack.open("r+b") as file:
            file.seek(start + at)
            byte = file.read(1)
            file.seek(start + at)
            file.write(bytes([byte[0] ^ 1]))
        into = {"v": torch.zeros(3)}
        with pytest.raises(Corrupt, match=rf"fail their digest: chunk {chunk} .*which holds box/w"):
            repo.restore("main", box=into)
    assert "w" not in into
    assert not into["v"].any()


def test_a_pack_that_is_cut_short_while_it_is_read_ahead_is_an_error_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = saved(tmp_path, STATE["w"])
    read = MappedReader._read

    def read_then_cut(self: MappedReader, index: int, into: memoryview) -> None:
        read(self, index, into)
        os.truncate(pack, 2 * CHUNK_BYTES)

    monkeypatch.setattr(MappedReader, "_read", read_then_cut)
    into = {"v": torch.zeros(3)}
    with (
        datastates.open(tmp_path) as repo,
        pytest.raises(Corrupt, match=r"cut short|bytes, \d+ were written"),
    ):
        repo.restore("main", box=into)
    assert "w" not in into


def test_one_small_tensor_of_a_large_state_reads_only_its_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, STATE["w"])
    names, asked = threads_that_read(monkeypatch), set[int]()
    chunk = MappedReader.chunk

    def noting(self: MappedReader, index: int) -> memoryview:
        asked.add(index)
        return chunk(self, index)

    monkeypatch.setattr(MappedReader, "chunk", noting)
    into = {"w": torch.zeros_like(STATE["w"]), "v": torch.zeros(3)}
    with datastates.open(tmp_path) as repo:
        repo.restore("main", box=into, only="box/v")
    assert torch.equal(into["v"], torch.ones(3))
    assert len(asked) == 1
    assert not names


def test_pieces_of_many_chunks_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks would take a hundred times the memory of what is wanted of them."""
    names = threads_that_read(monkeypatch)
    tier = LocalTier(tmp_path)
    tier.put(payload("a", {"w": numbers(6 * MIB)}))
    with tier.open("a") as reader:
        reader.prepare([(index * CHUNK_BYTES, 4096) for index in range(6)])
        assert reader.loan(0, 4096) is None
    assert not names


def test_what_does_not_fit_into_memory_twice_is_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = threads_that_read(monkeypatch)
    monkeypatch.setattr(
        "datastates.storage.pack_reader.available_memory_bytes", lambda: 6 * 4 * MIB
    )
    tier = LocalTier(tmp_path)
    tier.put(payload("a", {"w": numbers(6 * MIB)}))
    with tier.open("a") as reader:
        reader.prepare([(0, 24 * MIB)])
        assert not names
        assert reader.loan(0, 24 * MIB) is not None


def test_each_part_of_a_state_reads_its_own_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": numbers(10 * MIB).reshape(10, MIB)}
    parts = sharded(
        secrets.token_hex(12), tree, {"w": [[box] for box in rows((10, MIB), 5, 5)]}, 2, step=1
    )
    uid = parts[0].manifest.origin.uid
    tiers = [LocalTier(tmp_path, rank=rank) for rank in range(2)]
    for tier, part in zip(tiers, parts, strict=True):
        tier.put(part)
    names = threads_that_read(monkeypatch)
    with open_parts(lambda rank: tiers[0].open_part(uid, rank), 2, uid) as reader:
        (spec,) = specs_of(reader)
        reader.prepare([(shard.start, shard.length) for shard in spec.shards])
        assert len(names) == 10
        found = [reader.loan(shard.start, shard.length) for shard in spec.shards]
    assert b"".join(bytes(each or b"") for each in found) == tree["w"].numpy().tobytes()


def test_what_a_thread_raises_is_raised_once_all_of_them_have_ended() -> None:
    stage = Stage(range(20), 100)
    begun = []

    def read(index: int, into: memoryview) -> None:
        begun.append(index)
        if index == 2:
            raise Corrupt("the third")

    with pytest.raises(Corrupt, match="the third"):
        stage.fill(read)
    count = len(begun)
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("datastates-read")
    ]
    assert len(begun) == count
    assert stage.view(range(18, 20), 5, 4 * MIB) is not None
    assert stage.view(range(19, 21), 0, 10) is None
