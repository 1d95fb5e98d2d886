"""How a tensor lies in memory: names of dtypes, dense order, strides, and the way back from flat bytes.

A tensor is *dense* when its elements fill one stretch of memory without holes or overlap, in any order of dimensions
(channels_last, transposes). Dimensions with stride 0 (``expand``) are stored once and expanded again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from datastates.errors import Corrupt, InvalidInput

from .manifest import Shard, TensorSpec

__all__ = [
    "compact",
    "dense_strides",
    "dense_view",
    "dtype_name",
    "dtype_of",
    "is_dense",
    "memory_key",
    "rebuild",
    "spec_of",
    "stored_bytes",
]

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

MemoryKey = tuple[int, torch.device, torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of the dtype without the prefix: ``float32``."""
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype with that name.

    :raises InvalidInput: this torch has none.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise InvalidInput(f"torch {torch.__version__} has no dtype {name!r}: upgrade torch to read this state") from None


def dense_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's bytes in memory order as a flat ``uint8`` view that shares its memory, without autograd.

    None if there is no such view (holes, overlap, pending conjugation): use ``compact``.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous():
        count = tensor.numel()
    else:
        shape, strides = _stored(tensor.shape, tensor.stride())
        if not _fills(shape, strides):
            return None
        count = _product(shape)
    # Not view(-1): a tensor of one element, or of none, is contiguous with any stride, and keeps it.
    flat = tensor.as_strided((count,), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy of the same shape; its strides are those with which the tensor will come back."""
    source = tensor.detach()
    strides = dense_strides(source.shape, source.stride())
    shape, kept = _stored(source.shape, source.stride())
    # Made as bytes: making complex32 directly warns.
    dense = torch.empty((_product(shape) * source.element_size(),), dtype=torch.uint8, device=source.device).view(source.dtype)
    # copy_ resolves a pending conjugation or negation.
    dense.as_strided(shape, strides).copy_(source.as_strided(shape, kept))
    return dense.as_strided(source.shape, strides).requires_grad_(tensor.requires_grad)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """``strides`` themselves if they are dense, otherwise the packed ones with the same order of dimensions."""
    stored, _ = _stored(shape, strides)
    if 0 in shape or _fills(stored, strides):
        return tuple(strides)
    packed = [0] * len(stored)
    step = 1
    for dim in sorted(range(len(stored)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim] != 0 or stored[dim] == shape[dim]:
            packed[dim] = step
            step *= stored[dim]
    return tuple(packed)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of this geometry fill their memory once, dimensions of stride 0 aside."""
    return 0 in shape or _fills(_stored(shape, strides)[0], strides)


def stored_bytes(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> int:
    """The bytes that a tensor, or a shard of it, takes in the stream: dimensions of stride 0 count once."""
    return dtype.itemsize * _product(_stored(shape, strides)[0])


def spec_of(path: str, tensor: torch.Tensor, *, alias: int | None = None, shards: Sequence[Shard] = ()) -> TensorSpec:
    """The entry of ``tensor`` in a manifest; its strides are those with which it will come back."""
    shape = tuple(tensor.shape)
    strides = dense_strides(shape, tensor.stride())
    return TensorSpec(path, _NAMES[tensor.dtype], shape, strides, alias, tensor.requires_grad, tuple(shards))


def rebuild(data: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor that ``spec`` describes; ``data`` is its stored bytes as flat ``uint8``, whose memory it shares.

    Copies only if ``data`` is not aligned to the item size. Values, shape and strides are those of the original;
    ``requires_grad`` is False.

    :raises Corrupt: the bytes do not fit the description.
    """
    dtype = dtype_of(spec.dtype)
    needed = stored_bytes(dtype, spec.shape, spec.strides)
    if data.numel() != needed or not is_dense(spec.shape, spec.strides):
        raise Corrupt(f"{spec.path}: {data.numel()} bytes for {spec.dtype} {spec.shape} with strides {spec.strides}, which take {needed}")
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    flat = data.view(dtype)
    return flat.as_strided(spec.shape, spec.strides, flat.storage_offset())


def memory_key(tensor: torch.Tensor) -> MemoryKey | None:
    """Equal for two tensors that are the same memory with the same geometry (tied weights); None for one that has no memory of its own."""
    if not tensor.numel() or not (pointer := tensor.data_ptr()):
        return None
    return pointer, tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _stored(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, with each dimension of stride 0 narrowed to one element."""
    if 0 in strides and 0 not in shape:
        return tuple([1 if not stride else size for size, stride in zip(shape, strides, strict=True)]), tuple(strides)
    return tuple(shape), tuple(strides)


def _fills(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            break
        expected *= size
    else:
        return True  # in the usual order: no need to sort
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _product(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
