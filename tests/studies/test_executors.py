"""The same plan on everybody's executors: the same lineage, bit for bit.

Run as a script this file is what ``mpiexec`` starts."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import datastates
from datastates import Repository
from datastates.errors import InvalidInput
from datastates.studies import Plan, Processes, RayExecutor, SerialExecutor, executors, explore
from tests.studies.studies import (
    EVERY_STATE,
    contents,
    counts,
    essence,
    faults,
    prefix,
    train,
    tree,
)
from tests.support.jobs import mpiexec, need_mpi

ROOT = Path(__file__).parents[2]
PLAN = tree()


def need(module: str, install: str) -> pytest.MarkDecorator:
    """Skips what needs a package that is not here."""
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"{module} is not installed: pip install {install}",
    )


Essence = Callable[[Repository, str, Plan], dict[str, Any]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of the plan in this process."""
    folder = tmp_path_factory.mktemp("expected")
    with SerialExecutor() as executor:
        explored(folder, executor)
    return folder / "runs"


@pytest.fixture(scope="module")
def expected(reference: Path) -> dict[str, Any]:
    """What the plan gives in this process."""
    with datastates.open(reference) as repo:
        return essence(repo, "s", PLAN)


def explored(folder: Path, executor: Executor, of: Essence = essence) -> dict[str, Any]:
    """What the plan gives on an executor; a second call there finds all of it done."""
    with prefix(folder / "runs", config=EVERY_STATE) as repo:
        report = explore(repo, "main", PLAN, train, executor, study="s", progress=False)
        assert report, report.errors
        before = counts(repo)
        assert explore(repo, "main", PLAN, train, executor, study="s", progress=False)
        assert counts(repo) == before
        return of(repo, "s", PLAN)


class Slots:
    """Stands for worker processes, of which so many can be started; each does what it is given
    when it is told to."""

    def __init__(self, most: int) -> None:
        self.left, self.begun = most, list[tuple[Future[Any], Callable[[], Any]]]()
        self.is_shut_down = False

    def __call__(self) -> Slots:
        if not self.left:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        self.left -= 1
        return self

    @property
    def pool(self) -> Slots:
        return self

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        if self.is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.begun.append((Future(), call))
        return self.begun[-1][0]

    def shutdown(self, *, wait: bool) -> None:
        # a broken pool is waited for, and others are begun in its place
        self.is_shut_down = not wait


def test_calls_fail_where_no_process_can_be_started_and_wait_for_one_that_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(1)
    monkeypatch.setattr(executors, "Slot", slots)
    processes = Processes(2)
    first, second = (processes.submit(pow, 2, number) for number in range(2))
    assert not second.done()
    slots.begun[0][0].set_exception(BrokenProcessPool("it died"))
    assert isinstance(first.exception(10), BrokenProcessPool)
    assert isinstance(second.exception(10), OSError)
    assert isinstance(processes.submit(pow, 2, 3).exception(10), OSError)
    slots.left = 1
    again = processes.submit(pow, 2, 3)
    slots.begun[-1][0].set_result(slots.begun[-1][1]())
    assert again.result(10) == 8
    processes.shutdown()


def test_a_shutdown_that_does_not_wait_fails_the_calls_that_have_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Slots(1)
    monkeypatch.setattr(executors, "Slot", slots)
    processes = Processes(1)
    first, second = (processes.submit(pow, 2, number) for number in range(2))
    processes.shutdown(wait=False)
    slots.begun[0][0].set_result(1)
    assert first.result(10) == 1
    assert isinstance(second.exception(10), RuntimeError)


@pytest.mark.long
@need_mpi
def test_mpi(tmp_path: Path, expected: dict[str, Any]) -> None:
    prefix(tmp_path / "runs", config=EVERY_STATE).close()
    mpiexec(3, "-m", "mpi4py.futures", __file__, str(tmp_path / "runs"), timeout_s=120)
    with datastates.open(tmp_path / "runs") as repo:
        assert essence(repo, "s", PLAN) == expected


@contextmanager
def dask(folder: Path, *, workers: int, threads: int) -> Iterator[Executor]:
    """A cluster of processes on this machine."""
    distributed: Any = importlib.import_module("distributed")
    options = {
        "dashboard_address": None,
        "silence_logs": logging.CRITICAL,
        "local_directory": str(folder),
        "processes": True,
    }
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=threads, **options
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


@pytest.mark.long
@need("distributed", "distributed")
def test_dask(tmp_path: Path, reference: Path) -> None:
    """Threads of Dask's own draw from Python's generator meanwhile."""
    with dask(tmp_path, workers=2, threads=1) as executor, datastates.open(reference) as repo:
        assert explored(tmp_path, executor, contents) == contents(repo, "s", PLAN)


@pytest.mark.long
@need("distributed", "distributed")
def test_workers_of_several_threads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(tmp_path / "faults", low="0:hang", high="0:hang").items():
        monkeypatch.setenv(key, value)
    with (
        dask(tmp_path, workers=1, threads=2) as executor,
        pytest.raises(
            InvalidInput, match=r"two variants at once in one process .*threads_per_worker=1"
        ),
    ):
        explored(tmp_path, executor)


@pytest.mark.long
@need("parsl", "parsl")
def test_parsl(tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # its interchange is a program there
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    parsl: Any = importlib.import_module("parsl")
    pools, providers = (
        importlib.import_module("parsl.concurrent"),
        importlib.import_module("parsl.providers"),
    )
    provider = providers.LocalProvider(init_blocks=1, max_blocks=1)
    workers = parsl.HighThroughputExecutor(
        label="two", max_workers_per_node=2, address="127.0.0.1", provider=provider, encrypted=False
    )
    with pools.ParslPoolExecutor(
        parsl.Config(executors=[workers], run_dir=str(tmp_path / "parsl"), usage_tracking=0)
    ) as executor:
        assert explored(tmp_path, executor) == expected


@pytest.mark.long
@need("ray", "ray")
def test_ray(tmp_path: Path, expected: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        ray.init(num_cpus=2, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}, **options)
    try:
        with RayExecutor() as executor:
            assert explored(tmp_path, executor) == expected
    finally:
        ray.shutdown()


def main(folder: str) -> None:
    """On the first rank; the others are its workers."""
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor() as executor, datastates.open(folder, config=EVERY_STATE) as repo:
        report = explore(repo, "main", PLAN, train, executor, study="s", progress=False)
    if not report:
        sys.exit(str(report.errors))


if __name__ == "__main__":
    main(sys.argv[1])
