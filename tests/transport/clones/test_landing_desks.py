"""Chunks that are checked on the device where they belong: nothing of a wrong one gets there,
and what is right lands in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
from torch import nn

from datastates.state.device_digest import Digester
from datastates.transport.receive_buffers import StagingBuffers
from datastates.transport.receive_objects import ObjectsSink
from tests.support.cloning import Sent, check_landing, feed, fill, sent
from tests.support.counted import counted
from tests.support.late import LateDevices, Lateness
from tests.support.late.digests import digesting_at_once
from tests.support.planting import without


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(1100, 1100), nn.BatchNorm1d(1100), nn.Linear(1100, 1100), nn.Linear(64, 4)
    )


@pytest.fixture(scope="module")
def state() -> Sent:
    return sent({"model": model(1)})


@pytest.fixture(autouse=True)
def digests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device checks, however many cores there are."""
    monkeypatch.setattr("datastates.transport.receive_objects._CORES", 1 << 30)
    with digesting_at_once():
        yield


def test_where_there_are_many_cores_the_host_checks_what_arrives_in_its_memory(
    state: Sent, by_host: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datastates.transport.receive_objects._CORES", 1)
    check_landing(state, model, Lateness.BOTH, scratch=2)
    assert len(by_host) == len(state.chunks)


@pytest.fixture
def by_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that the host digested."""
    found = list[int]()
    for place in ("receive_buffers.chunk_digest", "receive_objects.pieces_digest"):
        counted(monkeypatch, f"datastates.transport.{place}", found=found)
    return found


@pytest.mark.parametrize("lateness", Lateness, ids=lambda each: each.value)
def test_a_chunk_is_checked_where_it_belongs_and_lands_in_order(
    lateness: Lateness, state: Sent, by_host: list[int]
) -> None:
    assert len(state.chunks) > 2
    check_landing(state, model, lateness, scratch=2)
    assert not by_host


PLANTED: dict[str, tuple[Lateness, type, str, str, str]] = {
    "the digest is read before it is there": (
        *(
            Lateness.BOTH,
            StagingBuffers,
            "_digest",
            "devices().mark(self._stream).synchronize()",
            "pass",
        ),
    ),
    "the digest is that of what lay there before": (
        *(
            Lateness.BOTH,
            StagingBuffers,
            "bring",
            "with devices().on(self._stream):",
            "with devices().on(devices().current(devices().of(self._like))):",
        ),
    ),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED.keys())
def test_a_wait_of_a_check_that_is_taken_out_is_noticed(
    planted: tuple[Lateness, type, str, str, str],
    state: Sent,
    monkeypatch: pytest.MonkeyPatch,
    by_host: list[int],
) -> None:
    """The host looks at what the device finds wrong, so nothing is lost by it: it is seen by
    that."""
    lateness, *fault = planted
    plant: Callable[..., None] = without
    plant(monkeypatch, *fault)
    with suppress(AssertionError):  # a chunk that is not there is refused
        check_landing(state, model, lateness, scratch=2)
    assert by_host


@pytest.mark.parametrize("at", [0, 12_345, -1])
def test_nothing_of_a_wrong_chunk_gets_where_it_belongs(at: int, state: Sent) -> None:
    late, here, before = LateDevices(Lateness.BOTH), model(2), model(2)
    late.put(here)
    with late.running():
        sink = ObjectsSink(state.checked, {"model": here}, atomic=False)
        for index in list(sink.missing()):
            wrong, buffers = bytearray(state.chunks[index]), sink.buffers(index)
            wrong[at] ^= 4
            assert buffers is not None
            fill(buffers, bytes(wrong))
            assert not sink.accept(index)
        late.schedule.catch_up()
        assert sink.is_dirty
        assert all(map(torch.equal, here.state_dict().values(), before.state_dict().values()))
        feed(sink, state.chunks)
        sink.commit()
        sink.close()
        late.schedule.catch_up()
    assert all(map(torch.equal, here.state_dict().values(), model(1).state_dict().values()))


@pytest.mark.parametrize("how", ["other digests", "cannot be digested"])
def test_a_device_that_digests_wrongly_is_asked_no_more(
    how: str, state: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    asked, right = list[int](), Digester.lanes

    def lanes(digester: Digester) -> torch.Tensor:
        asked.append(1)
        if how == "cannot be digested":
            raise RuntimeError("no compiler")
        return right(digester) + 1

    with (
        patch.object(Digester, "lanes", lanes),
        caplog.at_level(logging.WARNING),
    ):
        # ends before the patch that every test has here
        check_landing(state, model, Lateness.BOTH, scratch=2)
    assert len(asked) == 1
    assert [how in message for message in caplog.messages] == [True]


def test_a_chunk_that_belongs_elsewhere_too_is_checked_by_the_host(state: Sent) -> None:
    late, here = LateDevices(Lateness.BOTH), model(2)
    late.put(here[0])
    late.put(here[1], index=1)
    with late.running():
        sink = ObjectsSink(state.checked, {"model": here}, atomic=False)
        feed(sink, state.chunks)
        sink.commit()
        sink.close()
        late.schedule.catch_up()
    assert all(map(torch.equal, here.state_dict().values(), model(1).state_dict().values()))
