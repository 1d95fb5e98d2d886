"""Sources of batches: the loaders, samplers and datasets behind a source, and which of them stores
the place of a pass.

The file also handles loaders that Accelerate prepared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from datastates.errors import InvalidInput

from .sampler import Batches, PermutationSampler

_HOME = "accelerate.data_loader"
"""Looked up among imported modules: importing it takes seconds, and an object of a class that was
never imported cannot exist."""

_FINISHED = "_iterator_finished"
_FEW = 32
"""The most items of a list or dict that are looked at: loaders side by side are few, and a list
of samples is long."""

_SOURCES = (DataLoader, Dataset, Sampler, Batches)
_NO_DATA = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
_MOST = 4096
"""The most objects that are looked at inside a source."""


def is_prepared(found: object) -> bool:
    """Whether ``found`` is a loader that Accelerate prepared: its shard, dispatcher or skipping
    loader."""
    return _is(found, "DataLoaderAdapter")


def reads_ahead(found: object) -> bool:
    """Whether a loader has read one batch more than it handed out."""
    return is_prepared(found) and "iteration" in vars(found)


def is_received(found: Any) -> bool:
    """Whether another rank reads the batches of a prepared loader, and sends them to this one."""
    return _is(found, "DataLoaderDispatcher") and found.state.process_index != 0


def is_stateful(found: Any) -> bool:
    """Whether a prepared loader keeps its place. torchdata's ``StatefulDataLoader`` does,
    which Accelerate wraps if it is configured so."""
    return callable(getattr(found.base_dataloader, "state_dict", None))


def sampler_of(found: Any) -> object:
    """The sampler of a prepared loader, where a bare loader has its own: Accelerate gives the
    loader that it makes only the batch sampler.
    """
    batches = found.batch_sampler
    while isinstance(inner := getattr(batches, "batch_sampler", None), BatchSampler):
        batches = inner
    return getattr(batches, "sampler", None) or found.sampler


def state_of_loader(found: Any) -> dict[str, Any]:
    """The state that the wrapped loader itself would have, if nothing had been read ahead."""
    state = {**found.state_dict()}
    if found.end_of_dataloader and any(
        each is found for each in found.gradient_state.dataloader_references
    ):
        state[_FINISHED] = False  # the last batch was handed out, and the loop has yet to end
    return state


def load_loader(found: Any, state: Mapping[str, Any]) -> None:
    """Put the wrapped loader where ``state`` was taken. The prepared loader reports that place
    at once, before its first batch.

    The iterator is made now, not when the loop begins: making it draws random numbers.
    """
    found.reset()
    found.load_state_dict(dict(state))
    found.dl_state_dict = found.base_dataloader.state_dict()


def start_afresh(found: Any) -> None:
    """Have the next pass make its iterator when it begins. The first iterator was made when the
    loader was prepared, and would use the order of that time.
    """
    if getattr(found.base_dataloader, "_initial_iter_for_state_dict", False):
        found.base_dataloader.load_state_dict({})


def resume_afresh(found: Any) -> None:
    """Have a resumed pass make its iterator when it begins, at the place that was loaded."""
    found.base_dataloader.load_state_dict(found.dl_state_dict)


def mark_of(part: Any) -> dict[str, int] | None:
    """Values that determine the order of the next passes and that no state of a loader or sampler
    has. None if there are none."""
    if reads_ahead(part):
        return {"iteration": part.iteration}
    return (
        {"initial_seed": part.initial_seed, "epoch": part.epoch}
        if _is(part, "SeedableRandomSampler")
        else None
    )


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
    """Whether ``found`` is Accelerate's wrapper of an optimizer, whose ``eval`` and ``train`` call
    the same methods of the wrapped one."""
    kind = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return kind is not None and isinstance(found, kind)


def _is(found: object, name: str) -> bool:
    kind = getattr(sys.modules.get(_HOME), name, None)
    # `isinstance` uses the class that a prepared loader claims, which is another one
    return kind is not None and issubclass(type(found), kind)


# --- Parts of a source, and which of them stores the place ---


class Kind(Enum):
    """Which object stores the place of a pass over a source."""

    KEEPS = auto()  # a tracked object has the place
    # a tracked sampler counts what workers, or a loader that reads ahead, fetched; it is set to the
    # count of what was handed out
    AHEAD = auto()
    # begun again from the same random numbers, and the batches that were handed out are dropped
    REPLAYED = auto()
    ONCE = auto()  # an iterator: its place cannot be known


def parts_of(source: object) -> list[Any]:
    """``source``, and the samplers and the iterable dataset that it draws from."""
    found: list[Any] = [source]
    _follow(found, _samplers_of)
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        found.append(source.dataset)
    return found


def wrapped_by(source: object) -> object:
    """The loader or sampler that a wrapper, such as a progress bar or a prefetcher, holds in an
    attribute; None for any other source."""
    if isinstance(source, (*_SOURCES, Iterator)):
        return None
    for value in _attributes(source).values():
        items = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else (value,)
        )
        for item in items if len(items) <= _FEW else ():
            if isinstance(item, DataLoader | Sampler | Batches):
                return item
    return None


def data_within(objects: Iterable[object]) -> list[Any]:
    """The datasets, samplers, loaders and other iterables among ``objects`` and inside them, at
    any depth."""
    found = [*filter(_may_hold_data, objects)]
    _follow(found, lambda part: filter(_may_hold_data, _children(part)))
    return found


def loses_shuffle_buffer(found: Any) -> bool:
    """Whether the state of a loader or stream leaves out the samples that wait in a shuffle buffer,
    as far as its classes show.

    Streams of ``datasets`` are restored without their buffers. Streams without a state are read
    again, but the buffers of torch's data pipes and of webdataset then draw other random numbers.
    """
    data = found.dataset if isinstance(found, DataLoader) else found
    homes = ("datasets.", "torch.utils.data.datapipes.", "webdataset.")
    has_other_state = callable(getattr(data, "load_state_dict", None)) and not type(
        data
    ).__module__.startswith(homes)
    if not isinstance(data, IterableDataset) or has_other_state:
        return False
    names = (
        (type(part).__module__, f"{type(part).__name__} {getattr(part, 'f', '')}".lower())
        for part in data_within([data])
    )
    return any(
        home.startswith(homes) and "shuf" in name and "shard" not in name for home, name in names
    )


def set_epoch(part: Any, epoch: int) -> None:
    """Set the epoch of a sampler, or of any object with ``set_epoch`` like DistributedSampler. A
    PermutationSampler never goes back."""
    if isinstance(part, PermutationSampler):
        part.set_epoch(max(epoch, part.epoch))
    elif callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


def is_ordered_by_epoch(loader: object) -> bool:
    """Whether it is torchdata's loader of a ``DistributedSampler``: only the epoch and the
    number of ranks decide what each batch is."""
    if not isinstance(loader, DataLoader) or not _is_of_torchdata(loader):
        return False
    return any(isinstance(part, DistributedSampler) for part in parts_of(loader))


def kind_of(source: object, keepers: list[Any], loader: DataLoader[Any] | None) -> Kind:
    """Which object stores the place of a pass over ``source``. The ``keepers`` are its tracked
    parts. ``loader`` is the source if it is one.

    :raises InvalidInput: a tracked object does not store the place of the training.
    """
    if not keepers:
        return (
            Kind.ONCE
            if isinstance(source, Iterator) and not isinstance(source, Batches)
            else Kind.REPLAYED
        )
    if loader is None or (loader.num_workers == 0 and not reads_ahead(loader)):
        return Kind.KEEPS
    samplers = [part for part in keepers if isinstance(part, Sampler)]
    if any(part is loader for part in keepers):
        if samplers:
            raise InvalidInput(
                f"the loader is tracked and so is its {type(samplers[0]).__name__}, of which"
                f" {_who_fetches(loader)} ahead: track the loader alone, it keeps its sampler's"
                " place"
            )
        return Kind.KEEPS
    if batch_size(loader) and isinstance(samplers[0] if samplers else None, PermutationSampler):
        return Kind.AHEAD
    raise InvalidInput(
        f"{type(keepers[0]).__name__} is tracked, and {_who_fetches(loader)} ahead of what was"
        " handed out, so its place is not the training's place: do not track it, because run.steps"
        " finds the place without it, or track a StatefulDataLoader"
    )


def batch_size(loader: DataLoader[Any] | None) -> int:
    """The number of indices in a batch, which are the next ones of the sampler; 0 if that is not
    known."""
    if loader is None or loader.batch_sampler is None:
        return 1
    sampler = loader.batch_sampler
    return (
        sampler.batch_size
        if type(sampler) is BatchSampler
        or (isinstance(sampler, BatchSampler) and _is_of_torchdata(sampler))
        else 0
    )


def size_of(source: object, loader: DataLoader[Any] | None) -> int:
    """The number of samples in a batch, from the loader or its batch sampler. 0 if neither
    has it."""
    if isinstance(source, Batches):
        return source.batch_size
    if loader is None:
        return 0
    said = batch_size(loader) or getattr(loader.batch_sampler, "batch_size", 0)
    return said if isinstance(said, int) else 0


def length_of(source: Any, parts: list[Any]) -> int | None:
    """The number of batches in a pass. None if the source has no length."""
    if any(isinstance(part, IterableDataset) for part in parts) or not hasattr(source, "__len__"):
        return None  # torch counts the items of an iterable dataset after its length was read
    return len(source)


def holds_begun_iterator(source: object) -> bool:
    """Whether the source holds an iterator that was made before: a pass cannot begin it again."""
    if isinstance(source, Dataset | Sampler | Batches):
        return False
    # a loader makes another one for each pass
    held = (value for name, value in _attributes(source).items() if name != "_iterator")
    return any(isinstance(value, Iterator) and not isinstance(value, _SOURCES) for value in held)


def progress_of(part: Any) -> object:
    """The progress of a tracked loader or PermutationSampler, as a value that changes only when it
    hands something out.

    None if it has no such value, because a state may contain values that change without that.
    """
    if isinstance(part, PermutationSampler):
        return part.epoch, part.position
    if isinstance(part, DataLoader):
        # torch's and torchdata's loaders count the batches of their pass
        iterator = getattr(part, "_iterator", None)
        return iterator, getattr(iterator, "_num_yielded", 0)
    return None


def _who_fetches(loader: DataLoader[Any]) -> str:
    return (
        f"{loader.num_workers} workers fetch"
        if loader.num_workers
        else "a prepared loader reads a batch"
    )


def _follow(found: list[Any], children_of: Callable[[Any], Iterable[Any]]) -> None:
    known = set(map(id, found))
    for part in found:
        for child in children_of(part):
            if child is not None and id(child) not in known and len(found) < _MOST:
                known.add(id(child))
                found.append(child)


def _samplers_of(part: Any) -> Iterator[Any]:
    yield sampler_of(part) if is_prepared(part) else getattr(part, "sampler", None)
    yield getattr(part, "batch_sampler", None)
    if not isinstance(part, DataLoader):
        yield from (value for value in _attributes(part).values() if isinstance(value, Sampler))


def _children(part: object) -> Iterable[object]:
    """What an object holds.

    Collections of datasets may be long; of other items, such as samples, few are looked at."""
    if not isinstance(part, list | tuple | dict):
        return () if isinstance(part, _NO_DATA) else _attributes(part).values()
    items = [*islice(part.values() if isinstance(part, dict) else part, _MOST)]
    return items if items and hasattr(items[0], "__dict__") else items[:_FEW]


def _may_hold_data(found: object) -> bool:
    """Whether it is a dataset, a sampler, a loader, or another iterable or callable, such as a
    transform, that may wrap one."""
    if isinstance(found, type | FunctionType | ModuleType) or not hasattr(found, "__dict__"):
        return isinstance(found, list | tuple | dict)
    may_wrap = not isinstance(found, _NO_DATA) and any(
        hasattr(type(found), name) for name in ("__iter__", "__getitem__", "__call__")
    )
    return may_wrap or callable(getattr(found, "set_epoch", None))


def _attributes(part: object) -> Mapping[str, Any]:
    found = getattr(part, "__dict__", {})
    return found if isinstance(found, dict) else {}


def _is_of_torchdata(part: object) -> bool:
    return any(
        kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(part).__mro__
    )
