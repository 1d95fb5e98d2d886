"""A manifest reads back whole, or says what is wrong with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datastates.errors import Corrupt, DatastatesError, InvalidInput, Unavailable
from datastates.state.digest import (
    chunk_digest,
    decode,
    decode_places,
    digest_of,
    encode,
    state_digest,
    tensors_of,
)
from datastates.state.geometry import dense_strides, rebuild
from datastates.state.manifest import (
    CHUNK_BYTES,
    VERSION,
    Chunk,
    ChunkRef,
    Content,
    Manifest,
    Origin,
    PackInfo,
    Shard,
    TensorSpec,
)
from tests.support.effort import examples

replace = msgspec.structs.replace
PARENT = "ab" * 32


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def spec(path: str, shape: tuple[int, ...], start: int, **changes: Any) -> TensorSpec:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    shard = Shard((0,) * len(shape), shape, start, step * 4)
    return replace(
        TensorSpec(path, "float32", shape, tuple(strides), None, False, (shard,)), **changes
    )


WHOLE = CHUNK_BYTES // 4
SPECS = (
    spec("a", (WHOLE, 2), 0),
    spec("b", (10,), 2 * CHUNK_BYTES),
    spec("tied", (10,), 0, alias=1, shards=()),
    spec("empty", (0, 3), 0, shards=()),
    spec("c", (5, 3), 3 * CHUNK_BYTES),
)
LENGTHS = (CHUNK_BYTES, CHUNK_BYTES, 40, 60)


def sealed(manifest: Manifest) -> Manifest:
    """With the digest that belongs to its content."""
    return replace(manifest, digest=digest_of(manifest.content, manifest.origin))


def make(specs: object = SPECS, **changes: Any) -> Manifest:
    chunks = tuple(Chunk(bytes([index]) * 16, length) for index, length in enumerate(LENGTHS))
    content = Content(raw([0]), raw([1, "x"]), raw(specs), chunks)
    origin = Origin(
        "f" * 24,
        ("e" * 24,),
        (PARENT,),
        None,
        "main",
        3,
        0,
        1_700_000_000_000_000,
        "note",
        {"loss": 0.5},
        {"lr": 1, "tag": None},
    )
    packs = (PackInfo("f.0.safetensors", 4096 + sum(LENGTHS), 4096, b"\1" * 32),)
    offsets = (4096, 4096 + CHUNK_BYTES, 4096 + 2 * CHUNK_BYTES, 4096 + 2 * CHUNK_BYTES + 40)
    refs = tuple(
        ChunkRef(0, offset, length) for offset, length in zip(offsets, LENGTHS, strict=True)
    )
    return sealed(replace(Manifest(VERSION, "", origin, content, packs, refs), **changes))


SMALL = encode(make())


def frame(version: int, body: bytes) -> bytes:
    """A whole frame around any body, as a peer that means harm would make it."""
    framed = (
        b"DSMANIF\0"
        + version.to_bytes(4, "little")
        + bytes(4)
        + len(body).to_bytes(8, "little")
        + body
    )
    return framed + blake3(framed).digest()


def test_a_manifest_comes_back_equal() -> None:
    manifest = make()
    back = decode(encode(manifest), source="here")
    assert encode(back) == encode(manifest)
    assert tensors_of(back.content) == SPECS
    assert (back.origin, back.packs, back.refs, back.content.chunks) == (
        manifest.origin,
        manifest.packs,
        manifest.refs,
        manifest.content.chunks,
    )


def test_a_manifest_without_places_is_whole() -> None:
    assert decode(memoryview(encode(make(packs=(), refs=()))), source="memory").refs == ()


def test_a_state_without_tensors_is_whole() -> None:
    empty = make()
    empty = sealed(
        replace(
            empty, content=replace(empty.content, tensors=raw([]), chunks=()), packs=(), refs=()
        )
    )
    assert decode(encode(empty), source="here").content.chunks == ()


def test_every_flipped_byte_is_found_and_the_source_named() -> None:
    for position in range(len(SMALL)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(SMALL)
            damaged[position] ^= flip
            with pytest.raises(Corrupt, match="the-file"):
                decode(bytes(damaged), source="the-file")


def test_every_truncation_and_extension_is_found() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(Corrupt, match="the-file"):
            decode(SMALL[:length], source="the-file")
    with pytest.raises(Corrupt, match="the-file"):
        decode(SMALL + b"\0", source="the-file")


def test_a_newer_version_asks_for_an_upgrade() -> None:
    with pytest.raises(
        Unavailable,
        match=r"the-file is a manifest of version 9.*reads version 2: upgrade datastates",
    ):
        decode(frame(9, b"what we cannot know"), source="the-file")
    with pytest.raises(InvalidInput, match="version 9"):
        encode(replace(make(), version=9))


def test_the_version_inside_must_be_the_version_outside() -> None:
    body = msgspec.msgpack.encode(replace(make(), version=3))
    with pytest.raises(Corrupt, match="version 3 inside and 2 outside"):
        decode(frame(VERSION, body), source="the-file")


def test_a_digest_that_does_not_belong_to_the_content_is_found() -> None:
    for manifest in (
        replace(make(), digest="0" * 64),
        replace(make(), origin=replace(make().origin, parent_digests=("cd" * 32,))),
    ):
        with pytest.raises(Corrupt, match="the-file holds a state whose digest is"):
            decode(encode(manifest), source="the-file")


def with_spec(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda _: make((replace(SPECS[0], **changes), *SPECS[1:]))


def with_shard(**changes: Any) -> Callable[[Manifest], Manifest]:
    return with_spec(shards=(replace(SPECS[0].shards[0], **changes),))


def with_origin(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, origin=replace(manifest.origin, **changes))


def with_chunk(index: int, **changes: Any) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        chunks = list(manifest.content.chunks)
        chunks[index] = replace(chunks[index], **changes)
        return replace(manifest, content=replace(manifest.content, chunks=tuple(chunks)))

    return change


def with_pack(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, packs=(replace(manifest.packs[0], **changes),))


def with_refs(*refs: ChunkRef) -> Callable[[Manifest], Manifest]:
    return lambda manifest: replace(manifest, refs=refs + manifest.refs[len(refs) :])


BIG = (1 << 61, 1 << 61)
CONTRADICTIONS: dict[str, Callable[[Manifest], Manifest]] = {
    "fewer places than chunks": lambda manifest: replace(manifest, refs=manifest.refs[1:]),
    "more places than chunks": lambda manifest: replace(manifest, refs=manifest.refs * 2),
    "pack out of range": with_refs(ChunkRef(1, 4096, CHUNK_BYTES)),
    "pack below range": with_refs(ChunkRef(-1, 4096, CHUNK_BYTES)),
    "offset below zero": with_refs(ChunkRef(0, -1, CHUNK_BYTES)),
    "offset beyond the pack": with_refs(ChunkRef(0, 8192 + CHUNK_BYTES * 2, CHUNK_BYTES)),
    "offset huge": with_refs(ChunkRef(0, (1 << 64) - 1, CHUNK_BYTES)),
    "another stored length": with_refs(ChunkRef(0, 4096, CHUNK_BYTES - 1)),
    "pack with a path": with_pack(name="../secret"),
    "pack in a folder": with_pack(name="a/b.safetensors"),
    "pack hidden": with_pack(name=".."),
    "pack without a name": with_pack(name=""),
    "pack of negative size": with_pack(size=-1),
    "header beyond the pack": with_pack(header_length=1 << 40),
    "chunk too long": with_chunk(0, length=CHUNK_BYTES + 1),
    "chunk empty": with_chunk(2, length=0),
    "chunk negative": with_chunk(2, length=-40),
    "chunk digest short": with_chunk(2, digest=b"1234"),
    "chunk shorter than its tensor": with_chunk(3, length=56),
    "short chunk inside a tensor": with_chunk(0, length=CHUNK_BYTES - 4),
    "uid with a path": with_origin(uid="../x"),
    "uid empty": with_origin(uid=""),
    "run with a path": with_origin(run="a/b"),
    "parents without digests": with_origin(parents=("e" * 24, "d" * 24)),
    "parent digest of another kind": with_origin(parent_digests=("xyz",)),
    "rank beyond the world": with_origin(rank=1),
    "rank below zero": with_origin(rank=-1),
    "more ranks than can be": with_origin(world_size=(1 << 20) + 1),
    "step below zero": with_origin(step=-1),
    "shape negative": with_spec(shape=(-WHOLE, -2)),
    "shape larger": with_spec(shape=(WHOLE, 3), strides=(3, 1)),
    "shape overflowing": with_spec(shape=BIG, strides=(1 << 61, 1)),
    "shape overflowing beside a zero": with_spec(shape=(*BIG, 0), strides=(0, 0, 1), shards=()),
    "strides negative": with_spec(strides=(-2, 1)),
    "strides overlapping": with_spec(strides=(1, 1)),
    "strides beyond": with_spec(strides=(4, 2)),
    "strides missing": with_spec(strides=(1,)),
    "too many dimensions": with_spec(shape=(1,) * 65, strides=(1,) * 65),
    "no shards": with_spec(shards=()),
    "twice the same shard": with_spec(shards=SPECS[0].shards * 2),
    "shard before the stream": with_shard(start=-4),
    "shard unaligned": with_shard(start=2),
    "shard beyond the stream": with_shard(start=4 * CHUNK_BYTES),
    "shard far beyond the stream": with_shard(start=1 << 62),
    "shard over a short chunk": with_shard(start=CHUNK_BYTES),
    "shard too short": with_shard(length=8),
    "shard negative": with_shard(length=-8),
    "shard outside its tensor": with_shard(offset=(1, 0)),
    "shard before its tensor": with_shard(offset=(-1, 0)),
    "shard of another rank": with_shard(offset=(0,), shape=(WHOLE,)),
    "tied to itself": lambda _: make((*SPECS[:2], replace(SPECS[2], alias=2))),
    "tied to a later one": lambda _: make((*SPECS[:2], replace(SPECS[2], alias=4))),
    "tied below zero": lambda _: make((*SPECS[:2], replace(SPECS[2], alias=-1))),
    "tied to another shape": lambda _: make((*SPECS[:2], replace(SPECS[2], alias=0))),
    "tied to a tied one": lambda _: make((*SPECS[:3], replace(SPECS[2], path="again", alias=2))),
    "tied and stored": lambda _: make((*SPECS[:2], replace(SPECS[2], shards=SPECS[1].shards))),
    "two of one path": lambda _: make((*SPECS, replace(SPECS[3], path="a"))),
    "tensors that are none": lambda _: make([["a"]]),
    "tensors that are a number": lambda _: make(7),
    "attribute that is a list": with_origin(attributes={"a": [1]}),
    "metric that is a text": with_origin(metrics={"a": "1"}),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_manifest_that_contradicts_itself_is_corrupt(
    change: Callable[[Manifest], Manifest],
) -> None:
    data = encode(sealed(change(make())))
    with pytest.raises(Corrupt, match="the-file"):
        decode(data, source="the-file")


def test_a_dtype_of_a_newer_torch_asks_for_an_upgrade() -> None:
    data = encode(with_spec(dtype="float31")(make()))
    with pytest.raises(
        Unavailable, match=r"the-file cannot be read here: .*'float31': upgrade torch"
    ):
        decode(data, source="the-file")


def test_a_tensor_in_two_shards_is_whole() -> None:
    halves = (Shard((0, 0), (4, 1), 0, 16), Shard((0, 1), (4, 1), 16, 16))
    whole = spec("a", (4, 2), 0, shards=halves)
    assert tensors_of(decode(encode(make((whole,))), source="here").content) == (whole,)


def test_a_rank_of_several_may_hold_a_part_of_a_tensor() -> None:
    part = spec("a", (8, 2), 0, shards=(Shard((4, 0), (4, 2), 0, 32),))
    manifest = make((part,), packs=(), refs=())
    data = encode(sealed(replace(manifest, origin=replace(manifest.origin, rank=1, world_size=2))))
    assert tensors_of(decode(data, source="here").content) == (part,)
    with pytest.raises(Corrupt, match="32 bytes stored, its shape takes 64"):
        decode(encode(manifest), source="here")


def test_an_expanded_tensor_takes_the_bytes_of_one_copy() -> None:
    expanded = spec("a", (1000, 5), 0, strides=(0, 1), shards=(Shard((0, 0), (1000, 5), 0, 20),))
    assert tensors_of(decode(encode(make((expanded,))), source="here").content) == (expanded,)


@given(st.binary(max_size=80), st.integers(0, 2))
@example(b"\xdd\xff\xff\xff\xff", 1)
@example(b"\x91" * 5000, 1)
@settings(max_examples=examples(300), deadline=None)
def test_bodies_made_to_harm_crash_nothing(body: bytes, version: int) -> None:
    with pytest.raises((Corrupt, Unavailable), match="the-file"):
        decode(frame(version, body), source="the-file")


@given(st.data())
@settings(max_examples=examples(600), deadline=None)
def test_changed_bodies_with_right_digests_crash_nothing(data: st.DataObject) -> None:
    body = bytearray(SMALL[20:-32])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        changed = encode(sealed(msgspec.msgpack.decode(bytes(body), type=Manifest)))
    except (msgspec.MsgspecError, InvalidInput, ValueError, OverflowError):
        changed = frame(VERSION, bytes(body))
    try:
        decode(changed, source="the-file")
    except DatastatesError as exc:
        # a change of the message, say, is no contradiction
        assert "the-file" in str(exc)  # noqa: PT017


_small = st.integers(-1, 6)
_numbers = st.lists(_small, max_size=2).map(tuple)
_shards = st.builds(
    Shard,
    _numbers,
    _numbers,
    st.sampled_from([0, 4, 40, 2, CHUNK_BYTES]),
    st.integers(0, 12).map(lambda n: n * 4),
)
_specs = st.builds(
    TensorSpec,
    st.sampled_from("abc"),
    st.sampled_from(["float32", "int8", "float64"]),
    _numbers,
    _numbers,
    st.none() | st.integers(-1, 2),
    st.booleans(),
    st.lists(_shards, max_size=2).map(tuple),
)


@given(st.lists(_specs, max_size=3))
@settings(max_examples=examples(1500), deadline=None)
def test_whatever_is_accepted_can_be_built_inside_its_stream(specs: list[TensorSpec]) -> None:
    chunks = (Chunk(b"0" * 16, CHUNK_BYTES), Chunk(b"1" * 16, 64))
    content = Content(raw([0]), raw([]), raw(specs), chunks)
    try:
        manifest = decode(
            encode(sealed(replace(make(packs=(), refs=()), content=content))), source="the-file"
        )
    except Corrupt:
        return
    for accepted in tensors_of(manifest.content):
        for shard in accepted.shards:
            data = STREAM[shard.start : shard.start + shard.length]
            back = rebuild(
                data,
                replace(
                    accepted,
                    shape=shard.shape,
                    strides=dense_strides(shard.shape, accepted.strides),
                ),
            )
            assert back.shape == shard.shape
            assert int(back.sum()) == 0


STREAM = torch.zeros(CHUNK_BYTES + 64, dtype=torch.uint8)


def test_raw_parts_nested_too_deep_are_corrupt() -> None:
    bomb = msgspec.Raw(b"\x91" * 100_000 + b"\x90")
    manifest = make()
    for content in (
        replace(manifest.content, tensors=bomb),
        replace(manifest.content, skeleton=bomb),
    ):
        with pytest.raises(Corrupt, match="the-file"):
            decode(encode(sealed(replace(manifest, content=content))), source="the-file")


def test_the_packs_alone_read_as_they_do_with_the_rest_and_are_checked_alike() -> None:
    assert decode_places(SMALL, source="here").packs == make().packs
    for position in range(len(SMALL)):
        damaged = bytearray(SMALL)
        damaged[position] ^= 0x40
        with pytest.raises(Corrupt, match="the-file"):
            decode_places(bytes(damaged), source="the-file")
    with pytest.raises(Unavailable, match="version 9"):
        decode_places(frame(9, b""), source="the-file")
    with pytest.raises(Corrupt, match="the-file"):
        decode_places(frame(VERSION, b"\x91" * 5000), source="the-file")


# Digests


def test_the_digest_of_a_state_covers_every_part_and_its_place() -> None:
    content = make().content
    swapped = replace(content, skeleton=content.values, values=content.skeleton)
    moved = replace(
        content,
        skeleton=msgspec.Raw(bytes(content.skeleton) + b"\x92"),
        values=msgspec.Raw(bytes(content.values)[1:]),
    )
    others = [
        swapped,
        moved,
        replace(content, tensors=raw([])),
        replace(content, chunks=content.chunks[1:]),
        replace(content, chunks=(replace(content.chunks[0], length=1), *content.chunks[1:])),
        replace(
            content, chunks=(replace(content.chunks[0], digest=b"x" * 16), *content.chunks[1:])
        ),
    ]
    digests = [state_digest(other, [PARENT]) for other in (content, *others)]
    digests += [
        state_digest(content, parents)
        for parents in ([], [PARENT, PARENT], [PARENT[:-1]], [PARENT[:10], PARENT[10:]])
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 for digest in digests)
    assert state_digest(content, [PARENT]) == digests[0]


def test_a_state_has_the_same_digest_wherever_its_bytes_lie() -> None:
    assert make().digest == make(packs=(), refs=()).digest


def test_the_digest_of_a_chunk_is_xxh3() -> None:
    data = bytes(range(256)) * 1000
    assert chunk_digest(memoryview(data)) == chunk_digest(data) == xxhash.xxh3_128(data).digest()
    assert len(chunk_digest(b"")) == 16


def test_chunks_are_digested_by_several_threads_alike() -> None:
    data = bytes(4 << 20)
    expected, found = chunk_digest(data), []
    threads = [
        threading.Thread(target=lambda: found.append(chunk_digest(memoryview(data))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
