"""Restores put large tensors straight where they live, take no memory for them, and change
nothing before every byte was checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import datastates
from datastates import Config, Repository
from datastates.errors import Corrupt, Dirty, InvalidInput
from datastates.maintenance import loading
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage import copying, pack_reader
from datastates.storage.copying import STRIDE_BYTES, Piece, Stage, copy, pieces_by_chunk, read_steps
from datastates.storage.memory import _MemoryReader
from datastates.storage.pack_reader import MappedReader
from datastates.system.files import read_at
from datastates.testing.states import numbers

MIB = 1 << 20
LARGE = numbers(5 * MIB + 77)


class Tied(nn.Module):
    """Large and tiny tensors, one of them tied to another, a buffer, and one that lies the other
    way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1536)
        self.second = nn.Linear(1024, 1536, bias=False)
        self.second.weight = self.first.weight
        self.picture = nn.Conv2d(64, 256, 9)
        self.picture.weight.data = self.picture.weight.data.contiguous(
            memory_format=torch.channels_last
        )
        self.many = nn.ParameterList([nn.Parameter(torch.randn(7)) for _ in range(300)])
        self.register_buffer("mean", torch.randn(70_001, dtype=torch.float64))


class Copied:
    """An object that restores itself, and whose state is tensors of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.taken = model, dict[str, torch.Tensor]()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.taken = state


def config(*, verify: bool = True) -> Config:
    return Config(memory_bytes=256 * MIB, durable_interval_s=None, verify=verify)


def trained() -> tuple[Tied, torch.optim.AdamW]:
    """A model and an optimizer that have made a step."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_in(objects: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = dict(objects["model"].state_dict(keep_vars=True))
    for number, state in enumerate(objects["optimizer"].state.values()):
        found |= {f"{number}/{key}": value for key, value in state.items()}
    return found


def spoil(objects: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for tensor in tensors_in(objects).values():
            tensor.fill_(3)


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def is_used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that were poured."""
    poured: list[int] = []
    for reader in (MappedReader, _MemoryReader):
        read_pieces = reader.read_pieces

        def noting(
            self: Any, pieces: Mapping[int, Sequence[Piece]], read_pieces: Any = read_pieces
        ) -> None:
            poured.extend(pieces)
            read_pieces(self, pieces)

        monkeypatch.setattr(reader, "read_pieces", noting)
    return poured


@pytest.mark.parametrize("verify", [True, False])
def test_a_large_state_comes_back_whole_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, verify: bool
) -> None:
    model, optimizer = trained()
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    wanted = {name: tensor.detach().clone() for name, tensor in tensors_in(objects).items()}
    places = {name: tensor.data_ptr() for name, tensor in tensors_in(objects).items()}
    poured = is_used(monkeypatch)
    monkeypatch.setattr(Stage, "__init__", None)
    with (
        datastates.open(tmp_path, config=config(verify=verify)) as repo,
        repo.track(rng=False, **objects) as run,
    ):
        run.capture().wait("durable" if where == "disk" else "captured")
        if where == "memory":
            spoil(objects)
            repo.restore("main", objects=objects)
    if where == "disk":
        spoil(objects)
        with datastates.open(tmp_path, config=config(verify=verify)) as repo:
            repo.restore("main", objects=objects)
    assert poured
    for name, tensor in tensors_in(objects).items():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.data_ptr() == places[name]
    assert model.second.weight is model.first.weight


def saved(folder: Path, objects: Mapping[str, Any]) -> Path:
    """A repository with a state of these; its pack."""
    with datastates.open(folder, config=config()) as repo, repo.track(rng=False, **objects) as run:
        run.capture().wait("durable")
    return next((folder / "packs").glob("*.safetensors"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def places_of(repo: Repository) -> list[int]:
    return [ref.offset for ref in repo.core.tiers.durable.manifest(repo.state("main").uid).refs]


@pytest.mark.parametrize("chunk", range(6))
def test_a_wrong_byte_anywhere_is_found_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    pack = saved(tmp_path, {"w": LARGE, "v": torch.ones(3)})
    into = {"w": torch.zeros_like(LARGE), "v": torch.zeros(3)}
    poured = is_used(monkeypatch)
    with datastates.open(tmp_path) as repo:
        flip(pack, places_of(repo)[chunk] + 2)
        with pytest.raises(Corrupt, match=rf"fail their digest: chunk {chunk} "):
            repo.restore("main", objects=into)
    assert not poured
    assert not into["w"].any()
    assert not into["v"].any()


def test_a_file_that_changes_after_it_was_checked_is_told_and_what_it_spoilt_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = saved(tmp_path, {"w": LARGE})
    into: dict[str, Any] = {"w": torch.zeros_like(LARGE)}
    read_pieces = MappedReader.read_pieces
    with datastates.open(tmp_path) as repo:
        places = places_of(repo)

        def changed(self: MappedReader, pieces: Mapping[int, Sequence[Piece]]) -> None:
            flip(pack, places[2] + MIB)
            read_pieces(self, pieces)

        monkeypatch.setattr(MappedReader, "read_pieces", changed)
        with pytest.raises(Corrupt, match=r"fail their digest: chunk 2 .*half old, half new"):
            repo.restore("main", objects=into)
        monkeypatch.undo()
        run = repo.track(branch="other", rng=False, **into)
        with pytest.raises(Dirty, match="a clone or a restore into 1 tensors"):
            run.capture()
        flip(pack, places[2] + MIB)
        repo.restore("main", objects=into)
        run.capture().wait()
    assert torch.equal(into["w"], LARGE)


def test_a_file_that_is_cut_short_while_it_is_checked_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = saved(tmp_path, {"w": LARGE})
    check = MappedReader._read

    def check_then_cut(self: MappedReader, index: int, into: memoryview) -> None:
        check(self, index, into)
        os.truncate(pack, 2 * CHUNK_BYTES)

    monkeypatch.setattr(MappedReader, "_read", check_then_cut)
    into = {"w": torch.zeros_like(LARGE)}
    with datastates.open(tmp_path) as repo, pytest.raises(Corrupt, match="cut short"):
        repo.restore("main", objects=into)
    assert not into["w"].any()


def test_whoever_breaks_off_the_check_finds_nothing_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    saved(tmp_path, {"w": LARGE})
    into = {"w": torch.zeros_like(LARGE)}
    with datastates.open(tmp_path) as repo:
        monkeypatch.setattr(pack_reader, "checkpoint", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            repo.restore("main", objects=into)
        assert not into["w"].any()
        monkeypatch.undo()
        repo.restore("main", objects=into)
    assert torch.equal(into["w"], LARGE)


def test_what_restores_itself_gets_the_stored_values_of_tensors_that_live_elsewhere(
    tmp_path: Path,
) -> None:
    """It is loaded first: a tensor that the state has once, and two objects share, is not where
    it lives by then."""
    model, _ = trained()
    wanted = model.first.weight.detach().clone()
    saved(tmp_path, {"model": model, "copied": Copied(model)})
    with torch.no_grad():
        model.first.weight.fill_(3)
    copied = Copied(model)
    with datastates.open(tmp_path) as repo:
        repo.restore("main", model=model, copied=copied)
    assert torch.equal(model.first.weight, wanted)
    assert torch.equal(copied.taken["first.weight"], wanted)


def test_live_tensors_over_each_other_are_written_in_their_order(tmp_path: Path) -> None:
    saved(tmp_path, {"one": LARGE, "two": LARGE + 1})
    memory = torch.zeros(LARGE.numel() + 5)
    into = {"one": memory[5:], "two": memory[:-5]}
    with datastates.open(tmp_path) as repo:
        with pytest.raises(InvalidInput, match="two shares memory with one"):
            repo.restore("main", objects=into)
        assert not memory.any()
        assert not repo.restore("main", objects=into, strict=False)
    assert torch.equal(into["two"], LARGE + 1)


def test_a_graph_of_before_is_refused_by_autograd(tmp_path: Path) -> None:
    saved(tmp_path, {"w": LARGE})
    weight = torch.ones(LARGE.numel(), requires_grad=True)
    loss = (weight * weight).sum()
    with datastates.open(tmp_path) as repo:
        repo.restore("main", w=weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_unverified_one_tensor_reads_only_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {name: numbers(3 * MIB + 5) for name in "abc"}
    saved(tmp_path, {"box": parts})
    read: list[int] = []

    def noting(fd: int, into: memoryview, offset: int) -> int:
        read.append(into.nbytes)
        return read_at(fd, into, offset)

    monkeypatch.setattr(pack_reader, "read_at", noting)
    into = {name: torch.zeros_like(tensor) for name, tensor in parts.items()}
    with datastates.open(tmp_path, config=config(verify=False)) as repo:
        repo.restore("main", box=into, only="box/b")
    assert torch.equal(into["b"], parts["b"])
    assert not into["a"].any()
    assert sum(read) == parts["b"].nbytes


def test_a_small_state_is_read_and_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, {"w": numbers(1000)})
    poured = is_used(monkeypatch)
    into = {"w": torch.zeros(1000)}
    with datastates.open(tmp_path) as repo:
        repo.restore("main", objects=into)
    assert not poured
    assert torch.equal(into["w"], numbers(1000))
    assert 2 * LARGE.nbytes > loading._WORTH_BYTES


@st.composite
def pieces(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """The length of a chunk, and extents in it."""
    length = draw(st.integers(1, 3 * STRIDE_BYTES))
    found, at = [], 0
    while at < length and draw(st.booleans()):
        begin = draw(st.integers(at, length - 1))
        size = draw(
            st.sampled_from([1, 5, 70_000, STRIDE_BYTES, 2 * STRIDE_BYTES]) | st.integers(1, length)
        )
        size = min(size, length - begin)
        found.append((begin, size))
        at = begin + size
    return length, found


@given(pieces(), st.booleans())
def test_legs_cover_a_chunk_once_and_bring_each_byte_to_its_piece(
    drawn: tuple[int, list[tuple[int, int]]], is_whole: bool
) -> None:
    length, extents = drawn
    data = memoryview(torch.randint(0, 256, (length,), dtype=torch.uint8).numpy().data)
    memory = [memoryview(bytearray(size)) for _, size in extents]
    last = 0
    for leg in read_steps(
        [Piece(begin, into) for (begin, _), into in zip(extents, memory, strict=True)],
        length,
        is_whole=is_whole,
    ):
        assert leg.offset == last if is_whole else leg.offset >= last
        assert 0 < leg.length <= STRIDE_BYTES
        last = leg.offset + leg.length
        stride = data[leg.offset : last]
        if leg.memory is not None:
            copy(leg.memory, stride)
        for piece in leg.pieces:
            copy(piece.memory, stride[piece.offset - leg.offset :][: piece.memory.nbytes])
    assert last == length if is_whole else last <= length
    assert [bytes(each) for each in memory] == [
        bytes(data[begin : begin + size]) for begin, size in extents
    ]


def test_stretches_are_cut_where_chunks_begin() -> None:
    memory = memoryview(bytearray(2 * CHUNK_BYTES))
    found = pieces_by_chunk(
        [(CHUNK_BYTES + 5, memory[:CHUNK_BYTES]), (7, memory[CHUNK_BYTES : CHUNK_BYTES + 3])]
    )
    assert {
        index: [(piece.offset, piece.memory.nbytes) for piece in each]
        for index, each in found.items()
    } == {
        0: [(7, 3)],
        1: [(5, CHUNK_BYTES - 5)],
        2: [(0, 5)],
    }


def test_what_threads_raise_is_raised_in_the_order_of_chunks() -> None:
    def work(index: int) -> None:
        if index in (9, 30):
            raise Corrupt(f"chunk {index}")

    with pytest.raises(Corrupt, match="chunk 9"):
        copying.on_threads(range(40), work)


def test_where_no_thread_can_be_started_any_more_the_caller_does_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As at the end of the interpreter, when heads still become durable."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    done = list[int]()
    copying.on_threads(range(40), done.append)
    assert sorted(done) == [*range(40)]
