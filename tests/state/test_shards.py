"""Shards of a tensor: whether they make it up, and its bytes through them and back."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastates.errors import Corrupt
from datastates.state.digest import check
from datastates.state.geometry import (
    MAX_CUT,
    assemble,
    covers,
    cut,
    dense_view,
    dtype_of,
    is_whole,
    rebuild,
    spec_of,
    stored_bytes,
)
from datastates.state.manifest import Shard, TensorSpec, root_digest
from tests.support.sharding import Box, boxes, columns, rows, sharded
from tests.support.strategies import DTYPES, random_tensor


def spec_with(tensor: torch.Tensor, pieces: list[Box]) -> TensorSpec:
    spec = spec_of("w", tensor)
    shards = [
        Shard(offset, shape, 0, stored_bytes(dtype_of(spec.dtype), shape, spec.strides))
        for offset, shape in pieces
    ]
    return msgspec.structs.replace(spec, shards=tuple(shards))


def counted(shape: tuple[int, ...], pieces: list[Box]) -> bool:
    """Whether every element is in exactly one box, by marking each."""
    marks = np.zeros(shape, np.int64)
    for offset, size in pieces:
        marks[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))] += 1
    return bool((marks == 1).all())


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def any_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tiling, with a box taken away, doubled or moved now and then; or boxes that lie
    anywhere."""
    shape = draw(shapes)
    pieces = draw(boxes(shape))
    match draw(st.integers(0, 3)):
        case 1:
            pieces.pop()
        case 2:
            pieces.append(draw(st.sampled_from(pieces)))
        case 3 if shape:
            _, size = pieces.pop()
            moved = tuple(
                draw(st.integers(0, whole - length))
                for whole, length in zip(shape, size, strict=True)
            )
            pieces.append((moved, size))
    return shape, pieces


PINWHEEL: list[Box] = [
    ((0, 0), (1, 2)),
    ((0, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 0), (2, 1)),
    ((1, 1), (1, 1)),
]


@settings(max_examples=400)
@given(any_boxes())
@example(((3, 3), PINWHEEL))
@example(((3, 3), PINWHEEL[:4]))
@example(
    ((2, 2), [((0, 0), (1, 2)), ((0, 0), (1, 2))])
)  # as many elements as there are, half of them twice
def test_shards_cover_a_tensor_if_every_element_is_in_one_of_them(
    given_boxes: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, pieces = given_boxes
    assert covers(spec_with(torch.empty(shape), pieces)) == counted(shape, pieces)


def test_shards_cut_along_more_dimensions_than_a_mesh_has_are_not_taken() -> None:
    shape = (2,) * (MAX_CUT + 1)
    every = [
        tuple(int(bit) for bit in np.binary_repr(number, len(shape)))
        for number in range(2 ** len(shape))
    ]
    assert not covers(
        spec_with(torch.empty(shape), [(corner, (1,) * len(shape)) for corner in every])
    )


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_tensor_comes_back_from_its_shards_bit_by_bit(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random_tensor(dtype, list(shape), seed=data.draw(st.integers(0, 99)))
    tensor = tensor.permute(*data.draw(st.permutations(range(len(shape)))))
    flat = dense_view(tensor)
    assert flat is not None
    spec = spec_with(tensor, data.draw(boxes(tuple(tensor.shape))))
    pieces = {id(shard): piece for shard, piece in cut(spec, flat)}

    for shard in spec.shards:  # each lies as a tensor of its shape does
        if shard.length:
            alone = tensor[
                tuple(
                    slice(at, at + size) for at, size in zip(shard.offset, shard.shape, strict=True)
                )
            ]
            assert len(pieces[id(shard)]) == alone.numel() * alone.element_size()
    assert torch.equal(assemble(spec, lambda shard: pieces[id(shard)]), flat)


def test_a_shard_lies_in_the_order_of_the_whole_tensor() -> None:
    # its first dimension is the innermost in memory
    tensor = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    flat = dense_view(tensor)
    assert flat is not None
    spec = spec_with(tensor, rows((4, 2, 3), 1, 3))
    (_, first), (_, second) = cut(spec, flat)
    assert first.view(torch.float32).tolist() == [0, 4, 8, 12, 16, 20]
    assert second.view(torch.float32)[:6].tolist() == [1, 2, 3, 5, 6, 7]


def test_an_expanded_dimension_is_stored_once_in_every_shard() -> None:
    tensor = torch.arange(6.0).reshape(6, 1).expand(6, 5)
    flat = torch.arange(6.0).view(torch.uint8)
    spec = spec_with(tensor, rows((6, 5), 2, 4))
    assert [len(piece) for _, piece in cut(spec, flat)] == [8, 16]
    pieces = [piece for _, piece in cut(spec, flat)]
    shards = list(spec.shards)
    assert torch.equal(
        rebuild(assemble(spec, lambda shard: pieces[shards.index(shard)]), spec), tensor
    )


def test_a_tensor_in_one_stretch_is_not_copied() -> None:
    flat = torch.zeros(24, dtype=torch.uint8)
    spec = spec_with(torch.zeros(2, 3), rows((2, 3), 2))
    assert is_whole(spec)
    assert assemble(spec, lambda _: flat) is flat


def refused(pieces: list[Box]) -> str:
    """What is said of a state with one tensor of 4 rows and 6 columns in these shards."""
    (part,) = sharded("0" * 24, {"w": torch.zeros(4, 6)}, {"w": [pieces]})
    with pytest.raises(Corrupt) as caught:
        check(part.manifest, "the manifest")
    return str(caught.value)


def test_a_manifest_whose_shards_overlap_or_leave_holes_is_refused() -> None:
    (sound,) = sharded("0" * 24, {"w": torch.zeros(4, 6)}, {"w": [columns((4, 6), 1, 0, 5)]})
    check(sound.manifest, "the manifest")
    assert "has 48 bytes stored, its shape takes 96" in refused(rows((4, 6), 2, 2)[:1])
    assert "2 shards, which overlap and leave holes" in refused(rows((4, 6), 2, 2)[:1] * 2)


def test_a_manifest_that_cuts_an_expanded_dimension_is_refused() -> None:
    expanded = spec_with(torch.zeros(6, 1).expand(6, 4), columns((6, 4), 2, 2))
    (part,) = sharded("0" * 24, {"w": torch.zeros(6, 1).expand(6, 4)}, {})
    content = msgspec.structs.replace(
        part.manifest.content, tensors=msgspec.Raw(msgspec.msgpack.encode([expanded]))
    )
    with pytest.raises(Corrupt, match="cut where the tensor is expanded"):
        check(msgspec.structs.replace(part.manifest, content=content), "the manifest")


def test_the_root_digest_of_one_part_is_its_own_and_of_several_depends_on_each_and_on_their_order() -> (
    None
):
    one, two = "1f" * 32, "2e" * 32
    assert root_digest([one]) == one
    said = b"datastates parts 1\0" + (2).to_bytes(8, "little") + one.encode() + two.encode()
    assert root_digest([one, two]) == blake3(said).hexdigest()
    assert (
        len({root_digest(each) for each in ([one, two], [two, one], [one, one], [one, two, two])})
        == 4
    )
