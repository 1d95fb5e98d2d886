"""The machine: versions, host, device, and the link between the two, idle and busy."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sysconfig
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from datastates.system import devices

from .case import Case, Found, Skip
from .place import Place

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "msgspec",
    "xxhash",
    "blake3",
    "sqlalchemy",
    "cuda-bindings",
    "ucxx-cu12",
    "ucxx-cu13",
)
ASKED = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
)
SETTINGS = ("PYTORCH_", "CUDA_", "NVIDIA_VISIBLE", "HIP_", "TORCH_CUDA")
"""Variables with this prefix change the behavior of a device."""

FIXED = (
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "mig.mode.current",
    "persistence_mode",
)


def cases(place: Place) -> Sequence[Case]:
    """The cases of this part."""
    return [
        Case("software", _software),
        Case("host", _host),
        Case("device", _device),
        Case("clocks and link", _link),
    ]


def _software(place: Place) -> Found:
    found: Found = {
        "python": platform.python_version(),
        "built for": devices.built_for() or "no accelerator",
    }
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found["what Triton compiles with"] = (
        shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang") or "no compiler"
    )
    found["Python.h"] = headers.exists()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not here"
    return found


def _host(place: Place) -> Found:
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1
        ),
        "huge pages": huge.read_text().strip() if huge.exists() else "not said",
        "memory that may be locked": "unlimited" if soft == resource.RLIM_INFINITY else soft,
        "shm_free_GiB": round(shutil.disk_usage("/dev/shm").free / (1 << 30), 1),
        "temporary_free_GiB": round(
            shutil.disk_usage(os.environ.get("TMPDIR", "/tmp")).free / (1 << 30), 1
        ),
    }


def _device(place: Place) -> Found:
    if not place.is_accelerator:
        raise Skip("no accelerator is used")
    properties = torch.cuda.get_device_properties(place.device)
    free, total = torch.cuda.mem_get_info(place.device)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_GiB": round(total / (1 << 30), 1),
        "free_GiB": round(free / (1 << 30), 1),
        "allocator": torch.cuda.get_allocator_backend(),
        **{name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        **_asked(FIXED),
    }


def _link(place: Place) -> Found:
    """The link is also queried while it works, because an idle link reports a lower speed."""
    if not place.is_accelerator:
        raise Skip("no accelerator is used")
    place.finish()
    idle = _asked(ASKED)
    here, there = (
        place.pinned(256 << 20),
        torch.empty(256 << 20, dtype=torch.uint8, device=place.device),
    )
    factor, stop = torch.randn(4096, 4096, device=place.device), threading.Event()

    def work() -> None:
        while not stop.is_set():
            here.copy_(there, non_blocking=True)
            factor @ factor
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        stop.wait(1.0)
        busy = _asked(ASKED)
    finally:
        stop.set()
        thread.join()
    return {"idle": idle, "busy": busy}


def _asked(fields: Sequence[str]) -> Found:
    """The output of nvidia-smi for the first device. It changes nothing there."""
    if shutil.which("nvidia-smi") is None:
        return {"nvidia-smi": "not here"}
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except subprocess.TimeoutExpired:
        return {"nvidia-smi": "did not answer within 5 s"}
    if done.returncode:
        return {"nvidia-smi": (done.stdout + done.stderr).strip()[:200]}
    return dict(zip(fields, map(str.strip, done.stdout.strip().split(",")), strict=False))
