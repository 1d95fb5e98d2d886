"""The ranks of a node agree that the first of them reports to the lineage for all of them (``modules/telling``)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from datastates.opening.core import Core
from datastates.opening.whereabouts import network_id
from datastates.transport.session.desk import Place

from .together import Together

__all__ = ["Node", "found", "join"]


@dataclass(frozen=True, slots=True)
class Node:
    """The ranks that can meet at one ``place``: how many there are, and whether this one is the first."""

    place: Place
    seats: int
    is_first: bool


class _Seat(msgspec.Struct, frozen=True):
    """What a rank tells the others: where it is, and the place that it would keep if it were the first."""

    node: str
    name: str
    key: bytes


def found(ranks: Together) -> Node | None:
    """The node of this rank; None if it is alone there. Collective."""
    if ranks.size == 1:
        return None
    own = Place.drawn()
    said = msgspec.msgpack.encode(_Seat(_whereabouts(), own.name, own.key))
    seats = [msgspec.msgpack.decode(each, type=_Seat) for each in ranks.group.exchange(said)]
    here = [rank for rank, seat in enumerate(seats) if seat.node == seats[ranks.rank].node]
    first = seats[here[0]]
    return Node(Place(first.name, first.key), len(here), here[0] == ranks.rank) if len(here) > 1 else None


def join(core: Core, node: Node | None) -> None:
    """Report to the lineage together with the other ranks of this node from now on."""
    if node is not None:
        core.host().join(node.place, seats=node.seats, is_first=node.is_first)


def _whereabouts() -> str:
    """Machine, network and user. Processes for which these are equal reach each other's abstract sockets, and may trust each other."""
    return f"{network_id()} {os.geteuid()}"
