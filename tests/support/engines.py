"""Engines and events for tests of what the engine decides."""

from __future__ import annotations

from datastates.config import BackPressure
from datastates.engine.scheduler import (
    Action,
    Engine,
    Event,
    LineOpened,
    Recorded,
    RefsChanged,
    RoomNeeded,
)
from datastates.policy.contract import Cadence

NEVER = Cadence(every=None, interval_s=None)
WAIT, DROP, SKIP = BackPressure.WAIT, BackPressure.DROP_OLDEST, BackPressure.SKIP


def engine(cadence: Cadence = NEVER, *uids: str) -> Engine:
    """An engine with one line, ``main``, that has recorded ``uids`` a second apart."""
    made = Engine()
    made.handle(LineOpened("main", cadence, "main"))
    for now, uid in enumerate(uids):
        made.handle(Recorded(uid, "main", float(now)))
    return made


def room(
    slots: int = 1,
    back_pressure: BackPressure = WAIT,
    *,
    is_blocked: bool = True,
    line: str | None = None,
    in_flight: int = 0,
    since: float = 0.0,
    now: float | None = None,
    is_patient: bool = False,
) -> RoomNeeded:
    return RoomNeeded(
        (slots,),
        is_blocked,
        back_pressure,
        line,
        in_flight,
        since,
        since if now is None else now,
        is_patient,
    )


def refs(*tagged: str, **branches: str) -> RefsChanged:
    return RefsChanged(frozenset(tagged), branches)


def after(made: Engine, *events: Event) -> list[Action]:
    return [action for event in events for action in made.handle(event)]
