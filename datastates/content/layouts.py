"""Tensors that are not a plain stretch of memory: sparse and quantized ones as dense parts, and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from datastates.errors import Corrupt

from .arrays import Unencodable
from .geometry import dtype_name, dtype_of
from .spread import owners_of

__all__ = ["compose", "decompose"]

_COMPRESSED: dict[torch.layout, str] = {
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}
_LAYOUTS = {tag: layout for layout, tag in _COMPRESSED.items()}

Parts = tuple[tuple[Any, ...], tuple[object, ...]]
"""A skeleton's node, and the children that follow it."""


def decompose(tensor: torch.Tensor) -> torch.Tensor | Parts:
    """The tensor itself if it is a plain strided one, otherwise its parts.

    :raises Unencodable: it has no bytes, or its layout has no parts.
    """
    if tensor.is_meta:
        if owners_of(tensor) is not None:
            return tensor
        raise Unencodable("is a meta tensor, which has no bytes: materialize it first, for example with module.to_empty(device=...)")
    layout = tensor.layout
    if layout is torch.strided:
        if tensor.is_quantized:
            return _quantized(tensor.detach())
        if tensor.is_nested or torch._is_functional_tensor(tensor):
            raise Unencodable("is a nested or functional tensor: convert it to plain tensors, for example with tensor.unbind()")
        return tensor
    tensor = tensor.detach()
    if layout is torch.sparse_coo:
        return ("coo", tuple(tensor.shape), tensor.is_coalesced()), (tensor._indices(), tensor._values())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (_COMPRESSED[layout], tuple(tensor.shape)), (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (_COMPRESSED[layout], tuple(tensor.shape)), (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    raise Unencodable(f"is a tensor of layout {layout}, which is not stored: call to_dense() on it first")


def compose(node: tuple[Any, ...], parts: Sequence[Any]) -> torch.Tensor:
    """The tensor for which ``decompose`` returned ``node`` and ``parts``; indices are checked.

    Raises torch's own error if the parts do not fit together.
    """
    tag, first = node[0], node[1]
    if tag == "coo":
        return torch.sparse_coo_tensor(parts[0], parts[1], first, is_coalesced=node[2], check_invariants=True, device=parts[1].device)
    if tag in _LAYOUTS:
        where = {"layout": _LAYOUTS[tag], "device": parts[2].device}
        return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], first, check_invariants=True, **where)
    dtype = dtype_of(first)
    with warnings.catch_warnings():
        # torch 2.13 deprecates making quantized tensors; those that exist must still come back.
        warnings.simplefilter("ignore", UserWarning)
        if tag == "qt":
            tensor = torch._make_per_tensor_quantized_tensor(parts[0], parts[1], parts[2])
        else:
            # A copy of such a tensor shares its scales, which may lie in memory that is only lent.
            tensor = torch._make_per_channel_quantized_tensor(parts[0], parts[1].clone(), parts[2].clone(), node[2])
    if tensor.dtype != dtype:
        raise Corrupt(f"a quantized tensor came back as {dtype_name(tensor.dtype)}, not {first}")
    return tensor


def _quantized(tensor: torch.Tensor) -> Parts:
    scheme, name = tensor.qscheme(), dtype_name(tensor.dtype)
    if name in ("qint8", "quint8", "qint32"):
        if scheme == torch.per_tensor_affine:
            return ("qt", name), (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
        if scheme == torch.per_channel_affine:
            scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
            return ("qc", name, tensor.q_per_channel_axis()), (tensor.int_repr(), scales, zero_points)
    raise Unencodable(f"is a quantized tensor of dtype {name} and scheme {scheme}, which is not stored: dequantize() it first")
