"""The graph of states in SQL. Queries are functions that take a session of a ``Database``; each
module has the queries of one subject.

from datastates.lineage import Database
from datastates.lineage.write import record, refs
from datastates.lineage.query import walk

with database.write() as session:
    record.record(session, NewState(StateFacts(...), digest))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datastates.lineage.write.runs import Recovered
    from datastates.values import Value

    from .database import Database
    from .states import (
        Edge,
        EdgeKind,
        NewState,
        Note,
        Ref,
        RefEvent,
        RefKind,
        Run,
        State,
        StateFacts,
        Status,
    )

__all__ = [
    "Database",
    "Edge",
    "EdgeKind",
    "NewState",
    "Note",
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


_ELSEWHERE = {"Database": "database", "Recovered": "write.runs"}
"""The module in which a name lives. All other names are values, in ``states``."""


def __getattr__(name: str) -> object:
    """Import a name when it is first used, and keep it: a process that only reads a lineage
    never imports the code that changes one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f".{_ELSEWHERE.get(name, 'states')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
