"""What captures of a training on a device cost its thread: the first, a later one, and one that
becomes durable."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates
from datastates import Config, Repository
from datastates.engine.handle import Capture
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.durable_files import supports_direct
from datastates.storage.pack import PAGE
from datastates.system.devices import devices
from tests.maintenance.test_restore_plans import counted, launched, made, tensors
from tests.support.late import LateDevices, Lateness

CONFIG = Config(memory_bytes=64 * CHUNK_BYTES, durable_interval_s=None)
BACKGROUND = {"datastates-crossing", "datastates-arena"}


@pytest.fixture
def late() -> Iterator[LateDevices]:
    device = LateDevices(Lateness.BOTH)
    with device.running():
        yield device


@pytest.fixture
def repo(tmp_path: Path, late: LateDevices) -> Iterator[Repository]:
    with datastates.open(tmp_path, config=CONFIG) as opened:
        yield opened


class Driver:
    """Registers memory when it ``may_begin``, and notes for each registration the thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.has_been_asked, self.may_begin = threading.Event(), threading.Event()
        self.has_ended = threading.Event()
        self._register = LateDevices.register
        monkeypatch.setattr(LateDevices, "register", self.register)

    def register(self, device: torch.device, address: int, length: int) -> None:
        self.threads.append(threading.current_thread().name)
        self.has_been_asked.set()
        assert self.may_begin.wait(30)
        late = devices()
        assert isinstance(late, LateDevices)
        self._register(late, device, address, length)
        self.has_ended.set()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The thread and the operator of each launch."""
    return launched(monkeypatch)


def of_ours(calls: list[str]) -> int:
    """How many of the calls are of this package."""
    root = os.path.dirname(datastates.__file__) + os.sep
    return sum(each.startswith(root) for each in calls)


def test_captures_of_592_small_tensors_make_few_calls_and_launches(
    repo: Repository, late: LateDevices, launches: list[tuple[str, str]]
) -> None:
    model, optimizer = made(late.put)
    assert len(tensors(model, optimizer)) == 592
    found: dict[str, int] = {}
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        for name in ("first", "second", "later", "durable"):
            late.schedule.be_late_again()
            launches.clear()
            calls: list[str] = []
            with counted(calls):
                capture = run.capture()
            late.schedule.catch_up()
            with counted(calls if name == "durable" else []):
                capture.wait("durable" if name == "durable" else "captured", timeout_s=60)
            found[name] = of_ours(calls)
            assert launches == [
                (threading.current_thread().name, "aten.cat.default"),
                ("datastates-crossing", "aten._foreach_copy_.default"),
            ]
    assert found["first"] <= 27_000, "about 44 calls a tensor, for the plan"
    assert found["second"] <= 1_800, "3 calls a tensor"
    assert found["later"] <= 400, "no calls for each tensor"
    assert found["durable"] <= 500, "and a few to wait"


def test_captures_that_are_kept_on_the_device_make_few_calls_and_launches(
    tmp_path: Path, late: LateDevices, launches: list[tuple[str, str]]
) -> None:
    config = replace(CONFIG, device_bytes=64 * CHUNK_BYTES)
    model, optimizer = made(late.put)
    with (
        datastates.open(tmp_path, config=config) as repo,
        repo.track(rng=False, model=model, optimizer=optimizer) as run,
    ):
        for _ in range(4):
            late.schedule.be_late_again()
            launches.clear()
            calls: list[str] = []
            with counted(calls):
                capture = run.capture()
            late.schedule.catch_up()
            capture.wait(timeout_s=60)
    assert of_ours(calls) <= 450
    here = threading.current_thread().name
    assert launches == [
        (here, "aten.new_empty.default"),
        (here, "aten.new_zeros.default"),
        (here, "aten.cat.out"),
        ("datastates-crossing", "aten._foreach_copy_.default"),
    ]


def test_memory_for_the_first_capture_is_registered_before_it(
    repo: Repository, late: LateDevices, driver: Driver
) -> None:
    model, optimizer = made(late.put)
    driver.may_begin.set()
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        assert driver.has_ended.wait(30)
        ready = dict(late.registered)
        assert sum(ready.values()) >= sum(each.nbytes for each in tensors(model, optimizer))
        run.capture().wait(timeout_s=60)
        assert dict(list(late.registered.items())[: len(ready)]) == ready
    assert set(driver.threads) <= BACKGROUND


def test_a_first_capture_does_not_wait_for_memory_that_is_being_registered(
    repo: Repository, late: LateDevices, driver: Driver
) -> None:
    model, optimizer = made(late.put)
    expected = [each.clone() for each in tensors(model, optimizer)]
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        assert driver.has_been_asked.wait(30)
        captures: list[Capture] = [run.capture() for _ in range(3)]
        assert not late.registered
        driver.may_begin.set()
        run.fence()
        for each in tensors(model, optimizer):
            each.detach().zero_()
        late.schedule.catch_up()
        for capture in captures:
            capture.wait(timeout_s=60)
    assert sum(late.registered.values()) >= 3 * sum(each.nbytes for each in expected)
    assert set(driver.threads) <= BACKGROUND
    repo.restore(captures[0].uid, model=model, optimizer=optimizer)
    late.schedule.catch_up()
    assert all(map(torch.equal, tensors(model, optimizer), expected))


def test_nothing_is_prepared_for_a_training_on_the_cpu(
    repo: Repository, late: LateDevices, driver: Driver
) -> None:
    model, optimizer = made()
    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        run.capture().wait(timeout_s=60)
        assert "datastates-crossing" not in {thread.name for thread in threading.enumerate()}
    assert not driver.threads
    assert not late.reached


def test_durable_writes_go_from_registered_memory_to_the_disk(
    repo: Repository, late: LateDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the page cache, without a copy: only the header, and the last page of each chunk, are
    in other memory."""
    if not supports_direct(tmp_path):
        pytest.skip("no direct I/O here")
    model, optimizer = made(late.put)
    written: list[tuple[bool, bool, int]] = []
    write = os.pwritev

    def noted(fd: int, views: list[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            written.extend((is_direct, is_slot(view), view.nbytes) for view in views)
        return write(fd, views, offset)

    def is_slot(view: memoryview) -> bool:
        first: Any = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        last = first + view.nbytes
        held = late.registered.items()
        return any(start <= first and last <= start + size for start, size in held)

    with repo.track(rng=False, model=model, optimizer=optimizer) as run:
        capture = run.capture()
        late.schedule.catch_up()
        capture.wait("captured", timeout_s=60)
        monkeypatch.setattr(os, "pwritev", noted)
        capture.wait("durable", timeout_s=60)
    size = sum(each.nbytes for each in tensors(model, optimizer))
    assert all(is_direct for is_direct, *_ in written)
    assert sum(length for _, is_in_slot, length in written if is_in_slot) > size - PAGE
    copied = [length for _, is_in_slot, length in written if not is_in_slot]
    assert len(copied) == 2
    assert sum(copied) <= size // 100
