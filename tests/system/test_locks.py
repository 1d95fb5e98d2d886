"""A lock ends with the process that took it, whatever children it leaves behind."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from datastates.storage.dedup import ChunkIndex
from datastates.storage.durable_files import locked, temporary
from datastates.system.files import close_lockable, hold, is_held, open_lockable

Taking = Callable[[Path], AbstractContextManager[object]]


@contextmanager
def a_lease(folder: Path) -> Iterator[None]:
    held = hold(folder / "lease")
    assert held is not None
    with closing(held):
        yield


@contextmanager
def the_index(folder: Path) -> Iterator[None]:
    index = ChunkIndex(folder)
    index.find([])  # makes its file
    with index._locked():
        yield


KINDS: dict[str, tuple[Taking, str]] = {
    "a lease": (a_lease, "lease"),
    "the folder, shared": (lambda folder: locked(folder, is_shared=True), ".lock"),
    "the folder, alone": (lambda folder: locked(folder, is_shared=False), ".lock"),
    "a file that is written": (lambda folder: temporary(folder / "one"), "*one"),
    "the index": (the_index, ".chunks"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_outlives_a_killed_training_keeps_none_of_its_locks(
    kind: str, tmp_path: Path
) -> None:
    """Of a loader's worker: it notices the end of its training seconds later, or never where the
    kill came while it began."""
    taking, pattern = KINDS[kind]
    reading, writing = os.pipe()
    training = os.fork()
    if training == 0:
        try:
            with taking(tmp_path):
                worker = os.fork()
                if worker == 0:
                    os.close(writing)
                    signal.pause()
                os.write(writing, str(worker).encode())
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(training, 0)[1]) == -signal.SIGKILL
    worker = int(os.read(reading, 20))
    assert os.read(reading, 1) == b"", "the worker has closed its end: it runs by now"
    os.close(reading)
    try:
        path = next(tmp_path.glob(pattern))
        assert not is_held(path)
        with path.open("r+b") as file:
            # raises while anybody holds it, as the next training would wait
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_child_that_is_forked_at_any_moment_has_no_descriptor_of_a_lock(tmp_path: Path) -> None:
    """Nor loses one of another file, which got the number of a lock that was closed."""
    is_over = threading.Event()

    def lock_and_let_go() -> None:
        while not is_over.is_set():
            close_lockable(open_lockable(tmp_path / "lock", os.O_RDWR | os.O_CREAT))

    at_work = [threading.Thread(target=lock_and_let_go) for _ in range(2)]
    for each in at_work:
        each.start()
    try:
        for _ in range(100):
            kept = os.open(tmp_path, os.O_RDONLY)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.fstat(kept)
                    open_files = {
                        os.path.realpath(f"/proc/self/fd/{name}")
                        for name in os.listdir("/proc/self/fd")
                    }
                    code = 2 if str(tmp_path / "lock") in open_files else 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            os.close(kept)
    finally:
        is_over.set()
        for each in at_work:
            each.join()
