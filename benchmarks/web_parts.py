"""The processes of the web benchmark: the repository and its server, trainings that capture into
it, and an empty server."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from common import out
from many_states import make

from datastates.api.app import STATIC

BARE = """
import socket, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
answer = {"uid": "0" * 24, "metrics": {f"m{n}": n / 7 for n in range(5)}, "parents": ["0" * 24], "message": None, "digest": "0" * 64}
def route(request):
    return JSONResponse(answer)
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio turns Nagle's delay off by it
listener.bind(("127.0.0.1", 0))
listener.listen(128)
print(listener.getsockname()[1], flush=True)
app = Starlette(routes=[Route("/", route)])
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])
"""


def repository(folder: Path, count: int) -> Path:
    """A repository of ``count`` states with five metrics each, which is made unless it exists.

    It is copied, not changed."""
    root = folder / f"web-{count}"
    if not (root / "lineage.db").exists():
        began, unfinished = time.monotonic(), folder / f"unfinished-{os.getpid()}"
        unfinished.mkdir(parents=True)
        make(unfinished / "lineage.db", count)
        unfinished.rename(root)
        out(
            f"built {count:,} states in {time.monotonic() - began:.0f} s,"
            f" {(root / 'lineage.db').stat().st_size >> 20} MiB"
        )
    return root


def chromium() -> str | None:
    """The path of the browser. Prints why and returns None if the page cannot be measured."""
    program = next(
        filter(
            None, map(shutil.which, ("chromium", "chromium-browser", "chromium-headless-shell"))
        ),
        None,
    )
    if importlib.util.find_spec("playwright") is None:
        why = "pip install playwright"
    elif program is None:
        why = "there is no chromium on the PATH"
    elif not (STATIC / "index.html").exists():
        why = "it is not built: make ui"
    else:
        return program
    out(f"the page was not measured: {why}")
    return None


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy that a run may change: ``runs`` in a temporary folder."""
    with tempfile.TemporaryDirectory(
        prefix="datastates-web-", dir=root.parent, ignore_cleanup_errors=True
    ) as name:
        shutil.copytree(root, Path(name) / "runs")
        yield Path(name) / "runs"


def uids(root: Path, count: int) -> list[str]:
    """Ids of states from the whole lineage."""
    connection = sqlite3.connect(root / "lineage.db")
    last = connection.execute("select max(id) from state").fetchone()[0]
    wanted = ",".join(str(1 + number * last // count) for number in range(count))
    found = [uid for (uid,) in connection.execute(f"select uid from state where id in ({wanted})")]
    connection.close()
    return found


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address of ``datastates serve`` on a repository."""
    command = [
        sys.executable,
        "-m",
        "datastates",
        "serve",
        "http://127.0.0.1:0",
        "--repo",
        str(root),
        "--json",
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")}
    with (
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process,
        ended(process),
    ):
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"]).rstrip("/")


@contextmanager
def bare() -> Iterator[str]:
    """The address of a server that returns one small JSON without any work: the floor."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", BARE], stdout=subprocess.PIPE, text=True
        ) as process,
        ended(process),
    ):
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


@contextmanager
def capturing(root: Path, *, processes: int, interval_s: float) -> Iterator[Synchronized[int]]:
    """Trainings that capture into the repository, each about every ``interval_s``. Returns the
    number of captured states."""
    context = multiprocessing.get_context("spawn")
    stop, done = context.Event(), context.Value("q", 0)
    ready = [context.Event() for _ in range(processes)]
    trainings = [
        context.Process(
            target=_train, args=(str(root), n, interval_s, stop, ready[n], done), daemon=True
        )
        for n in range(processes)
    ]
    for training in trainings:
        training.start()
    try:
        for training, each in zip(trainings, ready, strict=True):
            while not each.wait(1):
                if not training.is_alive():
                    raise SystemExit("a training ended before its first capture: see above")
        yield done
    finally:
        stop.set()
        for training in trainings:
            training.join(60)


def _train(
    root: str, number: int, interval_s: float, stop: Event, ready: Event, done: Synchronized[int]
) -> None:
    import torch

    import datastates

    torch.set_num_threads(1)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with (
        datastates.open(root, memory_bytes=64 << 20) as repo,
        repo.track(model=model, optimizer=optimizer, branch=f"training-{number}") as run,
    ):
        while not stop.is_set():
            optimizer.zero_grad()
            loss = model(torch.randn(16, 256)).square().mean()
            loss.backward()
            optimizer.step()
            value = float(loss.detach())
            run.capture(
                metrics={
                    "loss": value,
                    "val_loss": value,
                    "acc": 0.5,
                    "grad_norm": 1.0,
                    "rare": 0.1,
                }
            )
            with done.get_lock():
                done.value += 1
            ready.set()
            stop.wait(interval_s)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a process with the block, by force if necessary."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def await_server(
    url: str, process: subprocess.Popen[str], name: str, timeout_s: float = 120
) -> None:
    """Wait until another product's server responds."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(
        f"{name} does not answer at {url}: see {name.lower()}.log in the benchmark's folder"
    )
