"""The one door to accelerators: streams, events, pinned memory and generators of CUDA, ROCm and XPU, as ``torch`` offers them.

Nothing else in ``datastates`` or ``transport`` touches a device but by operators on tensors. So it is here that a device which nobody
uses stays untouched, and it is here that tests put a device of their own (``swapped``), on which everything happens late.

A *context* is what a process has on a device that it uses: hundreds of megabytes there. The first call that reaches the device makes it,
and calls of a fresh thread reach device 0: so whatever is asked for a device is asked with that device selected. While a user records a
graph on one thread, drivers refuse much on all others: so it is asked with that rule off, too, which concerns no graph of ours.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Devices", "Mark", "Stream", "built_for", "devices", "names", "swapped"]

_ASYNCHRONOUS = frozenset({"cuda", "xpu"})
"""Kinds of devices (ROCm's call themselves ``cuda``) that have streams and events; any other is read and written as host memory is."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process, not for that of one device."""

_RELAXED = 2
"""``cudaStreamCaptureModeRelaxed``: what other threads record is no reason to refuse a call of this one."""


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
        """Whose work."""


class Devices(Protocol):
    """What we ask of accelerators. Every method is safe from any thread; none waits for a device, but ``Mark.synchronize`` does."""

    @property
    def kind(self) -> str:
        """As ``torch.device`` calls them; "" where this torch is built for none."""

    def of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor lies."""

    def is_on(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on an accelerator: what is queued on it happens later, in the order of streams."""

    def current(self, device: torch.device) -> Stream:
        """The stream on which this thread's operators are queued."""

    def stream(self, device: torch.device) -> Stream:
        """A stream that runs beside the others."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue this thread's operators on that stream."""

    def mark(self, stream: Stream) -> Mark:
        """The point behind what is queued on a stream by now."""

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Nothing of what is queued on the stream from now on begins before the mark is reached. The host goes on."""

    def is_recording(self, device: torch.device) -> bool:
        """Whether what this thread queues there becomes a graph, to be replayed, and does not happen now."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies from and to a device may use while the host goes on."""

    def register(self, device: torch.device, address: int, length: int) -> None:
        """Pin host memory that is mapped already, for all devices, by the context of this one.

        :raises RuntimeError: the driver refuses; says why.
        """

    def unregister(self, device: torch.device, address: int) -> None:
        """Undo it.

        :raises RuntimeError: the driver refuses; says why.
        """

    def generators(self) -> Mapping[int, torch.Tensor]:
        """The states of the random number generators of the devices that this process uses, by index."""

    def set_generators(self, states: Mapping[int, torch.Tensor]) -> int:
        """Set the generators of those devices that are here; how many are."""


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


class _Torch:
    """Whichever accelerator this torch is built for."""

    @property
    def kind(self) -> str:
        found = torch.accelerator.current_accelerator()
        return "" if found is None else found.type

    def of(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device

    def is_on(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type in _ASYNCHRONOUS

    def current(self, device: torch.device) -> Stream:
        found: Stream = torch.get_device_module(device).current_stream(device)
        return found

    def stream(self, device: torch.device) -> Stream:
        with _selected(device):
            made: Stream = torch.get_device_module(device).Stream(device)
        return made

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        # The module's own context manager goes back to the stream that was current, and by that to its device: it must be this one.
        with _selected(stream.device), torch.get_device_module(stream.device).stream(stream):
            yield

    def mark(self, stream: Stream) -> Mark:
        module: Any = torch.get_device_module(stream.device)
        with _selected(stream.device):
            event = module.Event(blocking=True) if stream.device.type == "cuda" else module.Event()
            event.record(stream)
        return _Mark(stream.device, event)

    def wait(self, stream: Any, mark: Any) -> None:
        with _selected(stream.device):
            stream.wait_event(mark.event)

    def is_recording(self, device: torch.device) -> bool:
        is_recording = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
        if is_recording is None:
            return False
        with torch.accelerator.device_index(device.index):
            return bool(is_recording())

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def register(self, device: torch.device, address: int, length: int) -> None:
        with _selected(device):
            torch.cuda.check_error(int(_runtime(device).cudaHostRegister(address, length, _PORTABLE)))

    def unregister(self, device: torch.device, address: int) -> None:
        with _selected(device):
            torch.cuda.check_error(int(_runtime(device).cudaHostUnregister(address)))

    def generators(self) -> Mapping[int, torch.Tensor]:
        module = _module()
        if module is None or not module.is_initialized():
            return {}
        return {index: module.get_rng_state(index) for index in range(module.device_count()) if _is_used(module, index)}

    def set_generators(self, states: Mapping[int, torch.Tensor]) -> int:
        module = _module()
        here = int(module.device_count()) if module is not None and module.is_available() else 0
        for index, state in states.items():
            if index < here:
                module.set_rng_state(state, index)
        return here


_current: Devices = _Torch()


def devices() -> Devices:
    """The accelerators of this process."""
    return _current


@contextmanager
def swapped(others: Devices) -> Iterator[None]:
    """Put others in their place; for tests."""
    global _current
    before, _current = _current, others
    try:
        yield
    finally:
        _current = before


def built_for() -> str | None:
    """Which accelerators this torch is built for, and the version of their library; None: for none."""
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return devices().kind or None


def names() -> list[str]:
    """The names of the accelerators that are here."""
    module = _module()
    if module is None or not module.is_available():
        return []
    return [str(module.get_device_name(index)) for index in range(module.device_count())]


def _module() -> Any:
    """torch's module for the accelerators that it is built for; None: for none that has streams."""
    kind = torch.accelerator.current_accelerator()
    return torch.get_device_module(kind) if kind is not None and kind.type in _ASYNCHRONOUS else None


def _is_used(module: Any, index: int) -> bool:
    """Whether this process has a context there; asking makes none."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is not None and torch.version.cuda:
        return bool(has_context(index))
    return bool(module.memory_reserved(index) > 0)


@contextmanager
def _selected(device: torch.device) -> Iterator[None]:
    """With that device selected, and whatever another thread records; what was selected before is again only if it is in use."""
    exchange = _exchange_mode()
    with torch.accelerator.device_index(device.index):
        if exchange is None:
            yield
            return
        mode = ctypes.c_int(_RELAXED)
        exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            exchange(ctypes.byref(mode))


@functools.cache
def _exchange_mode() -> Any:
    """The runtime's call that says what concerns this thread while others record graphs; None where torch did not bring it along."""
    for name in ("cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"):
        try:
            return getattr(ctypes.CDLL(None), name)
        except (AttributeError, OSError):
            continue
    return None


def _runtime(device: torch.device) -> Any:
    if device.type != "cuda":
        raise RuntimeError(f"torch cannot pin memory of ours for {device.type}")
    runtime: Any = torch.cuda.cudart  # without types
    return runtime()
