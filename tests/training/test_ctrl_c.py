"""Ctrl-C in a script: one line instead of a traceback, and the training can be resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, datastates
model = torch.nn.Linear(2, 2)
repo = datastates.open("runs", memory_bytes=32 << 20)
run = repo.track(model=model, branch="tried")
with run if "with" in sys.argv else repo:
    for step in range(3):
        run.capture(metrics={"loss": 1.0})
    print("captured", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["with"], "interrupted: branch tried is saved and can be resumed, at step 3\n"),
        (["with", "traceback"], "Traceback (most recent call last):\n"),
        ([], "interrupted"),
    ],
)
def test_ctrl_c_ends_a_script_with_a_line(tmp_path: Path, words: list[str], line: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=tmp_path,
        env={"DATASTATES_TRACEBACK": "1"} if "traceback" in words else {},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "captured\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGINT
    assert err.startswith(line)
    assert (len(err.splitlines()) > 1) == ("traceback" in words)
