"""The web: a server of repositories (``app``, ``serve``), and a client of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> object:
    """The client, when it is asked for: the server does without httpx."""
    if name == "Client":
        from .client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
