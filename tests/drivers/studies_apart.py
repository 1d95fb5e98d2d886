"""A study of 24 variants in three generations, on workers that share no disk with their explorer.

``python -m tests.drivers.studies_apart [dask|ray|socket]`` makes three hosts. One has the explorer,
and two have a worker each, with private folders. A worker is killed in the middle and its folder is
deleted, and then the explorer is killed and started again. The results must equal those of one
process. The bytes that were received are shown, and the least that any study must move. Root on
Linux only.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import datastates
from datastates import Repository
from datastates.studies import SerialExecutor, explore
from tests.studies.apart import PLAN, plan
from tests.studies.studies import EVERY_STATE, WIDTH, prefix, results, train
from tests.support.hosts import Host, hosts

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class Study:
    """An explorer on the first host, and a worker on each other one."""

    def __init__(
        self, folder: Path, hosts: list[Host], url: str, packs: str = "", **environ: str
    ) -> None:
        self._folder, self._hosts, self._url, self._packs = folder, hosts, url, packs
        ours = {"DATASTATES_NEAR": "0", "PYTHONPATH": str(ROOT)}
        # Parsl's programs are there
        ours["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environ = os.environ | ours | environ
        self.workers: list[subprocess.Popen[str]] = []

    @property
    def places(self) -> list[tuple[str, str]]:
        """The workers' hosts, and their private folders."""
        return [
            (host.namespace, str(self._folder / f"host-{index}"))
            for index, host in enumerate(self._hosts[1:], 1)
        ]

    def work(self, index: int, *command: str) -> subprocess.Popen[str]:
        """A worker on a host: one for the socket, unless there is another command."""
        private, hidden = self.places[index - 1][1], self._packs or self._url
        ours = (sys.executable, "-m", "tests.studies.apart", "work", self._folder / "socket")
        return self._start(index, "enter", private, hidden, *(command or ours))

    def explore(self, engine: str = "socket", where: str = "") -> subprocess.Popen[str]:
        """An explorer, with the workers of an engine."""
        if engine == "socket":
            (self._folder / "socket").unlink(missing_ok=True)
            where = str(self._folder / "socket")
        return self._start(0, "explore", engine, self._url, self._packs, where)

    def log(self, of: str) -> str:
        """What a process said: ``explore-0``, ``enter-1``."""
        return (self._folder / f"{of}.log").read_text()

    def _start(self, index: int, kind: str, *words: object) -> subprocess.Popen[str]:
        command = (sys.executable, "-m", "tests.studies.apart", kind, *words)
        return self.start(index, kind, *command)

    def start(self, index: int, kind: str, *command: object) -> subprocess.Popen[str]:
        """A process on a host."""
        with (self._folder / f"{kind}-{index}.log").open("a") as log:
            options = {"cwd": ROOT, "env": self._environ, "stdout": log, "stderr": log}
            return self._hosts[index].start(*command, **options)

    def start_dask(self) -> str:
        """Start Dask's scheduler on the first host, and a worker on each other one."""
        program = (sys.executable, "-m", "distributed.cli.dask_scheduler")
        host = self._hosts[0].address
        self.start(0, "scheduler", *program, "--host", host, "--port", "8786", "--no-dashboard")
        for index in range(1, len(self._hosts)):
            self.workers.append(self.work_for_dask(index))
        return f"tcp://{host}:8786"

    def work_for_dask(self, index: int) -> subprocess.Popen[str]:
        """A Dask worker on a host."""
        program = (sys.executable, "-m", "distributed.cli.dask_worker")
        options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", "60")
        return self.work(index, *program, f"tcp://{self._hosts[0].address}:8786", *options)

    def start_ray(self) -> str:
        """Start Ray on each host."""
        address = f"{self._hosts[0].address}:6379"
        ray = str(Path(sys.executable).parent / "ray")
        options = ("--object-store-memory", "100000000", "--disable-usage-stats", "--block")
        head = ("--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false")
        ip = "--node-ip-address"
        self.start(0, "ray", ray, "start", *head, ip, self._hosts[0].address, *options)
        time.sleep(10)
        for index in range(1, len(self._hosts)):
            self.workers.append(self.work_for_ray(index))
        return address

    def work_for_ray(self, index: int) -> subprocess.Popen[str]:
        """A node of Ray's on a host."""
        ray, host = str(Path(sys.executable).parent / "ray"), self._hosts[index].address
        options = ("--object-store-memory", "100000000", "--disable-usage-stats", "--block")
        where = ("--address", f"{self._hosts[0].address}:6379", "--node-ip-address", host)
        return self.work(index, ray, "start", *where, "--num-cpus", "1", *options)


@dataclass(frozen=True)
class Moved:
    """The bytes that all hosts received, and the least that they had to receive."""

    received: int
    least: int


def run(folder: Path, engine: str, *, patience_s: float = 900) -> Moved:
    """Run the study with its faults; raises if a result differs."""
    os.environ |= {PLAN: "24", WIDTH: "2048"}
    with prefix(folder / "local") as repo, SerialExecutor() as executor:
        assert explore(repo, "main", plan(), train, executor, study="s", progress=False)
        expected = results(repo, "s", plan())
    prefix(folder / "runs", config=EVERY_STATE).close()
    with hosts(3) as made:
        study = Study(folder, made, str(folder / "runs"))
        restart: Callable[[int], object] = study.work
        where = ""
        if engine == "dask":
            where, restart = study.start_dask(), study.work_for_dask
        elif engine == "ray":
            where, restart = study.start_ray(), study.work_for_ray
        else:
            study.workers += [study.work(1), study.work(2)]
        before = sum(host.received_bytes() for host in made)
        exploring = study.explore(engine, where)
        with datastates.open(folder / "runs") as repo:
            wait_for_results(repo, 5, patience_s)
            study.workers[0].send_signal(signal.SIGKILL)
            study.workers[0].wait(30)
            shutil.rmtree(study.places[0][1], ignore_errors=True)
            restart(1)
            wait_for_results(repo, 12, patience_s)
            exploring.kill()
            exploring.wait(30)
        again = study.explore(engine, where)
        assert again.wait(patience_s) == 0, study.log("explore-0")
        moved = sum(host.received_bytes() for host in made) - before
        with datastates.open(folder / "runs") as repo:
            assert results(repo, "s", plan()) == expected
            return Moved(moved, least_bytes(repo, study.log("explore-0")))


def least_bytes(repo: Repository, log: str) -> int:
    """Each result moves to the explorer once, and each starting state to the worker that forks
    from it, unless the worker has it. The explorer's log has where starting states came from."""
    starts = len(re.findall(r"variant \S+ began from peer", log))
    return (len(plan()) + starts) * repo.state("start/s").bytes_total


def wait_for_results(repo: Repository, count: int, patience_s: float) -> None:
    """Wait until so many variants are finished."""
    deadline = time.monotonic() + patience_s
    while sum(ref.name.startswith("done/") for ref in repo.refs()) < count:
        assert time.monotonic() < deadline, f"{count} variants did not finish"
        time.sleep(0.1)


def wait_for(get: Callable[[], T], error: type[Exception]) -> T:
    """What ``get`` returns once it raises no such error."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return get()
        except error:
            assert time.monotonic() < deadline
            time.sleep(0.05)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", nargs="?", default="dask", choices=["dask", "ray", "socket"])
    with tempfile.TemporaryDirectory() as name:
        moved = run(Path(name), parser.parse_args().engine)
    sys.stdout.write(
        f"24 of 24 variants equal the local study. {moved.received / 2**20:.1f} MiB were received,"
        f" and at least {moved.least / 2**20:.1f} MiB had to be\n"
    )
