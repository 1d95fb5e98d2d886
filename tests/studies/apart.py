"""Workers on other hosts, which share no disk with an explorer, and the explorer's own process.

``python -m tests.studies.apart explore ENGINE REPO PACKS WHERE`` explores with the workers of an
engine. ``… work SOCKET`` is a worker for the engine ``socket``. ``… enter FOLDER HIDDEN COMMAND``
runs a command that has a private folder for temporary files, and that sees an empty folder where
the explorer's repository is. All may run in network namespaces of their own, which a Unix socket
crosses.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ParamSpec, TypeVar

import torch

import datastates
from datastates.studies import Plan, RayExecutor, Variant, explore, sharing
from tests.studies.studies import EVERY_STATE, train, tree

P = ParamSpec("P")
T = TypeVar("T")
_NEW_MOUNTS = 0x00020000
_LIBC = ctypes.CDLL(None, use_errno=True)
PLAN = "DATASTATES_TEST_PLAN"
_KEY = b"the tests' own"


class Connected(Executor):
    """Gives calls to the workers that connect to a Unix socket. As Dask does, it gives the call of
    a worker that died to another one."""

    def __init__(self, address: str) -> None:
        self._listener = Listener(address, "AF_UNIX", authkey=_KEY)
        self._calls: queue.Queue[tuple[Future[Any], bytes]] = queue.Queue()
        threading.Thread(target=self._accept, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, pickle.dumps(partial(fn, *args, **kwargs))))
        return future

    def _accept(self) -> None:
        while True:
            threading.Thread(
                target=self._serve, args=(self._listener.accept(),), daemon=True
            ).start()

    def _serve(self, worker: Connection) -> None:
        while True:
            future, call = self._calls.get()
            try:
                worker.send_bytes(call)
                result, error = pickle.loads(worker.recv_bytes())
            except (OSError, EOFError):
                self._calls.put((future, call))
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)


def work(address: str) -> None:
    """Do what explorers at the socket give, one after the other, for ever."""
    sharing._BEAT_S, sharing._PUSH_S, sharing._LEASE_S = 0.2, 0.0, 5.0
    while True:
        try:
            with Client(address, "AF_UNIX", authkey=_KEY) as explorer:
                while True:
                    call = pickle.loads(explorer.recv_bytes())
                    done: tuple[Any, Exception | None]
                    try:
                        done = (call(), None)
                    except Exception as exc:
                        done = (None, exc)
                    explorer.send_bytes(pickle.dumps(done))
        except (OSError, EOFError):
            time.sleep(0.05)


def enter(folder: str, hidden: str, *command: str) -> None:
    """Become a command that has a private folder, and sees an empty one where ``hidden`` is."""
    _hide(folder, hidden)
    os.execvp(command[0], command)


def _hide(folder: str, hidden: str) -> None:
    os.makedirs(folder, exist_ok=True)
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    _check(_LIBC.unshare(_NEW_MOUNTS))
    for words in (["--make-rprivate", "/"], ["-t", "tmpfs", "none", hidden]):
        subprocess.run(["mount", *words], check=True)


def move(places: Any, hidden: str) -> None:
    """Move this process to the next of these hosts."""
    namespace, folder = places.get()
    join(namespace)
    _hide(folder, hidden)


def join(namespace: str) -> None:
    """Move this thread, and those that it begins, to a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        _check(_LIBC.setns(file.fileno(), 0))


def _check(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), "no other namespace")


# --- The engines ---

Where = list[tuple[str, str]]
"""The hosts of the workers: network namespaces, and private folders."""


@contextmanager
def socket(address: str) -> Iterator[Executor]:
    yield Connected(address)


@contextmanager
def dask(address: str) -> Iterator[Executor]:
    """The scheduler and its workers are there already."""
    distributed: Any = importlib.import_module("distributed")
    with distributed.Client(address) as client:
        client.wait_for_workers(2)
        yield client.get_executor()


@contextmanager
def pool(where: Where, hidden: str) -> Iterator[Executor]:
    context = multiprocessing.get_context("spawn")
    places = context.SimpleQueue()
    for place in where:
        places.put(place)
    with ProcessPoolExecutor(
        len(where), mp_context=context, initializer=move, initargs=(places, hidden)
    ) as executor:
        yield executor


@contextmanager
def mpi(where: Where, hidden: str) -> Iterator[Executor]:
    """The first rank is on the first host, and explores; the process of each other rank is a worker
    until that ends, and then exits."""
    from mpi4py import MPI
    from mpi4py.futures import MPICommExecutor

    rank = MPI.COMM_WORLD.Get_rank()
    namespace, folder = where[rank]
    join(namespace)  # MPI itself has connected its processes
    if rank > 0:
        _hide(folder, hidden)
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if isinstance(executor, Executor):
            yield executor
            return
    sys.exit()


@contextmanager
def parsl(where: Where, hidden: str) -> Iterator[Executor]:
    ours: Any = importlib.import_module("parsl")
    names = ("concurrent", "providers", "launchers")
    pools, providers, launchers = (importlib.import_module(f"parsl.{name}") for name in names)
    executors = []
    for namespace, folder in where:
        start = f"ip netns exec {namespace} {sys.executable} -m tests.studies.apart"
        launcher = launchers.WrappedLauncher(f"{start} enter {folder} {hidden}")
        provider = providers.LocalProvider(init_blocks=1, max_blocks=1, launcher=launcher)
        executors.append(
            ours.HighThroughputExecutor(
                label=namespace.replace("-", "_"),
                max_workers_per_node=1,
                address=os.environ["DATASTATES_TEST_ADDRESS"],
                provider=provider,
                encrypted=False,
            )
        )
    folder = f"{where[0][1]}-parsl"
    config = ours.Config(executors=executors, run_dir=folder, usage_tracking=0)
    with pools.ParslPoolExecutor(config) as executor:
        yield executor


@contextmanager
def ray(address: str) -> Iterator[Executor]:
    """The cluster is there already."""
    theirs: Any = importlib.import_module("ray")
    theirs.init(address, log_to_driver=False)
    with RayExecutor() as executor:
        yield executor


def plan() -> Plan:
    """The plan that is explored: the tests' tree, or 24 variants in three generations."""
    if PLAN not in os.environ:
        return tree()
    first = [Variant(f"r{i}", None, 2, {"lr": 1e-3 * 3**i}) for i in range(4)]
    second = [Variant(f"r{i}-{k}", f"r{i}", 2, {"seed": k}) for i in range(4) for k in range(2)]
    third = [
        Variant(f"{each.name}-{k}", each.name, 1, {"seed": 7 + k})
        for index, each in enumerate(second)
        for k in range(2 if index < 4 else 1)
    ]
    return Plan((*first, *second, *third))


def main(engine: str, url: str, packs: str, where: str) -> None:
    """Explore the tree in the repository's study ``s`` with the engine's workers. ``where`` is an
    address, or the workers' hosts in JSON."""
    made: dict[str, Callable[..., AbstractContextManager[Executor]]]
    made = {"socket": socket, "dask": dask, "pool": pool, "mpi": mpi, "parsl": parsl}
    made["ray"] = ray
    given = (where,) if engine in ("socket", "dask", "ray") else (json.loads(where), packs or url)
    with (
        made[engine](*given) as executor,
        datastates.open(url, packs=packs or None, config=EVERY_STATE) as repo,
    ):
        report = explore(repo, "main", plan(), train, executor, study="s", progress=False)
    logging.getLogger(__name__).info("%s", report.errors or "done")
    sys.stderr.flush()
    if engine != "mpi":
        os._exit(0 if report else 1)


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        enter(*sys.argv[2:])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("datastates.studies").setLevel(logging.DEBUG)
    torch.set_num_threads(1)
    (work if sys.argv[1] == "work" else main)(*sys.argv[2:])
