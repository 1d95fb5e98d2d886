"""Which process a run was, told by what the kernel says of it and not by what people call its host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from datastates.lineage.states import Run, Value

__all__ = ["NODE", "PROCESS", "is_running", "node_id", "whereabouts"]

NODE = "datastates.node"
"""Where the record of a run says which boot of which machine it ran on."""

PROCESS = "datastates.process"
"""Where it says which process it was there: PID namespace, pid, and when it began."""


def node_id() -> str:
    """An id of this machine until its next boot, the same in all its containers; its name, where the kernel does not tell."""
    return _boot() or socket.gethostname()


def whereabouts() -> dict[str, Value]:
    """An id of this process, where the kernel tells; nothing elsewhere."""
    node, namespace, found = _boot(), _namespace(), _stat(os.getpid())
    if node is None or namespace is None or found is None:
        return {}
    return {NODE: node, PROCESS: f"{namespace}:{os.getpid()}:{found[1]}"}


def is_running(run: Run) -> bool | None:
    """Whether the process of a run still runs, where that can be told for certain: it ran on this boot, in this PID namespace."""
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
        pass  # it is there, and another user's
    state, since = _stat(int(pid)) or ("?", began)
    return False if since != began else None if state in "ZX?" else True


def _boot() -> str | None:
    """This boot of this machine, whatever containers call it; None where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _namespace() -> str | None:
    """The PID namespace: a pid means a process in one only."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return None


def _stat(pid: int) -> tuple[str, str] | None:
    """The state of a process, and when it began in ticks since the boot; None where that is not to be read."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]
