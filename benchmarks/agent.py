"""The cost of an agent, and what it saves: training steps with captured states, and restarts after
``kill -9``. States are in private memory, or in memory that the agent holds, with huge or small
pages.

    python benchmarks/agent.py [--states 100k 6M …] [--seconds S] [--rounds N] [--quick]
    python benchmarks/agent.py --restart [--rounds N] [--quick]

Each training runs in a separate process, which computes on one thread (``kept.Training``). The
methods take turns in each round. ``captured`` writes nothing to disk, ``durable`` writes every
state. ``over`` compares the time of all steps with the same steps of ``plain``. ``blocked`` is the
time in ``capture``, ``CPU`` the processor time of the training process, both for each step.
``agent`` is the processor time of the agent and of the process that writes, for each GB on disk.

``--restart`` kills a training whose state has 1.25 GB, and starts it again. The time is from the
call of ``track`` until the live tensors have the state. The state comes from the memory that the
agent holds, from the newest durable state, or by ``torch.load`` from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import machine, out, short, spread, table
from kept import Job, Training, calibrate

import datastates
from datastates import Config
from datastates.config import AgentMode, parse_bytes
from datastates.maintenance import core
from datastates.storage.shared_memory import Pages, make_shared_memory

STEPS_MS = {"100k": 0.9, "6M": 18.0, "60M": 100.0}
MEMORY = {"inline": AgentMode.INLINE, "huge": AgentMode.PROCESS, "small": AgentMode.PROCESS}
RESTARTS = ("agent", "durable", "torch.load")
RESTART_BYTES = "1250M"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", nargs="+", choices=STEPS_MS, default=list(STEPS_MS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small states, once")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, job = json.loads(arguments.child)
        out(json.dumps(CHILDREN[name](Job(**job))))
        return 0
    out(machine())
    rounds = 1 if arguments.quick else arguments.rounds
    folder = Path(tempfile.mkdtemp(prefix="datastates-benchmark-"))
    with tempfile.TemporaryDirectory(prefix="ds-", dir="/tmp") as sockets:
        os.environ["DATASTATES_AGENT_DIR"] = sockets
        try:
            if arguments.restart:
                out(restarts(folder, "60M" if arguments.quick else RESTART_BYTES, rounds))
            else:
                chosen = ["100k"] if arguments.quick else arguments.states
                seconds = 1.0 if arguments.quick else arguments.seconds
                for size in chosen:
                    out(steps(folder, size, STEPS_MS[size], seconds, rounds))
        finally:
            shutil.rmtree(folder)
    return 0


# --- steps ---


def steps(folder: Path, size: str, step_ms: float, seconds: float, rounds: int) -> str:
    state_bytes = parse_bytes(size)
    found = _run("calibrate", Job("plain", state_bytes, 0, 0, str(folder)))
    products = max(0, round((step_ms / 1e3 - found["update_s"]) / found["product_s"]))
    count = max(10, round(seconds * 1e3 / step_ms))
    methods = ["plain", *(f"{kept} {name}" for kept in ("captured", "durable") for name in MEMORY)]
    runs: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            place = folder / "runs"
            job = Job(method, state_bytes, count, products, str(place))
            runs[method].append(_run(method.split()[0], job))
            shutil.rmtree(place, ignore_errors=True)
    plain = [run["wall_s"] for run in runs["plain"]]
    rows = [
        [
            method,
            short(statistics.median(run["wall_s"] for run in each) / count * 1e3),
            spread([run["wall_s"] / base - 1 for run, base in zip(each, plain, strict=True)], 100),
            spread([run.get("blocked_s", 0.0) / count for run in each], 1e3),
            spread([run["cpu_s"] / count for run in each], 1e3),
            spread([run["agent_s_per_gb"] for run in each]) if "agent_s_per_gb" in each[0] else "",
        ]
        for method, each in runs.items()
    ]
    header = ["method", "step, ms", "over, %", "blocked, ms", "CPU, ms", "agent, CPU s/GB"]
    return f"\nstates of {size}, {count} steps, {rounds} rounds\n" + table(header, rows)


def plain(job: Job) -> dict[str, float]:
    training = Training(job)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(job.steps):
        training.step()
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def train(job: Job) -> dict[str, float]:
    kept, memory = job.method.split()
    training, blocked = Training(job), 0.0
    with datastates.open(job.folder, config=_config(memory, is_durable=kept == "durable")) as repo:
        run = repo.track(model=training.model, optimizer=training.optimizer)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(job.steps):
            training.step()
            before = time.perf_counter()
            run.capture()
            blocked += time.perf_counter() - before
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        repo.flush()
        found = {"wall_s": wall, "cpu_s": used, "blocked_s": blocked}
        if memory != "inline" and (written := repo.stats().bytes_stored):
            found["agent_s_per_gb"] = _agent_cpu_s() / written * 1e9
    return found


def _agent_cpu_s() -> float:
    """The processor time of the agent, and of the processes that write and report for it."""
    mine, ticks = os.environ["DATASTATES_AGENT_DIR"].encode(), 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_agent = b"datastates.agent." in (path / "cmdline").read_bytes()
            if is_agent and mine in (path / "environ").read_bytes():
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _config(memory: str, *, is_durable: bool) -> Config:
    if memory == "small":
        core.make_shared_memory = partial(  # type: ignore[attr-defined]
            make_shared_memory, pages=Pages.SMALL
        )
    return Config(
        agent=MEMORY[memory],
        durable_every=1 if is_durable else None,
        durable_interval_s=None,
        retention="all",
    )


# --- restarts ---


def restarts(folder: Path, size: str, rounds: int) -> str:
    found: dict[str, list[float]] = {method: [] for method in RESTARTS}
    for _ in range(rounds):
        for method in RESTARTS:
            place = folder / "restart"
            place.mkdir()
            job = Job(method, parse_bytes(size), 0, 0, str(place))
            _run("killed", job)
            found[method].append(_run("restarted", job)["restored_s"])
            shutil.rmtree(place)
    rows = [[method, spread(seconds)] for method, seconds in found.items()]
    return f"\na state of {size}, {rounds} rounds\n" + table(["from", "restored after, s"], rows)


def killed(job: Job) -> dict[str, float]:
    training = Training(job)
    training.step()
    if job.method == "torch.load":
        torch.save(training.state, Path(job.folder) / "state.pt")
        return {}
    is_durable = job.method == "durable"
    config = _config("inline" if is_durable else "huge", is_durable=is_durable)
    repo = datastates.open(job.folder, config=config)
    run = repo.track(model=training.model, optimizer=training.optimizer)
    run.capture().wait("durable" if is_durable else "captured")
    out("{}")
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def restarted(job: Job) -> dict[str, float]:
    training = Training(job)
    training.step()  # its optimizer has its tensors, as when a training resumes in place
    if job.method == "torch.load":
        began = time.perf_counter()
        state: dict[str, Any] = torch.load(Path(job.folder) / "state.pt", weights_only=True)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        return {"restored_s": time.perf_counter() - began}
    config = _config("inline" if job.method == "durable" else "huge", is_durable=False)
    with datastates.open(job.folder, config=config) as repo:
        began = time.perf_counter()
        run = repo.track(model=training.model, optimizer=training.optimizer)
        seconds = time.perf_counter() - began
        assert run.resumed_from is not None, "it continues"
        assert run.resumed_from.status == ("durable" if job.method == "durable" else "captured")
    return {"restored_s": seconds}


CHILDREN = {
    "calibrate": calibrate,
    "plain": plain,
    "captured": train,
    "durable": train,
    "killed": killed,
    "restarted": restarted,
}


def _run(name: str, job: Job) -> dict[str, float]:
    """The result of a child process, which may have killed itself."""
    job_fields = {field: getattr(job, field) for field in Job.__slots__}
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps([name, job_fields])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
