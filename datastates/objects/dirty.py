"""Which live tensors are half old, half new, because a clone or a restore into them began and did not end.

Tensors are identified by identity, weakly. ``is_any`` costs nothing while nothing is dirty, so every capture calls it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from datastates.errors import Dirty

if TYPE_CHECKING:
    import torch

__all__ = ["are_marked", "check", "clean", "is_any", "mark"]


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    tensor: weakref.ref[torch.Tensor]
    path: str
    by: object


_marked: dict[int, _Mark] = {}
_lock = threading.Lock()


def is_any() -> bool:
    """Whether any tensor of this process is dirty."""
    return bool(_marked)


def mark(tensors: Iterable[tuple[str, torch.Tensor]], by: object) -> None:
    """Mark tensors, by path, as neither old nor new from here on; ``by`` is the writer."""
    with _lock:
        for path, tensor in tensors:
            _marked[id(tensor)] = _Mark(weakref.ref(tensor, partial(_forget, id(tensor))), path, by)


def are_marked(tensors: Iterable[torch.Tensor], by: object) -> bool:
    """Whether all these tensors are dirty by nobody but ``by``: what it wrote to them is still there."""
    with _lock:
        return all((mark := _marked.get(id(tensor))) is not None and mark.by is by for tensor in tensors)


def clean(tensors: Iterable[torch.Tensor]) -> None:
    """Mark these tensors as whole again."""
    if not _marked:
        return
    with _lock:
        for tensor in tensors:
            _marked.pop(id(tensor), None)


def check(tensors: Iterable[torch.Tensor]) -> None:
    """Raise ``Dirty`` if one of these tensors is dirty.

    :raises Dirty: names those that are.
    """
    if not _marked:
        return
    found = [mark.path for tensor in tensors if (mark := _marked.get(id(tensor))) is not None]
    if found:
        names = ", ".join(sorted({path.split("/", 1)[0] for path in found}))
        raise Dirty(
            f"{names}: half old, half new, as a clone or a restore into {len(found)} tensors ({found[0]}, …) did not end: "
            "resume the clone, clone again, or restore a state"
        )


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the thread that held it is not in this process


def _forget(key: int, gone: weakref.ref[torch.Tensor], marked: dict[int, _Mark] = _marked) -> None:
    """Forget a collected tensor: nobody marks it any more. Uses no globals, which a module loses as the interpreter ends."""
    mark = marked.get(key)
    if mark is not None and mark.tensor is gone:
        marked.pop(key, None)


os.register_at_fork(after_in_child=_after_fork)
