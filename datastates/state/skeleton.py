"""The shape of a state, which stays the same from capture to capture: its containers, their keys,
and the places of leaves.

A skeleton is a flat list of nodes in preorder. ``TENSOR`` and ``VALUE`` are leaves: the next
tensor, the next value. A container is a tuple, followed by the nodes of its children:

    ("d", keys)                    dict             ("l", n)           list
    ("D", factory, keys)           defaultdict      ("t", n)           tuple
    ("o", has_metadata, keys)      OrderedDict      ("q", maxlen, n)   deque
    ("x", name)                    an object of a registered encoder: its plain tree
    ("a", dtype, shape, order)     a large NumPy array: its bytes as a tensor
    ("coo", shape, is_coalesced)   a sparse tensor: indices, values
    ("csr" | "csc" | "bsr" | "bsc", shape)
                                   compressed indices, plain indices, values
    ("qt", dtype)                  quantized per tensor: integers, scale and zero point as values
    ("qc", dtype, axis)            quantized per channel: integers, scales, zero points
    ("s", class, names, shape, strides, metadata)
                                   a tensor subclass: its inner tensors

A key is a str, or the bytes of any other packed key. An OrderedDict's metadata is a value before
its children.
"""

from __future__ import annotations

import reprlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from datastates.errors import Corrupt, InvalidInput, Unsupported

from .digest import tensors_of
from .encoding import MAX_DEPTH, Unencodable, decode_values, encode_values, pack, unpack
from .geometry import dtype_of
from .manifest import ALIGNED_BYTES, CHUNK_BYTES, LARGE_BYTES, Content, TensorSpec

TENSOR = 0
VALUE = 1

Node = Any
"""``TENSOR``, ``VALUE`` or a tuple that begins with a tag."""

_KEPT_CHARACTERS = 256
_KEPT_BYTES = 1 << 20
_CONTAINERS = frozenset("dDoltq")


class Skeleton:
    """An immutable skeleton. It compares by content. ``paths`` are its tensors' paths, in order."""

    __slots__ = ("_encoded", "_paths", "nodes")

    def __init__(self, nodes: list[Node], encoded: bytes | None = None) -> None:
        self.nodes = nodes
        self._encoded = encoded
        self._paths: tuple[str, ...] | None = None

    @property
    def encoded(self) -> bytes:
        """The skeleton as MessagePack, made once.

        :raises Unsupported: a key is not valid Unicode.
        """
        if self._encoded is None:
            try:
                self._encoded = msgspec.msgpack.encode(self.nodes)
            except UnicodeEncodeError as exc:
                raise Unsupported(f"the key {exc.object!r} is no valid Unicode: rename it") from exc
        return self._encoded

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each tensor; unique."""
        if self._paths is None:
            self._paths = tuple(
                path
                for path, node in zip(paths(self.nodes), self.nodes, strict=False)
                if node == TENSOR
            )
        return self._paths

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Skeleton) and self.encoded == other.encoded)

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return f"Skeleton({len(self.nodes)} nodes)"


def decode_skeleton(
    data: bytes | memoryview | msgspec.Raw, *, source: str = "the skeleton of a state"
) -> Skeleton:
    """The skeleton from its ``encoded`` form.

    :raises Corrupt: it is something else, or its nodes do not make one tree. The text names
        ``source``.
    """
    data = bytes(data)
    decode = _decode_kept if len(data) <= _KEPT_BYTES else _decode_kept.__wrapped__
    return decode(data, source)


@lru_cache(maxsize=4)
def _decode_kept(data: bytes, source: str) -> Skeleton:
    try:
        raw = msgspec.msgpack.decode(data, type=list[int | list[Any]])
        nodes = [_frozen(node) if type(node) is list else node for node in raw]
        missing = 1
        for node in nodes:
            if missing == 0:
                raise Corrupt(f"{source} continues after its end")
            missing += arity(node) - 1
        if missing:
            raise Corrupt(f"{source} ends before {missing} of its nodes")
    except (
        msgspec.DecodeError,
        RecursionError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
    ) as exc:
        raise Corrupt(f"{source} does not decode: {exc}") from exc
    return Skeleton(nodes)


def paths(nodes: Sequence[Node]) -> Iterator[str]:
    """The path of each node in turn; of an unfinished list also the path of the node that would
    come next."""
    pending: list[tuple[str, str | None]] = [("", None)]
    for node in nodes:
        path = _join(*pending.pop())
        yield path
        if type(node) is tuple:
            pending.extend((path, part) for part in reversed(_PARTS[node[0]](node)))
    if pending:
        yield _join(*pending.pop())


def path_lengths(nodes: Sequence[Node]) -> Iterator[int]:
    """The length of each node's path, without making it. A long key is part of the path of
    everything below it.

    :raises Corrupt: a node is deeper than any that is written.
    """
    pending = [(0, 0)]
    for node in nodes:
        length, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise Corrupt(f"the state is nested more than {MAX_DEPTH} deep")
        yield length
        if type(node) is tuple:
            pending.extend(
                (length if part is None else length + 1 + len(part), depth + 1)
                for part in reversed(_PARTS[node[0]](node))
            )


def pack_key(key: object) -> str | bytes:
    """A dict's key in the form that a skeleton holds.

    :raises Unencodable: there is no safe encoding.
    """
    if type(key) is str:
        return key
    if type(key) is int:
        return _pack_int(key)
    return _pack_other(key)


def key_of(packed: str | bytes) -> Any:
    """The key that ``pack_key`` packed.

    :raises Corrupt: it is not one.
    """
    if isinstance(packed, str):
        return packed
    try:
        return unpack(msgspec.msgpack.decode(packed))
    except (msgspec.DecodeError, RecursionError, ValueError) as exc:
        raise Corrupt(f"the key {packed[:40]!r} of a state does not decode: {exc}") from exc


def _pack_other(key: object) -> bytes:
    try:
        return msgspec.msgpack.encode(pack(key))
    except Unencodable as exc:
        raise Unencodable(f"has a key that {exc}") from exc


# only of ints: 1 and 1.0 are one key of the cache
_pack_int = lru_cache(maxsize=1 << 14)(_pack_other)


# --- Paths ---


def _escape(text: str) -> str:
    return _escape_kept(text) if len(text) <= _KEPT_CHARACTERS else _escape_kept.__wrapped__(text)


@lru_cache(maxsize=1 << 16)
def _escape_kept(text: str) -> str:
    return text.replace("%", "%25").replace("/", "%2F") if text else "%"


def _join(path: str, part: str | None) -> str:
    if part is None:
        return path
    return f"{path}/{part}" if path else part


def _key_parts(keys: Sequence[str | bytes]) -> list[str]:
    """Keys as parts of paths. An int 1 and a str "1" get different parts.

    ``%`` in a key is escaped, so that no parts collide.
    """
    if bytes not in set(map(type, keys)):
        return [_escape(key) for key in keys if isinstance(key, str)]
    used = {_escape(key) for key in keys if isinstance(key, str)}
    parts = []
    numbers: dict[str, int] = {}
    for packed in keys:
        if isinstance(packed, str):
            parts.append(_escape(packed))
            continue
        key = key_of(packed)
        text = part = _escape(repr(key))
        if part in used:
            text = part = f"{text}%{type(key).__name__}"
        number = numbers.get(text, 1)
        while part in used:  # by several NaN, for example
            number += 1
            part = f"{text}%{number}"
        numbers[text] = number
        used.add(part)
        parts.append(part)
    return parts


def _count_parts(count: int) -> list[str]:
    return [str(index) for index in range(count)]


_COMPRESSED = {
    "csr": ("crow_indices", "col_indices", "values"),
    "csc": ("ccol_indices", "row_indices", "values"),
    "bsr": ("crow_indices", "col_indices", "values"),
    "bsc": ("ccol_indices", "row_indices", "values"),
}

_PARTS: dict[str, Callable[[tuple[Any, ...]], Sequence[str | None]]] = {
    "d": lambda node: _key_parts(node[1]),
    "D": lambda node: _key_parts(node[2]),
    "o": lambda node: ["%metadata"] * node[1] + _key_parts(node[2]),
    "l": lambda node: _count_parts(node[1]),
    "t": lambda node: _count_parts(node[1]),
    "q": lambda node: _count_parts(node[2]),
    "x": lambda _: (None,),
    "a": lambda _: (None,),
    "coo": lambda _: ("indices", "values"),
    "qt": lambda _: ("integers", "scale", "zero_point"),
    "qc": lambda _: ("integers", "scales", "zero_points"),
    "s": lambda node: _key_parts(node[2]),
    **{tag: lambda _, names=names: names for tag, names in _COMPRESSED.items()},  # type: ignore[misc]
}


# --- Checks of a skeleton that was read ---


def _frozen(item: Any) -> Any:
    return tuple(map(_frozen, item)) if type(item) is list else item


def _is_keys(keys: Any) -> bool:
    if type(keys) is not tuple or not all(type(key) in (str, bytes) for key in keys):
        return False
    # Others may repeat: a dict can hold several NaN.
    texts = [key for key in keys if type(key) is str]
    return len(set(texts)) == len(texts)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_count, value))


def _is_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


_is_text, _is_flag = _is_of(str), _is_of(bool)

_FIELDS: dict[str, tuple[Callable[[Any], bool], ...]] = {
    "d": (_is_keys,),
    "D": (_is_of(str, type(None)), _is_keys),
    "o": (_is_flag, _is_keys),
    "l": (_is_count,),
    "t": (_is_count,),
    "q": (lambda maxlen: maxlen is None or _is_count(maxlen), _is_count),
    "x": (_is_text,),
    "a": (_is_of(str, tuple), _is_shape, _is_text),
    "coo": (_is_shape, _is_flag),
    "qt": (_is_text,),
    "qc": (_is_text, _is_count),
    "s": (_is_text, _is_keys, _is_shape, _is_shape, _is_of(bytes)),
    **dict.fromkeys(_COMPRESSED, (_is_shape,)),
}

_ARITY: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "d": lambda node: len(node[1]),
    "D": lambda node: len(node[2]),
    "o": lambda node: node[1] + len(node[2]),
    "l": lambda node: node[1],
    "t": lambda node: node[1],
    "q": lambda node: node[2],
    "x": lambda _: 1,
    "a": lambda _: 1,
    "coo": lambda _: 2,
    "qt": lambda _: 3,
    "qc": lambda _: 3,
    "s": lambda node: len(node[2]),
    **dict.fromkeys(_COMPRESSED, lambda _: 3),
}


def arity(node: Node) -> int:
    """The number of children of a node that was read; TypeError if it is not a node."""
    if node in (TENSOR, VALUE) and type(node) is int:
        return 0
    checks = _FIELDS[node[0]]
    if len(node) != len(checks) + 1 or not all(
        check(field) for check, field in zip(checks, node[1:], strict=True)
    ):
        raise TypeError(f"{reprlib.repr(node)} is no node")
    return _ARITY[node[0]](node)


# --- Carving: a state's content without some objects, and its tensors moved together ---


@dataclass(frozen=True, slots=True)
class Carved:
    """A content without its chunks. ``sources[i]`` is the original index of tensor ``i``, or of the
    tensor to which it is tied.

    ``holders[i]`` is the skeleton's tag of the sparse or quantized tensor, the array or the encoded
    object of which tensor ``i`` is a part. None if it is a plain tensor.
    """

    skeleton: msgspec.Raw
    values: msgspec.Raw
    specs: tuple[TensorSpec, ...]
    sources: tuple[int, ...]
    holders: tuple[str | None, ...]
    chunk_lengths: tuple[int, ...]

    @property
    def tensors(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode(self.specs))


def carve(content: Content, wants: Callable[[str], bool] | None) -> Carved:
    """The content with the objects for which ``wants`` accepts some path. None: all of them, in
    their places.

    Tensors that were adjacent stay adjacent, in the same order, so that chunks without removed
    tensors keep their digests.
    """
    specs = tensors_of(content)
    skeleton = decode_skeleton(content.skeleton)
    lengths = tuple(chunk.length for chunk in content.chunks)
    if wants is None:
        owners = tuple(
            index if spec.alias is None else spec.alias for index, spec in enumerate(specs)
        )
        return Carved(
            content.skeleton, content.values, specs, owners, _holders(skeleton.nodes), lengths
        )
    nodes, is_kept = _keep(skeleton.nodes, wants)
    values = [
        value
        for value, kept in zip(decode_values(content.values), is_kept[VALUE], strict=True)
        if kept
    ]
    retied, sources = _tie_again(
        specs, [index for index, kept in enumerate(is_kept[TENSOR]) if kept]
    )
    placed, lengths = _lay_out(retied, lengths)
    return Carved(
        skeleton=msgspec.Raw(Skeleton(nodes).encoded),
        values=msgspec.Raw(encode_values(values)),
        specs=tuple(placed),
        sources=tuple(sources),
        holders=_holders(nodes),
        chunk_lengths=lengths,
    )


def _keep(
    nodes: Sequence[Node], wants: Callable[[str], bool]
) -> tuple[list[Node], dict[int, list[bool]]]:
    """The nodes that stay, and for the values and the tensors of the original which of them
    stay."""
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


def _tie_again(
    specs: Sequence[TensorSpec], kept: Sequence[int]
) -> tuple[list[TensorSpec], list[int]]:
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


def _lay_out(
    specs: list[TensorSpec], lengths: Sequence[int]
) -> tuple[list[TensorSpec], tuple[int, ...]]:
    """Move every shard up as far as its group allows; a group ends with a chunk that is not full.
    Large shards that were aligned stay aligned.
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
        if (
            its_group == group
            and length >= LARGE_BYTES
            and not shards[at][number].start % ALIGNED_BYTES
        ):
            position = _extended(ends, position, -(-position // ALIGNED_BYTES) * ALIGNED_BYTES)
        if its_group != group or position % dtype_of(specs[at].dtype).itemsize:
            group, position = its_group, len(ends) * CHUNK_BYTES
        shards[at][number] = msgspec.structs.replace(shards[at][number], start=position)
        position = _extended(ends, position, position + length) if length else position
    return [
        msgspec.structs.replace(spec, shards=tuple(its))
        for spec, its in zip(specs, shards, strict=True)
    ], tuple(ends)


def _extended(ends: list[int], start: int, end: int) -> int:
    """Extend the chunks from ``start`` to ``end``; returns ``end``."""
    for chunk in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
        ends[chunk:] = [min(CHUNK_BYTES, end - chunk * CHUNK_BYTES)]
    return end
