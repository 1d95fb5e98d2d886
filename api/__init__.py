"""The web: a server of repositories (``app``, ``serve``)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .app import create_app
    from .routing import Scope
    from .serve import WebServer, serve_in_thread

__all__ = ["Scope", "WebServer", "create_app", "serve_in_thread"]

_HOMES = {"Scope": "routing", "WebServer": "serve", "create_app": "app", "serve_in_thread": "serve"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that importing the package alone loads
    neither FastAPI nor torch."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
