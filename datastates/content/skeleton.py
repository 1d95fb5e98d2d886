"""The shape of a state, which stays the same from capture to capture: its containers, their keys, and the places of leaves.

A skeleton is a flat list of nodes in preorder. ``TENSOR`` and ``VALUE`` are leaves: the next tensor, the next value. A
container is a tuple, followed by the nodes of its children:

    ("d", keys)                    dict             ("l", n)           list
    ("D", factory, keys)           defaultdict      ("t", n)           tuple
    ("o", has_metadata, keys)      OrderedDict      ("q", maxlen, n)   deque
    ("x", name)                    an object of a registered encoder: its plain tree
    ("a", dtype, shape, order)     a large NumPy array: its bytes as a tensor
    ("coo", shape, is_coalesced)   a sparse tensor: indices, values
    ("csr" | "csc" | "bsr" | "bsc", shape)                    compressed indices, plain indices, values
    ("qt", dtype)                  quantized per tensor: integers, scale and zero point as values
    ("qc", dtype, axis)            quantized per channel: integers, scales, zero points
    ("s", class, names, shape, strides, metadata)             a tensor subclass: its inner tensors

A key is a str, or the bytes of any other packed key. An OrderedDict's metadata is a value before its children.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from datastates.errors import Corrupt, Unsupported

from .arrays import MAX_DEPTH, Unencodable
from .encoding import pack, unpack

__all__ = [
    "TENSOR",
    "VALUE",
    "Node",
    "Skeleton",
    "arity",
    "decode_skeleton",
    "encode_skeleton",
    "key_of",
    "pack_key",
    "path_lengths",
    "paths",
]

TENSOR = 0
VALUE = 1

Node = Any
"""``TENSOR``, ``VALUE`` or a tuple that begins with a tag."""


class Skeleton:
    """An immutable skeleton; compares by content. ``paths`` are those of its tensors, in order."""

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
            self._paths = tuple(path for path, node in zip(paths(self.nodes), self.nodes, strict=False) if node == TENSOR)
        return self._paths

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Skeleton) and self.encoded == other.encoded)

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return f"Skeleton({len(self.nodes)} nodes)"


def encode_skeleton(skeleton: Skeleton) -> bytes:
    """The skeleton as MessagePack; made once per skeleton."""
    return skeleton.encoded


def decode_skeleton(data: bytes | memoryview | msgspec.Raw, *, source: str = "the skeleton of a state") -> Skeleton:
    """Decode what ``encode_skeleton`` wrote.

    :raises Corrupt: it is something else, or its nodes do not make one tree; names ``source``.
    """
    try:
        raw = msgspec.msgpack.decode(data, type=list[int | list[Any]])
        nodes = [_frozen(node) if type(node) is list else node for node in raw]
        missing = 1
        for node in nodes:
            if missing == 0:
                raise Corrupt(f"{source} goes on after its end")
            missing += arity(node) - 1
        if missing:
            raise Corrupt(f"{source} ends before {missing} of its nodes")
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError, IndexError, KeyError) as exc:
        raise Corrupt(f"{source} does not decode: {exc}") from exc
    return Skeleton(nodes)


def paths(nodes: Sequence[Node]) -> Iterator[str]:
    """The path of each node in turn; of an unfinished list also the path of the node that would come next."""
    pending: list[tuple[str, str | None]] = [("", None)]
    for node in nodes:
        path = _join(*pending.pop())
        yield path
        if type(node) is tuple:
            pending.extend((path, part) for part in reversed(_parts(node)))
    if pending:
        yield _join(*pending.pop())


def path_lengths(nodes: Sequence[Node]) -> Iterator[int]:
    """The length of each node's path, without making it: a long key is part of the path of everything below it.

    :raises Corrupt: a node lies deeper than any that is written.
    """
    pending = [(0, 0)]
    for node in nodes:
        length, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise Corrupt(f"the state is nested more than {MAX_DEPTH} deep")
        yield length
        if type(node) is tuple:
            pending.extend((length if part is None else length + 1 + len(part), depth + 1) for part in reversed(_parts(node)))


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


@lru_cache(maxsize=1 << 14)
def _pack_int(key: int) -> bytes:
    return _pack_other(key)


def _pack_other(key: object) -> bytes:
    try:
        return msgspec.msgpack.encode(pack(key))
    except Unencodable as exc:
        raise Unencodable(f"has a key that {exc}") from exc


# Paths


_KEPT_CHARACTERS = 256


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
    """Keys as parts of paths, told apart if an int 1 meets a str "1". ``%`` in a key is escaped, so that no parts collide."""
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
    **{tag: (lambda _, names=names: names) for tag, names in _COMPRESSED.items()},  # type: ignore[misc]
}


def _parts(node: tuple[Any, ...]) -> Sequence[str | None]:
    return _PARTS[node[0]](node)


# Checking what was read


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


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_bytes(value: Any) -> bool:
    return type(value) is bytes


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_limit(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_descr(value: Any) -> bool:
    return type(value) in (str, tuple)


def _is_factory(value: Any) -> bool:
    return value is None or type(value) is str


_FIELDS: dict[str, tuple[Callable[[Any], bool], ...]] = {
    "d": (_is_keys,),
    "D": (_is_factory, _is_keys),
    "o": (_is_flag, _is_keys),
    "l": (_is_count,),
    "t": (_is_count,),
    "q": (_is_limit, _is_count),
    "x": (_is_text,),
    "a": (_is_descr, _is_shape, _is_text),
    "coo": (_is_shape, _is_flag),
    "qt": (_is_text,),
    "qc": (_is_text, _is_count),
    "s": (_is_text, _is_keys, _is_shape, _is_shape, _is_bytes),
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
    if len(node) != len(checks) + 1 or not all(check(field) for check, field in zip(checks, node[1:], strict=True)):
        raise TypeError(f"{reprlib.repr(node)} is no node")
    return _ARITY[node[0]](node)
