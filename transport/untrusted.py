"""A manifest from a peer, which may be anything: checked whole before memory is taken for it or
addressed by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise, zip_longest
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from datastates.errors import Corrupt, DatastatesError, PeerFault
from datastates.lineage.schema import from_us, to_us
from datastates.lineage.states import Edge, EdgeKind, Ref, RefKind, Run, State, Status
from datastates.lineage.write import runs
from datastates.state.digest import Sound, body_of, decode_sound, join, tensors_of
from datastates.state.encoding import MAX_DEPTH, Packed, decode_values
from datastates.state.geometry import dtype_of
from datastates.state.manifest import Content, Manifest, TensorSpec
from datastates.state.skeleton import TENSOR, VALUE, Skeleton, decode_skeleton, path_lengths, paths
from datastates.values import MESSAGE_LENGTH, NAMES, Value

from .limits import weigh
from .protocol import ARGUMENTS, EdgeRecord, RefRecord, RunRecord, StateRecord

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_SOURCE = "the manifest that the peer sent"

_SPARE_BYTES = 1 << 30
_SPARE_TIMES = 64
"""How many times the stored bytes tied and expanded tensors may come to, because each is copied
if nothing ties them."""

_SPARE_CHARACTERS = 16 << 20
_INDEX_CHARACTERS = 4

_DECODED_BYTES = 1 << 30

_FOREIGN = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedManifest:
    """A checked manifest from a peer, with its decoded parts: every tensor is inside the stream,
    overlaps no other, and has one path. ``read_manifest``, ``check_manifest`` and ``join_parts``
    make it, so functions that get one check nothing again.
    ``parts`` are the manifests, by rank, from which a state of several ranks was joined.
    """

    manifest: Manifest
    specs: tuple[TensorSpec, ...]
    skeleton: Skeleton
    values: list[Any]
    parts: tuple[Manifest, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of each chunk."""
        return tuple(chunk.length for chunk in self.manifest.content.chunks)


def read_manifest(raw: bytes | memoryview, *, source: str) -> CheckedManifest:
    """The manifest in what a peer sent; errors name its ``source``.

    :raises Corrupt: a byte is wrong or missing, or it contradicts itself.
    :raises PeerFault: as ``check_manifest``.
    :raises Unavailable: it has a dtype, or a version, that is not known here.
    """
    return check_manifest(_sound(raw, source))


def check_manifest(sound: Sound) -> CheckedManifest:
    """Check what a consistent manifest must also fulfil if others have made it.

    :raises Corrupt: its tensors overlap, or its tree has other tensors.
    :raises PeerFault: it takes far more memory than it brings bytes, or is one part of a state
        of several ranks.
    """
    with distrusting():
        if sound.manifest.origin.world_size != 1:
            raise PeerFault(
                f"{_SOURCE} is one of {sound.manifest.origin.world_size} ranks' parts of a state"
                " where a whole one belongs"
            )
        return _checked(sound.manifest, sound.specs)


def read_part(raw: bytes | memoryview, uid: str, rank: int, size: int, *, source: str) -> Manifest:
    """The manifest of one rank's part of a state of ``size`` parts, in what a peer sent.

    :raises Corrupt: as ``read_manifest``.
    :raises PeerFault: it belongs to another part, or to another state.
    """
    manifest = _sound(raw, source).manifest
    origin = manifest.origin
    if (origin.uid, origin.rank, origin.world_size) != (uid, rank, size):
        found = f"rank {origin.rank} of {origin.world_size} of state {origin.uid[:10]}"
        raise PeerFault(
            f"{source} is of {found}, where rank {rank} of {size} of {uid[:10]} was asked for"
        )
    return manifest


def _sound(raw: bytes | memoryview, source: str) -> Sound:
    if weigh(body_of(raw), _DECODED_BYTES) > _DECODED_BYTES:
        raise PeerFault(
            f"{source} takes more than {_DECODED_BYTES} bytes of memory once it is decoded: it is"
            " refused as a trap"
        )
    return decode_sound(raw, source=source)


def join_parts(parts: Sequence[Manifest], *, rank: int = 0) -> CheckedManifest:
    """The whole state, from the manifests of all its parts by rank, as ``read_part`` returned them.
    Values come from ``rank``.

    :raises Corrupt: they are not the parts of one state, or do not make a state together.
    :raises PeerFault: as ``check_manifest``.
    """
    with distrusting():
        joined = join(parts, rank=rank)
        specs = tuple(tensors_of(joined.content))
        return replace(_checked(joined, specs), parts=tuple(parts))


def _checked(manifest: Manifest, specs: tuple[TensorSpec, ...]) -> CheckedManifest:
    skeleton = decode_skeleton(manifest.content.skeleton, source=_SOURCE)
    values = decode_values(manifest.content.values, source=_SOURCE)
    _check_spread(manifest.content, skeleton, values)
    _check_paths(specs, skeleton)
    _check_shards(specs)
    _check_expansion(manifest, specs)
    return CheckedManifest(manifest, specs, skeleton, values)


@contextmanager
def distrusting() -> Iterator[None]:
    """Blame the peer for errors that its bytes cause in our own code.

    :raises Corrupt: instead of any error outside of the package's error classes.
    """
    try:
        yield
    except DatastatesError:
        raise
    except _FOREIGN as exc:
        raise Corrupt(
            f"{_SOURCE} does not make a state ({type(exc).__name__}: {str(exc)[:200]})"
        ) from exc


def _check_paths(specs: Sequence[TensorSpec], skeleton: Skeleton) -> None:
    """Check one path at a time: all of them may take a thousand times the bytes of the manifest,
    of which the specs are part."""
    tensors = (
        path
        for path, node in zip(paths(skeleton.nodes), skeleton.nodes, strict=False)
        if node == TENSOR
    )
    for number, (spec, path) in enumerate(zip_longest(specs, tensors)):
        if spec is None or spec.path != path:
            raise Corrupt(
                f"{_SOURCE} lists {len(specs)} tensors under other paths than its tree, which has"
                f" another one at {number}"
            )


def _check_spread(content: Content, skeleton: Skeleton, values: Sequence[Packed]) -> None:
    """Bound the work for paths: each leaf names its path, and a key of a dict is in the path of
    everything below it."""
    most = _SPARE_CHARACTERS + _SPARE_TIMES * (
        len(bytes(content.skeleton)) + len(bytes(content.values))
    )
    total, following = 0, iter(values)
    for node, length in zip(skeleton.nodes, path_lengths(skeleton.nodes), strict=False):
        total += _spread(next(following, None), length) if node == VALUE else length
        if total > most:
            raise PeerFault(
                f"{_SOURCE} has leaves whose names take more than {most} characters: it is refused"
                " as a trap"
            )


def _spread(packed: Packed, length: int, depth: int = 0) -> int:
    """The approximate number of characters in the paths of everything that a value holds."""
    match packed:
        case list() if depth > MAX_DEPTH:
            raise Corrupt(f"{_SOURCE} has a value that is nested more than {MAX_DEPTH} deep")
        case ["list" | "tuple", [*items]] | ["deque", _, [*items]]:
            return length + sum(
                _spread(item, length + 1 + _INDEX_CHARACTERS, depth + 1) for item in items
            )
        case ["dict" | "odict" | "counter", [*keys], [*items]]:
            pairs = zip(keys, items, strict=False)
            return length + sum(
                _spread(item, length + 1 + len(str(key)), depth + 1) for key, item in pairs
            )
        case _:
            return length


def _check_shards(specs: Sequence[TensorSpec]) -> None:
    """Check that no shard overlaps another in the stream.

    ``check`` has already found that the shards of a tensor make it up."""
    stretches = [
        (shard.start, shard.length) for spec in specs for shard in spec.shards if shard.length
    ]
    stretches.sort()
    for (start, length), (following, _) in pairwise(stretches):
        if start + length > following:
            raise Corrupt(
                f"{_SOURCE} has two tensors, or shards of one, over the same bytes, at {following}"
            )


def _check_expansion(manifest: Manifest, specs: Sequence[TensorSpec]) -> None:
    stored = sum(chunk.length for chunk in manifest.content.chunks)
    whole = sum(dtype_of(spec.dtype).itemsize * prod(spec.shape) for spec in specs)
    if whole > _SPARE_TIMES * stored + _SPARE_BYTES:
        raise PeerFault(
            f"{_SOURCE} makes tensors of {whole} bytes out of {stored}: it is refused as a trap"
        )


# States and refs as they travel between processes, and back.


_V = TypeVar("_V")


def records_of(
    session: Session, states: Iterable[State]
) -> tuple[tuple[StateRecord, ...], tuple[RunRecord, ...]]:
    """A list of states in the form for a peer, and the runs that captured them, each once."""
    held = list(states)
    made_by = runs.by_uids(session, {state.run for state in held if state.run is not None})
    return tuple(map(_record, held)), tuple(map(_run_record, made_by))


def states_of(records: Iterable[StateRecord], made_by: Iterable[RunRecord]) -> list[State]:
    """The states in a peer's list, with the configurations of the runs that came with them.

    :raises PeerFault: as ``state_of``.
    """
    configs = {run.uid: dict(run.config) for run in made_by}
    return [state_of(record, configs) for record in records]


def runs_of(records: Iterable[RunRecord]) -> dict[str, Run]:
    """The runs that came with a peer's list, by uid.

    :raises PeerFault: one has a time that does not exist.
    """
    try:
        return {each.uid: _run_of(each) for each in records}
    except OverflowError as exc:
        raise PeerFault(f"the peer sent a run of a time that does not exist: {exc}") from exc


def record_of(session: Session, state: State) -> StateRecord:
    """A single state in the form for a peer, with its run."""
    (record,), made_by = records_of(session, [state])
    return msgspec.structs.replace(record, run_record=next(iter(made_by), None))


def _record(state: State) -> StateRecord:
    return StateRecord(
        uid=state.uid,
        digest=state.digest,
        step=state.step,
        micro_step=state.micro_step,
        metrics=_first(state.metrics),
        attributes=_first(state.attributes),
        message=_short(state.message),
        created_at_us=to_us(state.created_at),
        status=state.status.value,
        parents=state.parents,
        edges=tuple(EdgeRecord(edge.parent, edge.kind.value, edge.weight) for edge in state.edges),
        run=state.run,
        generation=state.generation,
        bytes_total=state.bytes_total,
        bytes_new=state.bytes_new,
        world_size=state.world_size,
    )


def _run_record(run: Run) -> RunRecord:
    return RunRecord(
        uid=run.uid,
        host=run.host[:255],
        user=run.user[:255],
        argv=tuple(each[:MESSAGE_LENGTH] for each in run.argv[:ARGUMENTS]),
        git_commit=run.git_commit,
        git_dirty=run.git_dirty,
        versions=run.versions,
        started_at_us=to_us(run.started_at),
        finished_at_us=None if run.finished_at is None else to_us(run.finished_at),
        branch=run.branch,
        config=run.chosen,
    )


def _run_of(record: RunRecord) -> Run:
    return Run(
        uid=record.uid,
        host=record.host,
        user=record.user,
        pid=0,
        argv=record.argv,
        git_commit=record.git_commit,
        git_dirty=record.git_dirty,
        config=record.config,
        versions=record.versions,
        started_at=from_us(record.started_at_us),
        finished_at=None if record.finished_at_us is None else from_us(record.finished_at_us),
        branch=record.branch,
        is_imported=True,
    )


def _first(named: dict[str, _V]) -> dict[str, _V]:
    """As many as travel. Metrics that were added later may be more."""
    return named if len(named) <= NAMES else dict(islice(named.items(), NAMES))


def _short(message: str | None) -> str | None:
    """As much as travels. An imported message may be longer."""
    return (
        message
        if message is None or len(message) <= MESSAGE_LENGTH
        else f"{message[: MESSAGE_LENGTH - 1]}…"
    )


def state_of(record: StateRecord, configs: Mapping[str, dict[str, Value]] | None = None) -> State:
    """The state in a peer's record. ``configs`` has, by the run's uid, the configurations of the
    runs that came with its list.

    :raises PeerFault: it has a status, a kind or a time that does not exist.
    """
    if configs is None:
        configs = (
            {} if record.run_record is None else {record.run_record.uid: record.run_record.config}
        )
    try:
        return State(
            uid=record.uid,
            digest=record.digest,
            step=record.step,
            micro_step=record.micro_step,
            metrics=record.metrics,
            attributes=record.attributes,
            message=record.message,
            created_at=from_us(record.created_at_us),
            status=Status(record.status),
            parents=record.parents,
            edges=tuple(
                Edge(edge.parent, EdgeKind(edge.kind), edge.weight) for edge in record.edges
            ),
            run=record.run,
            generation=record.generation,
            bytes_total=record.bytes_total,
            bytes_new=record.bytes_new,
            world_size=record.world_size,
            config=configs.get(record.run or "", {}),
        )
    except (ValueError, OverflowError) as exc:
        raise PeerFault(
            f"the peer's state {record.uid} is not valid in this version: {exc}"
        ) from exc


def record_of_ref(ref: Ref) -> RefRecord:
    """A ref in the form for a peer."""
    return RefRecord(ref.name, ref.kind.value, ref.state, _short(ref.message))


def ref_of(record: RefRecord) -> Ref:
    """The ref in a peer's record; how often it moved stays there."""
    return Ref(record.name, RefKind(record.kind), record.state, 0, record.message)
