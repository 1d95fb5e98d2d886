"""Which bytes of a device go where in the arena, and in how many pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from datastates.engine import device_copies
from datastates.engine.copy import copy
from datastates.engine.device_copies import HOST, aside_of, placed, routes_of
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from tests.support.late import LateDevices, Lateness


@dataclass
class Piece:
    flat: torch.Tensor
    start: int
    is_deferred: bool = False


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 * CHUNK_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("slots", "pieces"),
    [([2, 3, 4, 5], 1), ([2, 3, 5, 6], 2), ([6, 4, 2, 0], 4), ([0, 1, 3, 2], 3)],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_a_stretch_goes_in_as_few_pieces_as_its_slots_lie_together(
    slots: list[int], pieces: int, arena: Arena
) -> None:
    slots = [slot * CHUNK_BYTES for slot in slots]
    flat = torch.randint(0, 256, (3 * CHUNK_BYTES,), dtype=torch.uint8)
    pairs = placed([(1000, flat)], slots, arena)
    assert len(pairs[0]) == pieces
    copy(pairs)
    stream = torch.cat([arena.tensor(slot) for slot in slots])
    assert torch.equal(stream[1000 : 1000 + flat.numel()], flat)


def test_a_piece_lies_in_one_registration(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        arena, "is_joint", lambda first, last: (first < 4 * CHUNK_BYTES) == (last < 4 * CHUNK_BYTES)
    )
    targets, _ = placed(
        [(0, torch.zeros(4 * CHUNK_BYTES, dtype=torch.uint8))],
        [slot * CHUNK_BYTES for slot in (2, 3, 4, 5)],
        arena,
    )
    assert [target.numel() // CHUNK_BYTES for target in targets] == [2, 2]


def test_what_is_put_aside_is_one_copy_whose_stretches_lie_together_in_the_stream() -> None:
    pieces = [
        Piece(torch.full((length,), start % 251, dtype=torch.uint8), start)
        for start, length in ((0, 10), (10, 5), (64, 3), (67, 1))
    ]
    stretches = aside_of(pieces)
    assert [(start, flat.numel()) for start, flat in stretches] == [(0, 15), (64, 4)]
    assert len({flat.untyped_storage().data_ptr() for _, flat in stretches}) == 1
    assert torch.equal(stretches[1][1], torch.cat([pieces[2].flat, pieces[3].flat]))


def test_what_is_large_is_not_put_aside_nor_what_goes_beyond_the_bound_nor_what_is_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_copies, "_SMALL_BYTES", 100)
    monkeypatch.setattr(device_copies, "_ASIDE_BYTES", 250)
    late = LateDevices(Lateness.BOTH)
    there = [
        late.put(torch.zeros(length, dtype=torch.uint8)) for length in (100, 101, 100, 0, 100, 50)
    ]
    pieces = [
        Piece(flat, 1000 * index)
        for index, flat in enumerate([*there, torch.zeros(5, dtype=torch.uint8)])
    ]
    deferred = Piece(late.put(torch.zeros(10, dtype=torch.uint8)), 100_000, is_deferred=True)
    with late.running():
        found = routes_of([deferred, *reversed(pieces)])
    route = found[torch.device("cuda", 0)]
    assert [piece.start for piece in route.small] == [0, 2000, 5000]
    assert [piece.start for piece in route.large] == [1000, 4000]
    assert [piece.start for piece in route.deferred] == [100_000]
    assert [piece.start for piece in found[HOST].large] == [6000]
