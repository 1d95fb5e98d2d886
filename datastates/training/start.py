"""Begin to track a training: end an earlier tracker of its branch, find the state to start from,
and restore the objects."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch

from datastates import values
from datastates.collective import SoloGroup
from datastates.config import BackPressure, OnFailure
from datastates.engine.handle import DerivedUids, Line, Part
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage import lookup
from datastates.lineage.query import names, revision, walk
from datastates.lineage.query import names as names_query
from datastates.lineage.states import OURS, SAVES, TAKEN, Ref, RefKind, Run, State
from datastates.lineage.views.detail import failures
from datastates.lineage.write import refs, runs, segments
from datastates.lineage.write.record import FIRST, Reduce
from datastates.maintenance.attach import attach, left_behind
from datastates.maintenance.core import Core, explain, is_elsewhere, nearest_here, nearest_kept
from datastates.maintenance.environment import PROCESS, process_identity
from datastates.maintenance.further import live_folders
from datastates.maintenance.keeper import keep
from datastates.maintenance.lease import FOLDER, is_alive
from datastates.maintenance.location import DATABASE, Location
from datastates.maintenance.retention_pass import KEY
from datastates.policy.computed import mtbf_of
from datastates.policy.contract import Policy
from datastates.policy.retention import Retention, retention_of
from datastates.state.adapters import FILES, IN_BACKWARD
from datastates.state.data_position import LOOPS
from datastates.state.generators import RngState, is_generator
from datastates.state.model import FROZEN, MODES
from datastates.state.per_rank import OWN_BUFFERS, OwnBuffers
from datastates.state.report import RestoreReport
from datastates.system.at_exit import settle
from datastates.system.interrupts import undisturbed
from datastates.system.logs import event, say
from datastates.values import Value

from .collective import Ranks
from .halt import HaltWatch
from .tracker import Tracker, check_replicas
from .training import (
    Training,
    add_missing_groups,
    log_added_groups,
    log_differences,
    remove_groups,
    restore_trained,
)

if TYPE_CHECKING:
    from datastates.lineage.session import Session

_open_trainings: weakref.WeakSet[Training] = weakref.WeakSet()


def end_earlier(core: Core, branch: str, check: Callable[[], object]) -> None:
    """End the trainings of this process on the branch.

    ``check`` is called first, and raises if the new training would be refused."""
    earlier = [
        training
        for training in list(_open_trainings)
        if training.branch == branch and training.is_living
    ]
    earlier = [training for training in earlier if _is_same(training.core, core)]
    if earlier:
        check()
    for training in earlier:
        training.end_for_successor()


def claim(
    session: Session, training: Training, begin: State | None, *, takeover: bool, is_taken: bool
) -> None:
    """Take the branch, in the transaction that begins a training. The trainings of other processes
    that hold it end there, and with ``is_taken`` the branch goes back to the state ``begin``.

    :raises Conflict: one holds it, and ``takeover`` is False.
    """
    branch, by = training.branch, f"process {training.run.pid} on {training.run.host}"
    segments.lock(session)  # if two begin at once, the later one sees the earlier one
    for other in holders(training.core, session, branch, takeover=takeover):
        # ``record`` refuses what it captures on the branch from now on
        runs.note(session, other.uid, {TAKEN: by})
        runs.finish(session, other.uid)
    if is_taken and begin is None:
        refs.delete_ref(
            session, branch, reason=f"takeover: by {by}, none of its states can be restored there"
        )
    elif is_taken and begin is not None:
        refs.move(
            session,
            branch,
            begin.uid,
            expected=names.get(session, branch).state,
            reason=f"takeover: by {by}",
        )


def holders(core: Core, session: Session, branch: str, *, takeover: bool) -> list[Run]:
    """The trainings of other living processes that hold a branch, each by its rank 0.

    A process on another host that has another folder of packs is left out: its lease cannot be seen
    from here. With packs in a bucket, it is seen in the lineage.

    :raises Conflict: there is one, and ``takeover`` is False.
    """
    here = core.node, os.getpid(), process_identity().get(PROCESS)
    others = [
        run
        for run in runs.unfinished(session, branch)
        if (run.host, run.pid, run.config.get(PROCESS)) != here
        and (run.process or run.uid) not in core.inherited_runs
    ]
    if not takeover:
        for _, note in left_behind(core, session, branch):
            raise Conflict(f"branch {branch!r} is held by {note.describe()}")
    firsts = [run for run in others if not run.config.get(runs.RANK) and SAVES not in run.config]
    held = [
        run
        for run in firsts
        if is_alive(run, core.home) or run.config.get(FOLDER) in core.live_folders
    ]
    if held and not takeover:
        raise Conflict(
            f"branch {branch!r} is held by process {held[0].pid} on {held[0].host} since"
            f" {held[0].started_at:%Y-%m-%d %H:%M:%S} UTC: end that process, track a branch of"
            " another name, or take this one over with track(..., takeover=True)"
        )
    return held


def _is_same(one: Core, other: Core) -> bool:
    return one is other or _file(one.location) == _file(other.location) is not None


def _file(location: Location) -> object:
    """The key of a lineage, however its path is written; a copy has another key.

    None if the lineage's file was deleted."""
    if location.root is None:
        return location.database_url
    try:
        found = os.stat(location.root / DATABASE)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_logger = logging.getLogger(__name__)

_NAMED = 10  # lost states in a message


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The state from which a tracker starts; None begins a new root. ``is_fork``: the branch does
    not exist yet. ``is_beyond``: the branch's head is another state than ``start``. ``is_taken``: a
    living process holds the branch, which is taken over from it.
    """

    state: State | None
    is_fork: bool = False
    is_beyond: bool = False
    is_taken: bool = False


def origin_of(
    core: Core,
    branch: str,
    start: str | State | None,
    *,
    resume: bool,
    takeover: bool = False,
    nearest: bool = False,
) -> StartPoint:
    """The state from which a tracker starts. A branch whose head cannot be restored is moved back;
    no branch is made. With ``nearest``, a fork of a state that cannot be restored starts from the
    nearest one that can.

    :raises Conflict: another living process holds the branch, and ``takeover`` is False.
    """
    branch = values.text(branch, "branch")
    with core.reading() as session:
        ref, origin = _named(core, session, branch, start, resume=resume, nearest=nearest)
        if holders(core, session, branch, takeover=takeover) and ref is not None:
            return StartPoint(nearest_here(core, session, ref.state), is_beyond=True, is_taken=True)
        if ref is None:
            if origin is None:
                _warn_of_misspelling(session, branch)
                return StartPoint(None)
            if nearest:
                origin = nearest_kept(core, session, origin)
            elif not origin.status.is_restorable:
                raise explain(core, session, origin)
        else:
            head = lookup.state(session, ref.state)
            begun = origin
            # with packs in a bucket, the folder of a node that is gone does not come back
            is_kept = not core.location.bucket and is_elsewhere(core, session, head)
            origin = head if is_kept else nearest_here(core, session, head.uid)
            if origin is None:
                raise explain(core, session, head)
            why = None if origin.uid == head.uid else explain(core, session, head)
            lost = () if why is None else _between(session, head.uid, origin.uid)
    if ref is None:
        return StartPoint(origin, is_fork=True)
    if origin.uid != ref.state:
        back = event("branch.moved_back", branch=branch, state=origin.uid, reason=str(why))
        _logger.warning(
            "branch %s goes back to state %s (step %d): %s. Lost: %s",
            branch,
            origin.uid[:10],
            origin.step,
            why,
            ", ".join(uid[:10] for uid in lost[:_NAMED]) + ", …" * (len(lost) > _NAMED),
            extra=back,
        )
        with core.writing() as session:
            refs.move(session, branch, origin.uid, expected=ref.state)
    return StartPoint(origin, is_beyond=begun is None or begun.uid != origin.uid)


def _between(session: Session, head: str, origin: str) -> list[str]:
    """The first parents from ``head`` on, newest first, up to ``origin`` without it."""
    found = [head]
    while (parents := lookup.state(session, found[-1]).parents) and parents[0] != origin:
        found.append(parents[0])
        if len(found) > _NAMED:
            break
    return found


def check_origin(
    core: Core, branch: str, start: str | State | None, *, resume: bool, nearest: bool = False
) -> None:
    """Raise, as ``origin_of`` does, unless a training may start from there."""
    with core.reading() as session:
        _named(core, session, branch, start, resume=resume, nearest=nearest)


def _named(
    core: Core,
    session: Session,
    branch: str,
    start: str | State | None,
    *,
    resume: bool,
    nearest: bool,
) -> tuple[Ref | None, State | None]:
    """The branch, if it exists, and the state that ``start`` names; of a branch that exists, the
    one from which ``nearest`` forked it."""
    ref = names_query.find(session, branch)
    origin = (
        None
        if start is None
        else revision.resolve(session, start.uid if isinstance(start, State) else start)
    )
    if ref is None:
        refs.check_name(branch)
        return None, origin
    if ref.kind is not RefKind.BRANCH:
        raise Conflict(f"{branch!r} is a tag: choose another name for the branch")
    if not resume:
        raise Conflict(
            f"branch {branch!r} exists at {ref.state[:10]}: choose another name, or resume there"
            " with resume=True"
        )
    if origin is not None:
        kept = nearest_kept(core, session, origin, is_told=False) if nearest else origin
        if not any(walk.is_ancestor(session, uid, ref.state) for uid in {kept.uid, origin.uid}):
            raise Conflict(
                f"branch {branch!r} exists and does not descend from {start!r}: choose another"
                " name, or no start"
            )
        origin = kept
    return ref, origin


def restore_start(
    training: Training,
    state: State,
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    is_resumed: bool,
    rng: str | bool = "state",
) -> None:
    """Restore ``state`` into the training's objects; the first capture then shares with it what is
    unchanged.

    With ``rng="script"``, a fork keeps the random numbers of the script, and so does a training
    that is resumed with another seed.
    """
    is_reseeded = not is_resumed or (
        training.seed is not None and training.seed != state.config.get("seed")
    )
    without = [
        name
        for name, found in training.objects.items()
        if isinstance(found, RngState) or is_generator(found)
    ]
    if rng != "script" or not is_reseeded:
        without = []
    report = _restored(
        training, state, only=only, strict=strict, is_resumed=is_resumed, without=without
    )
    set_position(training, state, is_resumed=is_resumed)
    if is_resumed:
        restore_trained(
            training.branch,
            training.adapted,
            report,
            is_logged=training.ranks.is_first,
            at=state.uid,
        )
    if not training.ranks.is_first:
        return  # rank 0 logs it for all
    where = f"state {state.uid[:10]}, step {state.step}" + (
        f", epoch {training.loops.epoch}" if training.loops.is_counted else ""
    )
    if not is_resumed:
        begun = event("branch.begun", branch=training.branch, state=state.uid, step=state.step)
        _logger.info("branch %s begins at %s", training.branch, where, extra=begun)
        log_differences(training.branch, report)
        return
    resumed = event("branch.resumed", branch=training.branch, state=state.uid, step=state.step)
    say(f"branch {training.branch} goes on from {where}", resumed)
    if forgotten := _forgotten(training, only):
        _logger.warning(
            "branch %s has %s too, and %s not tracked now: begun again, and missing in states"
            " captured from here. Pass %s to track, or fork with start=",
            training.branch,
            ", ".join(forgotten),
            "they are" if len(forgotten) > 1 else "it is",
            ", ".join(forgotten),
        )


def _restored(
    training: Training,
    state: State,
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    is_resumed: bool,
    without: Sequence[str],
) -> RestoreReport:
    """Restore the state, except for the objects ``without``.

    A resumed training first gets back the groups that it had given optimizers."""
    try:
        return training.restore(state, only=only, strict=strict, without=without)
    except InvalidInput as misfit:
        alone = is_resumed and training.ranks.size == 1
        gained = add_missing_groups(training.core, state, training.adapted) if alone else []
        if not gained:
            raise
        try:
            report = training.restore(state, only=only, strict=strict, without=without)
        except InvalidInput:
            remove_groups(gained)
            raise misfit from None
        except BaseException:
            remove_groups(gained)
            raise
    log_added_groups(training.branch, gained)
    return report


def set_position(training: Training, state: State, *, is_resumed: bool) -> None:
    """Make ``state`` the one where the training stands, whatever its objects hold; the first
    capture shares with it what is unchanged."""
    training.step, training.micro_step = state.step, state.micro_step
    training.resumed_from, training.is_resumed = state, is_resumed
    training.line.base = training.core.tiers.placed(state.uid)
    if training.line.base is None:
        # in memory only: shared bytes are written with the first of the two
        training.line.kin = training.runner.in_flight.line_of(state.uid)


def _forgotten(training: Training, only: str | Sequence[str] | None) -> list[str]:
    """The objects of the resumed state that this training no longer tracks, unless ``only`` is
    given."""
    if only is not None or training.report is None:
        return []
    return [
        name
        for name in training.report.skipped
        if "/" not in name and name not in ("rng", IN_BACKWARD, *training.objects)
    ]


def _warn_of_misspelling(session: Session, branch: str) -> None:
    """Log a warning if this branch, which begins from nothing, has nearly the name of one that
    exists."""
    plain = re.sub(r"\d+", "0", branch)
    names = [
        name
        for name in names_query.near(session, branch, RefKind.BRANCH)
        if re.sub(r"\d+", "0", name) != plain
    ]
    close = get_close_matches(branch, names, n=3, cutoff=0.75)
    if close:
        _logger.warning(
            "branch %r is new and begins without a state, and there is %s. To resume there, pass"
            " branch=%r. To fork from it, pass start=%r",
            branch,
            " and ".join(map(repr, close)),
            close[0],
            close[0],
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """How a training is tracked; see ``Repository.track``. Unless ``restores`` is set, its objects
    stay as they are. ``ranks`` track it together.
    """

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
    hyperparameters: str | None = None
    rng: str | bool = "state"
    retention: Retention | None = None
    restores: bool = True
    frozen: bool = True
    ranks: Ranks = field(default_factory=lambda: Ranks(SoloGroup()))
    own: frozenset[str] = frozenset()
    reduce: Reduce = FIRST
    is_checking: bool = False
    takeover: bool = False
    nearest: bool = False

    def agreed(self, names: Collection[str]) -> dict[str, object]:
        """The terms on which all ranks must agree, with the names of the objects that they
        track."""
        told = {
            name: getattr(self, name)
            for name in (
                *(
                    "branch",
                    "start",
                    "resume",
                    "only",
                    "strict",
                    "gradients",
                    "frozen",
                    "restores",
                    "is_checking",
                ),
                *("hyperparameters", "rng", "takeover", "nearest"),
            )
        }
        told |= {
            "own": sorted(self.own),
            "reduce": self.reduce,
            "cadence": self.cadence.told(),
            "back_pressure": str(self.back_pressure),
        }
        return told | {
            "on_failure": str(self.on_failure),
            "retention": self.retention,
            "what is tracked": ", ".join(sorted(names)),
        }


class _Job(msgspec.Struct, frozen=True):
    """The message of rank 0 to the other ranks: the uid of the job, the run of rank 0's process,
    and where the training begins."""

    uid: str
    process: str
    origin: str | None
    is_fork: bool
    is_beyond: bool
    is_taken: bool


def _rng_source(value: object, what: str) -> object:
    if not isinstance(value, bool | str) or value not in ("state", "script", False):
        raise InvalidInput(
            f"the name {what!r} is taken by the random number generators, which come from 'state'"
            " or 'script' or are left out by False: rename what you track"
        )
    return value


RngSource = Annotated[Literal["state", "script", False], _rng_source]


def tracked_objects(objects: Mapping[str, object], *, rng: RngSource) -> dict[str, object]:
    """Everything that is tracked, by name. ``rng``: the global random number generators are, too.

    :raises InvalidInput: nothing is given, or a name is taken.
    """
    if "rng" in objects:
        raise InvalidInput(
            "the name 'rng' is taken by the random number generators: rename what you track"
        )
    tracked = {
        values.text(name, "the name of what is tracked"): found for name, found in objects.items()
    }
    if not tracked:
        raise InvalidInput(
            "there is nothing to capture: name what is trained, as in track(model=model,"
            " optimizer=optimizer)"
        )
    taken = {
        LOOPS: "the place of run.epochs and run.steps",
        MODES: "the train and eval modes of modules",
        FROZEN: "the record of what frozen=False leaves out",
        FILES: "the files of capture(files=…)",
        OWN_BUFFERS: "the buffers that each rank has of its own",
    }
    for name in taken.keys() & tracked.keys():
        raise InvalidInput(f"the name {name!r} is taken by {taken[name]}: rename what you track")
    return tracked | {"rng": RngState()} if rng else tracked


def begin_tracking(
    core: Core, objects: Mapping[str, object], plain: dict[str, object], terms: Terms
) -> Tracker:
    """The tracker that captures these objects from now on; see ``Repository.track``.

    Collective among the ranks of ``terms``."""
    branch, start, ranks = terms.branch, terms.start, terms.ranks
    settle()
    ranks.same(terms.agreed({*objects, *plain}))
    with ranks.synchronized("begin on this branch"):
        core.tiers.check_parts(ranks.size)
        attach(core, branch, ranks.rank, ranks.size, takeover=terms.takeover)
        cadence = _with_mtbf(core, terms.cadence)
        end_earlier(
            core,
            branch,
            partial(check_origin, core, branch, start, resume=terms.resume, nearest=terms.nearest),
        )
    if ranks.size > 1:
        own = msgspec.msgpack.encode(core.left.runs if core.left is not None else ())
        everyone = ranks.group.exchange(own)
        core.inherited_runs = frozenset().union(
            *(msgspec.msgpack.decode(each, type=list[str]) for each in everyone)
        )
    elif core.left is not None:
        core.inherited_runs = frozenset(core.left.runs)
    with undisturbed():
        job, origin = _start_point(core, terms)
        built: list[Training] = []
        try:
            with ranks.synchronized("track this"):
                built.append(_training(core, objects, plain, terms, cadence, origin, job))
            training = built[0]
            ranks.same(_layout(training))
            with ranks.synchronized("restore its part"):
                _restore_objects(training, terms, origin)
            if terms.is_checking:
                check_replicas(training)
            _begin_run(training, terms, origin)
            training.know_best()
            training.halt = HaltWatch(training)
            core.engage().watch(branch, training.halt.look, ranks.rank, ranks.size)
        except BaseException:
            for each in built:
                each.undo()
            raise
        core.trainings.add(training)
        _open_trainings.add(training)
        training.line.bound = keep(core, branch, terms.retention, training.adapted.size_bytes())
        return Tracker(training, back_pressure=terms.back_pressure, is_deferring=terms.defer)


def _start_point(core: Core, terms: Terms) -> tuple[str, StartPoint]:
    """The uid of the job, and where its training begins.

    With several ranks, rank 0 decides both."""
    ranks = terms.ranks
    if ranks.size == 1:
        return "", _origin(core, terms)
    job = ranks.first("find where to begin", partial(_job, core, terms), _Job)
    with ranks.synchronized("see what rank 0 sees"):
        with core.reading() as session:
            try:
                runs.get(session, job.process)
            except NotFound as exc:
                raise InvalidInput(
                    f"this rank opened {core.location}, and rank 0 another repository: open one"
                    " that all ranks share, a folder that all reach or a database"
                ) from exc
        return job.uid, StartPoint(
            None if job.origin is None else core.state(job.origin),
            is_fork=job.is_fork,
            is_beyond=job.is_beyond,
            is_taken=job.is_taken,
        )


def _origin(core: Core, terms: Terms) -> StartPoint:
    if core.location.bucket:
        core.live_folders = live_folders(core, terms.branch)
    found = origin_of(
        core,
        terms.branch,
        terms.start,
        resume=terms.resume,
        takeover=terms.takeover,
        nearest=terms.nearest,
    )
    is_head = found.state is not None and not found.is_fork and not found.is_taken
    return _skipping(core, terms.branch, found) if RESTART in os.environ and is_head else found


RESTART = "DATASTATES_RESTART"
"""The environment variable in which ``datastates agent run`` counts the starts of a job."""

BEGAN_AT = f"{OURS}began_at"
"""The key in the record of a training for the state from which it began."""

_STRIKES = 3


def _skipping(core: Core, branch: str, origin: StartPoint) -> StartPoint:
    """The start of a job that is restarted. A state from which the last three processes died before
    their first new state is skipped: the branch goes back to the state before it."""
    state = origin.state
    assert state is not None, "the caller has seen it"
    with core.reading() as session:
        dead = core.inherited_runs
        deaths = runs.fruitless(session, branch, BEGAN_AT, state.uid, dead=dead, limit=_STRIKES)
        before = nearest_here(core, session, state.parents[0]) if state.parents else None
    if deaths < _STRIKES:
        return origin
    why = f"skipped: {_STRIKES} processes in a row died before their first new state"
    skipped = event("state.skipped", branch=branch, state=state.uid, step=state.step)
    if before is None:
        _logger.warning(
            "branch %s: %d processes in a row died after state %s, and no state before it can be"
            " restored",
            *(branch, _STRIKES, state.uid[:10]),
            extra=skipped,
        )
        return origin
    _logger.warning(
        "branch %s: state %s (step %d) is %s. It goes back to state %s (step %d)",
        *(branch, state.uid[:10], state.step, why, before.uid[:10], before.step),
        extra=skipped,
    )
    with core.writing() as session:
        refs.move(session, branch, before.uid, expected=state.uid, reason=why)
        refs.write(session, why.capitalize(), state=state.uid, author="datastates")
    return replace(origin, state=before, is_beyond=True)


def _job(core: Core, terms: Terms) -> _Job:
    origin = _origin(core, terms)
    begin = None if origin.state is None else origin.state.uid
    return _Job(
        secrets.token_hex(12),
        core.engage().run.uid,
        begin,
        is_fork=origin.is_fork,
        is_beyond=origin.is_beyond,
        is_taken=origin.is_taken,
    )


def _training(
    core: Core,
    objects: Mapping[str, object],
    plain: dict[str, object],
    terms: Terms,
    cadence: Policy,
    origin: StartPoint,
    job: str,
) -> Training:
    begin, ranks = origin.state, terms.ranks
    config = (
        terms.config if terms.retention is None else {**terms.config, KEY: terms.retention.text}
    )
    line = Line(
        f"{terms.branch}#{secrets.token_hex(4)}",
        terms.branch,
        None if begin is None else (begin.uid, begin.digest),
        None,
    )
    line.is_patient = terms.on_failure is OnFailure.CONTINUE
    line.keeps_bests = ranks.is_first and str(cadence) != "never"
    if ranks.size > 1:
        line.part, line.uids, line.reduce = (
            Part(ranks.rank, ranks.size, job),
            DerivedUids(job),
            terms.reduce,
        )
        config = {**config, **runs.of_job(job, ranks.rank, ranks.size)}
    if begin is not None:
        config = {**config, BEGAN_AT: begin.uid}
    parts = {"gradients": terms.gradients, "frozen": terms.frozen}
    training = Training(
        core, line=line, objects=objects, values=plain, cadence=cadence, config=config, **parts
    )
    training.ranks, training.own = ranks, terms.own
    if ranks.size > 1:
        training.adapted.own_buffers = OwnBuffers(ranks.rank, ranks.size)
    training.bests = (terms.retention or retention_of(core.config.retention)).bests
    return training


def _restore_objects(training: Training, terms: Terms, origin: StartPoint) -> None:
    begin = origin.state
    # it selects of ``start``; a resumed fork gets all its own
    only = None if origin.is_beyond and terms.start is not None else terms.only
    if begin is not None and not terms.restores:
        set_position(training, begin, is_resumed=origin.is_beyond)
    elif begin is not None:
        training.takes_script = (
            terms.hyperparameters or ("state" if origin.is_beyond else "script")
        ) == "script"
        restore_start(
            training,
            begin,
            only=only,
            strict=terms.strict,
            is_resumed=origin.is_beyond,
            rng=terms.rng,
        )
    else:
        training.warn_once(
            training.configure(
                training.script_options.values
                | ({} if training.seed is None else {"seed": training.seed})
            )
        )


def _begin_run(training: Training, terms: Terms, origin: StartPoint) -> None:
    """Record the run of this rank, and make the branch of a fork, now that its objects are
    restored: a fork that fails leaves no branch."""
    core, ranks, begin = training.core, terms.ranks, origin.state

    def begin_first() -> None:
        is_moved = origin.is_fork or origin.is_taken
        with (
            core.inheriting() as hand_over,
            core.writing() if is_moved else core.database.write() as session,
        ):
            hand_over(session)
            claim(session, training, begin, takeover=terms.takeover, is_taken=origin.is_taken)
            training.begin_run(session)
            if begin is not None and origin.is_fork:
                refs.branch(session, terms.branch, begin.uid)

    with ranks.synchronized("begin its run"):
        if not ranks.is_first:
            with core.inheriting() as hand_over, core.database.write() as session:
                hand_over(session)
                training.begin_run(session)
    ranks.first("begin its run", begin_first, type(None))


def _layout(training: Training) -> dict[str, object]:
    """The layout of the models, which must be equal on all ranks: each rank computes from its own
    what the other ranks hold."""
    told: dict[str, object] = {}
    for path, model in training.adapted.models() if training.ranks.size > 1 else ():
        if path.split("/")[0] not in training.own:
            leaves = [
                f"{name} {tuple(leaf.shape)} {leaf.dtype}"
                for name, leaf in model.tree().items()
                if isinstance(leaf, torch.Tensor)
            ]
            told[f"the model {path!r}"] = (
                f"{len(leaves)} tensors ({hashlib.sha256(repr(leaves).encode()).hexdigest()[:10]})"
            )
    return told


def _with_mtbf(core: Core, cadence: Policy) -> Policy:
    """The cadence, with the mean time between failures of this repository's processes if it uses
    that."""
    if not cadence.asks_mtbf:
        return cadence
    with core.database.read() as session:
        found = failures(session)
    return cadence.informed(mtbf_of(found.ran_s, found.died))
