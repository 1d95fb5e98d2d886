"""States and refs as they travel between processes, and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from datastates.errors import PeerFault
from datastates.lineage.states import Edge, EdgeKind, Ref, RefKind, State, Status
from datastates.transport.protocol import EdgeRecord, RefRecord, StateRecord

__all__ = ["record_of", "record_of_ref", "ref_of", "state_of"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def record_of(state: State) -> StateRecord:
    """A state for a peer."""
    return StateRecord(
        uid=state.uid,
        digest=state.digest,
        step=state.step,
        micro_step=state.micro_step,
        metrics=state.metrics,
        attributes=state.attributes,
        message=state.message,
        created_at_us=(state.created_at - _EPOCH) // timedelta(microseconds=1),
        status=state.status.value,
        parents=state.parents,
        edges=tuple(EdgeRecord(edge.parent, edge.kind.value, edge.weight) for edge in state.edges),
        run=state.run,
        generation=state.generation,
        bytes_total=state.bytes_total,
        bytes_new=state.bytes_new,
        world_size=state.world_size,
    )


def state_of(record: StateRecord) -> State:
    """A peer's state, as far as it can be one.

    :raises PeerFault: a status, a kind or a time that there is not.
    """
    try:
        return State(
            uid=record.uid,
            digest=record.digest,
            step=record.step,
            micro_step=record.micro_step,
            metrics=record.metrics,
            attributes=record.attributes,
            message=record.message,
            created_at=_EPOCH + timedelta(microseconds=record.created_at_us),
            status=Status(record.status),
            parents=record.parents,
            edges=tuple(Edge(edge.parent, EdgeKind(edge.kind), edge.weight) for edge in record.edges),
            run=record.run,
            generation=record.generation,
            bytes_total=record.bytes_total,
            bytes_new=record.bytes_new,
            world_size=record.world_size,
        )
    except (ValueError, OverflowError) as exc:
        raise PeerFault(f"the peer's state {record.uid} is none that this version knows: {exc}") from exc


def record_of_ref(ref: Ref) -> RefRecord:
    """A ref for a peer."""
    return RefRecord(ref.name, ref.kind.value, ref.state, ref.message)


def ref_of(record: RefRecord) -> Ref:
    """A peer's ref; how often it moved stays there."""
    return Ref(record.name, RefKind(record.kind), record.state, 0, record.message)
