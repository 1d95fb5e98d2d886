"""Which transport a url asks for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from urllib.parse import urlsplit

from datastates.errors import InvalidInput, Unavailable, Unsupported

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
    if scheme not in _made:
        _made[scheme] = make()
    return _made[scheme]


def _make_ucx() -> Transport:
    if importlib.util.find_spec("ucxx") is None:
        raise Unsupported("cloning over ucx:// needs UCXX, which is not installed: pip install 'datastates[cu12]' (it needs no GPU)")
    try:
        from .ucx import UcxTransport  # UCXX takes a while to import, and is optional
    except (ImportError, OSError) as exc:
        raise Unavailable(
            f"UCX cannot be loaded ({exc}): if MPI brought another UCX into this process, import datastates.groups before mpi4py.MPI, "
            "or let both use the site's (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1)"
        ) from exc
    return UcxTransport()


_KINDS: dict[str, Callable[[], Transport]] = {"ucx": _make_ucx, "memory": MemoryTransport}

os.register_at_fork(after_in_child=_made.clear)
