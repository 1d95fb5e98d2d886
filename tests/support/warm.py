"""Python processes for tests, quickly: one process imports what they import, and forks each of
them.

``Popen`` and ``run`` are ``subprocess``'s, for commands that begin with ``sys.executable``: the
process is this one's child, with the command's arguments, environment, folder and streams, and ends
as it would have ended. It has run nothing before: no tracker, no repository, no random number. What
cannot be had so is started from nothing, as ``subprocess`` does it: other options of the
interpreter, variables that it reads at its start, other systems than Linux, and all of them with
``DATASTATES_WARM=0``.

Run as a module this file is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "MALLOC_", "GLIBC_", "TORCH", "CUDA_")
MODULES = (
    "torch._dynamo",  # which making an optimizer imports
    "torch.distributed",
    "torch.utils.data",
    *(
        "alembic.command",
        "fastapi",
        "httpx",
        "numpy",
        "rich.console",
        "safetensors.torch",
        "typer",
        "uvicorn",
    ),
    *(
        "rich.live",
        "rich.progress",
        "rich.table",
        "sqlalchemy.dialects.sqlite",
        "sqlalchemy.dialects.postgresql.psycopg",
    ),
    *(
        "datastates.files.bundle",
        "datastates.engine.runner",
        "datastates.cli.app",
        "datastates.lineage.write.clones",
        "datastates.lineage.query.pages",
    ),
    *(
        "datastates.api.serve",
        "datastates.transport.peer",
        "datastates.transport.serving",
        "datastates.training.tracker",
    ),
    *("datastates.lineage.migrations.upgrade", "datastates.studies", "datastates.studies.worker"),
)
_SET_CHILD_SUBREAPER = 36
NEW_NETWORK = 0x40000000


class Popen(subprocess.Popen[str]):
    """As ``subprocess.Popen`` with text; ``netns`` names a network namespace that the process is
    to be in."""

    def __init__(
        self, command: list[str], *, netns: str | None = None, text: bool = True, **options: Any
    ) -> None:
        self._netns = netns
        super().__init__(command, text=text, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """What ``subprocess`` does to start the child, by whatever arguments this version of
        Python has for it."""
        ours = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(ours).bind(*arguments).arguments
        request = _request(asked, self._netns)
        if request is None:
            if self._netns is not None:
                # ip becomes the command: the pid is its own
                arguments = (["ip", "netns", "exec", self._netns, *asked["args"]], *arguments[1:])
            ours(*arguments)
            return
        pipes = [
            asked[name]
            for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        try:
            streams = [
                own if given == -1 else given
                for own, given in zip((0, 1, 2), (pipes[0], pipes[3], pipes[5]), strict=True)
            ]
            self.pid = _forge().start(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    command: list[str],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with text."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _request(asked: dict[str, Any], netns: str | None) -> dict[str, Any] | None:
    """What to tell the process that forks; None when this child is to be started from nothing."""
    words = list(map(os.fspath, asked["args"]))
    environ = dict(os.environ if asked["env"] is None else asked["env"])
    if (
        sys.platform != "linux"
        or os.environ.get("DATASTATES_WARM") == "0"
        or words[0] != sys.executable
        or asked["pass_fds"]
    ):
        return None
    if any(
        environ.get(key) != os.environ.get(key)
        for key in environ.keys() | os.environ.keys()
        if key.startswith(READ_AT_START)
    ):
        return None
    if any(asked[name] for name in ("preexec_fn", "executable", "shell", "uid", "gid", "gids")):
        return None
    filters, rest = [], words[1:]
    while rest[:1] == ["-W"]:
        filters.append(rest[1])
        rest = rest[2:]
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-m", "-c")):
        return None
    cwd = os.path.abspath(os.fspath(asked["cwd"] or "."))
    is_session = bool(asked["start_new_session"])
    return {
        "words": rest,
        "filters": filters,
        "environ": environ,
        "cwd": cwd,
        "original": words,
        "is_session": is_session,
        "netns": netns,
    }


class _Forge:
    """The process that forks, seen from the tests; one for each test process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", "tests.support.warm", str(other.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
            )
        atexit.register(self.close)

    def start(self, request: dict[str, Any], streams: list[int]) -> int:
        """The pid of a new child of this process."""
        with self._lock:
            # the child's parent is gone before it begins: this process is its parent then
            _adopt(True)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], streams)
                answer = self._control.recv(100)
            finally:
                _adopt(False)
        if not answer:
            raise RuntimeError(f"the process that forks has ended with {self._process.wait()}")
        return int(answer)

    def close(self) -> None:
        """End it."""
        self._control.close()
        self._process.wait()


_LOCK = threading.Lock()
_forges: list[_Forge] = []


def _forge() -> _Forge:
    with _LOCK:
        if not _forges:
            _forges.append(_Forge())
        return _forges[0]


def _adopt(is_on: bool) -> None:
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


# What follows runs in the process that forks, and in its children.


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork until nobody asks any more; in a child, what it is to run."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            return None
        request: dict[str, Any] = json.loads(data)
        said, saying = os.pipe()
        orphaned, orphaning = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)
            os.write(saying, str(os.getpid()).encode())
            for fd in (said, saying, orphaning):
                os.close(fd)
            os.read(orphaned, 1)  # its end: the tests' process is our parent
            os.close(orphaned)
            control.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            return request
        os.close(saying)
        os.waitpid(between, 0)
        pid = os.read(said, 100)
        for fd in (said, orphaned, orphaning, *fds):
            os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            control.send(pid)


def _prepare(request: dict[str, Any]) -> None:
    """Make this child what the command would have started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["is_session"]:
        os.setsid()
    if request["netns"] is not None:
        with open(f"/run/netns/{request['netns']}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.orig_argv[:] = request["original"]
    sys.warnoptions[:] = request["filters"]
    for each in request["filters"]:
        warnings._setoption(each)  # type: ignore[attr-defined]
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.path.pop(0)


def _code(words: list[str]) -> tuple[types.CodeType | None, dict[str, Any]]:
    """What a script or ``-c`` runs, and where; for ``-m`` nothing but the module's name in
    ``sys.argv``."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    match words:
        case ["-m", name, *rest]:
            sys.modules.pop(name, None)
            sys.path.insert(0, os.getcwd())
            sys.argv[:] = [name, *rest]
            return None, main.__dict__
        case ["-c", text, *rest]:
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *rest]
            return compile(text, "<string>", "exec"), main.__dict__
        case _:
            path = Path(words[0])
            sys.path.insert(0, str(path.resolve().parent))
            sys.argv[:] = words
            main.__file__ = words[0]
            return compile(path.read_bytes(), words[0], "exec"), main.__dict__


_ended_by: list[int] = []


def _end_by_signal() -> None:
    """At the very end: as Python ends a script that Ctrl-C was not caught in.

    One that was begun by ``-m`` it ends with 1."""
    if _ended_by:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), _ended_by[0])


if __name__ == "__main__":
    atexit.register(_end_by_signal)  # before what is imported registers its own: called after these
    gc.disable()
    for _name in MODULES:
        importlib.import_module(_name)
    gc.freeze()
    gc.enable()
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _asked is not None:
        _prepare(_asked)
        _program, _names = _code(_asked["words"])
        if _program is None:
            runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
        else:
            try:
                exec(_program, _names)
            except KeyboardInterrupt:
                _ended_by.append(signal.SIGINT)
                raise
