"""Beginning to follow a training: an earlier tracker of its branch gives way, its objects are put where the branch stands."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from datastates import values
from datastates.capture.line import Line
from datastates.capture.shutdown import settle
from datastates.config import BackPressure, OnFailure
from datastates.errors import InvalidInput
from datastates.lineage.change import refs
from datastates.lineage.show.failures import failures
from datastates.lineage.states import Value
from datastates.objects.loops import LOOPS
from datastates.objects.rng import RngState
from datastates.opening.core import Core
from datastates.policy.contract import Policy
from datastates.policy.mtbf import mtbf_of
from datastates.policy.retention import Retention, retention_of
from datastates.system.interrupts import undisturbed
from datastates.upkeep.keeper import keep
from datastates.upkeep.retention import KEY

from .outset import check_origin, origin_of, set_out, stand
from .succession import enter, take_over
from .tracker import Tracker
from .training import Training

__all__ = ["Terms", "follow", "together"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a training is followed; see ``Repository.track``. Unless it ``restores``, its objects stay as they are."""

    branch: str
    start: str | None
    resume: bool
    only: Sequence[str] | None
    strict: bool
    gradients: bool
    defer: bool
    cadence: Policy
    back_pressure: BackPressure
    on_failure: OnFailure
    config: Mapping[str, Value]
    retention: Retention | None = None
    restores: bool = True


def together(more: Mapping[str, object], objects: Mapping[str, object], *, rng: object) -> dict[str, object]:
    """Everything that is tracked, by name; ``rng`` says whether the global random number generators are.

    :raises InvalidInput: a name is taken, or given twice.
    """
    if not isinstance(rng, bool):
        raise InvalidInput("the name 'rng' is taken by the random number generators, True or False: rename what you track")
    twice = sorted(more.keys() & objects.keys())
    if twice:
        raise InvalidInput(f"{', '.join(twice)}: given by keyword and in objects=; give each of them once")
    if "rng" in objects:
        raise InvalidInput("the name 'rng' is taken by the random number generators: rename what you track")
    tracked = {values.text(name, "the name of what is tracked"): found for name, found in {**more, **objects}.items()}
    if LOOPS in tracked:
        raise InvalidInput(f"the name {LOOPS!r} is taken by the place of run.epochs and run.steps: rename what you track")
    return tracked | {"rng": RngState()} if rng else tracked


def follow(core: Core, objects: Mapping[str, object], plain: dict[str, object], terms: Terms) -> Tracker:
    """Captures of these objects from now on; see ``Repository.track``."""
    branch, start, cadence = terms.branch, terms.start, _informed(core, terms.cadence)
    settle()
    take_over(core, branch, partial(check_origin, core, branch, start, resume=terms.resume))
    with undisturbed():
        origin = origin_of(core, branch, start, resume=terms.resume)
        begin = origin.state
        only = None if origin.is_beyond and start is not None else terms.only  # of its start; what the fork captured is all its own
        line = Line(f"{branch}#{secrets.token_hex(4)}", branch, None if begin is None else (begin.uid, begin.digest), None)
        line.is_patient = terms.on_failure is OnFailure.CONTINUE
        config = terms.config if terms.retention is None else {**terms.config, KEY: terms.retention.text}
        training = Training(core, line=line, objects=objects, values=plain, cadence=cadence, gradients=terms.gradients, config=config)
        training.bests = (terms.retention or retention_of(core.config.retention)).bests
        try:
            if begin is not None and not terms.restores:
                stand(training, begin, is_resumed=origin.is_beyond)
            elif begin is not None:
                set_out(training, begin, only=only, strict=terms.strict, is_resumed=origin.is_beyond)
            training.know_best()
            if begin is None or not origin.is_fork:
                with core.database.write() as session:
                    training.begin_run(session)
            else:  # now that its objects stand there: a fork that fails leaves no branch
                with core.writing() as session:
                    training.begin_run(session)
                    refs.branch(session, branch, begin.uid)
        except BaseException:
            training.give_up()
            raise
        core.trainings.add(training)
        enter(training)
        keep(core, branch, terms.retention)
        return Tracker(training, back_pressure=terms.back_pressure, is_deferring=terms.defer)


def _informed(core: Core, cadence: Policy) -> Policy:
    """The cadence, told how often processes of this repository died, if it asks."""
    if not cadence.asks_mtbf:
        return cadence
    with core.database.read() as session:
        found = failures(session)
    return cadence.informed(mtbf_of(found.ran_s, found.died))
