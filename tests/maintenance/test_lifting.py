"""Restores into live tensors of a late device: from memory of which it may read, and through
rooms, from memory and from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.config import Config
from datastates.errors import Corrupt, Dirty
from datastates.maintenance import loading
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.memory import _MemoryReader
from datastates.storage.pack_reader import MappedReader
from tests.support.late import LateDevices, Lateness
from tests.support.planting import without

CONFIG = Config(memory_bytes=16 * CHUNK_BYTES, durable_interval_s=None)
WORDS = 3 * CHUNK_BYTES // 4 + 1000
"""Elements of a tensor that begins in one chunk and ends in the fifth."""


def state(put: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> dict[str, Any]:
    """One large tensor, one that shares a chunk with it, one that is too small to be received in
    place, and one on the host. The first lies behind the others, as its elements are shorter."""
    torch.manual_seed(0)
    return {
        "short": put(torch.randn(300_000).bfloat16()),
        "large": put(torch.randn(WORDS)),
        "beside": put(torch.randn(70_000)),
        "small": put(torch.randn(10)),
        "here": torch.randn(500_000),
    }


WANTED = state()


def check(into: dict[str, torch.Tensor], late: LateDevices) -> None:
    """Whatever the device is told after a restore works on what was restored."""
    after = {name: each + 1 for name, each in into.items()}
    late.schedule.catch_up()
    for name, each in WANTED.items():
        assert torch.equal(into[name], each), name
        assert torch.equal(after[name], each + 1), name


def restored(late: LateDevices, repo: datastates.Repository) -> dict[str, torch.Tensor]:
    """Tensors of which the device still has to write when they are restored."""
    into = {
        name: torch.zeros_like(each) if name == "here" else late.put(torch.zeros_like(each))
        for name, each in WANTED.items()
    }
    for each in into.values():
        each += 7
    repo.restore("main", state=into)
    return into


@pytest.fixture(params=Lateness, ids=lambda each: str(each.value))
def late(request: pytest.FixtureRequest) -> LateDevices:
    return LateDevices(request.param)


@pytest.fixture
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_WINDOW_CHUNKS", 1)


@pytest.fixture
def scribbling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a state hold something else as soon as its reader is closed."""
    close = _MemoryReader.close

    def closed(self: _MemoryReader) -> None:
        close(self)
        for slot, chunk in zip(self._slots, self.manifest.content.chunks, strict=True):
            self._arena.tensor(slot, chunk.length).fill_(255)

    monkeypatch.setattr(_MemoryReader, "close", closed)


def test_from_memory_that_the_device_reads(
    late: LateDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scribbling: None
) -> None:
    monkeypatch.setattr(loading._PinnedBuffers, "read", lambda *_: pytest.fail("through rooms"))
    with (
        late.running(),
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(rng=False, state=state(late.put)) as run,
    ):
        run.capture().wait(timeout_s=20)
        check(restored(late, repo), late)


def test_from_memory_that_no_device_knows(
    late: LateDevices, tmp_path: Path, small_rooms: None
) -> None:
    with (
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(rng=False, state=state()) as run,
    ):
        run.capture().wait(timeout_s=20)
        with late.running():
            check(restored(late, repo), late)


def test_from_files(late: LateDevices, tmp_path: Path, small_rooms: None) -> None:
    with (
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(rng=False, state=state()) as run,
    ):
        run.capture().wait("durable", timeout_s=20)
    with late.running(), datastates.open(tmp_path, config=CONFIG) as repo:
        check(restored(late, repo), late)


@pytest.mark.parametrize(
    ("place", "wait", "is_pinned"),
    [
        ((loading._PinnedBuffers, "read"), "left.synchronize()", False),
        (
            (loading.DeviceFill, "fill"),
            "devices().mark(devices().current(device)).synchronize()",
            True,
        ),
    ],
    ids=["a room is used again", "the sources are given away"],
)
def test_without_its_waits_something_else_is_restored(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_rooms: None,
    scribbling: None,
    place: tuple[type, str],
    wait: str,
    is_pinned: bool,
) -> None:
    late = LateDevices(Lateness.COMPUTE)
    without(monkeypatch, *place, wait)
    with late.running(), datastates.open(tmp_path, config=CONFIG) as repo:
        with repo.track(
            rng=False, state=state(late.put if is_pinned else lambda tensor: tensor)
        ) as run:
            run.capture().wait(timeout_s=20)
            into = {"large": late.put(torch.zeros(WORDS))}
            repo.restore("main", state=into, only="state/large")
        late.schedule.catch_up()
        assert not torch.equal(into["large"], WANTED["large"])


def test_memory_that_has_rotted_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, check = LateDevices(Lateness.COPIES), _MemoryReader.check

    def rotten(self: _MemoryReader, indices: Sequence[int]) -> None:
        self._arena.tensor(self._slots[2])[1000] += 1
        check(self, indices)

    monkeypatch.setattr(_MemoryReader, "check", rotten)
    with (
        late.running(),
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(rng=False, state=state(late.put)) as run,
    ):
        run.capture().wait(timeout_s=20)
        into = {
            name: late.put(torch.zeros_like(each))
            for name, each in WANTED.items()
            if name != "here"
        }
        with pytest.raises(Corrupt, match="chunk 2 fails its digest in memory"):
            repo.restore("main", state=into, only="state/large")
        late.schedule.catch_up()
        assert not into["large"].any()


def test_a_file_that_changes_after_the_check_is_told_and_what_it_spoilt_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_rooms: None
) -> None:
    late, read_pieces = LateDevices(Lateness.COPIES), MappedReader.read_pieces
    with (
        datastates.open(tmp_path, config=CONFIG) as repo,
        repo.track(rng=False, state=state()) as run,
    ):
        run.capture().wait("durable", timeout_s=20)
    (pack,) = tmp_path.rglob("*.safetensors")

    def changed(self: MappedReader, pieces: Any) -> None:
        if 2 in pieces:
            with pack.open("r+b") as file:
                file.seek(self.manifest.refs[2].offset + 1000)
                file.write(b"x" * 8)
        read_pieces(self, pieces)

    monkeypatch.setattr(MappedReader, "read_pieces", changed)
    with late.running(), datastates.open(tmp_path, config=CONFIG) as repo:
        into = {"large": late.put(torch.zeros(WORDS))}
        with pytest.raises(Corrupt, match="half old, half new"):
            repo.restore("main", state=into)
        with repo.track(branch="other", rng=False, state=into) as run, pytest.raises(Dirty):
            run.capture()
