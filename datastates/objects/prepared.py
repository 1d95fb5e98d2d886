"""Loaders, samplers, schedulers and optimizers as Accelerate prepares them: what they wrap, and what only they know of their place.

A prepared loader passes for a ``DataLoader`` (``isinstance`` says so) and has a ``state_dict`` even if there is nothing behind it. It
reads one batch ahead of the one that it hands out. It counts the passes that were made, and tells its sampler that count when a pass
begins; no state of Accelerate's own has the count or the seed of the sampler.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler

__all__ = [
    "bare_scheduler",
    "count_pass",
    "is_prepared",
    "is_stateful",
    "load_loader",
    "mark_of",
    "passes_on",
    "put_mark",
    "reads_ahead",
    "resume_afresh",
    "sampler_of",
    "start_afresh",
    "state_of_loader",
]

_HOME = "accelerate.data_loader"
"""Looked up among what is already imported: importing it takes seconds, and an object of a class that nobody imported cannot exist."""

_FINISHED = "_iterator_finished"


def is_prepared(found: object) -> bool:
    """Whether ``found`` is a loader that Accelerate prepared: its shard, dispatcher or skipping loader."""
    return _is(found, "DataLoaderAdapter")


def reads_ahead(found: object) -> bool:
    """Whether a loader has read one batch more than it handed out."""
    return is_prepared(found) and "iteration" in vars(found)


def is_stateful(found: Any) -> bool:
    """Whether a prepared loader keeps its place: only torchdata's ``StatefulDataLoader`` does, which Accelerate wraps when asked to."""
    return callable(getattr(found.base_dataloader, "state_dict", None))


def sampler_of(found: Any) -> object:
    """The sampler of a prepared loader, where a bare loader has its own: Accelerate gives the loader that it makes only the batch
    sampler.
    """
    batches = found.batch_sampler
    while isinstance(inner := getattr(batches, "batch_sampler", None), BatchSampler):
        batches = inner
    return getattr(batches, "sampler", None) or found.sampler


def state_of_loader(found: Any) -> dict[str, Any]:
    """The state that the wrapped loader itself would have, if nothing had been read ahead."""
    state = {**found.state_dict()}
    if found.end_of_dataloader and any(each is found for each in found.gradient_state.dataloader_references):
        state[_FINISHED] = False  # the last batch was handed out, and the loop has yet to end
    return state


def load_loader(found: Any, state: Mapping[str, Any]) -> None:
    """Put the wrapped loader where ``state`` was taken; the prepared one reports that place from now on, not only from its first batch on.

    The iterator is made now, not when the loop begins: making it draws random numbers.
    """
    found.reset()
    found.load_state_dict(dict(state))
    found.dl_state_dict = found.base_dataloader.state_dict()


def start_afresh(found: Any) -> None:
    """Have the next pass make its iterator when it begins: the first iterator was made when the loader was prepared, in the order of
    then.
    """
    if getattr(found.base_dataloader, "_initial_iter_for_state_dict", False):
        found.base_dataloader.load_state_dict({})


def resume_afresh(found: Any) -> None:
    """Have a pass that goes on make its iterator when it begins, at the place that was loaded."""
    found.base_dataloader.load_state_dict(found.dl_state_dict)


def mark_of(part: Any) -> dict[str, int] | None:
    """What no state of a loader or sampler has, but the order of the coming passes depends on; None if there is no such thing."""
    if reads_ahead(part):
        return {"iteration": part.iteration}
    return {"initial_seed": part.initial_seed, "epoch": part.epoch} if _is(part, "SeedableRandomSampler") else None


def put_mark(part: Any, mark: Mapping[str, int]) -> None:
    """Put back what ``mark_of`` returned."""
    for name in mark_of(part) or ():
        if name in mark:
            setattr(part, name, mark[name])


def count_pass(part: Any) -> None:
    """Count what a pass counts at its end."""
    mark = mark_of(part) or {}
    put_mark(part, {name: number + 1 for name, number in mark.items() if name != "initial_seed"})


def bare_scheduler(found: Any) -> Any:
    """The scheduler that Accelerate's wrapper steps, or ``found`` itself."""
    kind = getattr(sys.modules.get("accelerate.scheduler"), "AcceleratedScheduler", None)
    return found.scheduler if kind is not None and isinstance(found, kind) else found


def passes_on(found: object) -> bool:
    """Whether ``found`` is Accelerate's wrapper of an optimizer, whose ``eval`` and ``train`` call those of the wrapped one, if any."""
    kind = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return kind is not None and isinstance(found, kind)


def _is(found: object, name: str) -> bool:
    kind = getattr(sys.modules.get(_HOME), name, None)
    return kind is not None and issubclass(type(found), kind)  # `isinstance` asks a prepared loader, which claims to be another class
