"""Garbage in a folder of packs: found, deleted, rewritten; beside readers, and wherever it is
killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from datastates.errors import Conflict
from datastates.state.digest import encode
from datastates.state.manifest import Manifest
from datastates.storage import dedup
from datastates.storage.durable_files import temporary
from datastates.storage.garbage import CollectReport
from datastates.storage.local import LocalTier
from datastates.system.files import hold
from datastates.testing import fail_at
from datastates.testing.states import chunks_of, small, stream
from tests.support import warm

ROOT = Path(__file__).parents[2]
SEEDS = {"a": (1, 2, 3, 4, 5), "b": (1, 6), "c": (1, 2, 7)}


def sparse(root: Path) -> LocalTier:
    """A folder whose first pack, of five chunks, is needed by two states, which need two of
    them; its own state is gone."""
    tier = LocalTier(root)
    base = tier.put(small("a", *SEEDS["a"])).manifest
    tier.put(small("b", *SEEDS["b"]), base=base)
    tier.put(small("c", *SEEDS["c"]), base=base)
    tier.forget(["a"])
    return tier


def check(tier: LocalTier, *uids: str) -> None:
    """Each of these states restores equal, and no other is here."""
    assert sorted(tier.uids()) == sorted(uids)
    for uid in uids:
        with tier.open(uid) as reader:
            reader.verify()
            assert stream(reader) == chunks_of(small(uid, *SEEDS[uid]))


def packs(root: Path) -> set[str]:
    return {path.name for path in root.glob("*.safetensors")}


def test_a_pack_stays_if_a_state_that_needs_it_would_have_a_manifest_too_large_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = sparse(tmp_path)
    monkeypatch.setattr(dedup, "MAX_MANIFEST", 100)
    done = tier.collect()
    assert (done.rewritten, "a.0.safetensors" in packs(tmp_path)) == (0, True)
    assert "a.0.safetensors" in done.left[0]
    check(tier, "b", "c")


def test_a_pack_most_of_whose_bytes_are_dead_is_rewritten(tmp_path: Path) -> None:
    tier = sparse(tmp_path)
    digests = {uid: tier.manifest(uid).digest for uid in "bc"}
    planned = tier.collect(is_dry=True)
    before = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    told: list[tuple[int, int]] = []
    done = tier.collect(tell=lambda *each: told.append(each))
    assert (planned.rewritten, done.rewritten, done.left) == (1, 1, [])
    assert "a.0.safetensors" not in packs(tmp_path)
    after = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert done.rewritten_bytes == before - after
    assert told[-1][0] == done.rewritten_bytes
    assert {uid: tier.manifest(uid).digest for uid in "bc"} == digests, (
        "places are no part of what a state is"
    )
    check(tier, "b", "c")
    check(LocalTier(tmp_path), "b", "c")
    assert tier.collect() == CollectReport()


def test_a_pack_that_is_mostly_needed_stays(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    base = tier.put(small("a", *SEEDS["a"])).manifest
    tier.put(small("x", 1, 2, 3), base=base)
    tier.forget(["a"])
    assert tier.collect() == CollectReport()


def test_a_reader_goes_on_with_a_pack_that_is_rewritten(tmp_path: Path) -> None:
    tier = sparse(tmp_path)
    with tier.open("c") as reader:
        assert tier.collect().rewritten == 1
        assert stream(reader) == chunks_of(small("c", *SEEDS["c"]))


def test_a_state_that_was_put_by_a_base_whose_pack_was_rewritten_is_whole(tmp_path: Path) -> None:
    tier = sparse(tmp_path)
    base = tier.manifest("c")
    tier.collect()
    tier.put(small("b2", 1, 2, 9), base=base, is_of_base=True)
    with tier.open("b2") as reader:
        assert stream(reader) == chunks_of(small("b2", 1, 2, 9))


def test_a_state_that_comes_while_a_pack_is_rewritten_keeps_it(tmp_path: Path) -> None:
    sparse(tmp_path)
    came: list[str] = []

    def bring(step: str) -> None:
        if step == "pack-moved" and not came:
            came.append(step)
            other = LocalTier(tmp_path)
            other.put(small("late", 2, 3, 8), base=other.manifest("c"))

    tier = LocalTier(tmp_path, on_step=bring)
    tier.collect()
    with tier.open("late") as reader:
        reader.verify()
    with tier.open("b") as reader:
        reader.verify()


def test_a_state_that_is_dropped_while_its_chunks_move_does_not_come_back(tmp_path: Path) -> None:
    sparse(tmp_path)
    tier = LocalTier(
        tmp_path,
        on_step=lambda step: LocalTier(tmp_path).forget(["b"]) if step == "pack-moved" else None,
    )
    tier.collect()
    check(LocalTier(tmp_path), "c")
    tier.collect()
    assert not list(tmp_path.glob("b.*"))


def test_chunks_that_moved_with_a_state_that_is_dropped_move_again_for_the_others(
    tmp_path: Path,
) -> None:
    """The pack that they were moved into was the dropped state's alone: the next state has not
    yet said that it needs it."""
    sparse(tmp_path)

    def drop(step: str) -> None:
        if step == "manifest-replaced" and LocalTier(tmp_path).has("b"):
            LocalTier(tmp_path).remove("b")

    done = LocalTier(tmp_path, on_step=drop).collect()
    assert (done.rewritten, done.left) == (1, [])
    check(LocalTier(tmp_path), "c")
    assert len(packs(tmp_path)) == 2, "its own, and what was moved"


def test_a_pack_that_a_state_needs_by_now_stays(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    base = tier.put(small("a", *SEEDS["a"])).manifest
    tier.forget(["a"])
    came: list[str] = []

    def bring(done: int, total: int) -> None:
        if not came:
            assert total > 0, "the pack is garbage so far"
            came.append("c")
            LocalTier(tmp_path).put(small("c", *SEEDS["c"]), base=base)

    assert tier.collect(tell=bring).packs == 0
    check(tier, "c")


def test_what_is_written_just_now_stays(tmp_path: Path) -> None:
    tier = sparse(tmp_path)
    (tmp_path / ".tmp-dead.0.safetensors").write_bytes(b"x" * 100)
    with temporary(tmp_path / "new.0.safetensors") as file:
        planned = tier.collect(is_dry=True)
        done = tier.collect()
        assert file.path.exists()
    assert (
        (planned.temporaries, planned.temporary_bytes)
        == (done.temporaries, done.temporary_bytes)
        == (1, 100)
    )


def test_a_second_collection_is_refused(tmp_path: Path) -> None:
    tier = sparse(tmp_path)
    held = hold(tmp_path / ".collecting")
    assert held is not None
    with pytest.raises(Conflict, match="another process collects garbage"):
        tier.collect()
    held.close()
    assert tier.collect().rewritten == 1


def newer(path: Path) -> None:
    """A whole manifest of a version that nobody knows."""
    from datastates.state.digest import wrap

    path.write_bytes(wrap(99, msgspec.msgpack.encode([99, "digest"])))


@pytest.mark.parametrize("kind", ["cut", "newer", "link", "fifo"])
def test_nothing_is_removed_while_a_manifest_cannot_be_read(tmp_path: Path, kind: str) -> None:
    tier = sparse(tmp_path)
    (tmp_path / "stray.0.safetensors").write_bytes(b"x")
    strange = tmp_path / "s.0.manifest"
    if kind == "cut":
        strange.write_bytes((tmp_path / "b.0.manifest").read_bytes()[:-1])
    elif kind == "newer":
        newer(strange)
    elif kind == "link":
        strange.symlink_to(tmp_path / "b.0.manifest")
    else:
        os.mkfifo(strange)
    before = packs(tmp_path)
    done = tier.collect()
    assert packs(tmp_path) == before
    assert done.packs == done.rewritten == 0
    assert "s.0.manifest cannot be read" in done.left[0]
    strange.unlink()
    assert tier.collect().packs == 1


def test_links_and_pipes_with_names_of_packs_are_never_read_or_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "packs", tmp_path / "precious"
    elsewhere.write_bytes(b"precious")
    tier = sparse(folder)
    (folder / "x.0.safetensors").symlink_to(elsewhere)
    (folder / ".tmp-x.0.manifest").symlink_to(elsewhere)
    os.mkfifo(folder / ".tmp-y.0.manifest")
    os.mkfifo(folder / "y.0.safetensors")
    tier.collect()
    assert elsewhere.read_bytes() == b"precious"
    check(tier, "b", "c")


def test_a_damaged_chunk_stays_where_it_is_and_is_said(tmp_path: Path) -> None:
    tier = sparse(tmp_path)
    path = tmp_path / "a.0.safetensors"
    data = bytearray(path.read_bytes())
    ref = tier.manifest("b").refs[0]
    data[ref.offset] ^= 1
    path.write_bytes(data)
    done = tier.collect()
    assert done.rewritten == 0
    assert path.exists()
    assert "fail their digest" in done.left[0]


def test_a_full_disk_ends_nothing_but_the_rewriting(tmp_path: Path) -> None:
    sparse(tmp_path)
    (tmp_path / "stray.0.safetensors").write_bytes(b"x")
    done = LocalTier(tmp_path, on_step=fail_at("pack-moved")).collect()
    assert (done.packs, done.rewritten) == (1, 0)
    assert "no space left" in done.left[0]
    check(LocalTier(tmp_path), "b", "c")
    assert LocalTier(tmp_path).collect().rewritten == 1


_STEPS = ["pack-moved", "pack-renamed", "manifest-replaced", "manifest-replaced:1", "pack-removed"]

_KILLED = """
import os, sys
from pathlib import Path
from datastates.storage.local import LocalTier
from datastates.testing import crash_at

for step in sys.argv[2:]:
    name, _, after = step.partition(":")
    child = os.fork()
    if not child:
        LocalTier(Path(sys.argv[1], step), on_step=crash_at(name, after=int(after or 0))).collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137, step
"""


@pytest.fixture(scope="module")
def wrecks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each step, in which a collection died right after it."""
    folder = tmp_path_factory.mktemp("wrecks")
    for step in _STEPS:
        sparse(folder / step)
    done = warm.run(
        [sys.executable, "-c", _KILLED, str(folder), *_STEPS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("step", _STEPS)
def test_a_collection_that_is_killed_loses_nothing_and_the_next_one_goes_on(
    wrecks: Path, step: str
) -> None:
    tier = LocalTier(wrecks / step)
    check(tier, "b", "c")
    tier.collect()
    check(tier, "b", "c")
    assert "a.0.safetensors" not in packs(wrecks / step)
    assert not list((wrecks / step).glob(".tmp-*"))
    assert tier.collect() == CollectReport()


def test_the_digest_of_a_state_covers_no_places(tmp_path: Path) -> None:
    manifest = LocalTier(tmp_path).put(small("s", 1, 2)).manifest
    moved = msgspec.structs.replace(manifest.packs[0], name="elsewhere.0.safetensors")
    elsewhere = msgspec.structs.replace(manifest, packs=(moved,))
    from datastates.state.digest import decode

    assert decode(encode(elsewhere), source="here").digest == manifest.digest
    assert isinstance(elsewhere, Manifest)
