"""MLflow for comparison: a server with 2,000 runs, the requests to its API, and the address of its
page."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import out
from web_load import Asked
from web_parts import await_server, ended

RUNS = 2000
EXPERIMENT = "1"

FILL = """
import sys, random
from mlflow import MlflowClient
from mlflow.entities import Metric
client = MlflowClient("sqlite:///" + sys.argv[1])
experiment = client.create_experiment("benchmark")
assert experiment == "1", experiment
rng = random.Random(0)
for index in range(int(sys.argv[2])):
    run = client.create_run(experiment)
    client.log_batch(run.info.run_id, [Metric(k, rng.random(), 0, index) for k in ("loss", "val_loss", "acc", "grad_norm", "rare")])
    client.set_terminated(run.info.run_id)
"""


def missing(python: str) -> str | None:
    """The reason why MLflow cannot be measured with this Python, or None."""
    done = subprocess.run(
        [python, "-c", "import mlflow.server"], capture_output=True, text=True, check=False
    )
    return (
        None
        if done.returncode == 0
        else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    )


@contextmanager
def serving(python: str, folder: Path, count: int = RUNS) -> Iterator[str]:
    """The address of ``mlflow server`` with its default settings, on SQLite. The runs are made once
    for each folder."""
    path = folder / f"mlflow-{count}.db"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        began = time.monotonic()
        subprocess.run(
            [python, "-c", FILL, str(unfinished), str(count)], check=True, capture_output=True
        )
        unfinished.rename(path)
        out(f"MLflow took {time.monotonic() - began:.0f} s for {count:,} runs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        python,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{path}",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (folder / "mlflow.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, text=True)
        with ended(process):
            await_server(f"http://127.0.0.1:{port}/health", process, "MLflow")
            yield f"http://127.0.0.1:{port}"


def page(base: str) -> tuple[str, str]:
    """The address of the runs, and the selector of a row."""
    return f"{base}/#/experiments/{EXPERIMENT}/runs", ".ag-row"


def requests(base: str) -> dict[str, list[Asked]]:
    """By the name of the most similar route of datastates."""
    run = json.loads(_post(base, {"experiment_ids": [EXPERIMENT], "max_results": 1}))["runs"][0][
        "info"
    ]["run_id"]
    return {
        "search, rare filter": [_search(filter="metrics.rare > 0.998", max_results=50)],
        "search, sorted": [
            _search(
                filter="metrics.loss < 0.1 and metrics.acc > 0.5",
                order_by=["metrics.loss ASC"],
                max_results=50,
            )
        ],
        "newest states": [_search(max_results=50)],
        "state": [Asked(f"/api/2.0/mlflow/runs/get?run_id={run}")],
    }


def _search(**query: object) -> Asked:
    return Asked(
        "/api/2.0/mlflow/runs/search",
        json.dumps({"experiment_ids": [EXPERIMENT], **query}).encode(),
    )


def _post(base: str, query: dict[str, object]) -> bytes:
    asked = urllib.request.Request(
        f"{base}/api/2.0/mlflow/runs/search",
        json.dumps(query).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked) as answer:
        body: bytes = answer.read()
        return body
