"""A shuffled order of the data that is a pure function of seed and epoch, and that keeps its
place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils.data import Sampler

from datastates import values
from datastates.errors import InvalidInput

Tail = Literal["repeat", "drop", "share"]
"""What happens to the last indices of an epoch if they do not divide evenly among the replicas."""

_CHUNK = 4096
"""The number of indices that are converted to Python numbers at once."""


class PermutationSampler(Sampler[int]):
    """Every index below ``length`` once an epoch, in an order that only ``seed`` and the epoch
    decide.

    ``position`` counts the indices that were handed out in ``epoch``. Iterating continues from
    there. A loop that was left or restored therefore continues, and begins the next epoch if one
    was over. Track it, and loop over ``run.steps(batches(…))`` or over ``run.steps`` of a
    DataLoader that uses it as its sampler.

    A loop without ``run.steps`` has two requirements. If there are workers, track a
    ``StatefulDataLoader`` of this sampler instead, because workers fetch ahead. Give a DataLoader
    ``generator=torch.Generator()``, because it draws from torch's generator whenever a loop begins.

    If ``num_replicas`` processes train one model, each passes its ``rank`` among them and gets its
    share of the same order: every ``num_replicas``-th index. ``position`` counts the indices of all
    replicas together. Any number of replicas can therefore continue an epoch that another number
    began, and no index is left out or repeated.

    ``tail`` decides about the last indices if they do not divide evenly:

    - ``"repeat"`` gives the other replicas some of the first indices again. All replicas then take
      equally many steps, as with ``DistributedSampler``.
    - ``"drop"`` leaves the last ones out.
    - ``"share"`` hands out each just once, and some replicas get one less.
    """

    @values.checked
    def __init__(
        self,
        length: values.Positive,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: values.Count = 0,
        num_replicas: values.Positive = 1,
        tail: Tail = "repeat",
    ) -> None:
        if rank >= num_replicas:
            raise InvalidInput(
                f"rank is {rank}, and there are {num_replicas} replicas: give one below"
                " num_replicas"
            )
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self.rank, self.num_replicas, self.tail = rank, num_replicas, tail
        self.epoch = 0
        self.position = 0
        self._handed_out: tuple[int, int] | None = None
        self._turns: tuple[int, tuple[tuple[int, int], ...]] = (0, ())
        self._order: tuple[object, torch.Tensor] | None = None

    def __len__(self) -> int:
        """The number of indices that this replica gets in a whole epoch."""
        return self._share_of(self.length)

    def __iter__(self) -> Iterator[int]:
        """The remaining indices of the epoch, or the next epoch if this one is over."""
        return _Indices(self)

    @values.checked
    def batches(
        self,
        batch_size: values.Positive,
        *,
        drop_last: bool = False,
        epochs: values.Count | None = 1,
    ) -> Batches:
        """The remaining indices of this epoch in batches, then further epochs. Endless if
        ``epochs`` is None.

        It is for loops that index tensors.

            sampler = datastates.PermutationSampler(len(inputs))
            for rows in sampler.batches(8):
                outputs = model(inputs[rows])

        ``batch_size`` counts the indices of one replica.
        """
        if drop_last and batch_size > self.length // self.num_replicas:
            each = "" if self.num_replicas == 1 else f" for {self.num_replicas} replicas"
            raise InvalidInput(
                f"batch_size is {batch_size} with drop_last=True, and there are {self.length}"
                f" indices{each}: none is ever full"
            )
        return Batches(self, batch_size, drop_last=drop_last, epochs=epochs)

    @property
    def is_at_end(self) -> bool:
        """Whether every index of this epoch was handed out."""
        return self._is_over(self.position)

    @values.checked
    def set_epoch(self, epoch: values.Count) -> None:
        """Go to the beginning of an epoch. A no-op in that epoch, so that a restored loop continues
        where it was."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    @values.checked
    def reshuffle(self, salt: int) -> None:
        """Hand out the remaining indices of this epoch in another order. It depends on ``seed``,
        the epoch, the position and ``salt``.

        Each index still comes once an epoch. The next epoch is not changed.
        """
        self._turns = (self.epoch, (*self._turns_now(), (self.position, salt)))

    def state_dict(self) -> dict[str, Any]:
        """The place from which the next index will come."""
        names = ("length", "seed", "shuffle", "epoch", "position")
        state = {name: getattr(self, name) for name in names}
        if self._handed_out is not None:
            state["epoch"], state["position"] = self._handed_out
        if self.num_replicas > 1:
            state["num_replicas"] = self.num_replicas
        return {**state, "turns": self._turns_now()} if self._turns_now() else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was taken.

        :raises InvalidInput: the length of its data differs, or it is not a state of this sampler.
        """
        try:
            length, seed, shuffle = int(state["length"]), int(state["seed"]), bool(state["shuffle"])
            epoch, position = int(state["epoch"]), int(state["position"])
            turns = tuple((int(place), int(salt)) for place, salt in state.get("turns", ()))
        except (LookupError, TypeError, ValueError, OverflowError) as exc:
            raise InvalidInput(
                f"not a state of a PermutationSampler: {values.shown(state)}"
            ) from exc
        if length != self.length:
            raise InvalidInput(
                f"the state is of {length} indices and this sampler has {self.length}: its position"
                " means nothing here"
            )
        if not 0 <= position <= length:
            raise InvalidInput(
                f"position {position} is not within the {length} indices of the state"
            )
        self.seed, self.shuffle, self.epoch, self.position = seed, shuffle, epoch, position
        self._turns, self._handed_out = (epoch, turns), None

    def hold(self) -> None:
        """Report from now on the place that ``hand_out`` counts, not the place up to which indices
        were fetched, because workers fetch ahead."""
        self._begin()
        self._handed_out = (self.epoch, self.position)

    def hand_out(self, count: int) -> None:
        """Count indices whose samples the training got."""
        if self._handed_out is not None:
            epoch, position = self._handed_out
            self._handed_out = (epoch, min(position + count * self.num_replicas, self.length))

    def let_go(self, *, is_over: bool) -> None:
        """End ``hold``.

        Unless the epoch is over, indices that were fetched and not handed out are still to come."""
        if self._handed_out is not None and not is_over:
            self.epoch, self.position = self._handed_out
        self._handed_out = None

    def _begin(self) -> None:
        """Move on if the epoch is over."""
        if self.is_at_end:
            self.epoch, self.position = self.epoch + 1, 0

    def _rest(self) -> Iterator[int]:
        epoch, position, turns = self.epoch, self.position, self._turns_now()
        while rows := self._rows(position, _CHUNK):
            for index in rows:
                position = min(position + self.num_replicas, self.length)
                self.position = position
                yield index
                if (self.epoch, self.position, self._turns_now()) != (epoch, position, turns):
                    return  # the sampler was sent elsewhere meanwhile
        self.position = self.length

    def _batches_of_rest(self, size: int, *, drop_last: bool) -> Iterator[list[int]]:
        epoch = self.epoch
        while self.epoch == epoch and (rows := self._rows(self.position, size)):
            if drop_last and (self.length - self.position) // self.num_replicas < size:
                break
            self.position = min(self.position + size * self.num_replicas, self.length)
            yield rows
        if self.epoch == epoch:
            self.position = self.length

    def _rows(self, position: int, most: int) -> list[int]:
        """The next indices of this replica from ``position`` on; none if the epoch is over."""
        count = min(most, self._share_of(self.length - position))
        begin, end = position + self.rank, position + self.rank + count * self.num_replicas
        order = self._permutation()
        if end <= self.length:
            rows: list[int] = order[begin : end : self.num_replicas].tolist()
        else:
            rows = order[
                torch.arange(begin, end, self.num_replicas, device="cpu") % self.length
            ].tolist()
        return rows

    def _share_of(self, left: int) -> int:
        """How many of the ``left`` indices this replica gets."""
        if self.tail == "drop":
            return left // self.num_replicas
        return -(-(left - (self.rank if self.tail == "share" else 0)) // self.num_replicas)

    def _is_over(self, position: int) -> bool:
        return self.length - position < (self.num_replicas if self.tail == "drop" else 1)

    def _turns_now(self) -> tuple[tuple[int, int], ...]:
        return self._turns[1] if self._turns[0] == self.epoch else ()

    def _permutation(self) -> torch.Tensor:
        key = (self.seed, self.shuffle, self.epoch, self._turns_now())
        if self._order is None or self._order[0] != key:
            self._order = (key, _permutation(self.length, *key))
        return self._order[1]


class Batches(Iterator[list[int]]):
    """Batches of indices from the remaining part of the ``sampler``'s epoch and further epochs
    (``epochs`` in all). Each ``iter`` begins from the current place."""

    def __init__(
        self, sampler: PermutationSampler, batch_size: int, *, drop_last: bool, epochs: int | None
    ) -> None:
        self.sampler, self.batch_size, self.epochs = sampler, batch_size, epochs
        self._drop_last = drop_last
        self._running: Iterator[list[int]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return self._run()

    def __next__(self) -> list[int]:
        if self._running is None:
            self._running = self._run()
        return next(self._running)

    def _run(self) -> Iterator[list[int]]:
        done = 0
        while self.epochs is None or done < self.epochs:
            self.sampler._begin()
            yield from self.sampler._batches_of_rest(self.batch_size, drop_last=self._drop_last)
            done += 1


class _Indices(Iterator[int]):
    """An iteration over a sampler.

    Its state is for torchdata's loaders: an epoch that was over when it was taken ends once more
    there."""

    def __init__(self, sampler: PermutationSampler) -> None:
        # Now, not with the first index: a loader may ask for an iterator and never use it, and then
        # ask for another.
        sampler._begin()
        self._sampler, self._indices = sampler, sampler._rest()

    def __next__(self) -> int:
        return next(self._indices)

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._indices = self._sampler._rest()


def _permutation(
    length: int, seed: int, shuffle: bool, epoch: int, turns: tuple[tuple[int, int], ...]
) -> torch.Tensor:
    order = (
        _shuffled(length, _mixed(seed, epoch)) if shuffle else torch.arange(length, device="cpu")
    )
    for position, salt in turns:
        rest = order[position:]
        order[position:] = rest[
            _shuffled(len(rest), _mixed(_mixed(_mixed(seed, epoch), position), salt))
        ]
    return order


def _shuffled(length: int, seed: int) -> torch.Tensor:
    # Torch's generator is a Mersenne Twister: neighbouring seeds give unrelated orders only if they
    # are mixed well.
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed), device="cpu")


def _mixed(seed: int, epoch: int) -> int:
    """SplitMix64 of both (Steele, Lea and Flood, 2014), so that seed 0 epoch 1 is not seed 1
    epoch 0."""
    mask = (1 << 64) - 1
    value = (seed * 0x9E3779B97F4A7C15 + epoch) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ (value >> shift)) * factor) & mask
    return (value ^ (value >> 31)) >> 1
