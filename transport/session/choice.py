"""Chooses a session's data plane, from what each side can use and was asked to use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from datastates.errors import InvalidInput, Unsupported
from datastates.transport.protocol import Ready

__all__ = ["Offer", "agree", "has_rdma", "has_system_ucx", "offer"]

Offer = tuple[tuple[str, ...], str]
"""The planes that a side can use, and the one that it wishes for, if any."""


def offer(planes: Sequence[str], scheme: str, data: str, *, is_secret: bool = False) -> Offer:
    """The offer that a side makes in ``Ready``, from its transport's planes and what its user asked for (``config.Data``). ``ipc`` is
    offered only if it was asked for. ``is_secret`` means that there is TLS, which UCX lacks: UCX is then chosen only if a side asks for it.

    :raises InvalidInput: UCX was asked for, and the url rules it out.
    :raises Unsupported: UCX was asked for, and is not installed.
    """
    if data == "ipc":
        if "tcp" not in planes:
            raise InvalidInput('data="ipc" was asked for at a url that is of no process of its own: write tcp://')
        return ("tcp", "ipc"), ""
    if "ucx" not in planes:
        if data == "ucx" and scheme == "tcp":
            raise InvalidInput('data="ucx" was asked for at a url that begins with tcp://, which never uses UCX: write ucx://')
        return tuple(planes), ""
    if data == "tcp":
        return tuple(each for each in planes if each != "ucx"), ""
    if importlib.util.find_spec("ucxx") is None:
        if data == "ucx":
            raise Unsupported("data='ucx' needs UCXX, which is not installed: pip install 'datastates[cu13]' (it needs no GPU), or use tcp")
        return tuple(each for each in planes if each != "ucx"), ""
    if data == "ucx":
        return tuple(planes), "ucx"
    return tuple(planes), "rdma" if has_rdma() and not is_secret else ""


def agree(own: Ready, its: Ready, peer: str) -> str:
    """The plane on which both sides agree, each deciding by itself.

    :raises Unsupported: they have none in common, or one side insists on UCX, which the other cannot use.
    """
    common = [each for each in own.planes if each in its.planes]
    if "ucx" in (own.wish, its.wish) and "ucx" not in common:
        asking, other = ("this side", peer) if own.wish == "ucx" else (peer, "this side")
        raise Unsupported(
            f"{asking} was told data='ucx', and {other} cannot use UCX (not installed, data='tcp', or a tcp:// url): agree on one"
        )
    if "ipc" in common:
        return "ipc"
    if "ucx" in common and ("ucx" in (own.wish, its.wish) or own.wish == its.wish == "rdma"):
        return "ucx"
    left = [each for each in common if each != "ucx"]
    if not left:
        raise Unsupported(
            f"{peer} moves bytes over {', '.join(its.planes) or 'nothing'}, this side over {', '.join(own.planes) or 'nothing'}"
        )
    return left[0]


def has_rdma(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether there is an adapter that the loaded UCX can use: the one that comes with UCXX supports none."""
    try:
        return has_system_ucx() and any(devices.iterdir())
    except OSError:
        return False


def has_system_ucx() -> bool:
    """Whether the system's UCX is loaded, and not the one that comes with UCXX."""
    return os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() in {"1", "true", "yes", "on"}
