"""A clone into tensors of a device that does everything late: after what their owner queued, and
whole when it is committed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from datastates.transport.receive_buffers import DeviceWriter
from datastates.transport.receive_objects import ObjectsSink
from tests.support.cloning import Sent, check_landing, feed, sent
from tests.support.late import LateDevices, Lateness
from tests.support.late.digests import digesting_at_once
from tests.support.planting import without


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1100, 1100), nn.BatchNorm1d(1100), nn.Linear(1100, 1100))


@pytest.fixture(scope="module")
def state() -> Sent:
    return sent({"model": model(1)})


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_what_lands_on_a_device_lands_in_order(lateness: Lateness, state: Sent) -> None:
    check_landing(state, model, lateness)


def test_an_atomic_clone_into_a_device_is_written_in_order(state: Sent) -> None:
    check_landing(state, model, Lateness.BOTH, atomic=True)


PLANTED: dict[str, tuple[Lateness, type, str, str, str]] = {
    "copies do not wait for the owner": (
        *(
            Lateness.COMPUTE,
            DeviceWriter,
            "__init__",
            "devices().wait(side, devices().mark(devices().current(device)))",
            "pass",
        ),
    ),
    "nobody waits for the copies": (
        Lateness.COPIES,
        ObjectsSink,
        "commit",
        "self._device_writer.join()",
        "self._device_writer._streams.clear()",
    ),
    "buffers are given away while they are read": (
        *(
            Lateness.COPIES,
            ObjectsSink,
            "_settle",
            "self._scratch.give(arriving.scratch, marks)",
            "self._scratch.give(arriving.scratch)",
        ),
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_wait_of_a_clone_that_is_taken_out_is_noticed(
    planted: tuple[Lateness, type, str, str, str], state: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    lateness, *fault = planted
    plant: Callable[..., None] = without
    plant(monkeypatch, *fault)
    with pytest.raises(AssertionError):
        check_landing(state, model, lateness)


def test_a_clone_waits_for_the_device_once_where_buffers_are_enough(state: Sent) -> None:
    late, here = LateDevices(Lateness.COMPUTE), model(2)
    late.put(here)
    with late.running():
        sink = ObjectsSink(state.checked, {"model": here}, atomic=False)
        before = late.schedule.waits_of_this_thread()
        feed(sink, state.chunks)
        assert late.schedule.waits_of_this_thread() == before
        sink.commit()
        sink.close()
        late.schedule.catch_up()


@pytest.mark.parametrize("cores", [1, 64], ids=["the device checks", "the host checks"])
def test_a_clone_of_many_small_tensors_launches_few_operators(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """360 tensors in two chunks. A copy of many tensors in one call counts once for each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    state = sent({"model": nn.Sequential(*(nn.Linear(100, 100) for _ in range(180)))})
    late, here = (
        LateDevices(Lateness.BOTH),
        nn.Sequential(*(nn.Linear(100, 100) for _ in range(180))),
    )
    late.put(here)
    with digesting_at_once(), late.running():
        sink = ObjectsSink(state.checked, {"model": here}, atomic=False)
        before = late.schedule.launches_of_this_thread()
        feed(sink, state.chunks)
        assert late.schedule.launches_of_this_thread() - before <= 360 + 8 * len(state.chunks)
        sink.commit()
        sink.close()
        late.schedule.catch_up()
