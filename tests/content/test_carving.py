"""A content without some of its objects: still a sound state, whatever was laid out next to what."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.capture.plan import compile_plan
from datastates.content.carving import Carved, carve
from datastates.content.check import check
from datastates.content.digest import state_digest
from datastates.content.encoding import encode_values
from datastates.content.manifest import CHUNK_BYTES, Chunk, Content, Manifest, Origin
from datastates.content.tree import decode_skeleton, decode_values, flatten, unflatten
from datastates.errors import InvalidInput
from tests.support.effort import examples

SIZES = (0, 1, 3, 100, CHUNK_BYTES - 4, CHUNK_BYTES, CHUNK_BYTES + 1)
"""In bytes."""

tensors = st.tuples(st.sampled_from(SIZES), st.sampled_from([torch.uint8, torch.float32, torch.float64]), st.booleans())


def content_of(tree: object, frozen: Collection[int] = ()) -> Content:
    flat = flatten(tree)
    layout = compile_plan(flat, frozen=frozen).layout
    chunks = tuple(Chunk(bytes(16), length) for length in layout.chunk_lengths)
    return Content(layout.skeleton, msgspec.Raw(encode_values(flat.values)), layout.tensors, chunks)


def check_sound(carved: Carved) -> None:
    chunks = tuple(Chunk(bytes(16), length) for length in carved.chunk_lengths)
    content = Content(carved.skeleton, carved.values, carved.tensors, chunks)
    origin = Origin("0" * 24, (), (), None, None, 0, 0, 0, None, {}, {})
    check(Manifest(1, state_digest(content, ()), origin, content), "the carved state")
    assert sum(carved.chunk_lengths) == sum(shard.length for spec in carved.specs for shard in spec.shards)


@settings(max_examples=examples(80))
@given(kept=st.lists(tensors, min_size=1, max_size=4), dropped=st.lists(tensors, max_size=4))
def test_what_is_left_is_a_sound_state(kept: list[tuple[int, torch.dtype, bool]], dropped: list[tuple[int, torch.dtype, bool]]) -> None:
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


def test_a_group_that_ended_unseen_leaves_nothing_unaligned() -> None:
    """What is frozen fills its chunk to the byte, so that nothing shows where the rest begins."""
    odd, rest, weight = torch.empty(100_001, dtype=torch.uint8), torch.empty(CHUNK_BYTES - 100_001, dtype=torch.uint8), torch.empty(5)
    content = content_of({"other": {"rest": rest}, "model": {"odd": odd, "weight": weight}}, {id(odd), id(rest)})
    assert [chunk.length for chunk in content.chunks] == [CHUNK_BYTES, 20]
    check_sound(carve(content, lambda path: path.startswith("model/")))


def test_a_tie_to_what_is_left_out_is_tied_to_the_next_name() -> None:
    tied = torch.arange(4.0)
    content = content_of({"first": {"w": tied}, "model": {"a": tied, "b": tied, "c": torch.ones(2)}})
    carved = carve(content, lambda path: path.startswith("model/"))
    check_sound(carved)
    assert [(spec.path, spec.alias, len(spec.shards)) for spec in carved.specs] == [
        ("model/a", None, 1),
        ("model/b", 0, 0),
        ("model/c", None, 1),
    ]
    assert carved.sources == (0, 0, 3)


def test_values_and_odd_containers_come_along_whole() -> None:
    tree = {"model": {"n": 3, "t": (1, torch.ones(2)), "s": torch.eye(2).to_sparse()}, "other": [torch.ones(1), "x", {"y": 2.5}]}
    carved = carve(content_of(tree), lambda path: path == "model/n")
    assert carved.holders == (None, "coo", "coo")
    parts = [torch.ones(2), *(torch.eye(2).to_sparse().coalesce().indices(), torch.ones(2))]
    found = unflatten(decode_skeleton(carved.skeleton), decode_values(carved.values), parts)
    assert list(found) == ["model"]
    assert (found["model"]["n"], found["model"]["t"][0]) == (3, 1)


def test_nothing_is_left_out_of_what_is_no_dict() -> None:
    with pytest.raises(InvalidInput, match="no dict"):
        carve(content_of([torch.ones(1)]), lambda path: True)
