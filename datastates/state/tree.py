"""Nested state to leaves and back.

``flatten`` separates what stays the same from capture to capture (the skeleton) from what changes
(values, tensors). It runs on the training thread at each capture, and reuses what the previous
capture built. Paths are made when the skeleton changes, and a tensor object that the previous
capture saw is not inspected again.

``unflatten`` returns containers of the exact type, with keys of the exact type in the exact order.
Tensors are plain (a ``Parameter`` becomes a tensor), with conjugation and negation resolved. A
``defaultdict`` keeps a factory of Python's own (``list``, ``dict``, ``set``, ``int``, …) and is
refused with any other. A container that appears twice becomes two containers. Tensors that share
memory are tied again if the caller passes equal tensors to ``unflatten``.
"""

from __future__ import annotations

import operator
import reprlib
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from datastates.errors import Corrupt, DatastatesError, InvalidInput, Unsupported

from .encoding import (
    MAX_DEPTH,
    SCALARS,
    Encoder,
    Packed,
    Unencodable,
    array_of,
    check_keys,
    decode_values,
    describe_dtype,
    dtype_from,
    encode_values,
    encoder_named,
    encoder_of,
    order_of,
    pack,
    unpack,
)
from .geometry import (
    compact,
    compose,
    decompose,
    dense_view,
    dtype_name,
    dtype_of,
    is_spread,
    is_wrapping,
    kinds,
    local_of,
    rebuild,
    spec_of,
)
from .manifest import TensorSpec
from .skeleton import TENSOR, VALUE, Node, Skeleton, arity, decode_skeleton, key_of, pack_key, paths

if TYPE_CHECKING:
    from torch import nn

ARRAY_BYTES = 64 << 10
"""NumPy arrays of at least this size are leaves, whose chunks are kept once, instead of values."""

OWN = "datastates.own"
"""The name under which a skeleton has an ``PerRank`` tree, whose bytes are one value."""

# of a tree, each counted as often as it is reached: a container that is used twice is stored twice
MOST_OBJECTS = 10_000_000

_BULK = 8
"""From this many children on, testing them all in one go is cheaper than one by one."""

_KEY_TYPES = frozenset({str})

_FACTORIES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (dict, list, set, tuple, int, float, str, bool, bytes, Counter, OrderedDict, deque)
}
# Looked up among imported modules: importing them takes seconds, and an object of a class that was
# never imported cannot exist.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("peft.peft_model", "PeftModel", "base_model"),
    ("peft.mixed_model", "PeftMixedModel", "base_model"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model"),
    ("peft.tuners.tuners_utils", "BaseTunerLayer", "base_layer"),
    ("peft.utils.other", "AuxiliaryTrainingWrapper", "original_module"),
)
Owner = tuple[str, Mapping[int, str]]
"""A tracked module: its path, and the canonical name of each of its parameters by ``id``."""


class Leaf(msgspec.Struct, frozen=True, eq=False):
    """One tensor of a state: a live one, never a copy."""

    path: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A tree that each rank has for itself: a state holds it as one value, so that its form may
    differ from rank to rank."""

    tree: object


class _OwnTensor(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data: bytes


class _Own(msgspec.Struct, frozen=True, array_like=True):
    """An owned tree as bytes."""

    version: int
    skeleton: msgspec.Raw
    values: msgspec.Raw
    tensors: tuple[_OwnTensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Number:
    """One number on a device.

    It stands among the values as a number of type ``kind`` until it is copied to the host."""

    tensor: torch.Tensor
    kind: type[int] | type[float]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """The result for a lasting part of the tree. ``part`` is held, so that its id is not reused."""

    part: object
    nodes: list[Node]
    values: list[Packed]
    tensors: list[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A state taken apart. ``values`` are packed and share no memory with the tree, except a
    ``Number``; ``tensors`` are the live ones.

    Large NumPy arrays are tensors over the arrays' own memory.
    """

    skeleton: Skeleton
    values: list[Packed]
    tensors: list[Leaf]
    _outline: list[Node | _Span]
    _loose: list[torch.Tensor]
    _seen: frozenset[int]
    _spans: dict[int, _Span]
    has_numbers: bool = False


def flatten(
    tree: object,
    previous: Flat | None = None,
    lasting: Iterable[object] = (),
    *,
    is_checking: bool = False,
) -> Flat:
    """The leaves and the skeleton of ``tree``. ``previous`` is the result of an earlier capture of
    the same training, and makes this one cheap.

    ``lasting`` are parts of the tree that hold the same objects for as long as they are the same
    objects themselves. Their results in ``previous`` stay valid.

    If the skeleton is unchanged, the result holds the very same ``Skeleton`` object. If every
    tensor is the same object, it also holds the same list of leaves. Callers may cache by identity.

    The first object of each registered encoder is decoded again, and encoded from that. Both
    encodings have to be equal. With ``is_checking`` every such object is checked, and containers
    that are used very often are refused before the walk.

    :raises Unsupported: a value has no safe encoding, or an encoder fails its check. The text names
        its path, its type and what to do next.
    """
    if is_checking and expanded(tree, lambda _: 1, {}) > MOST_OBJECTS:
        raise Unsupported(
            f"the state has more than {MOST_OBJECTS} parts, counted as often as they are used: keep"
            " numbers in arrays, and use a container that holds others only once"
        )
    walk = _Walk(
        previous._seen if previous is not None else frozenset(),
        previous._spans if previous is not None else {},
        lasting,
    )
    walk.is_checking = is_checking
    try:
        walk.children((tree,), 0)
    except Unencodable as exc:
        raise Unsupported(f"{_path_of_next(walk.whole()[0])} {exc}") from exc
    outline, loose = walk.nodes, walk.tensors
    if (
        previous is not None
        and outline == previous._outline
        and all(map(operator.is_, loose, previous._loose))
    ):
        return Flat(
            previous.skeleton,
            walk.values,
            previous.tensors,
            outline,
            loose,
            previous._seen,
            walk.spans,
            walk.has_numbers,
        )
    nodes, tensors = walk.whole()
    if previous is None or nodes != previous.skeleton.nodes:
        skeleton = Skeleton(nodes)
        # a key that cannot be encoded is refused here, on the caller's thread
        skeleton.encoded  # noqa: B018
        leaves = list(map(Leaf, skeleton.paths, tensors))
    else:
        skeleton, leaves = previous.skeleton, _renewed(previous.tensors, tensors)
    return Flat(
        skeleton,
        walk.values,
        leaves,
        outline,
        loose,
        frozenset(map(id, tensors)),
        walk.spans,
        walk.has_numbers,
    )


def unflatten(
    skeleton: Skeleton,
    values: Sequence[Packed],
    tensors: Sequence[torch.Tensor | None],
    *,
    is_sketch: bool = False,
) -> Any:
    """The state from its skeleton, values and tensors. ``values`` are packed, as ``flatten`` or
    ``decode_values`` returned them.

    A tensor that is None leaves None in its place. The same holds for a value made of tensors if
    one of them is None: a sparse or quantized tensor, a large array, an object of a registered
    encoder.

    With ``is_sketch`` no element of a tensor is read. A sparse or quantized tensor becomes one of
    the same shape and dtype without bytes (on ``meta``). A large array without bytes becomes zeros.
    An object of an encoder becomes the encoder's name.

    :raises InvalidInput: an object needs an encoder that is not registered here.
    :raises Corrupt: skeleton, values and tensors do not belong together.
    """
    build = (_Sketch if is_sketch else _Build)(skeleton.nodes, values, tensors)
    try:
        tree = build.next(0)
    except StopIteration:
        raise Corrupt(
            f"the state ends early: {len(values)} values and {len(tensors)} tensors are fewer than"
            " its skeleton needs"
        ) from None
    build.check_all_used()
    return tree


def expanded(
    found: object, leaf: Callable[[object], int], seen: dict[int, int], depth: int = 0
) -> int:
    """The number of objects in a tree, each counted as often as it is reached. Each container is
    visited once: ``seen`` is empty at first.

    ``leaf`` returns the count for an object that is no container. Objects that are nested deeper
    than a state can be are not visited.
    """
    if not isinstance(found, dict | list | tuple | deque | set | frozenset):
        return leaf(found)
    if id(found) not in seen and depth <= MAX_DEPTH:
        seen[id(found)] = 1  # until it is known, for one that contains itself
        inside = (
            (*found, *found.values(), getattr(found, "_metadata", None))
            if isinstance(found, dict)
            else found
        )
        seen[id(found)] = 1 + sum([expanded(each, leaf, seen, depth + 1) for each in inside])
    return seen.get(id(found), 1)


def pack_tree(tree: object) -> bytes:
    """A tree as bytes that share no memory with it.

    :raises Unsupported: a value has no safe encoding, or is not in this process's memory. The text
        names it.
    """
    flat = flatten(tree)
    tensors = tuple([_own_tensor(leaf) for leaf in flat.tensors])
    # waits for a device
    values = [
        each.kind(each.tensor.item()) if isinstance(each, Number) else each for each in flat.values
    ]
    return msgspec.msgpack.encode(
        _Own(1, msgspec.Raw(flat.skeleton.encoded), msgspec.Raw(encode_values(values)), tensors)
    )


def unpack_tree(data: bytes) -> Any:
    """The tree that ``pack_tree`` packed.

    :raises Corrupt: the bytes are something else, or contradict each other.
    """
    try:
        own = msgspec.msgpack.decode(data, type=_Own)
        if own.version != 1:
            raise Corrupt(
                f"a rank's own value is of version {own.version}, and this code reads version 1"
            )
        tensors = [_read_own(tensor) for tensor in own.tensors]
    except (
        msgspec.DecodeError,
        RecursionError,
        ValueError,
        TypeError,
        RuntimeError,
        OverflowError,
        InvalidInput,
    ) as exc:
        raise Corrupt(f"a rank's own value does not decode: {exc}") from exc
    skeleton = decode_skeleton(own.skeleton, source="a rank's own value")
    if ("x", OWN) in skeleton.nodes:
        raise Corrupt("a rank's own value holds another such thing, which is never written")
    return unflatten(skeleton, decode_values(own.values), tensors)


def _own_tensor(leaf: Leaf) -> _OwnTensor:
    if is_spread(leaf.tensor) or leaf.tensor.is_meta:
        raise Unsupported(
            f"{leaf.path or 'it'} lies with several ranks, and cannot be a separate value of one"
            " of them"
        )
    tensor = leaf.tensor if dense_view(leaf.tensor) is not None else compact(leaf.tensor)
    flat = dense_view(tensor)
    assert flat is not None
    # waits for a device
    return _OwnTensor(
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        spec_of("", tensor).strides,
        flat.cpu().numpy().tobytes(),
    )


def _read_own(tensor: _OwnTensor) -> torch.Tensor:
    data = (
        torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8)
        if tensor.data
        else torch.empty(0, dtype=torch.uint8)
    )
    return rebuild(
        data, TensorSpec("a tensor", tensor.dtype, tensor.shape, tensor.strides, None, False, ())
    )


def _path_of_next(nodes: list[Node]) -> str:
    *_, last = paths(nodes)
    if len(last) > 200:
        last = f"{last[:150]}…{last[-40:]}"
    return last or "the state"


def _renewed(leaves: list[Leaf], tensors: list[torch.Tensor]) -> list[Leaf]:
    if all(leaf.tensor is tensor for leaf, tensor in zip(leaves, tensors, strict=True)):
        return leaves
    return [
        leaf if leaf.tensor is tensor else Leaf(leaf.path, tensor)
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]


class _Walk:
    """One walk over a tree. ``seen`` are ids of tensors known to be plain, kept alive by the
    previous ``Flat``.

    ``nodes`` are an outline: a lasting part is one entry, its ``_Span``, and ``tensors`` are those
    outside such parts. ``whole`` fills them in.
    """

    __slots__ = (
        "_derived",
        "_kinds",
        "_known",
        "_lasting",
        "_seen",
        "has_numbers",
        "is_checking",
        "nodes",
        "spans",
        "tensors",
        "values",
    )

    def __init__(
        self, seen: frozenset[int], known: dict[int, _Span], lasting: Iterable[object]
    ) -> None:
        self._seen, self._known, self._kinds = seen, known, kinds()
        self._lasting = frozenset(map(id, lasting))
        self.spans: dict[int, _Span] = {}
        self.has_numbers = self.is_checking = False
        self._derived = 0
        """How many objects were converted into something else: they may change later, and what
        they became would not."""
        self.nodes: list[Node | _Span] = []
        self.values: list[Packed] = []
        self.tensors: list[torch.Tensor] = []

    def whole(self) -> tuple[list[Node], list[torch.Tensor]]:
        """The nodes and tensors of the tree, with those from lasting parts in their places."""
        nodes: list[Node] = []
        tensors: list[torch.Tensor] = []
        loose = iter(self.tensors)
        for node in self.nodes:
            if isinstance(node, _Span):
                nodes += node.nodes
                tensors += node.tensors
            else:
                nodes.append(node)
                if node == TENSOR:
                    tensors.append(next(loose))
        return nodes, tensors

    def children(self, children: Collection[object], depth: int) -> None:
        """Append the nodes of ``children``; types are tested exactly, the frequent ones first."""
        nodes, values, tensors, seen = self.nodes, self.values, self.tensors, self._seen
        if (
            len(children) >= _BULK
            and seen.issuperset(map(id, children))
            and self._kinds.issuperset(map(type, children))
        ):
            nodes.extend(repeat(TENSOR, len(children)))
            tensors.extend(children)  # type: ignore[arg-type]  # their types were tested
            return
        for child in children:
            kind = type(child)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                if id(child) in seen:
                    nodes.append(TENSOR)
                    tensors.append(child)  # type: ignore[arg-type]  # its type was tested
                else:
                    self._tensor(child, depth)  # type: ignore[arg-type]  # its type was tested
            elif id(child) in self._lasting:
                self._last(child, depth)
            elif kind is dict:
                keys: tuple[Any, ...] = tuple(child)  # type: ignore[arg-type]  # a dict
                nodes.append(
                    (
                        "d",
                        (
                            keys
                            if _KEY_TYPES.issuperset(map(type, keys))
                            else tuple(map(pack_key, keys))
                        ),
                    )
                )
                self._inside(child.values(), depth)  # type: ignore[attr-defined]  # a dict
            elif kind is float or kind is bool or child is None:
                values.append(child)
                nodes.append(VALUE)
            else:
                _WALKERS.get(kind, _Walk._other)(self, child, depth)

    def _last(self, child: object, depth: int) -> None:
        """Append a lasting part: the result of the previous walk, or a new one, which is noted."""
        span = self._known.get(id(child))
        if span is None:
            nodes, values, tensors = len(self.nodes), len(self.values), len(self.tensors)
            derived, lasting, self._lasting = self._derived, self._lasting, frozenset()
            self.children((child,), depth)
            self._lasting = lasting
            if self._derived != derived:
                return
            span = _Span(child, self.nodes[nodes:], self.values[values:], self.tensors[tensors:])
            del self.nodes[nodes:], self.tensors[tensors:]
        else:
            self.values += span.values
        self.spans[id(child)] = span
        self.nodes.append(span)

    def _inside(self, children: Collection[object], depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise Unencodable(
                f"is nested more than {MAX_DEPTH} deep, or contains itself: break the cycle"
            )
        if children:
            self.children(children, depth + 1)

    def _tensor(self, tensor: torch.Tensor, depth: int) -> None:
        parts = decompose(tensor)
        self._derived += parts is not tensor
        if isinstance(parts, torch.Tensor):
            self.nodes.append(TENSOR)
            self.tensors.append(parts)
            return
        node, children = parts
        self.nodes.append(node)
        self._inside(children, depth)

    def value(self, value: object, _depth: int) -> None:
        packed = pack(value)
        self.values.append(packed)
        self.nodes.append(VALUE)

    def number(self, number: Number, _depth: int) -> None:
        """Append a number that is still on a device."""
        self.has_numbers = True
        self.values.append(number)
        self.nodes.append(VALUE)

    def sequence(self, items: Any, depth: int) -> None:
        """Append a list, tuple or deque: one value if it holds only scalars, so that a growing
        history keeps the skeleton."""
        kind = type(items)
        if SCALARS.issuperset(map(type, items)):
            self.value(items, depth)
            return
        node = (
            ("q", items.maxlen, len(items))
            if kind is deque
            else ("l" if kind is list else "t", len(items))
        )
        self.nodes.append(node)
        self._inside(items, depth)

    def mapping(self, mapping: Any, depth: int) -> None:
        keys = tuple(map(pack_key, mapping))
        if type(mapping) is OrderedDict:
            metadata = getattr(mapping, "_metadata", None)
            # Packed first: if it is refused, the path must be the dict's.
            packed = None if metadata is None else pack(metadata)
            self.nodes.append(("o", metadata is not None, keys))
            if metadata is not None:
                self.nodes.append(VALUE)
                self.values.append(packed)
        else:
            self.nodes.append(("D", _factory_name(mapping.default_factory), keys))
        self._inside(mapping.values(), depth)

    def owned(self, owned: PerRank, _depth: int) -> None:
        """Append this rank's separate values."""
        self._derived += 1
        self.nodes += (("x", OWN), VALUE)
        self.values.append(pack_tree(owned.tree))

    def array(self, array: np.ndarray[Any, Any], depth: int) -> None:
        """Append a NumPy array: a value if it is small, else its memory as a tensor."""
        if array.nbytes < ARRAY_BYTES:
            self.value(array, depth)
            return
        order = order_of(array)
        self.nodes += (("a", describe_dtype(array.dtype), array.shape, order), TENSOR)
        dense = np.require(array, requirements=[order, "W"])
        self.tensors.append(torch.from_numpy(dense.ravel(order).view(np.uint8)))

    def _other(self, child: object, depth: int) -> None:
        if isinstance(child, torch.Tensor) and is_spread(child):
            if is_wrapping(local_of(child)):
                raise Unencodable(
                    f"is a DTensor of {type(local_of(child)).__name__}, which is not stored: use"
                    " another optimizer with FSDP"
                )
            self.nodes.append(TENSOR)
            self.tensors.append(child)
            return
        self._derived += 1
        encoder = encoder_of(type(child))
        if encoder is None:
            if isinstance(child, torch.Tensor):
                self._tensor(child, depth)
            else:
                self.value(child, depth)
            return
        try:
            plain = encoder.encode(child)
        except Exception as exc:
            raise Unencodable(
                f"of type {type(child).__qualname__} was refused by its encoder {encoder.name!r}:"
                f" {exc}"
            ) from exc
        if self.is_checking or encoder not in _checked:
            _check_encoder(encoder, child, plain)
        self.nodes.append(("x", encoder.name))
        self._inside((plain,), depth)


_checked: set[Encoder] = set()


def _check_encoder(encoder: Encoder, found: object, plain: object) -> None:
    kind = type(found).__qualname__
    try:
        first = pack_tree(plain)
        with torch.random.fork_rng(devices=[]):  # the training must not see what ``decode`` draws
            again = encoder.encode(encoder.decode(unpack_tree(first)))
        is_same = pack_tree(again) == first
    except Unsupported:  # the walk reaches it later, with its path
        return
    except Exception as exc:
        raise Unencodable(
            f"of type {kind} does not come back: the decoder {encoder.name!r} failed on what was"
            f" encoded: {exc!r}"
        ) from exc
    if not is_same:
        raise Unencodable(
            f"of type {kind} does not come back: the encoder {encoder.name!r} made"
            f" {reprlib.repr(plain)} of it, and {reprlib.repr(again)} of what that was decoded to;"
            " let decode return an equal object"
        )
    _checked.add(encoder)


_WALKERS: dict[type[Any], Callable[[_Walk, Any, int], None]] = {
    int: _Walk.value,
    str: _Walk.value,
    list: _Walk.sequence,
    tuple: _Walk.sequence,
    deque: _Walk.sequence,
    OrderedDict: _Walk.mapping,
    defaultdict: _Walk.mapping,
    np.ndarray: _Walk.array,
    PerRank: _Walk.owned,
    Number: _Walk.number,
}


def _factory_name(factory: object) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise Unencodable(
            f"is a defaultdict whose factory {name or factory!r} has no safe encoding: convert it"
            f" with dict(...), or use one of {', '.join(_FACTORIES)}"
        )
    return name


def _keys(packed: Sequence[str | bytes]) -> Sequence[Any]:
    if _KEY_TYPES.issuperset(map(type, packed)):  # Python makes the hashes of str hard to collide
        return packed
    return check_keys(list(map(key_of, packed)))


class _Build:
    """One way back through a skeleton. ``next`` builds the next node's object."""

    __slots__ = ("_at", "_builders", "_missing", "_nodes", "_tensors", "_values")

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Packed],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        self._builders = _BUILDERS
        self._missing = self._at = 0
        self._nodes = nodes
        self._values = iter(values)
        self._tensors = iter(tensors)

    def next(self, depth: int) -> Any:
        if self._at == len(self._nodes):
            raise StopIteration
        node = self._nodes[self._at]
        self._at += 1
        if type(node) is not tuple:
            return self._tensor() if node == TENSOR else unpack(next(self._values))
        if depth > MAX_DEPTH:
            raise Corrupt(f"the state is nested more than {MAX_DEPTH} deep")
        try:
            build: _Builder = self._builders.get(node[0], type(self)._layout)
            return build(self, node, depth + 1)
        except (DatastatesError, StopIteration):
            raise
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            RuntimeError,
            AssertionError,
            AttributeError,
            MemoryError,
        ) as exc:
            raise Corrupt(
                f"a part of the state does not come back ({reprlib.repr(node)}):"
                f" {type(exc).__name__}: {exc}"
            ) from exc

    def check_all_used(self) -> None:
        """Raise if anything is left over."""
        for what, rest in (
            ("values", self._values),
            ("tensors", self._tensors),
            ("nodes", iter(self._nodes[self._at :])),
        ):
            left = sum(1 for _ in rest)
            if left:
                raise Corrupt(f"the state has {left} more {what} than its skeleton needs")

    def _tensor(self) -> torch.Tensor | None:
        tensor = next(self._tensors)
        self._missing += tensor is None
        return tensor

    def _whole(self, count: int, depth: int) -> list[Any] | None:
        """The next ``count`` objects, or None if one of their tensors is missing."""
        before = self._missing
        items = self.items(count, depth)
        return items if self._missing == before else None

    def items(self, count: int, depth: int) -> list[Any]:
        if self._nodes[self._at : self._at + count].count(TENSOR) != count:
            return [self.next(depth) for _ in range(count)]
        found = list(islice(self._tensors, count))
        if len(found) < count:
            raise StopIteration
        self._at += count
        self._missing += sum(map(operator.is_, found, repeat(None)))
        return found

    def _mapping(self, node: tuple[Any, ...], depth: int) -> dict[Any, Any]:
        keys = _keys(node[1])
        return dict(zip(keys, self.items(len(keys), depth), strict=True))

    def _defaultdict(self, node: tuple[Any, ...], depth: int) -> defaultdict[Any, Any]:
        factory = None if node[1] is None else _FACTORIES[node[1]]
        keys = _keys(node[2])
        return defaultdict(factory, zip(keys, self.items(len(keys), depth), strict=True))

    def _ordered(self, node: tuple[Any, ...], depth: int) -> OrderedDict[Any, Any]:
        metadata = self.next(depth) if node[1] else None
        keys = _keys(node[2])
        mapping: OrderedDict[Any, Any] = OrderedDict(
            zip(keys, self.items(len(keys), depth), strict=True)
        )
        if node[1]:
            # as nn.Module.state_dict sets it
            mapping._metadata = metadata  # type: ignore[attr-defined]
        return mapping

    def _array(self, node: tuple[Any, ...], depth: int) -> np.ndarray[Any, Any] | None:
        _, descr, shape, order = node
        parts = self._whole(1, depth)
        return None if parts is None else array_of(descr, shape, order, parts[0].cpu().numpy())

    def _object(self, node: tuple[Any, ...], depth: int) -> Any:
        if node[1] == OWN:
            return self._owned(depth)
        encoder = encoder_named(node[1])
        parts = self._whole(1, depth)
        if parts is None:
            return None
        try:
            return encoder.decode(parts[0])
        except Exception as exc:
            raise InvalidInput(
                f"the decoder registered as {encoder.name!r} refused what it once encoded: {exc}"
            ) from exc

    def _owned(self, depth: int) -> Any:
        (data,) = self.items(1, depth)
        if type(data) is not bytes:
            raise Corrupt(f"a rank's own value is {type(data).__name__}, and not bytes")
        return unpack_tree(data)

    def _layout(self, node: tuple[Any, ...], depth: int) -> Any:
        parts = self._whole(arity(node), depth)
        return None if parts is None else compose(node, parts)


class _Sketch(_Build):
    """The way back for tensors whose elements are not there yet."""

    __slots__ = ()

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Sequence[Packed],
        tensors: Sequence[torch.Tensor | None],
    ) -> None:
        super().__init__(nodes, values, tensors)
        self._builders = {**_BUILDERS, "x": _Sketch._name, "a": _Sketch._outline}

    def _name(self, node: tuple[Any, ...], depth: int) -> Any:
        if node[1] == OWN:
            return self._owned(depth)
        encoder = encoder_named(node[1])
        return None if self._whole(1, depth) is None else f"encoded as {encoder.name}"

    def _outline(self, node: tuple[Any, ...], depth: int) -> np.ndarray[Any, Any] | None:
        _, descr, shape, order = node
        parts = self._whole(1, depth)
        if parts is None:
            return None
        if parts[0].is_meta:
            return np.broadcast_to(np.zeros((), dtype_from(descr)), shape)
        return array_of(descr, shape, order, parts[0].cpu().numpy())

    def _layout(self, node: tuple[Any, ...], depth: int) -> Any:
        parts = self._whole(arity(node), depth)
        if parts is None:
            return None
        if node[0] == "s":
            return compose(node, parts)
        if node[0] in ("qt", "qc"):
            with warnings.catch_warnings():
                # torch 2.13 deprecates quantized tensors
                warnings.simplefilter("ignore", UserWarning)
                return torch.empty(parts[0].shape, dtype=dtype_of(node[1]), device="meta")
        return torch.empty(node[1], dtype=parts[-1].dtype, device="meta")


_Builder = Callable[[Any, tuple[Any, ...], int], Any]

_BUILDERS: dict[str, _Builder] = {
    "d": _Build._mapping,
    "D": _Build._defaultdict,
    "o": _Build._ordered,
    "l": lambda build, node, depth: build.items(node[1], depth),
    "t": lambda build, node, depth: tuple(build.items(node[1], depth)),
    "q": lambda build, node, depth: deque(build.items(node[2], depth), node[1]),
    "x": _Build._object,
    "a": _Build._array,
}


# --- Canonical names of a module's contents ---
# They are made by structure, so that one state fits the compiled, the wrapped and the plain model.


def join(path: str, key: object) -> str:
    """The path of the entry under ``key``, as ``tree.flatten`` writes it."""
    part = (key if isinstance(key, str) else repr(key)).replace("%", "%25").replace(
        "/", "%2F"
    ) or "%"
    return f"{path}/{part}" if path else part


def canonical_name(module: nn.Module, name: str) -> str:
    """``name``, dotted, as ``module.state_dict()`` or ``named_modules()`` has it, without the
    parts of wrappers."""
    here: nn.Module | None = module
    kept: list[str] = []
    for part in name.split(".") if name else ():
        # A checkpoint wrapper takes its own part out of the keys of its state_dict: follow it
        # without one.
        while (
            here is not None
            and part not in here._modules
            and (inner := _inner_of(here)) is not None
        ):
            here = here._modules[inner]
        is_wrapper_part = here is not None and part == _inner_of(here)
        if not is_wrapper_part:
            kept.append(part)
        # a ScriptModule has no `get`
        here = here._modules[part] if here is not None and part in here._modules else None
    return ".".join(kept)


def split_wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The module and, while it is a wrapper, what it wraps."""
    here: nn.Module | None = module
    while here is not None:
        yield here
        inner = _inner_of(here)
        here = None if inner is None else here._modules[inner]


def parameter_names(
    owners: Sequence[Owner],
    loose: Callable[[], Mapping[int, str]],
    groups: Sequence[Mapping[str, Any]],
) -> list[list[str]]:
    """A name for each parameter of each group of an optimizer.

    A single tracked module that has all parameters gives its names unchanged. If several modules
    are needed, each name begins with its module's path. ``loose`` returns the separately tracked
    tensors by ``id``. A parameter that no tracked object has takes its name from the group's own
    ``param_names``, or is named by position.
    """
    keys = [list(map(id, group["params"])) for group in groups]
    for _, names in owners:
        found = [[names.get(key, "") for key in row] for row in keys]
        if all(map(all, found)):
            return found
    return _mixed_names(owners, loose(), groups, keys)


def _mixed_names(
    owners: Sequence[Owner],
    loose: Mapping[int, str],
    groups: Sequence[Mapping[str, Any]],
    keys: list[list[int]],
) -> list[list[str]]:
    used = [
        (path, names) for path, names in owners if any(key in names for row in keys for key in row)
    ]
    known = dict(loose)
    for path, names in reversed(used):
        prefix = "" if len(used) == 1 else path.replace("/", ".") + "."
        known.update((key, prefix + name) for key, name in names.items())

    def name(group: int, position: int, key: int) -> str:
        given = groups[group].get("param_names") or ()
        return known.get(key) or (
            given[position] if position < len(given) else positional_name(group, position)
        )

    return [
        [name(group, position, key) for position, key in enumerate(row)]
        for group, row in enumerate(keys)
    ]


def positional_name(group: int, position: int) -> str:
    """The name of a parameter that no tracked object has."""
    return f"group{group}.param{position}"


def _inner_of(module: nn.Module) -> str | None:
    """The name under which a wrapper holds what it wraps; None for a module that is not a
    wrapper."""
    # a class can be hashed, whatever its instances' __hash__ takes
    inners = _inners(type(module))  # type: ignore[arg-type]
    return next((inner for inner in inners if module._modules.get(inner) is not None), None)


@lru_cache(maxsize=1024)
def _inners(kind: type) -> tuple[str, ...]:
    """The names under which modules of a class would hold what they wrap; the class was made
    after the wrappers from which it derives."""
    wrappers = (
        (getattr(sys.modules.get(home), name, None), inner) for home, name, inner in _WRAPPERS
    )
    return tuple(
        inner for wrapper, inner in wrappers if wrapper is not None and issubclass(kind, wrapper)
    )
