"""Tiers on other machines: the suite of tiers for each of them, and what they add to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from obstore.store import MemoryStore

import datastates
from datastates import Config
from datastates.errors import Conflict, Corrupt, InvalidInput
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage import FolderTier, ObjectTier, remote
from datastates.storage.keyed import RemoteReader
from datastates.storage.local import LocalTier
from datastates.storage.remote import tier_of_url
from datastates.storage.tier import Tier
from datastates.testing import TierSuite
from datastates.testing.states import chunks_of, numbers, payload, small, stream

from .test_local import flip

LINEAGE = "0123456789ab" * 2


def flip_in_bucket(tier: Tier, uid: str, chunk: int, byte: int) -> None:
    assert isinstance(tier, ObjectTier)
    manifest = tier.manifest(uid)
    ref = manifest.refs[chunk]
    name = manifest.packs[ref.pack].name
    data = bytearray(tier.read(name))
    data[ref.offset + byte] ^= 1
    tier.write(name, bytes(data))


class TestObjects(TierSuite):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = ObjectTier(MemoryStore())
        tier.check(LINEAGE)
        yield tier
        tier.close()

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        flip_in_bucket(tier, uid, chunk, byte)


class TestFolder(TierSuite):
    keeps_whole_packs = True

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = FolderTier(tmp_path / "share")
        tier.check(LINEAGE)
        yield tier
        tier.close()

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        assert isinstance(tier, LocalTier)
        manifest = tier.manifest(uid)
        ref = manifest.refs[chunk]
        flip(tier.root / manifest.packs[ref.pack].name, ref.offset + byte)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://host/run", "no URL of a tier"),
        ("/some/folder", "no URL of a tier"),
        ("s3://", "no URL of a tier"),
        ("s3://bucket/run?secret_access_key=abcd1234", "contains a secret"),
        ("redis://me:abcd1234@host/0", "contains a secret"),
        ("s3://bucket/run?endpoint=https://me:abcd1234@host", "contains a secret"),
        ("s3://bucket/run?colour=red", "colour"),
        ("redis://host/zero", "no URL of a tier"),
        ("redis://host/0?colour=red", "colour"),
        ("file:///tmp/x?colour=red", "colour"),
        ("redis://host:port/0", "no URL of a tier"),
        ("file://share/run", "three slashes"),
        ("file:share", "three slashes"),
        ("file:///", "three slashes"),
        ("file:///proc/run", "the folder tier cannot be used"),
    ],
)
def test_a_url_that_names_no_tier_is_refused(url: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        tier_of_url(url)
    assert "abcd1234" not in str(caught.value)


def test_a_place_belongs_to_one_lineage(tmp_path: Path) -> None:
    store, folder = MemoryStore(), tmp_path / "share"
    for make in (lambda: ObjectTier(store), lambda: FolderTier(folder)):
        first = make()
        first.check(LINEAGE)
        again = make()
        again.check(LINEAGE)
        assert again.node == first.node != ""
        with pytest.raises(Conflict, match="holds states of the lineage"):
            make().check(LINEAGE[::-1])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(InvalidInput, match=r"^tiers in buckets need the library obstore: pip"):
        tier_of_url("s3://bucket/run")


def test_a_name_belongs_to_one_place_and_a_place_to_one_name(tmp_path: Path) -> None:
    run, first = tmp_path / "run", f"file://{tmp_path}/first"
    datastates.open(run, config=Config(tiers=[first])).close()
    with pytest.raises(Conflict, match=r"has a tier 'folder' at file:.*first: give the new one"):
        datastates.open(run, config=Config(tiers=[f"file://{tmp_path}/second"]))
    with pytest.raises(Conflict, match="the b tier is the same place as the folder tier"):
        datastates.open(run, config=Config(tiers=[first, f"{first}/?name=b"]))
    second = f"file://{tmp_path}/second?name=second"
    datastates.open(run, config=Config(tiers=[second])).close()
    with datastates.open(run) as repo:
        assert sorted(tier.name for tier in repo.core.tiers.further) == ["folder", "second"]


def test_a_pack_in_a_bucket_is_a_file_of_safetensors() -> None:
    tier = ObjectTier(MemoryStore())
    tier.put(payload("one", {"model/w": numbers(300)}))
    name = tier.manifest("one").packs[0].name
    assert torch.equal(safetensors.torch.load(bytes(tier.read(name)))["model/w"], numbers(300))


def test_equal_chunks_of_the_base_are_referred_to() -> None:
    tier = ObjectTier(MemoryStore())
    large = {"model/w": numbers(CHUNK_BYTES // 2), "optimizer/m": numbers(CHUNK_BYTES, 2)}
    first = tier.put(payload("first", large))
    second = tier.put(payload("second", large, {"step": numbers(4)}), base=first.manifest)
    assert second.bytes_new == 16
    with tier.open("second") as reader:
        assert stream(reader) == chunks_of(payload("second", large, {"step": numbers(4)}))


def test_a_lost_chunk_is_damage_and_a_lost_manifest_no_state() -> None:
    tier = ObjectTier(MemoryStore())
    placed = tier.put(small("lost", 1, 2))
    tier.delete(placed.manifest.packs[0].name)
    with tier.open("lost") as reader, pytest.raises(Corrupt, match="is gone"):
        reader.chunk(0)
    tier.delete("lost.0.manifest")
    assert not tier.has("lost")


def test_another_state_of_the_uid_is_a_conflict() -> None:
    tier = ObjectTier(MemoryStore())
    tier.put(small("twice", 1))
    with pytest.raises(Conflict, match="another state of that uid"):
        tier.put(small("twice", 2))


def test_packs_that_no_manifest_needs_are_orphans_after_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = ObjectTier(MemoryStore())
    tier.put(small("kept", 1))
    tier.write("dead.0-77.safetensors", b"12345678")
    assert tier.orphans() == {}
    monkeypatch.setattr(remote, "ORPHAN_AGE", timedelta(days=-1))
    assert tier.orphans() == {"dead.0-77.safetensors": 8}


def test_each_chunk_is_requested_once_though_tensors_share_it() -> None:
    state, requested = small("s", *range(8)), list[int]()

    def fetch(indices: Sequence[int]) -> list[memoryview]:
        requested.extend(indices)
        return [state.chunks[index] for index in indices]

    order = [0, 1, 2, 0, 3, 4, 0, 5, 6, 7]
    with RemoteReader(state.manifest, fetch, lambda one, other: True, source="here") as reader:
        reader.ahead(order)
        for index in order:
            assert reader.chunk(index) == state.chunks[index]
        assert sorted(requested) == list(range(8))
        assert reader.chunk(0) == state.chunks[0]
        assert requested.count(0) == 2, "nobody said that it is used again, so it was dropped"


def test_a_state_of_many_chunks_comes_back_from_a_bucket(tmp_path: Path) -> None:
    store = MemoryStore()
    layers = [torch.nn.Linear(1500, 700), *(torch.nn.Linear(8, 8) for _ in range(20))]
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in layers))
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    with (
        datastates.open(tmp_path / "run", config=Config(tiers=[ObjectTier(store)])) as repo,
        repo.track(model=model, rng=False) as run,
    ):
        run.capture().wait("external", 60)
    for path in (tmp_path / "run" / "packs").glob("*.*.*"):
        path.unlink()
    with datastates.open(tmp_path / "run", config=Config(tiers=[ObjectTier(store)])) as repo:
        for read in (repo.load, partial(repo.restore, model=model)):
            with torch.no_grad():
                for each in model.parameters():
                    each.zero_()
            found = read("main")
            values = found["model"] if isinstance(found, dict) else model.state_dict()
            assert all(torch.equal(values[name], each) for name, each in expected.items())
