"""Where a training stands in its epochs, and in the passes over its data in an epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from datastates.errors import InvalidInput
from datastates.system.notices import say

from .passes import Pass, parts_of, set_epoch

__all__ = ["LOOPS", "Loops", "divided_again", "divides_its_loader"]

_logger = logging.getLogger(__name__)

LOOPS = "loops"
"""The top-level name under which a state records where the loops of its training stood."""


class Loops:
    """How far ``Tracker.epochs`` and ``Tracker.steps`` have come, as an object with a state.

    A state that is captured inside a loop of ``steps`` goes on with the next batch of the same epoch; a state captured after the loop goes
    on with the next epoch. ``version`` grows whenever a state is restored: a loop that sees this begins again from there.
    """

    is_optional = True  # for a restore: states that were captured without loops do not have it

    def __init__(self, tracked: Callable[[], Iterable[object]]) -> None:
        self._tracked = tracked
        self.epoch = 0
        self.version = 0
        self.is_used = False
        self.is_counted_elsewhere = False
        self._counting: object = None
        self._has_counted = False
        self._passes: list[Pass] = []
        self._waiting: list[Mapping[str, Any]] = []
        self._is_put_back = self._drops_rest = self._is_lost = False
        self._has_passes = False
        self._left: list[Mapping[str, Any]] = []
        self._captured_bare: int | None = None
        self._said: set[str] = set()

    @property
    def is_counting(self) -> bool:
        """Whether a loop over ``Tracker.epochs`` is running."""
        return self._counting is not None

    def state_dict(self) -> dict[str, object]:
        """Plain values; small."""
        going = [*(each.place for each in self._passes), *self._waiting]
        is_within = not all(place["is_over"] for place in going)
        if not self.is_counting:
            places = [place for place in going if not place["is_over"]]
            left = [] if places else self._left_behind()
            return {"epoch": self.epoch if self._has_counted else None, "passes": places, "is_left": False, "left": left}
        if is_within or (not going and self._has_passes):
            return {"epoch": self.epoch, "passes": going, "is_left": self._drops_rest, "left": self._left}
        if not going:
            self._note_bare_capture()
        is_left = any(each.is_left for each in self._passes)
        return {"epoch": self.epoch + 1, "passes": [], "is_left": is_left, "left": self._left_behind()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was taken; ``{}``: the state does not say. Must come before loaders are restored, which are told the
        epoch.
        """
        epoch = state.get("epoch")
        self._has_counted, self._is_lost = epoch is not None, not state
        self.epoch = epoch or 0
        self._waiting, self._passes = list(state.get("passes", ())), []
        self._drops_rest = bool(state.get("is_left", False))
        self._left = list(state.get("left", ()))
        self._is_put_back, self._captured_bare = True, None
        self.version += 1
        if epoch is not None:
            for loader in self._tracked():
                for part in parts_of(loader) if isinstance(loader, DataLoader) else ():
                    set_epoch(part, epoch)

    @property
    def is_counted(self) -> bool:
        """Whether ``epoch`` is meaningful: a loop over ``Tracker.epochs`` was begun, here or before the restored state."""
        return self._has_counted

    @property
    def batch(self) -> int:
        """How many batches of the pass that began last came before the current one."""
        return max(0, self._passes[-1].batches - 1) if self._passes else 0

    def begin_elsewhere(self, *, is_between: bool) -> None:
        """Note that other code counts the epochs; ``is_between``: a new one begins."""
        self.is_counted_elsewhere = True
        if is_between:
            self._waiting = []

    def _left_behind(self) -> list[Mapping[str, Any]]:
        """What each pass of the epoch leaves for the same pass of the next epoch."""
        left: list[Mapping[str, Any]] = [each.left_behind for each in self._passes] or self._left
        return [*left] if any(left) else []

    def send_back(self) -> None:
        """Have running loops begin again, because the place in the data was changed."""
        self.version += 1

    def count(self, epochs: int, *, is_resumed: bool) -> Iterator[int]:
        """The epochs that are left of ``epochs``, beginning with an unfinished one."""
        if is_resumed and self._is_lost:
            self._warn("lost", "the state does not say which epoch it is of: run.epochs begins with epoch 0")
        if self.epoch >= epochs:
            say(f"nothing is left to do: {self.epoch} of {epochs} epochs are done; raise run.epochs({epochs}) to go on")
        self.is_used = self._has_counted = True
        me = self._counting = object()
        try:
            while self.epoch < epochs:
                self._passes, self._is_put_back = [], False
                yield self.epoch
                if self._counting is not me:
                    raise InvalidInput("another run.epochs was begun inside this one: one of them counts the epochs")
                if not self._is_put_back:
                    self.epoch, self._waiting = self.epoch + 1, []
            self._passes = []
        finally:
            if self._counting is me:
                self._counting = None

    def batches(self, source: Iterable[Any], *, is_resumed: bool) -> Iterator[Any]:
        """The batches of one pass over ``source``, from where it was left; if a state is restored meanwhile, from that state's place."""
        tracked = list(self._tracked())
        ids = set(map(id, tracked))
        turn = Pass(source, lambda part: id(part) in ids, tracked)
        self._begin_turn(turn, is_resumed=is_resumed)
        try:
            while True:
                version = self.version
                for batch in self._iterate(turn):
                    yield batch
                    if version != self.version and turn.is_repeatable:
                        break
                else:
                    return
                if turn not in self._passes:
                    self._passes.append(turn)
        finally:
            turn.leave()

    def _begin_turn(self, turn: Pass, *, is_resumed: bool) -> None:
        self.is_used = self._has_passes = True
        if self.is_counting:
            if self._captured_bare == self.epoch:
                self._warn(
                    "bare", f"a capture before run.steps in epoch {self.epoch} says that the epoch is over: capture in its body, or after"
                )
        else:
            if is_resumed and not self.is_counted_elsewhere and self._has_been_through():
                self._warn(
                    "by hand",
                    "this training was resumed, and run.steps begins its data again: `for epoch in range(n)` counts from 0 again; loop over"
                    " run.epochs(n), which goes on in the right epoch (a loop that ends by run.step is right as it is)",
                )
            self._passes = [each for each in self._passes if not each.is_over]
        self._passes = [*(each for each in self._passes if each.is_over or not each.is_same(turn)), turn]

    def _has_been_through(self) -> bool:
        return bool(self._passes) and all(each.is_over for each in self._passes)

    def _iterate(self, turn: Pass) -> Iterator[Any]:
        """Iterate over what is left of the pass."""
        self._is_put_back = False
        epoch = self.epoch if self.is_counting else None
        place = self._waiting.pop(0) if self._waiting else None
        if place is not None and place["is_over"]:
            turn.recall(place.get("begin", {}))
        left, self._left = self._left[:1], self._left[1:]
        if place is None and left:
            turn.recall(left[0])
        if place is not None:
            is_empty = True
            for batch in (None if place["is_over"] else turn.go_on(place, epoch)) or ():
                is_empty = False
                yield batch
            if not is_empty or self.is_counting or not turn.is_repeatable:
                return  # a pass that was over ends once more in its epoch; without epochs nothing would follow it
        drops, self._drops_rest = self._drops_rest, False
        yield from turn.begin(epoch, drop=drops)

    def _note_bare_capture(self) -> None:
        if self._captured_bare == self.epoch:
            self._warn(
                "twice",
                f"two captures in epoch {self.epoch} without run.steps: each says that the epoch is over; loop over run.steps(loader), so"
                " that a state within an epoch knows its place",
            )
        self._captured_bare = self.epoch

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _logger.warning("%s", text)


def divides_its_loader(state: Mapping[str, Any] | None) -> bool:
    """Whether stored loops say how far the training has come in its data for any number of processes: in one pass at most."""
    if not state or state.get("epoch") is None:
        return False
    passes = state.get("passes", ())
    return not passes or (len(passes) == 1 and bool(passes[0].get("batch_size")))


def divided_again(state: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """The state of the loops for one of ``replicas`` processes, from that of another number: passes then divide what is left of the
    data.
    """
    passes = [{**place, "replicas": replicas} for place in state.get("passes", ())]
    return {**state, "passes": passes}
