"""Registers memory with a device, so that copies from and to it are asynchronous, and unregisters it before it is unmapped."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from datastates.errors import Unavailable
from datastates.system.devices import devices

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceRegistrar", "Pinned", "Registrar"]

_logger = logging.getLogger(__name__)


class Registrar(Protocol):
    """Registers stretches of host memory. A stretch must stay mapped until it is unregistered; two never overlap."""

    def register(self, address: int, length: int) -> None:
        """Pin a stretch.

        :raises Unavailable: the driver refuses; says why.
        """

    def unregister(self, address: int) -> None:
        """Unpin the stretch that begins at this address. Never raises."""


class DeviceRegistrar:
    """Registers memory with the driver, in the context of a device that is in use, so that no other device gets a context."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._devices = device, devices()

    def register(self, address: int, length: int) -> None:
        """Pin a stretch, for all devices."""
        try:
            self._devices.register(self._device, address, length)
        except RuntimeError as exc:  # including torch's own CudaError
            raise Unavailable(f"{length} bytes of memory cannot be registered with {self._device} ({exc})") from exc

    def unregister(self, address: int) -> None:
        """Unpin a stretch. This fails only when the driver is shutting down, and has released everything by itself."""
        with suppress(RuntimeError):
            self._devices.unregister(self._device, address)


class Pinned:
    """The registered stretches of one mapping. ``owner`` keeps them mapped: it is held until all are unregistered.

    Once a registration is refused, no more are tried, and copies use pageable memory, which is slower but just as correct.
    """

    def __init__(self, registrar: Registrar, owner: object) -> None:
        self._registrar, self._owner = registrar, owner
        self._starts: list[int] = []
        self._edges: list[int] = []
        self._is_refused = False
        self._lock = threading.Lock()

    def add(self, address: int, length: int) -> None:
        """Register the stretch that follows all others; does nothing once one was refused."""
        with self._lock:
            if self._is_refused or self._owner is None:
                return
            try:
                self._edges.append(address)
                self._registrar.register(address, length)
            except Unavailable as exc:
                self._is_refused = True
                _logger.warning("%s: captures from a device go through pageable memory, and take longer", exc)
                return
            self._starts.append(address)

    def is_joint(self, first: int, last: int) -> bool:
        """Whether two addresses lie in one registration: a copy from or to a device may not cross from one into another."""
        with self._lock:
            return bisect_right(self._edges, first) == bisect_right(self._edges, last)

    def let_go(self) -> None:
        """Unregister all, then release the owner; idempotent."""
        with self._lock:
            starts, self._starts = self._starts, []
            for start in starts:
                self._registrar.unregister(start)
            self._owner = None

    def leave_to_parent(self) -> None:
        """Start afresh in a forked child, where nothing is registered, and where a thread that held the lock does not exist."""
        self._lock, self._starts, self._owner = threading.Lock(), [], None
