"""The runtime's calls that torch does not offer: memory of a device that another process may open. For ``devices`` alone.

CUDA's and HIP's names differ by their beginning only. torch's own way to share memory (its reductions) takes the name of a file from
whoever sends it, which must not be a peer's: so a handle here is what the driver gave, 64 bytes, and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["HANDLE_BYTES", "allocate", "close", "export", "free", "open_handle", "runtime_call"]

HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1
"""``cudaIpcMemLazyEnablePeerAccess``, the only value that there is."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def allocate(length: int) -> int:
    """The address of so much memory of the selected device, of which nobody else has a part.

    :raises RuntimeError: there is none; says why.
    """
    address = ctypes.c_void_p()
    _call("Malloc", ctypes.byref(address), ctypes.c_size_t(length))
    return int(address.value or 0)


def free(address: int) -> None:
    """Give it back; nobody else has it open any more.

    :raises RuntimeError: the driver refuses.
    """
    _call("Free", ctypes.c_void_p(address))


def export(address: int) -> bytes:
    """By what another process of this host opens it.

    :raises RuntimeError: the driver refuses.
    """
    handle = _Handle()
    _call("IpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_handle(raw: bytes) -> tuple[int, int]:
    """The address here of another process's memory on the selected device, and its length, as the driver knows it.

    :raises RuntimeError: it is no handle, or the driver refuses it.
    """
    if len(raw) != HANDLE_BYTES:
        raise RuntimeError(f"{len(raw)} bytes are no handle of the driver")
    handle, address = _Handle.from_buffer_copy(raw), ctypes.c_void_p()
    opened = runtime_call("IpcOpenMemHandle")
    if opened is None:
        raise RuntimeError("this torch came without the runtime's calls")
    _check("IpcOpenMemHandle", opened(ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)))
    found = int(address.value or 0)
    try:
        return found, _length(found)
    except BaseException:
        close(found)
        raise


def close(address: int) -> None:
    """Let go of what was opened; nothing reads or writes it any more.

    :raises RuntimeError: the driver refuses.
    """
    _call("IpcCloseMemHandle", ctypes.c_void_p(address))


@functools.cache
def runtime_call(name: str) -> Any:
    """A call of the runtime that torch has loaded, by its name without ``cuda`` or ``hip``; None where torch did not bring it along."""
    for prefix in ("cuda", "hip"):
        try:
            return getattr(ctypes.CDLL(None), prefix + name)
        except (AttributeError, OSError):
            continue
    return None


def _length(address: int) -> int:
    """How much memory there is: what a peer says of its own is not believed."""
    start, length = ctypes.c_void_p(), ctypes.c_size_t()
    ask = _driver_call()
    if ask is None or ask(ctypes.byref(start), ctypes.byref(length), ctypes.c_void_p(address)) != 0 or start.value != address:
        raise RuntimeError("the driver does not say how long the memory behind a handle is")
    return int(length.value)


@functools.cache
def _driver_call() -> Callable[..., int] | None:
    for library, name in (("libcuda.so.1", "cuMemGetAddressRange_v2"), ("libamdhip64.so", "hipMemGetAddressRange")):
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
        runtime_call("GetLastError")()  # or the next call of anybody would be told of it
        raise RuntimeError(f"the driver refuses {name} (error {error})")
