"""The runtime's calls for memory that two processes have: what is passed, believed and given
back; with a runtime of our own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest

from datastates.system import devices

HANDLE = bytes(range(64))
WHERE, LENGTH = 0x7F00_0000_0000, 1 << 20
_Out = ctypes.POINTER(ctypes.c_void_p)
_KINDS = {
    "Malloc": ctypes.CFUNCTYPE(ctypes.c_int, _Out, ctypes.c_size_t),
    "Free": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p),
    "IpcGetMemHandle": ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(devices._Handle), ctypes.c_void_p
    ),
    "IpcOpenMemHandle": ctypes.CFUNCTYPE(ctypes.c_int, _Out, devices._Handle, ctypes.c_uint),
    "IpcCloseMemHandle": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p),
    "HostRegister": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "HostUnregister": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p),
    "GetLastError": ctypes.CFUNCTYPE(ctypes.c_int),
    "GetErrorString": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int),
}
_WHY = ctypes.create_string_buffer(b"out of patience")
_Range = ctypes.CFUNCTYPE(ctypes.c_int, _Out, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p)


class Runtime:
    """Calls by C's conventions.

    ``asked`` is what came; ``error`` what all of them return, ``start`` where opened memory
    begins."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.error, self.start = 0, WHERE
        calls: dict[str, Callable[..., int]] = {
            "Malloc": self.allocate,
            "Free": lambda where: self.said("free", where),
            "IpcGetMemHandle": self.export,
            "IpcOpenMemHandle": self.open,
            "IpcCloseMemHandle": lambda where: self.said("close", where),
            "HostRegister": lambda where, length, flags: self.said(
                "register", where, length, flags
            ),
            "HostUnregister": lambda where: self.said("unregister", where),
            "GetErrorString": lambda error: ctypes.addressof(_WHY),
            "GetLastError": lambda: self.said("forget") * 0,
        }
        self.calls = {name: _KINDS[name](call) for name, call in calls.items()}
        self.range = _Range(self.tell)

    def said(self, *what: object) -> int:
        self.asked.append(what)
        return self.error

    def allocate(self, out: ctypes.Array[ctypes.c_void_p], length: int) -> int:
        out[0] = WHERE
        return self.said("allocate", length)

    def export(self, out: ctypes.Array[devices._Handle], where: int) -> int:
        ctypes.memmove(out, HANDLE, 64)
        return self.said("export", where)

    def open(self, out: ctypes.Array[ctypes.c_void_p], handle: devices._Handle, flags: int) -> int:
        out[0] = WHERE
        return self.said("open", bytes(handle), flags)

    def tell(
        self,
        start: ctypes.Array[ctypes.c_void_p],
        length: ctypes.Array[ctypes.c_size_t],
        where: int,
    ) -> int:
        start[0], length[0] = self.start, LENGTH
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(devices, "runtime_call", made.calls.get)
    monkeypatch.setattr(devices, "_driver_call", lambda: made.range)
    return made


def test_memory_is_made_told_of_and_given_back(runtime: Runtime) -> None:
    where = devices.allocate(LENGTH)
    assert devices.export(where) == HANDLE
    devices.free(where)
    assert runtime.asked == [("allocate", LENGTH), ("export", WHERE), ("free", WHERE)]


def test_memory_of_ours_is_pinned_for_all_devices(runtime: Runtime) -> None:
    devices.register(WHERE, LENGTH)
    devices.unregister(WHERE)
    assert runtime.asked == [("register", WHERE, LENGTH, 1), ("unregister", WHERE)]


def test_a_handle_goes_to_the_driver_as_it_came_and_the_driver_says_how_long_the_memory_is(
    runtime: Runtime,
) -> None:
    assert devices.open_handle(HANDLE) == (WHERE, LENGTH)
    devices.close(WHERE)
    assert runtime.asked == [("open", HANDLE, 1), ("close", WHERE)]


def test_memory_of_which_the_driver_does_not_say_how_long_it_is_is_let_go(runtime: Runtime) -> None:
    runtime.start -= 4096
    with pytest.raises(RuntimeError, match="does not report the length"):
        devices.open_handle(HANDLE)
    assert runtime.asked[-1] == ("close", WHERE)


@pytest.mark.parametrize(
    "call",
    [
        lambda: devices.allocate(1),
        lambda: devices.open_handle(HANDLE),
        lambda: devices.export(WHERE),
        lambda: devices.register(WHERE, LENGTH),
        lambda: devices.unregister(WHERE),
    ],
)
def test_what_the_driver_refuses_is_an_error_that_nobody_else_is_told_of(
    call: Callable[[], object], runtime: Runtime
) -> None:
    runtime.error = 201
    with pytest.raises(RuntimeError, match="error 201: out of patience"):
        call()
    assert runtime.asked[-1] == ("forget",)


def test_a_runtime_that_only_torch_sees_is_found_by_what_is_mapped() -> None:
    (found,) = devices.loaded(("libc.so", "libc-2"))
    assert ctypes.CDLL(found, mode=os.RTLD_NOLOAD).getpid() == os.getpid()
    assert devices.loaded(("no library has this name",)) == []


def test_where_the_runtime_is_not_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "runtime_call", lambda name: None)
    for call in (lambda: devices.allocate(1), lambda: devices.open_handle(HANDLE)):
        with pytest.raises(RuntimeError, match="without the runtime"):
            call()


@pytest.mark.parametrize("raw", [b"", HANDLE[:-1]])
def test_a_handle_that_is_too_short_is_refused(raw: bytes, runtime: Runtime) -> None:
    with pytest.raises(RuntimeError, match="no handle"):
        devices.open_handle(raw)
    assert not runtime.asked
