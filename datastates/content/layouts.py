"""Tensors that are not a plain stretch of memory: sparse, quantized and wrapping ones as dense parts, and back.

A *wrapping* tensor is of a subclass with ``__tensor_flatten__``, such as torchao's: its elements are in inner tensors. Its
metadata is stored as plain values. Enums and dataclasses in it are stored by name, and only classes that this process has
already imported are looked up. Nothing is imported, and no ``__init__`` of metadata runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from datastates.errors import Corrupt

from .arrays import Unencodable
from .encoding import decode_values, encode_values, encoder_of, pack, unpack
from .geometry import dtype_name, dtype_of
from .spread import is_spread, kinds, owners_of

__all__ = ["are_alike", "compose", "decompose", "inner", "is_storable", "is_wrapping", "like", "plain_tensors"]

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

    :raises Unencodable: it has no bytes, or its layout has no parts, or it is of a subclass that cannot be taken apart.
    """
    if type(tensor) not in kinds():
        return _wrapping(tensor)
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


def compose(node: tuple[Any, ...], parts: Sequence[Any]) -> Any:
    """The tensor for which ``decompose`` returned ``node`` and ``parts``; indices are checked. The parts of a wrapping tensor
    by name, if this process has not imported its class.

    Raises torch's own error if the parts do not fit together.
    """
    tag, first = node[0], node[1]
    if tag == "s":
        return _wrapped(node, dict(zip(node[2], parts, strict=True)))
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


def is_wrapping(found: object) -> bool:
    """Whether it is a tensor whose elements are in inner tensors, and that no registered encoder takes."""
    kind = type(found)
    return isinstance(found, torch.Tensor) and hasattr(kind, "__tensor_flatten__") and not is_spread(found) and encoder_of(kind) is None


def is_storable(found: object) -> bool:
    """Whether a state can hold a tensor of this class."""
    return type(found) in kinds() or is_wrapping(found) or encoder_of(type(found)) is not None


def inner(tensor: Any) -> dict[str, torch.Tensor]:
    """The inner tensors of a wrapping tensor, by attribute."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the elements: the tensor itself, or those within a wrapping tensor."""
    return [plain for part in inner(tensor).values() for plain in plain_tensors(part)] if is_wrapping(tensor) else [tensor]


def are_alike(live: object, stored: object) -> bool:
    """Whether both are tensors of the same shape, dtype, layout, class and metadata: ``stored`` can be copied into ``live``."""
    if not isinstance(live, torch.Tensor) or not isinstance(stored, torch.Tensor):
        return False
    if not is_wrapping(live) and not is_wrapping(stored):
        return (live.shape, live.dtype, live.layout) == (stored.shape, stored.dtype, stored.layout)
    return (
        type(live) is type(stored)
        and _wrapping(live)[0] == _wrapping(stored)[0]
        and all(map(are_alike, inner(live).values(), inner(stored).values()))
    )


def _wrapping(tensor: Any) -> Parts:
    kind = type(tensor)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not is_wrapping(tensor) or tensor.is_nested or name.startswith("torch.distributed."):
        raise Unencodable(
            f"is a tensor subclass, {name.replace(':', '.')}: convert it to a plain tensor, or register it with"
            " datastates.register_encoder(...); track(frozen=False) leaves out parameters that require no gradient"
        )
    names, metadata = tensor.__tensor_flatten__()
    try:
        packed = encode_values([pack(_plain(metadata))])
    except Unencodable as exc:
        raise Unencodable(f"is a {name.replace(':', '.')}, and in its metadata a value {exc}") from exc
    return ("s", name, tuple(names), tuple(tensor.shape), tensor.stride(), packed), tuple(inner(tensor).values())


def like(tensor: torch.Tensor, parts: Sequence[object]) -> Any:
    """A wrapping tensor of the same form with other inner tensors."""
    return compose(_wrapping(tensor)[0], parts)


def _wrapped(node: tuple[Any, ...], parts: dict[str, Any]) -> Any:
    _, name, _, shape, strides, packed = node
    kind = _imported(name)
    if not hasattr(kind, "__tensor_unflatten__") or name.startswith("torch.distributed."):
        return parts
    device = next((part.device for part in parts.values() if isinstance(part, torch.Tensor)), _HERE)
    metadata = _rich(unpack(decode_values(packed)[0]), device, name)
    made = kind.__tensor_unflatten__(parts, metadata, torch.Size(shape), strides)
    if type(made) is not kind or _wrapping(made)[0] != node:
        raise Corrupt(f"a tensor of {name} came back as another one")
    return made


_CLASS, _HERE = "datastates.class", torch.device("meta")


def _plain(value: Any) -> Any:
    # Enums, named tuples and dataclasses become a dict with the name of their class. Every device is that of the inner tensors.
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(_plain, value))
    if kind is dict:
        return {key: _plain(child) for key, child in value.items()}
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())
    if not names and not isinstance(value, Enum):
        return _HERE if kind is torch.device else value
    # Whether a gradient is required belongs to the live parameter, and not to the form of its bytes.
    state = {name: name != "requires_grad" and _plain(getattr(value, name)) for name in names} or value.name
    return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", "state": state}


def _rich(plain: Any, device: torch.device, owner: str) -> Any:
    # The reverse. No code of a class runs, and dataclasses are only those of the package of ``owner``, the tensor's class.
    kind = type(plain)
    if kind is list or kind is tuple:
        return kind(_rich(child, device, owner) for child in plain)
    if kind is not dict:
        return device if kind is torch.device else plain
    items = {key: _rich(child, device, owner) for key, child in plain.items()}
    if _CLASS not in items:
        return items
    found, state = _imported(items[_CLASS]), items["state"]
    if issubclass(found, Enum | tuple):
        return found[state] if issubclass(found, Enum) else tuple.__new__(found, state.values())
    if not is_dataclass(found) or found.__module__.partition(".")[0] != owner.partition(":")[0].partition(".")[0]:
        raise TypeError(f"{items[_CLASS]} is no class of metadata")
    made: Any = object.__new__(found)  # type: ignore[arg-type]  # a class
    made.__dict__.update(state)  # the class may be frozen
    return made


def _imported(name: str) -> Any:
    # Not by ``getattr``: some modules import on demand.
    module, _, qualname = name.partition(":")
    found = vars(sys.modules[module]).get(qualname) if module in sys.modules else None
    return found if isinstance(found, type) else None


def _quantized(tensor: torch.Tensor) -> Parts:
    scheme, name = tensor.qscheme(), dtype_name(tensor.dtype)
    if name in ("qint8", "quint8", "qint32"):
        if scheme == torch.per_tensor_affine:
            return ("qt", name), (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
        if scheme == torch.per_channel_affine:
            scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
            return ("qc", name, tensor.q_per_channel_axis()), (tensor.int_repr(), scales, zero_points)
    raise Unencodable(f"is a quantized tensor of dtype {name} and scheme {scheme}, which is not stored: dequantize() it first")
