"""States that another process writes from shared memory: on disk as if this process had written
them, with the same errors, and whatever ends that process."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from datastates.agent import writer_process
from datastates.agent.messages import error_of
from datastates.agent.writer_process import WriterProcess
from datastates.engine.writer import is_full
from datastates.errors import DatastatesError, Unavailable
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.local import LocalTier, Put
from datastates.storage.memory import MemoryTier
from datastates.storage.shared_memory import Pages, make_shared_memory
from datastates.storage.tier import Payload, Placed
from datastates.testing.states import chunks_of, numbers, payload, stream

_WAIT_S = 60.0
_NUMBERS = CHUNK_BYTES // 4


class Training:
    """A memory, and the process that writes what is in it."""

    def __init__(self, folder: Path) -> None:
        self.shared = make_shared_memory(16 * CHUNK_BYTES, Pages.SMALL)
        self.arena = Arena(0, self.shared)
        self.memory = MemoryTier(self.arena)
        self.local = LocalTier(folder)
        self.writer = WriterProcess(self.local, self.arena)

    def put(self, state: Payload, base: Placed | None = None) -> Placed:
        """Write a state from memory."""
        if not self.memory.has(state.manifest.origin.uid):
            self.memory.put(state)
        with self.memory.open(state.manifest.origin.uid) as reader:
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            held = Payload(reader.manifest, chunks)
            given = None if base is None else base.manifest
            return self.writer.put_all([Put(held, given, is_of_base=base is not None)])[0]

    def is_ready(self) -> bool:
        return self.writer.process.is_ready()

    def here_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on, this process cannot write."""

        def refuse(puts: object) -> list[Placed]:
            raise AssertionError("this process writes")

        monkeypatch.setattr(self.local, "put_all", refuse)

    def close(self) -> None:
        self.writer.close()
        self.memory.close()
        self.arena.close()
        self.shared.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    until(made.is_ready, "the process is ready")
    yield made
    made.close()
    assert made.writer.process.pid is None


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)  # nothing reports what another process does


def state(uid: str, seed: int) -> Payload:
    """A chunk that changes with the seed, and one that does not."""
    changing, frozen = numbers(_NUMBERS, seed), numbers(_NUMBERS, 0)
    return payload(uid, {"changing": changing, "frozen": frozen})


def check(folder: Path, *states: Payload) -> None:
    tier = LocalTier(folder)
    assert sorted(tier.uids()) == sorted(each.manifest.origin.uid for each in states)
    for each in states:
        with tier.open(each.manifest.origin.uid) as reader:
            reader.verify()
            assert stream(reader) == chunks_of(each)


def test_another_process_writes_and_shares_chunks_with_the_base(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.here_only(monkeypatch)
    first = training.put(state("a", 1))
    assert first.bytes_new == first.manifest.bytes_new == 2 * CHUNK_BYTES
    second = training.put(state("b", 2), first)
    assert second.bytes_new == CHUNK_BYTES
    assert second.manifest == LocalTier(tmp_path).manifest("b")
    again = training.put(state("b", 2), first)
    assert again.bytes_new == 0
    check(tmp_path, state("a", 1), state("b", 2))


def test_a_base_is_known_to_the_next_process_too(training: Training, tmp_path: Path) -> None:
    first = training.put(state("a", 1))
    kill(training)
    second = training.put(state("b", 2), first)  # in this process
    until(training.is_ready, "the next process is ready")
    third = training.put(state("c", 3), second)
    assert third.bytes_new == CHUNK_BYTES
    check(tmp_path, state("a", 1), state("b", 2), state("c", 3))


def kill(training: Training, number: int = signal.SIGKILL) -> None:
    assert training.writer.process.pid is not None
    os.kill(training.writer.process.pid, number)


@pytest.mark.timeout(60)
def test_a_process_that_is_stopped_is_replaced(training: Training, tmp_path: Path) -> None:
    kill(training, signal.SIGSTOP)
    training.put(state("a", 1))
    check(tmp_path, state("a", 1))
    assert training.writer.process.starts == 2


def test_after_three_ends_this_process_writes(training: Training, tmp_path: Path) -> None:
    states = [state(uid, seed) for seed, uid in enumerate("abcd")]
    for each in states[:3]:
        until(training.is_ready, "the process is ready")
        kill(training)
        training.put(each)
    assert training.writer.process.pid is None
    training.put(states[3])
    check(tmp_path, *states)


def test_errors_come_as_what_they_were(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.here_only(monkeypatch)
    shutil.rmtree(tmp_path)
    with pytest.raises(Unavailable, match="is gone, so somebody deleted") as caught:
        training.put(state("a", 1))
    assert caught.value.trouble == f"gone: {tmp_path}"
    tmp_path.mkdir()
    training.put(state("a", 1))
    check(tmp_path, state("a", 1))


@pytest.mark.parametrize(
    ("kind", "found"),
    [("Unavailable", Unavailable), ("SyntaxProblem", DatastatesError), ("Popen", DatastatesError)],
)
def test_a_full_disk_is_known_by_its_cause(kind: str, found: type[Exception]) -> None:
    failed = writer_process._Failed(kind, "said", "disk", errno.ENOSPC)
    error = error_of(failed.kind, failed.text, failed.trouble, failed.cause)
    assert type(error) is found
    assert str(error) == "said"
    assert error.trouble == "disk"
    assert is_full(error)


def test_a_call_that_takes_long_is_named_in_this_process(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Path, int]] = []
    monkeypatch.setattr(writer_process, "at", lambda *call: calls.append(call))
    training.put(payload("a", {"w": numbers(5 * _NUMBERS, 1)}))
    assert max(size for _, _, size in calls) >= 4 * CHUNK_BYTES


def test_nothing_is_committed_for_a_training_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots may be another training's by then."""
    training = Training(tmp_path)
    training.writer.close()
    ours, theirs = Pipe()
    words = (theirs.fileno(), training.shared.read_fd, training.shared.size, os.getpid())
    started = subprocess.run(
        [sys.executable, "-c", ORPHANED, *map(str, (*words, tmp_path))],
        pass_fds=words[:2],
        capture_output=True,
        text=True,
        check=False,
        timeout=_WAIT_S,
    )
    theirs.close()
    ours.close()
    training.close()
    assert started.stdout.split() == ["Unavailable", "0"], started.stderr


ORPHANED = """
import os, sys
from datastates.agent import memory_process, writer_process
from datastates.storage.local import Put
from datastates.testing.states import numbers, payload

def run(server, kind, handle):
    os.getppid = lambda: 1
    tier = handle.__closure__
    local = next(each.cell_contents for each in tier if hasattr(each.cell_contents, "put_all"))
    try:
        local.put_all([Put(payload("a", {"w": numbers(5000, 1)}))])
    except Exception as exc:
        print(type(exc).__name__, len([*local.uids()]), flush=True)

memory_process.Server.run = run
writer_process.main([*sys.argv[1:], "1"])
"""
