"""``blame`` finds the state that last changed each tensor, and ``bisect`` the first bad state.

Both follow first parents. Blame compares digests in manifests: a tensor whose chunks have the same
digests in a state and in its parent is the same. Bytes are read only if several tensors share a
changed chunk, and only the bytes in that chunk.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from datastates import values
from datastates.errors import Conflict, InvalidInput, NotFound, Unavailable
from datastates.lineage import lookup
from datastates.lineage.lookup import id_of, states
from datastates.lineage.query import walk
from datastates.lineage.query.walk import metric_along, path_ids, restorable_along
from datastates.lineage.states import State
from datastates.maintenance.core import Core
from datastates.maintenance.loading import load
from datastates.state.geometry import rebuild
from datastates.state.manifest import CHUNK_BYTES, Manifest, Shard, TensorSpec
from datastates.state.report import Selection
from datastates.storage.reading import read_flat

from .diff import Change, compare, untied

if TYPE_CHECKING:
    from datastates.lineage.session import Session
    from datastates.storage.tier import Reader

_PAGE = 256  # states of the path that are looked up at once
_CONDITION = re.compile(
    r"\s*(?:metrics\.)?(?P<key>.+?)\s*(?P<sign><=|>=|==|!=|=|<|>)\s*(?P<bound>[^\s<>=!]+)\s*"
)
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Blame:
    """A tensor, and the state that last changed a bit of it.

    ``change`` is ``changed``, ``recast`` (its dtype or shape) or ``added``: the tensor did not
    exist before, or the path begins there. If the bytes of states in between are gone, the tensor
    changed at ``earliest`` or later, and at ``state`` or before. Otherwise ``earliest`` is None.
    ``before`` is the uid of the state in which it was different. ``distance`` and ``old_norm`` are
    relative to that state, if they were requested.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    change: Change
    state: State
    earliest: State | None = None
    before: str | None = None
    old_norm: float | None = None
    distance: float | None = None

    @property
    def relative(self) -> float | None:
        """The distance in units of the old norm. None if that is 0, or was not requested."""
        return (
            self.distance / self.old_norm if self.distance is not None and self.old_norm else None
        )

    @property
    def is_merged(self) -> bool:
        """Whether the state has further parents, from one of which the tensor may come."""
        return bool(self.state.edges)


def blame(
    core: Core,
    rev: str | State,
    *,
    only: str | Sequence[str] | None = None,
    size: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Blame]:
    """See ``Repository.blame``. Two states are open at a time."""
    head = core.state(rev)
    line = _line(core, head)
    first = next(line)
    newer = _Opened(first, core.open_payload(first))
    found: dict[str, Blame] = {}
    try:
        selection = Selection(only)
        wanted = [path for path in newer.specs if selection.wants(path)]
        selection.refuse_unused(newer.specs)
        left = dict.fromkeys(wanted)
        gap: State | None = None  # the oldest of the states behind ``newer`` whose bytes are gone
        for number, state in enumerate(line, 2):
            if not left:
                break
            older = _open(core, state, newer)
            if older is None:
                gap = state
                continue
            with_gap = gap
            gap = None
            for path in newer.in_order(left):
                change = _change(older, newer, path)
                if change is not None:
                    found[path] = _told(older, newer, path, change, with_gap, size=size)
                    del left[path]
            newer.reader.close()
            newer = older
            if on_progress is not None:
                on_progress(number, head.generation + 1)
        for path in left:
            spec = newer.specs[path]
            found[path] = Blame(path, spec.shape, spec.dtype, Change.ADDED, newer.state, gap)
    finally:
        newer.reader.close()
    return [found[path] for path in wanted]


def to_plain(found: Blame) -> dict[str, object]:
    """The JSON of ``--json`` for a tensor: states by their uids and steps."""
    plain: dict[str, object] = msgspec.to_builtins(
        replace(found, state=None, earliest=None),  # type: ignore[arg-type]
        enc_hook=str,
    )
    for name, state in (("state", found.state), ("earliest", found.earliest)):
        plain[name] = None if state is None else state.uid
        plain["step" if name == "state" else "earliest_step"] = (
            None if state is None else state.step
        )
    return plain | {"relative": found.relative, "merged": found.is_merged}


def _told(
    older: _Opened, newer: _Opened, path: str, change: Change, gap: State | None, *, size: bool
) -> Blame:
    spec = newer.specs[path]
    said = Blame(
        path,
        spec.shape,
        spec.dtype,
        change,
        newer.state,
        gap,
        None if change is Change.ADDED else older.state.uid,
    )
    if not size or change is Change.ADDED:
        return said
    numbers = compare(older.reader, newer.reader, older.specs[path], spec, stat=False)
    return replace(said, old_norm=numbers.old_norm, distance=numbers.distance)


# --- States ---


@dataclass(slots=True)
class _Opened:
    """A state whose payload is open, and its tensors by path. States of the same layout share the
    tensors."""

    state: State
    reader: Reader
    like: _Opened | None = None
    layout: bytes = field(init=False)
    specs: Mapping[str, TensorSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = bytes(self.manifest.content.tensors)
        is_alike = self.like is not None and self.like.layout == self.layout
        self.specs = (
            self.like.specs
            if is_alike and self.like is not None
            else {spec.path: spec for spec in untied(self.reader)}
        )
        self.like = None

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    def in_order(self, paths: Mapping[str, None]) -> list[str]:
        """The paths in the order of the bytes, so that tensors that share a chunk follow each
        other."""
        return sorted(
            paths,
            key=lambda path: self.specs[path].shards[0].start if self.specs[path].shards else 0,
        )


def _open(core: Core, state: State, like: _Opened) -> _Opened | None:
    """The opened state; None if its bytes are gone, or are not here."""
    if not state.status.is_restorable:
        return None
    try:
        return _Opened(state, core.open_payload(state), like)
    except Unavailable:
        return None


def _line(core: Core, head: State) -> Iterator[State]:
    """The state and its first parents. Each page is read in a separate transaction."""
    following: str | None = head.uid
    while following is not None:
        with core.database.read() as session:
            ids = [
                id_
                for id_, _ in islice(
                    walk.first_parents(session, id_of(session, following), 0), _PAGE
                )
            ]
            page = lookup.states(session, ids)
        yield from page
        following = page[-1].facts.parent if len(page) == _PAGE else None


# --- One tensor of two states ---


def _change(older: _Opened, newer: _Opened, path: str) -> Change | None:
    """How a tensor of ``newer`` differs from the one of ``older``. None if it does not differ."""
    old, new = older.specs.get(path), newer.specs[path]
    if old is None:
        return Change.ADDED
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return Change.RECAST
    lies_alike = (old.strides, len(old.shards)) == (new.strides, len(new.shards)) and all(
        map(_lies_alike, old.shards, new.shards)
    )
    if not lies_alike:
        same = torch.equal(_bits(older.reader, old), _bits(newer.reader, new))
    else:
        same = all(
            _is_same(older.reader, here, newer.reader, there)
            for here, there in zip(old.shards, new.shards, strict=True)
        )
    return None if same else Change.CHANGED


def _lies_alike(here: Shard, there: Shard) -> bool:
    return (here.offset, here.shape, here.start % CHUNK_BYTES) == (
        there.offset,
        there.shape,
        there.start % CHUNK_BYTES,
    )


def _is_same(before: Reader, here: Shard, after: Reader, there: Shard) -> bool:
    """Whether two shards at the same places of their chunks hold the same bytes. Chunks that other
    tensors share are read."""
    lefts, rights = before.manifest.content.chunks, after.manifest.content.chunks
    shift = here.start // CHUNK_BYTES - there.start // CHUNK_BYTES
    shared: list[tuple[int, int]] = []
    for index in after.chunks_of(there.start, there.length):
        if lefts[index + shift] == rights[index]:
            continue
        begin, end = (
            max(there.start, index * CHUNK_BYTES),
            min(there.start + there.length, (index + 1) * CHUNK_BYTES),
        )
        if (
            end - begin == rights[index].length
            and lefts[index + shift].length == rights[index].length
        ):
            return False
        shared.append((begin, end - begin))
    return all(
        _are_equal(before, begin + shift * CHUNK_BYTES, after, begin, length)
        for begin, length in shared
    )


def _are_equal(before: Reader, start: int, after: Reader, begin: int, length: int) -> bool:
    left, right = np.empty(length, np.uint8), np.empty(length, np.uint8)
    before.gather(start, left.data)
    after.gather(begin, right.data)
    return bool(np.array_equal(left, right))


def _bits(reader: Reader, spec: TensorSpec) -> torch.Tensor:
    """The bytes of the elements, in the order of the indices."""
    flat = rebuild(read_flat(reader, spec), spec).detach().resolve_conj().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


# --- Bisection ---


class Verdict(StrEnum):
    """The verdict on a state."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"


Judge = Callable[[State], Verdict]
"""A function that tries a state and returns a verdict."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """The result of a bisection. ``good`` is the newest good state before the turn, ``bad`` the
    oldest bad one after it. ``candidates`` are the states of which one is the first bad one, oldest
    first; ``bad`` is the last of them.

    ``tried`` are the verdicts of this and of earlier calls, by uid; ``restores`` are the states
    that this call tried.
    """

    good: State
    bad: State
    candidates: tuple[State, ...]
    tried: Mapping[str, Verdict]
    restores: int

    @property
    def first(self) -> State | None:
        """The first bad state; None if several may be it."""
        return self.bad if len(self.candidates) == 1 else None


def bisect(
    core: Core,
    good: str | State,
    bad: str | State,
    predicate: Callable[[Any], object] | str,
    *,
    only: str | Sequence[str] | None = None,
    verdicts: str | os.PathLike[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Bisection:
    """See ``Repository.bisect``."""
    if isinstance(predicate, str):
        return _by_metric(core, core.state(good), core.state(bad), predicate)
    notes = None if verdicts is None else Path(verdicts)
    return bisect_by(
        core, good, bad, judge_of(core, predicate, only), verdicts=notes, on_progress=on_progress
    )


def judge_of(
    core: Core, predicate: Callable[[Any], object], only: str | Sequence[str] | None = None
) -> Judge:
    """A judge that restores a state and calls a function of the user's: True is bad, False good,
    None skips."""

    def judge(state: State) -> Verdict:
        try:
            tree = load(core, state, only=only)
        except Unavailable:
            return Verdict.SKIPPED
        said = predicate(tree)
        if said is None:
            return Verdict.SKIPPED
        return (
            Verdict.BAD
            if values.flag(said, f"what the predicate says of state {state.uid}")
            else Verdict.GOOD
        )

    return judge


def bisect_by(
    core: Core,
    good: str | State,
    bad: str | State,
    judge: Judge,
    *,
    by: str = "",
    verdicts: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Bisection:
    """Halve the path from ``good`` to ``bad``.

    At most ceil(log2(n)) + 1 of n states are tried, unless some are skipped. An end that was not
    tried is tried last if the answer depends on it. ``by`` names the question in the file of
    verdicts.

    :raises InvalidInput: ``good`` is bad, or ``bad`` is good.
    """
    one, other = core.state(good), core.state(bad)
    with core.reading() as session:
        path = _path(session, one, other)
        restorable = restorable_along(session, path)
    search = _Search(
        core,
        path,
        [place for place, id_ in enumerate(path) if id_ in restorable],
        _Notes(verdicts, one.uid, other.uid, by),
    )
    while (place := search.next()) is not None:
        search.tell(place, judge(search.state(place)))
        if on_progress is not None:
            on_progress(search.restores, search.restores + search.to_go)
    return search.answer()


class _Search:
    """A bisection in progress: places on the path, and what is known of them."""

    def __init__(self, core: Core, path: list[int], testable: list[int], notes: _Notes) -> None:
        self._core, self._path, self._testable, self._notes = core, path, testable, notes
        self._states: dict[int, State] = {}
        self.restores = 0
        with core.reading() as session:
            places = {id_: place for place, id_ in enumerate(path)}
            known = {
                places.get(id_of(session, uid)): verdict for uid, verdict in notes.verdicts.items()
            }
        self._verdicts = {place: verdict for place, verdict in known.items() if place is not None}

    @property
    def _turn(self) -> tuple[int, int]:
        """The newest place that counts as good, and the oldest after it that counts as bad."""
        bad = min(
            (place for place, verdict in self._verdicts.items() if verdict is Verdict.BAD),
            default=len(self._path) - 1,
        )
        good = max(
            (
                place
                for place, verdict in self._verdicts.items()
                if verdict is Verdict.GOOD and place < bad
            ),
            default=0,
        )
        return good, bad

    def _open(self) -> list[int]:
        good, bad = self._turn
        return [
            place for place in self._testable if good < place < bad and place not in self._verdicts
        ]

    @property
    def to_go(self) -> int:
        """The most places that are still to be tried, if none is skipped."""
        return math.ceil(math.log2(len(self._open()) + 1)) + min(
            len(self._ends()), 2 if len(self._path) == 2 else 1
        )

    def next(self) -> int | None:
        """The place to try next: the middle one, then ends that were not tried. None at the end.

        :raises InvalidInput: ``good`` is bad, or ``bad`` is good.
        """
        last = len(self._path) - 1
        for place, wanted, word in ((0, Verdict.GOOD, "good"), (last, Verdict.BAD, "bad")):
            if self._verdicts.get(place, wanted) not in (wanted, Verdict.SKIPPED):
                state = self.state(place)
                raise InvalidInput(
                    f"state {state.uid} (step {state.step}) is not {word}: name another one, or ask"
                    " something else"
                )
        among = self._open()
        if among:
            return among[len(among) // 2]
        ends = self._ends()
        return ends[0] if ends else None

    def _ends(self) -> list[int]:
        """The ends on which the answer would rest now, and that were not tried."""
        return [
            place
            for place in self._turn
            if place in (0, len(self._path) - 1)
            and place not in self._verdicts
            and place in self._testable
        ]

    def tell(self, place: int, verdict: Verdict) -> None:
        """Note the verdict on a place."""
        self._verdicts[place] = verdict
        self.restores += 1
        self._notes.keep(self.state(place).uid, verdict)

    def state(self, place: int) -> State:
        """The state at a place."""
        if place not in self._states:
            with self._core.reading() as session:
                (self._states[place],) = states(session, [self._path[place]])
        return self._states[place]

    def answer(self) -> Bisection:
        """The result at the end."""
        good, bad = self._turn
        with self._core.reading() as session:
            found = states(session, self._path[good : bad + 1])
        return Bisection(
            found[0], found[-1], tuple(found[1:]), dict(self._notes.verdicts), self.restores
        )


class _File(msgspec.Struct, frozen=True):
    """The file of a bisection."""

    good: str
    bad: str
    by: str
    verdicts: dict[str, Verdict]


class _Notes:
    """The verdicts of a bisection by uid, in a file if there is one; a verdict is on disk once
    ``keep`` returns."""

    def __init__(self, path: Path | None, good: str, bad: str, by: str) -> None:
        self._path, self._about = path, (good, bad, by)
        self.verdicts: dict[str, Verdict] = {}
        if path is not None:
            self.verdicts = self._read(path)

    def _read(self, path: Path) -> dict[str, Verdict]:
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as exc:
            raise InvalidInput(
                f"{path} holds no verdicts of a bisection ({exc}): remove it, or name another file"
            ) from exc
        if (kept.good, kept.bad, kept.by) != self._about:
            raise Conflict(
                f"{path} is of another bisection, from {kept.good[:10]} to"
                f" {kept.bad[:10]}{f' by {kept.by}' * bool(kept.by)}: remove it, or name another"
                " file"
            )
        return kept.verdicts

    def keep(self, uid: str, verdict: Verdict) -> None:
        """Add a verdict."""
        self.verdicts[uid] = verdict
        if self._path is None:
            return
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            part.write_bytes(msgspec.json.encode(_File(*self._about, self.verdicts)))
            part.replace(self._path)
        except OSError as exc:
            raise InvalidInput(
                f"verdicts cannot be kept in {self._path} ({exc}): name another file"
            ) from exc


def _path(session: Session, good: State, bad: State) -> list[int]:
    old, new = id_of(session, good.uid), id_of(session, bad.uid)
    if old == new:
        raise InvalidInput(
            f"good and bad are both state {good.uid}: name two of them, the good one first"
        )
    path = path_ids(session, old, new)
    if not path:
        swapped = (
            " it is the other way round, the good one comes first"
            if path_ids(session, new, old)
            else " name an ancestor of it"
        )
        raise InvalidInput(f"state {bad.uid} does not descend from {good.uid}:{swapped}")
    return path


# --- Bisection by a metric, which the lineage has for every state ---


def _by_metric(core: Core, good: State, bad: State, text: str) -> Bisection:
    """The first state whose metric meets the condition; nothing is restored, and states without
    bytes count too."""
    key, is_bad = _condition(text)
    with core.reading() as session:
        path = _path(session, good, bad)
        known = metric_along(session, path, key)
        if not known:
            raise NotFound(
                f"no state from {good.uid[:10]} to {bad.uid[:10]} has a metric {key!r}:"
                f" {_said(bad)}"
            )
        turned = next(
            (place for place, id_ in enumerate(path) if id_ in known and is_bad(known[id_])), None
        )
        if turned is None:
            raise InvalidInput(
                f"{text.strip()!r} holds of no state from {good.uid[:10]} to {bad.uid[:10]}: ask"
                " something else"
            )
        if turned == 0:
            raise InvalidInput(
                f"{text.strip()!r} holds of state {good.uid} already: name an older one as the"
                " good one"
            )
        last = max((place for place in range(turned) if path[place] in known), default=0)
        found = states(session, path[last : turned + 1])
    tried = {
        state.uid: Verdict.BAD if is_bad(state.metrics[key]) else Verdict.GOOD
        for state in found
        if key in state.metrics
    }
    return Bisection(found[0], found[-1], tuple(found[1:]), tried, 0)


def _said(state: State) -> str:
    return (
        f"the last one has {', '.join(sorted(state.metrics)[:8])}"
        if state.metrics
        else "the last one has none"
    )


def _condition(text: str) -> tuple[str, Callable[[float], bool]]:
    """The metric of a condition, and the condition on its value; NaN is bad unless it is
    compared by = or !=."""
    match = _CONDITION.fullmatch(text)
    try:
        bound = float(match["bound"]) if match else math.nan
    except ValueError:
        match = None
    if match is None:
        raise InvalidInput(
            f"{text[:80]!r} is no condition on a metric: give one such as 'loss > 5' or 'accuracy <"
            " 0.5'"
        )
    sign = match["sign"]

    def is_bad(value: float) -> bool:
        if math.isnan(value) or math.isnan(bound):
            return (
                (math.isnan(value) and math.isnan(bound)) != (sign == "!=")
                if sign in ("=", "==", "!=")
                else math.isnan(value)
            )
        return _SIGNS[sign](value, bound)

    return match["key"].strip("\"'"), is_bad
