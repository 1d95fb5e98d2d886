"""Every tensor comes back from its stored bytes: values, shape and, where it was dense, strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.errors import Corrupt, InvalidInput
from datastates.state.geometry import (
    compact,
    dense_strides,
    dense_view,
    dtype_name,
    dtype_of,
    is_dense,
    memory_key,
    rebuild,
    spec_of,
    stored_bytes,
)
from datastates.state.manifest import TensorSpec
from tests.support.effort import examples
from tests.support.strategies import DTYPES, bits, random_tensor, tensors


def stored(tensor: torch.Tensor) -> tuple[torch.Tensor, TensorSpec]:
    """The bytes and the entry that a capture would store."""
    flat = dense_view(tensor)
    source = tensor if flat is not None else compact(tensor)
    data = dense_view(source)
    assert data is not None
    return data.clone(), spec_of("t", source)


@given(tensors())
@settings(max_examples=examples(400), deadline=None)
def test_any_tensor_comes_back_bit_for_bit(tensor: torch.Tensor) -> None:
    data, spec = stored(tensor)
    assert data.numel() == stored_bytes(tensor.dtype, spec.shape, spec.strides)
    back = rebuild(data, spec)
    assert (back.shape, back.dtype) == (tensor.shape, tensor.dtype)
    assert bits(back) == bits(tensor)
    if is_dense(tensor.shape, tensor.stride()):
        assert back.stride() == tensor.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_from_a_view_without_a_copy(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, [2, 3], seed=1)
    view = dense_view(tensor)
    assert view is not None
    assert view.dtype == torch.uint8
    assert view.data_ptr() == tensor.data_ptr()
    assert bits(rebuild(view, spec_of("t", tensor))) == bits(tensor)
    assert dtype_of(dtype_name(dtype)) is dtype


def test_every_name_of_a_dtype_is_one_that_torch_has() -> None:
    assert dtype_name(torch.half) == "float16"
    assert dtype_name(torch.chalf) == "complex32"
    with pytest.raises(InvalidInput, match="no dtype 'float128'"):
        dtype_of("float128")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(2 * 3 * 4 * 5.0)
        .reshape(2, 3, 4, 5)
        .contiguous(memory_format=torch.channels_last),
        torch.arange(3.0).unsqueeze(1).expand(3, 1000),
        torch.tensor(1.0).expand(4, 4),
        torch.arange(6.0)[2:5],
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.empty(3, 0).t(),
        torch.arange(3.0).as_strided((3, 1), (1, 77)),
    ],
    ids=[
        "permuted",
        "channels_last",
        "expanded",
        "expanded scalar",
        "offset",
        "0-d",
        "empty",
        "empty transposed",
        "odd stride of one",
    ],
)
def test_dense_tensors_are_viewed_and_keep_their_strides(tensor: torch.Tensor) -> None:
    view = dense_view(tensor)
    assert view is not None
    back = rebuild(view.clone(), spec_of("t", tensor))
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_an_expanded_tensor_stores_one_copy() -> None:
    view = dense_view(torch.arange(3.0).unsqueeze(1).expand(3, 1000))
    assert view is not None
    assert view.numel() == 12


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.arange(10.0)[::2], (1,)),
        (torch.arange(24.0).reshape(4, 6).t()[::2], (1, 3)),
        (torch.arange(5.0).unfold(0, 3, 1), (3, 1)),
        (torch.arange(8.0)[::2].unsqueeze(0).expand(3, 4), (0, 1)),
        (torch.tensor([1 + 2j, 3j]).conj(), (1,)),
        (torch.tensor([1 + 2j, 3j]).conj().imag, (1,)),
    ],
    ids=["holes", "holes transposed", "overlap", "holes expanded", "conjugate", "negative"],
)
def test_what_has_no_view_is_copied_in_the_same_order(
    tensor: torch.Tensor, strides: tuple[int, ...]
) -> None:
    assert dense_view(tensor) is None
    copy = compact(tensor)
    assert copy.stride() == strides == dense_strides(tensor.shape, tensor.stride())
    assert torch.equal(copy, tensor)
    assert dense_view(copy) is not None


def test_a_view_stores_its_own_bytes_not_its_base() -> None:
    view = dense_view(torch.zeros(1 << 20)[5:15])
    assert view is not None
    assert view.numel() == 40


def test_a_compact_copy_remembers_that_the_tensor_wants_gradients() -> None:
    assert spec_of("t", compact(torch.arange(4.0)[::2].requires_grad_())).requires_grad


def test_rebuilt_tensors_share_the_given_bytes_and_want_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.arange(4.0))
    data, spec = stored(weight)
    back = rebuild(data, spec)
    assert spec.requires_grad
    assert not back.requires_grad
    back[0] = 9
    assert data.view(torch.float32)[0] == 9


def test_bytes_that_are_not_aligned_are_copied() -> None:
    tensor = torch.arange(4.0)
    data, spec = stored(tensor)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert torch.equal(rebuild(shifted, spec), tensor)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=3),
    st.none() | st.integers(0, 200),
)
@settings(max_examples=examples(400), deadline=None)
def test_no_description_reads_outside_its_bytes(
    dims: list[tuple[int, int]], count: int | None
) -> None:
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    spec = TensorSpec("t", "float32", shape, strides, None, False, ())
    if count is None:
        count = stored_bytes(torch.float32, shape, strides)
    try:
        back = rebuild(torch.zeros(count, dtype=torch.uint8), spec)
    except Corrupt as exc:
        # either outcome is right, this one must say where
        assert str(exc).startswith("t: ")  # noqa: PT017
        return
    assert int(back.abs().sum() if back.numel() else 0) == 0
    assert (
        back.numel() == 0
        or sum((n - 1) * s for n, s in zip(back.shape, back.stride(), strict=True)) * 4 < count
    )


def test_the_memory_key_finds_ties_and_nothing_else() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    assert (
        memory_key(weight) == memory_key(weight.detach()) == memory_key(torch.nn.Parameter(weight))
    )
    others = [
        weight.clone(),
        weight[:1],
        weight.t(),
        weight.view(6),
        weight.view(torch.int32),
        weight.flatten()[1:],
    ]
    assert memory_key(weight) not in [memory_key(other) for other in others]
    assert memory_key(torch.empty(0)) is memory_key(torch.empty(2, device="meta")) is None
    pair = torch.tensor([1j, 2])
    assert memory_key(pair) != memory_key(pair.conj())
