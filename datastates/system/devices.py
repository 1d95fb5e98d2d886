"""All access to accelerators: streams, events, pinned memory and generators of CUDA, ROCm and XPU,
as ``torch`` offers them.

Other code in ``datastates`` and ``transport`` uses devices only by operators on tensors. This
module leaves unused devices untouched. Tests replace the devices (``swapped``) by one on which
everything happens late.

A *context* is the state of a process on a device, of hundreds of megabytes. The first call that
reaches the device makes one, and calls of a new thread reach device 0. Therefore each call for a
device is made with that device selected. While a user records a graph on one thread, drivers refuse
many calls on all other threads. Therefore calls are made with that rule off, since we record no
graphs.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from datastates.errors import Unsupported

HANDLE_BYTES = 64

LEAST_TORCH = (2, 6)


def check_torch() -> None:
    """Check the version of torch. The package has no bound for it, because pip would then replace
    a build that the user chose.

    :raises Unsupported: torch is too old.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise Unsupported(
            f"torch {torch.__version__} is installed, and datastates needs {least} or newer:"
            f" pip install 'torch>={least}', from the index of your build"
        )


_LAZY_PEER_ACCESS = 1
"""``cudaIpcMemLazyEnablePeerAccess``, the only value that there is."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process, not only for that of
one device."""

_RUNTIMES = ("libcudart", "libamdhip64")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def register(address: int, length: int) -> None:
    """Pin host memory that is mapped already.

    :raises RuntimeError: the driver refuses; the text has its reason.
    """
    _call(
        "HostRegister", ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_uint(_PORTABLE)
    )


def unregister(address: int) -> None:
    """Undo ``register``, while the memory is still mapped.

    :raises RuntimeError: the driver refuses.
    """
    _call("HostUnregister", ctypes.c_void_p(address))


def allocate(length: int) -> int:
    """The address of ``length`` bytes on the selected device, in a separate allocation.

    :raises RuntimeError: there is none; the text has the reason.
    """
    address = ctypes.c_void_p()
    _call("Malloc", ctypes.byref(address), ctypes.c_size_t(length))
    return int(address.value or 0)


def free(address: int) -> None:
    """Free the memory; no other process has it open any more.

    :raises RuntimeError: the driver refuses.
    """
    _call("Free", ctypes.c_void_p(address))


def export(address: int) -> bytes:
    """The handle with which another process of this host opens the memory.

    :raises RuntimeError: the driver refuses.
    """
    handle = _Handle()
    _call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_handle(raw: bytes) -> tuple[int, int]:
    """The address here of another process's memory on the selected device, and its length from the
    driver.

    :raises RuntimeError: it is not a handle, or the driver refuses it.
    """
    if len(raw) != HANDLE_BYTES:
        raise RuntimeError(f"{len(raw)} bytes are no handle of the driver")
    handle, address = _Handle.from_buffer_copy(raw), ctypes.c_void_p()
    opened = runtime_call("IpcOpenMemHandle")
    if opened is None:
        raise RuntimeError("this torch came without the runtime's calls")
    _check(
        "IpcOpenMemHandle", opened(ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
    )
    found, start, length = int(address.value or 0), ctypes.c_void_p(), ctypes.c_size_t()
    # the length from the peer is not trusted
    length_of = _driver_call()
    if (
        length_of is None
        or length_of(ctypes.byref(start), ctypes.byref(length), address) != 0
        or start.value != found
    ):
        close(found)
        raise RuntimeError("the driver does not report the length of the memory behind a handle")
    return found, int(length.value)


def close(address: int) -> None:
    """Release memory that was opened; nothing reads or writes it any more.

    :raises RuntimeError: the driver refuses.
    """
    _call("IpcCloseMemHandle", ctypes.c_void_p(address))


@functools.cache
def runtime_call(name: str) -> Any:
    """A call of the runtime that torch has loaded, by its name without ``cuda`` or ``hip``; None
    if torch came without it."""
    # the runtime is visible to all libraries, as usual, or only to libraries that loaded it
    paths = loaded(_RUNTIMES)
    libraries = [ctypes.CDLL(None), *(ctypes.CDLL(path, mode=os.RTLD_NOLOAD) for path in paths)]
    for library in libraries:
        for prefix in ("cuda", "hip"):
            if (call := getattr(library, prefix + name, None)) is not None:
                return call
    return None


def loaded(names: tuple[str, ...]) -> list[str]:
    """The paths of this process's libraries whose file names begin like this. Libraries in Python
    packages have a hash after the name."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = (
        line.split(maxsplit=5)[5]
        for line in maps.splitlines()
        if line.count("/") and not line.endswith(" (deleted)")
    )
    return [
        path for path in dict.fromkeys(paths) if Path(path).name.startswith(names) and ".so" in path
    ]


@functools.cache
def _driver_call() -> Callable[..., int] | None:
    for library, name in (
        ("libcuda.so.1", "cuMemGetAddressRange_v2"),
        ("libamdhip64.so", "hipMemGetAddressRange"),
    ):
        try:
            found: Callable[..., int] = getattr(ctypes.CDLL(library), name)
        except (AttributeError, OSError):
            continue
        return found
    return None


def _call(name: str, *arguments: object) -> None:
    call = runtime_call(name)
    if call is None:
        raise RuntimeError("this torch came without the runtime's calls")
    _check(name, call(*arguments))


def _check(name: str, error: int) -> None:
    if error:
        runtime_call("GetLastError")()  # or the next caller of the runtime would get this error
        raise RuntimeError(f"the driver refuses {name} (error {error}{_meaning(error)})")


def _meaning(error: int) -> str:
    call = runtime_call("GetErrorString")
    if call is None:
        return ""
    call.restype = ctypes.c_char_p
    said: bytes | None = call(error)
    return "" if said is None else f": {said.decode(errors='replace')}"


_ASYNCHRONOUS = frozenset({"cuda", "xpu"})
"""Kinds of devices (ROCm's call themselves ``cuda``) that have streams and events; others are
read and written like host memory."""

_PRIORITY = -1
"""The priority of our streams. torch hands out the same 32 streams of a priority again and again,
to all code of a process. Code that records graphs uses the usual priority, and work that we queued
on a stream being recorded would become a part of its graph.
"""

_RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``: recordings of other threads do not make a call of this
thread fail."""


class Mark(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the work has come that far."""

    def synchronize(self) -> None:
        """Wait on the host, asleep, until the work has come that far."""


class Stream(Protocol):
    """Work of a device that is done in order."""

    @property
    def device(self) -> torch.device:
        """The device that does the work."""


class Shared(Protocol):
    """Memory on a device that two processes of this host share."""

    @property
    def tensor(self) -> torch.Tensor:
        """All of the memory, flat and ``uint8``, valid until ``close``."""

    @property
    def handle(self) -> bytes:
        """The handle with which the other process opens the memory; empty in the process that
        opened it."""

    def close(self) -> None:
        """Release the memory; idempotent.

        No queued work may still read or write it. Its owner closes it last."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory, in bytes: all of it, what torch has or could have there, and the most that
    tensors took at once, as far as torch remembers. ``failures``: how often torch's allocator found
    no memory, or found some only after it had given back what it keeps.
    """

    total: int
    reach: int
    peak: int
    failures: int


@dataclass(frozen=True, slots=True)
class _Mark:
    device: torch.device
    event: Any

    def query(self) -> bool:
        with _selected(self.device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        with _selected(self.device):
            self.event.synchronize()


class _Memory:
    """Memory that the runtime allocated, described to torch as foreign memory."""

    def __init__(self, device: torch.device, address: int, length: int, handle: bytes) -> None:
        self.handle, self._device, self._address = handle, device, address
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        self._tensor: torch.Tensor | None = torch.as_tensor(self, device=device)

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "it was closed"
        return self._tensor

    def close(self) -> None:
        if self._tensor is None:
            return
        self._tensor = None
        with _selected(self._device):
            (free if self.handle else close)(self._address)


class Devices:
    """The accelerators for which this torch is built.

    Every method is safe from any thread. None waits for a device, except ``Mark.synchronize``."""

    @property
    def kind(self) -> str:
        """The kind as ``torch.device`` names it; "" if this torch is built for none."""
        found = _accelerator()
        return "" if found is None else found.type

    def of(self, tensor: torch.Tensor) -> torch.device:
        """The device of a tensor."""
        return tensor.device

    def is_on(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on an accelerator, where work is asynchronous, in the order of
        streams."""
        return tensor.device.type in _ASYNCHRONOUS

    def current(self, device: torch.device) -> Stream:
        """The stream on which this thread's operators are queued."""
        found: Stream = torch.get_device_module(device).current_stream(device)
        return found

    def stream(self, device: torch.device) -> Stream:
        """A new stream, which runs in parallel to other streams."""
        with _selected(device):
            made: Stream = torch.get_device_module(device).Stream(device, priority=_PRIORITY)
        return made

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Queue this thread's operators on that stream until the end of the block."""
        # The module's own context manager returns to the stream that was current, and so to its
        # device: that must be this one.
        with _selected(stream.device), torch.get_device_module(stream.device).stream(stream):
            yield

    def mark(self, stream: Stream) -> Mark:
        """The point after all work that is queued on a stream now."""
        module: Any = torch.get_device_module(stream.device)
        with _selected(stream.device):
            event = module.Event(blocking=True) if stream.device.type == "cuda" else module.Event()
            event.record(stream)
        return _Mark(stream.device, event)

    def wait(self, stream: Any, mark: Any) -> None:
        """Make everything that is queued on the stream from now on wait for the mark.

        The host does not wait."""
        with _selected(stream.device):
            stream.wait_event(mark.event)

    def is_recording(self, device: torch.device) -> bool:
        """Whether work that this thread queues there is recorded into a graph, and not executed
        now."""
        module = torch.get_device_module(device)
        is_recording = getattr(module, "is_current_stream_capturing", None)
        if is_recording is None:
            return False
        with module.device(device.index):
            return bool(is_recording())

    def memory(self, device: torch.device) -> Memory:
        """The device's memory, and how much of it was needed so far."""
        module = torch.get_device_module(device)
        with _selected(device):
            free, total = module.mem_get_info(device)
            stats = module.memory_stats(device)
        failures = stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0)
        return Memory(
            total,
            free + stats.get("reserved_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            failures,
        )

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for asynchronous copies from and to a device."""
        with _unhindered():  # torch itself selects a device that is in use
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def register(self, device: torch.device, address: int, length: int) -> None:
        """Pin host memory that is mapped already, for all devices, by the context of this one.

        :raises RuntimeError: the driver refuses; the text has its reason.
        """
        _check_registers(device)
        with _selected(device):
            register(address, length)

    def unregister(self, device: torch.device, address: int) -> None:
        """Undo ``register``.

        :raises RuntimeError: the driver refuses; the text has its reason.
        """
        _check_registers(device)
        with _selected(device):
            unregister(address)

    def in_use(self) -> Sequence[torch.device]:
        """The devices that this process uses already."""
        module = _module()
        if module is None or not module.is_initialized():
            return []
        # asking whether this process has a context on a device makes none
        has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        if has_context is None or not torch.version.cuda:
            has_context = module.memory_reserved
        found = [index for index in range(module.device_count()) if has_context(index)]
        return [torch.device(self.kind, index) for index in found]

    def share(self, device: torch.device, length: int) -> Shared:
        """Memory there that another process of this host may open.

        :raises RuntimeError: there is none, or the driver cannot; the text has the reason.
        """
        with _selected(device):
            address = allocate(length)
            try:
                return _Memory(device, address, length, _name(device) + export(address))
            except BaseException:
                free(address)
                raise

    def open_shared(self, handle: bytes) -> Shared:
        """The memory that another process shares, if this process uses that device already.

        :raises RuntimeError: this process does not use the device, or the handle is not one; the
            text has the reason.
        """
        name, raw = handle[:-HANDLE_BYTES], handle[-HANDLE_BYTES:]
        device = next((each for each in self.in_use() if name and _name(each) == name), None)
        if device is None:
            raise RuntimeError(
                "this process does not use the device on which the memory is that is to be opened"
            )
        with _selected(device):
            address, length = open_handle(raw)
            try:
                return _Memory(device, address, length, b"")
            except BaseException:
                close(address)
                raise

    def generators(self) -> Mapping[int, torch.Tensor]:
        """The states of the random number generators of the devices that this process uses, by
        index."""
        return {
            device.index: torch.get_device_module(device).get_rng_state(device.index)
            for device in self.in_use()
        }

    def set_generators(self, states: Mapping[int, torch.Tensor]) -> int:
        """Set the generators of those devices that this machine has; returns how many it has."""
        module = _module()
        here = int(module.device_count()) if module is not None and module.is_available() else 0
        for index, state in states.items():
            if index < here:
                module.set_rng_state(state, index)
        return here


_current = Devices()


def devices() -> Devices:
    """The accelerators of this process."""
    return _current


@contextmanager
def swapped(others: Devices) -> Iterator[None]:
    """Replace the accelerators of this process until the end of the block; for tests."""
    global _current
    before, _current = _current, others
    try:
        yield
    finally:
        _current = before


def built_for() -> str | None:
    """The accelerators for which this torch is built, and the version of their library. None
    if torch is built for none."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return devices().kind or None


def names() -> list[str]:
    """The names of the accelerators of this machine."""
    module = _module()
    if module is None or not module.is_available():
        return []
    return [str(module.get_device_name(index)) for index in range(module.device_count())]


def visible() -> list[str]:
    """The accelerators that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them. None of
    them is initialized."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [each.strip() for each in named.split(",") if each.strip() not in ("", "-1")]
    module = _module()
    return [] if module is None else [str(index) for index in range(module.device_count())]


def _module() -> Any:
    """torch's module for the accelerators for which it is built. None if none of them
    has streams."""
    kind = _accelerator()
    return (
        torch.get_device_module(kind) if kind is not None and kind.type in _ASYNCHRONOUS else None
    )


def _accelerator() -> torch.device | None:
    """The accelerator for which this torch is built, or None."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises this if it is built for none
        return None


@contextmanager
def _selected(device: torch.device) -> Iterator[None]:
    """Select the device, and allow calls while other threads record. Afterwards the earlier device
    is selected again only if it is in use.
    """
    with (
        torch.get_device_module(device).device(device.index),
        _unhindered(),
    ):
        # torch.accelerator.device_index came with torch 2.8
        yield


@contextmanager
def _unhindered() -> Iterator[None]:
    """Allow calls of this thread while other threads record graphs."""
    exchange = runtime_call("ThreadExchangeStreamCaptureMode")
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _name(device: torch.device) -> bytes:
    """The name of a device for every process of this host, whichever number it has there."""
    return str(torch.get_device_module(device).get_device_properties(device).uuid).encode()


def _check_registers(device: torch.device) -> None:
    if device.type != "cuda":
        raise RuntimeError(f"memory of ours cannot be pinned for {device.type}")
