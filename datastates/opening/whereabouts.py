"""Identifies the process of a run by what the kernel says of it, not by the name of its host."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from datastates.lineage.states import Run, Value

__all__ = ["NODE", "PROCESS", "is_running", "network_id", "node_id", "whereabouts"]

NODE = "datastates.node"
"""The key in the record of a run for the boot of the machine on which it ran."""

PROCESS = "datastates.process"
"""The key there for its process: PID namespace, pid, and when it began."""


def node_id() -> str:
    """An id of this machine until its next boot, the same in all its containers; its name, if the kernel does not tell."""
    return _boot() or socket.gethostname()


def network_id() -> str:
    """An id of this machine and of its network as this process sees it: processes with the same one reach each other on 127.0.0.1."""
    network = ""
    with suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{node_id()} {network}"


def whereabouts() -> dict[str, Value]:
    """An id of this process, if the kernel tells one; else empty."""
    node, namespace, found = _boot(), _namespace(), _stat(os.getpid())
    if node is None or namespace is None or found is None:
        return {}
    return {NODE: node, PROCESS: f"{namespace}:{os.getpid()}:{found[1]}"}


def is_running(run: Run) -> bool | None:
    """Whether the process of a run still runs; None unless that is certain, which needs a run on this boot, in this PID namespace."""
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
    """The id of this boot of this machine, whatever its containers are called; None if the kernel does not tell."""
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
    """The state of a process, and when it began in ticks since the boot; None if that cannot be read."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]
