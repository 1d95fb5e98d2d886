"""Aim for comparison: its server with 200 runs, and the address of its page of runs."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import out
from web_parts import await_server, ended

RUNS = 200

FILL = """
import random, sys
from aim import Run
rng = random.Random(0)
for index in range(int(sys.argv[2])):
    run = Run(repo=sys.argv[1], experiment="benchmark", log_system_params=False, capture_terminal_logs=False, system_tracking_interval=None)
    run["lr"] = rng.random()
    for step in range(5):
        for key in ("loss", "val_loss", "acc", "grad_norm", "rare"):
            run.track(rng.random(), name=key, step=step)
    run.close()
"""


def missing(python: str) -> str | None:
    """The reason why Aim cannot be measured with this Python, or None."""
    done = subprocess.run([python, "-c", "import aim"], capture_output=True, text=True, check=False)
    return (
        None
        if done.returncode == 0
        else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    )


def page(base: str) -> tuple[str, str]:
    """The address of the runs, and the selector of a row."""
    return f"{base}/runs", ".BaseTable__row"


@contextmanager
def serving(python: str, folder: Path, count: int = RUNS) -> Iterator[str]:
    """The address of ``aim up`` with its default settings. The runs are made once a folder."""
    environ = os.environ | {
        "AIM_UI_TELEMETRY_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
    }
    root = folder / f"aim-{count}"
    if not root.exists():
        unfinished = folder / f"unfinished-aim-{os.getpid()}"
        unfinished.mkdir(parents=True)
        began = time.monotonic()
        subprocess.run(
            [python, "-m", "aim", "init", "--repo", str(unfinished), "-y"],
            check=False,
            capture_output=True,
            env=environ,
        )
        subprocess.run(
            [python, "-c", FILL, str(unfinished), str(count)],
            check=True,
            capture_output=True,
            env=environ,
        )
        unfinished.rename(root)
        out(f"Aim took {time.monotonic() - began:.0f} s for {count:,} runs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        str(Path(python).parent / "aim"),
        "up",
        "--repo",
        str(root),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (folder / "aim.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, text=True
        )
        with ended(process):
            await_server(f"http://127.0.0.1:{port}/", process, "Aim")
            yield f"http://127.0.0.1:{port}"
