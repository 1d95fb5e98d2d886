"""Values are packed exactly, alike in every process, and only by rules that are written down."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from datastates.errors import Conflict, Corrupt, InvalidInput
from datastates.state import encoding
from datastates.state.encoding import (
    Unencodable,
    decode_values,
    describe_dtype,
    dtype_from,
    encode_values,
    encoder_named,
    encoder_of,
    pack,
    register_encoder,
    unpack,
)
from tests.support.effort import examples
from tests.support.strategies import assert_same, scalars


@given(scalars)
@settings(max_examples=examples(300), deadline=None)
def test_scalars_come_back_to_the_bit(value: object) -> None:
    (packed,) = decode_values(encode_values([pack(value)]))
    assert_same(unpack(packed), value)


@pytest.mark.parametrize(
    "value",
    [0, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 1 << 5000, -(1 << 5000)],
)
def test_ints_of_any_size_come_back_alone_and_in_lists(value: int) -> None:
    for tree in (value, [value], (1, value), {"k": value}, {value}):
        (packed,) = decode_values(encode_values([pack(tree)]))
        assert_same(unpack(packed), tree)


def test_sets_pack_alike_whatever_the_order_of_their_hashes() -> None:
    start = "from datastates.state.encoding import encode_values, pack; "
    code = (
        start
        + "print(encode_values([pack({str(i) for i in range(99)}), pack(frozenset('abc'))]).hex())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != b""


@pytest.mark.parametrize(
    "dtype",
    [
        "f4",
        ">i8",
        "U7",
        "S3",
        "V5",
        "M8[us]",
        "m8[25s]",
        "c16",
        "?",
        "f2",
        [("a", "i4"), ("b", [("c", "f8", (2, 3))])],
    ],
)
def test_dtypes_come_back(dtype: Any) -> None:
    plain = np.dtype(dtype)
    (packed,) = decode_values(encode_values([pack(plain)]))
    assert unpack(packed) == plain


def test_an_aligned_dtype_with_gaps_comes_back() -> None:
    plain = np.dtype(
        {"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 16], "itemsize": 40},
        align=True,
    )
    back = dtype_from(msgspec.msgpack.decode(msgspec.msgpack.encode(describe_dtype(plain))))
    assert (back, back.itemsize, back.isalignedstruct) == (plain, 40, True)


@pytest.mark.parametrize(
    "dtype", [object, [("a", object)], np.dtypes.StringDType(), [(("title", "a"), "i4")]]
)
def test_dtypes_that_hold_pointers_or_titles_are_refused(dtype: Any) -> None:
    with pytest.raises(Unencodable, match="NumPy dtype"):
        describe_dtype(np.dtype(dtype))


STRANGE_DTYPES: list[Any] = [
    *("O", "|O8", "O8", "i4,O", "f4,f4", "T", "<f3", "", "<f4" * 100, 7, None, []),
    *(["sub"], ["sub", "|O8", [1]], ["sub", "<f4", [-1]], ["z", 1]),
    *(
        ["struct", [["a", "|O8", 0]], 8, False],
        ["struct", [["a", "<f8", -8]], 8, False],
        ["struct", [["a", "<f8", 4]], 8, False],
    ),
]


@pytest.mark.parametrize("descr", STRANGE_DTYPES)
def test_descriptions_of_dtypes_that_nobody_wrote_are_corrupt(descr: Any) -> None:
    with pytest.raises(Corrupt):
        unpack(["ndtype", descr])


def test_nested_descriptions_stop_at_the_limit() -> None:
    descr: Any = "<f4"
    for _ in range(150):
        descr = ["sub", descr, [1]]
    with pytest.raises(Corrupt, match="too deep"):
        unpack(["ndtype", descr])


@pytest.mark.parametrize(
    ("shape", "order", "data"),
    [
        ([3], "C", b"1234"),
        ([-1], "C", b""),
        ([1 << 62, 1 << 62], "C", b""),
        ([1], "K", b"1234"),
        ([1.0], "C", b"1234"),
        ([1], "C", "1234"),
    ],
)
def test_arrays_that_do_not_fit_their_bytes_are_corrupt(shape: Any, order: Any, data: Any) -> None:
    with pytest.raises(Corrupt):
        unpack(["array", "<f4", shape, order, data])


def test_arrays_that_came_back_are_writable() -> None:
    back = unpack(pack(np.zeros(3)))
    back[0] = 1


STRANGE_VALUES: list[Any] = [
    *(
        [],
        ["pickle", b""],
        [None],
        [[1]],
        ["dtype", "os"],
        ["device", "os:system"],
        ["set", [["list", []]]],
        ["dict", [1], []],
    ),
    *(
        ["int", 3],
        ["range", 1, 2, 0],
        ["complex", 1, 2],
        ["deque", -1, []],
        ["list", 5],
        ["list", {"a": 1}],
        ["size", [1.5]],
        ["size", {}],
    ),
]


@pytest.mark.parametrize("packed", STRANGE_VALUES)
def test_what_pack_never_makes_is_corrupt(packed: Any) -> None:
    with pytest.raises(Corrupt, match="a value does not decode"):
        unpack(packed)


# The registry


class First:
    pass


class Second:
    pass


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BY_TYPE", {})
    monkeypatch.setattr(encoding, "_BY_NAME", {})


def ident(value: Any) -> Any:
    return value


def test_a_name_has_one_type_and_a_type_one_name() -> None:
    register_encoder(First, "first", ident, ident)
    with pytest.raises(Conflict, match=r"'first' belongs to .*First"):
        register_encoder(Second, "first", ident, ident)
    with pytest.raises(Conflict, match="already registered as 'first'"):
        register_encoder(First, "other", ident, ident)
    assert encoder_of(Second) is None


def test_registering_again_replaces() -> None:
    register_encoder(First, "first", ident, ident)
    register_encoder(First, "first", repr, ident)
    assert encoder_named("first").encode is repr
    reloaded = type(
        "First", (), {"__module__": First.__module__, "__qualname__": First.__qualname__}
    )
    register_encoder(reloaded, "first", repr, repr)
    assert encoder_named("first").type is reloaded


@pytest.mark.parametrize(
    "kind", [dict, list, int, str, np.ndarray, torch.Tensor, torch.nn.Parameter, type(None)]
)
def test_what_is_stored_natively_cannot_be_registered(kind: type[Any]) -> None:
    with pytest.raises(InvalidInput, match="without an encoder"):
        register_encoder(kind, "mine", ident, ident)


def test_a_missing_name_lists_those_that_there_are() -> None:
    register_encoder(First, "first", ident, ident)
    with pytest.raises(InvalidInput, match=r"'absent'.*registered: first"):
        encoder_named("absent")
