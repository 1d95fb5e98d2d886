"""What is asked for a device is asked with that device selected; here of a library that only
writes down what it is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.errors import Unsupported
from datastates.system import devices as driver
from datastates.system import devices as seam
from datastates.system.devices import Memory, devices

DEVICE = torch.device("cuda", 1)

TOLD: dict[str, Any] = {
    "mem_get_info": (30, 80),
    "memory_stats": {
        "reserved_bytes.all.current": 20,
        "allocated_bytes.all.peak": 15,
        "num_alloc_retries": 3,
        "num_ooms": 1,
    },
}


class Stream:
    """One of the library's. Asks it whatever it is asked itself."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self._library, self.device = library, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class Library:
    """torch's module for CUDA.

    ``asked`` has what was asked, with which device selected, and in which mode."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.selected, self.mode, self.priority = 0, 0, 0

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.selected = self.selected, index
        yield
        self.selected = before

    def Stream(self, device: torch.device, priority: int) -> Stream:
        self.asked.append(("Stream", self.selected, self.mode))
        self.priority = priority
        return Stream(self, device)

    def exchange(self, mode: Any) -> None:
        found = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        self.mode, found[0] = found[0], self.mode

    def __getattr__(self, name: str) -> Any:
        def ask(*_: object, **__: object) -> Any:
            self.asked.append((name, self.selected, self.mode))
            if name in TOLD:
                return TOLD[name]
            return nullcontext() if name == "stream" else self

        return ask


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    for name in ("register", "unregister"):
        monkeypatch.setattr(driver, name, getattr(made, name))
    monkeypatch.setattr(seam, "runtime_call", lambda name: made.exchange)
    return made


def test_every_call_for_a_device_is_made_with_that_device_selected_and_minds_no_recording(
    library: Library,
) -> None:
    stream = devices().stream(DEVICE)
    with devices().on(stream):
        assert library.selected == 1
    mark = devices().mark(stream)
    devices().wait(stream, mark)
    mark.query()
    mark.synchronize()
    devices().register(DEVICE, 4096, 4096)
    devices().unregister(DEVICE, 4096)
    names = [
        "Stream",
        "stream",
        "Event",
        "record",
        "wait_event",
        "query",
        "synchronize",
        "register",
        "unregister",
    ]
    assert library.asked == [(name, 1, 2) for name in names]
    assert (library.selected, library.mode) == (0, 0)


def test_a_stream_of_ours_is_none_of_those_on_which_graphs_are_recorded(library: Library) -> None:
    devices().stream(DEVICE)
    assert library.priority == -1


def test_a_device_has_what_is_free_and_what_torch_keeps_there(library: Library) -> None:
    assert devices().memory(DEVICE) == Memory(total=80, reach=50, peak=15, failures=4)
    assert library.asked == [("mem_get_info", 1, 2), ("memory_stats", 1, 2)]


def test_memory_is_pinned_whatever_another_thread_records(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, modes = torch.empty, list[int]()

    def pinned(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        modes.append(library.mode)
        assert pin_memory
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", pinned)
    assert devices().pinned((2, 3), torch.float32).shape == (2, 3)
    assert (modes, library.mode, library.selected) == ([2], 0, 0)


def test_whether_a_graph_is_recorded_is_asked_as_the_user_records_it(library: Library) -> None:
    assert devices().is_recording(DEVICE)
    assert library.asked == [("is_current_stream_capturing", 1, 0)]


def test_memory_for_devices_without_registration_is_refused_by_name() -> None:
    device = torch.device("xpu", 0)
    for call in (
        partial(devices().register, device, 4096, 4096),
        partial(devices().unregister, device, 4096),
    ):
        with pytest.raises(RuntimeError, match="cannot be pinned for xpu"):
            call()


def test_a_torch_without_accelerators_has_none() -> None:
    if torch.accelerator.current_accelerator() is not None:
        pytest.skip("this torch is built for an accelerator")
    assert (
        devices().kind,
        devices().generators(),
        devices().set_generators({0: torch.zeros(1)}),
    ) == ("", {}, 0)
    assert (seam.built_for(), seam.names()) == (None, [])


def test_a_torch_that_says_by_an_error_that_it_has_none_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("Please register an accelerator")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    assert (devices().kind, devices().in_use(), seam.names()) == ("", [], [])


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("2.5.1+cpu", True), ("1.13.0", True), ("2.6.0", False), ("2.10.0a0+git", False)],
)
def test_a_torch_that_is_too_old_is_refused_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, is_old: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    if is_old:
        with pytest.raises(Unsupported, match=r"pip install 'torch>=2\.6'"):
            datastates.open(tmp_path)
        assert not any(tmp_path.iterdir())
    else:
        seam.check_torch()
