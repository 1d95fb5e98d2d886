"""Cadences as text, for the environment and the terminal, and the advice of ``datastates cadence``.

The advice is what each computed cadence would choose for a branch. It uses costs and failures that
earlier trainings recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from sqlalchemy import select

from datastates import values
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.schema import RUN
from datastates.lineage.states import Run
from datastates.lineage.views.detail import Failures, failures
from datastates.lineage.write import runs

from .auto import BYTES_PER_S, Auto
from .computed import (
    NODE_MTBF_S,
    OVERHEAD,
    CheckFreq,
    Daly,
    Level,
    TwoLevel,
    Young,
    expected_waste,
    mtbf_of,
)
from .contract import (
    Cadence,
    CadenceChoice,
    Costs,
    OnImprovement,
    Policy,
    read_choice,
    read_costs,
    read_duration,
    read_name,
    read_percent,
)

if TYPE_CHECKING:
    from datastates.lineage.session import Session

FORMS = (
    "every:10, steps:100, seconds:30, best:val_loss, auto:3.5%:32M, checkfreq:3.5%, young, daly:6h,"
    " two-level:6h:7d or never, joined by |"
)
_LOOKED_AT = 200
"""How many of the newest trainings are searched for costs."""


def policy(given: object, what: str = "cadence") -> Policy:
    """A policy, or the policy that a text means.

    :raises InvalidInput: it is neither.
    """
    if isinstance(given, Policy):
        return given
    if isinstance(given, str):
        return parse(str.__str__(given))
    raise InvalidInput(
        f"{what} is {values.shown(given)}: give a datastates.Cadence, such as Cadence(every=10), or"
        " a text such as 'every:10'"
    )


def parse(text: str) -> Policy:
    """The policy that a text means. ``str`` of a policy gives such a text.

    :raises InvalidInput: it means none. The text names the part, and the forms.
    """
    return reduce(or_, [_one(part.strip()) for part in text.split("|")])


def _one(text: str) -> Policy:
    word, *parts = (part.strip() for part in text.split(":"))
    make = _MAKERS.get(word)
    try:
        if make is not None:
            return make(*parts)
    except TypeError:  # too many parts, or too few
        pass
    except (InvalidInput, ValueError) as exc:
        raise InvalidInput(f"the cadence {text!r} means nothing: {exc}") from exc
    raise InvalidInput(f"the cadence {values.shown(text)} means nothing: say {FORMS}")


def _every(count: str) -> Policy:
    return Cadence(every=int(count), interval_s=None)


def _steps(count: str) -> Policy:
    return Cadence(interval_s=None, steps=int(count))


def _seconds(seconds: str) -> Policy:
    return Cadence(interval_s=read_duration(seconds))


def _never() -> Policy:
    return Cadence(interval_s=None)


def _best(metric: str, direction: str = "") -> Policy:
    rising = {"": None, "max": True, "min": False}
    if direction not in rising:
        raise InvalidInput(f"{direction!r} is neither max nor min")
    return OnImprovement(read_name(metric), rising[direction])


def _auto(share: str = "", rate: str = "") -> Policy:
    return Auto(
        read_percent(share) if share else OVERHEAD,
        values.size(rate, "the rate") if rate else BYTES_PER_S,
    )


def _checkfreq(share: str = "") -> Policy:
    return CheckFreq(read_percent(share)) if share else CheckFreq()


def _young(mtbf: str = "") -> Policy:
    return Young(read_duration(mtbf) if mtbf else None)


def _daly(mtbf: str = "", order: str = "") -> Policy:
    if order not in ("", "first", "higher"):
        raise InvalidInput(f"the order {order!r} is neither first nor higher")
    return Daly(read_duration(mtbf) if mtbf else None, is_first_order=order == "first")


def _two_level(mtbf: str = "", node: str = "") -> Policy:
    return TwoLevel(
        read_duration(mtbf) if mtbf else None,
        node_mtbf_s=read_duration(node) if node else NODE_MTBF_S,
    )


_MAKERS: dict[str, Callable[..., Policy]] = {
    "auto": _auto,
    "every": _every,
    "steps": _steps,
    "seconds": _seconds,
    "never": _never,
    "best": _best,
    "checkfreq": _checkfreq,
    "young": _young,
    "daly": _daly,
    "two-level": _two_level,
}


# --- Advice for a branch ---


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a policy would choose: a state about every ``interval_s``, and the share of the time
    that writes and failures then waste."""

    choice: CadenceChoice
    interval_s: float
    waste: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice for a branch. ``run`` is the newest training (of ``branch``) that measured
    ``costs``, and ``chosen`` is the cadence that it used; both are None if none measured.

    ``mtbf_s`` is the time between failures that is assumed: a given one (``is_given``), or one from
    ``failures``.
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
        alternatives=(
            () if costs is None else tuple(_alternative(one, costs, reckoned_s) for one in policies)
        ),
    )


def _alternative(policy: Policy, costs: Costs, mtbf_s: float) -> Alternative:
    choice = policy.choose(costs, None) or policy.told()
    interval_s = choice.interval_s if choice.every is None else choice.every * costs.interval_s
    assert interval_s is not None, "each of them goes by one or the other"
    work_s = max(interval_s - costs.overhead_s, 1e-9)
    return Alternative(choice, interval_s, expected_waste(work_s, Level(costs.overhead_s, mtbf_s)))


def _measured(session: Session, branch: str | None) -> Run | None:
    """The newest training that measured costs; of a branch, if one is named."""
    query = select(RUN.c.id).where(RUN.c.process.is_not(None), RUN.c.is_carried.is_(None))
    if branch is not None:
        query = query.where(RUN.c.branch == branch)
    ids = list(session.execute(query.order_by(RUN.c.id.desc()).limit(_LOOKED_AT)).scalars())
    if branch is not None and not ids:
        raise NotFound(
            f"no training was ever on a branch {branch!r}: 'datastates runs' lists those that were"
        )
    found = runs.by_ids(session, ids)
    return next(
        (found[id_] for id_ in ids if id_ in found and read_costs(found[id_].config) is not None),
        None,
    )
