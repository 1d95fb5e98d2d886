"""Clones of a trained state between hosts, each a network namespace: into live tensors and
repositories, in a chain, over a cut link.

Run as a script this file is a process on one of those hosts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import datastates
from datastates import Config, DatastatesError, Peer, Transfer
from datastates.errors import Disconnected
from datastates.transport import same_host
from tests.support.hosts import Host, hosts, need_hosts
from tests.transport.test_hosts import IN_TIME_S, RATE, TIMEOUT_S, Job, say

TOKEN = b"all of these hosts know it"
WIDTH = 2048
STATE_BYTES = 3 * 4 * WIDTH * WIDTH  # weights and both moments of AdamW, all but


class Training:
    """A model and its optimizer; where it stands is its next losses."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step()

    def step(self) -> str:
        loss = self.model(torch.ones(2, WIDTH)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item()).hex()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


# What the processes do


def serve(host: str) -> None:
    """Train, serve, and say the losses of going on."""
    training = Training(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        datastates.open(folder, config=Config(durable_interval_s=None)) as repo,
    ):
        repo.track(**training.objects).capture()
        with repo.serve(f"ucx://{host}:0", token=TOKEN, timeout_s=TIMEOUT_S) as server:
            say("serves", server.url)
            say("losses", *(training.step() for _ in range(3)))
            sys.stdin.readline()


def receive(host: str) -> None:
    """Clone as told: ``live|atomic|chain|repo URL`` or ``resume URL``; say what came of it and
    how training goes on."""
    training, kept = Training(2), list[Transfer]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        repo = stack.enter_context(datastates.open(folder, memory_bytes=256 << 20))
        for line in sys.stdin:
            order, url = line.split()
            began = time.monotonic()
            try:
                with datastates.connect(url, token=TOKEN, timeout_s=TIMEOUT_S) as peer:
                    moved = take(order, peer, training, repo, kept)
            except DatastatesError as exc:
                say("failed", type(exc).__name__, round(time.monotonic() - began, 2))
            else:
                say("took", moved, *(training.step() for _ in range(3)))
        if kept:
            kept[0].close()


def take(
    order: str, peer: Peer, training: Training, repo: datastates.Repository, kept: list[Transfer]
) -> int:
    """One clone; the bytes that it moved."""
    seen = list[int]()

    def on_progress(done: int, total: int) -> None:
        if not seen and 4 * done > total:
            seen.append(done)
            say("begun")

    if order == "repo":
        cloned = peer.clone("main", repo=repo, on_progress=on_progress)
        repo.restore(cloned.state.uid, objects=training.objects)
        return cloned.bytes_moved
    if order == "resume":
        return kept[0].resume(peer, on_progress=on_progress).wait().bytes_moved
    is_atomic, is_chain = order == "atomic", order == "chain"
    transfer = peer.begin_clone(
        "main",
        objects=training.objects,
        atomic=is_atomic,
        chain=is_chain,
        resumable=not is_chain,
        on_progress=on_progress,
    )
    kept.append(transfer)
    return transfer.wait().bytes_moved


# The tests


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    need_hosts()
    pytest.importorskip("ucxx", reason="UCXX is not installed")
    monkeypatch.setenv(same_host.SWITCH, "0")  # these hosts share their pids, as no others do
    with hosts(3) as made:
        yield made


def start(host: Host, role: str) -> Job:
    return Job(host, role, "tests.transport.clones.test_clone_hosts")


def source(host: Host, rate: str = RATE) -> tuple[Job, str, list[str]]:
    """A training on this host, which sends no faster than ``rate``; its url and its next losses."""
    host.shape(rate)
    job = start(host, "serve")
    return job, job.hear("serves")[0], job.hear("losses")


@pytest.mark.parametrize("order", ["live", "repo"])
def test_a_training_on_another_host_goes_on_from_a_clone_bit_for_bit(
    three: list[Host], order: str
) -> None:
    server, url, losses = source(three[0])
    receiver = start(three[1], "receive")
    before = three[0].sent_bytes()

    receiver.tell(order, url)

    receiver.hear("begun")
    moved, *own = receiver.hear("took")
    assert own == losses
    assert STATE_BYTES <= int(moved) < 1.05 * STATE_BYTES
    assert three[0].sent_bytes() - before > STATE_BYTES  # over the wire indeed
    receiver.end()
    server.end()


def test_two_receivers_in_a_chain_take_one_copy_from_the_source(three: list[Host]) -> None:
    # slow enough for the second to come while the first receives
    server, url, losses = source(three[0], "150mbit")
    receivers = [start(host, "receive") for host in three[1:]]
    before = three[0].sent_bytes()

    for receiver in receivers:
        receiver.tell("chain", url)
        receiver.hear("begun")

    assert [receiver.hear("took")[1:] for receiver in receivers] == [losses, losses]
    assert (three[0].sent_bytes() - before) / STATE_BYTES < 1.06
    for job in (*reversed(receivers), server):
        job.end()


@pytest.mark.parametrize("order", ["live", "atomic"])
def test_a_clone_whose_link_was_cut_is_resumed_once_it_is_mended(
    three: list[Host], order: str
) -> None:
    server, url, losses = source(three[0])
    receiver = start(three[1], "receive")
    receiver.tell(order, url)
    receiver.hear("begun")

    three[0].cut()
    began = time.monotonic()
    error, *_ = receiver.hear("failed")
    took_s = time.monotonic() - began
    three[0].mend()
    receiver.tell("resume", url)

    assert error == (Disconnected.__name__ if order == "atomic" else "Dirty")
    assert took_s < IN_TIME_S
    receiver.hear("begun")
    moved, *own = receiver.hear("took")
    assert own == losses
    assert 0 < int(moved) < 0.8 * STATE_BYTES
    receiver.end()
    server.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    {"serve": serve, "receive": receive}[sys.argv[1]](sys.argv[2])
