"""One pass over the data: which sources keep their own place, and how the place in any other source
is found again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from xxhash import xxh3_64_intdigest

from datastates.errors import InvalidInput

from .adapters import has_state
from .generators import RngState, is_generator, load_generator, state_of, tensor_of
from .loaders import (
    Kind,
    batch_size,
    count_pass,
    data_within,
    holds_begun_iterator,
    is_ordered_by_epoch,
    is_prepared,
    is_received,
    is_stateful,
    kind_of,
    length_of,
    mark_of,
    parts_of,
    progress_of,
    put_mark,
    reads_ahead,
    resume_afresh,
    set_epoch,
    size_of,
    start_afresh,
    wrapped_by,
)
from .sampler import Batches, PermutationSampler

_logger = logging.getLogger(__name__)

_LOOKS = 16
"""How many batches of a pass are checked for random numbers drawn by reading ahead; each check
costs a quarter of a millisecond."""

_MOST_PARTS = 32
"""The most objects in a batch that its fingerprint depends on."""

_MOST_BYTES = 65536
"""The size of a tensor from which some 4096 of its elements are used instead of all."""

_PLAIN = (str, bytes, int, float, complex)

_BEGUN_AGAIN = (Kind.REPLAYED, Kind.AHEAD)


class Pass:
    """One iteration over ``source``, from ``place`` if one is given. ``place`` is then its
    progress.

    Three arguments are for counting epochs. ``order`` is the number of passes that began
    before this one in its epoch. ``is_outside`` means that the pass was requested before the epochs
    began. ``spans`` means that it may continue in the next epoch. ``limit`` is the most batches of
    the pass. ``is_checked`` means that a replayed batch must be the one that was used.

    A DataLoader draws the seed of its workers from torch's generator when its iterator is made. A
    resumed pass had done so before its state was taken. The generators are therefore reset to their
    earlier states after batches were read on the way to the place.
    """

    def __init__(
        self,
        source: Iterable[Any],
        is_tracked: Callable[[object], bool],
        tracked: Iterable[object],
        warned: set[str] | None = None,
        *,
        limit: int | None = None,
        is_checked: bool = True,
    ) -> None:
        self._source, self._tracked = source, tracked
        self._warned = set() if warned is None else warned
        self._parts = parts_of(source)
        keepers = [part for part in self._parts if is_tracked(part)]
        if not is_tracked(source) and (wrapped := wrapped_by(source)) is not None:
            name = type(wrapped).__name__
            raise InvalidInput(
                f"{type(source).__name__} wraps a {name}, whose place in the data would be lost:"
                f" pass the {name} itself to run.steps, and wrap what that returns, as in"
                " tqdm(run.steps(loader))"
            )
        self._loader = source if isinstance(source, DataLoader) else None
        self._kind = kind_of(source, keepers, self._loader)
        self._sampler = next(
            (part for part in keepers if isinstance(part, PermutationSampler)), None
        )
        self._told = self._sampler if self._kind is Kind.AHEAD else None
        self._is_torchdata = any(
            type(part).__module__.startswith("torchdata.stateful_dataloader") for part in keepers
        )
        self._prepared: Any = source if is_prepared(source) else None
        self._kept = self._loader if is_tracked(source) and self._prepared is None else None
        stream = None if self._loader is None or self._loader.num_workers else self._loader.dataset
        self._is_streamed = isinstance(stream, IterableDataset)
        self._is_fast_forwarded = self._is_torchdata and self._is_streamed and not has_state(stream)
        self._length, self._size = length_of(source, self._parts), size_of(source, self._loader)
        self._watches = (
            self._loader is not None and reads_ahead(source) and self._loader.num_workers == 0
        )
        restored = set(map(id, data_within(tracked)))
        self._nested = [
            part
            for part in data_within([source])
            if all(part is not other for other in self._parts)
        ]
        self._untold = [part for part in (*self._parts, *self._nested) if id(part) not in restored]
        self._rewound = [
            part
            for part in self._nested
            if is_tracked(part) and has_state(part) and not isinstance(part, Sampler | DataLoader)
        ]
        self._begin: Mapping[str, Any] = {}
        self._before_ahead: dict[str, object] | None = None
        self._is_drawing = self._has_drawn_order = False
        self._hidden: list[tuple[object, object]] = []
        self._is_first = False
        self.batches = self.order = self.resumed_at = 0
        self.limit, self._is_checked = limit, is_checked
        self._prints: list[int | None] = []
        self._order: Iterator[Any] = iter(())
        self.is_over = self.is_left = self.is_outside = self.spans = self.is_noted = False
        is_within = holds_begun_iterator(source)
        if is_within or (self._kind is Kind.ONCE and not isinstance(source, GeneratorType)):
            warn_once(
                self._warned,
                "an iterator",
                "run.steps is given"
                f" {type(source).__name__}{' around an iterator' if is_within else ''}, whose place"
                " in the data is not known: a training that is resumed begins it again; pass the"
                " loader itself, as in enumerate(run.steps(loader))",
            )

    @property
    def place(self) -> dict[str, object]:
        """Plain values that lead back here, in another process too."""
        return self._place(is_over=self.is_over)

    @property
    def last_place(self) -> dict[str, object]:
        """The place of a pass whose loop was left, as it was in that loop."""
        return self._place(is_over=not self.is_left)

    def _place(self, *, is_over: bool) -> dict[str, object]:
        place: dict[str, object] = {
            "batches": self.batches,
            "is_over": is_over,
            "length": self._length,
        }
        if self._size:
            place["size"] = self._size
        if self._loader is not None:
            place["workers"] = self._loader.num_workers
        if any(isinstance(part, DistributedSampler) for part in self._parts):
            place["batch_size"] = batch_size(self._loader)
        begin = self.left_behind if is_over else self._begin
        if self._before_ahead is not None and not is_over:
            place["before_ahead"] = self._before_ahead
        if self._prints and not is_over:
            place["prints"] = self._prints
        return {**place, "begin": begin} if begin else place

    @property
    def left_behind(self) -> dict[str, object]:
        """The untracked state on which the next pass over the same source depends: its own
        generators and samplers. It is usually empty."""
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
        """The batches of a new pass. Samplers with ``set_epoch`` get ``epoch``. ``drop``: do not
        take the remaining batches of a pass that was left."""
        self.batches, self.is_over, self.is_left, self.resumed_at, self._prints = (
            0,
            False,
            True,
            0,
            [],
        )
        self._before_ahead, self._has_drawn_order = None, False
        if epoch is not None:
            for part in (*self._parts, *self._nested):
                set_epoch(part, epoch)
        for part in self._parts:
            # without another epoch, a stream of datasets would begin at the place that was restored
            if getattr(part, "_starting_state_dict", None):
                part._starting_state_dict = None
        self._look()
        if self._prepared is not None:
            start_afresh(self._prepared)
        elif drop and self._is_torchdata:
            iter(self._source)  # the iterator that restoring made
        if self._kind in _BEGUN_AGAIN or self._is_prepared_keeper:
            self._begin = self._snapshot()
        return self._counted(self._held())

    def resume_at(
        self, place: Mapping[str, Any], epoch: int | None, *, is_here: bool = False
    ) -> Iterator[Any] | None:
        """The batches after ``place``. None if there are none, as far as can be determined without
        fetching one. ``is_here``: an earlier pass of this process was left there, and nothing was
        restored."""
        self.batches, self.is_over, self.is_left = int(place["batches"]), False, True
        self.resumed_at = self.batches
        self._begin = place.get("begin", {})
        if epoch is not None:
            for part in self._untold:
                set_epoch(part, epoch)
        self._look()
        if "replicas" in place:
            return self._divided(place, epoch)
        is_found, again = self._recount(place)
        is_used_up = self._is_used_up()
        if self._kind is Kind.REPLAYED:
            if not is_found or not self._begin:
                _logger.warning(
                    "the state was taken after %d batches of a loader of %s, and run.steps is given"
                    " one of %s. It begins with its first batch. Pass the same loader as then",
                    place["batches"],
                    _described(place.get("length"), place),
                    _described(self._length, self._place(is_over=False)),
                )
                return self.begin(epoch)
            if again:
                _logger.warning(
                    "the state was taken after %d batches of %d, and a batch has %d now, which does"
                    " not divide what was used: the last %d samples of it come again",
                    place["batches"],
                    place.get("size", place.get("batch_size")),
                    self._size,
                    again,
                )
            # A whole pass may leave a state behind that no other object keeps.
            if is_used_up and not (self._begin["generators"] or self._begin["samplers"]):
                self._count_pass()
                return None
            return self._counted(self._replay(place))
        if is_used_up and not (self._is_prepared_keeper and self._begin.get("generators")):
            self._count_pass()
            return None
        if self._kind is Kind.AHEAD and self._leads_to_sampler():
            return self._counted(self._replay(place))
        if self._is_prepared_keeper and self._begin:
            return self._counted(self._resumed())
        if self._kind is Kind.ONCE:
            _logger.warning(
                "run.steps is given a generator, whose place is not known: make it begin after"
                " batch %d",
                self.batches,
            )
        with keeping_generators(self._tracked):
            if self._kept is not None and is_here:
                # it is tracked
                self._kept.load_state_dict(self._kept.state_dict())  # type: ignore[attr-defined]
            iterator = self._held()
        return self._counted(iterator)

    def _recount(self, place: Mapping[str, Any]) -> tuple[bool, int]:
        """Convert the batches of a place to the present batch size. Returns whether the place is
        found again, and how many samples before it come again."""
        size, length = int(place.get("size", place.get("batch_size", 0))), place.get("length")
        is_streamed = any(isinstance(part, IterableDataset) for part in self._parts)
        workers = 1 if self._loader is None else max(1, self._loader.num_workers)
        if is_streamed and max(1, place.get("workers", workers)) != workers:
            return False, 0  # each worker has its own share of the stream
        if not size or not self._size or size == self._size:
            return length == self._length, 0
        is_whole = length is not None and self.batches >= length
        self.batches, again = divmod(self.batches * size, self._size)
        if is_whole and self._length is not None:
            self.batches, again = self._length, 0
        if isinstance(self._source, Batches):
            return self._source.epochs == 1, again
        is_in_order = batch_size(self._loader) > 0 and not (is_streamed and workers > 1)
        return is_in_order and self.is_like(place), again

    def is_like(self, place: Mapping[str, Any]) -> bool:
        """Whether the place may be one in the same data, as far as their length shows."""
        length, size = place.get("length"), place.get("size", place.get("batch_size", self._size))
        if length is None or self._length is None or size == self._size:
            return bool(length == self._length)
        sampler: Any = getattr(getattr(self._loader, "batch_sampler", None), "sampler", None)
        samples = len(sampler) if hasattr(sampler, "__len__") else 0
        return length in (samples // size, -(-samples // size))

    def _divided(self, place: Mapping[str, Any], epoch: int | None) -> Iterator[Any] | None:
        """The batches after the place of another number of processes: this one's share of what
        those had not had."""
        replicas, length = int(place["replicas"]), place.get("length")
        if length is not None and self.batches >= length:
            return None
        if self._sampler is not None:
            if self._is_used_up():
                return None
            with keeping_generators(self._tracked):
                iterator = self._held()
            return self._counted(iterator)
        sampler, size = (
            next((part for part in self._parts if isinstance(part, DistributedSampler)), None),
            batch_size(self._loader),
        )
        used = self.batches * replicas * int(place.get("batch_size", 0))
        is_repeatable = self._kind is Kind.REPLAYED or is_ordered_by_epoch(self._loader)
        if (
            not is_repeatable
            or sampler is None
            or not used
            or not size
            or used % (sampler.num_replicas * size)
        ):
            raise InvalidInput(
                f"the state is of {replicas} processes, each of which had {self.batches} batches of"
                f" its epoch, and what is left cannot be divided again: run {replicas} of them,"
                " restore a state from the end of an epoch, or let a tracked"
                " datastates.PermutationSampler(len(data), rank=rank, num_replicas=processes) be"
                " the loader's sampler"
            )
        self.batches = used // (sampler.num_replicas * size)
        if epoch is not None:
            set_epoch(sampler, epoch)
        return self._counted(
            self._replay(place) if self._kind is Kind.REPLAYED else self._skipped()
        )

    def watch(self, batches: int = 0) -> None:
        """Note that other code is about to iterate over the source: ``place`` leads back to here.
        That code's observer counts the ``batches``.
        """
        self.batches, self.is_over, self.is_left = batches, False, True
        self._begin = self._snapshot()

    def leave(self) -> None:
        """End the loop over this pass, or leave it: maybe at the end of the interpreter, when no
        module has its globals any more."""
        self.is_over = True
        if self._told is not None:
            self._told.let_go(is_over=not self.is_left)

    def is_same(self, other: Pass) -> bool:
        """Whether both passes are over the same source."""
        return self._source is other._source

    @property
    def is_repeatable(self) -> bool:
        return self._kind is not Kind.ONCE

    def _is_used_up(self) -> bool:
        if self._kind is Kind.REPLAYED or self._is_prepared_keeper:
            return self._length is not None and self.batches >= self._length
        is_endless = isinstance(self._source, Batches) and self._source.epochs != 1
        return self._sampler is not None and not is_endless and self._sampler.is_at_end

    @property
    def _is_prepared_keeper(self) -> bool:
        """Whether the source is a prepared loader that keeps its place, except for the part that
        only its sampler has."""
        return (
            self._kind is Kind.KEEPS and self._prepared is not None and is_stateful(self._prepared)
        )

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        iterator = self._watched(iterator) if self._watches else iterator
        iterator = self._compared(iterator) if self._compares else iterator
        for batch in itertools.islice(
            iterator, None if self.limit is None else max(0, self.limit - self.batches)
        ):
            if self._is_first:
                self._is_first = False
                self._check_first()
            self.batches += 1
            self._hand_out()
            if self._kind in _BEGUN_AGAIN:
                # now: the training may change the batch
                self._prints = [
                    fingerprint(next(self._order, None)),
                    fingerprint(batch),
                ]
            yield batch
        self.is_left = self.limit is not None and self.batches >= self.limit

    def _look(self) -> None:
        """Note how far what is tracked has come, before anything of this pass is fetched."""
        self._is_first = True
        others = self._tracked if self._kind is Kind.REPLAYED else ()
        self._hidden = [
            (part, progress_of(part))
            for part in others
            if all(part is not own for own in self._parts)
        ]

    def _check_first(self) -> None:
        """Called with the first batch that was fetched."""
        for part, before in self._hidden:
            if progress_of(part) != before:
                raise InvalidInput(
                    f"run.steps is given {type(self._source).__name__}, which draws from the"
                    f" tracked {type(part).__name__} unseen. A resumed training would skip"
                    " twice what was used. Do not track that, because run.steps finds the place"
                    " without it, or pass the loader itself to run.steps"
                )
        self._hidden = []

    @property
    def _compares(self) -> bool:
        """Whether to look for random numbers that decide what is handed out and that alternate with
        the training's draws."""
        is_read_again = self._kind is Kind.REPLAYED or self._is_fast_forwarded
        return self._is_streamed and is_read_again and "in turns" not in self._warned

    def _compared(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of a stream that is read in this process. A warning is logged if both it and
        the training draw."""
        after: object = None
        is_drawn_between = self._is_fast_forwarded
        for count in itertools.count():
            is_looking = self._compares and count <= _LOOKS
            before = _generators_now(self._tracked) if is_looking else None
            batch = next(iterator, self)
            if batch is self:
                return
            now = _generators_now(self._tracked) if is_looking else None
            is_drawn_between |= is_looking and count > 0 and before != after
            if is_drawn_between and now != before:
                warn_once(
                    self._warned,
                    "in turns",
                    "the dataset draws random numbers in this process, and so does the training: if"
                    " they decide which samples come, as those of a shuffle buffer do, a training"
                    " that goes on within a pass gets other samples; give the loader a worker"
                    " (num_workers=1), or have the dataset draw from a torch.Generator of its own,"
                    " in its attribute `generator`, and do not track the loader",
                )
            after = now
            yield batch

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader that reads one ahead. If reading draws random numbers, a resumed
        pass must read the next batch from the same generator state.

        The loader draws the order of the batches with its first batch.
        """
        for count in itertools.count(int(self._has_drawn_order)):
            is_looking = self._watches and 0 < count <= _LOOKS
            before = _generators_now(self._tracked) if self._is_drawing or is_looking else None
            batch = next(iterator, self)
            if batch is self:
                return
            if is_looking and not self._is_drawing and _generators_now(self._tracked) != before:
                self._is_drawing = not self._is_prepared_keeper
                if self._is_prepared_keeper:
                    self._watches = False
                    _logger.warning(
                        "the dataset draws random numbers in this process, a batch ahead of the"
                        " training. A loader that keeps its own place cannot repeat them when a"
                        " training resumes. Leave use_stateful_dataloader out, because run.steps"
                        " finds the place, or give the loader workers"
                    )
            self._before_ahead = before if self._is_drawing else None
            yield batch

    def _hand_out(self) -> None:
        if self._told is not None:
            self._told.hand_out(batch_size(self._loader))

    def _held(self) -> Iterator[Any]:
        if self._told is not None:
            self._told.hold()
        iterator, self._order = iter(self._source), iter(())
        if self._kind in _BEGUN_AGAIN and isinstance(iterator, _SingleProcessDataLoaderIter):
            iterator._sampler_iter, self._order = itertools.tee(iterator._sampler_iter)
        return iterator

    def _resumed(self) -> Iterator[Any]:
        """The remaining batches of a prepared loader's pass from its place. Its sampler has to draw
        the order that it drew when the pass began."""
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
                "the loader keeps its workers. If its dataset draws random numbers there, the rest"
                " of this epoch gets other numbers than without the interruption. With"
                " persistent_workers=False it gets the same ones"
            )
        if (
            self._loader is not None
            and place.get("workers", self._loader.num_workers) != self._loader.num_workers
        ):
            _logger.warning(
                "the loader had %d workers when the state was taken, and has %d: if its dataset"
                " draws random numbers, it draws others",
                place["workers"],
                self._loader.num_workers,
            )
        with keeping_generators(self._tracked):
            self._go_back()
            if self._prepared is not None:
                start_afresh(self._prepared)
            iterator, before = self._held(), None
            for left in range(self.batches, 0, -1):
                if left == min(self.batches, 1 + self._watches):
                    # the last batch may have been read with the one before it
                    before = _generators_now(self._tracked)
                if left == 1 and "before_ahead" in place:
                    _set_generators(self._tracked, place["before_ahead"])
                batch, indices = next(iterator, None), next(self._order, None)
                self._hand_out()
            if self.batches:
                self._prints = [fingerprint(indices), fingerprint(batch)]
                self._check_replay(place, is_drawn=before != _generators_now(self._tracked))
        self._is_drawing, self._has_drawn_order = "before_ahead" in place, self.batches > 0
        return iterator

    def _check_replay(self, place: Mapping[str, Any], *, is_drawn: bool) -> None:
        """Compare the last of the batches that were used with the one that replaced it.

        Random numbers that are drawn in this process, alternating with the training's, decide what
        a batch is but not the next ones.
        """
        # only the rank that read a batch knows whether random numbers were drawn for it
        is_drawn = is_drawn or is_received(self._source)
        loader, pairs = (
            self._loader,
            [*zip(place.get("prints", ()), self._prints, strict=False)][: 1 if is_drawn else 2],
        )
        is_same = loader is None or not (
            loader.persistent_workers or place.get("workers") != loader.num_workers
        )
        is_same &= "replicas" not in place and place.get("size", self._size) == self._size
        if (
            self._is_checked
            and is_same
            and any(None not in pair and pair[0] != pair[1] for pair in pairs)
        ):
            raise InvalidInput(
                f"batch {self.batches - 1} of {type(self._source).__name__} is another than the one"
                " that the training used: its data changed, or their order depends on more than"
                " random numbers and the epoch. Samples would come twice or never. Track"
                " what decides the order, and change it (sampler weights, for example) only"
                " between epochs. Or let a tracked PermutationSampler decide it. Or go back with"
                " run.restore to a state from before this epoch. run.steps(loader, verify=False)"
                f" continues after {self.batches} batches all the same"
            )

    def _skipped(self) -> Iterator[Any]:
        """The batches of a tracked loader, started again, after the batches that were handed
        out."""
        with keeping_generators(self._tracked):
            # the iterator that restoring made is of no epoch
            self._loader.load_state_dict({})  # type: ignore[union-attr]
            iterator = iter(self._source)
            for _ in range(self.batches):
                next(iterator, None)
        return iterator

    def _leads_to_sampler(self) -> bool:
        """Whether the batches, begun again, lead to where the sampler is: a guard may have
        changed its order, or a user the batch size."""
        states = self._begin.get("samplers", {})
        begun = next(
            (
                states[i]
                for i, part in enumerate(self._parts)
                if part is self._sampler and i in states
            ),
            None,
        )
        if begun is None or self._sampler is None:
            return False
        now = self._sampler.state_dict()
        first = begun["position"] if begun["epoch"] == now["epoch"] else 0
        used = self.batches * batch_size(self._loader) * self._sampler.num_replicas
        is_same = all(begun.get(name) == now.get(name) for name in ("turns", "num_replicas"))
        return is_same and min(first + used, self._sampler.length) == now["position"]

    def _snapshot(self) -> dict[str, object]:
        """The state on which the coming iteration depends: random numbers, and the state of
        samplers."""
        epochs: dict[int, int] = {
            i: part.epoch for i, part in enumerate(self._parts) if _has_epoch(part)
        }
        marks: dict[str, object] = {"marks": self._marks()} if self._marks() else {}
        own = {"generators": self._own_generators(), "samplers": self._own_samplers()}
        rewound = (
            [part.state_dict() for part in self._rewound] if self._kind is Kind.REPLAYED else []
        )
        return {
            "rng": RngState().state_dict(),
            **own,
            "epochs": epochs,
            **marks,
            **({"rewound": rewound} if rewound else {}),
        }

    def _marks(self) -> dict[int, dict[str, int]]:
        """What only Accelerate's loaders and samplers know."""
        return {
            i: mark for i, part in enumerate(self._parts) if (mark := mark_of(part)) is not None
        }

    def _put_marks(self, begin: Mapping[str, Any]) -> None:
        for i, mark in begin.get("marks", {}).items():
            if i < len(self._parts):
                put_mark(self._parts[i], mark)

    def _count_pass(self) -> None:
        """End again a pass that was over when its state was taken."""
        self._put_marks(self._begin)
        for part in self._parts:
            count_pass(part)

    def _own_generators(self) -> dict[int, bytes]:
        return {i: generator.get_state().numpy().tobytes() for i, generator in self._generators()}

    def _own_samplers(self) -> dict[int, object]:
        is_left = self.is_over  # a tracked one has its own state then
        samplers: list[tuple[int, Any]] = [
            (i, part)
            for i, part in enumerate(self._parts)
            if isinstance(part, Sampler) and has_state(part)
        ]
        return {
            i: part.state_dict() for i, part in samplers if not (is_left and part is self._sampler)
        }

    def _go_back(self) -> None:
        RngState().load_state_dict(self._begin["rng"])
        self._put_own(self._begin)
        self._put_marks(self._begin)
        for i, part in enumerate(self._parts):
            if _has_epoch(part) and i in self._begin["epochs"]:
                set_epoch(part, self._begin["epochs"][i])
        for part, state in zip(self._rewound, self._begin.get("rewound", ()), strict=False):
            part.load_state_dict(None if hasattr(part, "_starting_state_dict") else state)

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

    def _generators(self) -> list[tuple[int, torch.Generator]]:
        found = ((i, getattr(part, "generator", None)) for i, part in enumerate(self._parts))
        return [(i, generator) for i, generator in found if isinstance(generator, torch.Generator)]


def warn_once(warned: set[str], kind: str, text: str) -> None:
    """Log a warning unless one of this kind is in ``warned``."""
    if kind not in warned:
        warned.add(kind)
        _logger.warning("%s", text)


def fingerprint(batch: object) -> int | None:
    """A number that depends on the content of a batch. None if reading it would wait for a device.

    Large tensors and long texts are read in part, so that this takes some ten microseconds.
    """
    found, contents = [batch], list[bytes | memoryview]()
    for part in itertools.islice(found, _MOST_PARTS):  # the list grows meanwhile
        with suppress(Exception):  # the objects are the user's
            if isinstance(part, (*_PLAIN, np.ndarray)) or (
                isinstance(part, torch.Tensor) and part.is_cpu
            ):
                contents.append(_content_of(part))
            elif isinstance(part, list | tuple):
                found += part[:: len(part) // _MOST_PARTS + 1]
            elif isinstance(part, Mapping):
                found += part.values()
            else:  # plain values of other objects may be counts or times
                found += (each for each in vars(part).values() if not isinstance(each, _PLAIN))
    return xxh3_64_intdigest(b"".join(contents)) >> 1 if contents else None


def _content_of(part: Any) -> bytes | memoryview:
    """The bytes of a plain value, a tensor or an array. A large one gives a grid of its
    elements."""
    if isinstance(part, _PLAIN):
        return repr(
            (len(part), part[:256], part[-256:]) if isinstance(part, str | bytes) else part
        ).encode()
    if part.nbytes > _MOST_BYTES:
        each = max(1, int(4096 ** (1 / part.ndim)))
        part = part[tuple(slice(None, None, -(-size // each)) for size in part.shape)]
    if isinstance(part, torch.Tensor):
        return part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


@contextmanager
def keeping_generators(tracked: Iterable[object]) -> Iterator[None]:
    """Put the global generators, and those that are tracked, back at the end of the block to
    where they are now."""
    before = _generators_now(tracked)
    try:
        yield
    finally:
        _set_generators(tracked, before)


def _generators_now(tracked: Iterable[object]) -> dict[str, Any]:
    return {
        "rng": RngState().state_dict(),
        "tracked": [state_of(found) for found in tracked if is_generator(found)],
    }


def _set_generators(tracked: Iterable[object], before: Mapping[str, Any]) -> None:
    RngState().load_state_dict(before["rng"])
    generators = (found for found in tracked if is_generator(found))
    for found, state in zip(generators, before["tracked"], strict=False):
        load_generator(found, state)


def _described(length: object, place: Mapping[str, Any]) -> str:
    """The length of a loader, and what else decides which samples its batches have."""
    size, workers = place.get("size"), place.get("workers")
    details = [f"batches of {size}" if size else "", f"{workers} workers" if workers else ""]
    return f"{length} ({', '.join(filter(None, details))})" if any(details) else f"{length}"


def _has_epoch(part: object) -> bool:
    is_kept = isinstance(part, PermutationSampler)  # its state has the epoch
    return (
        not is_kept
        and callable(getattr(part, "set_epoch", None))
        and isinstance(getattr(part, "epoch", None), int)
    )
