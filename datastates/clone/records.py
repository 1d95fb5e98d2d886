"""States and refs as they travel between processes, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import msgspec

from datastates.errors import PeerFault
from datastates.lineage.change import runs
from datastates.lineage.schema import from_us, to_us
from datastates.lineage.states import Edge, EdgeKind, Ref, RefKind, Run, State, Status, Value
from datastates.transport.protocol import ARGUMENTS, EdgeRecord, RefRecord, RunRecord, StateRecord
from datastates.values import MESSAGE_LENGTH, NAMES

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["record_of", "record_of_ref", "records_of", "ref_of", "runs_of", "state_of", "states_of"]

_V = TypeVar("_V")


def records_of(session: Session, states: Iterable[State]) -> tuple[tuple[StateRecord, ...], tuple[RunRecord, ...]]:
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
    return message if message is None or len(message) <= MESSAGE_LENGTH else f"{message[: MESSAGE_LENGTH - 1]}…"


def state_of(record: StateRecord, configs: Mapping[str, dict[str, Value]] | None = None) -> State:
    """The state in a peer's record. ``configs`` are those of the runs that came with the list that contains it, by the run's uid.

    :raises PeerFault: it has a status, a kind or a time that does not exist.
    """
    if configs is None:
        configs = {} if record.run_record is None else {record.run_record.uid: record.run_record.config}
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
            edges=tuple(Edge(edge.parent, EdgeKind(edge.kind), edge.weight) for edge in record.edges),
            run=record.run,
            generation=record.generation,
            bytes_total=record.bytes_total,
            bytes_new=record.bytes_new,
            world_size=record.world_size,
            config=configs.get(record.run or "", {}),
        )
    except (ValueError, OverflowError) as exc:
        raise PeerFault(f"the peer's state {record.uid} is none that this version knows: {exc}") from exc


def record_of_ref(ref: Ref) -> RefRecord:
    """A ref in the form for a peer."""
    return RefRecord(ref.name, ref.kind.value, ref.state, _short(ref.message))


def ref_of(record: RefRecord) -> Ref:
    """The ref in a peer's record; how often it moved stays there."""
    return Ref(record.name, RefKind(record.kind), record.state, 0, record.message)
