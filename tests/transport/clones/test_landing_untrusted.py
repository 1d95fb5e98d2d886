"""Whatever a peer writes into a manifest, it is refused by an error of ours, or what it says is
done and nothing else."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from datastates.errors import Corrupt, DatastatesError, PeerFault, Unavailable
from datastates.state import in_place
from datastates.state.digest import chunk_digest, encode, state_digest, wrap
from datastates.state.generators import RngState
from datastates.state.manifest import CHUNK_BYTES, VERSION, Chunk, Content, Manifest, Origin
from datastates.state.skeleton import _escape_kept
from datastates.state.tree import unflatten
from datastates.storage.arena import Arena
from datastates.storage.memory import MemoryTier
from datastates.transport.receive_objects import ObjectsSink
from datastates.transport.receive_states import StateSink
from datastates.transport.untrusted import CheckedManifest, read_manifest
from tests.support.cloning import Sent, sent
from tests.support.effort import examples

torch.set_num_threads(1)

_MARGIN = 4096


class Guarded:
    """Live objects whose tensors lie between bytes that nobody may write."""

    def __init__(self) -> None:
        self._bases: list[torch.Tensor] = []
        linear = torch.nn.Linear(300, 300)
        linear.weight.data = self._tensor(300, 300)
        linear.bias.data = self._tensor(300)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[linear.weight]["momentum_buffer"] = self._tensor(300, 300)
        optimizer.state[linear.bias]["momentum_buffer"] = self._tensor(300)
        plain = {
            "a": self._tensor(70_000),
            3: [self._tensor(2, 3), "text", 1 << 70],
            "array": np.zeros(20_000, np.float32),
        }
        self.objects: dict[str, Any] = {
            "model": linear,
            "optimizer": optimizer,
            "plain": plain,
            "rng": RngState(),
        }

    def _tensor(self, *shape: int) -> torch.Tensor:
        count = int(np.prod(shape))
        base = torch.full((count + 2 * _MARGIN,), 77.0)
        self._bases.append(base)
        return base[_MARGIN : _MARGIN + count].view(shape)

    def check(self) -> None:
        for base in self._bases:
            assert (base[:_MARGIN] == 77.0).all()
            assert (base[-_MARGIN:] == 77.0).all()


def _original() -> Sent:
    guarded = Guarded()
    tied = torch.ones(5)
    guarded.objects["plain"] |= {
        "tied": [tied, tied],
        "sparse": torch.sparse_coo_tensor(
            torch.ones(2, 3).long(), torch.ones(3), (3, 3), check_invariants=True
        ),
        "wide": torch.ones(1).expand(4),
    }
    return sent(guarded.objects)


_ORIGINAL = _original()
_CONTENT = _ORIGINAL.manifest.content
_PLAIN: dict[str, Any] = {
    "skeleton": msgspec.msgpack.decode(_CONTENT.skeleton),
    "values": msgspec.msgpack.decode(_CONTENT.values),
    "tensors": msgspec.msgpack.decode(_CONTENT.tensors),
    "lengths": [chunk.length for chunk in _CONTENT.chunks],
    "origin": msgspec.msgpack.decode(msgspec.msgpack.encode(_ORIGINAL.manifest.origin)),
}

_NUMBERS = st.sampled_from(
    [
        -1,
        0,
        1,
        2,
        3,
        4,
        299,
        301,
        4096,
        CHUNK_BYTES,
        1 << 31,
        1 << 40,
        (1 << 62) - 1,
        1 << 62,
        (1 << 63) - 1,
        (1 << 64) - 1,
    ]
)
_HUGE = ["int", b"\x7f" * 3000]
_WORDS = st.sampled_from(
    [
        "",
        "d",
        "l",
        "t",
        "o",
        "D",
        "x",
        "a",
        "q",
        "coo",
        "csr",
        "qt",
        "model",
        "state",
        "params",
        "float32",
        "int8",
        "complex128",
        "../x",
        "<f4",
        "F",
    ]
)
_JUNK = st.one_of(
    _NUMBERS,
    _WORDS,
    st.none(),
    st.booleans(),
    st.floats(),
    st.binary(max_size=5),
    st.sampled_from(
        [
            [],
            [0],
            {},
            _HUGE,
            msgspec.msgpack.encode(_HUGE),
            ["list", []],
            ["array", "<f4", [1 << 40], "C", b""],
            ["nope"],
            ["l", 1 << 40],
        ]
    ),
)


def _places(item: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested lists and dicts."""
    pairs = (
        list(enumerate(item))
        if isinstance(item, list)
        else list(item.items())
        if isinstance(item, dict)
        else []
    )
    return [(item, key) for key, _ in pairs] + [
        place for _, child in pairs for place in _places(child)
    ]


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A manifest with a few changes, whose digests are right for chunks of zeros."""
    plain = _copy(_PLAIN)
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        part = draw(
            st.sampled_from(
                [
                    "skeleton",
                    "values",
                    "values",
                    "tensors",
                    "tensors",
                    "tensors",
                    "lengths",
                    "origin",
                ]
            )
        )
        places = _places(plain[part])
        assume(places)
        container, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(["replace", "replace", "replace", "drop", "double", "swap"])):
            case "replace":
                container[key] = _copy(draw(_JUNK))
            case "drop":
                del container[key]
            case "double" if isinstance(container, list):
                container.insert(key, _copy(container[key]))
            case _:
                other, there = places[draw(st.integers(0, len(places) - 1))]
                if _is_there(other, there):
                    container[key] = _copy(other[there])
    try:
        lengths = msgspec.convert(plain["lengths"], list[int])
        origin = msgspec.convert(plain["origin"], Origin)
    except msgspec.ValidationError:
        assume(False)
    return _built(plain, lengths, origin)


def _built(plain: Any, lengths: list[int], origin: Origin) -> Manifest:
    listed = tuple(
        Chunk(chunk_digest(bytes(max(0, min(length, CHUNK_BYTES)))), length) for length in lengths
    )
    raw = [
        msgspec.Raw(msgspec.msgpack.encode(plain[part]))
        for part in ("skeleton", "values", "tensors")
    ]
    content = Content(raw[0], raw[1], raw[2], listed)
    try:
        digest = state_digest(content, origin.parent_digests)
    except OverflowError:
        digest = "0" * 64
    return Manifest(VERSION, digest, origin, content)


def _copy(item: Any) -> Any:
    if isinstance(item, list):
        return [_copy(child) for child in item]
    return {key: _copy(child) for key, child in item.items()} if isinstance(item, dict) else item


def _is_there(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def read(manifest: Manifest) -> CheckedManifest:
    """As it comes from a peer."""
    return read_manifest(encode(manifest), source="a peer")


def _receive(sink: ObjectsSink | StateSink) -> None:
    for index in list(sink.missing()):
        buffers = sink.buffers(index)
        assert buffers is not None
        assert sum(map(len, buffers)) == sink.lengths[index]
        for buffer in buffers:
            buffer[:] = bytes(len(buffer))
        assert sink.accept(index)


@settings(max_examples=examples(400))
@given(
    manifest=manifests(),
    atomic=st.booleans(),
    strict=st.booleans(),
    only=st.sampled_from([None, "model", "plain"]),
)
def test_a_changed_manifest_is_refused_or_obeyed(
    manifest: Manifest, atomic: bool, strict: bool, only: str | None
) -> None:
    guarded = Guarded()
    try:
        sink = ObjectsSink(read(manifest), guarded.objects, only=only, strict=strict, atomic=atomic)
        _receive(sink)
        sink.commit()
        sink.close()
    except DatastatesError:
        pass
    finally:
        in_place._marked.clear()
    guarded.check()


@settings(max_examples=examples(100))
@given(manifest=manifests())
def test_a_changed_manifest_is_refused_or_adopted_by_the_memory_tier(manifest: Manifest) -> None:
    arena = Arena(8 * CHUNK_BYTES)
    memory = MemoryTier(arena)
    try:
        sink = StateSink(read(manifest), memory, arena, arena.acquire)
        _receive(sink)
        sink.adopt()
    except DatastatesError:
        assert arena.available == arena.capacity
    memory.close()
    arena.close()


# --- each trap once -------------------------------------------------------------------------------


def changed(change: Callable[[Any], None]) -> Manifest:
    plain = _copy(_PLAIN)
    change(plain)
    return _built(plain, plain["lengths"], msgspec.convert(plain["origin"], Origin))


def _specs(plain: Any) -> dict[str, Any]:
    return {spec[0]: spec for spec in plain["tensors"]}


def over_another(plain: Any) -> None:
    specs = _specs(plain)
    specs["optimizer/state/weight/momentum_buffer"][6][0][2] = specs["model/weight"][6][0][2]


def another_path(plain: Any) -> None:
    specs = _specs(plain)
    first, second = specs["model/weight"], specs["optimizer/state/weight/momentum_buffer"]
    first[0], second[0] = second[0], first[0]


def part_of_it(plain: Any) -> None:
    spec = _specs(plain)["model/weight"]
    (shard,) = spec[6]
    half = [[0, 0], [150, 300], shard[2], shard[3] // 2]
    # the same half again
    spec[6] = [
        half,
        [[0, 0], [150, 300], shard[2] + shard[3] // 2, shard[3] // 2],
    ]


@pytest.mark.parametrize("change", [over_another, another_path, part_of_it])
def test_a_manifest_that_contradicts_itself_is_refused(change: Callable[[Any], None]) -> None:
    with pytest.raises(Corrupt):
        read(changed(change))


def test_a_byte_that_would_become_a_terabyte_is_refused() -> None:
    def widen(plain: Any) -> None:
        spec = _specs(plain)["plain/wide"]
        spec[2] = spec[6][0][1] = [1 << 40]

    with pytest.raises(PeerFault, match="trap"):
        read(changed(widen))


# --- much work for few bytes ----------------------------------------------------------------------


def small(skeleton: Any, values: Any) -> Manifest:
    """A manifest without tensors; ``skeleton`` stands under a name."""
    plain = _copy(_PLAIN) | {
        "skeleton": [["d", ["x"]], *skeleton],
        "values": values,
        "tensors": [],
        "lengths": [],
    }
    return _built(plain, [], msgspec.convert(plain["origin"], Origin))


def _key(packed: Any) -> bytes:
    return msgspec.msgpack.encode(packed)


def _big(number: int) -> Any:
    return ["int", number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)]


def _nested(depth: int) -> Any:
    return ["list", [_nested(depth - 1)]] if depth else None


_COLLIDING = [_big(((1 << 61) - 1) * number) for number in range(8000)]
_EXPENSIVE: dict[str, tuple[Any, Any, type[DatastatesError] | None]] = {
    "NaN keys": ([["d", [_key(float("nan"))] * 9000], *[1] * 9000], [None] * 9000, None),
    "colliding keys": ([["d", list(map(_key, _COLLIDING))], *[1] * 8000], [None] * 8000, Corrupt),
    "colliding items": ([1], [["set", _COLLIDING]], Corrupt),
    "colliding pairs": (
        [1],
        [["dict", [["tuple", [each]] for each in _COLLIDING], [None] * 8000]],
        Corrupt,
    ),
    "long key": ([["d", ["k" * 50_000]], ["l", 40_000], *[1] * 40_000], [None] * 40_000, PeerFault),
    "long key of tensors": ([["d", ["k" * 50_000]], ["l", 40_000], *[0] * 40_000], [], PeerFault),
    "long key of a value": (
        [1],
        [["dict", ["k" * 50_000], [["list", [None] * 40_000]]]],
        PeerFault,
    ),
    "deep": ([*[["l", 1]] * 20_000, 1], [None], Corrupt),
    "deep value": ([1], [_nested(200)], Corrupt),
}


@pytest.mark.parametrize("kind", _EXPENSIVE)
def test_a_small_manifest_makes_little_work(kind: str) -> None:
    skeleton, values, refused = _EXPENSIVE[kind]
    manifest = small(skeleton, values)
    began = time.process_time()
    tracemalloc.start()
    try:
        parts = read(manifest)
        unflatten(parts.skeleton, parts.values, [])
    except DatastatesError as error:
        assert refused is not None
        # what came before it may take as long as it likes, and not more
        assert isinstance(error, refused)  # noqa: PT017
    else:
        assert refused is None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(encode(manifest)) < 1 << 18
    assert time.process_time() - began < 3  # tracing alone takes most of it
    assert peak < 64 << 20


def test_long_keys_are_not_kept() -> None:
    before = _escape_kept.cache_info().currsize
    for number in range(5):
        read(small([["d", ["k" * 50_000 + str(number)]], 1], [None]))
    assert _escape_kept.cache_info().currsize <= before + 1


def test_a_part_of_a_state_of_several_ranks_is_refused() -> None:
    def spread(plain: Any) -> None:
        plain["origin"][-1] = 2

    with pytest.raises(PeerFault, match="2 ranks"):
        read(changed(spread))


def test_a_wrong_digest_and_an_unknown_version_are_refused() -> None:
    with pytest.raises(Corrupt, match="but claims 0000"):
        read(msgspec.structs.replace(_ORIGINAL.manifest, digest="0" * 64))
    later = msgspec.msgpack.encode(msgspec.structs.replace(_ORIGINAL.manifest, version=9))
    with pytest.raises(Unavailable, match="version 9"):
        read_manifest(wrap(9, later), source="a peer")
    with pytest.raises(Corrupt, match="version 9 inside and 2 outside"):
        read_manifest(wrap(VERSION, later), source="a peer")


def test_a_dtype_that_is_not_known_here_is_unavailable() -> None:
    def rename(plain: Any) -> None:
        _specs(plain)["model/weight"][1] = "float3"

    with pytest.raises(Unavailable, match="float3"):
        read(changed(rename))


def test_the_manifest_as_it_was_sent_is_fine() -> None:
    assert len(read(_ORIGINAL.manifest).specs) == len(_PLAIN["tensors"])
