"""The terminal: ``datastates COMMAND``. One file for each group of commands; each command
parses, calls one function, and renders."""

from __future__ import annotations

from .entry import main as main
