"""Values that are not tensors, in a form that MessagePack holds exactly. Loading never imports or
unpickles.

A *packed* value is None, a bool, an int of 64 bits, a float, a str or bytes. Any other value is a
list ``[tag, …]``. Packing copies: a packed value shares no memory with its source. ``unpack``
checks all its input.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch

from datastates import values
from datastates.errors import Conflict, Corrupt, InvalidInput

Descr = Any
"""A NumPy dtype as strings, numbers and tuples."""

MAX_DEPTH = 100
"""Deeper nesting is refused, in writing and in reading: it is a cycle, or an attack."""

_BUFFER_KINDS = frozenset("biufcSUVmM")
Packed = Any
"""What ``pack`` returns; see the module's docstring."""

SCALARS = frozenset({int, float, str, bool, type(None)})
"""Types that pack to themselves, as long as an int fits into 64 bits and a str is valid Unicode."""


class Unencodable(TypeError):
    """A value has no safe encoding; ``tree.flatten`` turns this into ``Unsupported`` with the
    path."""


def describe_dtype(dtype: np.dtype[Any]) -> Descr:
    """The dtype as strings, numbers and tuples.

    :raises Unencodable: it holds Python objects, or is of a kind that NumPy itself does not know.
    """
    descr = _describe(dtype)
    if dtype.hasobject or dtype_from(descr) != dtype:
        raise Unencodable(
            f"has the NumPy dtype {dtype}, which has no safe encoding: convert it to a numeric,"
            " string or time dtype"
        )
    return descr


def _describe(dtype: np.dtype[Any]) -> Descr:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ("sub", _describe(base), shape)
    if dtype.names is not None and dtype.fields is not None:
        fields = tuple(
            (name, _describe(dtype.fields[name][0]), dtype.fields[name][1]) for name in dtype.names
        )
        return ("struct", fields, dtype.itemsize, dtype.isalignedstruct)
    if dtype.kind not in _BUFFER_KINDS:
        raise Unencodable(
            f"has the NumPy dtype {dtype}, which has no safe encoding: convert it to a numeric,"
            " string or time dtype"
        )
    return dtype.str


_SIMPLE = re.compile(r"[<>|=][biufcSUVmM]\d{1,10}(\[\d*[A-Za-z]+\])?")


def dtype_from(descr: Descr, depth: int = 0) -> np.dtype[Any]:
    """The dtype that ``describe_dtype`` described. Lists are read as tuples."""
    if isinstance(descr, str):
        if not _SIMPLE.fullmatch(descr):
            raise Corrupt(f"{descr[:40]!r} is no NumPy dtype that is stored")
        return np.dtype(descr)
    if depth > MAX_DEPTH:
        raise Corrupt("a NumPy dtype is nested too deep")
    try:
        if descr[0] == "sub":
            _, base, shape = descr
            return np.dtype((dtype_from(base, depth + 1), tuple(map(operator.index, shape))))
        if descr[0] == "struct":
            _, fields, itemsize, is_aligned = descr
            names, formats, offsets = zip(*fields, strict=True) if fields else ((), (), ())
            parts = {
                "names": list(names),
                "formats": [dtype_from(part, depth + 1) for part in formats],
                "offsets": list(offsets),
            }
            # a dict built in parts
            dtype: np.dtype[Any] = np.dtype({**parts, "itemsize": itemsize}, align=bool(is_aligned))  # type: ignore[call-overload]
            return dtype
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as exc:
        raise Corrupt(f"a NumPy dtype does not decode: {exc}") from exc
    raise Corrupt(f"{str(descr)[:40]!r} is no NumPy dtype that is stored")


def order_of(array: np.ndarray[Any, Any]) -> Literal["C", "F"]:
    """``F`` for an array that is Fortran-ordered and not C-ordered, else ``C``."""
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def array_of(descr: Descr, shape: Any, order: Any, data: Any) -> np.ndarray[Any, Any]:
    """An array over ``data``, a buffer of exactly its bytes, whose memory it shares."""
    dtype = dtype_from(descr)
    sizes = tuple(map(operator.index, shape))
    count = 1
    for size in sizes:
        count *= size
    if (
        min(sizes, default=0) < 0
        or count * dtype.itemsize != memoryview(data).nbytes
        or order not in ("C", "F")
    ):
        raise Corrupt(
            f"an array of {dtype} {sizes} does not fit its {memoryview(data).nbytes} bytes"
        )
    return np.ndarray(sizes, dtype, buffer=data, order=order)


# --- Packing and unpacking ---


@dataclass(frozen=True, slots=True)
class Encoder:
    """How a type that the user registered becomes a plain tree and back."""

    type: type[Any]
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


def _type(value: object, what: str) -> type[Any]:
    if not isinstance(value, type):
        raise InvalidInput(f"{what} is {values.shown(value)}: give a class")
    return value


_MOST_ALIKE = 1000
"""The most keys that may have the same hash: the work grows with its square."""

_BY_TYPE: dict[type[Any], Encoder] = {}
_BY_NAME: dict[str, Encoder] = {}


@values.checked
def register_encoder(
    type: Annotated[type[Any], _type],
    name: values.Text,
    encode: Callable[[Any], object],
    decode: Callable[[Any], object],
) -> None:
    """Teach states to hold objects of exactly this type.

    A restore puts the decoded object into the list or dict that held the old one. An object to be
    changed in place needs ``state_dict`` and ``load_state_dict`` instead.

        from decimal import Decimal

        datastates.register_encoder(Decimal, "decimal", encode=str, decode=Decimal)

    :param type: the type, without subclasses.
    :param name: the name that is stored and selects the decoder, so it must stay the same.
        Registering the same type and name again replaces the functions.
    :param encode: returns a plain tree for an object. The tree may contain tensors.
    :param decode: returns an equal object for such a tree.
    :raises Conflict: the name belongs to another type, or the type to another name.
    :raises InvalidInput: the type is stored natively.
    """
    if type in _PACKERS or type in (dict, list, tuple, torch.Tensor, torch.nn.Parameter):
        raise InvalidInput(f"{type.__name__} is stored without an encoder: register your own class")
    taken_name, taken_type = _BY_NAME.get(name), _BY_TYPE.get(type)
    if (
        taken_name is not None
        and taken_name.type is not type
        and _full_name(taken_name.type) != _full_name(type)
    ):
        raise Conflict(
            f"the encoder name {name!r} belongs to {_full_name(taken_name.type)}: choose another"
            f" for {_full_name(type)}"
        )
    if taken_type is not None and taken_type.name != name:
        raise Conflict(
            f"{_full_name(type)} is already registered as {taken_type.name!r}: use that name"
        )
    _BY_TYPE[type] = _BY_NAME[name] = Encoder(type, name, encode, decode)


def encoder_of(kind: type[Any]) -> Encoder | None:
    return _BY_TYPE.get(kind)


def encoder_named(name: str) -> Encoder:
    """The encoder registered under this name.

    :raises InvalidInput: this process has no such encoder.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(sorted(_BY_NAME)) or "none"
        raise InvalidInput(
            f"the state holds an object encoded as {name!r}, which is not registered here"
            f" (registered: {known}): call datastates.register_encoder(type, {name!r}, encode,"
            " decode) first"
        ) from None


def encode_values(values: list[Packed]) -> bytes:
    return msgspec.msgpack.encode(values)


def decode_values(
    data: bytes | memoryview | msgspec.Raw, *, source: str = "the values of a state"
) -> list[Packed]:
    """Decode what ``encode_values`` wrote, still packed.

    :raises Corrupt: it is something else. The text names ``source``.
    """
    try:
        return msgspec.msgpack.decode(data, type=list[Any])
    except (msgspec.DecodeError, RecursionError, ValueError) as exc:
        raise Corrupt(f"{source} do not decode: {exc}") from exc


def pack(value: object, depth: int = 0) -> Packed:
    """The value in a form that MessagePack can hold, sharing nothing with the original.

    :raises Unencodable: there is no safe encoding. The text names the type and what to do.
    """
    if depth > MAX_DEPTH:
        raise Unencodable(f"is nested more than {MAX_DEPTH} deep, or contains itself")
    packer = _PACKERS.get(type(value))
    if packer is not None:
        return packer(value, depth + 1)
    if isinstance(value, np.dtype):
        return ["ndtype", describe_dtype(value)]
    if isinstance(value, np.generic):
        return ["nscalar", describe_dtype(value.dtype), value.tobytes()]
    raise Unencodable(refusal(value))


def refusal(value: object) -> str:
    """The reason why ``value`` is refused, and what to do next."""
    name = _full_name(type(value))
    if callable(value) and not isinstance(value, type) and hasattr(value, "__qualname__"):
        return (
            f"is the function {value.__qualname__!r} ({name}), which has no safe encoding: keep it"
            " out of the state, or store its name"
        )
    return (
        f"is of type {name}, which has no safe encoding: give it state_dict and load_state_dict, by"
        " which it is put back in place; or register how another is made with"
        f" datastates.register_encoder({type(value).__name__}, name, encode, decode); or leave"
        " it out"
    )


def unpack(packed: Packed, depth: int = 0) -> Any:
    """The value that ``pack`` packed.

    :raises Corrupt: there is no such encoding.
    """
    if type(packed) is not list:
        return packed
    if depth > MAX_DEPTH:
        raise Corrupt(f"a value is nested more than {MAX_DEPTH} deep")
    try:
        tag, *parts = packed
        return _UNPACKERS[tag](parts, depth + 1)
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        OverflowError,
        AttributeError,
        RuntimeError,
        MemoryError,
    ) as exc:
        raise Corrupt(f"a value does not decode ({type(exc).__name__}: {exc})") from exc


# --- Scalars ---


def _pack_int(value: int, _depth: int) -> Packed:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return ["int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _pack_str(value: str, _depth: int) -> Packed:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["str", value.encode("utf-8", "surrogatepass")]
    return value


def _itself(value: Any, _depth: int) -> Packed:
    return value


# --- Containers ---


def _pack_items(items: Iterable[object], depth: int) -> list[Packed]:
    return [pack(item, depth) for item in items]


def _pack_sequence(tag: str) -> Callable[[Any, int], Packed]:
    def packer(value: Any, depth: int) -> Packed:
        kinds = set(map(type, value))
        # In one go, for a history of floats or for Python's RNG state of 625 ints.
        if kinds <= {float, bool, type(None)} or (
            kinds == {int} and min(value) >= -(1 << 63) and max(value) < 1 << 63
        ):
            return [tag, list(value)]
        return [tag, _pack_items(value, depth)]

    return packer


def _pack_set(tag: str) -> Callable[[Any, int], Packed]:
    def packer(value: set[object], depth: int) -> Packed:
        # Sorted by their encoding: the order of a set differs between processes, but its digest
        # must not.
        return [tag, sorted(_pack_items(value, depth), key=msgspec.msgpack.encode)]

    return packer


def _pack_mapping(tag: str) -> Callable[[Any, int], Packed]:
    def packer(value: dict[object, object], depth: int) -> Packed:
        return [tag, _pack_items(value.keys(), depth), _pack_items(value.values(), depth)]

    return packer


def _pairs(parts: list[Any], depth: int) -> Iterable[tuple[Any, Any]]:
    keys, values = parts
    return zip(check_keys(_unpack_items(keys, depth)), _unpack_items(values, depth), strict=True)


def check_keys(keys: list[Any]) -> list[Any]:
    """The keys of a dict, or the items of a set, that were read.

    :raises Corrupt: too many share a hash, which must be an attack. Adding them to one dict would
        never end.
    """
    if len(keys) > _MOST_ALIKE and max(Counter(map(hash, keys)).values()) > _MOST_ALIKE:
        raise Corrupt(
            f"more than {_MOST_ALIKE} of {len(keys)} keys have one hash: it is refused as a trap"
        )
    return keys


def _unpack_items(items: Any, depth: int) -> list[Any]:
    if type(items) is not list:
        raise TypeError(f"expected a list of values, found {type(items).__name__}")
    return [unpack(item, depth) if type(item) is list else item for item in items]


def _unpack_deque(parts: list[Any], depth: int) -> deque[Any]:
    maxlen, items = parts
    return deque(_unpack_items(items, depth), maxlen)


# --- NumPy ---


def _pack_array(value: np.ndarray[Any, Any], _depth: int) -> Packed:
    order = order_of(value)
    return ["array", describe_dtype(value.dtype), value.shape, order, value.tobytes(order)]


def _unpack_array(parts: list[Any], _depth: int) -> np.ndarray[Any, Any]:
    descr, shape, order, data = parts
    return array_of(descr, shape, order, bytearray(_is(bytes, data)))


def _unpack_scalar(parts: list[Any], _depth: int) -> Any:
    descr, data = parts
    return array_of(descr, (), "C", bytearray(_is(bytes, data)))[()]


# --- Tables ---


def _is(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _full_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _named(kind: type[Any]) -> dict[str, Any]:
    return {
        str(item).removeprefix("torch."): item
        for item in vars(torch).values()
        if isinstance(item, kind)
    }


_TORCH_NAMES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "dtype": (torch.dtype, _named(torch.dtype)),
    "layout": (torch.layout, _named(torch.layout)),
    "memory_format": (torch.memory_format, _named(torch.memory_format)),
    "qscheme": (torch.qscheme, _named(torch.qscheme)),
}


def _unpack_torch(tag: str) -> Callable[[list[Any], int], Any]:
    table = _TORCH_NAMES[tag][1]
    return lambda parts, _depth: table[parts[0]]


def _pack_torch(tag: str) -> Callable[[Any, int], Packed]:
    return lambda value, _depth: [tag, str(value).removeprefix("torch.")]


_PACKERS: dict[type[Any], Callable[[Any, int], Packed]] = {
    type(None): _itself,
    bool: _itself,
    float: _itself,
    bytes: _itself,
    int: _pack_int,
    str: _pack_str,
    complex: lambda value, _: ["complex", value.real, value.imag],
    bytearray: lambda value, _: ["bytearray", bytes(value)],
    type(Ellipsis): lambda _value, _: ["ellipsis"],
    slice: lambda value, depth: [
        "slice",
        *_pack_items((value.start, value.stop, value.step), depth),
    ],
    range: lambda value, depth: [
        "range",
        *_pack_items((value.start, value.stop, value.step), depth),
    ],
    list: _pack_sequence("list"),
    tuple: _pack_sequence("tuple"),
    deque: lambda value, depth: ["deque", value.maxlen, _pack_items(value, depth)],
    set: _pack_set("set"),
    frozenset: _pack_set("frozenset"),
    dict: _pack_mapping("dict"),
    OrderedDict: _pack_mapping("odict"),
    Counter: _pack_mapping("counter"),
    torch.Size: lambda value, _: ["size", list(value)],
    torch.device: lambda value, _: ["device", str(value)],
    np.ndarray: _pack_array,
    # str(), bytes() and the buffer do not work here: NumPy strips trailing zeros.
    np.str_: lambda value, _: ["nstr", value.encode("utf-8", "surrogatepass")],
    np.bytes_: lambda value, _: ["nbytes", value[:]],
    **{kind: _pack_torch(tag) for tag, (kind, _) in _TORCH_NAMES.items()},
}

_UNPACKERS: dict[str, Callable[[list[Any], int], Any]] = {
    "int": lambda parts, _: int.from_bytes(_is(bytes, parts[0]), "little", signed=True),
    "str": lambda parts, _: _is(bytes, parts[0]).decode("utf-8", "surrogatepass"),
    "complex": lambda parts, _: complex(_is(float, parts[0]), _is(float, parts[1])),
    "bytearray": lambda parts, _: bytearray(_is(bytes, parts[0])),
    "ellipsis": lambda _parts, _: Ellipsis,
    "slice": lambda parts, depth: slice(*_unpack_items(parts, depth)),
    "range": lambda parts, depth: range(*_unpack_items(parts, depth)),
    "list": lambda parts, depth: _unpack_items(parts[0], depth),
    "tuple": lambda parts, depth: tuple(_unpack_items(parts[0], depth)),
    "deque": _unpack_deque,
    "set": lambda parts, depth: set(check_keys(_unpack_items(parts[0], depth))),
    "frozenset": lambda parts, depth: frozenset(check_keys(_unpack_items(parts[0], depth))),
    "dict": lambda parts, depth: dict(_pairs(parts, depth)),
    "odict": lambda parts, depth: OrderedDict(_pairs(parts, depth)),
    "counter": lambda parts, depth: Counter(dict(_pairs(parts, depth))),
    "size": lambda parts, _: torch.Size(_is(list, parts[0])),
    "device": lambda parts, _: torch.device(_is(str, parts[0])),
    "array": _unpack_array,
    "nscalar": _unpack_scalar,
    "ndtype": lambda parts, _: dtype_from(parts[0]),
    "nstr": lambda parts, _: np.str_(_is(bytes, parts[0]).decode("utf-8", "surrogatepass")),
    "nbytes": lambda parts, _: np.bytes_(_is(bytes, parts[0])),
    **{tag: _unpack_torch(tag) for tag in _TORCH_NAMES},
}
