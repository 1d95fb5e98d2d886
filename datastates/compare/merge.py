"""``merge`` makes a state from others, tensor by tensor. ``verify_merge`` makes it again and
compares.

The parents stay mapped from disk or pinned in memory. The result is written straight into slots of
the arena. A merge therefore takes the memory of one state and of a few tensors.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import numpy as np
import torch

from datastates.config import BackPressure
from datastates.engine.commit import IncomingState
from datastates.engine.handle import manifest_of
from datastates.engine.runner import Runner
from datastates.errors import (
    Conflict,
    Corrupt,
    InvalidInput,
    NotFound,
    OverBudget,
    Unavailable,
    Unsupported,
)
from datastates.lineage.query import names as names_query
from datastates.lineage.states import Edge, EdgeKind, RefKind, State, StateFacts
from datastates.lineage.write import record, refs
from datastates.maintenance.core import Core
from datastates.state.adapters import FILES
from datastates.state.digest import chunk_digest, tensors_of
from datastates.state.geometry import cut, dtype_of, gaps, rebuild
from datastates.state.manifest import CHUNK_BYTES, Chunk, Content, Manifest, TensorSpec
from datastates.state.model import FROZEN
from datastates.state.per_rank import part_of
from datastates.state.report import Selection, write_tensor
from datastates.state.skeleton import Carved, carve, decode_skeleton, paths
from datastates.storage.reading import read_flat
from datastates.storage.tier import Reader
from datastates.system.interrupts import checkpoint, undisturbed
from datastates.values import Value

from .diff import check_numeric

if TYPE_CHECKING:
    from datastates.storage.arena import Arena

_PIECE = 1 << 20
"""The number of elements that are computed at a time."""

_SUM_ERROR = 1e-6
_SHOWN = 6
_OPAQUE = frozenset("ax")
"""Arrays and encoded objects: their bytes are not ours to average.

Sparse and quantized tensors are refused."""


class Method(StrEnum):
    """How a merge combines its parents."""

    MEAN = "mean"
    EMA = "ema"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method with all its arguments, stored as attributes. ``weights`` has one number for each
    parent, in their order.

    ``decay`` belongs to ``ema``.
    """

    method: Method
    weights: Annotated[tuple[float, ...], msgspec.Meta(min_length=2)]
    only: tuple[str, ...] | None
    rest: str
    decay: float | None = None

    def attributes(self) -> dict[str, Value]:
        """The attributes that ``recipe_of`` reads."""
        known: dict[str, Value] = {
            "merge.method": self.method.value,
            "merge.weights": msgspec.json.encode(self.weights).decode(),
            "merge.only": msgspec.json.encode(self.only).decode(),
            "merge.rest": self.rest,
        }
        return known if self.decay is None else known | {"merge.decay": self.decay}


def plan_recipe(
    method: str,
    count: int,
    *,
    weights: Sequence[float] | None,
    only: str | Sequence[str] | None,
    rest: str,
    decay: float | None,
) -> Recipe:
    """The checked recipe for ``count`` states in the user's order. ``ema`` takes them from the
    oldest to the newest.

    :raises InvalidInput: an argument belongs to another method, or makes no sense. The text names a
        valid value.
    """
    chosen = _method(method)
    if rest not in ("keep", "drop"):
        raise InvalidInput(
            f"rest={rest!r}: 'keep' takes what is not merged from the first parent, 'drop' leaves"
            " its other objects out"
        )
    if count < 2:
        raise InvalidInput(f"a merge takes two states or more, not {count}")
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    if chosen is Method.EMA:
        if weights is not None:
            raise InvalidInput("weights= is for method mean, not for ema: leave it out")
        decay = _decay(decay)
        return Recipe(chosen, _ages(count, decay), patterns, rest, decay)
    if decay is not None:
        raise InvalidInput("decay= is for method ema, not for mean: leave it out")
    return Recipe(chosen, _shares(count, weights), patterns, rest)


def recipe_of(uid: str, attributes: Mapping[str, Value]) -> Recipe:
    """The recipe with which a merged state was made.

    :raises InvalidInput: the state is not a merge.
    :raises Corrupt: its attributes are impossible.
    """
    if "merge.method" not in attributes:
        raise InvalidInput(f"state {uid} is no merge: it has no attribute merge.method")
    known = {
        name: attributes[f"merge.{name}"]
        for name in ("method", "rest", "decay")
        if f"merge.{name}" in attributes
    }
    try:
        known["weights"] = msgspec.json.decode(str(attributes["merge.weights"]))
        known["only"] = msgspec.json.decode(str(attributes["merge.only"]))
        return msgspec.convert(known, Recipe)
    except (KeyError, msgspec.MsgspecError) as exc:
        raise Corrupt(
            f"state {uid} says that it is a merge, but not by which recipe ({exc}): restore another"
            " state"
        ) from exc


def combine(recipe: Recipe, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat tensor out of the parents' flat tensors of one real dtype.

    May be one of ``parts`` itself."""
    first = parts[0]
    if all(_same_bytes(first, other) for other in parts[1:]):
        return first
    result = torch.empty_like(first)
    for piece in _pieces(first.numel()):
        result[piece] = _sum([part[piece].to(torch.float64) for part in parts], recipe.weights)
    return result


# --- Arguments that are refused ---


def _method(method: str) -> Method:
    try:
        return Method(method)
    except ValueError:
        raise InvalidInput(f"method={method!r}: merge by one of {', '.join(Method)}") from None


def _shares(count: int, weights: Sequence[float] | None) -> tuple[float, ...]:
    if weights is None:
        return (1.0 / count,) * count
    given = tuple(float(each) for each in weights)
    if len(given) != count:
        raise InvalidInput(f"{len(given)} weights for {count} states: give one for each")
    for index, each in enumerate(given):
        if not math.isfinite(each) or each < 0:
            raise InvalidInput(f"weights[{index}] is {each}: a weight is a number from 0 on")
    total = math.fsum(given)
    if abs(total - 1) > _SUM_ERROR:
        hint = (
            f": for these proportions give {[round(each / total, 6) for each in given]}"
            if total > 0
            else ""
        )
        raise InvalidInput(f"the weights of a mean sum to {total:g}, not to 1{hint}")
    return given


def _decay(decay: float | None) -> float:
    if decay is None:
        raise InvalidInput(
            "method='ema' needs decay=, how much of the average each newer state leaves, such"
            " as 0.9"
        )
    if not 0 <= decay < 1:
        raise InvalidInput(f"decay is {decay}: it must be from 0 to below 1")
    return decay


def _ages(count: int, decay: float) -> tuple[float, ...]:
    """The weights of a moving average, the newest state's first."""
    return (*((1 - decay) * decay**age for age in range(count - 1)), decay ** (count - 1))


# --- Arithmetic ---


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, _PIECE):
        yield slice(start, min(start + _PIECE, count))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same bytes: a NaN equals itself, and -0 does not equal 0."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _sum(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted sum, never by one call for product and sum: that may or may not round in
    between."""
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part * weight
    return total


# --- Parents opened side by side, and their tensors combined one at a time ---


class _Parent:
    """An open state and the places of its tensors."""

    def __init__(self, state: State, reader: Reader) -> None:
        self.state, self.reader = state, reader
        self.specs = tensors_of(reader.manifest.content)
        self.index = {spec.path: index for index, spec in enumerate(self.specs)}

    def stored(self, path: str) -> int:
        """The index of the tensor that has the bytes of ``path``."""
        alias = self.specs[self.index[path]].alias
        return self.index[path] if alias is None else alias

    def flat(self, path: str, like: TensorSpec) -> torch.Tensor:
        """The tensor's bytes in the memory order of ``like``; read-only."""
        spec = self.specs[self.stored(path)]
        flat = read_flat(self.reader, spec)
        if spec.strides == like.strides:
            return flat
        turned = torch.empty(flat.numel(), dtype=torch.uint8, device="cpu")
        write_tensor(rebuild(turned, like), rebuild(flat, spec))
        return turned


class Blend:
    """The parents and their result. It is a context manager. ``carved`` is the result without its
    chunks. Parts that are not combined come from the first parent.

    :raises InvalidInput: the parents do not fit together. The text lists names, shapes and dtypes.
    :raises Unsupported: a selected tensor cannot be combined.
    :raises Unavailable: the bytes of a parent are gone. The text names the nearest ancestor that
        has them.
    """

    def __init__(self, core: Core, recipe: Recipe, states: Sequence[State]) -> None:
        self.recipe, self.states = recipe, tuple(states)
        self._stack = ExitStack()
        try:
            self._parents = [self._open(core, state) for state in states]
            selection = Selection(recipe.only)
            is_carved = recipe.rest == "drop" and recipe.only is not None
            self.carved = _carved(
                self._parents[0].reader.manifest.content, selection if is_carved else None
            )
            self._combined = self._choose(selection)
            for other in self._parents[1:]:
                self._check_fit(other, Selection(recipe.only))
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Each tensor that is stored, in the order of its bytes, as flat ``uint8``. It is
        read-only, and valid until the next iteration."""
        stored = [
            (min((shard.start for shard in spec.shards), default=0), index)
            for index, spec in enumerate(self.carved.specs)
            if spec.alias is None
        ]
        for _, index in sorted(stored):
            checkpoint()
            yield self.carved.specs[index], self._flat(index)

    def compare(self, reader: Reader, state: State) -> None:
        """Raise unless an open state equals the merge of the parents.

        :raises Corrupt: it does not. The text names the tensor.
        """
        manifest, carved = reader.manifest, self.carved
        content = manifest.content
        if manifest.origin.parent_digests != tuple(parent.digest for parent in self.states):
            raise Corrupt(
                f"state {state.uid} was made of other parents than"
                f" {', '.join(parent.uid for parent in self.states)}"
            )
        parts = (
            (content.skeleton, carved.skeleton),
            (content.values, carved.values),
            (content.tensors, carved.tensors),
        )
        if any(bytes(one) != bytes(other) for one, other in parts):
            raise Corrupt(
                f"state {state.uid} has other names, values or shapes than its parents make"
            )
        for spec, flat in self.tensors():
            try:
                found = chunk_digest(read_flat(reader, spec).numpy().data)
            except Corrupt as exc:
                raise Corrupt(f"{spec.path} of the merged state cannot be read: {exc}") from exc
            if found != chunk_digest(flat.numpy().data):
                raise Corrupt(
                    f"{spec.path} of state {state.uid} is not what its parents make by method"
                    f" {self.recipe.method}"
                )

    def close(self) -> None:
        """Release the parents; idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, core: Core, state: State) -> _Parent:
        return _Parent(state, self._stack.enter_context(core.open_payload(state)))

    def _flat(self, index: int) -> torch.Tensor:
        first, spec = self._parents[0], self.carved.specs[index]
        flat = read_flat(first.reader, first.specs[self.carved.sources[index]])
        if index not in self._combined:
            return flat
        dtype = dtype_of(spec.dtype)
        real = dtype.to_real() if dtype.is_complex else dtype
        parts = [
            _aligned(flat, real),
            *(_aligned(parent.flat(spec.path, spec), real) for parent in self._parents[1:]),
        ]
        return combine(self.recipe, parts).view(torch.uint8)

    # Which tensors are combined, and whether they can be

    def _choose(self, selection: Selection) -> frozenset[int]:
        """The tensors that are combined: floating-point tensors with separate bytes, if any of
        their names is selected."""
        chosen: set[int] = set()
        carved = self.carved
        for index, (spec, holder) in enumerate(zip(carved.specs, carved.holders, strict=True)):
            dtype = dtype_of(spec.dtype)
            if not selection.wants(spec.path) or (holder is not None and holder in _OPAQUE):
                continue
            if holder is not None:
                raise Unsupported(
                    f"{spec.path} is part of a sparse or quantized tensor, which is not merged:"
                    " leave it out with only=…"
                )
            if (dtype.is_floating_point or dtype.is_complex) and not _is_counter(spec):
                check_numeric(spec, "leave it out with only=…")
                chosen.add(index if spec.alias is None else spec.alias)
        selection.refuse_unused([spec.path for spec in self._parents[0].specs])
        if not chosen:
            raise InvalidInput(
                f"only={self.recipe.only} asks for no floating-point tensor: there is nothing to"
                " merge"
            )
        return frozenset(chosen)

    def _check_fit(self, other: _Parent, selection: Selection) -> None:
        first = self._parents[0]
        ours, theirs = (
            {
                spec.path: spec
                for spec in specs
                if selection.wants(spec.path)
                and part_of(spec.path) is None
                and not spec.path.startswith(f"{FILES}/")
            }
            for specs in (self.carved.specs, other.specs)
        )
        there = {spec.path for spec in other.specs}
        lines = [f"only in {first.state.uid[:10]}: {path}" for path in ours if path not in theirs]
        lines += [f"only in {other.state.uid[:10]}: {path}" for path in theirs if path not in ours]
        for path in (each for each in ours if each in theirs):
            if _geometry(ours[path]) != _geometry(theirs[path]):
                lines.append(
                    f"{path}: {_describe(ours[path])} here, {_describe(theirs[path])} there"
                )
                continue
            owner = first.specs[first.stored(path)].path
            if owner not in there or other.stored(path) != other.stored(owner):
                lines.append(f"{path}: tied to {owner} here, not there")
        if lines:
            more = [f"… and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise InvalidInput(
                "\n  ".join(
                    [
                        f"state {other.state.uid[:10]} does not fit state {first.state.uid[:10]}:",
                        *lines[:_SHOWN],
                        *more,
                    ]
                )
                + "\nmerge states of one model, or choose what both have with only=…"
            )


def _carved(content: Content, selection: Selection | None) -> Carved:
    """The content of the first parent that the merged state has: what is selected, without the
    files of the parent."""

    def wants(path: str) -> bool:
        top = path.split("/", 1)[0]
        return top != FILES and (selection is None or selection.wants(path) or top == FROZEN)

    tops = {path.split("/", 1)[0] for path in paths(decode_skeleton(content.skeleton).nodes)}
    return carve(content, None if selection is None and FILES not in tops else wants)


def _aligned(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    is_aligned = not flat.data_ptr() % dtype.itemsize and not flat.storage_offset() % dtype.itemsize
    return (flat if is_aligned else flat.clone()).view(dtype)


def _geometry(spec: TensorSpec) -> tuple[object, ...]:
    """The properties that all parents must share, because they are stored once. The order in memory
    may differ."""
    return (
        spec.dtype,
        spec.shape,
        tuple(
            stride == 0 and size > 1 for stride, size in zip(spec.strides, spec.shape, strict=True)
        ),
    )


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape}{' expanded' if any(_geometry(spec)[2]) else ''}"  # type: ignore[arg-type]


def _is_counter(spec: TensorSpec) -> bool:
    """Whether the tensor counts steps: optimizers count theirs in tensors of one floating-point
    number."""
    return spec.shape == () and spec.path.endswith("/step")


# --- Merging and verifying ---


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the result: a branch that it continues, a tag, and a message."""

    into: str | None
    tag: str | None
    message: str | None


def merge(
    core: Core,
    revs: Sequence[str | State],
    *,
    method: str,
    weights: Sequence[float] | None,
    only: str | Sequence[str] | None,
    rest: str,
    decay: float | None,
    names: Names,
) -> State:
    """See ``Repository.merge``."""
    states = _members(core, revs)
    recipe = plan_recipe(method, len(states), weights=weights, only=only, rest=rest, decay=decay)
    core.home.check_writable()
    if recipe.method is Method.EMA:
        # the newest is the first parent: its counters fit where the average stands
        states = states[::-1]
    _check_names(core, names.into, names.tag, states[0], recipe)
    with undisturbed(), Blend(core, recipe, states) as blend:
        made = _make(
            core, blend, into=names.into, message=names.message, attributes=recipe.attributes()
        )
    if names.tag is not None:
        with core.writing() as session:
            refs.tag(session, names.tag, made.uid)
    return made


def verify_merge(core: Core, rev: str | State) -> State:
    """See ``Repository.verify_merge``."""
    state = core.state(rev)
    recipe = recipe_of(state.uid, state.attributes)
    with core.open_payload(state, verify=True) as reader:
        parents = _parents(core, reader.manifest)
        if state.parents != tuple(parent.uid for parent in parents):
            raise Corrupt(
                f"state {state.uid} has the parents {state.parents}, and was made of"
                f" {reader.manifest.origin.parents}"
            )
        if recipe.weights[1:] != tuple(edge.weight for edge in state.edges):
            raise Corrupt(
                f"state {state.uid}: the weights of its edges are not those of its recipe,"
                f" {recipe.weights}"
            )
        with undisturbed(), Blend(core, recipe, parents) as blend:
            blend.compare(reader, state)
    return state


def _parents(core: Core, manifest: Manifest) -> list[State]:
    """The parents that the state itself names: a lineage to which it was brought may lack some."""
    origin = manifest.origin
    try:
        return [core.state(uid) for uid in origin.parents]
    except NotFound as exc:
        raise Unavailable(
            f"state {origin.uid} was made of {len(origin.parents)} states that are not all here:"
            f" {exc}"
        ) from exc


# --- Parents and their attributes ---


def _members(core: Core, revs: Sequence[str | State]) -> list[State]:
    if isinstance(revs, str):
        raise InvalidInput(f"merge takes a list of states: [{revs!r}, …]")
    states = [core.state(rev) for rev in revs]
    for index, state in enumerate(states):
        if state.uid in {other.uid for other in states[:index]}:
            raise InvalidInput(
                f"{revs[index]!s} is state {state.uid}, which was named before: give it a larger"
                " weight instead"
            )
    return states


def _check_names(
    core: Core, into: str | None, tag: str | None, first: State, recipe: Recipe
) -> None:
    """Check before any work that the names can be given: the branch is a new one, or at the
    first parent."""
    for name in (each for each in (into, tag) if each is not None):
        refs.check_name(name)
    if into is not None and any(training.branch == into for training in core.trainings):
        raise Conflict(
            f"branch {into!r} is being tracked: close its tracker first, or name another branch"
        )
    if into is not None and into == tag:
        raise InvalidInput(f"into and tag are both {into!r}: branches and tags share one namespace")
    with core.reading() as session:
        taken = {ref.name: ref for ref in names_query.refs(session)}
    if tag in taken:
        raise Conflict(
            f"the name {tag!r} is taken by state {taken[str(tag)].state[:10]}: choose another tag"
        )
    ref = taken.get(into or "")
    if ref is not None and (ref.kind is not RefKind.BRANCH or ref.state != first.uid):
        raise Conflict(
            f"{into!r} is a {ref.kind} at {ref.state[:10]}, and the first parent is"
            f" {first.uid[:10]}: name the branch's head"
            f" {'last' if recipe.method is Method.EMA else 'first'}, or a new branch"
        )


# --- Slots and chunks of the result ---


def _make(
    core: Core, blend: Blend, *, into: str | None, message: str | None, attributes: dict[str, Value]
) -> State:
    """Fill slots and digest them, then hand the state in, as the second half of a capture does."""
    engaged = core.engage()
    runner, arena, memory = engaged.runner, engaged.arena, engaged.memory
    lengths = blend.carved.chunk_lengths
    slots: list[int] = []
    try:
        with undisturbed():
            slots += _acquire(runner, lengths)
        _fill(arena, slots, blend)
        chunks = tuple(
            Chunk(chunk_digest(arena.memory(slot, length)), length)
            for slot, length in zip(slots, lengths, strict=True)
        )
        content = Content(blend.carved.skeleton, blend.carved.values, blend.carved.tensors, chunks)
        facts = _facts(blend, engaged.run.uid, into, message, attributes)
        manifest = manifest_of(facts, content, tuple(state.digest for state in blend.states))
        base = core.tiers.placed(blend.states[0].uid)
        coming = IncomingState(
            facts, manifest.digest, sum(lengths), lambda: memory.adopt(manifest, slots), base
        )
        state = runner.commits.adopt_incoming(coming, record.record)
    except BaseException:
        runner.slots.release(slots)  # those that memory did not take
        raise
    runner.refs_changed()
    runner.in_flight.put_to_processors(state, facts.branch)
    return state


def _acquire(runner: Runner, lengths: Sequence[int]) -> list[int]:
    """Slots for the result.

    The parents are pinned during the wait. The wait must therefore end if no state can be evicted.
    """
    while True:
        slots = runner.slots.acquire(lengths, BackPressure.SKIP) if lengths else []
        if slots is not None:
            return slots
        if not runner.pending_writes:
            raise OverBudget(
                f"the merged state takes {sum(lengths)} bytes of memory next to its parents, and"
                " they are not free: open the repository with more memory_bytes, or tag the"
                " parents, so that they are read from disk, and open it again"
            )
        runner.drain()


def _fill(arena: Arena, slots: Sequence[int], blend: Blend) -> None:
    for spec, flat in blend.tensors():
        for shard, data in cut(spec, flat):
            _put(arena, slots, shard.start, data.numpy())
    for chunk, begin, end in gaps(blend.carved.specs, blend.carved.chunk_lengths):
        arena.tensor(slots[chunk] + begin, end - begin).zero_()  # a slot held another state before


def _put(
    arena: Arena, slots: Sequence[int], start: int, data: np.ndarray[Any, np.dtype[np.uint8]]
) -> None:
    done = 0
    while done < len(data):
        chunk, offset = divmod(start + done, CHUNK_BYTES)
        count = min(len(data) - done, CHUNK_BYTES - offset)
        np.copyto(
            np.frombuffer(arena.memory(slots[chunk] + offset, count), np.uint8),
            data[done : done + count],
        )
        done += count


def _facts(
    blend: Blend,
    run: str | None,
    into: str | None,
    message: str | None,
    attributes: dict[str, Value],
) -> StateFacts:
    first, *further = blend.states
    recipe = blend.recipe
    return StateFacts(
        uid=secrets.token_hex(12),
        parent=first.uid,
        branch=into,
        run=run,
        step=first.step,
        micro_step=first.micro_step,
        attributes=attributes,
        message=message,
        created_at=datetime.now(UTC),
        edges=tuple(
            Edge(state.uid, EdgeKind.SOUP, weight)
            for state, weight in zip(further, recipe.weights[1:], strict=True)
        ),
    )
