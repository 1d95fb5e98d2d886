"""States and refs as they travel between processes, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TypeVar

from datastates.errors import PeerFault
from datastates.lineage.states import Edge, EdgeKind, Ref, RefKind, State, Status, Value
from datastates.transport.protocol import EdgeRecord, RefRecord, StateRecord
from datastates.values import MESSAGE_LENGTH, NAMES

__all__ = ["record_of", "record_of_ref", "records_of", "ref_of", "state_of", "states_of"]

_V = TypeVar("_V")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


Configs = tuple[dict[str, Value], ...]


def records_of(states: Iterable[State]) -> tuple[tuple[StateRecord, ...], Configs]:
    """A list of states in the form for a peer, and their configurations, each once."""
    configs: list[dict[str, Value]] = []
    places: dict[tuple[tuple[str, str], ...], int] = {}
    seen: dict[int, int | None] = {}

    def place_of(config: dict[str, Value]) -> int | None:
        if not config:
            return None
        if id(config) not in seen:
            key = tuple((name, repr(value)) for name, value in sorted(config.items()))
            if key not in places:
                places[key] = len(configs)
                configs.append(config)
            seen[id(config)] = places[key]
        return seen[id(config)]

    held = list(states)
    return tuple(_record(state, place_of(state.config)) for state in held), tuple(configs)


def states_of(records: Iterable[StateRecord], configs: Sequence[Mapping[str, Value]]) -> list[State]:
    """The states in a peer's list.

    :raises PeerFault: as ``state_of``.
    """
    shared = tuple(dict(config) for config in configs)
    return [state_of(record, shared) for record in records]


def record_of(state: State) -> StateRecord:
    """A single state in the form for a peer."""
    return _record(state, state.config or None)


def _record(state: State, config: dict[str, Value] | int | None) -> StateRecord:
    return StateRecord(
        uid=state.uid,
        digest=state.digest,
        step=state.step,
        micro_step=state.micro_step,
        metrics=_first(state.metrics),
        attributes=_first(state.attributes),
        message=_short(state.message),
        created_at_us=(state.created_at - _EPOCH) // timedelta(microseconds=1),
        status=state.status.value,
        parents=state.parents,
        edges=tuple(EdgeRecord(edge.parent, edge.kind.value, edge.weight) for edge in state.edges),
        run=state.run,
        generation=state.generation,
        bytes_total=state.bytes_total,
        bytes_new=state.bytes_new,
        world_size=state.world_size,
        config=config,
    )


def _first(named: dict[str, _V]) -> dict[str, _V]:
    """As many as travel: an earlier version took any number."""
    return named if len(named) <= NAMES else dict(islice(named.items(), NAMES))


def _short(message: str | None) -> str | None:
    """As much as travels: an earlier version took any length."""
    return message if message is None or len(message) <= MESSAGE_LENGTH else f"{message[: MESSAGE_LENGTH - 1]}…"


def state_of(record: StateRecord, configs: Configs = ()) -> State:
    """The state in a peer's record, if it can be one; ``configs`` came with the list that contains it.

    :raises PeerFault: it has a status, a kind, a time or a configuration that does not exist.
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
            config=_config_of(record, configs),
        )
    except (ValueError, OverflowError, IndexError) as exc:
        raise PeerFault(f"the peer's state {record.uid} is none that this version knows: {exc}") from exc


def _config_of(record: StateRecord, configs: Configs) -> dict[str, Value]:
    if isinstance(record.config, int):
        return configs[record.config]
    return record.config or {}


def record_of_ref(ref: Ref) -> RefRecord:
    """A ref in the form for a peer."""
    return RefRecord(ref.name, ref.kind.value, ref.state, _short(ref.message))


def ref_of(record: RefRecord) -> Ref:
    """The ref in a peer's record; how often it moved stays there."""
    return Ref(record.name, RefKind(record.kind), record.state, 0, record.message)
