"""Limits of variants: GPUs of their own, time, and time without progress."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from datastates import Repository
from datastates.errors import InvalidInput
from datastates.studies import (
    Job,
    Plan,
    SerialExecutor,
    Variant,
    explore,
    limits,
    worker,
)
from datastates.studies.limits import devices
from tests.studies.studies import EVERY_STATE, essence, faults, prefix, train

FOUR = Plan(tuple(Variant(name, None, 1) for name in "abcd"))
TWO = Plan((Variant("low", None, 2, {"lr": 1e-3}), Variant("low-a", "low", 1, {"seed": 1})))
P = ParamSpec("P")
T = TypeVar("T")
DEVICES = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Claims on GPUs that other tests do not see."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    limits.end_children()


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with prefix(tmp_path / "runs", config=EVERY_STATE) as opened:
        yield opened


def train_alone(job: Job) -> None:
    """Fail if another variant has the same GPU, or if this one sees another number of them."""
    assert os.environ[DEVICES] == "7"
    folder = Path(tempfile.gettempdir())
    mine = os.open(folder / "on-gpu-7", os.O_CREAT | os.O_EXCL)
    train(job)
    os.close(mine)
    (folder / "on-gpu-7").unlink()


class Threads(Executor):
    """Four workers of one process, more than there are GPUs, as engines on a cluster may have."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


@pytest.mark.long
def test_variants_that_need_a_gpu_each_take_turns_on_the_only_one(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICES, "7")
    with Threads() as executor:
        report = explore(
            repo,
            "main",
            FOUR,
            train_alone,
            executor,
            study="s",
            gpus_per_variant=1,
            retries=0,
            progress=False,
        )
    assert report, report.errors
    assert len(report.done) == 4


def test_a_gpu_is_claimed_by_one_variant_or_shared_by_as_many_as_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(DEVICES, "3,5")
    monkeypatch.setattr(limits, "_LOOK_S", 0.01)
    with devices(1) as one:
        with devices(1) as two:
            assert (one, two) == (("3",), ("5",))
            came = threading.Event()
            waiting = threading.Thread(target=_take, args=(came,))
            waiting.start()
            assert not came.wait(0.1)
        assert came.wait(30)
        waiting.join()
    with devices(2) as both:
        assert both == ("3", "5")
    with devices(0.5) as a, devices(0.5) as b, devices(0.5) as c:
        assert (a, b, c) == (("3",), ("5",), ("3",))


def _take(came: threading.Event) -> None:
    with devices(1):
        came.set()


@pytest.mark.parametrize("gpus", [2, 1.5, 0, -1, "1"])
def test_gpus_that_no_worker_has_are_refused(
    repo: Repository, monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    monkeypatch.setenv(DEVICES, "7")
    with pytest.raises(InvalidInput, match="gpus_per_variant"):
        explore(
            repo,
            "main",
            FOUR,
            train,
            SerialExecutor(),
            study="s",
            gpus_per_variant=gpus,
            progress=False,
        )


@pytest.mark.long
@pytest.mark.parametrize("how", ["hang", "block"])
def test_a_variant_that_stalls_is_named_ended_and_tried_again(
    repo: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    monkeypatch.setattr(limits, "_GRACE_S", 1.0)
    for key, value in faults(tmp_path / "faults", low=f"1:{how}").items():
        monkeypatch.setenv(key, value)
    options: dict[str, Any] = {"stall_s": 5, "progress": False}
    with caplog.at_level(logging.WARNING, "datastates.studies"):
        report = explore(repo, "main", TWO, train, SerialExecutor(), study="s", **options)
    assert report, report.errors
    assert "variant low of study s failed, it is tried again: it made no progress for 5 s" in (
        caplog.text
    )
    assert [event.reason for event in repo.reflog("s/low")] == ["capture", "capture", "branch"]
    assert explore(repo, "main", TWO, train, SerialExecutor(), study="again", progress=False)
    assert essence(repo, "s", TWO) == essence(repo, "again", TWO)


@pytest.mark.long
def test_a_variant_that_takes_too_long_fails_with_the_limit_and_its_children_are_skipped(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(tmp_path / "faults", low="1:hang!").items():
        monkeypatch.setenv(key, value)
    options: dict[str, Any] = {"timeout_s": 4, "retries": 0, "progress": False}
    report = explore(repo, "main", TWO, train, SerialExecutor(), study="s", **options)
    assert "it took more than 4 s (timeout_s), and was ended" in report.errors["low"]
    assert report["low-a"].progress == "skipped"


@pytest.mark.long
def test_a_child_that_dies_costs_its_variant_an_attempt(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(tmp_path / "faults", low="1:kill").items():
        monkeypatch.setenv(key, value)
    options: dict[str, Any] = {"timeout_s": 60, "progress": False}
    assert explore(repo, "main", TWO, train, SerialExecutor(), study="s", **options)


class Nodes(SerialExecutor):
    """Runs calls on these machines, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: list[str]) -> None:
        self._set, self.left = monkeypatch.setattr, nodes

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        node = self.left.pop(0)
        self._set(worker, "network_id", lambda: node)
        return super().submit(fn, *args, **kwargs)


@pytest.mark.long
def test_a_variant_that_stalled_is_tried_again_on_another_machine(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in faults(tmp_path / "faults", b="0:hang").items():
        monkeypatch.setenv(key, value)
    # the second machine is known from the first variant, and the first one declines the third call
    executor = Nodes(monkeypatch, ["two", "one", "one", "two"])
    plan = Plan((Variant("a", None, 1), Variant("b", None, 1)))
    options: dict[str, Any] = {"stall_s": 5, "workers": 1, "progress": False}
    assert explore(repo, "main", plan, train, executor, study="s", **options)
    assert executor.left == []
