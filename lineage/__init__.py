"""The graph of states in SQL. Queries are functions that take a session of a ``Database``, grouped by noun in modules.

from datastates.lineage import Database
from datastates.lineage.change import record, refs
from datastates.lineage.search import walk

with database.write() as session:
    record.record(session, NewState(StateFacts(...), digest))
"""

from __future__ import annotations

from .change.runs import Recovered
from .database import Database
from .states import Edge, EdgeKind, NewState, Ref, RefEvent, RefKind, Run, State, StateFacts, Status, Value

__all__ = [
    "Database",
    "Edge",
    "EdgeKind",
    "NewState",
    "Recovered",
    "Ref",
    "RefEvent",
    "RefKind",
    "Run",
    "State",
    "StateFacts",
    "Status",
    "Value",
]
