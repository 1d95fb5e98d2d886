"""The terminal: ``datastates COMMAND``. One file for each group of commands; each command
parses, calls one function, and renders."""

from __future__ import annotations

from .interrupt import is_default, leave_at_once


def main() -> None:
    """Run the terminal; the process ends with the command's exit code.

    Ctrl-C is handled before all other imports."""
    is_ours = is_default()
    if is_ours:
        leave_at_once()
    try:
        from .app import run

        run()
    finally:
        if is_ours:
            leave_at_once()
