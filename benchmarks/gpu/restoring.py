"""What a restore into live tensors on the device costs, and how fast digests are computed there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import datastates

from .case import Case, Found, NotBuilt
from .place import Place, timed
from .state import Floor, Model, opened

__all__ = ["cases"]


def cases(place: Place) -> Sequence[Case]:
    """What there is to measure."""
    return [
        Case("restored from memory", _from_memory, limit_s=60),
        Case("restored from the page cache", _from_disk, limit_s=60),
        Case("digests on the device", _digests),
    ]


def _from_memory(place: Place) -> Found:
    return _measure(place, "captured")


def _from_disk(place: Place) -> Found:
    return _measure(place, "durable")


def _measure(place: Place, status: str) -> Found:
    """Restores by turns with the floor, each into tensors that hold something else, and each compared afterwards."""
    model = Model.make(place)
    floor, expected = Floor.make(place, model.size), [tensor.clone() for tensor in model.tensors]
    samples: dict[str, list[float]] = {name: [] for name in ("restored_ms", "floor_ms", "share_of_floor")}
    with opened(model.size, states=1.1) as repo:
        with repo.track(**model.objects) as run:
            run.capture().wait(status, timeout_s=55)
        for index in range(2 if place.is_quick else 6):
            for tensor in model.tensors:
                tensor.zero_()
            seconds = timed(place, _restoring(repo, model))
            _compare(model, expected)
            alone = floor.to_device()
            if index:
                for name, value in zip(samples, (1e3 * seconds, 1e3 * alone, alone / seconds), strict=True):
                    samples[name].append(value)
    return {"bytes": model.size, **samples, "GB_per_s": [model.size / each / 1e6 for each in samples["restored_ms"]]}


def _restoring(repo: datastates.Repository, model: Model) -> Callable[[], object]:
    return lambda: repo.restore("main", into=model.objects)


def _compare(model: Model, expected: Sequence[object]) -> None:
    wrong = sum(not each.equal(was) for each, was in zip(model.tensors, expected, strict=True))  # type: ignore[arg-type]  # tensors
    if wrong:
        raise AssertionError(f"{wrong} of {len(expected)} tensors are not what was captured")


def _digests(place: Place) -> Found:
    raise NotBuilt("digests are computed by the host, from what was copied there")
