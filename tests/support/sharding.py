"""States whose tensors are cut into shards, over one part or several: what ranks will capture,
made without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import strategies as st

from datastates.lineage import Database, NewState, State, Status
from datastates.lineage.states import StateFacts
from datastates.lineage.write.record import record
from datastates.state.digest import chunk_digest, digest_of, join
from datastates.state.encoding import encode_values
from datastates.state.geometry import (
    compact,
    cut,
    dense_view,
    dtype_of,
    memory_key,
    spec_of,
    stored_bytes,
)
from datastates.state.manifest import (
    CHUNK_BYTES,
    VERSION,
    Chunk,
    Content,
    Manifest,
    Origin,
    Shard,
    TensorSpec,
    root_digest,
)
from datastates.state.tree import flatten
from datastates.storage.local import LocalTier
from datastates.storage.tier import Payload, Reader

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""

Shares = Mapping[str, Sequence[Sequence[Box]]]
"""For a tensor, by its path: the boxes of it that each part holds, by rank."""


def rows(shape: Sequence[int], *sizes: int) -> list[Box]:
    """The tensor cut along its first dimension."""
    return list(_along(0, shape, sizes))


def columns(shape: Sequence[int], *sizes: int) -> list[Box]:
    """The tensor cut along its last dimension."""
    return list(_along(len(shape) - 1, shape, sizes))


def sharded(
    uid: str, tree: object, shares: Shares, count: int = 1, **origin: object
) -> list[Payload]:
    """The parts of a state, by rank. What ``shares`` does not name lies whole in the first."""
    flat = flatten(tree)
    owners: dict[object, int] = {}
    specs, stored = [], []
    for index, leaf in enumerate(flat.tensors):
        dense = leaf.tensor if dense_view(leaf.tensor) is not None else compact(leaf.tensor)
        data = dense_view(dense)
        assert data is not None
        key = memory_key(leaf.tensor)
        alias = None if key is None else owners.setdefault(key, index)
        specs.append(spec_of(leaf.path, dense, alias=None if alias == index else alias))
        stored.append(data)
    tree_parts = msgspec.Raw(flat.skeleton.encoded), msgspec.Raw(encode_values(flat.values))
    values: dict[str, Any] = {
        "parents": (),
        "parent_digests": (),
        "run": None,
        "branch": None,
        "step": 0,
        "micro_step": 0,
        "created_at_us": 0,
    }
    values |= {"message": None, "metrics": {}, "attributes": {}} | origin
    parts = []
    for rank in range(count):
        placed, chunks = _lay_out(specs, stored, shares, rank)
        digests = tuple(Chunk(chunk_digest(chunk), len(chunk)) for chunk in chunks)
        content = Content(*tree_parts, msgspec.Raw(msgspec.msgpack.encode(placed)), digests)
        place = Origin(uid, **values, rank=rank, world_size=count)
        manifest = Manifest(VERSION, digest_of(content, place), place, content)
        parts.append(Payload(manifest, [memoryview(chunk) for chunk in chunks]))
    return parts


def shares_of(tree: object, count: int = 1) -> dict[str, list[list[Box]]]:
    """Every tensor cut, unevenly: matrices in 2 along their columns, all else in 3 along the
    rows; dealt to the parts in turns."""
    shares: dict[str, list[list[Box]]] = {}
    dealt = 0
    for leaf in flatten(tree).tensors:
        shape = tuple(leaf.tensor.shape)
        if not shape or 0 in leaf.tensor.stride():
            continue
        size = shape[-1] if len(shape) == 2 else shape[0]
        pieces = (
            columns(shape, size // 3, size - size // 3)
            if len(shape) == 2
            else rows(shape, size // 2, 0, size - size // 2)
        )
        share = shares[leaf.path] = [list[Box]() for _ in range(count)]
        for piece in pieces:
            share[dealt % count].append(piece)
            dealt += 1
    return shares


def deposit(folder: Path, parts: Sequence[Payload], *, branch: str) -> State:
    """A repository that nobody has open, or that is made so, gets a durable state: its bytes,
    and its place in the lineage."""
    folder.mkdir(exist_ok=True)
    manifests = [part.manifest for part in parts]
    origin = manifests[0].origin
    for rank, part in enumerate(parts):
        tier = LocalTier(folder / "packs", direct=False, rank=rank)
        tier.put(part)
        tier.close()
    database = Database(f"sqlite:///{folder / 'lineage.db'}")
    facts = StateFacts(
        uid=origin.uid,
        parent=origin.parents[0] if origin.parents else None,
        branch=branch,
        run=None,
        step=origin.step,
        world_size=len(parts),
    )
    new = NewState(
        facts=facts,
        digest=root_digest([manifest.digest for manifest in manifests], origin.parent_digests),
        status=Status.DURABLE,
        bytes_total=sum(view.nbytes for part in parts for view in part.chunks),
        tier="local",
        node="packs",
    )
    with closing(database), database.write() as session:
        return record(session, new)


class Opened(Reader):
    """The parts of a state, or one of them, opened where they are; ``read`` counts how often
    each chunk was asked for."""

    def __init__(self, parts: Sequence[Payload]) -> None:
        manifests = [part.manifest for part in parts]
        self.manifest = manifests[0] if len(parts) == 1 else join(manifests)
        self._chunks = [view for part in parts for view in part.chunks]
        self.read: Counter[int] = Counter()

    def chunk(self, index: int) -> memoryview:
        """One chunk."""
        self.read[index] += 1
        return self._chunks[index].toreadonly()

    def span(self, start: int, length: int) -> memoryview | None:
        """Nothing is lent."""
        return None

    def close(self) -> None:
        """Nothing is held."""


def opened(tree: object, shares: Shares | None = None, count: int = 1) -> Opened:
    """A state of this tree, opened."""
    return Opened(sharded("0" * 24, tree, shares or {}, count))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], most: int = 6) -> list[Box]:
    """The tensor cut in two, one of the pieces cut in two again, and so on; a piece may be
    empty."""
    pieces: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most - 1)) if shape else 0):
        offset, size = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        for begin, length in ((0, at), (at, size[dim] - at)):
            moved = (*offset[:dim], offset[dim] + begin, *offset[dim + 1 :])
            pieces.append((moved, (*size[:dim], length, *size[dim + 1 :])))
    return draw(st.permutations(pieces))


def _along(dim: int, shape: Sequence[int], sizes: Sequence[int]) -> Iterator[Box]:
    assert sum(sizes) == shape[dim]
    at = 0
    for size in sizes:
        yield (
            tuple(at if each == dim else 0 for each in range(len(shape))),
            (
                *shape[:dim],
                size,
                *shape[dim + 1 :],
            ),
        )
        at += size


def _lay_out(
    specs: Sequence[TensorSpec], stored: Sequence[torch.Tensor], shares: Shares, rank: int
) -> tuple[list[TensorSpec], list[bytes]]:
    """The specs of a part, and its stream in chunks: shards by falling item size, as
    ``content/manifest.py`` says."""
    placed = list(specs)
    stream = bytearray()
    for index in sorted(
        range(len(specs)), key=lambda index: -dtype_of(specs[index].dtype).itemsize
    ):
        spec = specs[index]
        if spec.alias is not None:
            continue
        share = shares.get(spec.path, [[((0,) * len(spec.shape), spec.shape)]])
        mine = tuple(_shard(spec, box) for box in (share[rank] if rank < len(share) else ()))
        there = []
        pieces = {
            id(shard): data
            for shard, data in cut(msgspec.structs.replace(spec, shards=mine), stored[index])
        }
        for shard in mine:
            there.append(msgspec.structs.replace(shard, start=len(stream)))
            if shard.length:
                stream += pieces[id(shard)].numpy().tobytes()
        placed[index] = msgspec.structs.replace(spec, shards=tuple(there))
    return placed, [
        bytes(stream[start : start + CHUNK_BYTES]) for start in range(0, len(stream), CHUNK_BYTES)
    ]


def _shard(spec: TensorSpec, box: Box) -> Shard:
    offset, shape = box
    return Shard(offset, shape, 0, stored_bytes(dtype_of(spec.dtype), shape, spec.strides))
