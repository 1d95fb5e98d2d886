"""``repo.merge`` and ``repo.verify_merge``: a state made of others, tensor by tensor, that can be made again from them.

The parents stay where they are, mapped from disk or pinned in memory; the result is written straight into slots of the arena. So a
merge takes the memory of one state and, for a while, of a few tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from datastates.capture.commit import Coming
from datastates.capture.host import Host
from datastates.config import BackPressure
from datastates.content.digest import chunk_digest
from datastates.content.manifest import CHUNK_BYTES, Chunk, Content, Manifest
from datastates.content.shards import cut, gaps
from datastates.errors import Conflict, Corrupt, InvalidInput, NotFound, OverBudget, Unavailable
from datastates.lineage.change import record
from datastates.lineage.change import refs as lineage_refs
from datastates.lineage.states import Edge, EdgeKind, RefKind, State, StateFacts, Value
from datastates.modules.digest import manifest_of
from datastates.opening.core import Core
from datastates.system.interrupts import undisturbed

from .blend import Blend
from .recipes import Method, Recipe, plan_recipe, recipe_of

if TYPE_CHECKING:
    from datastates.store.arena import Arena

__all__ = ["Names", "merge", "verify_merge"]


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
        states = states[::-1]  # the newest is the first parent: its counters fit where the average stands
    _check_names(core, names.into, names.tag, states[0], recipe)
    with Blend(core, recipe, states) as blend:
        made = _make(core, blend, into=names.into, message=names.message, attributes=recipe.attributes())
    if names.tag is not None:
        with core.writing() as session:
            lineage_refs.tag(session, names.tag, made.uid)
    return made


def verify_merge(core: Core, rev: str | State) -> State:
    """See ``Repository.verify_merge``."""
    state = core.state(rev)
    recipe = recipe_of(state.uid, state.attributes)
    with core.open_payload(state, verify=True) as reader:
        parents = _parents(core, reader.manifest)
        if state.parents != tuple(parent.uid for parent in parents):
            raise Corrupt(f"state {state.uid} has the parents {state.parents}, and was made of {reader.manifest.origin.parents}")
        if recipe.weights[1:] != tuple(edge.weight for edge in state.edges):
            raise Corrupt(f"state {state.uid}: the weights of its edges are not those of its recipe, {recipe.weights}")
        with Blend(core, recipe, parents) as blend:
            blend.compare(reader, state)
    return state


def _parents(core: Core, manifest: Manifest) -> list[State]:
    """The parents that the state itself names: a lineage to which it was brought may lack some."""
    origin = manifest.origin
    try:
        return [core.state(uid) for uid in origin.parents]
    except NotFound as exc:
        raise Unavailable(f"state {origin.uid} was made of {len(origin.parents)} states that are not all here: {exc}") from exc


# What goes in


def _members(core: Core, revs: Sequence[str | State]) -> list[State]:
    if isinstance(revs, str):
        raise InvalidInput(f"merge takes a list of states: [{revs!r}, …]")
    states = [core.state(rev) for rev in revs]
    for index, state in enumerate(states):
        if state.uid in {other.uid for other in states[:index]}:
            raise InvalidInput(f"{revs[index]!s} is state {state.uid}, which was named before: give it a larger weight instead")
    return states


def _check_names(core: Core, into: str | None, tag: str | None, first: State, recipe: Recipe) -> None:
    """Check before any work that the names can be given: the branch is a new one, or at the first parent."""
    for name in (each for each in (into, tag) if each is not None):
        lineage_refs.check_name(name)
    if into is not None and any(training.branch == into for training in core.trainings):
        raise Conflict(f"branch {into!r} is being tracked: close its tracker first, or name another branch")
    if into is not None and into == tag:
        raise InvalidInput(f"into and tag are both {into!r}: branches and tags share one namespace")
    with core.reading() as session:
        taken = {ref.name: ref for ref in lineage_refs.refs(session)}
    if tag in taken:
        raise Conflict(f"the name {tag!r} is taken by state {taken[str(tag)].state[:10]}: choose another tag")
    ref = taken.get(into or "")
    if ref is not None and (ref.kind is not RefKind.BRANCH or ref.state != first.uid):
        raise Conflict(
            f"{into!r} is a {ref.kind} at {ref.state[:10]}, and the first parent is {first.uid[:10]}: "
            f"name the branch's head {'last' if recipe.method is Method.EMA else 'first'}, or a new branch"
        )


# What comes out


def _make(core: Core, blend: Blend, *, into: str | None, message: str | None, attributes: dict[str, Value]) -> State:
    """Fill slots and digest them, then hand the state in, as the second half of a capture does."""
    engaged = core.engage()
    host, arena, memory = engaged.host, engaged.arena, engaged.memory
    lengths = blend.carved.chunk_lengths
    slots: list[int] = []
    try:
        with undisturbed():
            slots += _acquire(host, lengths)
        _fill(arena, slots, blend)
        chunks = tuple(Chunk(chunk_digest(arena.memory(slot, length)), length) for slot, length in zip(slots, lengths, strict=True))
        content = Content(blend.carved.skeleton, blend.carved.values, blend.carved.tensors, chunks)
        facts = _facts(blend, engaged.run_uid, into, message, attributes)
        manifest = manifest_of(facts, content, tuple(state.digest for state in blend.states))
        base = core.tiers.placed(blend.states[0].uid)
        coming = Coming(facts, manifest.digest, sum(lengths), lambda: memory.adopt(manifest, slots), base)
        state = host.take_in(coming, record.record)
    except BaseException:
        host.release(slots)  # those that memory did not take
        raise
    host.refs_changed()
    host.hand_on(state, facts.branch)
    return state


def _acquire(host: Host, lengths: Sequence[int]) -> list[int]:
    """Slots for the result. The parents are pinned meanwhile, so waiting must end if nothing is left that could make room."""
    while True:
        slots = host.acquire(lengths, BackPressure.SKIP) if lengths else []
        if slots is not None:
            return slots
        if not host.pending_writes:
            raise OverBudget(
                f"the merged state takes {sum(lengths)} bytes of memory next to its parents, and they are not free: "
                "open the repository with more memory_bytes, or tag the parents, so that they are read from disk, and open it again"
            )
        host.drain()


def _fill(arena: Arena, slots: Sequence[int], blend: Blend) -> None:
    for spec, flat in blend.tensors():
        for shard, data in cut(spec, flat):
            _put(arena, slots, shard.start, data.numpy())
    for chunk, begin, end in gaps(blend.carved.specs, blend.carved.chunk_lengths):
        arena.tensor(slots[chunk] + begin, end - begin).zero_()  # a slot held another state before


def _put(arena: Arena, slots: Sequence[int], start: int, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    done = 0
    while done < len(data):
        chunk, offset = divmod(start + done, CHUNK_BYTES)
        count = min(len(data) - done, CHUNK_BYTES - offset)
        np.copyto(np.frombuffer(arena.memory(slots[chunk] + offset, count), np.uint8), data[done : done + count])
        done += count


def _facts(blend: Blend, run: str | None, into: str | None, message: str | None, attributes: dict[str, Value]) -> StateFacts:
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
        edges=tuple(Edge(state.uid, EdgeKind.SOUP, weight) for state, weight in zip(further, recipe.weights[1:], strict=True)),
    )
