"""Files that others put, changed or cut while they are read: an error, and neither a hang nor
the end of the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, Unavailable
from datastates.errors import Corrupt, InvalidInput
from datastates.files.checkpoints import export, plan_export
from datastates.storage.durable_files import locked
from datastates.storage.local import LocalTier
from datastates.storage.pack_reader import MappedReader
from datastates.system.files import make_regular, open_regular, read_regular
from datastates.testing.states import chunks_of, numbers, payload, small

MIB = 1 << 20


def cut(folder: Path, size: int = 4096) -> None:
    """Every pack, to its header."""
    for path in folder.glob("*.safetensors"):
        os.truncate(path, size)


def test_a_pack_that_is_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    what = payload("a", {"w": numbers(3 * MIB)}, {"b": numbers(100)})
    tier = LocalTier(tmp_path)
    tier.put(what)
    for verify in (True, False):
        with tier.open("a", verify=verify) as reader:
            first = reader.chunk(0)
            cut(tmp_path)
            assert bytes(first) == chunks_of(what)[0]
            for index in (1, 3):
                with pytest.raises(Corrupt, match="cut short"):
                    reader.chunk(index)
            into = memoryview(bytearray(2 * 4 * MIB))
            with pytest.raises(Corrupt, match="cut short"):
                reader.gather(4 * MIB, into)
            with pytest.raises(Corrupt):
                reader.verify()
        tier.remove("a")
        tier.put(what)


def test_a_restore_and_a_verification_of_a_pack_that_is_cut_short_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut once the state is open, after the first chunk was read."""
    config = Config(memory_bytes=64 * MIB, durable_interval_s=None)
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(rng=False, box={"w": torch.arange(3.0 * MIB)}) as run,
    ):
        run.capture().wait("durable")
    check = MappedReader._read

    def check_then_cut(reader: MappedReader, index: int, into: memoryview) -> None:
        check(reader, index, into)
        cut(tmp_path / "packs", 2 * 4 * MIB)

    with datastates.open(tmp_path) as again:
        monkeypatch.setattr(MappedReader, "_read", check_then_cut)
        into = torch.zeros(3 * MIB)
        with pytest.raises(Corrupt, match=r"cut short|bytes, \d+ were written"):
            again.restore("main", box={"w": into})
        assert not into.any()
        for use in (again.verify, again.load):
            with pytest.raises(Corrupt):
                use("main")


def test_bytes_are_gathered_as_they_are_stored_whatever_their_place(tmp_path: Path) -> None:
    what = payload("a", {"w": numbers(2 * MIB + 77)}, {"b": numbers(100)})
    tier = LocalTier(tmp_path)
    tier.put(what)
    chunks = chunks_of(what)
    stream = b"".join(chunks[:3])
    with tier.open("a") as reader:
        for start, length in (
            (0, 10),
            (4 * MIB - 3, 9),
            (0, len(stream)),
            (5, len(stream) - 5),
            (8 * MIB, 77 * 4),
            (3, 4 * MIB),
        ):
            into = bytearray(length)
            reader.gather(start, memoryview(into))
            assert bytes(into) == stream[start : start + length]
        with pytest.raises(InvalidInput, match="has no bytes"):
            reader.gather(8 * MIB, memoryview(bytearray(4096)))


def test_a_tensor_is_its_own_where_memory_has_room_and_mapped_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = LocalTier(tmp_path)
    tier.put(payload("a", {"w": numbers(100)}))
    with tier.open("a") as reader:
        assert reader.loan(0, 400) is None
    monkeypatch.setattr("datastates.storage.pack_reader.available_memory_bytes", lambda: 500)
    with tier.open("a") as reader:
        loan = reader.loan(0, 400)
        assert loan is not None
        assert bytes(loan) == chunks_of(payload("a", {"w": numbers(100)}))[0]


# --- what is no file ------------------------------------------------------------------------------


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    file, link, pipe, second = (tmp_path / name for name in ("file", "link", "pipe", "second"))
    file.write_bytes(b"12345")
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert read_regular(file, most=5) == b"12345"
    with pytest.raises(Corrupt, match="5 bytes, 4 are the most"):
        read_regular(file, most=4)
    for path in (link, pipe, tmp_path):
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError, match=path.name):
                open_regular(path, flags)
    os.link(file, second)
    os.close(open_regular(second))
    with pytest.raises(OSError, match="second name"):
        open_regular(second, os.O_RDWR)
    fd = make_regular(link)
    os.write(fd, b"new")
    os.close(fd)
    assert (file.read_bytes(), link.read_bytes(), link.is_symlink()) == (b"12345", b"new", False)


def test_a_planted_link_is_not_written(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("dear")
    root = tmp_path / "packs"
    tier = LocalTier(root)
    for name in (".lock", ".tmp-a.0.manifest", ".tmp-a.0.safetensors"):
        (root / name).symlink_to(precious)
        with pytest.raises(Unavailable):
            tier.put(small("a", 1))
        (root / name).unlink()
        os.link(precious, root / name)
        assert tier.put(small("a", 1)).bytes_new
        assert tier.remove("a")
        (root / name).unlink(missing_ok=True)
    assert precious.read_text() == "dear"
    tier.put(small("a", 1))
    (root / ".lock").unlink()
    os.mkfifo(root / ".lock")
    with pytest.raises(OSError, match="regular"), locked(root, is_shared=True):
        pass


def test_a_planted_part_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("dear")
    (tmp_path / "out").mkdir()
    for plant in (os.symlink, os.link):
        plant(precious, tmp_path / "out" / ".it.safetensors.part")
        state = _State("0" * 24, "1" * 64, 1)
        # these three are read
        export(plan_export({"w": torch.ones(3)}, state, tmp_path / "out" / "it.safetensors"))  # type: ignore[arg-type]
        assert precious.read_text() == "dear"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["it.safetensors"]


class _State:
    def __init__(self, uid: str, digest: str, step: int) -> None:
        self.uid, self.digest, self.step = uid, digest, step
