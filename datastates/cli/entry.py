"""The entry point of the terminal. It handles Ctrl-C before all other imports."""

from __future__ import annotations

from .interrupt import is_default, leave_at_once


def main() -> None:
    """Run the terminal; the process ends with the command's exit code."""
    is_ours = is_default()
    if is_ours:
        leave_at_once()
    try:
        from .app import run

        run()
    finally:
        if is_ours:
            leave_at_once()
