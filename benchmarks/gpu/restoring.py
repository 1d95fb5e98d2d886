"""The cost of a restore into live tensors on the device, and the speed of digests there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

import datastates
from datastates.state.device_digest import Digester
from datastates.state.digest import chunk_digest
from datastates.state.manifest import CHUNK_BYTES
from datastates.state.xxh3 import digests_of

from .case import Case, Found, Skip
from .place import Place, timed
from .state import Floor, Model, not_late, opened


def cases(place: Place) -> Sequence[Case]:
    """The cases of this part."""
    return [
        Case("restored from the device", _from_device, limit_s=60),
        Case("restored from memory", _from_memory, limit_s=60),
        Case("restored from the page cache", _from_disk, limit_s=60),
        Case("digests on the device", _digests, limit_s=60),
    ]


def _from_device(place: Place) -> Found:
    """From a state on the device, in turns with one contiguous copy of the same size there."""
    model = Model.make(place)
    expected = [tensor.clone() for tensor in model.tensors]
    here, there = (
        torch.zeros(model.size, dtype=torch.uint8, device=place.device) for _ in range(2)
    )
    samples: dict[str, list[float]] = {
        name: [] for name in ("restored_ms", "floor_ms", "share_of_floor")
    }
    with opened(model.size, states=2.2, kept=1.2) as repo, repo.track(**model.objects) as run:
        for _ in range(2):  # the first state of a plan is not kept there
            run.capture().wait(timeout_s=50)
        kept = repo.stats().activity.snapshots
        for index in range(2 if place.is_quick else 6):
            for tensor in model.tensors:
                tensor.zero_()
            seconds = timed(place, _restoring(repo, model))
            _compare(model, expected)
            alone = timed(place, lambda: here.copy_(there))
            if index:
                for name, value in zip(
                    samples, (1e3 * seconds, 1e3 * alone, alone / seconds), strict=True
                ):
                    samples[name].append(value)
    if not place.is_accelerator:
        raise Skip("nothing is kept on a device where there is none")
    if kept != 1:
        raise AssertionError(f"{kept} of the last capture was kept on the device")
    return {
        "bytes": model.size,
        **samples,
        "GB_per_s": [model.size / each / 1e6 for each in samples["restored_ms"]],
    }


def _from_memory(place: Place) -> Found:
    return _measure(place, "captured")


def _from_disk(place: Place) -> Found:
    return _measure(place, "durable")


def _measure(place: Place, status: str) -> Found:
    """Restores in turns with the floor, each into tensors with other values, and each compared
    afterwards. A state in memory is restored by the training that captured it."""
    model = Model.make(place)
    floor, expected = Floor.make(place, model.size), [tensor.clone() for tensor in model.tensors]
    samples: dict[str, list[float]] = {
        name: [] for name in ("restored_ms", "floor_ms", "share_of_floor")
    }
    with opened(model.size, states=1.1) as repo, ExitStack() as training:
        run = training.enter_context(repo.track(**model.objects))
        run.capture().wait(status, timeout_s=55)
        if status == "durable":
            training.close()
        for index in range(2 if place.is_quick else 6):
            for tensor in model.tensors:
                tensor.zero_()
            seconds = timed(place, _restoring(repo, model))
            _compare(model, expected)
            alone = floor.to_device()
            if index:
                for name, value in zip(
                    samples, (1e3 * seconds, 1e3 * alone, alone / seconds), strict=True
                ):
                    samples[name].append(value)
    return {
        "bytes": model.size,
        **samples,
        "GB_per_s": [model.size / each / 1e6 for each in samples["restored_ms"]],
    }


def _restoring(repo: datastates.Repository, model: Model) -> Callable[[], object]:
    return lambda: repo.restore("main", objects=model.objects)


def _compare(model: Model, expected: Sequence[object]) -> None:
    # tensors
    wrong = sum(not each.equal(was) for each, was in zip(model.tensors, expected, strict=True))  # type: ignore[arg-type]
    if wrong:
        raise AssertionError(f"{wrong} of {len(expected)} tensors are not what was captured")


def _digests(place: Place) -> Found:
    """Digests on the device of as many bytes as the state has. Compares them with the host's, and
    measures the speed."""
    not_late(place)
    size = 2 * CHUNK_BYTES if place.where.is_tiny else 300 * CHUNK_BYTES
    value = torch.randint(0, 255, (size,), dtype=torch.uint8, device=place.device)
    chunks = value.split(CHUNK_BYTES)
    digester = Digester([(CHUNK_BYTES, [(0, chunk)]) for chunk in chunks])
    start = time.perf_counter()
    found = digests_of(digester.lanes().cpu().numpy(), digester.lengths)
    first = time.perf_counter() - start
    wrong = sum(
        digest != chunk_digest(memoryview(chunk.cpu().numpy()))
        for digest, chunk in zip(found, chunks, strict=True)
    )
    if wrong:
        raise AssertionError(f"{wrong} of {len(chunks)} digests are not those of the host")
    seconds = [timed(place, digester.lanes) for _ in range(2 if place.is_quick else 20)]
    copies = [timed(place, lambda: value.clone()) for _ in seconds]
    return {
        "chunks": len(chunks),
        "first_ms": 1e3 * first,
        "TB_per_s": [size / each / 1e12 for each in seconds],
        "read_and_written_by_a_copy_TB_per_s": [2 * size / each / 1e12 for each in copies],
    }
