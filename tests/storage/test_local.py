"""The local tier: the suite by direct and by buffered writes, and what only it does."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from datastates.errors import Corrupt, NotFound, Unavailable, Unsupported
from datastates.state.digest import encode
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage import dedup, pack_reader
from datastates.storage import pack as references
from datastates.storage.durable_files import Temporary, temporary
from datastates.storage.local import LocalTier
from datastates.storage.tier import Payload, Tier
from datastates.system.files import close_lockable, open_regular
from datastates.system.threads import io_hook
from datastates.testing import TierSuite, fail_at
from datastates.testing.states import chunks_of, numbers, part, payload, small, stream

MIB = 1 << 20
STEPS = ["pack-written", "pack-renamed", "manifest-written", "manifest-renamed"]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock", ".chunks"}


@pytest.fixture(scope="module")
def supports_direct(tmp_path_factory: pytest.TempPathFactory) -> bool:
    return LocalTier(tmp_path_factory.mktemp("probe")).is_direct


class TestLocalTier(TierSuite):
    keeps_whole_packs = True

    @pytest.fixture(params=["direct", "buffered"])
    def tier(
        self, request: pytest.FixtureRequest, tmp_path: Path, supports_direct: bool
    ) -> Iterator[LocalTier]:
        if request.param == "direct" and not supports_direct:
            pytest.skip("this file system has no direct I/O")
        tier = LocalTier(tmp_path, direct=request.param == "direct")
        yield tier
        if not tier._is_closed:
            assert tier.sweep() == []  # whatever the test did, nothing is left behind
            for uid in list(tier.uids()):
                tier.remove(uid)
            assert files(tmp_path) == set()

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        assert isinstance(tier, LocalTier)
        manifest = tier.manifest(uid)
        ref = manifest.refs[chunk]
        flip(tier.root / manifest.packs[ref.pack].name, ref.offset + byte)


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_memory_that_is_aligned_or_not_is_written_alike(
    tmp_path: Path, direct: bool, is_aligned: bool, supports_direct: bool
) -> None:
    if direct and not supports_direct:
        pytest.skip("this file system has no direct I/O")
    groups = [
        {"a": numbers(CHUNK_BYTES // 4 * 5 + 1500)},
        {"b": numbers(1)},
        {"c": numbers(1024)},
        {"d": numbers(1025)},
    ]
    LocalTier(tmp_path / "one", direct=direct).put(payload("s", *groups, is_aligned=is_aligned))
    LocalTier(tmp_path / "other", direct=False).put(payload("s", *groups))
    for name in ("s.0.safetensors", "s.0.manifest"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize("direct", [None, False])
def test_a_write_that_the_kernel_cuts_short_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool | None
) -> None:
    real = os.pwritev

    def cut(fd: int, views: list[memoryview], offset: int) -> int:
        return (
            real(fd, [*views[:1], views[1][:8192]], offset)
            if len(views) > 1
            else real(fd, [views[0][: 1 << 20]], offset)
        )

    # the kernel does so beyond 2 GiB, and when it is interrupted
    monkeypatch.setattr(os, "pwritev", cut)
    state = payload(
        "s", {"a": numbers(CHUNK_BYTES // 4 * 5 + 1500)}, {"b": numbers(1)}, is_aligned=True
    )
    tier = LocalTier(tmp_path, direct=direct)
    tier.put(state)
    with tier.open("s") as reader:
        reader.verify()
        assert stream(reader) == chunks_of(state)


def test_a_state_with_nothing_new_has_no_pack(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    base = tier.put(small("base", 1, 2)).manifest
    tier.put(small("same", 2, 1), base=base)
    tier.put(payload("empty"))
    assert files(tmp_path) == {
        "base.0.safetensors",
        "base.0.manifest",
        "same.0.manifest",
        "empty.0.manifest",
    }


def test_a_manifest_refers_to_packs_that_it_needs_and_no_others(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    first = tier.put(small("first", 1, 2)).manifest
    second = tier.put(small("second", 2, 3), base=first).manifest
    third = tier.put(small("third", 3, 4), base=second).manifest
    assert [pack.name for pack in second.packs] == ["second.0.safetensors", "first.0.safetensors"]
    assert [pack.name for pack in third.packs] == ["third.0.safetensors", "second.0.safetensors"]
    tier.remove("first")
    assert "first.0.safetensors" in files(tmp_path)
    tier.remove("second")
    assert files(tmp_path) == {"third.0.manifest", "third.0.safetensors", "second.0.safetensors"}


def test_steps_are_told_in_order(tmp_path: Path) -> None:
    seen: list[tuple[str, set[str]]] = []
    tier = LocalTier(tmp_path, on_step=lambda step: seen.append((step, files(tmp_path))))
    tier.put(small("s", 1))
    pack, manifest, new_pack, new_manifest = (
        "s.0.safetensors",
        "s.0.manifest",
        ".tmp-s.0.safetensors",
        ".tmp-s.0.manifest",
    )
    assert seen == [
        ("pack-written", {new_pack, new_manifest}),
        ("pack-renamed", {pack, new_manifest}),
        ("manifest-written", {pack, new_manifest}),
        ("manifest-renamed", {pack, manifest}),
    ]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "no space left on device"), KeyboardInterrupt()]
)
def test_a_step_that_fails_leaves_nothing(tmp_path: Path, step: str, error: BaseException) -> None:
    tier = LocalTier(tmp_path, on_step=fail_at(step, error))
    base = LocalTier(tmp_path).put(small("base", 1, 2)).manifest
    before = files(tmp_path)
    with pytest.raises(Unavailable if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        tier.put(small("s", 2, 3), base=base)
    if isinstance(error, OSError):
        assert caught.match(
            "state s was not written to .*no space left.*needs up to 224 bytes, [0-9]+ are free"
        )
    assert files(tmp_path) == before
    assert tier.put(small("s", 2, 3), base=base).bytes_new == 100
    with tier.open("s") as reader:
        assert stream(reader) == chunks_of(small("s", 2, 3))


@pytest.mark.parametrize(
    "origin",
    [
        {"step": 0.5},
        {"step": -1},
        {"metrics": {"loss": "low"}},
        {"attributes": {"a": [1]}},
        {"message": b"\xff"},
        {"message": "\ud800"},
    ],
    ids=str,
)
def test_a_manifest_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, origin: dict[str, Any]
) -> None:
    tier, given = LocalTier(tmp_path), small("ab", 1)
    manifest = replace(given.manifest, origin=replace(given.manifest.origin, **origin))
    with pytest.raises(
        Unsupported, match="state ab was not written, because it could not be read again"
    ):
        tier.put(Payload(manifest, given.chunks))
    assert files(tmp_path) == set()


def test_a_manifest_larger_than_any_that_is_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "MAX_MANIFEST", 1000)
    tier = LocalTier(tmp_path)
    with pytest.raises(
        Unsupported,
        match=(
            r"state s was not written: .* 1000 are the most .* keep large values as tensors or"
            r" arrays"
        ),
    ):
        tier.put(replaced(small("s", 1), message="x" * 1000))
    assert files(tmp_path) == set()
    tier.put(small("s", 1))


def replaced(given: Payload, **origin: object) -> Payload:
    return Payload(
        replace(given.manifest, origin=replace(given.manifest.origin, **origin)), given.chunks
    )


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_size_limit_leaves_nothing(tmp_path: Path, direct: bool) -> None:
    tier = LocalTier(tmp_path, direct=direct and LocalTier(tmp_path).is_direct)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(Unavailable, match="s was not written"):
            tier.put(payload("s", {"w": numbers(1 << 20)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == set()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False
        ).returncode
    ):
        pytest.skip("only root may mount a small disk")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("direct", [None, False])
def test_a_full_disk_leaves_what_is_there_untouched(tiny_disk: Path, direct: bool | None) -> None:
    tier = LocalTier(tiny_disk, direct=direct)
    tier.put(payload("fits", {"w": numbers(1 << 17)}))
    before = files(tiny_disk)
    with pytest.raises(Unavailable, match=r"needs up to 1048576 bytes, \d{6} are free"):
        tier.put(payload("s", {"w": numbers(1 << 18)}))
    assert files(tiny_disk) == before
    tier.open("fits").verify()
    tier.remove("fits")
    tier.put(payload("s", {"w": numbers(3 << 16)}))


def damaged(tier: LocalTier, uid: str) -> str:
    """The error that reading a whole state gives; no error fails the test."""
    with pytest.raises(Corrupt) as caught, tier.open(uid) as reader:
        reader.verify()
    return str(caught.value)


def test_every_flipped_byte_of_a_pack_is_found_and_named(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(payload("s", {"model/w": numbers(700)}, {"model/b": torch.ones(3, dtype=torch.uint8)}))
    path = tmp_path / "s.0.safetensors"
    size, header = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert size == header + 2800 + 16
    for offset in range(size):
        flip(path, offset, 1 << offset % 8)
        message = damaged(tier, "s")
        assert message.startswith(str(path))
        assert ("header" in message) == (offset < header)
        assert ("chunk 0 of state s, which holds model/w" in message) == (
            header <= offset < size - 16
        )
        assert ("chunk 1 of state s, which holds model/b" in message) == (offset >= size - 16)
        flip(path, offset, 1 << offset % 8)
    tier.open("s").verify()


def test_every_flipped_byte_of_a_manifest_is_found_and_named(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(payload("s", {"model/w": numbers(700)}, {"model/b": torch.ones(3)}))
    path = tmp_path / "s.0.manifest"
    for offset in range(path.stat().st_size):
        flip(path, offset, 1 << offset % 8)
        with pytest.raises((Corrupt, Unavailable), match=str(path)):
            tier.open("s")
        flip(path, offset, 1 << offset % 8)
    tier.open("s").verify()


def test_reading_one_chunk_checks_the_header_of_its_pack(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1, 2))
    flip(tmp_path / "s.0.safetensors", 100)
    with (
        tier.open("s") as reader,
        pytest.raises(Corrupt, match=r"s\.0\.safetensors: its header, bytes 0-464"),
    ):
        reader.chunk(1)


@pytest.mark.parametrize("length", [0, 1, 464, 576, 577, 687, 689])
def test_a_pack_of_another_length_is_found_and_named(tmp_path: Path, length: int) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1, 2))
    os.truncate(tmp_path / "s.0.safetensors", length)
    assert f"s.0.safetensors has {length} bytes, 688 were written" in damaged(tier, "s")


def with_a_base(folder: Path) -> LocalTier:
    """A folder with a state whose first chunk lies in the pack of another one."""
    tier = LocalTier(folder)
    tier.put(small("s", 1, 2), base=tier.put(small("base", 1)).manifest)
    return tier


def test_a_pack_that_is_missing_is_named_and_the_rest_can_be_read(tmp_path: Path) -> None:
    tier = with_a_base(tmp_path)
    (tmp_path / "base.0.safetensors").unlink()
    assert "base.0.safetensors is missing: chunk 0 of state s, which holds model/0" in damaged(
        tier, "s"
    )
    with tier.open("s") as reader:
        assert bytes(reader.chunk(1)) == chunks_of(small("s", 1, 2))[1]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
def test_a_pack_that_may_be_sound_and_cannot_be_opened_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = with_a_base(tmp_path)
    refuse(monkeypatch, number, "base.0.safetensors")
    with tier.open("s") as reader:
        assert bytes(reader.chunk(1)) == chunks_of(small("s", 1, 2))[1]
        with pytest.raises(
            Unavailable,
            match=(
                r"base\.0\.safetensors cannot be opened .*: (get the right to read it|see that its"
                r" disk is well)"
            ),
        ):
            reader.chunk(0)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_state_is_not_opened_while_descriptors_or_memory_have_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = with_a_base(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, number, "base.0.safetensors")
        with pytest.raises(
            Unavailable,
            match=r"state s cannot be read in .*: (raise the limit of open files|free memory)",
        ):
            tier.open("s")
    assert len(os.listdir("/proc/self/fd")) == before
    with tier.open("s") as reader:
        assert stream(reader) == chunks_of(small("s", 1, 2))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_pack_that_cannot_be_mapped_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1))

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with tier.open("s") as reader:
        monkeypatch.setattr(mmap, "mmap", full)
        with pytest.raises(
            Unavailable, match=r"cannot be mapped .*: (raise the limit of open files|free memory)"
        ):
            reader.span(0, 10)


def refuse(patch: pytest.MonkeyPatch, number: int, name: str) -> None:
    """Let the kernel refuse to open the file of that name."""

    def opened(path: str | Path) -> int:
        if Path(path).name == name:
            raise OSError(number, os.strerror(number), str(path))
        return open_regular(path)

    patch.setattr(pack_reader, "open_regular", opened)


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1))
    (tmp_path / "other.0.manifest").write_bytes((tmp_path / "s.0.manifest").read_bytes())
    with pytest.raises(NotFound, match="state other is not in"):
        tier.open("other")
    (tmp_path / "other.0.manifest").write_bytes(encode(small("other", 1).manifest))
    with pytest.raises(Corrupt, match="1 chunks where 0 lie"):
        tier.open("other")


def test_no_pack_is_removed_while_a_manifest_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = LocalTier(tmp_path)
    base = tier.put(small("base", 1, 2)).manifest
    tier.put(small("s", 1, 3), base=base)
    flip(tmp_path / "s.0.manifest", 40)
    assert tier.remove("base") == 0
    assert tier.sweep() == []
    assert "s.0.manifest" in caplog.text
    flip(tmp_path / "s.0.manifest", 40)
    with tier.open("s") as reader:
        assert stream(reader) == chunks_of(small("s", 1, 3))


def test_packs_are_removed_again_once_descriptors_have_not_run_out_any_more(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    for uid in ("a", "b"):
        tier.put(small(uid, ord(uid)))

    def lacking(path: str | Path, *, most: int) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "read_regular", lacking)
        tier.forget(["a"])
        assert tier.sweep() == []
    tier.forget(["a"])
    assert [path.name for path in tier.sweep()] == ["a.0.safetensors"]


def test_a_damaged_state_can_be_removed(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1))
    flip(tmp_path / "s.0.manifest", 40)
    tier.remove("s")
    assert tier.sweep() == [tmp_path / "s.0.safetensors"]
    assert files(tmp_path) == set()


def test_a_sweep_leaves_files_that_are_not_ours_and_writers_that_live(tmp_path: Path) -> None:
    for name in ("model.safetensors", "notes.txt", "x.y.safetensors", "leases"):
        (tmp_path / name).write_bytes(b"mine")
    swept: list[Path] = []
    other = LocalTier(tmp_path)

    def sweep_while_writing(step: str) -> None:
        if step == "pack-written":
            swept.extend(other.sweep())

    LocalTier(tmp_path, on_step=sweep_while_writing).put(small("s", 1))
    assert swept == []
    (tmp_path / ".tmp-dead.0.safetensors").write_bytes(b"x")
    (tmp_path / "dead.0.safetensors").write_bytes(b"x")
    assert {path.name for path in other.sweep()} == {
        ".tmp-dead.0.safetensors",
        "dead.0.safetensors",
    }
    other.open("s").verify()
    assert {"model.safetensors", "notes.txt", "x.y.safetensors", "leases"} < files(tmp_path)


def test_a_sweep_leaves_a_file_that_a_writer_takes_over_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "s.0.safetensors"
    (
        tmp_path / f".tmp-{final.name}"
    ).touch()  # a writer has made it, and does not hold its lock yet
    taken: list[Temporary] = []

    def close_and_let_it_go_on(fd: int) -> None:
        close_lockable(fd)
        if not taken:
            taken.append(stack.enter_context(temporary(final)))

    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr("datastates.storage.durable_files.close_lockable", close_and_let_it_go_on)
            LocalTier(tmp_path).sweep()
        taken[0].commit()
    assert files(tmp_path) == {final.name}


def test_what_a_put_refers_to_is_not_removed_meanwhile(tmp_path: Path) -> None:
    other = LocalTier(tmp_path)
    base = other.put(small("base", 1, 2)).manifest

    def remove_base(step: str) -> None:
        if step == "pack-written" and "base" in list(other.uids()):
            other.remove("base")

    placed = LocalTier(tmp_path, on_step=remove_base).put(small("s", 1, 3), base=base)
    assert placed.bytes_new == 200
    with other.open("s") as reader:
        assert stream(reader) == chunks_of(small("s", 1, 3))


def test_another_process_that_replaced_a_state_is_noticed(tmp_path: Path) -> None:
    here, there = LocalTier(tmp_path), LocalTier(tmp_path)
    for seed in (1, 2):
        there.put(small(f"base{seed}", seed))
    there.put(small("s", 1), base=there.manifest("base1"))
    here.remove("nothing-yet") or here.sweep()  # learns what s needs
    there.remove("s")
    there.put(small("s", 2), base=there.manifest("base2"))
    here.remove("base1")
    here.remove("base2")
    with here.open("s") as reader:
        assert stream(reader) == chunks_of(small("s", 2))


def test_ranks_share_a_folder(tmp_path: Path) -> None:
    tiers = [LocalTier(tmp_path, rank=rank) for rank in (0, 1)]
    for rank, tier in enumerate(tiers):
        tier.put(part("s", rank, rank))
    assert tiers[0].put(part("s", 1, 1)).bytes_new == 0, "it is here already"
    with tiers[1].open("s") as reader:
        assert stream(reader) == chunks_of(small("s", 1))
    assert tiers[0].remove("s") == 200, "all parts of it"
    for tier in tiers:
        with pytest.raises(NotFound):
            tier.open("s")
    assert list(tmp_path.glob("*.safetensors")) == []


def test_a_span_over_chunks_of_one_pack_is_private_and_whole(tmp_path: Path) -> None:
    state = payload("s", {"model/w": numbers(CHUNK_BYTES // 4 * 3)})
    tier = LocalTier(tmp_path)
    tier.put(state)
    with tier.open("s") as reader:
        view = reader.span(100, 3 * CHUNK_BYTES - 100)
    tier.remove("s")
    assert view is not None
    assert not view.readonly
    assert bytes(view) == b"".join(chunks_of(state))[100:]
    view[0] ^= 1


def test_a_read_only_folder_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1))
    real = os.open

    def refusing(path: object, flags: int, *rest: object, **options: object) -> int:
        if flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "read-only file system", str(path))
        return real(path, flags, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)  # root may write wherever the mode forbids it
    with tier.open("s") as reader:
        assert stream(reader) == chunks_of(small("s", 1))
    with pytest.raises(Unavailable, match="read-only"):
        tier.put(small("t", 1))
    with pytest.raises(Unavailable, match="read-only"):
        tier.remove("s")


def test_direct_writes_are_chosen_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., int] = os.open

    def refusing(path: object, flags: int, *rest: object, **options: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here", str(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)
    tier = LocalTier(tmp_path)
    assert not tier.is_direct
    tier.put(small("s", 1))
    assert files(tmp_path) == {"s.0.manifest", "s.0.safetensors"}


def test_buffered_writes_are_brought_to_the_disk_as_they_go(tmp_path: Path) -> None:
    """What is to be written and is not yet stays within a bound, and nothing of it gets lost."""
    unsynced = [0]

    def note(call: str, path: Path, size: int) -> None:
        if path.name.endswith(".safetensors"):
            unsynced.append(
                unsynced[-1] + size if call == "write" else 0 if call == "sync" else unsynced[-1]
            )

    what = payload("a", *({f"w{seed}": numbers(10 * MIB, seed)} for seed in range(4)))
    tier = LocalTier(tmp_path, direct=False)
    with io_hook(note):
        tier.put(what)
    assert 64 * MIB <= max(unsynced) <= 80 * MIB
    assert unsynced[-1] == 0
    with tier.open("a") as reader:
        assert stream(reader) == chunks_of(what)


def test_manifests_alone_say_which_packs_a_state_needs_and_the_folder_what_is_stored(
    tmp_path: Path,
) -> None:
    tier = LocalTier(tmp_path)
    base = tier.put(small("base", 1, 2)).manifest
    tier.put(small("next", 1, 3), base=base, is_of_base=True)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert {pack.name: pack.size for pack in references.packs_of(tmp_path, "next")} == sizes
    assert [pack.name for pack in references.packs_of(tmp_path, "base")] == ["base.0.safetensors"]
    assert tier.bytes_stored == sum(sizes.values())
    assert references.packs_of(tmp_path, "nobody") == references.packs_of(tmp_path, "../next") == ()
    (tmp_path / "next.0.manifest").write_bytes(b"damaged")
    assert references.packs_of(tmp_path, "next") == ()


def test_state_that_was_here_is_not_committed_once_it_is_gone(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1))
    with tier.stage(small("s", 1)) as staged:
        assert staged.was_here
        tier.remove("s")
        assert staged.commit() is None
    assert tier.put(small("s", 1)).bytes_new > 0


def test_packs_that_a_manifest_needs_are_not_discarded(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    tier.put(small("s", 1))
    tier.put(small("t", 2))
    tier.forget(["t"])
    tier.discard(
        [
            "s.0.safetensors",
            "t.0.safetensors",
            "nothing.0.safetensors",
            ".lock",
            "../s.0.safetensors",
        ]
    )
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"} == {
        "s.0.safetensors"
    }
    assert tier.files()["s"][1] == (
        "s.0.safetensors",
        (tmp_path / "s.0.safetensors").stat().st_size,
    )
    tier.open("s").close()
