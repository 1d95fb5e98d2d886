"""Training scripts that are killed at given lines of their output, and what they printed and
logged."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import warm


def run(
    folder: Path, script: str, *arguments: str, kill_at: str | None = None
) -> tuple[list[str], str]:
    """Run a script as ``python FILE ARGUMENTS`` in a folder: the lines that it printed, and what it
    logged.

    ``kill_at``: the script and its workers are killed once it printed this line. A script that was
      faster ends by itself.
    """
    folder.mkdir(exist_ok=True)
    file = folder / "train.py"
    file.write_text(script)
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore:invalid escape sequence",
        str(file),
        *arguments,
    ]
    lines: list[str] = []
    with warm.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if lines[-1] == kill_at:
                    break
            else:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # by itself
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 0 if kill_at is None else -signal.SIGKILL), err
    return lines + out.splitlines(), err


def drawn(lines: Sequence[str], seed: str) -> tuple[str, str]:
    """Two lines at which to kill: one in the first third, once there is a state, and one before
    the last sixth."""
    draw, sixth = random.Random(seed), len(lines) // 6
    return lines[draw.randint(max(1, sixth), 2 * sixth)], lines[draw.randint(3 * sixth, 5 * sixth)]


def warnings(err: str) -> list[str]:
    """The lines that were logged, except those that tell where a training goes on."""
    return [
        line
        for line in err.splitlines()
        if " goes on from state " not in line and "died with their process" not in line
    ]
