"""The dtypes with which torch computes. Others it only stores, such as ``float4_e2m1fn_x2``, which holds two numbers in a byte."""

from __future__ import annotations

from functools import cache

import torch

from datastates.content.geometry import dtype_of
from datastates.content.manifest import TensorSpec
from datastates.errors import Unsupported

__all__ = ["check_numeric", "is_numeric"]


@cache
def is_numeric(dtype: str) -> bool:
    """Whether torch can turn the elements of a dtype into those of another."""
    kind = dtype_of(dtype)
    if kind.is_complex:
        return True
    try:
        torch.zeros(kind.itemsize, dtype=torch.uint8, device="cpu").view(kind).to(torch.float64)
    except NotImplementedError:
        return False
    return True


def check_numeric(spec: TensorSpec, advice: str) -> None:
    """Raise unless torch computes with the tensor; the message ends with the advice.

    :raises Unsupported: it does not.
    """
    if not is_numeric(spec.dtype):
        raise Unsupported(f"{spec.path} is {spec.dtype}, which torch stores but does not compute with: {advice}")
