"""Processes that print ``ready``, wait for a line, and then all do the same at the same moment."""

from __future__ import annotations

from collections.abc import Sequence
from subprocess import Popen


def release(children: Sequence[Popen[str]]) -> None:
    """Have them begin once all are ready."""
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()


def errors_of(children: Sequence[Popen[str]]) -> list[tuple[str, int]]:
    """Let them go once all are ready, and wait: what each wrote to its standard error, and its
    exit status."""
    release(children)
    return [(child.communicate()[1], child.returncode) for child in children]
