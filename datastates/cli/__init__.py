"""The terminal: ``datastates COMMAND``. One file a group of commands; each parses, calls one function, renders."""

from __future__ import annotations

from .app import app, main

__all__ = ["app", "main"]
