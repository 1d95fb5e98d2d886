"""The cases of ``make gpu`` with two ranks on one device, and with a device that runs out of
memory, on late devices and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu.place import Place
from gpu.ranks import captured, cloned, restored, short
from gpu.where import Where

from tests.support.jobs import run


@pytest.mark.parametrize(
    ("device", "made", "ways"), [("late", "replicated", 2), ("cpu", "sharded", 1)]
)
def test_two_ranks_on_one_device_capture_and_restore_what_each_had(
    device: str, made: str, ways: int, tmp_path: Path
) -> None:
    job = {"folder": str(tmp_path), "device": device, "made": made}
    compared = [["17"] * ways] * 2
    assert run(2, "tests.gpu_run.rank:work", **job) == compared


@pytest.mark.parametrize("tried", [captured, restored, cloned])
def test_a_late_device_without_memory_fails_nothing(tried: Callable[[Place, int], int]) -> None:
    found = short(Place(Where("late", is_quick=True)), tried)
    assert (found["skipped"] > 0) is (tried is captured)
