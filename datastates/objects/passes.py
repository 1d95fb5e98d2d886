"""One pass over the data: which sources keep their place by themselves, and how the place in any other is found again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from datastates.errors import InvalidInput

from .adapters import has_state
from .generators import is_generator, load_generator, state_of, tensor_of
from .prepared import count_pass, is_prepared, is_stateful, mark_of, put_mark, reads_ahead, resume_afresh, sampler_of, start_afresh
from .rng import RngState
from .sampler import Batches, PermutationSampler

__all__ = ["Pass", "is_ordered_by_epoch", "keeping_generators", "parts_of", "set_epoch"]

_logger = logging.getLogger(__name__)

_WITHIN = ("sampler", "batch_sampler", "iterable", "dataloader", "_dataloader")
"""The attributes in which loaders, and their wrappers (tqdm, Lightning's Fabric), keep what they draw from."""


class _Kind(Enum):
    KEEPS = auto()  # something tracked knows the place
    AHEAD = auto()  # a tracked sampler knows what workers, or a loader reading ahead, have fetched: it is told what was handed out
    REPLAYED = auto()  # begun again from the same random numbers, and the batches that were handed out are dropped
    ONCE = auto()  # an iterator: its place cannot be known


_LOOKS = 16
"""How many batches of a pass are checked for random numbers drawn by reading ahead; each check costs a quarter of a millisecond."""

_BEGUN_AGAIN = (_Kind.REPLAYED, _Kind.AHEAD)


class Pass:
    """One iteration over ``source``, from ``place`` on if one is given; ``place`` then says how far it has come.

    A DataLoader draws the seed of its workers from torch's generator when its iterator is made. A pass that goes on had done so before
    its state was taken: the generators are put back to where they were before anything is drawn on the way to the place.
    """

    def __init__(self, source: Iterable[Any], is_tracked: Callable[[object], bool], tracked: Iterable[object]) -> None:
        self._source, self._tracked = source, tracked
        self._parts = parts_of(source)
        self._loader = next((part for part in self._parts if isinstance(part, DataLoader)), None)
        keepers = [part for part in self._parts if is_tracked(part)]
        self._kind = _kind_of(source, keepers, self._loader)
        self._sampler = next((part for part in keepers if isinstance(part, PermutationSampler)), None)
        self._told = self._sampler if self._kind is _Kind.AHEAD else None
        self._is_torchdata = any(type(part).__module__.startswith("torchdata.stateful_dataloader") for part in keepers)
        self._length = _length_of(source, self._parts)
        self._prepared = next((part for part in self._parts if is_prepared(part)), None)
        self._watches = self._prepared is not None and reads_ahead(self._prepared) and self._prepared.num_workers == 0
        self._begin: Mapping[str, Any] = {}
        self._before_ahead: dict[str, object] | None = None
        self._is_drawing = self._has_drawn_order = False
        self.batches = 0
        self.is_over = self.is_left = False
        if self._kind is _Kind.ONCE and not isinstance(source, GeneratorType):
            _logger.warning(
                "run.steps is given %s, whose place in the data is not known: a training that is resumed begins it again;"
                " pass the loader itself, as in enumerate(run.steps(loader))",
                type(source).__name__,
            )

    @property
    def place(self) -> dict[str, object]:
        """Plain values that lead back here, in another process too."""
        place: dict[str, object] = {"batches": self.batches, "is_over": self.is_over, "length": self._length}
        if self._loader is not None:
            place["workers"] = self._loader.num_workers
        if any(isinstance(part, DistributedSampler) for part in self._parts):
            place["batch_size"] = _batch_size(self._loader)
        begin = self.left_behind if self.is_over else self._begin
        if self._before_ahead is not None and not self.is_over:
            place["before_ahead"] = self._before_ahead
        return {**place, "begin": begin} if begin else place

    @property
    def left_behind(self) -> dict[str, object]:
        """The untracked state on which the next pass over the same source depends: its own generators and samplers; usually nothing."""
        marks: dict[str, object] = {"marks": self._marks()} if self._marks() else {}
        if self._is_prepared_keeper:
            return {**marks, "generators": own} if (own := self._own_generators()) else marks
        if self._kind not in _BEGUN_AGAIN:
            return marks
        left = {"generators": self._own_generators(), "samplers": self._own_samplers()}
        return {**left, **marks} if any(left.values()) or marks else {}

    def recall(self, left_behind: Mapping[str, Any]) -> None:
        """Take over what an earlier pass left behind."""
        self._put_marks(left_behind)
        if left_behind and self._kind in _BEGUN_AGAIN:
            self._put_own(left_behind)
        elif self._is_prepared_keeper:
            self._put_generators(left_behind)

    def begin(self, epoch: int | None, *, drop: bool = False) -> Iterator[Any]:
        """The batches of a new pass; samplers that ask for it are told ``epoch``. ``drop``: do not take the rest of a pass that was
        left.
        """
        self.batches, self.is_over, self.is_left = 0, False, True
        self._before_ahead, self._has_drawn_order = None, False
        if epoch is not None:
            for part in self._parts:
                set_epoch(part, epoch)
        if self._prepared is not None:
            start_afresh(self._prepared)
        elif drop and self._is_torchdata:
            iter(self._source)  # the iterator that restoring made
        if self._kind in _BEGUN_AGAIN or self._is_prepared_keeper:
            self._begin = self._snapshot()
        return self._counted(self._held())

    def go_on(self, place: Mapping[str, Any], epoch: int | None) -> Iterator[Any] | None:
        """The batches after ``place``; None if there are none, as far as can be told before asking for one."""
        self.batches, self.is_over, self.is_left = int(place["batches"]), False, True
        is_used_up, self._begin = self._is_used_up(), place.get("begin", {})
        if "replicas" in place:
            return self._divided(place, epoch)
        if self._kind is _Kind.REPLAYED:
            if place.get("length") != self._length or not self._begin:
                _logger.warning(
                    "the state was taken after %d batches of a loader of %s, and run.steps is given one of %s: it begins with its first"
                    " batch; give it the same loader as then",
                    self.batches, place.get("length"), self._length,
                )  # fmt: skip
                return self.begin(epoch)
            if is_used_up and not self._has_own_state():
                self._count_pass()
                return None
            return self._counted(self._replay(place))
        if is_used_up and not (self._is_prepared_keeper and self._begin.get("generators")):
            self._count_pass()
            return None
        if self._kind is _Kind.AHEAD and self._is_order_as_begun():
            return self._counted(self._replay(place))
        if self._is_prepared_keeper and self._begin:
            return self._counted(self._resumed())
        if self._kind is _Kind.ONCE:
            _logger.warning("run.steps is given a generator, whose place is not known: make it begin after batch %d", self.batches)
        with keeping_generators(self._tracked):
            iterator = self._held()
        return self._counted(iterator)

    def _divided(self, place: Mapping[str, Any], epoch: int | None) -> Iterator[Any] | None:
        """The batches after the place of another number of processes: this one's share of what those had not had."""
        replicas, length = int(place["replicas"]), place.get("length")
        if length is not None and self.batches >= length:
            return None
        if self._sampler is not None:
            if self._is_used_up():
                return None
            with keeping_generators(self._tracked):
                iterator = self._held()
            return self._counted(iterator)
        sampler, size = next((part for part in self._parts if isinstance(part, DistributedSampler)), None), _batch_size(self._loader)
        used = self.batches * replicas * int(place.get("batch_size", 0))
        is_repeatable = self._kind is _Kind.REPLAYED or is_ordered_by_epoch(self._loader)
        if not is_repeatable or sampler is None or not used or not size or used % (sampler.num_replicas * size):
            raise InvalidInput(
                f"the state is of {replicas} processes, each of which had {self.batches} batches of its epoch, and what is left cannot be"
                f" divided anew: run {replicas} of them, restore a state from the end of an epoch, or let a tracked"
                " datastates.PermutationSampler(len(data), rank=rank, num_replicas=processes) be the loader's sampler"
            )
        self.batches = used // (sampler.num_replicas * size)
        if epoch is not None:
            set_epoch(sampler, epoch)
        return self._counted(self._replay(place) if self._kind is _Kind.REPLAYED else self._skipped())

    def watch(self, batches: int = 0) -> None:
        """Note that other code is about to iterate over the source: ``place`` leads back to here. That code's observer counts the
        ``batches``.
        """
        self.batches, self.is_over, self.is_left = batches, False, True
        self._begin = self._snapshot()

    def leave(self) -> None:
        """End the loop over this pass, or leave it: maybe at the end of the interpreter, when no module has its globals any more."""
        self.is_over = True
        if self._told is not None:
            self._told.let_go(is_over=not self.is_left)

    def is_same(self, other: Pass) -> bool:
        """Whether both passes are over the same source."""
        return self._source is other._source

    @property
    def is_repeatable(self) -> bool:
        """Whether another pass can be begun."""
        return self._kind is not _Kind.ONCE

    def _is_used_up(self) -> bool:
        if self._kind is _Kind.REPLAYED or self._is_prepared_keeper:
            return self._length is not None and self.batches >= self._length
        is_endless = isinstance(self._source, Batches) and self._source.epochs != 1
        return self._sampler is not None and not is_endless and self._sampler.is_at_end

    @property
    def _is_prepared_keeper(self) -> bool:
        """Whether the source is a prepared loader that keeps its place, except for what only its sampler knows."""
        return self._kind is _Kind.KEEPS and self._prepared is not None and is_stateful(self._prepared)

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in self._watched(iterator) if self._watches else iterator:
            self.batches += 1
            self._hand_out()
            yield batch
        self.is_left = False

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader that reads one ahead; if that draws random numbers, a resume must read the next one after the same
        numbers.

        With the first batch the loader draws the order.
        """
        for count in itertools.count(int(self._has_drawn_order)):
            is_looking = self._watches and 0 < count <= _LOOKS
            before = self._generators_now() if self._is_drawing or is_looking else None
            batch = next(iterator, self)
            if batch is self:
                return
            if is_looking and not self._is_drawing and self._generators_now() != before:
                self._note_draws()
            self._before_ahead = before if self._is_drawing else None
            yield batch

    def _note_draws(self) -> None:
        self._is_drawing = not self._is_prepared_keeper
        if self._is_prepared_keeper:
            self._watches = False
            _logger.warning(
                "the dataset draws random numbers in this process, a batch ahead of the training: a loader that keeps its own place cannot"
                " repeat them where a training goes on; leave use_stateful_dataloader out (run.steps finds the place), or give it workers"
            )

    def _generators_now(self) -> dict[str, object]:
        return {"rng": RngState().state_dict(), "tracked": [state_of(found) for found in self._tracked if is_generator(found)]}

    def _hand_out(self) -> None:
        if self._told is not None:
            self._told.hand_out(_batch_size(self._loader))

    def _held(self) -> Iterator[Any]:
        if self._told is not None:
            self._told.hold()
        return iter(self._source)

    def _resumed(self) -> Iterator[Any]:
        """The rest of a prepared loader's pass from its place; its sampler has to draw the order that it drew when the pass began."""
        with keeping_generators(self._tracked):
            RngState().load_state_dict(self._begin["rng"])
            self._put_generators(self._begin)
            self._put_marks(self._begin)
            resume_afresh(self._prepared)
            iterator = iter(self._source)
            first = next(iterator, self)
        if first is self:
            self._count_pass()
            return
        yield first
        yield from iterator

    def _replay(self, place: Mapping[str, Any]) -> Iterator[Any]:
        if self._loader is not None and self._loader.persistent_workers:
            _logger.warning(
                "the loader keeps its workers: if its dataset draws random numbers there, those of the epoch that goes on are others than"
                " they were; persistent_workers=False repeats them"
            )
        if self._loader is not None and place.get("workers", self._loader.num_workers) != self._loader.num_workers:
            _logger.warning(
                "the loader had %d workers when the state was taken, and has %d: if its dataset draws random numbers, it draws others",
                place["workers"], self._loader.num_workers,
            )  # fmt: skip
        with keeping_generators(self._tracked):
            self._go_back()
            if self._prepared is not None:
                start_afresh(self._prepared)
            iterator = self._held()
            for left in range(self.batches, 0, -1):
                if left == 1 and "before_ahead" in place:
                    self._draw_from(place["before_ahead"])
                next(iterator, None)
                self._hand_out()
        self._is_drawing, self._has_drawn_order = "before_ahead" in place, self.batches > 0
        return iterator

    def _skipped(self) -> Iterator[Any]:
        """A tracked loader, begun anew, after the batches that were handed out."""
        with keeping_generators(self._tracked):
            self._loader.load_state_dict({})  # type: ignore[union-attr]  # the iterator that restoring made is of no epoch
            iterator = iter(self._source)
            for _ in range(self.batches):
                next(iterator, None)
        return iterator

    def _draw_from(self, before: Mapping[str, Any]) -> None:
        RngState().load_state_dict(before["rng"])
        for found, state in zip((found for found in self._tracked if is_generator(found)), before["tracked"], strict=False):
            load_generator(found, state)

    def _is_order_as_begun(self) -> bool:
        """Whether the sampler still has the order, and the share of it, with which the pass began: a guard may have changed it."""
        states = self._begin.get("samplers", {})
        begun = next((states[i] for i, part in enumerate(self._parts) if part is self._sampler and i in states), None)
        if begun is None or self._sampler is None:
            return False
        now = self._sampler.state_dict()
        return all(begun.get(name) == now.get(name) for name in ("turns", "num_replicas"))

    def _snapshot(self) -> dict[str, object]:
        """The state on which the coming iteration depends: random numbers, and the state of samplers."""
        epochs: dict[int, int] = {i: part.epoch for i, part in enumerate(self._parts) if _has_epoch(part)}
        marks: dict[str, object] = {"marks": self._marks()} if self._marks() else {}
        own = {"generators": self._own_generators(), "samplers": self._own_samplers()}
        return {"rng": RngState().state_dict(), **own, "epochs": epochs, **marks}

    def _marks(self) -> dict[int, dict[str, int]]:
        """What only Accelerate's loaders and samplers know."""
        return {i: mark for i, part in enumerate(self._parts) if (mark := mark_of(part)) is not None}

    def _put_marks(self, begin: Mapping[str, Any]) -> None:
        for i, mark in begin.get("marks", {}).items():
            if i < len(self._parts):
                put_mark(self._parts[i], mark)

    def _count_pass(self) -> None:
        """End a pass once more that was over when its state was taken."""
        self._put_marks(self._begin)
        for part in self._parts:
            count_pass(part)

    def _own_generators(self) -> dict[int, bytes]:
        return {i: generator.get_state().numpy().tobytes() for i, generator in self._generators()}

    def _own_samplers(self) -> dict[int, object]:
        is_left = self.is_over  # a tracked one has its own state then
        return {
            i: part.state_dict()
            for i, part in enumerate(self._parts)
            if _is_stateful_sampler(part) and not (is_left and part is self._sampler)
        }

    def _go_back(self) -> None:
        RngState().load_state_dict(self._begin["rng"])
        self._put_own(self._begin)
        self._put_marks(self._begin)
        for i, part in enumerate(self._parts):
            if _has_epoch(part) and i in self._begin["epochs"]:
                set_epoch(part, self._begin["epochs"][i])

    def _put_generators(self, states: Mapping[str, Any]) -> None:
        own = states.get("generators", {})
        for i, generator in self._generators():
            if i in own:
                generator.set_state(tensor_of(own[i]))

    def _put_own(self, states: Mapping[str, Any]) -> None:
        self._put_generators(states)
        for i, state in states["samplers"].items():
            if i < len(self._parts) and has_state(self._parts[i]):
                self._parts[i].load_state_dict(state)

    def _has_own_state(self) -> bool:
        """Whether a whole pass leaves something behind that no other object keeps."""
        return bool(self._begin["generators"] or self._begin["samplers"])

    def _generators(self) -> list[tuple[int, torch.Generator]]:
        found = ((i, getattr(part, "generator", None)) for i, part in enumerate(self._parts))
        return [(i, generator) for i, generator in found if isinstance(generator, torch.Generator)]


def set_epoch(part: Any, epoch: int) -> None:
    """Tell a sampler, or any object with ``set_epoch`` like DistributedSampler, which epoch begins; a PermutationSampler never goes
    back.
    """
    if isinstance(part, PermutationSampler):
        part.set_epoch(max(epoch, part.epoch))
    elif callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)


@contextmanager
def keeping_generators(tracked: Iterable[object]) -> Iterator[None]:
    """Put the global generators, and those that are tracked, back at the end of the block to where they are now."""
    rng = RngState()
    state = rng.state_dict()
    states = [(found, state_of(found)) for found in tracked if is_generator(found)]
    try:
        yield
    finally:
        rng.load_state_dict(state)
        for found, kept in states:
            load_generator(found, kept)


def parts_of(source: object) -> list[Any]:
    """``source``, and everything that it draws from."""
    found: list[Any] = [source]
    for part in found:
        for child in (sampler_of(part) if name == "sampler" and is_prepared(part) else getattr(part, name, None) for name in _WITHIN):
            if child is not None and all(child is not other for other in found):
                found.append(child)
    datasets = [part.dataset for part in found if isinstance(part, DataLoader) and isinstance(part.dataset, IterableDataset)]
    return found + datasets


def is_ordered_by_epoch(loader: object) -> bool:
    """Whether it is torchdata's loader of a ``DistributedSampler``: only the epoch and the number of ranks decide what each batch is."""
    if not isinstance(loader, DataLoader) or not _is_of_torchdata(loader):
        return False
    return any(isinstance(part, DistributedSampler) for part in parts_of(loader))


def _is_of_torchdata(part: object) -> bool:
    return any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(part).__mro__)


def _kind_of(source: object, keepers: list[object], loader: DataLoader[Any] | None) -> _Kind:
    if not keepers:
        return _Kind.ONCE if isinstance(source, Iterator) and not isinstance(source, Batches) else _Kind.REPLAYED
    if loader is None or (loader.num_workers == 0 and not reads_ahead(loader)):
        return _Kind.KEEPS
    samplers = [part for part in keepers if isinstance(part, Sampler)]
    if any(part is loader for part in keepers):
        if samplers:
            raise InvalidInput(
                f"the loader is tracked and so is its {type(samplers[0]).__name__}, of which {_who_fetches(loader)} ahead:"
                " track the loader alone, it keeps its sampler's place"
            )
        return _Kind.KEEPS
    if _batch_size(loader) and isinstance(samplers[0] if samplers else None, PermutationSampler):
        return _Kind.AHEAD
    raise InvalidInput(
        f"{type(keepers[0]).__name__} is tracked, and {_who_fetches(loader)} ahead of what was handed out: its place is not"
        " that of the training; do not track it (run.steps then finds the place again by itself), or track a StatefulDataLoader"
    )


def _who_fetches(loader: DataLoader[Any]) -> str:
    return f"{loader.num_workers} workers fetch" if loader.num_workers else "a prepared loader reads a batch"


def _batch_size(loader: DataLoader[Any] | None) -> int:
    """The number of indices in a batch; 0 if that is not known."""
    if loader is None or loader.batch_sampler is None:
        return 1
    sampler = loader.batch_sampler
    return sampler.batch_size if type(sampler) is BatchSampler or (isinstance(sampler, BatchSampler) and _is_of_torchdata(sampler)) else 0


def _is_stateful_sampler(part: object) -> bool:
    return isinstance(part, Sampler) and has_state(part)


def _has_epoch(part: object) -> bool:
    is_kept = isinstance(part, PermutationSampler)  # its state has the epoch
    return not is_kept and callable(getattr(part, "set_epoch", None)) and isinstance(getattr(part, "epoch", None), int)


def _length_of(source: Any, parts: list[Any]) -> int | None:
    if any(isinstance(part, IterableDataset) for part in parts) or not hasattr(source, "__len__"):
        return None  # torch counts what an iterable dataset yields once its length was asked for
    return len(source)
