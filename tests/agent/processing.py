"""Processors that tests run in a process of the agent: a module that another process imports."""

from __future__ import annotations

import os
from pathlib import Path

from datastates import CapturedState, Processor

NOTES = "DATASTATES_TEST_NOTES"
"""The environment variable with the file to which ``Noting`` writes."""


class Noting(Processor):
    """Writes a line for each state: its process, step, branch, and the sum of its weight. Fails for
    step 2, and ends its process for step 4."""

    name = "noting"
    where = "agent"

    def process(self, captured: CapturedState, /) -> None:
        state = captured.state
        if state.step == 2:
            raise ValueError("step 2 is refused")
        if state.step == 4:
            os._exit(1)
        total = float(captured.tree("weight")["weight"].sum())
        self._note(f"{os.getpid()} {state.step} {captured.branch} {total}")

    def close(self) -> None:
        self._note(f"{os.getpid()} closed")

    def _note(self, line: str) -> None:
        with Path(os.environ[NOTES]).open("a") as file:
            file.write(f"{line}\n")


class Given(Noting):
    """Needs an argument."""

    def __init__(self, path: str) -> None:
        self.path = path
