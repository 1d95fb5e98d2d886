"""Checks a state's numbers, before anything is restored, for those that would spoil a training that goes on from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from datastates.capture.snapshots import Snapshot, tensors_of
from datastates.content.tree import flatten
from datastates.objects.adapters import Adapted, parts
from datastates.objects.names import join
from datastates.store.reading import read_tree, specs_of
from datastates.store.tier import Reader

__all__ = ["is_sound"]


def is_sound(reader: Reader, adapted: Adapted, near: Sequence[Snapshot] = ()) -> bool:
    """Whether in this state no module or optimizer of ``adapted`` holds a NaN, and no parameter or optimizer an infinity.

    A buffer may hold an infinity, as a mask does. Other tracked objects are not checked: NaN may mean something there. Tensors that the
    snapshots ``near`` hold are checked there.
    """
    optimizers = {path for path, found in parts(adapted.objects) if isinstance(found, Optimizer)}
    models = adapted.models()
    parameters = {join(path, name) for path, model in models for name, leaf in model.tree().items() if isinstance(leaf, nn.Parameter)}
    finite = optimizers | parameters
    watched = finite | {path for path, _ in models}
    specs = specs_of(reader)
    given = {index: tensor for index, tensor in tensors_of(near, specs).items() if _is_under(specs[index].path, watched)}
    tree = read_tree(reader, wants=lambda path: _is_under(path, watched), is_borrowing=True, given=given, specs=specs)
    return all(_is_good(leaf.tensor, may_be_infinite=not _is_under(leaf.path, finite)) for leaf in flatten(tree).tensors)


def _is_under(path: str, roots: set[str]) -> bool:
    """Whether ``path`` is one of ``roots`` or lies under one."""
    parts = path.split("/")
    return any("/".join(parts[:length]) in roots for length in range(1, len(parts) + 1))


def _is_good(tensor: torch.Tensor, *, may_be_infinite: bool) -> bool:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return True
    if tensor.is_floating_point() and tensor.element_size() < 2:
        tensor = tensor.float()  # torch has no isfinite for eight bits
    return not bool(tensor.isnan().any()) if may_be_infinite else bool(tensor.isfinite().all())
