"""NumPy dtypes and arrays as strings, numbers and bytes, and back; arrays that hold Python objects are refused."""

from __future__ import annotations

import operator
import re
from typing import Any, Literal

import numpy as np

from datastates.errors import Corrupt

__all__ = ["MAX_DEPTH", "Descr", "Unencodable", "array_of", "describe_dtype", "dtype_from", "order_of"]

Descr = Any
"""A NumPy dtype as strings, numbers and tuples."""

MAX_DEPTH = 100
"""Deeper nesting is refused, in writing and in reading: it is a cycle, or an attack."""

_BUFFER_KINDS = frozenset("biufcSUVmM")


class Unencodable(TypeError):
    """A value has no safe encoding; ``tree.flatten`` turns this into ``Unsupported`` with the path."""


def describe_dtype(dtype: np.dtype[Any]) -> Descr:
    """The dtype as strings, numbers and tuples.

    :raises Unencodable: it holds Python objects, or is of a kind that NumPy itself does not know.
    """
    descr = _describe(dtype)
    if dtype.hasobject or dtype_from(descr) != dtype:
        raise Unencodable(f"has the NumPy dtype {dtype}, which has no safe encoding: convert it to a numeric, string or time dtype")
    return descr


def _describe(dtype: np.dtype[Any]) -> Descr:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ("sub", _describe(base), shape)
    if dtype.names is not None and dtype.fields is not None:
        fields = tuple((name, _describe(dtype.fields[name][0]), dtype.fields[name][1]) for name in dtype.names)
        return ("struct", fields, dtype.itemsize, dtype.isalignedstruct)
    if dtype.kind not in _BUFFER_KINDS:
        raise Unencodable(f"has the NumPy dtype {dtype}, which has no safe encoding: convert it to a numeric, string or time dtype")
    return dtype.str


_SIMPLE = re.compile(r"[<>|=][biufcSUVmM]\d{1,10}(\[\d*[A-Za-z]+\])?")


def dtype_from(descr: Descr, depth: int = 0) -> np.dtype[Any]:
    """The dtype that ``describe_dtype`` described; lists stand for tuples."""
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
            parts = {"names": list(names), "formats": [dtype_from(part, depth + 1) for part in formats], "offsets": list(offsets)}
            dtype: np.dtype[Any] = np.dtype({**parts, "itemsize": itemsize}, align=bool(is_aligned))  # type: ignore[call-overload]  # a dict built in parts
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
    if min(sizes, default=0) < 0 or count * dtype.itemsize != memoryview(data).nbytes or order not in ("C", "F"):
        raise Corrupt(f"an array of {dtype} {sizes} does not fit its {memoryview(data).nbytes} bytes")
    return np.ndarray(sizes, dtype, buffer=data, order=order)
