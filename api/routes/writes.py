"""Changes to a state after its capture: setting attributes, and dropping its bytes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from datastates.api.models import Annotations, Evicted, State
from datastates.api.replies import reply
from datastates.api.routing import Routes, Scope
from datastates.api.served import Chosen, Uid
from datastates.lineage.change.annotate import annotate
from datastates.upkeep.eviction import evict

__all__ = ["routes"]

routes = Routes("states")

_Force = Annotated[bool, Query(description="Drop it although a ref names it; never all that can be restored of a branch")]


@routes.add("PATCH", "/states/{uid}/attributes", scope=Scope.WRITE, returns=State)
def annotate_state(served: Chosen, uid: Uid, body: Annotations) -> Response:
    """Set attributes of a state.

    Attributes that are null are removed; all others stay. The state's digest does not change: it identifies what was captured.
    """
    with served.writing() as session:
        state = annotate(session, uid, body.attributes)
    return reply(state)


@routes.add("DELETE", "/states/{uid}/payload", scope=Scope.ADMIN, returns=Evicted, responses={409: {}})
def evict_state(served: Chosen, uid: Uid, force: _Force = False) -> Response:
    """Drop a state's bytes from the server's disk and memory.

    The state's record stays, and so do the bytes that other states need. The answer says how many bytes were freed.
    """
    return reply(Evicted(uid, evict(served.core, uid, is_forced=force)))
