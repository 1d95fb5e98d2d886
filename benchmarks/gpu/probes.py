"""Separate tests of the driver features that captures and clones use: registration, order, graph
capture, handles for other processes."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from datastates.system import devices as driver
from datastates.system.devices import devices

from .case import Case, Found, Skip
from .place import Place, timed

MIB = 1 << 20


def cases(place: Place) -> Sequence[Case]:
    """In the order in which they build on each other."""
    probes: dict[str, Callable[[Place], Found]] = {
        "mapped memory is registered": _registration,
        "copies cross two registrations": _crossing,
        "a registration that is refused": _refused,
        "speed of copies": _copies,
        "marks order streams": _order,
        "torch notices synchronisations": _noticing,
        "a recording beside our threads": _recording,
        "copies beside computing": _overlap,
        "memory of another process": _handles,
    }
    anywhere = {"speed of copies"}
    return [
        Case(name, probe if place.is_accelerator or name in anywhere else _skipped)
        for name, probe in probes.items()
    ]


def _skipped(place: Place) -> Found:
    raise Skip("asks a driver, and there is none here")


class _Mapped:
    """Touched memory of a mapping, as in the arena, registered in pieces."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8)
        self.flat[::4096].fill_(1)
        self._starts: list[int] = []

    def register(self, device: torch.device, stretch: int) -> None:
        for start in range(0, self.length, stretch):
            devices().register(device, self.address + start, min(stretch, self.length - start))
            self._starts.append(start)

    def unregister(self, device: torch.device) -> None:
        while self._starts:
            devices().unregister(device, self.address + self._starts.pop())


def _registration(place: Place) -> Found:
    mapped = _Mapped(1024 * MIB)
    found: Found = {"pinned before": mapped.flat.is_pinned()}
    torch.zeros(1, device=place.device)  # makes the context
    for stretch in (16 * MIB, 64 * MIB, 1024 * MIB):
        start = time.perf_counter()
        mapped.register(place.device, stretch)
        found[f"register_{stretch // MIB}_MiB_GB_per_s"] = (
            mapped.length / (time.perf_counter() - start) / 1e9
        )
        found["pinned"] = mapped.flat[: stretch // 2].is_pinned()
        start = time.perf_counter()
        mapped.unregister(place.device)
        found[f"unregister_{stretch // MIB}_MiB_GB_per_s"] = (
            mapped.length / (time.perf_counter() - start) / 1e9
        )
    if not found["pinned"]:
        raise RuntimeError("registered memory is not seen as pinned")
    return found


def _crossing(place: Place) -> Found:
    mapped = _Mapped(128 * MIB)
    mapped.register(place.device, 64 * MIB)
    there = torch.arange(100 * MIB // 8, device=place.device).view(torch.uint8)
    here = mapped.flat[: there.numel()]
    ways: dict[str, Callable[[], object]] = {
        "to the host": lambda: here.copy_(there),
        "to the host, not waited for": lambda: here.copy_(there, non_blocking=True),
        "to the device": lambda: there.copy_(here),
        "to the device, not waited for": lambda: there.copy_(here, non_blocking=True),
    }
    found: Found = {}
    for name, way in ways.items():
        try:
            way()
            place.finish()
            found[name] = "works"
        except RuntimeError as exc:
            found[name] = f"refused: {str(exc).splitlines()[0][:120]}"
    mapped.unregister(place.device)
    return found


def _refused(place: Place) -> Found:
    """A failed registration raises an error, and does not affect the next kernel of this thread."""
    mapped = _Mapped(16 * MIB)
    mapped.register(place.device, mapped.length)
    try:
        devices().register(place.device, mapped.address, mapped.length)
    except RuntimeError as exc:
        said = str(exc)
    else:
        raise RuntimeError("memory was registered twice")
    torch.ones(4, device=place.device).add_(1)
    place.finish()
    mapped.unregister(place.device)
    return {"said": said}


def _copies(place: Place) -> Found:
    """GB/s both ways, by the size of a piece: pinned, pageable, and many pieces by one call."""
    total = 4 * MIB if place.where.is_tiny else 1024 * MIB
    there = torch.randint(0, 255, (total,), dtype=torch.uint8, device=place.device)
    homes = {"pinned": place.pinned(total), "pageable": torch.ones(total, dtype=torch.uint8)}
    found: Found = {}
    for kind, here in homes.items():
        found[f"to_host_{kind}_GB_per_s"] = _speeds(
            place, total, partial(here.copy_, there, non_blocking=True)
        )
        found[f"to_device_{kind}_GB_per_s"] = _speeds(
            place, total, partial(there.copy_, here, non_blocking=True)
        )
    other = torch.empty_like(there)
    found["within_device_GB_per_s"] = _speeds(place, total, partial(other.copy_, there))
    for size in (64 << 10, MIB, 4 * MIB):
        count = min(total // size, 1024)
        targets, sources = (
            list(flat[: count * size].split(size)) for flat in (homes["pinned"], there)
        )
        call = partial(torch._foreach_copy_, targets, sources, non_blocking=True)
        found[f"to_host_pieces_of_{size >> 10}_KiB_GB_per_s"] = _speeds(place, count * size, call)
    return found


def _speeds(place: Place, size: int, call: Callable[[], object]) -> list[float]:
    timed(place, call)
    return [size / timed(place, call) / 1e9 for _ in range(2 if place.is_quick else 7)]


def _order(place: Place) -> Found:
    """Work that is queued after an event of a busy stream runs after it, and the host does not
    wait."""
    side, current = devices().stream(place.device), devices().current(place.device)
    value, seen = (
        torch.zeros(1 << 20, device=place.device),
        torch.zeros(1 << 20, device=place.device),
    )
    place.finish()
    start = time.perf_counter()
    with devices().on(side):
        place.keep_busy(0.2)
        value.add_(1)
    mark = devices().mark(side)
    was_reached = mark.query()
    devices().wait(current, mark)
    seen.copy_(value)
    queued_ms = 1e3 * (time.perf_counter() - start)
    mark.synchronize()
    reached_ms = 1e3 * (time.perf_counter() - start)
    place.finish()
    if was_reached or not bool((seen == 1).all()):
        raise RuntimeError(
            f"a mark was reached at once ({was_reached}), or what waits for it came first"
            f" ({seen[0].item()})"
        )
    return {"queued_ms": queued_ms, "reached_ms": reached_ms}


def _noticing(place: Place) -> Found:
    there = torch.ones(4, device=place.device)
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: there.sum().item(),
        "a copy that is waited for": lambda: there.cpu(),
        "a copy to pageable memory": lambda: torch.empty(4).copy_(there, non_blocking=True),
        "a mark that is waited for": (
            lambda: devices().mark(devices().current(place.device)).synchronize()
        ),
    }
    found: Found = {}
    for name, call in calls.items():
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
            found[name] = "not noticed"
        except RuntimeError:
            found[name] = "noticed"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if found["item"] != "noticed":
        raise RuntimeError("torch's mode for synchronisations notices nothing")
    return found


def _recording(place: Place) -> Found:
    """For each mode of a graph capture and each action of a background thread: whether the capture
    and the thread continue."""
    side, mapped = devices().stream(place.device), _Mapped(16 * MIB)

    def wait() -> None:
        with devices().on(side):
            place.keep_busy(0.1)
        devices().mark(side).synchronize()

    calls: dict[str, Callable[[], object]] = {
        "wait for a mark": wait,
        "register memory": lambda: mapped.register(place.device, mapped.length),
        "ask for a stream": lambda: devices().stream(place.device),
        "ask for pinned memory": lambda: devices().pinned((8 << 20,), torch.uint8),
    }
    found: Found = {
        "relaxed mode is there": driver.runtime_call("ThreadExchangeStreamCaptureMode") is not None
    }
    for mode in ("global", "thread_local", "relaxed"):
        for name, call in calls.items():
            found[f"{mode}, {name}"] = _recorded(place, mode, call)
        mapped.unregister(place.device)
    broken = [f"{name}: {how}" for name, how in found.items() if how not in ("works", True)]
    if broken:
        raise RuntimeError(f"not beside a recording: {'; '.join(broken)}")
    return found


def _recorded(place: Place, mode: str, call: Callable[[], object]) -> str:
    value, began, ended, errors = (
        torch.ones(4, device=place.device),
        threading.Event(),
        threading.Event(),
        list[str](),
    )

    def beside() -> None:
        began.wait(10)
        try:
            call()
        except RuntimeError as exc:
            errors.append(str(exc).splitlines()[0][:120])
        ended.set()

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
            value.add_(1)
            began.set()
            ended.wait(10)
            value.add_(1)
        graph.replay()
        place.finish()
        said = "works" if value[0].item() == 3 else f"replayed to {value[0].item()} instead of 3"
    except RuntimeError as exc:
        said = f"broken: {str(exc).splitlines()[0][:120]}"
    finally:
        began.set()
        thread.join()
    return said if not errors else f"our thread was refused: {errors[0]}"


def _overlap(place: Place) -> Found:
    """The slowdown of a computation by a copy of 1 GiB to the host at the same time."""
    here, there = (
        place.pinned(1024 * MIB),
        torch.empty(1024 * MIB, dtype=torch.uint8, device=place.device),
    )
    factor, long = (
        torch.randn(8192, 8192, device=place.device, dtype=torch.bfloat16),
        torch.zeros(256 * MIB, device=place.device),
    )
    side, found = devices().stream(place.device), Found()
    loads: dict[str, Callable[[], object]] = {
        "products": lambda: [factor @ factor for _ in range(24)],
        "sums": lambda: [long.add_(1) for _ in range(60)],
    }
    for name, load in loads.items():
        timed(place, load)
        alone, beside = list[float](), list[float]()
        for _ in range(5):
            alone.append(1e3 * timed(place, load))
            with devices().on(side):
                here.copy_(there, non_blocking=True)
            start = time.perf_counter()
            load()
            torch.cuda.current_stream().synchronize()
            beside.append(1e3 * (time.perf_counter() - start))
        found |= {f"{name}_alone_ms": alone, f"{name}_beside_ms": beside}
    return found


def _handles(place: Place) -> Found:
    """Another process copies device memory of this one by a handle. Checks the bytes, and measures
    the speed."""
    size = 1024 * MIB
    value = torch.randint(0, 255, (size,), dtype=torch.uint8, device=place.device)
    place.finish()
    storage: Any = value.untyped_storage()
    handle = storage._share_cuda_()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_copy_by_handle, args=(theirs, handle, size))
    child.start()
    theirs.close()
    try:
        total, opened_ms, speeds = ours.recv()
    finally:
        child.join(10)
    if total != _total(value):
        raise RuntimeError("another process reads other bytes than there are")
    return {"open_ms": opened_ms, "GB_per_s": speeds}


def _copy_by_handle(wire: Connection, handle: tuple[Any, ...], size: int) -> None:
    mine = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    storage = torch.UntypedStorage._new_shared_cuda(*handle)  # as torch's own reductions do
    opened_ms = 1e3 * (time.perf_counter() - start)
    theirs = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)[:size]
    speeds = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        mine.copy_(theirs)
        torch.cuda.synchronize()
        speeds.append(size / (time.perf_counter() - start) / 1e9)
    wire.send((_total(mine), opened_ms, speeds))


def _total(value: Tensor) -> int:
    return int(value.view(torch.int64).sum().item())
