"""A clone into tensors of a device that runs out of memory, at each allocation in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from datastates.transport import receive_objects
from datastates.transport.receive_objects import ObjectsSink
from tests.support.cloning import Sent, feed, sent
from tests.support.late import LateDevices, Lateness
from tests.support.late.digests import digesting_at_once


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1100, 1100), nn.BatchNorm1d(1100), nn.Linear(1100, 1100))


@pytest.fixture(scope="module")
def state() -> Sent:
    return sent({"model": model(1)})


@pytest.fixture(autouse=True)
def devices_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host has few cores, and the device digests a chunk in one launch."""
    monkeypatch.setattr(receive_objects, "_CORES", 1 << 30)
    with digesting_at_once():
        yield


ALLOCATIONS = 5
"""A staging buffer, and one for the digest of each of four chunks."""


def clone(late: LateDevices, here: nn.Module, state: Sent, *, is_there: bool, atomic: bool) -> None:
    """A clone into a model, whose chunks arrive on the host, or on the device if ``is_there``."""
    sink = ObjectsSink(state.checked, {"model": here}, atomic=atomic, scratch=2)
    for index in sink.missing():
        place = sink.device_buffer(index) if is_there else None
        if place is None:
            feed(sink, state.chunks, [index])
            continue
        place.ready.synchronize()
        place.memory.copy_(torch.frombuffer(bytearray(state.chunks[index]), dtype=torch.uint8))
        assert sink.accept(index)
    sink.commit()
    sink.close()
    late.schedule.catch_up()
    late.schedule.be_late_again()


@pytest.mark.parametrize(
    ("number", "is_there", "atomic"),
    [
        *((number, False, False) for number in range(1, ALLOCATIONS + 2)),
        *((number, True, False) for number in range(1, ALLOCATIONS + 1)),
        (1, False, True),
    ],
)
def test_a_clone_without_memory_on_the_device_is_whole(
    number: int, is_there: bool, atomic: bool, state: Sent
) -> None:
    late, here = LateDevices(Lateness.BOTH), model(2)
    late.put(here)
    for failing in (range(number, number + 1), range(0)):
        late.allocations = 0
        with late.running(), late.failing(failing):
            for parameter in here.parameters():
                parameter.detach().zero_()
            clone(late, here, state, is_there=is_there, atomic=atomic)
        assert all(map(torch.equal, here.state_dict().values(), model(1).state_dict().values()))
    assert late.allocations == (0 if atomic else ALLOCATIONS), "the next clone has memory"
