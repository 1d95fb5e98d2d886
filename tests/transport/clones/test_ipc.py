"""Clones from the memory of one process to a device of another, which the source fills by
itself: on late devices of two processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.errors import Corrupt, Dirty, Disconnected, Unavailable, Unsupported
from datastates.system.devices import Mark, Stream
from datastates.transport import fetch, ipc, same_host
from tests.support import warm
from tests.support.counted import counted
from tests.support.late import LateDevices, Lateness
from tests.support.late.digests import digesting_at_once
from tests.transport.worlds import posted

Tensors = Sequence[torch.Tensor]
TOKEN = "a token of these tests"
CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(1100, 1100), nn.BatchNorm1d(1100), nn.Linear(1100, 1100), nn.Linear(64, 4)
    )


class _None(set[int]):
    """No device is in use, whatever is still done on one."""

    def add(self, element: int) -> None:
        pass


def serve(lateness: str, fault: str, data: str) -> None:
    """The other process: captures a state of its device, and serves it until it is ended."""
    torch.set_num_threads(1)
    late, trained = LateDevices(Lateness[lateness]), model(1)
    late.schedule.patience_s = 0.01
    late.put(trained)
    copy, copies = ipc._copy, list[int]()

    def wrong(stream: Stream, into: Tensors, data: Tensors, ready: Sequence[Mark]) -> None:
        copies.append(1)
        copy(stream, into, data, ready)
        if fault == "lies":
            into[0][len(into[0]) // 2] ^= 1
        elif fault in ("dies", "stops") and len(copies) >= 2:
            signal.raise_signal(signal.SIGKILL if fault == "dies" else signal.SIGSTOP)

    ipc._copy = wrong
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repo = stack.enter_context(datastates.open(folder / "runs", config=CONFIG))
        stack.enter_context(late.running())
        capture = stack.enter_context(repo.track(model=trained, rng=False)).capture()
        late.schedule.catch_up()
        capture.wait(timeout_s=30)
        if fault == "uses no device":
            late.reached = _None()
        server = stack.enter_context(
            repo.serve("tcp://127.0.0.1:0", token=TOKEN, data=data, timeout_s=2.0)
        )
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


@pytest.fixture
def lateness() -> Lateness:
    return Lateness.BOTH


@pytest.fixture
def fault() -> str:
    return ""


@pytest.fixture
def data() -> str:
    return "ipc"


@pytest.fixture
def url(lateness: Lateness, fault: str, data: str) -> Iterator[str]:
    given = (lateness.name, fault, data)
    command = [
        sys.executable,
        "-c",
        f"from tests.transport.clones.test_ipc import serve; serve{given!r}",
    ]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture(autouse=True)
def way(monkeypatch: pytest.MonkeyPatch) -> str:
    """Near processes know each other, but no chunk is read from the other one's memory."""
    monkeypatch.setenv(same_host.SWITCH, "1")
    monkeypatch.setattr(
        same_host.LocalChunks, "receive", lambda *_: pytest.fail("a chunk was read")
    )
    return "near"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy out of what the other process can write."""
    return counted(
        monkeypatch,
        "datastates.transport.ipc._copy",
        lambda stream, into, *_: sum(each.numel() for each in into),
    )


def clone(url: str, lateness: Lateness, *, atomic: bool = False, data: str = "ipc") -> nn.Module:
    late, here = LateDevices(lateness), model(2)
    late.schedule.patience_s = 0.01
    late.put(here)
    with digesting_at_once(), late.running(), torch.no_grad():
        for parameter in here.parameters():
            parameter.add_(1)
        try:
            with datastates.connect(url, token=TOKEN, data=data, timeout_s=2.0) as peer:
                peer.clone("main", model=here, atomic=atomic)
            for parameter in here.parameters():
                parameter.mul_(2)
        finally:
            late.schedule.catch_up()
    return here


def is_doubled(here: nn.Module) -> bool:
    expected = model(1)
    for parameter in expected.parameters():
        parameter.data.mul_(2)
    return all(map(torch.equal, here.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_a_source_puts_chunks_onto_the_device_and_they_land_in_order(
    url: str, lateness: Lateness, copies: list[int]
) -> None:
    here = clone(url, lateness)
    assert is_doubled(here)
    assert sum(copies) > 9 << 20


def test_chunks_for_a_device_are_announced_and_copied_together(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state has 11 chunks. The buffer on the device takes 8 together."""
    monkeypatch.setattr(fetch, "_UNITS", 1)
    launched, messages = list[int](), posted(monkeypatch)
    counted(monkeypatch, "datastates.transport.ipc._copy", found=launched)
    assert is_doubled(clone(url, Lateness.BOTH))
    kinds = [type(message).__name__ for message in messages]
    assert [kinds.count(name) for name in ("Want", "Room", "Land")] == [1, 1, 1]
    assert len(launched) == 1


def test_what_the_source_writes_afterwards_changes_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, copy = list[int](), ipc._copy

    def and_then_other(stream: Stream, into: Tensors, data: Tensors, ready: Sequence[Mark]) -> None:
        copy(stream, into, data, ready)
        for each in data:
            each.fill_(9)  # as if by the source: landing memory
        copied.append(1)

    monkeypatch.setattr(ipc, "_copy", and_then_other)
    assert is_doubled(clone(url, Lateness.BOTH))
    assert copied


@pytest.mark.parametrize("fault", ["lies"])
def test_a_source_that_lies_is_refused(url: str, copies: list[int]) -> None:
    with pytest.raises((Corrupt, Dirty), match="failed its digest both times"):
        clone(url, Lateness.BOTH)
    assert copies


@pytest.mark.parametrize("fault", ["dies", "stops"])
def test_a_source_that_goes_away_is_noticed_and_what_came_is_dirty(
    url: str, copies: list[int]
) -> None:
    with pytest.raises((Disconnected, Dirty)):
        clone(url, Lateness.BOTH)


@pytest.mark.parametrize("fault", ["uses no device"])
def test_a_source_that_does_not_use_the_device_makes_no_context_there(url: str, fault: str) -> None:
    with pytest.raises((Unavailable, Dirty), match=r"does not use.*data='auto'"):
        clone(url, Lateness.BOTH)


@pytest.mark.parametrize("data", ["auto"])
def test_a_source_that_did_not_say_so_puts_nothing_there(
    url: str, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert is_doubled(clone(url, Lateness.BOTH))
    assert not copies


def test_a_clone_that_is_atomic_goes_by_the_host(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    copied = counted(monkeypatch, "datastates.transport.ipc._copy")
    assert is_doubled(clone(url, Lateness.BOTH, atomic=True))
    assert not copied


def test_a_clone_into_a_repository_goes_by_the_host(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    copied = counted(monkeypatch, "datastates.transport.ipc._copy")
    opened, connected = (
        datastates.open(tmp_path / "runs", config=CONFIG),
        datastates.connect(url, token=TOKEN, data="ipc", timeout_s=2.0),
    )
    with opened as own, connected as peer:
        found = own.load(peer.clone("main", repo=own).state.uid)["model"]
    assert not copied
    assert all(torch.equal(value, found[name]) for name, value in model(1).state_dict().items())


def test_a_process_that_is_not_near_is_told_what_to_do(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(same_host.SWITCH, "0")
    with pytest.raises(Unsupported, match="data='auto'"):
        clone(url, Lateness.BOTH)
