"""Packs are safetensors files: what other readers find in one is what the state holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from datastates.state.manifest import CHUNK_BYTES, LARGE_BYTES
from datastates.storage.local import LocalTier
from datastates.storage.pack import PAGE, lay_out, padded, payload_bytes
from datastates.storage.tier import Payload
from datastates.testing.states import numbers, payload, small

PLAIN = {
    "model/w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model/scalar": torch.tensor(3.5, dtype=torch.float64),
    "model/half": torch.ones(7, dtype=torch.float16),
    "model/ints": torch.arange(-3, 4, dtype=torch.int16),
    "model/mask": torch.tensor([True, False, True]),
    "model/bytes": torch.arange(9, dtype=torch.uint8),
}
"""Of dtypes that numpy has too, row-major."""


def write(folder: Path, state: Payload) -> Path:
    LocalTier(folder).put(state)
    return folder / f"{state.manifest.origin.uid}.0.safetensors"


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in safetensors.torch.load_file(path).items()
        if not name.startswith("__padding__.")
    }


def test_torch_reads_every_tensor_under_its_path(tmp_path: Path) -> None:
    plain = PLAIN | {
        "model/bf16": torch.ones(3, dtype=torch.bfloat16),
        "model/fp8": torch.ones(5).to(torch.float8_e4m3fn),
    }
    found = read_tensors(write(tmp_path, payload("s", plain)))
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(
            found[name].view(torch.uint8) if tensor.dim() else found[name],
            tensor.view(torch.uint8) if tensor.dim() else tensor,
        )


def test_numpy_reads_every_tensor_under_its_path(tmp_path: Path) -> None:
    found = safetensors.numpy.load_file(
        write(tmp_path, payload("s", PLAIN, {"other": torch.ones(2)}))
    )
    for name, tensor in (PLAIN | {"other": torch.ones(2)}).items():
        assert (found[name] == tensor.numpy()).all()
        assert found[name].shape == tuple(tensor.shape)


def test_metadata_says_whose_pack_it_is(tmp_path: Path) -> None:
    state = payload("s", PLAIN)
    path = write(tmp_path, state)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "datastates-pack"
    assert metadata["version"] == "2"
    assert metadata["state"] == "s"
    assert metadata["digest"] == state.manifest.digest
    assert payload_bytes(path) == sum(view.nbytes for view in state.chunks)


def test_tensors_that_lie_otherwise_have_the_shape_of_their_memory(tmp_path: Path) -> None:
    tensors = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(5, 3).t(),
        "expanded": torch.randn(4, 1).expand(4, 6),
        "complex": torch.randn(3, dtype=torch.complex64),
        "one": torch.randn(1, 3, 1).transpose(0, 2),
    }
    path = write(tmp_path, payload("s", tensors))
    found = read_tensors(path)
    assert torch.equal(found["channels_last"], tensors["channels_last"].permute(0, 2, 3, 1))
    assert torch.equal(found["transposed"], tensors["transposed"].t())
    assert torch.equal(found["expanded"], tensors["expanded"][:, :1])
    assert torch.equal(found["complex"], tensors["complex"].view(torch.uint8))
    assert torch.equal(found["one"], tensors["one"])
    with safetensors.safe_open(path, "pt") as file:
        layouts = json.loads(file.metadata()["layouts"])
    assert layouts["channels_last"] == {
        "dtype": "float32",
        "shape": [2, 3, 4, 5],
        "strides": [60, 1, 15, 3],
    }
    assert layouts["complex"]["dtype"] == "complex64"
    assert layouts.keys() == {"channels_last", "transposed", "expanded", "complex"}


def test_pieces_of_a_tensor_say_which_of_its_bytes_they_are(tmp_path: Path) -> None:
    weights = numbers(CHUNK_BYTES // 4 * 3 + 10)
    before = payload("before", {"model/w": weights}, {"step": numbers(1)})
    weights = weights.clone()
    weights[CHUNK_BYTES // 4] += 1
    weights[-1] += 1
    after = payload("after", {"model/w": weights}, {"step": numbers(1)})
    tier = LocalTier(tmp_path)
    tier.put(after, base=tier.put(before).manifest)
    found = read_tensors(tmp_path / "after.0.safetensors")
    stored = weights.view(torch.uint8)
    middle = f"model/w@{CHUNK_BYTES}:{2 * CHUNK_BYTES}"
    end = f"model/w@{3 * CHUNK_BYTES}:{3 * CHUNK_BYTES + 40}"
    assert found.keys() == {middle, end}
    assert torch.equal(found[middle], stored[CHUNK_BYTES : 2 * CHUNK_BYTES])
    assert torch.equal(found[end], stored[3 * CHUNK_BYTES :])


def test_a_tensor_over_chunks_that_lie_together_is_whole(tmp_path: Path) -> None:
    weights = numbers(CHUNK_BYTES // 4 * 2 + 10)
    found = read_tensors(write(tmp_path, payload("s", {"model/w": weights, "model/b": numbers(3)})))
    assert torch.equal(found["model/w"], weights)
    assert found.keys() == {"model/w", "model/b"}


def test_what_repeats_is_an_entry_where_it_comes_first(tmp_path: Path) -> None:
    found = read_tensors(write(tmp_path, small("s", 7, 8, 7)))
    assert found.keys() == {"model/0", "model/1"}
    assert torch.equal(found["model/0"], numbers(25, 7))
    assert torch.equal(found["model/1"], numbers(25, 8))


@pytest.mark.parametrize(
    "name", ["__metadata__", "__padding__.0", "a@0:4", 'quote"\\', "ü/漢", "a b\n"]
)
def test_any_path_can_be_written(tmp_path: Path, name: str) -> None:
    found = safetensors.torch.load_file(
        write(tmp_path, payload("s", {name: torch.arange(5), "a": torch.ones(3)}))
    )
    assert any(
        tensor.dtype == torch.int64 and torch.equal(tensor, torch.arange(5))
        for tensor in found.values()
    )


@pytest.mark.parametrize("least", [1, LARGE_BYTES // 4], ids=["small", "large"])
def test_chunks_are_aligned_and_every_byte_between_is_zero(tmp_path: Path, least: int) -> None:
    state = payload(
        "s", *({f"t{number}": numbers(least + 301 * number, number)} for number in range(7))
    )
    data = write(tmp_path, state).read_bytes()
    layout = lay_out([state.manifest], [(0, index) for index in range(7)])
    assert len(data) == layout.size
    assert data.startswith(layout.header)
    position = len(layout.header)
    for offset, view in zip(layout.offsets, state.chunks, strict=True):
        assert offset == position
        assert offset % (PAGE if least > 1 else 16) == 0
        assert data[offset : offset + view.nbytes] == view
        position = offset + padded(view.nbytes)
        assert not any(data[offset + view.nbytes : position])
    assert position == len(data)


def test_payload_bytes_of_a_damaged_header_is_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, small("s", 1))
    path.write_bytes(path.read_bytes()[:30])
    assert payload_bytes(path) == 0
