"""``MemoryProcess``: a process that works on the shared memory of a training, next to it.

It maps the memory for reading, so a request holds manifests and the offsets of slots, and no
tensors. The thread that waits for an answer does not hold the interpreter's lock. The process ends
with the training. A ``Server`` is the other end.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from datastates.storage.arena import Arena
from datastates.storage.shared_memory import SharedMemory

_LOOK_S = 1.0
_EXIT_S = 5.0
_KILLED_S = 1.0
_STARTS = 3
"""How often the process is started in all."""

_A = TypeVar("_A")
_encode = msgspec.msgpack.Encoder().encode


class Ended(Exception):
    """The process was killed or stopped, or has failed. Another process may take the request."""


class MemoryProcess(Generic[_A]):
    """Runs ``python -m module`` on the memory of ``arena``, which is shared. ``words`` are further
    arguments. ``answer`` is the type of its answers.

    One thread at a time may ``ask``; ``close`` may be called from any. If the process ends, another
    one is started, up to ``_STARTS`` in all. ``starts`` counts them.
    """

    def __init__(self, module: str, words: Sequence[str], arena: Arena, answer: type[_A]) -> None:
        self._module, self._words, self._shared = module, words, arena.shared
        self._decode = msgspec.msgpack.Decoder(answer).decode
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_ready = self._is_busy = self._is_closed = False
        self.starts = 0
        self._lock = threading.Lock()
        self._start()

    @property
    def pid(self) -> int | None:
        """The process; None if there is none."""
        return None if self._process is None else self._process.pid

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Whether the process takes requests, now or within ``timeout_s``."""
        connection = self._connection
        if connection is not None and not self._is_ready:
            try:
                self._is_ready = connection.poll(timeout_s) and not connection.recv_bytes()
            except (EOFError, OSError):
                self._start()
        return self._connection is not None and self._is_ready

    def ask(self, request: msgspec.Struct, note: Callable[[_A], bool]) -> _A:
        """The first answer that ``note`` does not take.

        :raises Ended: the process has ended without an answer.
        """
        connection, process = self._connection, self._process
        if connection is None or process is None:
            raise Ended("it was closed")
        self._is_busy = True
        try:
            connection.send_bytes(_encode(request))
            while process.poll() is None:
                if connection.poll(_LOOK_S):
                    answer = self._decode(connection.recv_bytes())
                    if not note(answer):
                        self._is_busy = False
                        return answer
                elif _is_stopped(process.pid):
                    break
        except (EOFError, OSError, msgspec.MsgspecError):
            pass
        self._start()
        raise Ended("it has ended")

    def close(self) -> None:
        """End the process. Idempotent."""
        self._is_closed = True
        self._end()

    def _start(self) -> None:
        self._end()
        shared = self._shared
        if self._is_closed or self.starts == _STARTS or shared is None or shared.read_fd < 0:
            return
        self.starts += 1
        ours, theirs = Pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, *_described(theirs, shared), *self._words],
                pass_fds=[theirs.fileno(), shared.read_fd],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal of the training does not end it
            )
        except OSError:
            ours.close()
            return
        finally:
            theirs.close()
        self._process, self._connection = process, ours
        self._is_ready = self._is_busy = False

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is not None:
            if not self._is_ready or self._is_busy:
                process.kill()  # it may not see for long that it was closed
            with suppress(subprocess.TimeoutExpired):  # a system call of it does not return
                process.wait(_EXIT_S if not self._is_busy else _KILLED_S)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process. It would never answer."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


def _described(connection: Connection, shared: SharedMemory) -> list[str]:
    return [str(word) for word in (connection.fileno(), shared.read_fd, shared.size, os.getpid())]


class Server:
    """The end of a ``MemoryProcess`` in the process itself. ``words`` are what is left of its
    arguments, ``view`` is the memory. ``send`` may be called from any thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        pipe, memory, size, self._parent = map(int, arguments[:4])
        self.words = arguments[4:]
        self._connection, self._sending = Connection(pipe), threading.Lock()
        self.view = memoryview(mmap.mmap(memory, size, prot=mmap.PROT_READ))
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @property
    def has_parent(self) -> bool:
        """Whether the training lives. Otherwise its memory may be another training's."""
        return os.getppid() == self._parent

    def send(self, answer: msgspec.Struct) -> None:
        with self._sending:
            self._connection.send_bytes(_encode(answer))

    def run(self, kind: type[_A], handle: Callable[[_A], msgspec.Struct]) -> None:
        """Answer requests of this kind. Does not return: the process ends with the training."""
        decode = msgspec.msgpack.Decoder(kind).decode
        with suppress(EOFError, OSError):  # the training has ended, or has closed the pipe
            self._connection.send_bytes(b"")  # ready
            while self.has_parent:
                if self._connection.poll(_LOOK_S):
                    self.send(handle(decode(self._connection.recv_bytes())))
        os._exit(0)
