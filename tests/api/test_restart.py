"""A server that is killed and started again while a training captures: who follows its events misses none, and gets none twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from datastates.api import Client
from datastates.lineage import Database, RefEvent
from datastates.lineage.show.events import read
from tests.api import trainer
from tests.support import warm

KILLS = 2
EACH = 40
"""Events that are followed between two kills."""


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, trainer.__file__, str(folder)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environ()) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


def serve(folder: Path, url: str) -> tuple[subprocess.Popen[str], str]:
    """The server's process, and where it listens."""
    command = [sys.executable, "-m", "datastates", "serve", url, "--repo", str(folder), "--json"]
    process = warm.Popen(command, stdout=subprocess.PIPE, text=True, env=_environ())
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"].rstrip("/")


def _environ() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")} | {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_loses_no_event_for_who_follows(tmp_path: Path) -> None:
    folder, seen = tmp_path / "runs", list[RefEvent]()
    with training(folder) as trained, ThreadPoolExecutor(1) as pool:
        process, url = serve(folder, "http://127.0.0.1:0")
        try:
            with Client(url) as client, client.events(patience_s=120) as events:
                begun_after = events.last
                for _ in range(KILLS):
                    seen += [next(events) for _ in range(EACH)]
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
                    going_on = pool.submit(lambda: [next(events) for _ in range(EACH)])
                    process, again = serve(folder, url)
                    assert again == url
                    seen += going_on.result(120)
                captured, _ = trained.communicate("")
                database = Database(f"sqlite:///{folder / 'lineage.db'}", create=False)
                with database.read() as session:
                    expected = read(session, begun_after or 0, limit=100_000).items
                database.close()
                seen += [next(events) for _ in range(len(expected) - len(seen))]
        finally:
            process.terminate()
            process.communicate()
    assert seen == list(expected)
    assert len(seen) >= 2 * KILLS * EACH
    assert int(captured) >= len(seen)
