"""The runtime's calls that torch does not offer, or offers without their errors: for host memory that is pinned where it is mapped, and for
memory of a device that another process may open. Only ``devices`` uses them.

CUDA's and HIP's names differ only by their beginning. A call that fails leaves its error behind on its thread, and the next launch of a
kernel there, above all by torch, would take it for its own. So the error is cleared here, by the same library that was called.

torch's own way to share memory (its reductions) takes the name of a file from the sender, which a peer must not choose. So a handle
here is what the driver gave, 64 bytes, and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["HANDLE_BYTES", "allocate", "close", "export", "free", "open_handle", "register", "runtime_call", "unregister"]

HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1
"""``cudaIpcMemLazyEnablePeerAccess``, the only value that there is."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process, not only for that of one device."""

_RUNTIMES = ("libcudart", "libamdhip64")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def register(address: int, length: int) -> None:
    """Pin host memory that is mapped already.

    :raises RuntimeError: the driver refuses; says why.
    """
    _call("HostRegister", ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_uint(_PORTABLE))


def unregister(address: int) -> None:
    """Undo ``register``, while the memory is still mapped.

    :raises RuntimeError: the driver refuses.
    """
    _call("HostUnregister", ctypes.c_void_p(address))


def allocate(length: int) -> int:
    """The address of ``length`` bytes on the selected device, in an allocation that nothing else shares.

    :raises RuntimeError: there is none; says why.
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
    """The address here of another process's memory on the selected device, and its length, as the driver knows it.

    :raises RuntimeError: it is not a handle, or the driver refuses it.
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
    """Release memory that was opened; nothing reads or writes it any more.

    :raises RuntimeError: the driver refuses.
    """
    _call("IpcCloseMemHandle", ctypes.c_void_p(address))


@functools.cache
def runtime_call(name: str) -> Any:
    """A call of the runtime that torch has loaded, by its name without ``cuda`` or ``hip``; None if torch came without it."""
    found = (getattr(library, prefix + name, None) for library in _libraries() for prefix in ("cuda", "hip"))
    return next((call for call in found if call is not None), None)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """The places where the runtime may be: visible to all libraries, as usual, or loaded only for the libraries that asked for it."""
    return (ctypes.CDLL(None), *(ctypes.CDLL(path, mode=os.RTLD_NOLOAD) for path in loaded(_RUNTIMES)))


def loaded(names: tuple[str, ...]) -> list[str]:
    """The paths of this process's libraries whose file names begin like this; a wheel's own libraries have a hash behind that."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/") and not line.endswith(" (deleted)"))
    return [path for path in dict.fromkeys(paths) if Path(path).name.startswith(names) and ".so" in path]


def _length(address: int) -> int:
    """The length of the memory as the driver knows it; what a peer says of its own is not believed."""
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
        runtime_call("GetLastError")()  # or the next caller of the runtime would be told of it
        raise RuntimeError(f"the driver refuses {name} (error {error}{_meaning(error)})")


def _meaning(error: int) -> str:
    call = runtime_call("GetErrorString")
    if call is None:
        return ""
    call.restype = ctypes.c_char_p
    said: bytes | None = call(error)
    return "" if said is None else f": {said.decode(errors='replace')}"
