"""A part whose cases end in every way; run as a program it prints how each ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from gpu.case import Case, Found, NotBuilt, Skip
from gpu.parts import Part
from gpu.running import Run, run
from gpu.where import Where

if TYPE_CHECKING:
    from gpu.place import Place

LEFT_BEHIND = Path(os.environ.get("LEFT_BEHIND", os.devnull))
"""Where a case writes the process that it started and does not end."""


def cases(place: Place) -> Sequence[Case]:
    """One of each kind, and between them cases that pass."""
    return [
        Case("works", _works),
        Case("fails", _fails),
        Case("still works", _works),
        Case("hangs", _hangs, limit_s=0.5),
        Case("dies", _dies),
        Case("is skipped", _is_skipped),
        Case("is not built", _is_not_built),
        Case("prints", _prints),
        Case("works at the end", _works),
    ]


def _works(place: Place) -> Found:
    return {"process": os.getpid()}


def _fails(place: Place) -> Found:
    raise ValueError("what is wrong\nand more of it")


def _hangs(place: Place) -> Found:
    child = subprocess.Popen(["sleep", "1000"])
    LEFT_BEHIND.write_text(str(child.pid))
    time.sleep(1000)
    return {}


def _dies(place: Place) -> Found:
    sys.stderr.write("out of something\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _is_skipped(place: Place) -> Found:
    raise Skip("says nothing here")


def _is_not_built(place: Place) -> Found:
    raise NotBuilt("nobody made it")


def _prints(place: Place) -> Found:
    print("nobody hears this")  # noqa: T201 # on purpose
    return {}


def main() -> None:
    """Run trouble; a part whose time ends before its cases do, after three seconds; and one that
    cannot be imported."""
    cut, here = "tests.gpu_run.cut", "tests.gpu_run.trouble"
    parts = [
        Part("trouble", "Trouble", here, 1),
        Part("cut", "Cut", cut, 0.05),
        Part("lost", "Lost", "tests.gpu_run.nowhere", 50),
    ]
    told: list[str] = []

    def tell(found: Run) -> None:
        told.append(found.part.name)

    found = list(run(parts, Where("cpu", is_quick=True), time.monotonic() + 3000, tell))
    ends = [{"part": each.part.name, "note": each.note, "cases": each.outcomes} for each in found]
    sys.stdout.buffer.write(msgspec.json.encode({"parts": ends, "told": told}))


if __name__ == "__main__":
    main()
