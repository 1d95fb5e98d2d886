"""The terminal: ``datastates COMMAND``. One file a group of commands; each parses, calls one function, renders."""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
