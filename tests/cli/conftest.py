"""A repository made through the lineage's own functions, and the terminal run on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from datastates.cli.app import app
from datastates.lineage import Database, Edge, EdgeKind, Run, Status
from datastates.lineage.write import record, refs, replicas, runs
from datastates.state.digest import wrap
from datastates.state.manifest import VERSION, Origin
from datastates.storage.pack import manifest_name
from tests.support.lineages import told

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = Run(
    "a" * 24,
    "node7",
    "ann",
    42,
    ("train.py", "--lr", "0.1"),
    "c0ffee" * 6,
    True,
    {"lr": 0.1},
    {"torch": "2.13.0"},
    BEGAN,
)

Invoke = Callable[..., "Done"]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.out)

    @property
    def lines(self) -> list[Any]:
        return [msgspec.json.decode(line) for line in self.out.splitlines()]


def uid(prefix: str, step: int) -> str:
    return f"{prefix}{step:x}".ljust(24, "0")


def build_lineage(root: Path) -> None:
    """``main`` 1-8, tagged ``warm`` at 3; ``fork`` goes 4-6 from there; 8 is a soup with the
    fork's head; 2 was evicted."""
    root.mkdir(parents=True)
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.write() as session:
        runs.start(session, RUN)
        parent = None
        for step in range(1, 8):
            metrics = {"loss": 1 / step} | ({"val_loss": 2 / step} if step % 2 == 0 else {})
            parent = _record(
                session,
                uid("1", step),
                parent,
                "main",
                step,
                metrics=metrics,
                attributes={"lr": 0.1, "kind": "base"},
            )
        refs.tag(session, "warm", uid("1", 3), message="end of the prefix")
        refs.branch(session, "fork", uid("1", 3))
        parent = uid("1", 3)
        for step in range(4, 7):
            parent = _record(
                session,
                uid("f", step),
                parent,
                "fork",
                step,
                metrics={"loss": 1.5 / step},
                message="other\norder",
            )
        soup = (Edge(parent, EdgeKind.SOUP, 0.5),)
        _record(session, uid("1", 8), uid("1", 7), "main", 8, edges=soup)
        replicas.mark(
            session, uid("1", 3), Status.DURABLE, tier="local", node="node7", bytes=1 << 10
        )
        replicas.evict(session, [uid("1", 2)], tier="memory", node="node7")
    database.close()
    (root / "packs").mkdir()
    needed = [["p.safetensors", 4096, 0, b""]]
    origin = Origin(uid("1", 3), (), (), None, None, 3, 0, 0, None, {}, {})
    # as much of a manifest as these commands look at
    body = msgspec.msgpack.encode([VERSION, "d" * 64, origin, None, needed])
    (root / "packs" / manifest_name(uid("1", 3), 0)).write_bytes(wrap(VERSION, body))


def _record(session: Any, uid: str, parent: str | None, branch: str, step: int, **more: Any) -> str:
    moment = BEGAN + timedelta(minutes=step)
    new = told(
        uid,
        "d" * 64,
        parent,
        branch,
        RUN.uid,
        step,
        created_at=moment,
        bytes_total=1 << 20,
        bytes_new=1 << 10,
        node="node7",
        **more,
    )
    return record.record(session, new).uid


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a repository with a lineage and no payload."""
    build_lineage(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command in an empty folder's parent of ``runs``, as a program reads it."""
    for name in ("DATASTATES_REPO", "DATASTATES_PACKS", "DATASTATES_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Done:
        result = CliRunner().invoke(
            app, [str(argument) for argument in arguments], catch_exceptions=False
        )
        return Done(result.exit_code, result.stdout, result.stderr)

    return call
