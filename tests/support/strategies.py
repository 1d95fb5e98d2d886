"""Hypothesis strategies for state trees, and the comparison that a round trip must pass."""

from __future__ import annotations

import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *(
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ),
)
DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)
)
"""The dtypes that torch copies on CPU."""


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, any of the geometries that real states have, random bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = random_tensor(dtype, shape, seed=draw(st.integers(0, 1 << 16)))
    if tensor.dim() and draw(st.booleans()):
        tensor = tensor.permute(*draw(st.permutations(range(tensor.dim()))))
    if tensor.dim() and draw(st.booleans()):
        dim = draw(st.integers(0, tensor.dim() - 1))
        tensor = draw(
            st.sampled_from(
                (
                    tensor[..., ::2],
                    tensor.narrow(dim, 0, min(1, tensor.shape[dim])),
                    tensor.unsqueeze(dim),
                )
            )
        )
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if tensor.dtype in (torch.complex64, torch.complex128) and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor


def random_tensor(dtype: torch.dtype, shape: list[int], *, seed: int) -> torch.Tensor:
    """A contiguous tensor of random bits (0 and 1 for bool)."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (count,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return data.view(dtype).reshape(shape)


floats = st.floats() | st.sampled_from(
    [-0.0, float("nan"), struct.unpack("<d", struct.pack("<Q", 0xFFF0000000000ABC))[0]]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | floats
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.complex_numbers()
)

_texts = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["", "1", "a/b", "a%2Fb", "%", "None", "weight"]
)
_plain_keys = _texts | st.integers() | st.sampled_from([True, None, 1.5, -0.0, b"k", b""])
keys = _plain_keys | st.tuples(_plain_keys, _plain_keys) | st.frozensets(_texts, max_size=2)
"""Keys of dicts, types mixed."""

_arrays = st.sampled_from(
    [
        np.array(3.5),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.arange(12)[::3],
        np.zeros((0, 3), np.uint8),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array(["2026-01-01", "NaT"], "datetime64[ms]"),
        np.array([1, 2], "timedelta64[25s]"),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["", ""]),
        np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")]),
        np.array([(1, (2.0, 3.0))], np.dtype([("a", "i1"), ("b", "<f8", (2,))], align=True)),
        np.array([np.nan, -0.0], np.float16),
    ]
)
_numpy = st.sampled_from(
    [
        *(
            np.float32(1.5),
            np.int64(-3),
            np.bool_(True),
            np.str_("x\0"),
            np.bytes_(b"y\0"),
            np.datetime64("2026-01-01"),
            np.complex128(1j),
        ),
        *(
            np.float64("nan"),
            np.dtype("f4"),
            np.dtype([("a", "i4"), ("b", "f8")]),
            np.longdouble(1) / 3,
        ),
    ]
)
_torch = st.sampled_from(
    [
        *(
            torch.Size([2, 3]),
            torch.Size([]),
            torch.float32,
            torch.complex32,
            torch.device("cpu"),
            torch.device("cuda", 1),
        ),
        *(torch.channels_last, torch.sparse_csr, torch.per_channel_affine),
    ]
)
_odd = st.sampled_from(
    [slice(1, None, 2), slice(None), range(3, 9, 2), range(0, 1 << 70), Ellipsis, bytearray(b"xy")]
)
leaves = scalars | tensors() | _arrays | _numpy | _torch | _odd

_hashables = (
    st.integers()
    | _texts
    | st.booleans()
    | st.none()
    | st.binary(max_size=3)
    | st.tuples(st.integers(), _texts)
)


def tree_dicts(children: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Dicts with keys of any type that is stored."""
    return st.dictionaries(keys, children, max_size=5)


@st.composite
def _ordered(draw: st.DrawFn, children: st.SearchStrategy[Any]) -> OrderedDict[Any, Any]:
    ordered = OrderedDict(draw(tree_dicts(children)))
    if draw(st.booleans()):
        # as torch sets it
        ordered._metadata = OrderedDict({"": {"version": 1}, "layer": {}})  # type: ignore[attr-defined]
    return ordered


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=5)
    return st.one_of(
        tree_dicts(children),
        _ordered(children),
        st.builds(
            defaultdict, st.sampled_from([None, list, int, dict, OrderedDict]), tree_dicts(children)
        ),
        lists,
        lists.map(tuple),
        st.builds(deque, lists, st.sampled_from([None, 3, 9])),
        st.sets(_hashables, max_size=4),
        st.frozensets(_hashables, max_size=4),
        st.dictionaries(_hashables, st.integers(), max_size=3).map(Counter),
    )


trees = st.recursive(leaves, _containers, max_leaves=25)
"""Any state that is stored."""


def assert_same(left: Any, right: Any) -> None:
    """Equal in type, order, bits and geometry, all the way down."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        _assert_same_tensor(left, right)
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
        assert (
            np.asarray(left).flags.f_contiguous == np.asarray(right).flags.f_contiguous
            or not np.asarray(right).flags.forc
        )
    elif isinstance(left, dict):
        _assert_same_dict(left, right)
    elif isinstance(left, list | tuple | deque):
        assert len(left) == len(right)
        assert getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float):
        assert struct.pack("<d", left) == struct.pack("<d", right)
    elif isinstance(left, complex):
        assert_same((left.real, left.imag), (right.real, right.imag))
    elif isinstance(left, set | frozenset):
        assert sorted(map(repr, left)) == sorted(map(repr, right))
    else:
        assert left == right


def _assert_same_dict(left: Any, right: Any) -> None:
    for one, other in zip(left, right, strict=True):
        assert_same(one, other)
    for one, other in zip(left.values(), right.values(), strict=True):
        assert_same(one, other)
    assert getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
    assert getattr(left, "_metadata", None) == getattr(right, "_metadata", None)


def _assert_same_tensor(left: torch.Tensor, right: torch.Tensor) -> None:
    assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout)
    if left.layout is not torch.strided:
        assert torch.equal(left.to_dense(), right.to_dense())
        return
    if left.is_quantized:
        assert left.qscheme() == right.qscheme()
        assert torch.equal(left.int_repr(), right.int_repr())
        assert torch.equal(left.dequantize(), right.dequantize())
        return
    assert bits(left) == bits(right)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in the order of the shape, as bytes; independent of strides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support")
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())
