"""A server that is killed and started again while a training captures: who follows its events
misses none, and gets none twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import httpx
import msgspec
import pytest

from datastates.lineage import Database, RefEvent
from datastates.lineage.views.detail import read
from tests.api import trainer
from tests.support import warm

PATIENCE_S = 120.0

KILLS = 2
EACH = 40
"""Events that are followed between two kills."""


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, trainer.__file__, str(folder)]
    with warm.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environ()
    ) as process:
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
    return {
        key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
    } | {"OMP_WAIT_POLICY": "PASSIVE"}


class Follower:
    """Follows events; it connects again, after the last event that it saw, whenever the stream
    ends."""

    def __init__(self, url: str) -> None:
        self.url, self.last = url, -1
        self.http = httpx.Client(timeout=PATIENCE_S)
        self.answer: httpx.Response | None = None
        self.lines: Iterator[str] = iter(())
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()
        self.http.close()

    def __next__(self) -> RefEvent:
        while True:
            try:
                name, id_, data = self._next()
            except httpx.TransportError:
                self._connect()
                continue
            self.last = id_
            if name == "ref":
                return msgspec.json.decode(data, type=RefEvent)

    def _next(self) -> tuple[str, int, str]:
        fields: dict[str, str] = {}
        for line in self.lines:
            if not line and "event" in fields:
                return fields["event"], int(fields["id"]), fields["data"]
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
        raise httpx.ReadError("the stream has ended")

    def _connect(self) -> None:
        """Open a stream, and read its ``hello``."""
        until = time.monotonic() + PATIENCE_S
        headers = {} if self.last < 0 else {"Last-Event-ID": str(self.last)}
        while True:
            self._drop()
            try:
                self.answer = self.http.send(
                    self.http.build_request("GET", self.url, headers=headers), stream=True
                ).raise_for_status()
                self.lines = self.answer.iter_lines()
                name, self.last, _ = self._next()
            except httpx.TransportError:
                assert time.monotonic() < until, "the server stays away"
                time.sleep(0.05)
            else:
                assert name == "hello"
                return

    def _drop(self) -> None:
        if self.answer is not None:
            self.answer.close()
            self.answer = None


@pytest.mark.long
def test_a_server_that_is_killed_and_comes_back_loses_no_event_for_who_follows(
    tmp_path: Path,
) -> None:
    folder, seen = tmp_path / "runs", list[RefEvent]()
    with training(folder) as trained, ThreadPoolExecutor(1) as pool:
        process, url = serve(folder, "http://127.0.0.1:0")
        try:
            with Follower(f"{url}/api/v1/repositories/{folder.name}/events") as events:
                begun_after = events.last
                for _ in range(KILLS):
                    seen += [next(events) for _ in range(EACH)]
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
                    going_on = pool.submit(lambda: [next(events) for _ in range(EACH)])
                    process, again = serve(folder, url)
                    assert again == url
                    seen += going_on.result(PATIENCE_S)
                captured, _ = trained.communicate("")
                database = Database(f"sqlite:///{folder / 'lineage.db'}", create=False)
                with database.read() as session:
                    expected = read(session, begun_after, limit=100_000).items
                database.close()
                seen += [next(events) for _ in range(len(expected) - len(seen))]
        finally:
            process.terminate()
            process.communicate()
    assert seen == list(expected)
    assert len(seen) >= 2 * KILLS * EACH
    assert int(captured) >= len(seen)
