"""SIGTERM while the interpreter is ending already."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import datastates

SCRIPT = """
import atexit, sys, threading, time
import torch, datastates

def wait():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("ending", flush=True)
    time.sleep(60)

repo = datastates.open("runs")
weight = torch.zeros(3)
run = repo.track(weight=weight)
run.capture()
if sys.argv[1] == "handler":
    atexit.register(wait)
else:
    threading.Thread(target=wait).start()
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["handler", "thread"])
def test_a_signal_at_exit_keeps_the_head_prints_nothing_and_ends_the_process(
    tmp_path: Path, how: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, how]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (-signal.SIGTERM, "")
    with datastates.open(tmp_path / "runs") as repo:
        assert repo.load("main")["weight"].tolist() == [0, 0, 0]
