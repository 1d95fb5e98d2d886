"""A state's content without some of its objects: the same tree without them, its tensors moved together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from datastates.errors import InvalidInput

from .check import tensors_of
from .encoding import decode_values, encode_values
from .geometry import dtype_of
from .manifest import ALIGNED_BYTES, CHUNK_BYTES, LARGE_BYTES, Content, TensorSpec
from .skeleton import TENSOR, VALUE, Node, Skeleton, decode_skeleton, paths

__all__ = ["Carved", "carve"]

_CONTAINERS = frozenset("dDoltq")


@dataclass(frozen=True, slots=True)
class Carved:
    """A content without its chunks. ``sources[i]`` is the original index of tensor ``i``, or of the tensor to which it is tied.

    ``holders[i]`` is the skeleton's tag of the sparse or quantized tensor, the array or the encoded object of which tensor ``i`` is a part;
    None if it is a tensor by itself.
    """

    skeleton: msgspec.Raw
    values: msgspec.Raw
    specs: tuple[TensorSpec, ...]
    sources: tuple[int, ...]
    holders: tuple[str | None, ...]
    chunk_lengths: tuple[int, ...]

    @property
    def tensors(self) -> msgspec.Raw:
        """The specs, encoded."""
        return msgspec.Raw(msgspec.msgpack.encode(self.specs))


def carve(content: Content, wants: Callable[[str], bool] | None) -> Carved:
    """The content with those objects in which ``wants`` asks for some path; None: all of them, in their places.

    Tensors that lay together still do, in the same order, so that chunks without removed tensors keep their digests.
    """
    specs = tensors_of(content)
    skeleton = decode_skeleton(content.skeleton)
    lengths = tuple(chunk.length for chunk in content.chunks)
    if wants is None:
        owners = tuple(index if spec.alias is None else spec.alias for index, spec in enumerate(specs))
        return Carved(content.skeleton, content.values, specs, owners, _holders(skeleton.nodes), lengths)
    nodes, is_kept = _keep(skeleton.nodes, wants)
    values = [value for value, kept in zip(decode_values(content.values), is_kept[VALUE], strict=True) if kept]
    retied, sources = _tie_again(specs, [index for index, kept in enumerate(is_kept[TENSOR]) if kept])
    placed, lengths = _lay_out(retied, lengths)
    return Carved(
        skeleton=msgspec.Raw(Skeleton(nodes).encoded),
        values=msgspec.Raw(encode_values(values)),
        specs=tuple(placed),
        sources=tuple(sources),
        holders=_holders(nodes),
        chunk_lengths=lengths,
    )


def _keep(nodes: Sequence[Node], wants: Callable[[str], bool]) -> tuple[list[Node], dict[int, list[bool]]]:
    """The nodes that stay, and for the values and the tensors of the original which of them stay."""
    root, children = nodes[0], list(zip(paths(nodes), nodes, strict=False))[1:]
    if type(root) is not tuple or root[0] != "d":
        raise InvalidInput("the state is no dict of objects: nothing of it can be left out")
    tops: dict[str, bool] = {}
    for path, _ in children:
        top = path.split("/", 1)[0]
        tops[top] = tops.get(top, False) or wants(path)
    keys = tuple(key for key, kept in zip(root[1], tops.values(), strict=True) if kept)
    is_kept: dict[int, list[bool]] = {VALUE: [], TENSOR: []}
    stay: list[Node] = [("d", keys)]
    for path, node in children:
        kept = tops[path.split("/", 1)[0]]
        if type(node) is not tuple:
            is_kept[node].append(kept)
        if kept:
            stay.append(node)
    return stay, is_kept


def _holders(nodes: Sequence[Node]) -> tuple[str | None, ...]:
    found: list[str | None] = []
    holder: tuple[str, str] | None = None
    for path, node in zip(paths(nodes), nodes, strict=False):
        if holder is not None and path != holder[0] and not path.startswith(f"{holder[0]}/"):
            holder = None
        if holder is None and type(node) is tuple and node[0] not in _CONTAINERS:
            holder = (path, node[0])
        elif node == TENSOR:
            found.append(None if holder is None else holder[1])
    return tuple(found)


def _tie_again(specs: Sequence[TensorSpec], kept: Sequence[int]) -> tuple[list[TensorSpec], list[int]]:
    """The specs that stay; of tied tensors, the first that stays holds the bytes."""
    place: dict[int, int] = {}
    retied: list[TensorSpec] = []
    sources: list[int] = []
    for index in kept:
        spec = specs[index]
        owner = index if spec.alias is None else spec.alias
        if owner in place:
            retied.append(msgspec.structs.replace(spec, alias=place[owner], shards=()))
        else:
            place[owner] = len(retied)
            retied.append(msgspec.structs.replace(spec, alias=None, shards=specs[owner].shards))
        sources.append(owner)
    return retied, sources


def _lay_out(specs: list[TensorSpec], lengths: Sequence[int]) -> tuple[list[TensorSpec], tuple[int, ...]]:
    """Move every shard up as far as its group allows; a group ends with a chunk that is not full. Large shards that were aligned stay
    aligned.
    """
    short = [index for index, length in enumerate(lengths) if length < CHUNK_BYTES]
    stored = [
        (bisect_left(short, shard.start // CHUNK_BYTES), shard.start, at, number)
        for at, spec in enumerate(specs)
        for number, shard in enumerate(spec.shards)
    ]
    shards = [list(spec.shards) for spec in specs]
    ends: list[int] = []
    group, position = -1, 0
    for its_group, _, at, number in sorted(stored):
        length = shards[at][number].length
        if its_group == group and length >= LARGE_BYTES and not shards[at][number].start % ALIGNED_BYTES:
            position = _extended(ends, position, -(-position // ALIGNED_BYTES) * ALIGNED_BYTES)
        if its_group != group or position % dtype_of(specs[at].dtype).itemsize:
            group, position = its_group, len(ends) * CHUNK_BYTES
        shards[at][number] = msgspec.structs.replace(shards[at][number], start=position)
        position = _extended(ends, position, position + length) if length else position
    return [msgspec.structs.replace(spec, shards=tuple(its)) for spec, its in zip(specs, shards, strict=True)], tuple(ends)


def _extended(ends: list[int], start: int, end: int) -> int:
    """Extend the chunks from ``start`` to ``end``; returns ``end``."""
    for chunk in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
        ends[chunk:] = [min(CHUNK_BYTES, end - chunk * CHUNK_BYTES)]
    return end
