"""Chunks that cross are digested by the device that has them, in time and rightly: on devices
that do everything late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import datastates
from datastates.config import Config
from datastates.engine import commit, device_copies
from datastates.engine.copy import DeviceCopies
from datastates.engine.handle import Work
from datastates.errors import Torn
from datastates.repository import Repository
from datastates.state.device_digest import Digester
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from tests.support.late import LateDevices, Lateness
from tests.support.planting import without

STEPS = 4
OTHERS = "had other digests there than on the host"


class Net(nn.Module):
    """128 KiB, one chunk, all of which is copied behind the fence."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = (
            nn.Parameter(torch.randn(128, 128, generator=generator)) for _ in range(2)
        )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (self.a @ self.b).square().mean().backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def operators_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "has_kernels", lambda tensor: True)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path / "runs", config=Config(memory_bytes=16 * CHUNK_BYTES, durable_interval_s=None)
    ) as opened:
        yield opened


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[int, bytes]]:
    """What the device had digested of each capture."""
    found, process = list[Mapping[int, bytes]](), commit.digest

    def noting(work: Work, arena: Arena) -> None:
        found.append(dict(work.known))
        process(work, arena)

    monkeypatch.setattr(commit, "digest", noting)
    return found


def train(repo: Repository, late: LateDevices) -> None:
    """Capture some steps; each state is what was live then, and has the digests of its bytes."""
    with late.running():
        model = late.put(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with repo.track(rng=False, model=model, optimizer=optimizer) as run:
            captures, lived = [], []
            for _ in range(STEPS):
                model.step(optimizer)
                lived.append(
                    {name: each.detach().clone() for name, each in model.named_parameters()}
                )
                captures.append(run.capture())
            late.schedule.catch_up()
            for capture, each in zip(captures, lived, strict=True):
                capture.wait(timeout_s=20)
                found = repo.load(capture.uid)["model"]  # every byte is checked against its digest
                assert all(torch.equal(found[name], value) for name, value in each.items())


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: str(each.value))
def test_the_host_digests_no_chunk_that_the_device_has_digested(
    lateness: Lateness,
    repo: Repository,
    known: list[Mapping[int, bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(repo, LateDevices(lateness))
    assert [len(each) for each in known] == [1] * STEPS
    assert not caplog.records


PLANTED = {
    "digests do not wait for the training": (
        Lateness.COMPUTE,
        "devices().wait(stream, crossing.begun)",
    ),
    "the update and the lanes do not wait for the digests": (
        Lateness.COPIES,
        "devices().wait(crossing.side, devices().mark(stream))",
    ),
}


@pytest.mark.parametrize(("lateness", "line"), PLANTED.values(), ids=PLANTED)
def test_a_wait_that_is_taken_out_is_noticed(
    lateness: Lateness,
    line: str,
    repo: Repository,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    without(monkeypatch, DeviceCopies, "_digest", line)
    train(repo, LateDevices(lateness))
    assert OTHERS in caplog.text


@pytest.mark.parametrize("is_ready", [True, False], ids=["digests wrongly", "is not ready"])
def test_the_host_digests_if_the_device_does_not(
    is_ready: bool,
    repo: Repository,
    known: list[Mapping[int, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lanes = Digester.lanes
    monkeypatch.setattr(Digester, "lanes", lambda self: lanes(self) + 1)
    monkeypatch.setattr(device_copies, "is_ready", lambda tensor: is_ready)
    train(repo, LateDevices(Lateness.COPIES))
    assert not any(known)
    assert caplog.text.count(OTHERS) == is_ready


def test_memory_that_is_short_on_the_device_fails_no_capture(
    repo: Repository,
    known: list[Mapping[int, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(self: Digester) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Digester, "lanes", full)
    train(repo, LateDevices(Lateness.COPIES))
    assert not any(known)
    assert caplog.text.count("no room") == 1


def test_a_torn_first_capture_says_nothing_of_the_device(
    repo: Repository, known: list[Mapping[int, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    late = LateDevices(Lateness.COPIES)
    with late.running():
        model = late.put(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with repo.track(rng=False, model=model, optimizer=optimizer) as run:
            capture = run.capture()
            with torch.no_grad():
                model.a.add_(1)
            late.schedule.catch_up()
            with pytest.raises(Torn):
                capture.wait(timeout_s=20)
    assert OTHERS not in caplog.text
