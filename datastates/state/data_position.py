"""The position of a training in its epochs, and in the passes over its data in an epoch.

``Loops`` counts epochs and passes. ``Redivision`` adapts positions and random numbers to a job with
another number of ranks.
"""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import DataLoader, Sampler

from datastates.errors import InvalidInput
from datastates.system.logs import say

from .adapters import has_state
from .encoding import encode_values, pack
from .generators import RngState, is_generator, numpy_state, python_state
from .loaders import data_within, is_ordered_by_epoch, set_epoch
from .passes import Pass, warn_once
from .per_rank import part_of, put_back
from .sampler import PermutationSampler
from .tree import join

_logger = logging.getLogger(__name__)

LOOPS = "loops"
"""The top-level name under which a state records where the loops of its training stood."""


class Loops:
    """The progress of ``Tracker.epochs`` and ``Tracker.steps``, as an object with a state.

    A state that is captured inside a loop of ``steps`` resumes with the next batch of the same
    epoch. A state captured after the loop resumes with the next epoch. ``version`` grows whenever a
    state is restored: a loop that sees this begins again from there.
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
        self._last: list[Pass] = []
        self._captured_bare: int | None = None
        self._captured_over: int | None = None
        self._warned: set[str] = set()
        self._aside: list[Pass] = []
        self._counts: dict[int, int] = {}
        self._resumed_at: dict[int, int] = {}
        self._is_stopped = self._is_here = self._leaves_rest = False

    @property
    def is_counting(self) -> bool:
        """Whether a loop over ``Tracker.epochs`` is running."""
        return self._counting is not None

    def state_dict(self) -> dict[str, object]:
        self._note_counts(self._passes)
        return {**self._state(), "counts": {**self._counts}} if self._counts else self._state()

    def _state(self) -> dict[str, object]:
        going = self._going()
        if self.is_counting or self._is_stopped:
            if _is_within(going) or (not going and self._has_passes) or self._is_stopped:
                is_left = self._drops_rest or self._leaves_rest
                return {
                    "epoch": self.epoch,
                    "passes": going,
                    "is_left": is_left,
                    "left": _if_any(self._left_by_last()),
                }
            if not going:
                self._note_bare_capture()
            is_left, self._captured_over = (
                self._leaves_rest or _leave_rest(self._passes),
                self.epoch,
            )
            return {
                "epoch": self.epoch + 1,
                "passes": _asides(going),
                "is_left": is_left,
                "left": self._left_behind(),
            }
        places = [
            *(place for place in going if not place["is_over"] and "spans" not in place),
            *_asides(going),
        ]
        left = [] if places else self._left_behind()
        is_left = (
            self._has_counted and not places and (self._leaves_rest or _leave_rest(self._passes))
        )
        return {
            "epoch": self.epoch if self._has_counted else None,
            "passes": places,
            "is_left": is_left,
            "left": left,
        }

    def _going(self) -> list[Mapping[str, Any]]:
        """The places of this epoch's passes, in the order in which they began. Passes that
        continued from an earlier epoch come last."""
        found = [self._place_of(each) for each in self._passes]
        aside = [
            {**self._place_of(each), "is_aside": True}
            for each in self._aside
            if each.spans and not each.is_over
        ]
        return [*found, *self._waiting, *aside]

    def _place_of(self, turn: Pass) -> Mapping[str, Any]:
        place = turn.last_place if self._is_stopped else turn.place
        return {**place, "spans": turn.order} if turn.spans else place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was taken. ``{}`` means that the state has no place. Call it before
        loaders are restored, because they get the epoch."""
        epoch = state.get("epoch")
        self._has_counted, self._is_lost = epoch is not None, not state
        self.epoch = epoch or 0
        self._waiting, self._passes = list(state.get("passes", ())), []
        self._drops_rest = bool(state.get("is_left", False))
        self._left = list(state.get("left", ()))
        self._counts, self._resumed_at = dict(state.get("counts", {})), {}
        self._is_put_back, self._captured_bare, self._captured_over = True, None, None
        self._aside, self._last, self._is_stopped, self._is_here, self._leaves_rest = (
            [],
            [],
            False,
            False,
            False,
        )
        self.version += 1
        if epoch is not None:
            # a stream that keeps its place takes it in the epoch that it began in
            spans = any("spans" in place for place in self._waiting)
            for part in data_within(
                each for each in self._tracked() if not spans or isinstance(each, DataLoader)
            ):
                set_epoch(part, epoch)

    @property
    def is_counted(self) -> bool:
        """Whether ``epoch`` is meaningful: a loop over ``Tracker.epochs`` was begun, here or
        before the restored state."""
        return self._has_counted

    @property
    def batch(self) -> int:
        """The number of batches of the newest pass before the current one. A pass that continues
        from epoch to epoch counts if there is no other."""
        found = [each for each in self._passes if not each.spans] or self._passes
        return max(0, found[-1].batches - 1) if found else 0

    def note_other_counter(self, *, is_between: bool) -> None:
        """Note that other code counts the epochs. ``is_between``: a new one begins."""
        self.is_counted_elsewhere = True
        if is_between:
            self._waiting = []

    def _left_behind(self) -> list[Mapping[str, Any]]:
        """What each pass of the epoch leaves for the same pass of the next epoch."""
        return _if_any(
            [*(each.left_behind for each in self._passes if each.is_over), *self._left_by_last()]
        )

    def _left_by_last(self) -> list[Mapping[str, Any]]:
        """The places that the last epoch left for passes of this one that have not begun."""
        return self._left or [each.left_behind for each in self._last]

    def restart(self) -> None:
        """Have running loops begin again, because the place in the data was changed."""
        self.version += 1

    def count(self, epochs: int, *, is_resumed: bool) -> Iterator[int]:
        """The epochs that are left of ``epochs``, beginning with an unfinished one."""
        if is_resumed and self._is_lost:
            warn_once(
                self._warned,
                "lost",
                "the state does not say which epoch it is of: run.epochs begins with epoch 0",
            )
        if self.epoch >= epochs:
            say(
                f"nothing is left to do: {self.epoch} of {epochs} epochs are done; raise"
                f" run.epochs({epochs}) to go on; a schedule that ends with the training takes the"
                " new length with track(hyperparameters='script')"
            )
        if self._is_stopped:
            left = [each for each in self._passes if each.is_over]
            self._waiting = [*map(self._place_of, left), *self._waiting]
            self._passes = [each for each in self._passes if not each.is_over]
            self._is_stopped, self._is_here = False, True
        self.is_used = self._has_counted = True
        me = self._counting = object()
        try:
            while self.epoch < epochs:
                self._set_aside()
                self._is_put_back = False
                if not self._going():
                    # The pass that begins sets the epoch of loaders and samplers. A pass that spans
                    # epochs keeps its place.
                    for part in data_within(
                        each
                        for each in self._tracked()
                        if not isinstance(each, DataLoader | Sampler)
                    ):
                        set_epoch(part, self.epoch)
                try:
                    yield self.epoch
                except GeneratorExit:
                    if self._counting is me:
                        self._stop()
                    raise
                if self._counting is not me:
                    raise InvalidInput(
                        "another run.epochs was begun inside this one: one of them counts the"
                        " epochs"
                    )
                if not self._is_put_back:
                    self.epoch, self._waiting, self._is_here = (
                        self.epoch + 1,
                        _asides(self._waiting),
                        False,
                    )
            self._set_aside()
        finally:
            if self._counting is me:
                self._counting = None

    def _set_aside(self) -> None:
        """Begin another epoch. Unfinished passes may continue in it."""
        if over := [each for each in self._passes if each.is_over]:
            self._note_counts(over)
            self._leaves_rest = _leave_rest(over)
            self._last, self._left = over, []
        self._aside = [each for each in (*self._aside, *self._passes) if not each.is_over]
        self._passes = []

    def _note_counts(self, passes: Iterable[Pass]) -> None:
        """Note after how many batches the script left its passes, counted from 0 in each. 0 means
        that it left them at different places.

        The script counted from 0 again in a resumed pass with more batches than the other passes,
        or in which it used as many more.
        """
        for each in [
            each
            for each in passes
            if each.is_over and each.batches and each.limit is None and not each.is_noted
        ]:
            each.is_noted = True
            count = each.batches - each.resumed_at if each.is_left else 0
            usual = self._counts.get(each.order)
            resumed_at = each.resumed_at or self._resumed_at.get(each.order, 0)
            if (
                usual
                and resumed_at
                and (count == usual or (each.resumed_at and each.batches > usual))
            ):
                warn_once(
                    self._warned,
                    "count",
                    f"a pass of run.steps that was resumed after {resumed_at} batches has more than"
                    f" the {usual} after which others were left: islice, zip and enumerate count"
                    f" from 0 again in a resumed pass; use run.steps(loader, limit={usual}) or"
                    " run.enumerate(loader)",
                )
            self._counts[each.order] = count if usual in (None, count) else 0
            self._resumed_at[each.order] = resumed_at

    def _stop(self) -> None:
        """Note that the epochs were left: at the end of one if its passes were over, else within
        it. It may be the end of the interpreter, when no module has its globals any more.
        """
        passes = [each for each in self._passes if not each.spans] or self._passes
        left: list[object] = [each for each in passes if each.is_left]
        left += [place for place in self._waiting if not place["is_over"] and "spans" not in place]
        if self._captured_over == self.epoch or (passes and not left):
            self.epoch += 1
        else:
            self._is_stopped = True

    def batches(
        self,
        source: Iterable[Any],
        *,
        is_resumed: bool,
        is_outside: bool = False,
        limit: int | None = None,
        is_checked: bool = True,
        is_numbered: bool = False,
    ) -> Generator[Any]:
        """The batches of one pass over ``source``, from where it was left. If a state is restored
        during the pass, it continues from that state's place.

        ``is_outside``: the pass was requested before the epochs began, and may continue from one to
        the next. ``limit``: the most batches of the pass. ``is_checked``: whether a replayed batch
        must be the one that was used. ``is_numbered``: each comes with its number.
        """
        tracked = list(self._tracked())
        ids = set(map(id, tracked))
        turn = Pass(
            source,
            lambda part: id(part) in ids,
            tracked,
            self._warned,
            limit=limit,
            is_checked=is_checked,
        )
        # Whether it took the place of a pass over the same source that may continue from epoch to
        # epoch.
        follows = self.is_counting and any(
            each.spans and each.is_same(turn) for each in (*self._last, *self._aside, *self._passes)
        )
        turn.is_outside, turn.spans = is_outside, follows or (self.is_counting and is_outside)
        self._begin_turn(turn, is_resumed=is_resumed)
        try:
            while True:
                version = self.version
                for batch in self._iterate(turn, follows=follows):
                    yield (turn.batches - 1, batch) if is_numbered else batch
                    if version != self.version and turn.is_repeatable:
                        break
                    if turn in self._aside:
                        self._take_up(turn)
                else:
                    return
                if turn not in self._passes:
                    self._add(turn)
                follows = False
        finally:
            turn.leave()

    def _begin_turn(self, turn: Pass, *, is_resumed: bool) -> None:
        self.is_used = self._has_passes = True
        if self.is_counting:
            if self._captured_bare == self.epoch:
                warn_once(
                    self._warned,
                    "bare",
                    f"a capture before run.steps in epoch {self.epoch} says that the epoch is over:"
                    " capture in its body, or after",
                )
        else:
            if (
                is_resumed
                and not self.is_counted_elsewhere
                and self._passes
                and all(each.is_over for each in self._passes)
            ):
                warn_once(
                    self._warned,
                    "by hand",
                    "this training was resumed, and run.steps begins its data again: `for epoch in"
                    " range(n)` counts from 0 again; loop over run.epochs(n), which goes on in the"
                    " right epoch (a loop that ends by run.step is right as it is)",
                )
            self._note_counts(self._passes)
            self._passes, self._is_stopped = (
                [each for each in self._passes if not each.is_over],
                False,
            )
        self._passes = [each for each in self._passes if each.is_over or not each.is_same(turn)]
        self._aside = [each for each in self._aside if not each.is_same(turn)]
        self._add(turn)

    def _add(self, turn: Pass) -> None:
        """Count a pass in this epoch. A pass that spans epochs replaces the one that it follows,
        because a resumed training begins its source once."""
        followed = (
            i
            for i, each in enumerate(self._passes)
            if turn.spans and each.spans and each.is_same(turn)
        )
        at = next(followed, len(self._passes))
        turn.order = len([each for each in self._passes[:at] if not each.is_same(turn)])
        self._passes[at : at + 1] = [turn]
        self._captured_over = None

    def _take_up(self, turn: Pass) -> None:
        """Count a pass that continues from an earlier epoch among the passes of this one."""
        self._aside.remove(turn)
        self._add(turn)
        if self.is_counting and not turn.spans and not turn.is_outside:
            warn_once(
                self._warned,
                "spans",
                f"a pass of run.steps that began within an epoch goes on in epoch {self.epoch}: a"
                " training that is resumed from the end of the epoch in which it began begins it"
                " again; call run.steps for it before run.epochs, and its place is kept",
            )
        turn.spans |= self.is_counting

    def _claim(self, turn: Pass) -> Mapping[str, Any] | None:
        """The restored place from which a pass continues. None: it begins. The passes of an epoch
        begin in the same order again."""

        def is_fit(place: Mapping[str, Any]) -> bool:
            return turn.is_like(place) and (turn.order >= place["spans"] or not self.is_counting)

        found = [place for place in self._waiting if not place.get("is_aside") or is_fit(place)]
        if turn.spans or not self.is_counting:
            # it began before the epochs: places of such passes come first
            found.sort(key=lambda place: "spans" not in place or not turn.is_like(place))
        else:  # a pass that spans epochs claims its place later, once the pass that took it is over
            found = [place for place in found if "spans" not in place or turn.is_like(place)]
        if not found:
            return None
        self._waiting = [place for place in self._waiting if place is not found[0]]
        turn.spans |= "spans" in found[0]
        return found[0]

    def _iterate(self, turn: Pass, *, follows: bool) -> Iterator[Any]:
        """Iterate over what is left of the pass."""
        self._is_put_back = False
        epoch = self.epoch if self.is_counting else None
        place = None if follows else self._claim(turn)
        if place is not None and place["is_over"]:
            turn.recall(place.get("begin", {}))
        if place is None and not follows:
            left, self._left, self._last = self._left[:1], self._left[1:], self._last[1:]
            for each in left:
                turn.recall(each)
        self._leaves_rest = False
        if place is not None:
            is_empty = True
            rest = (
                None
                if place["is_over"]
                else turn.resume_at(place, None if turn.spans else epoch, is_here=self._is_here)
            )
            for batch in rest or ():
                is_empty = False
                yield batch
            if not is_empty or self.is_counting or not turn.is_repeatable:
                # in an epoch, a pass that was over ends once more; without epochs, another pass
                # follows
                return
            turn.leave()  # it had all of its batches
        drops, self._drops_rest = self._drops_rest, False
        yield from turn.begin(epoch, drop=drops)

    def _note_bare_capture(self) -> None:
        if self._captured_bare == self.epoch:
            warn_once(
                self._warned,
                "twice",
                f"two captures in epoch {self.epoch} without run.steps: each says that the epoch is"
                " over; loop over run.steps(loader), so that a state within an epoch knows its"
                " place",
            )
        self._captured_bare = self.epoch


def _is_within(going: list[Mapping[str, Any]]) -> bool:
    """Whether an epoch is not over.

    A pass that continues from epoch to epoch does not delay its end, unless it began as the first.
    """
    first = going[:1] and "spans" not in going[0]
    return any(not place["is_over"] and not (first and "spans" in place) for place in going)


def _leave_rest(passes: list[Pass]) -> bool:
    return any(each.is_left and each.is_over for each in passes)


def _if_any(left: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return left if any(left) else []


def _asides(going: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The places of passes that continue in the next epoch."""
    return [
        {**place, "is_aside": True} for place in going if "spans" in place and not place["is_over"]
    ]


def divides_its_loader(state: Mapping[str, Any] | None) -> bool:
    """Whether stored loops give the position in the data for any number of processes. This holds
    for at most one pass."""
    if not state or state.get("epoch") is None:
        return False
    passes = state.get("passes", ())
    return not passes or (len(passes) == 1 and bool(passes[0].get("batch_size")))


def divided_again(state: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """The state of the loops for one of ``replicas`` processes, from the state of another number.
    Passes then divide the remaining data."""
    passes = [{**place, "replicas": replicas} for place in state.get("passes", ())]
    return {**state, "passes": passes}


# --- Objects of one rank, adapted to a job of another size ---


@dataclass(slots=True)
class Redivision:
    """A state of ``was`` ranks, for rank ``rank`` of ``size``.

    ``notes`` list what differs from the captured state.
    """

    was: int
    rank: int
    size: int
    notes: list[str] = field(default_factory=list)
    _is_counted: bool = False

    @property
    def source(self) -> int:
        """The rank whose own things this rank gets."""
        return self.rank if self.was == self.size else 0

    def reads(self, wants: Callable[[str], bool]) -> Callable[[str], bool]:
        """Which tensors of a state are read for the wanted paths. If
        each rank has separate ones, this rank's are read."""
        mine = self.rank if 1 < self.was == self.size else None
        return lambda path: wants(path) if (rank := part_of(path)) is None else rank == mine

    def __call__(
        self, tree: Mapping[str, Any], objects: Mapping[str, object], wants: Callable[[str], bool]
    ) -> dict[str, Any]:
        """The stored tree of ``source``, in the form that goes into these objects. The models in it
        get the buffers of this rank.

        :raises InvalidInput: a wanted object has its place in the data for one rank only.
        """
        self.notes = []
        found = dict(tree)
        put_back(found, self.rank if self.was == self.size else None)
        if self.was == self.size:
            return found
        self._is_counted = (
            LOOPS in objects and wants(LOOPS) and divides_its_loader(found.get(LOOPS))
        )
        return {
            name: (
                self._of(join("", name), objects[name], child, wants) if name in objects else child
            )
            for name, child in found.items()
        }

    def _of(self, path: str, live: object, stored: Any, wants: Callable[[str], bool]) -> Any:
        if isinstance(live, dict) and isinstance(stored, dict):
            return type(stored)(
                {
                    **stored,
                    **{
                        key: self._of(join(path, key), live[key], stored[key], wants)
                        for key in stored.keys() & live
                    },
                }
            )
        if (
            isinstance(live, list | tuple)
            and type(live) is type(stored)
            and len(live) == len(stored)
        ):
            return type(live)(
                self._of(join(path, index), *pair, wants)
                for index, pair in enumerate(zip(live, stored, strict=True))
            )
        if not wants(path):
            return stored
        if isinstance(live, RngState) or (is_generator(live) and isinstance(stored, dict)):
            if not self.rank or not isinstance(stored, dict):
                return stored
            self.notes.append(
                f"{path}: new random numbers for rank {self.rank} of {self.size}, from those of"
                f" rank 0 of {self.was}"
            )
            return _derived(stored, self.rank)
        if isinstance(live, Loops):
            return divided_again(stored, self.was)
        if isinstance(live, PermutationSampler):
            self.notes.append(
                f"{path}: what {self.was} ranks had left of the epoch is divided among {self.size}"
            )
        elif self._is_counted and is_ordered_by_epoch(live):
            self.notes.append(
                f"{path}: what {self.was} ranks had left of the epoch is divided among {self.size},"
                " by run.steps"
            )
            return {}  # a loader that begins again: the loops skip what all ranks had
        elif (
            has_state(live)
            and hasattr(live, "__iter__")
            and not isinstance(live, torch.nn.Module | torch.Tensor)
        ):
            raise InvalidInput(
                f"{path} ({type(live).__name__}) knows the place of one of {self.was} ranks, and"
                f" what is left cannot be divided among {self.size}: run {self.was} ranks, restore"
                " the other objects with only=, or track a datastates.PermutationSampler instead,"
                " or loop over run.steps(loader) within run.epochs, where a DistributedSampler"
                " orders the loader"
            )
        return stored


def _derived(stored: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A state of generators that is as far from the stored one as another seed is, and always
    the same for a number."""
    seeds = _Seeds(stored, number)
    if "generator" in stored:
        return {**stored, "state": _derived_state(str(stored["generator"]), stored["state"], seeds)}
    found = dict(stored)
    if "torch" in found:
        found["torch"] = _torch_state(seeds)
    if "python" in found:
        found["python"] = python_state(random.Random(seeds.next()))
    if found.get("numpy", {}).get("bit_generator") == "MT19937":
        found["numpy"] = numpy_state(np.random.RandomState(seeds.words()))
    if "cuda" in found:
        found["cuda"] = [_cuda_state(seeds) for _ in found["cuda"]]
    return found


def _derived_state(kind: str, state: Any, seeds: _Seeds) -> Any:
    if kind == "random.Random":
        return python_state(random.Random(seeds.next()))
    if kind.startswith("torch.Generator"):
        return _torch_state(seeds) if kind.endswith(" cpu") else _cuda_state(seeds)
    algorithm = getattr(np.random, kind.rsplit(" ", 1)[-1])
    return {**state, **algorithm(seeds.words()).state}


def _torch_state(seeds: _Seeds) -> bytes:
    return torch.Generator().manual_seed(seeds.next()).get_state().numpy().tobytes()


def _cuda_state(seeds: _Seeds) -> bytes:
    return struct.pack("<Qq", seeds.next(), 0)  # the seed, and how far it has come


class _Seeds:
    """Seeds derived from a state and a number, one after the other."""

    def __init__(self, stored: Mapping[str, Any], number: int) -> None:
        self._hasher = blake3(encode_values([pack(dict(stored)), number]))
        self._count = 0

    def next(self) -> int:
        self._count += 1
        return int.from_bytes(self._hasher.digest(8, seek=64 * self._count), "little") >> 1

    def words(self) -> list[int]:
        self._count += 1
        return [
            int(word)
            for word in np.frombuffer(self._hasher.digest(32, seek=64 * self._count), np.uint32)
        ]
