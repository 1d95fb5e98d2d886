"""What one rank copies of a state that several ranks hold: its shares of each tensor, and where they lie in its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence

import torch

from datastates.content.division import Box, Holding, digest_of, divide
from datastates.content.geometry import dense_strides, dtype_name, memory_key
from datastates.content.manifest import TensorSpec
from datastates.content.tree import Leaf
from datastates.errors import Unsupported
from datastates.objects.placements import holdings_of, is_spread, local_of

__all__ = ["Shares", "bytes_at", "shares_of", "tie_of"]

_Sign = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


class Shares:
    """The shares of ``rank`` of ``size``. ``specs`` are the whole tensors, without a shard; ``boxes`` are this rank's boxes of each.

    ``ties`` are equal for tensors that are the same memory on every rank; of such tensors the first is divided. ``digest`` is the same
    on all ranks if they divide alike. ``apart`` are ids of tensors that may differ between ranks. These are not pieced together from
    several ranks; the first rank that holds one stores it.
    """

    def __init__(self, leaves: Sequence[Leaf], rank: int, size: int, apart: Collection[int], members: Sequence[int] | None) -> None:
        self._size, self._members = size, members
        self._known = [leaf.tensor for leaf in leaves]
        self._signs = [*map(_sign, self._known)]
        self._held = [_holdings(leaf, size, members) for leaf in leaves]
        self.ties = [*map(tie_of, self._known)]
        self.specs = [_spec(leaf, held[0]) for leaf, held in zip(leaves, self._held, strict=True)]
        first: dict[Hashable, int] = {}
        divided = [
            () if tie is not None and first.setdefault(tie, index) != index else _by_the_first(held) if id(leaf.tensor) in apart else held
            for index, (leaf, tie, held) in enumerate(zip(leaves, self.ties, self._held, strict=True))
        ]
        self.boxes = divide(divided, size)[rank]
        self.digest = digest_of(divided)

    def are_still(self, leaves: Sequence[Leaf]) -> bool:
        """Whether the leaves lie as before, including those of which this rank copies nothing."""
        for index, leaf in enumerate(leaves):
            tensor = leaf.tensor
            if _sign(tensor) != self._signs[index]:
                return False
            if tensor is not self._known[index]:
                if holdings_of(tensor, self._size, self._members) != self._held[index]:
                    return False
                self._known[index] = tensor
        return True


def shares_of(
    leaves: Sequence[Leaf], rank: int, size: int, apart: Collection[int] = (), members: Sequence[int] | None = None
) -> Shares | None:
    """What ``rank`` of ``size`` copies; None if that is every whole tensor. ``apart`` is as for ``Shares``, ``members`` as for
    ``holdings_of``.

    :raises Unsupported: a rank outside the group holds something of a tensor, or a tensor has no value; names it.
    """
    is_divided = size > 1 or any(is_spread(leaf.tensor) or leaf.tensor.is_meta for leaf in leaves)
    return Shares(leaves, rank, size, apart, members) if is_divided else None


def bytes_at(tensor: torch.Tensor, box: Box, strides: Sequence[int]) -> tuple[torch.Tensor, bool]:
    """The stored bytes of a share, flat, and whether they are a view of the tensor and not a copy. ``strides`` are those of the whole
    tensor."""
    found = local_of(tensor)
    assert found is not None
    local = found.detach()
    if 0 in box.shape:
        return torch.empty(0, dtype=torch.uint8, device=local.device), True
    sizes = [side if stride else 1 for side, stride in zip(box.shape, strides, strict=True)]
    view = local[tuple([slice(start, start + side) for start, side in zip(box.place, sizes, strict=True)])]
    packed = dense_strides(box.shape, strides)
    lies_so = all(side == 1 or stride == wanted for side, stride, wanted in zip(sizes, view.stride(), packed, strict=True))
    if lies_so and not view.is_conj() and not view.is_neg():
        return view.as_strided((view.numel(),), (1,)).view(torch.uint8), True
    dense = torch.empty(view.numel() * view.element_size(), dtype=torch.uint8, device=view.device)
    dense.view(view.dtype).as_strided(sizes, packed).copy_(view)
    return dense, False


def tie_of(tensor: torch.Tensor) -> Hashable | None:
    """A key that is equal for two tensors that are the same memory. For a DTensor it does not use the local tensors, since these may be
    empty on a rank."""
    return id(tensor) if is_spread(tensor) else memory_key(tensor)


def _holdings(leaf: Leaf, size: int, members: Sequence[int] | None) -> Sequence[Holding]:
    try:
        held = holdings_of(leaf.tensor, size, members)
    except Unsupported as exc:
        raise Unsupported(f"{leaf.path}: {exc}") from exc
    beyond = max(owner for holding in held for owner in holding.owners)
    if beyond >= size:
        raise Unsupported(
            f"{leaf.path} is held by rank {beyond}, and states of this training have {size} part{'s' if size > 1 else ''}: "
            "track it with the group of all its ranks, repo.track(..., group=…)"
        )
    return held


def _by_the_first(held: Sequence[Holding]) -> Sequence[Holding]:
    return [dataclasses.replace(holding, owners=holding.owners[:1]) for holding in held]


def _sign(tensor: torch.Tensor) -> _Sign:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _spec(leaf: Leaf, held: Holding) -> TensorSpec:
    return TensorSpec(leaf.path, dtype_name(leaf.tensor.dtype), held.shape, held.strides, None, leaf.tensor.requires_grad, ())
