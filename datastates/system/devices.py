"""The one door to accelerators: streams, events, pinned memory and generators of CUDA, ROCm and XPU, as ``torch`` offers them.

Nothing else in ``datastates`` or ``transport`` touches a device but by operators on tensors. So it is here that a device which nobody
uses stays untouched, and it is here that tests put a device of their own (``swapped``), on which everything happens late.

A *context* is what a process has on a device that it uses: hundreds of megabytes there. The first call that reaches the device makes it,
and calls of a fresh thread reach device 0: so whatever is asked for a device is asked with that device selected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

__all__ = ["Devices", "Event", "Stream", "built_for", "devices", "names", "swapped"]

_ASYNCHRONOUS = frozenset({"cuda", "xpu"})
"""Kinds of devices (ROCm's call themselves ``cuda``) that have streams and events; any other is read and written as host memory is."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process, not for that of one device."""


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the work has come that far."""

    def synchronize(self) -> None:
        """Wait on the host until the work has come that far."""


class Stream(Protocol):
    """Work of a device that is done in order."""

    def wait_event(self, event: Any) -> None:
        """Do nothing of what is queued from now on until the event has happened. The host does not wait."""

    def wait_stream(self, other: Any) -> None:
        """The same, for what is queued on another stream by now."""


class Devices(Protocol):
    """What we ask of accelerators. Every method is safe from any thread; none but ``Event.synchronize`` waits for a device."""

    def of(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor lies."""

    def is_on(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on an accelerator: what is queued on it happens later, in the order of streams."""

    def is_in_use(self) -> bool:
        """Whether this process uses an accelerator already."""

    def current(self, device: torch.device) -> Stream:
        """The stream on which this thread's operators are queued."""

    def stream(self, device: torch.device) -> Stream:
        """A stream that runs beside the others."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue this thread's operators on that stream."""

    def mark(self, stream: Stream) -> Event:
        """An event behind what is queued on the stream by now. A host thread that waits for it sleeps."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Give the tensor's memory to nobody else before what is queued on the stream by now is done, even if the tensor goes."""

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

    def generators(self) -> list[torch.Tensor]:
        """The state of each device's random number generator; empty where none is in use."""

    def set_generators(self, states: Sequence[torch.Tensor]) -> int:
        """Set the generators of the devices that are here; the number of those."""


class _Torch:
    """Whichever accelerator this torch is built for."""

    def of(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device

    def is_on(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type in _ASYNCHRONOUS

    def is_in_use(self) -> bool:
        module = _module()
        return module is not None and bool(module.is_initialized())

    def current(self, device: torch.device) -> Stream:
        found: Stream = torch.get_device_module(device).current_stream(device)
        return found

    def stream(self, device: torch.device) -> Stream:
        with _selected(device):
            made: Stream = torch.get_device_module(device).Stream(device)
        return made

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        # The module's own context manager goes back to the stream that was current, and by that to its device: it must be this one.
        with _selected(stream.device), torch.get_device_module(stream.device).stream(stream):
            yield

    def mark(self, stream: Any) -> Event:
        module: Any = torch.get_device_module(stream.device)
        with _selected(stream.device):
            event: Any = module.Event(blocking=True) if stream.device.type == "cuda" else module.Event()
            event.record(stream)
        marked: Event = event
        return marked

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def register(self, device: torch.device, address: int, length: int) -> None:
        runtime = _runtime(device)
        with _selected(device):
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, length, _PORTABLE)))

    def unregister(self, device: torch.device, address: int) -> None:
        runtime = _runtime(device)
        with _selected(device):
            torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))

    def generators(self) -> list[torch.Tensor]:
        module = _module()
        if module is None or not module.is_initialized():
            return []
        return [module.get_rng_state(index) for index in range(module.device_count())]

    def set_generators(self, states: Sequence[torch.Tensor]) -> int:
        module = _module()
        here = int(module.device_count()) if module is not None and module.is_available() else 0
        for index, state in enumerate(states[:here]):
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
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else kind.type


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


def _selected(device: torch.device) -> AbstractContextManager[None]:
    """With that device selected; what was before is selected again only if it is in use."""
    return torch.accelerator.device_index(device.index)


def _runtime(device: torch.device) -> Any:
    if device.type != "cuda":
        raise RuntimeError(f"torch cannot pin memory of ours for {device.type}")
    runtime: Any = torch.cuda.cudart  # without types
    return runtime()
