"""Starts to track a training: an earlier tracker of its branch gives way, and its objects are restored to the head of the branch."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch

from datastates import values
from datastates.capture.line import Line, Part
from datastates.capture.shutdown import settle
from datastates.capture.uids import Agreed
from datastates.config import BackPressure, OnFailure
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.change import refs, runs
from datastates.lineage.change.reduction import FIRST, Reduce
from datastates.lineage.show.failures import failures
from datastates.lineage.states import Value
from datastates.objects.loops import LOOPS
from datastates.objects.model_state import FROZEN, MODES
from datastates.objects.own_buffers import OWN_BUFFERS, OwnBuffers
from datastates.objects.rng import RngState
from datastates.opening.core import Core
from datastates.policy.contract import Policy
from datastates.policy.mtbf import mtbf_of
from datastates.policy.retention import Retention, retention_of
from datastates.system.interrupts import undisturbed
from datastates.transport.clone.groups import SoloGroup
from datastates.upkeep.keeper import keep
from datastates.upkeep.retention import KEY

from .outset import Outset, check_origin, origin_of, set_out, stand
from .replicas import check_replicas
from .succession import claim, enter, take_over
from .together import Together
from .tracker import Tracker
from .training import Training

__all__ = ["Terms", "follow", "together"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a training is tracked; see ``Repository.track``. Unless ``restores`` is set, its objects stay as they are. ``ranks`` track it
    together.
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
    ranks: Together = field(default_factory=lambda: Together(SoloGroup()))
    own: frozenset[str] = frozenset()
    reduce: Reduce = FIRST
    is_checking: bool = False
    takeover: bool = False
    nearest: bool = False

    def said(self, names: Collection[str]) -> dict[str, object]:
        """The terms on which all ranks must agree, with the names of the objects that they track."""
        told = {
            name: getattr(self, name)
            for name in (
                *("branch", "start", "resume", "only", "strict", "gradients", "frozen", "restores", "is_checking"),
                *("hyperparameters", "rng", "takeover", "nearest"),
            )
        }
        told |= {"own": sorted(self.own), "reduce": self.reduce, "cadence": self.cadence.told(), "back_pressure": str(self.back_pressure)}
        return told | {"on_failure": str(self.on_failure), "retention": self.retention, "what is tracked": ", ".join(sorted(names))}


class _Job(msgspec.Struct, frozen=True):
    """What rank 0 tells the other ranks of a training: its uid, the run of rank 0's process, and where the training begins."""

    uid: str
    process: str
    origin: str | None
    is_fork: bool
    is_beyond: bool
    is_taken: bool


def together(more: Mapping[str, object], objects: Mapping[str, object], *, rng: object) -> dict[str, object]:
    """Everything that is tracked, by name; ``rng`` says whether the global random number generators are.

    :raises InvalidInput: nothing is given, a name is taken, or given twice.
    """
    if not isinstance(rng, bool | str) or rng not in ("state", "script", False):
        raise InvalidInput(
            "the name 'rng' is taken by the random number generators, which come from 'state' or 'script' or are left out by False: rename"
            " what you track"
        )
    twice = sorted(more.keys() & objects.keys())
    if twice:
        raise InvalidInput(f"{', '.join(twice)}: given by keyword and in objects=; give each of them once")
    if "rng" in objects:
        raise InvalidInput("the name 'rng' is taken by the random number generators: rename what you track")
    tracked = {values.text(name, "the name of what is tracked"): found for name, found in {**more, **objects}.items()}
    if not tracked:
        raise InvalidInput("there is nothing to capture: name what is trained, as in track(model=model, optimizer=optimizer)")
    taken = {
        LOOPS: "the place of run.epochs and run.steps",
        MODES: "the train and eval modes of modules",
        FROZEN: "the record of what frozen=False leaves out",
        OWN_BUFFERS: "the buffers that each rank has of its own",
    }
    for name in taken.keys() & tracked.keys():
        raise InvalidInput(f"the name {name!r} is taken by {taken[name]}: rename what you track")
    return tracked | {"rng": RngState()} if rng else tracked


def follow(core: Core, objects: Mapping[str, object], plain: dict[str, object], terms: Terms) -> Tracker:
    """The tracker that captures these objects from now on; see ``Repository.track``. Collective among the ranks of ``terms``."""
    branch, start, ranks = terms.branch, terms.start, terms.ranks
    settle()
    ranks.same(terms.said({*objects, *plain}))
    with ranks.united("begin on this branch"):
        core.tiers.check_parts(ranks.size)
        cadence = _informed(core, terms.cadence)
        take_over(core, branch, partial(check_origin, core, branch, start, resume=terms.resume, nearest=terms.nearest))
    with undisturbed():
        job, origin = _outset(core, terms)
        built: list[Training] = []
        try:
            with ranks.united("track this"):
                built.append(_training(core, objects, plain, terms, cadence, origin, job))
            training = built[0]
            ranks.same(_layout(training))
            with ranks.united("restore its part"):
                _put_back(training, terms, origin)
            if terms.is_checking:
                check_replicas(training)
            _begin_run(training, terms, origin)
            training.know_best()
        except BaseException:
            for each in built:
                each.give_up()
            raise
        core.trainings.add(training)
        enter(training)
        training.line.bound = keep(core, branch, terms.retention, training.adapted.size_bytes())
        return Tracker(training, back_pressure=terms.back_pressure, is_deferring=terms.defer)


def _outset(core: Core, terms: Terms) -> tuple[str, Outset]:
    """The uid of the job, and where its training begins. With several ranks, rank 0 decides both."""
    ranks = terms.ranks
    if ranks.size == 1:
        return "", _origin(core, terms)
    job = ranks.first("find where to begin", partial(_job, core, terms), _Job)
    with ranks.united("see what rank 0 sees"):
        with core.reading() as session:
            try:
                runs.get(session, job.process)
            except NotFound as exc:
                raise InvalidInput(
                    f"this rank opened {core.location}, and rank 0 another repository: open one that all ranks share, a folder that"
                    " all reach or a database"
                ) from exc
        return job.uid, Outset(
            None if job.origin is None else core.state(job.origin), is_fork=job.is_fork, is_beyond=job.is_beyond, is_taken=job.is_taken
        )


def _origin(core: Core, terms: Terms) -> Outset:
    return origin_of(core, terms.branch, terms.start, resume=terms.resume, takeover=terms.takeover, nearest=terms.nearest)


def _job(core: Core, terms: Terms) -> _Job:
    origin = _origin(core, terms)
    begin = None if origin.state is None else origin.state.uid
    return _Job(
        secrets.token_hex(12), core.engage().run.uid, begin, is_fork=origin.is_fork, is_beyond=origin.is_beyond, is_taken=origin.is_taken
    )


def _training(
    core: Core, objects: Mapping[str, object], plain: dict[str, object], terms: Terms, cadence: Policy, origin: Outset, job: str
) -> Training:
    begin, ranks = origin.state, terms.ranks
    config = terms.config if terms.retention is None else {**terms.config, KEY: terms.retention.text}
    line = Line(f"{terms.branch}#{secrets.token_hex(4)}", terms.branch, None if begin is None else (begin.uid, begin.digest), None)
    line.is_patient = terms.on_failure is OnFailure.CONTINUE
    line.keeps_bests = ranks.is_first and str(cadence) != "never"
    if ranks.size > 1:
        line.part, line.uids, line.reduce = Part(ranks.rank, ranks.size, job), Agreed(job), terms.reduce
        config = {**config, **runs.of_job(job, ranks.rank, ranks.size)}
    parts = {"gradients": terms.gradients, "frozen": terms.frozen}
    training = Training(core, line=line, objects=objects, values=plain, cadence=cadence, config=config, **parts)
    training.ranks, training.own = ranks, terms.own
    if ranks.size > 1:
        training.adapted.own_buffers = OwnBuffers(ranks.rank, ranks.size)
    training.bests = (terms.retention or retention_of(core.config.retention)).bests
    return training


def _put_back(training: Training, terms: Terms, origin: Outset) -> None:
    begin = origin.state
    only = None if origin.is_beyond and terms.start is not None else terms.only  # it selects of ``start``; a resumed fork gets all its own
    if begin is not None and not terms.restores:
        stand(training, begin, is_resumed=origin.is_beyond)
    elif begin is not None:
        training.takes_script = (terms.hyperparameters or ("state" if origin.is_beyond else "script")) == "script"
        set_out(training, begin, only=only, strict=terms.strict, is_resumed=origin.is_beyond, rng=terms.rng)
    else:
        training.say_once(training.configure(training.built.values | ({} if training.seed is None else {"seed": training.seed})))


def _begin_run(training: Training, terms: Terms, origin: Outset) -> None:
    """Record the run of this rank, and make the branch of a fork, now that its objects are restored: a fork that fails leaves no branch."""
    core, ranks, begin = training.core, terms.ranks, origin.state

    def begin_first() -> None:
        with core.writing() if origin.is_fork or origin.is_taken else core.database.write() as session:
            claim(session, training, begin, takeover=terms.takeover, is_taken=origin.is_taken)
            training.begin_run(session)
            if begin is not None and origin.is_fork:
                refs.branch(session, terms.branch, begin.uid)

    with ranks.united("begin its run"):
        if not ranks.is_first:
            with core.database.write() as session:
                training.begin_run(session)
    ranks.first("begin its run", begin_first, type(None))


def _layout(training: Training) -> dict[str, object]:
    """What the models of all ranks must have in common, so that each rank knows what the others hold."""
    told: dict[str, object] = {}
    for path, model in training.adapted.models() if training.ranks.size > 1 else ():
        if path.split("/")[0] not in training.own:
            leaves = [f"{name} {tuple(leaf.shape)} {leaf.dtype}" for name, leaf in model.tree().items() if isinstance(leaf, torch.Tensor)]
            told[f"the model {path!r}"] = f"{len(leaves)} tensors ({hashlib.sha256(repr(leaves).encode()).hexdigest()[:10]})"
    return told


def _informed(core: Core, cadence: Policy) -> Policy:
    """The cadence; if it asks for it, it has been told how often processes of this repository died."""
    if not cadence.asks_mtbf:
        return cadence
    with core.database.read() as session:
        found = failures(session)
    return cadence.informed(mtbf_of(found.ran_s, found.died))
