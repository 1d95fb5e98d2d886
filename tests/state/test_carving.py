"""A content without some of its objects: still a sound state, whatever was laid out next to
what."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.engine.plan import compile_plan
from datastates.errors import InvalidInput
from datastates.state.digest import check, state_digest
from datastates.state.encoding import decode_values, encode_values
from datastates.state.geometry import gaps
from datastates.state.manifest import (
    ALIGNED_BYTES,
    CHUNK_BYTES,
    LARGE_BYTES,
    VERSION,
    Chunk,
    Content,
    Manifest,
    Origin,
    Shard,
    TensorSpec,
)
from datastates.state.skeleton import Carved, carve, decode_skeleton
from datastates.state.tree import flatten, unflatten
from tests.support.effort import examples

SIZES = (0, 1, 3, 100, 100_001, CHUNK_BYTES - 4, CHUNK_BYTES, CHUNK_BYTES + 1)
"""In bytes."""

tensors = st.tuples(
    st.sampled_from(SIZES),
    st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    st.booleans(),
)


def content_of(tree: object, frozen: Collection[int] = ()) -> Content:
    flat = flatten(tree)
    layout = compile_plan(flat, frozen=frozen).layout
    chunks = tuple(Chunk(bytes(16), length) for length in layout.chunk_lengths)
    return Content(layout.skeleton, msgspec.Raw(encode_values(flat.values)), layout.tensors, chunks)


def check_sound(carved: Carved) -> None:
    chunks = tuple(Chunk(bytes(16), length) for length in carved.chunk_lengths)
    content = Content(carved.skeleton, carved.values, carved.tensors, chunks)
    origin = Origin("0" * 24, (), (), None, None, 0, 0, 0, None, {}, {})
    check(Manifest(VERSION, state_digest(content, ()), origin, content), "the carved state")
    between = [last - first for _, first, last in gaps(carved.specs, carved.chunk_lengths)]
    assert sum(carved.chunk_lengths) == sum(
        shard.length for spec in carved.specs for shard in spec.shards
    ) + sum(between)
    assert all(length < ALIGNED_BYTES for length in between)


@settings(max_examples=examples(80))
@given(kept=st.lists(tensors, min_size=1, max_size=4), dropped=st.lists(tensors, max_size=4))
def test_what_is_left_is_a_sound_state(
    kept: list[tuple[int, torch.dtype, bool]], dropped: list[tuple[int, torch.dtype, bool]]
) -> None:
    frozen: set[int] = set()
    tree: dict[str, dict[str, torch.Tensor]] = {"kept": {}, "dropped": {}}
    for name, given_tensors in (("kept", kept), ("dropped", dropped)):
        for number, (size, dtype, is_frozen) in enumerate(given_tensors):
            tensor = tree[name][str(number)] = torch.empty(size // dtype.itemsize, dtype=dtype)
            frozen |= {id(tensor)} if is_frozen else set()

    carved = carve(content_of({**tree, "step": 3}, frozen), lambda path: path.startswith("kept/"))

    check_sound(carved)
    assert [(spec.path, spec.shape) for spec in carved.specs] == [
        (f"kept/{name}", tuple(each.shape)) for name, each in tree["kept"].items()
    ]
    large = [shard for spec in carved.specs for shard in spec.shards if shard.length >= LARGE_BYTES]
    assert all(shard.start % ALIGNED_BYTES == 0 for shard in large)


def test_a_group_that_ended_unseen_leaves_nothing_unaligned() -> None:
    """What is frozen fills its chunk to the byte, so that nothing shows where the rest begins."""
    odd, weight = torch.empty(100_001, dtype=torch.uint8), torch.empty(5)
    rest = torch.empty(CHUNK_BYTES - 98 * ALIGNED_BYTES, dtype=torch.uint8)
    content = content_of(
        {"model": {"odd": odd, "weight": weight}, "other": {"rest": rest}}, {id(odd), id(rest)}
    )
    assert [chunk.length for chunk in content.chunks] == [CHUNK_BYTES, 20]
    check_sound(carve(content, lambda path: path.startswith("model/")))


@pytest.mark.parametrize(
    "step", [1, ALIGNED_BYTES], ids=["end to end, as older versions wrote", "aligned"]
)
def test_what_lay_together_keeps_its_distances(step: int) -> None:
    """So that its chunks keep their digests."""
    lengths, start, shards = (100_001, 70_000, 200_003), 0, []
    for length in lengths:
        start = -(-start // step) * step
        shards.append(Shard((0,), (length,), start, length))
        start += length
    specs = [
        TensorSpec(f"{'ab'[index > 0]}/{index}", "uint8", each.shape, (1,), None, False, (each,))
        for index, each in enumerate(shards)
    ]
    encode = msgspec.msgpack.encode
    skeleton = flatten(
        {"a": {"0": torch.empty(1)}, "b": {"1": torch.empty(2), "2": torch.empty(3)}}
    ).skeleton
    content = Content(
        msgspec.Raw(skeleton.encoded),
        msgspec.Raw(encode([])),
        msgspec.Raw(encode(specs)),
        (Chunk(bytes(16), start),),
    )
    carved = carve(content, lambda path: path.startswith("b/"))
    check_sound(carved)
    assert [shard.start for spec in carved.specs for shard in spec.shards] == [
        0,
        shards[2].start - shards[1].start,
    ]


def test_a_tie_to_what_is_left_out_is_tied_to_the_next_name() -> None:
    tied = torch.arange(4.0)
    content = content_of(
        {"first": {"w": tied}, "model": {"a": tied, "b": tied, "c": torch.ones(2)}}
    )
    carved = carve(content, lambda path: path.startswith("model/"))
    check_sound(carved)
    assert [(spec.path, spec.alias, len(spec.shards)) for spec in carved.specs] == [
        ("model/a", None, 1),
        ("model/b", 0, 0),
        ("model/c", None, 1),
    ]
    assert carved.sources == (0, 0, 3)


def test_values_and_odd_containers_come_along_whole() -> None:
    tree = {
        "model": {"n": 3, "t": (1, torch.ones(2)), "s": torch.eye(2).to_sparse()},
        "other": [torch.ones(1), "x", {"y": 2.5}],
    }
    carved = carve(content_of(tree), lambda path: path == "model/n")
    assert carved.holders == (None, "coo", "coo")
    parts = [torch.ones(2), *(torch.eye(2).to_sparse().coalesce().indices(), torch.ones(2))]
    found = unflatten(decode_skeleton(carved.skeleton), decode_values(carved.values), parts)
    assert list(found) == ["model"]
    assert (found["model"]["n"], found["model"]["t"][0]) == (3, 1)


def test_nothing_is_left_out_of_what_is_no_dict() -> None:
    with pytest.raises(InvalidInput, match="no dict"):
        carve(content_of([torch.ones(1)]), lambda path: True)
