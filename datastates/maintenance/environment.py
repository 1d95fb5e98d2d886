"""The facts about a run that are recorded because they may matter later: code, command,
versions, host."""

from __future__ import annotations

import fcntl
import functools
import getpass
import os
import platform
import re
import secrets
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from datastates.lineage.states import GIT_REMOTE, GIT_ROOT, OURS, Run
from datastates.system import logs
from datastates.values import Value

NODE = "datastates.node"
"""The key in the record of a run for the boot of the machine on which it ran."""

PROCESS = "datastates.process"
"""The key there for its process: PID namespace, pid, and when it began."""

_SIOCGIFADDR = 0x8915


def node_id() -> str:
    """An id of this machine until its next boot, the same in all its containers. Its name, if the
    kernel has no such id."""
    return _boot() or socket.gethostname()


def network_id() -> str:
    """An id of this machine and of its network as this process sees it: processes with the same
    one reach each other on 127.0.0.1."""
    network = ""
    with suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{node_id()} {network}"


def interface_addresses() -> list[str]:
    """The IPv4 addresses of this machine's interfaces, without loopback; where the kernel does not
    list them, the address of the machine's name."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with suppress(OSError):  # the interface has no address
                asked = struct.pack("256s", name.encode())
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24]))
    if not found:
        with suppress(OSError):
            found.append(socket.gethostbyname(socket.gethostname()))
    return [each for each in found if not each.startswith("127.")]


def process_identity() -> dict[str, Value]:
    """An id of this process, if the kernel has one; else empty."""
    node, namespace, found = _boot(), _namespace(), _stat(os.getpid())
    if node is None or namespace is None or found is None:
        return {}
    return {NODE: node, PROCESS: f"{namespace}:{os.getpid()}:{found[1]}"}


def is_running(run: Run) -> bool | None:
    """Whether the process of a run still runs; None unless that is certain, which needs a run on
    this boot, in this PID namespace."""
    node, process = run.config.get(NODE), run.config.get(PROCESS)
    if node is None or process is None or node != _boot():
        return None
    namespace, pid, began = str(process).split(":")
    if namespace != _namespace():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it exists, and belongs to another user
    state, since = _stat(int(pid)) or ("?", began)
    return False if since != began else None if state in "ZX?" else True


def _boot() -> str | None:
    """The id of this boot of this machine, the same in all its containers; None if the kernel has
    none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _namespace() -> str | None:
    """The PID namespace: the same pid is another process in another namespace."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, str] | None:
    """The state of a process, and when it began in ticks since the boot; None if that cannot be
    read."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]


_PACKAGES = ("datastates", "torch", "numpy", "torchdata", "lightning", "transformers", "accelerate")
_USER = re.compile(r"^(?!ssh:|git\+ssh:)([\w+.-]+://)[^/]*@")
"""A user in a URL may be a token, except that of ssh."""


def describe_run(config: Mapping[str, Value]) -> Run:
    """A record of this process, with a fresh uid."""
    commit, is_dirty, checkout = _git()
    return Run(
        uid=secrets.token_hex(12),
        host=socket.gethostname(),
        user=user_name(),
        pid=os.getpid(),
        argv=tuple(sys.argv),
        git_commit=commit,
        git_dirty=is_dirty,
        config={**config, **process_identity(), **checkout},
        versions={"python": platform.python_version(), **_versions()},
        started_at=datetime.now(UTC),
    )


def describe_training(process: Run, branch: str, config: Mapping[str, Value]) -> Run:
    """A record of a training that this process begins on a branch, with a fresh uid."""
    ours = {key: value for key, value in process.config.items() if key.startswith(OURS)}
    return replace(
        process,
        uid=secrets.token_hex(12),
        config={**config, **ours},
        started_at=datetime.now(UTC),
        process=process.uid,
        branch=branch,
    )


def user_name() -> str:
    """The user as whom this process runs, for people to read."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@functools.cache
def _versions() -> dict[str, str]:
    """The installed versions of ``_PACKAGES``, read once in a process because reading takes
    milliseconds."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _script() -> Path | None:
    """The main script, also of a profiler. None in a notebook, under ``python -c``, and where an
    installed program runs the code, as Ray does.
    """
    names = (getattr(sys.modules.get("__main__"), "__file__", None), *sys.argv[:1])
    found = [Path(each).resolve() for each in names if each and Path(each).is_file()]
    installed = {Path(sysconfig.get_path(each)).resolve() for each in ("scripts", "stdlib")}
    return next(
        (
            each
            for each in found
            if not (
                installed & {*each.parents} or {"site-packages", "dist-packages"} & {*each.parts}
            )
        ),
        None,
    )


def _git() -> tuple[str | None, bool | None, dict[str, Value]]:
    """The commit of the main script's folder, or of the working directory if there is no script.
    Further, whether the checkout has changes (a script that git does not track is one), and where
    the checkout is and came from. None and empty outside a checkout or without git.
    """
    script = _script()
    run = functools.partial(_run_git, None if script is None else script.parent)
    if (root := run("rev-parse", "--show-toplevel")) is None:
        return None, None, {}
    commit = run("rev-parse", "--verify", "--quiet", "HEAD")
    # None if the checkout is so large that this takes too long
    changes = run("status", "--porcelain", "--untracked-files=no")
    if script is not None and run("--literal-pathspecs", "ls-files", "--", script.name) == "":
        changes = "the script"
    is_dirty = None if commit is None or changes is None else bool(changes)
    found = {GIT_ROOT: root, GIT_REMOTE: run("ls-remote", "--get-url")}
    return (
        commit,
        is_dirty,
        {
            key: logs.text(_USER.sub(rf"\1{logs.MASK}@", each))
            for key, each in found.items()
            if each
        },
    )


def _run_git(folder: Path | None, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
