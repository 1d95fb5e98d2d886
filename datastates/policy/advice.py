"""What the computed policies would choose for a branch, given what its trainings measured and how often processes died here."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import select

from datastates.errors import NotFound
from datastates.lineage.change import runs
from datastates.lineage.schema import RunRow, table
from datastates.lineage.show.failures import Failures, failures
from datastates.lineage.states import Run

from .auto import Auto
from .cadence import Cadence
from .checkfreq import OVERHEAD, CheckFreq
from .contract import CadenceChoice, Costs, Policy
from .history import read_choice, read_costs
from .mtbf import NODE_MTBF_S, Daly, TwoLevel, Young, mtbf_of
from .waste import Level, expected_waste

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Advice", "Alternative", "advise"]

_LOOKED_AT = 200
"""How many of the newest trainings are searched for costs."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a policy would choose: a state about every ``interval_s``, and the share of the time that writes and failures then waste."""

    choice: CadenceChoice
    interval_s: float
    waste: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice for a branch. ``run`` is the newest training (of ``branch``) that measured ``costs``, and ``chosen`` is the cadence that
    it used; both are None if none measured.

    ``mtbf_s`` is the time between failures that is assumed: a given one (``is_given``), or one from ``failures``.
    """

    branch: str | None
    run: str | None
    started_at: datetime | None
    chosen: CadenceChoice | None
    costs: Costs | None
    failures: Failures
    mtbf_s: float
    is_given: bool
    alternatives: tuple[Alternative, ...]


def advise(
    session: Session,
    branch: str | None = None,
    *,
    mtbf_s: float | None = None,
    node_mtbf_s: float = NODE_MTBF_S,
    overhead: float = OVERHEAD,
) -> Advice:
    """The advice for a branch, or for the branch that was trained last.

    :raises NotFound: no training was ever on this branch.
    """
    found = failures(session)
    reckoned_s = mtbf_of(found.ran_s, found.died) if mtbf_s is None else mtbf_s
    run = _measured(session, branch)
    costs = None if run is None else read_costs(run.config)
    policies = (
        Auto(),
        Cadence(),
        CheckFreq(overhead),
        Young(reckoned_s, is_observed=mtbf_s is None),
        Daly(reckoned_s, True, is_observed=mtbf_s is None),
        Daly(reckoned_s, is_observed=mtbf_s is None),
        TwoLevel(reckoned_s, node_mtbf_s, is_observed=mtbf_s is None),
    )
    return Advice(
        branch=branch if run is None else run.branch,
        run=None if run is None else run.uid,
        started_at=None if run is None else run.started_at,
        chosen=None if run is None else read_choice(run.config),
        costs=costs,
        failures=found,
        mtbf_s=reckoned_s,
        is_given=mtbf_s is not None,
        alternatives=() if costs is None else tuple(_alternative(one, costs, reckoned_s) for one in policies),
    )


def _alternative(policy: Policy, costs: Costs, mtbf_s: float) -> Alternative:
    choice = policy.choose(costs, None) or policy.told()
    interval_s = choice.interval_s if choice.every is None else choice.every * costs.interval_s
    assert interval_s is not None, "each of them goes by one or the other"
    work_s = max(interval_s - costs.overhead_s, 1e-9)
    return Alternative(choice, interval_s, expected_waste(work_s, Level(costs.overhead_s, mtbf_s)))


def _measured(session: Session, branch: str | None) -> Run | None:
    """The newest training that measured costs; of a branch, if one is named."""
    query = select(_run.c.id).where(_run.c.process.is_not(None), _run.c.is_carried.is_(None))
    if branch is not None:
        query = query.where(_run.c.branch == branch)
    ids = list(session.execute(query.order_by(_run.c.id.desc()).limit(_LOOKED_AT)).scalars())
    if branch is not None and not ids:
        raise NotFound(f"no training was ever on a branch {branch!r}: 'datastates runs' lists those that were")
    found = runs.by_ids(session, ids)
    return next((found[id_] for id_ in ids if id_ in found and read_costs(found[id_].config) is not None), None)


_run = table(RunRow)
