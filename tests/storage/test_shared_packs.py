"""States that are written together: one pack, one file of manifests, and each of them restored,
removed, moved and found by itself."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import safetensors
import torch
from msgspec.structs import replace

from datastates.errors import Conflict, Corrupt, NotFound, Unavailable, Unsupported
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.local import LocalTier, Put
from datastates.storage.pack import Catalogue, ManifestFile
from datastates.storage.tier import Payload, Placed
from datastates.testing import fail_at
from datastates.testing.states import chunks_of, numbers, part, payload, small, stream
from tests.support.effort import part as some

STEPS = ("pack-written", "pack-renamed", "manifest-written", "manifest-renamed")


def put(tier: LocalTier, *states: Payload) -> list[Placed]:
    return tier.put_all([Put(state) for state in states])


def names(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name.endswith((".manifest", ".safetensors"))}


def check(tier: LocalTier, *states: Payload) -> None:
    """These states are here, whole, and no others."""
    assert sorted(tier.uids()) == sorted(state.manifest.origin.uid for state in states)
    for state in states:
        with tier.open(state.manifest.origin.uid) as reader:
            reader.verify()
            assert stream(reader) == chunks_of(state)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << offset % 8
    path.write_bytes(data)


def mixed(uid: str, seed: int) -> Payload:
    """A state of a full chunk, a chunk that is page-aligned, and a small one."""
    return payload(uid, {"w": numbers(CHUNK_BYTES // 4 + 40_000, seed)}, {"b": numbers(25, seed)})


@pytest.mark.parametrize("direct", [True, False])
def test_states_share_a_pack_and_a_file_of_manifests(tmp_path: Path, direct: bool) -> None:
    tier = LocalTier(tmp_path, direct=direct and LocalTier(tmp_path).is_direct)
    states = [small("a", 1, 2), mixed("b", 3), small("c", 4), mixed("d", 5)]
    placed = put(tier, *states)
    assert names(tmp_path) == {"a.0.manifest", "a.0.safetensors"}
    assert [each.bytes_new for each in placed] == [
        sum(map(len, chunks_of(state))) for state in states
    ]
    for opened in (tier, LocalTier(tmp_path)):
        check(opened, *states)
        assert [opened.has(uid) for uid in "abcdx"] == [True] * 4 + [False]
    with safetensors.safe_open(tmp_path / "a.0.safetensors", "pt") as pack:
        assert torch.equal(pack.get_tensor("b.0/w"), numbers(CHUNK_BYTES // 4 + 40_000, 3))
        assert bytes(pack.get_tensor("c.0/chunk.0").numpy())[:100] == chunks_of(states[2])[0]


def test_equal_chunks_of_one_group_are_stored_once_and_forged_digests_are_not_believed(
    tmp_path: Path,
) -> None:
    one, other = small("a", 1, 2), small("b", 2, 3)
    forged = small("c", 9)
    content = replace(forged.manifest.content, chunks=one.manifest.content.chunks[:1])
    lying = Payload(replace(forged.manifest, content=content), forged.chunks)
    tier = LocalTier(tmp_path)
    from datastates.state.digest import state_digest

    lying = Payload(replace(lying.manifest, digest=state_digest(content, ())), lying.chunks)
    placed = put(tier, one, other, lying)
    assert [each.bytes_new for each in placed] == [200, 100, 100]
    with tier.open("c", verify=False) as reader:
        assert stream(reader) == chunks_of(forged)


def test_a_state_of_18_tensors_and_3900_bytes_takes_less_than_6_kb(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    states = [
        payload(
            f"{n:024x}", {f"model/layers.{i}.weight": numbers(54, 100 * n + i) for i in range(18)}
        )
        for n in range(50)
    ]
    put(tier, *states)
    assert sum((tmp_path / name).stat().st_size for name in names(tmp_path)) < 50 * 6000
    check(tier, *states)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "no space left on device"), KeyboardInterrupt()]
)
def test_a_step_that_fails_leaves_none_of_the_group(
    tmp_path: Path, step: str, error: BaseException
) -> None:
    put(LocalTier(tmp_path), small("base", 1, 2))
    before = names(tmp_path)
    tier = LocalTier(tmp_path, on_step=fail_at(step, error))
    with pytest.raises(Unavailable if isinstance(error, OSError) else KeyboardInterrupt):
        put(tier, small("a", 2, 3), small("b", 4))
    assert names(tmp_path) == before
    put(tier, small("a", 2, 3), small("b", 4))
    check(tier, small("base", 1, 2), small("a", 2, 3), small("b", 4))


def test_one_state_that_cannot_be_read_again_keeps_the_group_from_the_disk(tmp_path: Path) -> None:
    bad = small("b", 2)
    bad = Payload(replace(bad.manifest, origin=replace(bad.manifest.origin, step=-1)), bad.chunks)
    with pytest.raises(Unsupported, match="state b was not written"):
        put(LocalTier(tmp_path), small("a", 1), bad)
    assert names(tmp_path) == set()


def test_states_that_are_here_are_not_written_again_and_others_of_their_uid_are_refused(
    tmp_path: Path,
) -> None:
    tier = LocalTier(tmp_path)
    put(tier, small("a", 1), small("b", 2))
    placed = put(LocalTier(tmp_path), small("b", 2), small("c", 3), small("a", 1))
    assert [(each.manifest.origin.uid, each.bytes_new) for each in placed] == [
        ("b", 0),
        ("c", 100),
        ("a", 0),
    ]
    with pytest.raises(Conflict, match="another state of that uid"):
        put(tier, small("d", 4), small("b", 9))
    check(tier, small("a", 1), small("b", 2), small("c", 3))


def test_each_state_is_removed_by_itself_and_the_pack_with_the_last(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    states = [small(uid, ord(uid)) for uid in "abcd"]
    put(tier, *states)
    other = LocalTier(tmp_path)
    for gone in (
        0,
        2,
        1,
    ):
        # the first one, whose name the files have, is the dictionary of the others
        tier.remove(states[gone].manifest.origin.uid)
        with pytest.raises(NotFound):
            tier.open(states[gone].manifest.origin.uid)
        states_left = [state for state in states if state.manifest.origin.uid in set(tier.uids())]
        check(other, *states_left)
        assert names(tmp_path) == {"a.0.manifest", "a.0.safetensors"}
    assert tier.remove("d") == 400
    assert names(tmp_path) == set()


def test_the_folder_is_listed_once_to_remove_states_of_many_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = LocalTier(tmp_path)
    groups = [[small(f"g{number}-{k}", number, k) for k in range(3)] for number in range(6)]
    for group in groups:
        put(tier, *group)
    listings, listed = 0, Catalogue.listed

    def counted(catalogue: Catalogue) -> dict[str, ManifestFile]:
        nonlocal listings
        listings += 1
        return listed(catalogue)

    monkeypatch.setattr(Catalogue, "listed", counted)
    tier.forget([group[1].manifest.origin.uid for group in groups])
    assert listings == 1
    check(tier, *(state for group in groups for state in (group[0], group[2])))


def test_a_uid_that_comes_back_gets_files_of_its_own(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    put(tier, small("a", 1), small("b", 2))
    tier.forget(["a"])
    tier.put(small("a", 3))
    assert names(tmp_path) == {
        "a.0.manifest",
        "a.0.safetensors",
        "a.0-1.manifest",
        "a.0-1.safetensors",
    }
    check(LocalTier(tmp_path), small("a", 3), small("b", 2))
    tier.remove("a")
    check(LocalTier(tmp_path), small("b", 2))


def test_states_are_found_without_the_index(tmp_path: Path) -> None:
    put(LocalTier(tmp_path), small("a", 1), small("b", 2), small("c", 3))
    (tmp_path / ".chunks").unlink()
    check(LocalTier(tmp_path), small("a", 1), small("b", 2), small("c", 3))
    (tmp_path / ".chunks").write_bytes(os.urandom(1 << 16))
    check(LocalTier(tmp_path), small("a", 1), small("b", 2), small("c", 3))


def test_a_later_state_refers_to_chunks_of_any_state_of_a_group(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    put(tier, mixed("a", 1), mixed("b", 2))
    placed = tier.put(mixed("c", 2), base=tier.manifest("b"), is_of_base=True)
    assert placed.bytes_new == 0
    tier.remove("b")
    check(tier, mixed("a", 1), mixed("c", 2))


def test_a_collection_moves_what_few_states_of_a_group_still_need(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    states = [mixed(f"s{n}", n) for n in range(5)]
    put(tier, *states)
    tier.forget(["s0", "s2", "s3"])
    before = tier.bytes_stored
    done = tier.collect()
    assert (done.rewritten, done.left) == (1, [])
    assert tier.bytes_stored < before // 2
    check(LocalTier(tmp_path), states[1], states[4])
    assert [tier.manifest(uid).bytes_new for uid in ("s1", "s4")] == [
        CHUNK_BYTES + 160_000 + 100
    ] * 2, "what its put added, as before"


def test_bytes_of_a_pack_are_divided_among_its_states(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    put(tier, *(mixed(f"s{n}", n) for n in range(4)))

    def taken() -> tuple[int, int]:
        of_packs = {
            name: size
            for each in tier.files().values()
            for name, size in each
            if ".safetensors" in name
        }
        return len(tier.files()), sum(of_packs.values())

    for count in (4, 3, 2):
        assert taken()[0] == count
        assert taken()[1] == pytest.approx(tier.bytes_stored, abs=100), (
            "with its part of what nothing needs"
        )
        tier.forget([next(tier.uids())])
    assert taken() == (1, tier.bytes_stored)


@pytest.mark.parametrize("which", ["manifest", "safetensors"])
def test_a_flipped_byte_damages_only_states_that_need_it_and_these_are_named(
    tmp_path: Path, which: str
) -> None:
    """All bytes of a pack, and of its file of manifests (in the gate a twelfth of them)."""
    tier = LocalTier(tmp_path)
    states = {uid: small(uid, ord(uid), ord(uid) + 50) for uid in "abc"}
    put(tier, *states.values())
    path = tmp_path / f"a.0.{which}"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little") if which == "safetensors" else 0
    first = (
        next(frame for offset, frame in ((at, at) for at in frame_starts(path)) if offset > 0)
        if which == "manifest"
        else 0
    )
    for offset in some(range(path.stat().st_size)):
        flip(path, offset)
        hurt = dict[str, str]()
        for uid, state in states.items():
            try:
                with tier.open(uid) as reader:
                    reader.verify()
                    assert stream(reader) == chunks_of(state)
            except Corrupt as exc:
                hurt[uid] = str(exc)
        assert all(str(path) in said for said in hurt.values())
        assert len(hurt) == (3 if offset < (header or first) else 1), offset
        flip(path, offset)
    check(tier, *states.values())


def frame_starts(path: Path) -> list[int]:
    from datastates.state.digest import frames

    return [offset for offset, _ in frames(path.read_bytes())]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_manifest_can_be_removed_and_written_again(tmp_path: Path, which: int) -> None:
    tier = LocalTier(tmp_path)
    states = [small("a", 1), small("b", 2), small("c", 3)]
    put(tier, *states)
    flip(tmp_path / "a.0.manifest", frame_starts(tmp_path / "a.0.manifest")[which] + 40)
    assert tier.sweep() == [], "the damaged manifest may need any pack"
    hurt = [state for state in states if not is_whole(tier, state)]
    assert hurt == (states if which == 0 else [states[which]])
    for state in hurt:
        tier.forget([state.manifest.origin.uid])
        tier.put(state)
    check(tier, *states)
    assert tier.sweep() == ([tmp_path / "a.0.safetensors"] if which == 0 else [])


def is_whole(tier: LocalTier, state: Payload) -> bool:
    try:
        tier.open(state.manifest.origin.uid).close()
    except Corrupt:
        return False
    return True


def test_ranks_of_one_state_share_a_group(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    put(tier, part("s", 0, 1), part("s", 1, 2))
    for rank in (0, 1):
        with tier.open_part("s", rank) as reader:
            assert stream(reader) == chunks_of(part("s", rank, rank + 1))
    assert sorted(tier.parts()) == [("s", 0), ("s", 1)]
    assert set(tier.whole_parts([("s", 0), ("s", 1), ("s", 2)])) == {("s", 0), ("s", 1)}


def write_for_ever(folder: Path, name: str) -> None:
    tier = LocalTier(folder)
    for number in range(100_000):
        put(tier, *(small(f"{name}{number}-{k}", number, k) for k in range(4)))


@pytest.mark.parametrize("seed", some(range(12)))
def test_a_kill_leaves_whole_groups_and_two_processes_do_not_disturb_each_other(
    tmp_path: Path, seed: int
) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_for_ever, args=(tmp_path, name)) for name in ("x", "y")]
    for writer in writers:
        writer.start()
    while len(names(tmp_path)) < 20 + seed:
        assert all(writer.is_alive() for writer in writers)
    for writer in writers:
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    tier = LocalTier(tmp_path)
    tier.sweep()
    found = sorted(tier.uids())
    assert len(found) % 4 == 0
    for uid in found:
        group, number = uid.rsplit("-", 1)
        with tier.open(uid) as reader:
            reader.verify()
            assert stream(reader) == chunks_of(small(uid, int(group[1:]), int(number)))
    manifests = {
        name.removesuffix(".manifest") for name in names(tmp_path) if name.endswith(".manifest")
    }
    assert {
        name.removesuffix(".safetensors")
        for name in names(tmp_path)
        if name.endswith(".safetensors")
    } == manifests
