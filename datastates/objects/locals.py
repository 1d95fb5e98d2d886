"""What this rank holds of tensors that are spread over the ranks of a mesh: whole tensors are cut for it, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from datastates.content.division import Holding, held_by
from datastates.errors import Unsupported

from .placements import holdings_of, is_spread

__all__ = ["boxes_here", "cut_for", "lies_as", "on_all", "put_together", "write_local"]


def boxes_here(live: torch.Tensor) -> list[Holding]:
    """The boxes of a DTensor of which this rank's local tensor consists.

    :raises Unsupported: no rank has its values (Partial), or its local tensor is not what its placements say.
    """
    import torch.distributed as dist

    found = [box for box in held_by(holdings_of(live, 0), dist.get_rank()) if 0 not in box.local_shape]
    local = _local(live)
    if sum(box.item_bytes * torch.Size(box.local_shape).numel() for box in found) != local.numel() * local.element_size():
        raise Unsupported(
            f"a DTensor of shape {tuple(live.shape)} has {tuple(local.shape)} of it here, which is not what {_layout(live)[1]} cuts:"
            " make it by distribute_tensor, or restore into a plain tensor"
        )
    return found


def lies_as(one: object, other: object) -> bool:
    """Whether both are DTensors of one shape and layout, so that this rank holds the same box of each."""
    return is_spread(one) and is_spread(other) and _layout(one) == _layout(other)


def put_together(like: torch.Tensor, pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A DTensor laid out as ``like``, from its pieces in ``boxes_here``; shares their memory if possible."""
    boxes, shape = boxes_here(like), _local(like).shape
    if len(pieces) == 1 and pieces[0].shape == shape:
        return _spread(pieces[0], like, like.placements)  # type: ignore[attr-defined]  # a DTensor
    local = torch.empty(shape, dtype=dtype, device="cpu")
    for box, piece in zip(boxes, pieces, strict=True):
        _at(local, box.place, box.local_shape).copy_(piece)
    return _spread(local, like, like.placements)  # type: ignore[attr-defined]  # a DTensor


def cut_for(like: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a DTensor laid out as ``like``; shares its memory if possible."""
    return put_together(like, [_at(stored, box.offset, box.local_shape) for box in boxes_here(like)], stored.dtype)


def on_all(like: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a DTensor that every rank of the mesh of ``like`` holds whole."""
    from torch.distributed.tensor import Replicate

    return _spread(stored, like, [Replicate()] * len(like.placements), stored)  # type: ignore[attr-defined]  # a DTensor


def write_local(live: torch.Tensor, stored: torch.Tensor) -> None:
    """Overwrite in place what this rank holds of a DTensor, from a whole tensor, or from one laid out alike."""
    local = _local(live)
    if is_spread(stored):
        local.copy_(_local(stored))
        return
    for box in boxes_here(live):
        _at(local, box.place, box.local_shape).copy_(_at(stored, box.offset, box.local_shape))


def _at(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (at, size) in enumerate(zip(offset or [0] * len(shape), shape, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


def _local(live: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = live._local_tensor  # type: ignore[attr-defined]  # `to_local` is autograd's
    return local.detach()


def _layout(live: Any) -> tuple[object, tuple[object, ...], torch.Size]:
    return live.device_mesh, tuple(live.placements), live.shape


def _spread(local: torch.Tensor, like: Any, placements: Sequence[Any], whole: torch.Tensor | None = None) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    whole = like if whole is None else whole
    with torch.no_grad():
        return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=whole.shape, stride=tuple(whole.stride()))
