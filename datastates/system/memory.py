"""How much memory a process may still take: the free memory of the machine, or less if control
groups (version 1 or 2) leave less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class _Files:
    """The names of a version's files. ``cache`` is the line of the statistics with the file cache
    that the kernel would drop first."""

    limit: str
    used: str
    cache: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")
_NO_LIMIT = 1 << 60
"""Version 1 has no word for no limit, and gives a number as large as it can."""


def available_memory_bytes(root: Path = Path("/")) -> int:
    """The memory that this process may still take: the machine's available memory, or less if its
    control group, or one above that, leaves less.
    """
    meminfo = (root / "proc/meminfo").read_text().split()
    available = int(meminfo[meminfo.index("MemAvailable:") + 1]) * 1024
    return max(0, min([available, *memory_left(root)]))


def memory_left(root: Path = Path("/")) -> Iterator[int]:
    """The bytes that each group with a limit leaves: this process's own group and all above it, as
    far as they are visible.

    File cache that the kernel would drop does not count as taken. ``root`` is where ``proc`` and
    the mounts are looked for.
    """
    groups = _groups_of_process(_lines(root / "proc/self/cgroup"))
    for line in _lines(root / "proc/self/mountinfo"):
        mount = _mount(line)
        if mount is not None and mount.controller in groups:
            files = _V1 if mount.controller else _V2
            for folder in _upwards(root, mount, groups[mount.controller]):
                left = _left(folder, files)
                if left is not None:
                    yield left


@dataclass(frozen=True, slots=True)
class _Mount:
    """A hierarchy, from its group ``top`` on, mounted at ``point``; ``controller`` is ``memory``
    in version 1 and empty in version 2."""

    controller: str
    top: str
    point: str


def _groups_of_process(lines: list[str]) -> dict[str, str]:
    """The path of this process's group by controller: ``memory`` for version 1, the empty text
    for version 2."""
    groups = {}
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            groups[""] = path
        elif "memory" in controllers.split(","):
            groups["memory"] = path
    return groups


def _mount(line: str) -> _Mount | None:
    """The mount in a line of ``mountinfo``, if the line is about a hierarchy that may limit
    memory."""
    before, _, after = line.partition(" - ")
    fields, (kind, *rest) = before.split(), (after.split() or [""])
    if len(fields) < 5 or kind not in ("cgroup", "cgroup2"):
        return None
    if kind == "cgroup2":
        return _Mount("", fields[3], fields[4])
    return _Mount("memory", fields[3], fields[4]) if "memory" in rest[-1].split(",") else None


def _upwards(root: Path, mount: _Mount, group: str) -> Iterator[Path]:
    """The folders of a group and of those above it.

    A container may see its own group as the top of the mount."""
    point = root / mount.point.lstrip("/")
    path = PurePosixPath(group)
    try:
        inside = path.relative_to(mount.top)
    except ValueError:
        inside = PurePosixPath(".")
    here = point / inside if ".." not in inside.parts and (point / inside).is_dir() else point
    yield here
    for above in here.parents:
        if not above.is_relative_to(point):
            return
        yield above


def _left(folder: Path, files: _Files) -> int | None:
    limit, used = _number(folder / files.limit), _number(folder / files.used)
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    cache = statistics.get(files.cache, "0")
    return max(0, limit - used + min(used, int(cache) if cache.isdecimal() else 0))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1])
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
