"""What a source of batches is made of: the loaders, samplers and datasets behind it, and who of them knows how far it has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from datastates.errors import InvalidInput

from .prepared import is_prepared, reads_ahead, sampler_of
from .sampler import Batches, PermutationSampler

__all__ = [
    "Kind",
    "batch_size",
    "data_within",
    "draws_as_it_begins",
    "handed_out_by",
    "holds_begun_iterator",
    "is_ordered_by_epoch",
    "kind_of",
    "length_of",
    "loses_shuffle_buffer",
    "noting_begun",
    "parts_of",
    "progress_of",
    "set_epoch",
    "size_of",
]

_WITHIN = ("sampler", "batch_sampler", "iterable", "dataloader", "_dataloader")
"""The attributes in which loaders, and their wrappers (tqdm, Lightning's Fabric), keep what they draw from."""

_FURTHER = ("loader", "_loader", "data_loader", "_data_loader", "base_loader", "dl", "_dl")
"""Those of prefetchers (timm, NVIDIA's examples) and other wrappers. States number the parts: what is found by these comes last."""

_FEW = 32
"""The most items of a wrapper's list or dict that are looked at: loaders side by side are few, and a list of samples is long."""

_NO_DATA = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)

_MOST = 4096
"""The most objects that are looked at inside a source."""


class Kind(Enum):
    """Who knows the place of a pass over a source."""

    KEEPS = auto()  # something tracked knows the place
    AHEAD = auto()  # a tracked sampler knows what workers, or a loader reading ahead, have fetched: it is told what was handed out
    REPLAYED = auto()  # begun again from the same random numbers, and the batches that were handed out are dropped
    ONCE = auto()  # an iterator: its place cannot be known


def parts_of(source: object) -> list[Any]:
    """``source``, and everything that it draws from."""
    found: list[Any] = [source]
    _follow(found, _named)
    found += [part.dataset for part in found if _has_iterable_dataset(part)]
    _follow(found, _held)
    return found


def data_within(objects: Iterable[object]) -> list[Any]:
    """The datasets, samplers, loaders and other iterables among ``objects`` and inside them, at any depth."""
    found = [*filter(_may_hold_data, objects)]
    _follow(found, lambda part: filter(_may_hold_data, _children(part)))
    return found


def loses_shuffle_buffer(found: Any) -> bool:
    """Whether the state of a loader or stream leaves out the samples that wait in a shuffle buffer, as far as its classes tell.

    Those of ``datasets`` are restored without their buffers. Streams without a state are read again, but the buffers of torch's data pipes
    and of webdataset then draw other random numbers.
    """
    data = found.dataset if isinstance(found, DataLoader) else found
    homes = ("datasets.", "torch.utils.data.datapipes.", "webdataset.")
    has_other_state = callable(getattr(data, "load_state_dict", None)) and not type(data).__module__.startswith(homes)
    if not isinstance(data, IterableDataset) or has_other_state:
        return False
    names = ((type(part).__module__, f"{type(part).__name__} {getattr(part, 'f', '')}".lower()) for part in data_within([data]))
    return any(home.startswith(homes) and "shuf" in name and "shard" not in name for home, name in names)


def set_epoch(part: Any, epoch: int) -> None:
    """Tell a sampler, or any object with ``set_epoch`` like DistributedSampler, which epoch begins; a PermutationSampler never goes
    back.
    """
    if isinstance(part, PermutationSampler):
        part.set_epoch(max(epoch, part.epoch))
    elif callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


def is_ordered_by_epoch(loader: object) -> bool:
    """Whether it is torchdata's loader of a ``DistributedSampler``: only the epoch and the number of ranks decide what each batch is."""
    if not isinstance(loader, DataLoader) or not _is_of_torchdata(loader):
        return False
    return any(isinstance(part, DistributedSampler) for part in parts_of(loader))


def kind_of(source: object, keepers: list[Any], loaders: list[DataLoader[Any]]) -> Kind:
    """Who knows the place of a pass over ``source``, of whose parts the ``keepers`` are tracked, and the ``loaders`` hand out batches.

    :raises InvalidInput: what is tracked does not know the place of the training.
    """
    if not keepers:
        return Kind.ONCE if isinstance(source, Iterator) and not isinstance(source, Batches) else Kind.REPLAYED
    samplers = [part for part in keepers if isinstance(part, Sampler)]
    if not samplers and keepers[0] is source and not isinstance(source, DataLoader):
        return Kind.KEEPS  # a wrapper with a state of its own
    if len(loaders) > 1:
        raise InvalidInput(
            f"{type(source).__name__} draws from {len(loaders)} loaders, and the place of a tracked {type(keepers[0]).__name__} is not that"
            " of them all: do not track it (run.steps then finds the place again by itself)"
        )
    return _kind_of_loader(keepers, samplers, loaders[0] if loaders else None)


def batch_size(loader: DataLoader[Any] | None) -> int:
    """The number of indices in a batch, which are the next ones of the sampler; 0 if that is not known."""
    if loader is None or loader.batch_sampler is None:
        return 1
    sampler = loader.batch_sampler
    return sampler.batch_size if type(sampler) is BatchSampler or (isinstance(sampler, BatchSampler) and _is_of_torchdata(sampler)) else 0


def size_of(source: object, loader: DataLoader[Any] | None) -> int:
    """The number of samples in a batch, as the loader or its batch sampler says; 0 if neither does."""
    if isinstance(source, Batches):
        return source.batch_size
    if loader is None:
        return 0
    said = batch_size(loader) or getattr(loader.batch_sampler, "batch_size", 0)
    return said if isinstance(said, int) else 0


def length_of(source: Any, parts: list[Any]) -> int | None:
    """The number of batches in a pass; None if that cannot be asked for."""
    if any(isinstance(part, IterableDataset) for part in parts) or not hasattr(source, "__len__"):
        return None  # torch counts what an iterable dataset yields once its length was asked for
    return len(source)


def holds_begun_iterator(parts: list[Any]) -> bool:
    """Whether the source draws from an iterator that was made before: a pass cannot begin it again."""
    if any(isinstance(part, Iterator) and not isinstance(part, Batches | Sampler | DataLoader | Dataset) for part in parts[1:]):
        return True
    return any(
        name != "_iterator" and _is_loaders_iterator(value)  # that one is the loader's own, and made anew by each pass
        for part in parts
        if not isinstance(part, Dataset)
        for name, value in _attributes(part).items()
    )


def progress_of(part: Any) -> object:
    """How far a tracked loader or PermutationSampler has come, as a value that changes only when it hands something out; None: it does not
    say, as a state may hold what changes by itself.
    """
    if isinstance(part, PermutationSampler):
        return part.epoch, part.position
    if isinstance(part, DataLoader):
        return getattr(part, "_iterator", None), handed_out_by(part)
    return None


def draws_as_it_begins(loader: DataLoader[Any]) -> bool:
    """Whether the global random numbers of the moment in which the loader is begun decide its order, or what its workers draw."""
    is_in_order = batch_size(loader) > 0 and isinstance(loader.sampler, SequentialSampler)
    return loader.generator is None and (loader.num_workers > 0 or not is_in_order)


@contextmanager
def noting_begun(loaders: Iterable[DataLoader[Any]]) -> Iterator[list[DataLoader[Any]]]:
    """Those of the loaders that are begun in the block: torch's loaders make each of their iterators by ``_get_iterator``."""
    begun: list[DataLoader[Any]] = []
    noted = [loader for loader in loaders if "_get_iterator" not in vars(loader)]
    for loader in noted:
        vars(loader)["_get_iterator"] = partial(_note, begun, loader)
    try:
        yield begun
    finally:
        for loader in noted:
            vars(loader).pop("_get_iterator", None)


def handed_out_by(loader: DataLoader[Any]) -> int:
    """How many batches a loader has handed out in its pass, as torch's and torchdata's count; 0 if it does not say."""
    count = getattr(getattr(loader, "_iterator", None), "_num_yielded", 0)
    return count if isinstance(count, int) else 0


def _note(begun: list[DataLoader[Any]], loader: DataLoader[Any]) -> Iterator[Any]:
    begun.append(loader)
    return type(loader)._get_iterator(loader)


def _kind_of_loader(keepers: list[Any], samplers: list[Any], loader: DataLoader[Any] | None) -> Kind:
    if loader is None or (loader.num_workers == 0 and not reads_ahead(loader)):
        return Kind.KEEPS
    if any(part is loader for part in keepers):
        if samplers:
            raise InvalidInput(
                f"the loader is tracked and so is its {type(samplers[0]).__name__}, of which {_who_fetches(loader)} ahead:"
                " track the loader alone, it keeps its sampler's place"
            )
        return Kind.KEEPS
    if batch_size(loader) and isinstance(samplers[0] if samplers else None, PermutationSampler):
        return Kind.AHEAD
    raise InvalidInput(
        f"{type(keepers[0]).__name__} is tracked, and {_who_fetches(loader)} ahead of what was handed out: its place is not"
        " that of the training; do not track it (run.steps then finds the place again by itself), or track a StatefulDataLoader"
    )


def _who_fetches(loader: DataLoader[Any]) -> str:
    return f"{loader.num_workers} workers fetch" if loader.num_workers else "a prepared loader reads a batch"


def _follow(found: list[Any], children_of: Callable[[Any], Iterable[Any]]) -> None:
    known = set(map(id, found))
    for part in found:
        for child in children_of(part):
            if child is not None and id(child) not in known and len(found) < _MOST:
                known.add(id(child))
                found.append(child)


def _named(part: Any) -> Iterator[Any]:
    for name in _WITHIN:
        yield sampler_of(part) if name == "sampler" and is_prepared(part) else getattr(part, name, None)


def _held(part: Any) -> Iterator[Any]:
    """What else a wrapper draws from, whatever it calls it. Torch's own loaders and datasets are no wrappers."""
    if isinstance(part, Dataset):
        return
    yield from _named(part)
    if _has_iterable_dataset(part):
        yield part.dataset
    if not isinstance(part, DataLoader):
        for name in _FURTHER:
            yield getattr(part, name, None)
        for value in _attributes(part).values():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            yield from (item for item in items if isinstance(item, DataLoader | Sampler)) if len(items) <= _FEW else ()


def _children(part: object) -> Iterable[object]:
    """What an object holds. Collections of datasets may be long; of other items, such as samples, few are looked at."""
    if not isinstance(part, list | tuple | dict):
        return () if isinstance(part, _NO_DATA) else _attributes(part).values()
    items = [*islice(part.values() if isinstance(part, dict) else part, _MOST)]
    return items if items and hasattr(items[0], "__dict__") else items[:_FEW]


def _may_hold_data(found: object) -> bool:
    """Whether it is a dataset, a sampler, a loader, or another iterable or callable, such as a transform, that may wrap one."""
    if isinstance(found, type | FunctionType | ModuleType) or not hasattr(found, "__dict__"):
        return isinstance(found, list | tuple | dict)
    may_wrap = not isinstance(found, _NO_DATA) and any(hasattr(type(found), name) for name in ("__iter__", "__getitem__", "__call__"))
    return may_wrap or callable(getattr(found, "set_epoch", None))


def _attributes(part: object) -> Mapping[str, Any]:
    found = getattr(part, "__dict__", {})
    return found if isinstance(found, dict) else {}


def _has_iterable_dataset(part: object) -> bool:
    return isinstance(part, DataLoader) and isinstance(part.dataset, IterableDataset)


def _is_loaders_iterator(value: object) -> bool:
    return isinstance(value, Iterator) and type(value).__module__.startswith(("torch.utils.data.", "torchdata.stateful_dataloader"))


def _is_of_torchdata(part: object) -> bool:
    return any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(part).__mro__)
