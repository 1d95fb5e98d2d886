"""Which live tensors are half old, half new: a clone into them began and did not end.

Tensors are known by identity, weakly. ``is_any`` costs nothing to ask while nothing is dirty, so every capture asks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial

import torch

from .errors import Dirty

__all__ = ["check", "clean", "is_any", "mark"]

_SHOWN = 3

_marked: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
_lock = threading.RLock()  # a tensor may be collected, and its mark with it, while the lock is held


def is_any() -> bool:
    """Whether any tensor of this process is dirty."""
    return bool(_marked)


def mark(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """From here on these tensors, by path, hold neither what they did nor what they shall."""
    with _lock:
        for path, tensor in tensors:
            _marked[id(tensor)] = (weakref.ref(tensor, partial(_forget, id(tensor))), path)


def clean(tensors: Iterable[torch.Tensor]) -> None:
    """These tensors are whole again."""
    if not _marked:
        return
    with _lock:
        for tensor in tensors:
            _marked.pop(id(tensor), None)


def check(tensors: Iterable[torch.Tensor]) -> None:
    """Nothing, if none of these tensors is dirty.

    :raises Dirty: names those that are.
    """
    if not _marked:
        return
    found = [entry[1] for tensor in tensors if (entry := _marked.get(id(tensor))) is not None]
    if found:
        shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        raise Dirty(
            f"{len(found)} tensors are half old, half new, as a clone into them did not end ({shown}): "
            "resume the clone, clone again, or restore a state into them"
        )


def _forget(key: int, gone: weakref.ref[torch.Tensor]) -> None:
    with _lock:
        entry = _marked.get(key)
        if entry is not None and entry[0] is gone:
            del _marked[key]
