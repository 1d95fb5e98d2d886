"""Repositories that serve and clone in one process, and the trainings whose states they hold."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import datastates
from datastates import Config, Repository, Server, Status
from datastates.lineage.states import Edge, EdgeKind
from datastates.lineage.write import record
from tests.support.lineages import told

MIB = 1 << 20
SLOT = 4 * MIB


class Made:
    """Repositories that nothing writes to disk, and servers; all end with the test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.count = folder, stack, 0

    def repo(
        self, where: str | Path | None = None, *, slots: int = 32, **options: Any
    ) -> Repository:
        self.count += 1
        config = Config(memory_bytes=slots * SLOT, durable_interval_s=None)
        return self.stack.enter_context(
            datastates.open(where or self.folder / f"repo-{self.count}", config=config, **options)
        )

    def peer(self, server: Server | list[str], **options: Any) -> datastates.Peer:
        return self.stack.enter_context(
            datastates.connect(server if isinstance(server, list) else server.url, **options)
        )


def memory_free(repo: Repository) -> int:
    """The bytes of the arena that nothing holds."""
    assert repo.core.arena is not None
    return repo.core.arena.available


class Training:
    """A model whose layers are a chunk or less each, its optimizer, and steps that draw random
    numbers; and whoever tracks it."""

    run: datastates.Tracker  # held here: a tracker that is dropped writes its head

    def __init__(self, seed: int, width: int = 256) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> float:
        loss = self.model(torch.randn(4, self.width)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def bits(self) -> list[bytes]:
        """Every byte of weights and of the optimizer's state."""
        found = []
        for value in self.model.parameters():
            found.append(value.detach().numpy().tobytes())
            found += [
                each.numpy().tobytes() for each in self.optimizer.state.get(value, {}).values()
            ]
        return found


def train(
    repo: Repository, training: Training, count: int = 3, **options: Any
) -> datastates.Tracker:
    """Take ``count`` steps, and a state after each."""
    run = training.run = repo.track(**training.objects, **options)
    for _ in range(count):
        loss = training.step()
        run.capture(metrics={"loss": loss}, attributes={"kind": "toy"}).wait()
    return run


def grown(
    repo: Repository,
    *parents: str,
    count: int = 1,
    branch: str | None = None,
    kind: EdgeKind | None = None,
) -> list[str]:
    """States without bytes, one upon the other; the first one has ``parents``."""
    uids: list[str] = []
    with repo.core.database.write() as session:
        for number in range(count):
            above = [uids[-1]] if uids else list(parents)
            uids.append(os.urandom(12).hex())
            first = None if kind is not None else next(iter(above), None)
            edges = tuple(Edge(parent, kind, 0.5) for parent in above) if kind is not None else ()
            new = told(
                uids[-1],
                os.urandom(32).hex(),
                first,
                branch,
                None,
                number,
                edges=edges,
                status=Status.EVICTED,
            )
            record.record(session, new)
    return uids


class Paused:
    """``on_progress`` that keeps the transport's thread at the first chunk until ``go``."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.began.set()
        assert self.go.wait(60)
