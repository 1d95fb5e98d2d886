"""How much memory control groups leave, from trees of files as kernels, containers and clusters
show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastates.system.memory import available_memory_bytes, memory_left

GIB = 1 << 30
V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def lay_out(
    root: Path,
    groups: str,
    mounts: str,
    limits: dict[str, tuple[object, int, int]],
    *,
    version: int,
) -> None:
    """A root with these files: for each group its limit, what is used, and how much of that is
    cache."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(mounts)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {32 * GIB >> 10} kB\n"
    )
    names = ("memory.max", "memory.current", "inactive_file")
    names = (
        names
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    base = root / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    for path, (limit, used, cache) in limits.items():
        folder = base / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 12\n{names[2]} {cache}\n")


def test_the_own_group_of_version_2_and_each_above_it_count(tmp_path: Path) -> None:
    limits: dict[str, tuple[object, int, int]] = {
        "job": (8 * GIB, 7 * GIB, 0),
        "job/step": ("max", 2 * GIB, 0),
        "job/step/task": (4 * GIB, GIB, 0),
        "other": (GIB, GIB, 0),
    }
    lay_out(tmp_path, "0::/job/step/task\n", V2, limits, version=2)
    assert sorted(memory_left(tmp_path)) == [GIB, 3 * GIB]
    assert available_memory_bytes(tmp_path) == GIB


def test_version_1_counts_too(tmp_path: Path) -> None:
    limits: dict[str, tuple[object, int, int]] = {
        "": (9223372036854771712, GIB, 0),
        "docker/abc": (2 * GIB, GIB // 2, 0),
    }
    lay_out(
        tmp_path,
        "9:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        V1.format(top="/"),
        limits,
        version=1,
    )
    assert available_memory_bytes(tmp_path) == 2 * GIB - GIB // 2


@pytest.mark.parametrize("top", ["/docker/abc", "/docker", "/elsewhere"])
def test_a_container_that_sees_its_own_group_as_the_top_is_limited_by_it(
    tmp_path: Path, top: str
) -> None:
    limits: dict[str, tuple[object, int, int]] = {"": (2 * GIB, GIB, 0)}
    lay_out(tmp_path, "4:memory:/docker/abc\n", V1.format(top=top), limits, version=1)
    assert available_memory_bytes(tmp_path) == GIB


@pytest.mark.parametrize("version", [1, 2])
def test_cache_that_the_kernel_lets_go_is_not_taken(tmp_path: Path, version: int) -> None:
    groups, mounts = ("0::/", V2) if version == 2 else ("4:memory:/\n", V1.format(top="/"))
    lay_out(tmp_path, groups, mounts, {"": (4 * GIB, 4 * GIB, 3 * GIB)}, version=version)
    assert available_memory_bytes(tmp_path) == 3 * GIB


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    lay_out(tmp_path, "", "", {}, version=2)
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory_bytes(tmp_path) == 32 * GIB


def test_this_machine_has_some_memory_left() -> None:
    assert available_memory_bytes() > 0
