"""Boxes of tensors out of shards that are cut in any way: bit by bit what slicing gives, and no
chunk is read in vain."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.errors import Corrupt
from datastates.state.geometry import compact, cut, dense_view, dtype_of, spec_of, stored_bytes
from datastates.state.manifest import Shard, TensorSpec
from datastates.storage import reading
from datastates.storage.local import LocalTier
from datastates.storage.reading import Region, chunks_of, open_parts, read_regions, specs_of, whole
from datastates.storage.tier import Reader
from tests.support.effort import examples
from tests.support.sharding import Box, boxes, columns, rows, sharded
from tests.support.strategies import DTYPES, random_tensor

SMALL = 64
"""Bytes of a chunk here, so that small tensors lie in many."""


class Stream(Reader):
    """A stream of small chunks that notes which are read; it lends what lies in one."""

    def __init__(self, data: bytes, *, lends: bool) -> None:
        self.data, self.lends = data, lends
        self.read: Counter[int] = Counter()

    def chunk(self, index: int) -> memoryview:
        self.read[index] += 1
        return memoryview(self.data)[index * SMALL : (index + 1) * SMALL]

    def span(self, start: int, length: int) -> memoryview | None:
        if not self.lends or not length or start // SMALL != (start + length - 1) // SMALL:
            return None
        return self.chunk(start // SMALL)[start % SMALL : start % SMALL + length]

    def close(self) -> None:
        """Nothing to do."""


@st.composite
def placed(draw: st.DrawFn) -> tuple[torch.Tensor, TensorSpec, bytes]:
    """A tensor of any geometry, its entry in a manifest, and the stream that its shards lie in,
    anywhere and in any order."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    tensor = random_tensor(dtype, list(shape), seed=draw(st.integers(0, 999)))
    if tensor.dim():
        # channels_last is one of these
        tensor = tensor.permute(*draw(st.permutations(range(tensor.dim()))))
    pieces = draw(boxes(tuple(tensor.shape), most=8))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        pieces = [((0, *offset), (tensor.shape[0], *size)) for offset, size in pieces]
    dense = tensor if dense_view(tensor) is not None else compact(tensor)
    flat = dense_view(dense)
    assert flat is not None
    spec = spec_of("w", dense)
    shards = tuple(
        Shard(offset, size, 0, stored_bytes(dtype, size, spec.strides)) for offset, size in pieces
    )
    spec = msgspec.structs.replace(spec, shards=shards)
    stream, there = bytearray(), []
    for shard, piece in cut(spec, flat):
        # 5: an element may then lie in two chunks
        gap = draw(st.sampled_from([0, 0, 0, 16, 48, 144, 5]))
        stream += bytes(gap if gap == 5 else gap - len(stream) % -dtype.itemsize)
        there.append(msgspec.structs.replace(shard, start=len(stream)))
        stream += piece.numpy().tobytes()
    there += [shard for shard in shards if not shard.length and len(shards) > 1]
    return dense, msgspec.structs.replace(spec, shards=tuple(there)), bytes(stream)


def bits(tensor: torch.Tensor) -> bytes:
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[
        tensor.element_size()
    ]
    flat = dense_view(tensor.view(word).contiguous())
    assert flat is not None
    return flat.numpy().tobytes()


def sliced(tensor: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]


def needed(
    tensor: torch.Tensor, spec: TensorSpec, offset: tuple[int, ...], shape: tuple[int, ...]
) -> set[int]:
    """The chunks in which an element of the box lies, found by asking for each element."""
    item, found = dtype_of(spec.dtype).itemsize, set()
    numbers = torch.zeros(tensor.shape, dtype=torch.bool)
    sliced(numbers, offset, shape).fill_(True)
    for shard in spec.shards:
        if not shard.length:
            continue
        marks = sliced(numbers, shard.offset, shard.shape)
        order = sorted(
            (dim for dim in range(marks.dim()) if spec.strides[dim]),
            key=lambda dim: (-spec.strides[dim], dim),
        )
        once = marks[
            tuple(slice(None) if spec.strides[dim] else slice(0, 1) for dim in range(marks.dim()))
        ]
        if any(not stride for stride in spec.strides):
            once = marks.amax(
                [dim for dim in range(marks.dim()) if not spec.strides[dim]], keepdim=True
            )
        line = once.permute(
            [*order, *(dim for dim in range(marks.dim()) if dim not in order)]
        ).reshape(-1)
        for number in line.nonzero().view(-1).tolist():
            found |= {
                (shard.start + number * item) // SMALL,
                (shard.start + number * item + item - 1) // SMALL,
            }
    return found


@settings(max_examples=examples(500), deadline=None)
@given(state=placed(), data=st.data(), is_borrowing=st.booleans(), lends=st.booleans())
def test_boxes_are_bit_by_bit_what_slicing_gives_and_only_their_chunks_are_read_once(
    state: tuple[torch.Tensor, TensorSpec, bytes],
    data: st.DataObject,
    is_borrowing: bool,
    lends: bool,
) -> None:
    tensor, spec, stream = state
    wanted = [whole(spec)] if data.draw(st.booleans()) else []
    for _ in range(data.draw(st.integers(1, 3))):
        offset = tuple(data.draw(st.integers(0, size)) for size in spec.shape)
        shape = tuple(
            data.draw(st.integers(0, size - at))
            for size, at in zip(spec.shape, offset, strict=True)
        )
        wanted.append(Region(spec, offset, shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_BYTES", SMALL)
        reader = Stream(stream, lends=lends)
        found = read_regions(reader, wanted, is_borrowing=is_borrowing)
        touched = chunks_of(wanted)
    for region, got in zip(wanted, found, strict=True):
        expected = sliced(tensor, region.offset, region.shape)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert bits(got) == bits(expected)
    assert touched == sorted(reader.read)
    assert set(touched) == set().union(
        *(needed(tensor, spec, region.offset, region.shape) for region in wanted)
    )
    if not lends:
        assert max(reader.read.values(), default=1) == 1


def test_parts_of_which_a_box_needs_nothing_are_not_read_even_where_they_are_damaged(
    tmp_path: Path,
) -> None:
    tree = {"w": torch.randn(1000, 3000), "b": torch.randn(3000)}
    cuts: list[list[Box]] = [[box] for box in rows((1000, 3000), 400, 0, 600)]
    parts = sharded(
        secrets.token_hex(12),
        tree,
        {"w": cuts, "b": [[box] for box in columns((3000,), 1000, 1999, 1)]},
        3,
        step=1,
    )
    uid = parts[0].manifest.origin.uid
    for rank, part in enumerate(parts):
        LocalTier(tmp_path, rank=rank).put(part)
    (pack,) = tmp_path.glob(f"{uid}.2.*safetensors")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    tier = LocalTier(tmp_path)
    with open_parts(lambda rank: tier.open_part(uid, rank), 3, uid) as reader:
        spec = {each.path: each for each in specs_of(reader)}
        for is_borrowing in (False, True):
            found = read_regions(
                reader,
                [Region(spec["w"], (350, 0), (50, 3000)), Region(spec["w"], (0, 7), (400, 2))],
                is_borrowing=is_borrowing,
            )
            assert torch.equal(found[0], tree["w"][350:400])
            assert torch.equal(found[1], tree["w"][:400, 7:9])
            with pytest.raises(Corrupt, match=f"{uid}.2"):
                read_regions(
                    reader, [Region(spec["w"], (0, 0), (1000, 1))], is_borrowing=is_borrowing
                )


def test_what_is_not_borrowed_is_the_callers_and_lasts(tmp_path: Path) -> None:
    tree = {"w": torch.arange(60.0).reshape(6, 10)}
    (part,) = sharded(secrets.token_hex(12), tree, {"w": [columns((6, 10), 4, 6)]})
    tier = LocalTier(tmp_path)
    tier.put(part)
    with tier.open(part.manifest.origin.uid) as reader:
        (spec,) = specs_of(reader)
        found = read_regions(reader, [Region(spec, (1, 0), (2, 4)), Region(spec, (0, 2), (6, 5))])
    for tensor, wanted in zip(found, (tree["w"][1:3, :4], tree["w"][:, 2:7]), strict=True):
        assert torch.equal(tensor, wanted)
        tensor.add_(1)
    with tier.open(part.manifest.origin.uid) as reader:
        assert torch.equal(read_regions(reader, [whole(spec)])[0], tree["w"])
