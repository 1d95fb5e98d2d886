"""Digests that are worked out where tensors lie are those of the host, bit for bit: by torch's
operators, and by Triton's kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastates.state.device_digest import Digester
from datastates.state.digest import chunk_digest
from datastates.state.manifest import CHUNK_BYTES
from datastates.state.xxh3 import BLOCK_BYTES, can_digest, digests_of
from tests.support.effort import examples, part
from tests.support.late import LateDevices, Lateness

if TYPE_CHECKING:
    from datastates.state.xxh3 import Blocks, Part

HAS_TRITON = importlib.util.find_spec("triton") is not None

Chunk = tuple[int, list[int], int]
"""The seed of a chunk's bytes, how long its parts are, and how many zeros come after the last of
them."""

LENGTHS = [
    241,
    255,
    256,
    257,
    1023,
    1024,
    1025,
    1087,
    1088,
    1089,
    2047,
    2048,
    2049,
    8 * BLOCK_BYTES,
    65 * BLOCK_BYTES,
    66 * BLOCK_BYTES + 1,
]
TAILS = [*range(BLOCK_BYTES + 241, 2 * BLOCK_BYTES + 2)]


def made(chunk: Chunk) -> tuple[int, list[Part], bytes]:
    """A chunk of these parts: its length, the parts where they lie, and its bytes."""
    seed, lengths, zeros = chunk
    rng, parts, data = np.random.default_rng(seed), list[tuple[int, torch.Tensor]](), b""
    for length in lengths:
        data += bytes(-len(data) % BLOCK_BYTES)
        parts.append((len(data), torch.from_numpy(rng.integers(0, 256, length, np.uint8))))
        data += parts[-1][1].numpy().tobytes()
    return len(data) + zeros, parts, data + bytes(zeros)


def check(chunks: list[Chunk]) -> None:
    built = [made(chunk) for chunk in chunks]
    assert all(can_digest(length, parts) for length, parts, _ in built)
    digester = Digester([(length, parts) for length, parts, _ in built])
    for _ in range(2):  # what it keeps of its own is as it was
        found = digests_of(digester.lanes().numpy(), digester.lengths)
        assert found == [chunk_digest(data) for _, _, data in built]


chunks = st.builds(
    lambda seed, lengths, last, zeros: (seed, [*lengths, last], zeros),
    st.integers(0, 1 << 20),
    st.lists(st.integers(1, 5 * BLOCK_BYTES), max_size=3),
    st.integers(241, 9 * BLOCK_BYTES),
    st.just(0) | st.integers(0, BLOCK_BYTES - 1),
)


@given(st.lists(chunks, min_size=1, max_size=5))
@example(
    [(1, [300], 0), (2, [5000, 7000], 0), (3, [1024, 2048], 0), (4, [BLOCK_BYTES + 1, 241], 700)]
)
@example([(0, [BLOCK_BYTES], 100)])
@settings(max_examples=examples(100), deadline=None)
def test_chunks_of_any_parts_have_the_digests_of_the_host(found: list[Chunk]) -> None:
    check(found)


def test_every_length_has_the_digest_of_the_host() -> None:
    check([(length, [length], 0) for length in [*LENGTHS, *part(TAILS)]])


def test_a_whole_chunk_and_a_short_one_go_together() -> None:
    check(
        [
            (1, [70_001], 0),
            (2, [100_001, CHUNK_BYTES - 101 * BLOCK_BYTES], 0),
            (3, [CHUNK_BYTES], 0),
            (4, [CHUNK_BYTES - 5], 5),
        ]
    )


def test_what_a_device_cannot_digest_is_told_apart() -> None:
    data = torch.zeros(9000, dtype=torch.uint8)
    assert can_digest(8192, [(0, data[:8192])])
    assert can_digest(8192, [(0, data[:4000]), (4096, data[:4096])])
    assert can_digest(8192, [(0, data[:8000])])
    assert not can_digest(240, [(0, data[:240])]), "too short"
    assert not can_digest(8192, [(0, data[8:8200])]), "not aligned in memory"
    assert not can_digest(8192, [(0, data[:4000]), (4000, data[:4192])]), "not aligned in the chunk"
    assert not can_digest(8192, [(0, data[:1024]), (4096, data[:4096])]), "a gap of whole blocks"
    assert not can_digest(8192, [(0, data[:4096])]), "a gap of whole blocks at the end"
    assert not can_digest(8192, [(1024, data[:7168])]), "a gap at the beginning"
    assert not can_digest(8192, []), "no parts"
    late = LateDevices(Lateness.COMPUTE)
    with late.running():
        there, other = (
            late.put(torch.zeros(4096, dtype=torch.uint8), 0),
            late.put(torch.zeros(4096, dtype=torch.uint8), 1),
        )
        assert can_digest(8192, [(0, there), (4096, there)])
        assert not can_digest(8192, [(0, there), (4096, other)]), "on two devices"


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_a_device_digests_what_is_there_when_its_turn_comes(lateness: Lateness) -> None:
    late = LateDevices(lateness)
    length, ((_, data), *_), _ = made((5, [70_001], 0))
    with late.running():
        there = late.put(data)
        digester = Digester([(length, [(0, there)])])
        waits = late.schedule.waits_of_this_thread()
        for _ in range(2):
            there += 1
            lanes = digester.lanes()
            brought = late.pinned(lanes.shape, lanes.dtype).copy_(lanes, non_blocking=True)
        assert late.schedule.waits_of_this_thread() == waits, "the host waited for the device"
        late.schedule.catch_up()
    assert digests_of(brought.numpy(), digester.lengths) == [chunk_digest(data.numpy().data)]


def launching(monkeypatch: pytest.MonkeyPatch, launch: Callable[[Blocks], object]) -> None:
    """In the place of Triton's kernels."""
    kernels = ModuleType("datastates.state.kernels")
    kernels.Launch = launch  # type: ignore[attr-defined]  # as the module has it
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr("datastates.state.device_digest.has_kernels", lambda _: True)


def test_kernels_are_launched_with_the_device_selected_on_which_the_bytes_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton asks which device is selected, and not where its tensors lie."""
    late, selected = LateDevices(Lateness.COPIES), list[int]()

    def launch(edges: torch.Tensor) -> torch.Tensor:
        selected.append(late.selected)
        return edges

    launching(monkeypatch, lambda blocks: launch)
    with late.running():
        Digester([(4096, [(0, late.put(torch.zeros(4096, dtype=torch.uint8), 1))])]).lanes()
    assert (selected, late.selected) == ([1], 0)


def test_kernels_are_told_where_the_bytes_lie_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read memory by its address; a storage that is resized to nothing and back, as by
    FSDP, lies elsewhere."""
    late, told, size = LateDevices(Lateness.COPIES), list[int](), 1 << 20

    def launch(blocks: Blocks) -> Callable[[torch.Tensor], torch.Tensor]:
        told.append(blocks.runs[0].data.data_ptr())
        return lambda edges: edges

    launching(monkeypatch, launch)
    with late.running():
        data = late.put(torch.zeros(size, dtype=torch.uint8))
        digester, before = Digester([(size, [(0, data)])]), data.data_ptr()
        digester.lanes()
        digester.lanes()
        late.schedule.catch_up()
        other = torch.UntypedStorage(size)  # so that the place is not the same again
        data.untyped_storage().resize_(2 * size)
        digester.lanes()
        assert other.data_ptr() != data.data_ptr() != before
        assert told == [before, data.data_ptr()]


INTERPRETED = [
    [
        (1, [300], 0),
        (2, [5000, 7000], 0),
        (3, [1024, 2048], 0),
        (4, [BLOCK_BYTES + 1, 241], 700),
        (5, [257], 0),
        (6, [1088], 0),
    ],
    [(1, [70_001, 5 * BLOCK_BYTES], 0)],
]
"""More than four chunks, which are digested at once; more than 64 blocks, which two programs
read."""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_kernels_give_the_digests_of_the_host_in_two_launches() -> None:
    """In Triton's interpreter, which has to be asked for before Triton is imported. Six chunks are
    digested as four and two. The last two have one block each, so one launch is enough for them."""
    assert run("interpreted", json.dumps(INTERPRETED), TRITON_INTERPRET="1") == ["3", "2"]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_kernels_compile_for_a_device(tmp_path: Path) -> None:
    assert all(int(size) > 1000 for size in run("compiled", "", TRITON_CACHE_DIR=str(tmp_path)))


def run(name: str, given: str, **more: str) -> list[str]:
    """What a module of this folder prints."""
    command = [sys.executable, "-m", f"tests.state.{name}"]
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        command,
        input=given,
        env={**os.environ, **more},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()
