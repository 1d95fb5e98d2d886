"""The cost of a clone between two processes of one machine, into live tensors on the device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from unittest.mock import patch

import torch

import datastates
from datastates.transport import receive_objects
from datastates.transport.receive_buffers import StagingBuffers

from .case import Case, Found, Skip
from .place import Place
from .state import Model, not_late, opened
from .where import Where

TOKEN = "a token of this benchmark"


def cases(place: Place) -> Sequence[Case]:
    """The cases of this part."""
    return [
        Case("by the host", partial(_cloned, data="auto"), limit_s=80),
        Case("by the host, the device checks", _checked_by_device, limit_s=80),
        Case("from device to device", _between_devices, limit_s=80),
    ]


def _checked_by_device(place: Place) -> Found:
    """The same on a host with few cores."""
    if not place.is_accelerator:
        raise Skip("the host checks all of it here")
    with patch.object(receive_objects, "_CORES", 1 << 30):
        return _cloned(place, data="auto")


def _between_devices(place: Place) -> Found:
    """The source writes chunks into receive buffers on the device."""
    if not place.is_accelerator:
        raise Skip("no device has memory that another process could open")
    found = _cloned(place, data="ipc")
    return {**found, "TB_per_s": [speed / 1e3 for speed in found["GB_per_s"]]}


def _cloned(place: Place, data: str) -> Found:
    """Another process serves its captured state on the same device."""
    not_late(place)
    # only one process may use the device
    context = multiprocessing.get_context("spawn" if place.is_accelerator else "fork")
    ours, theirs = context.Pipe()
    # both have it
    child = context.Process(target=serve, args=(place.where, theirs, data))  # type: ignore[attr-defined]
    child.start()
    theirs.close()
    model = Model.make(place)
    try:
        url, expected = ours.recv()
        samples: dict[str, list[float]] = {"cloned_ms": [], "GB_per_s": []}
        with (
            datastates.connect(url, token=TOKEN, data=data) as peer,
            _counted(StagingBuffers, "_digest") as digested,
        ):
            for index in range(2 if place.is_quick else 6):
                for tensor in model.tensors:
                    tensor.zero_()
                place.finish()
                start = time.perf_counter()
                peer.clone("main", objects=model.objects, atomic=False)
                place.finish()
                seconds = time.perf_counter() - start
                if totals(model) != expected:
                    raise AssertionError("what was cloned is not what was captured")
                if index:
                    samples["cloned_ms"].append(1e3 * seconds)
                    samples["GB_per_s"].append(model.size / seconds / 1e9)
        ours.send("enough")
    finally:
        ours.close()
        child.join(10)
        child.kill()
    return {"bytes": model.size, "chunks_digested_there": len(digested), **samples}


@contextmanager
def _counted(owner: type, name: str) -> Iterator[list[int]]:
    """One for each call of a method."""
    calls, method = list[int](), getattr(owner, name)

    def counting(*given: object) -> object:
        calls.append(1)
        return method(*given)

    with patch.object(owner, name, counting):
        yield calls


def serve(where: Where, wire: Connection, data: str = "auto") -> None:
    """The other process."""
    torch.manual_seed(1)
    place = Place(where)
    model = Model.make(place)
    model.backward(1)
    model.optimizer.step()
    with opened(model.size, states=1.1) as repo, repo.track(**model.objects) as run:
        run.capture().wait(timeout_s=50)
        with repo.serve(token=TOKEN, data=data) as server:
            wire.send((server.url, totals(model)))
            wire.poll(60)


def totals(model: Model) -> list[int]:
    """A sum over each tensor's bytes."""
    return [
        int(tensor.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64))
        for tensor in model.tensors
    ]
