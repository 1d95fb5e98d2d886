"""The local tier: what states have in common that nobody told it are related, and an index that
cannot be relied on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from datastates.state.digest import chunk_digest
from datastates.state.manifest import CHUNK_BYTES, Manifest
from datastates.storage.dedup import SHARED_BYTES, ChunkIndex, Hint
from datastates.storage.local import LocalTier
from datastates.storage.tier import Payload
from datastates.testing.states import chunks_of, numbers, payload, stream
from tests.storage.test_crashes import run
from tests.storage.test_local import flip
from tests.support.effort import part

BIG = SHARED_BYTES + 20


def big(uid: str, *seeds: int) -> Payload:
    """A state of one chunk for each seed that is large enough to be shared."""
    return payload(
        uid, *({f"model/{number}": numbers(BIG // 4, seed)} for number, seed in enumerate(seeds))
    )


def check(tier: LocalTier, *states: Payload) -> None:
    for state in states:
        with tier.open(state.manifest.origin.uid) as reader:
            reader.verify()
            assert stream(reader) == chunks_of(state)
    assert tier.sweep() == []


def packs(manifest: Manifest) -> list[str]:
    return [pack.name for pack in manifest.packs]


def test_states_that_are_not_related_share_their_chunks_after_a_restart_too(tmp_path: Path) -> None:
    LocalTier(tmp_path).put(big("a", 1, 2))
    placed = LocalTier(tmp_path).put(big("b", 3, 1, 2))
    assert placed.bytes_new == BIG
    assert packs(placed.manifest) == ["b.0.safetensors", "a.0.safetensors"]
    again = LocalTier(tmp_path).put(big("c", 2, 3))
    assert again.bytes_new == 0
    assert not (tmp_path / "c.0.safetensors").exists()
    check(LocalTier(tmp_path), big("a", 1, 2), big("b", 3, 1, 2), big("c", 2, 3))


def test_a_base_and_a_stranger_are_shared_with_alike(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    base = tier.put(big("base", 1)).manifest
    tier.put(big("stranger", 2))
    placed = tier.put(big("s", 1, 2, 3, 2), base=base)
    assert placed.bytes_new == BIG
    assert set(packs(placed.manifest)) == {
        "s.0.safetensors",
        "base.0.safetensors",
        "stranger.0.safetensors",
    }
    check(tier, big("s", 1, 2, 3, 2))


def test_whole_chunks_are_shared_with_short_ones_of_any_length(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    groups = [
        {"model/w": numbers(2 * CHUNK_BYTES // 4 + SHARED_BYTES // 4 + 1)},
        {"model/b": numbers(SHARED_BYTES // 2, 1).half()},
    ]
    tier.put(payload("a", *groups))
    assert tier.put(payload("b", *groups)).bytes_new == 0
    check(tier, payload("a", *groups), payload("b", *groups))


def test_small_chunks_are_left_alone(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    state = payload("a", {"model/w": numbers(SHARED_BYTES // 4 - 1)})
    tier.put(state)
    assert (
        tier.put(payload("b", {"model/w": numbers(SHARED_BYTES // 4 - 1)})).bytes_new
        == SHARED_BYTES - 4
    )


def test_a_pack_stays_until_the_last_stranger_that_needs_it_goes(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(big("a", 1, 2))
    tier.put(big("b", 1, 3))
    assert tier.remove("a") == 0
    assert tier.put(big("c", 2)).bytes_new == 0, (
        "what lies in a pack that is needed is found, though its own state is gone"
    )
    check(LocalTier(tmp_path), big("b", 1, 3), big("c", 2))
    assert tier.remove("b") == BIG
    check(LocalTier(tmp_path), big("c", 2))
    assert tier.remove("c") == 2 * BIG
    assert tier.put(big("d", 1, 2)).bytes_new == 2 * BIG
    check(tier, big("d", 1, 2))


def lying(uid: str, claimed: int, seed: int) -> Payload:
    """A state whose chunk has another's digest: what somebody makes who knows how."""
    true, other = big(uid, claimed), big(uid, seed)
    return Payload(true.manifest, other.chunks)


def test_chunks_of_one_digest_and_other_bytes_are_not_taken_for_each_other(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(lying("forged", 1, 666))
    assert tier.put(big("honest", 1)).bytes_new == BIG
    assert tier.put(big("next", 1)).bytes_new == 0
    check(tier, big("honest", 1), big("next", 1))


@pytest.mark.parametrize("offset", [0, BIG - 1, BIG, BIG + 50])
def test_a_chunk_that_rots_is_not_shared(tmp_path: Path, offset: int) -> None:
    tier = LocalTier(tmp_path)
    ref = tier.put(big("a", 1)).manifest.refs[0]
    flip(tmp_path / "a.0.safetensors", ref.offset + offset)
    assert tier.put(big("b", 1)).bytes_new == BIG
    check(tier, big("b", 1))


@pytest.mark.parametrize("wreck", [b"", b"\xff" * 8, (1 << 60).to_bytes(8, "little") + bytes(8192)])
def test_a_pack_that_is_none_any_more_is_not_shared_with(tmp_path: Path, wreck: bytes) -> None:
    tier = LocalTier(tmp_path)
    tier.put(big("a", 1))
    (tmp_path / "a.0.safetensors").write_bytes(wreck)
    assert tier.put(big("b", 1)).bytes_new == BIG
    check(tier, big("b", 1))


def test_a_pack_that_is_removed_while_another_state_is_to_share_it_is_not_missed(
    tmp_path: Path,
) -> None:
    other = LocalTier(tmp_path)
    other.put(big("a", 1, 2))

    def remove(step: str) -> None:
        if step == "pack-written" and "a" in list(other.uids()):
            other.remove("a")

    assert LocalTier(tmp_path, on_step=remove).put(big("b", 1, 3)).bytes_new == 2 * BIG
    check(other, big("b", 1, 3))


def test_a_pack_that_is_replaced_by_one_of_its_size_is_not_taken_for_it(tmp_path: Path) -> None:
    other = LocalTier(tmp_path)
    other.put(big("a", 1, 2))

    def replace(step: str) -> None:
        if step == "pack-written" and len(list(other.uids())) == 1:
            other.remove("a")
            other.put(big("a", 5, 6))
            other.put(big("end", 9))

    assert LocalTier(tmp_path, on_step=replace).put(big("b", 1, 3)).bytes_new == 2 * BIG
    check(other, big("a", 5, 6), big("b", 1, 3))


# The index


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, 5000)


def longer(path: Path) -> None:
    os.truncate(path, 3 * path.stat().st_size)


def huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def zeros(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def shifted(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[7:] + data[:7])


def of_another_folder(path: Path) -> None:
    other = path.parent / "other"
    LocalTier(other).put(big("a", 9, 8, 2, 1))
    path.write_bytes((other / ".chunks").read_bytes())
    for file in other.iterdir():
        file.unlink()
    other.rmdir()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


WRECKS = [
    a_link,
    missing,
    empty,
    cut,
    longer,
    huge,
    zeros,
    garbage,
    shifted,
    of_another_folder,
    a_folder,
]


@pytest.mark.parametrize("wreck", WRECKS)
def test_nothing_depends_on_the_index(tmp_path: Path, wreck: Callable[[Path], None]) -> None:
    tier = LocalTier(tmp_path)
    tier.put(big("a", 1, 2))
    wreck(tmp_path / ".chunks")
    placed = LocalTier(tmp_path).put(big("b", 3, 2, 1))
    tier.put(big("c", 1, 2, 3), base=placed.manifest)
    check(LocalTier(tmp_path), big("a", 1, 2), big("b", 3, 2, 1), big("c", 1, 2, 3))
    tier.remove("a")
    tier.remove("b")
    check(LocalTier(tmp_path), big("c", 1, 2, 3))


def test_no_flip_in_the_index_changes_what_is_stored(tmp_path: Path) -> None:
    """All positions of four entries, one of them of the state (in the gate a twelfth of them): some
    say that a chunk lies within or behind another one."""
    tier = LocalTier(tmp_path)
    tier.put(big("a", 1, 2, 3))
    path = tmp_path / ".chunks"
    whole = path.read_bytes()
    starts = sorted({at - at % 64 for at, byte in enumerate(whole) if byte})
    assert len(starts) == 4
    for at in part(start + byte for start in starts for byte in range(64)):
        flip(path, at, 1 << at % 8)
        tier.put(big("b", 1, 2, 3))
        check(tier, big("a", 1, 2, 3), big("b", 1, 2, 3))
        tier.remove("b")
        path.write_bytes(whole)


def test_an_index_that_is_a_link_is_not_written_to(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(big("a", 1))
    a_link(tmp_path / ".chunks")
    before = (tmp_path / "elsewhere").read_bytes()
    tier.put(big("b", 2))
    assert (tmp_path / "elsewhere").read_bytes() == before


@pytest.mark.parametrize("wreck", [missing, empty, cut, longer, huge])
def test_an_index_that_is_missing_begins_with_what_the_newest_manifests_say(
    tmp_path: Path, wreck: Callable[[Path], None]
) -> None:
    tier = LocalTier(tmp_path)
    tier.put(big("a", 1, 2))
    tier.put(big("b", 3, 2))
    (tmp_path / "rotten.0.manifest").write_bytes(b"no manifest")
    wreck(tmp_path / ".chunks")
    assert LocalTier(tmp_path).put(big("c", 1, 3, 2)).bytes_new == 0


def test_a_folder_that_was_copied_shares_within_itself(tmp_path: Path) -> None:
    LocalTier(tmp_path / "one").put(big("a", 1, 2))
    (tmp_path / "other").mkdir()
    for file in (tmp_path / "one").iterdir():
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    for file in (tmp_path / "one").iterdir():
        file.unlink()
    copy = LocalTier(tmp_path / "other")
    assert copy.put(big("b", 1)).bytes_new == 0
    check(copy, big("a", 1, 2), big("b", 1))


def found_in(index: ChunkIndex, keys: Iterable[tuple[bytes, int]]) -> list[Hint]:
    return [each for hints in index.find(keys).values() for each in hints]


def hint(number: int, pack: str = "a.0.safetensors", *, digest: bytes | None = None) -> Hint:
    return Hint(
        (chunk_digest(number.to_bytes(4, "little")) if digest is None else digest, CHUNK_BYTES),
        pack,
        4096 * number,
    )


def test_the_index_grows_and_forgets_only_what_lies_in_packs_that_are_gone(tmp_path: Path) -> None:
    index = ChunkIndex(tmp_path)
    assert found_in(index, [hint(0).key]) == []
    (tmp_path / "a.0.safetensors").touch()
    for start in range(0, 20_000, 250):
        index.add(
            hint(number, "ab"[number % 2] + ".0.safetensors")
            for number in range(start, start + 250)
        )
    kept = [hint(number) for number in range(0, 20_000, 2)]
    assert found_in(index, (each.key for each in kept)) == kept
    gone = [hint(number).key for number in range(1, 20_000, 2)]
    assert 0 < len(found_in(index, gone)) < len(gone)
    assert (tmp_path / ".chunks").stat().st_size <= 4 << 20
    assert {path.name for path in tmp_path.iterdir()} == {".chunks", "a.0.safetensors"}


def test_users_who_share_a_folder_share_its_index(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    index = ChunkIndex(tmp_path)
    for start in (0, 5000):
        index.find([hint(0).key])
        index.add(hint(number) for number in range(start))
        assert (tmp_path / ".chunks").stat().st_mode & 0o660 == 0o660
    assert (tmp_path / ".chunks").stat().st_size > 64 << 10


def test_digests_that_are_made_to_fall_together_do_not_make_the_index_grow(tmp_path: Path) -> None:
    index = ChunkIndex(tmp_path)
    index.find([hint(0).key])
    size = (tmp_path / ".chunks").stat().st_size
    forged = [hint(number, digest=b"same" + number.to_bytes(12, "big")) for number in range(1000)]
    index.add(forged)
    assert (tmp_path / ".chunks").stat().st_size == size
    assert found_in(index, (each.key for each in forged)) == forged[-64:]


def test_the_newest_hint_about_a_chunk_comes_first_and_names_that_reach_elsewhere_are_not_given(
    tmp_path: Path,
) -> None:
    index = ChunkIndex(tmp_path)
    index.find([hint(0).key])
    index.add(
        [
            hint(1, "a.0.safetensors"),
            hint(1, "b.0.safetensors"),
            hint(1, "../b.0.safetensors"),
            hint(1, "x" * 40 + ".0.safetensors"),
        ]
    )
    assert [found.pack for found in found_in(index, [hint(1).key])] == [
        "b.0.safetensors",
        "a.0.safetensors",
    ]
    assert found_in(index, [(hint(1).key[0], 5)]) == []


_ADDERS = """
import os, sys
from pathlib import Path
from datastates.storage.dedup import ChunkIndex
from tests.storage.test_borrowing import hint

root = Path(sys.argv[1])
children = []
for name in "abc":
    child = os.fork()
    if not child:
        index = ChunkIndex(root)
        index.find([hint(0).key])
        (root / f"{name}.0.safetensors").touch()
        for start in range(0, 3000, 100):
            index.add(hint(10_000 * ord(name) + number, f"{name}.0.safetensors") for number in range(start, start + 100))
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""


def test_processes_add_to_one_index(tmp_path: Path) -> None:
    run(_ADDERS, tmp_path)
    wanted = [
        hint(10_000 * ord(name) + number, f"{name}.0.safetensors")
        for name in "abc"
        for number in range(3000)
    ]
    assert found_in(ChunkIndex(tmp_path), (each.key for each in wanted)) == wanted


def test_a_manifest_without_places_is_no_source(tmp_path: Path) -> None:
    from datastates.state.digest import encode

    (tmp_path / "bare.0.manifest").write_bytes(
        encode(msgspec.structs.replace(big("bare", 1).manifest, packs=(), refs=()))
    )
    assert LocalTier(tmp_path).put(big("a", 1)).bytes_new == BIG
