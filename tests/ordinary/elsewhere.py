"""Run a script as it stands on another host, as another user, or where folders lie elsewhere:
``elsewhere.py PLACE SCRIPT …``.

Namespaces of this process alone make the place: nobody else sees any of it. Root on Linux only.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
_NEW_MOUNTS, _NEW_HOST = 0x00020000, 0x04000000


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is other than here.

    ``binds`` are pairs of a folder and where else it lies; ``small`` has folders with so many
    bytes of room."""

    folder: str
    host: str = ""
    boot: str = ""
    binds: tuple[tuple[str, str], ...] = ()
    read_only: tuple[str, ...] = ()
    small: tuple[tuple[str, int], ...] = ()
    user: int = 0

    def enter(self) -> None:
        """Bring it about in this process; the user last, who may do none of it."""
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS | _NEW_HOST):
            raise OSError(ctypes.get_errno(), "unshare")
        _mount("--make-rprivate", "/")
        if self.host:
            socket.sethostname(self.host)
        if self.boot:
            _pretend(self.boot)
        for what, where in self.binds:
            os.makedirs(where, exist_ok=True)
            _mount("--bind", what, where)
        for folder in self.read_only:
            _mount("--bind", folder, folder)
            _mount("-o", "remount,bind,ro", folder)
        for folder, size in self.small:
            _mount("-t", "tmpfs", "-o", f"size={size},mode=1777", "none", folder)
        os.chdir(self.folder)
        if self.user:
            _open_the_way((sys.base_prefix, sys.prefix, str(ROOT)))
            _become(self.user)


def _pretend(boot: str) -> None:
    """Give the kernel's boot id another value, as it would have on another machine."""
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(f"{boot}\n")
    os.chmod(file.name, 0o644)
    _mount("--bind", file.name, "/proc/sys/kernel/random/boot_id")
    os.unlink(file.name)


def _open_the_way(paths: Iterable[str]) -> None:
    """Let any user reach these folders, also where one above them is closed to others: Python
    may be installed in /root."""
    closed: dict[Path, list[Path]] = {}
    for path in map(Path, paths):
        above = next(
            (above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None
        )
        if above is not None:
            closed.setdefault(above, []).append(path)
    for above, wanted in closed.items():
        kept = [(tempfile.mkdtemp(), path) for path in dict.fromkeys(wanted)]
        for place, path in kept:
            _mount("--bind", str(path), place)
        _mount("-t", "tmpfs", "-o", "mode=755", "none", str(above))
        for place, path in kept:
            path.mkdir(parents=True, exist_ok=True)
            _mount("--bind", place, str(path))


def _become(uid: int) -> None:
    os.environ["HOME"] = "/nonexistent"
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    os.umask(0o022)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    place = msgspec.json.decode(sys.argv[1], type=Place)
    del sys.argv[:2]
    place.enter()
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
