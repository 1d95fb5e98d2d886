"""Which transport a url asks for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from urllib.parse import urlsplit

from datastates.errors import InvalidInput, Unsupported

from .contract import Transport
from .memory import MemoryTransport

__all__ = ["transport_for"]

_made: dict[str, Transport] = {}


def transport_for(url: str) -> Transport:
    """The transport of a url's scheme: one instance in a process.

    :raises InvalidInput: no transport has this scheme; lists those that there are.
    :raises Unsupported: what it needs is not installed; says how to get it.
    """
    scheme = urlsplit(url).scheme
    make = _KINDS.get(scheme)
    if make is None:
        raise InvalidInput(f"{url!r} begins with no transport's name: use {' or '.join(f'{each}://…' for each in _KINDS)}")
    return _made.get(scheme) or _made.setdefault(scheme, make())  # several threads may come first at once


def _make_ucx() -> Transport:
    if importlib.util.find_spec("ucxx") is None:
        raise Unsupported("cloning over ucx:// needs UCXX, which is not installed: pip install 'datastates[cu12]' (it needs no GPU)")
    from .ucx import UcxTransport

    return UcxTransport()


_KINDS: dict[str, Callable[[], Transport]] = {"ucx": _make_ucx, "memory": MemoryTransport}

os.register_at_fork(after_in_child=_made.clear)
