"""Checkpoints of Ray Train and Ray Tune that only name a state, and the calls with which a training
function makes them.

    def train(config):  # given to a Tuner, or to a TorchTrainer
        model, optimizer = build(config)
        with track("/shared/runs", model=model, optimizer=optimizer, config=config) as run:
            while run.step < 100:
                report(run, {"loss": train_step(model, optimizer)})

A trial of Tune is a branch, and so is each worker of Train. Ray carries only a folder with a file
of a few lines:

    datastates.json      {"repository": …, "state": uid, "branch": …, "owner": the branch's owner}
    datastates.1.json    the same for the worker of rank 1

A restarted trial resumes at the state that its newest checkpoint names. In population based
training a trial takes over another's checkpoint. It then continues on a new branch, which forks
from the other's state.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat, TypeGuard

import msgspec

import datastates
from datastates import values
from datastates.collective import SoloGroup
from datastates.engine.handle import Capture
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.states import RefKind
from datastates.repository import Repository
from datastates.training.tracker import Tracker

try:
    import ray.train
    import ray.tune
except ImportError as exc:
    raise ImportError(
        "datastates.integrations.ray needs Ray Train and Tune: pip install 'datastates[ray]'"
    ) from exc

__all__ = ["Named", "checkpoint", "named", "report", "track"]

_TRIAL = "ray.trial"


class Named(msgspec.Struct, frozen=True):
    """What a checkpoint of Ray names: a state, and its repository.

    ``owner`` is the trial or worker that owns ``branch``."""

    repository: str
    state: str
    branch: str
    owner: str


@dataclass(frozen=True, slots=True)
class _Worker:
    """The trial of Tune, or the worker of Train, for which this function runs."""

    name: str
    rank: int
    is_trial: bool

    @property
    def owner(self) -> str:
        """Its name, unique among all that share a repository, which is also the name of its
        first branch."""
        return self.name if self.rank == 0 else f"{self.name}/rank-{self.rank}"

    @property
    def ray(self) -> Any:
        """The half of Ray that runs it: both have ``report``, ``get_checkpoint`` and
        ``Checkpoint``."""
        return ray.tune if self.is_trial else ray.train

    @classmethod
    def here(cls) -> _Worker:
        """The trial or worker of the caller.

        :raises InvalidInput: Ray runs no training function here.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in a worker of Train it warns that this is no trial
            trial = ray.tune.get_context().get_trial_id()
        if trial is not None:
            return cls(f"{ray.tune.get_context().get_experiment_name()}/{trial}", 0, is_trial=True)
        try:
            context = ray.train.get_context()
            return cls(context.get_experiment_name(), context.get_world_rank(), is_trial=False)
        except RuntimeError as exc:
            raise InvalidInput(
                "Ray runs no training function here: call this in one, or use repo.track"
            ) from exc


@contextmanager
def track(
    repository: str | os.PathLike[str] | Repository, *, branch: str | None = None, **options: Any
) -> Iterator[Tracker]:
    """Track the training that Ray runs here, from the state that Ray's checkpoint names, if there
    is one.

    Without a checkpoint, a branch that exists is resumed at its newest state, as in
    ``Repository.track``.

    :param repository: a folder that all workers share, or the URL of a database that all reach, or
        an open repository.
    :param branch: the name of the branch. None joins the names of experiment and trial, or takes
        the name of the run of Train.
    :param options: what ``Repository.track`` takes: the objects, ``cadence``, ``config`` … Give
        ``config=config``, and build the optimizer with the trial's configuration: a fork trains
        with it. A branch that is resumed continues with the options of its state.
    :raises InvalidInput: Ray runs no training function here.
    :raises NotFound: Ray's checkpoint names a state of another repository.
    """
    worker = _Worker.here()
    if isinstance(repository, Repository):
        with _tracked(repository, worker, branch or worker.owner, options) as run:
            yield run
        return
    with (
        datastates.open(repository) as repo,
        _tracked(repo, worker, branch or worker.owner, options) as run,
    ):
        yield run


def _tracked(repo: Repository, worker: _Worker, branch: str, options: Mapping[str, Any]) -> Tracker:
    given = worker.ray.get_checkpoint()
    found = None if given is None else named(given, worker.rank)
    start = None
    if found is not None:
        branch, start = _onwards(repo, worker, branch, found)
    # each worker has a separate branch
    run = repo.track(branch=branch, start=start, **{"group": SoloGroup(), **options})
    run.attributes[_TRIAL] = worker.owner
    return run


def _onwards(
    repo: Repository, worker: _Worker, branch: str, found: Named
) -> tuple[str, str | None]:
    """The branch on which a worker resumes from a checkpoint, and the state from which a new branch
    forks."""
    try:
        state = repo.state(found.state)
    except NotFound as exc:
        raise NotFound(
            f"Ray's checkpoint names state {found.state} of {found.repository}, and"
            f" {repo.core.location} has no such state: open the repository that it names"
        ) from exc
    heads = {ref.name: ref.state for ref in repo.refs() if ref.kind is RefKind.BRANCH}
    if found.owner != worker.owner or found.branch not in heads:
        return _free(branch, heads), state.uid
    if heads[found.branch] != state.uid:
        # states that were captured since then and never reported are trained again
        repo.move(found.branch, state.uid, expected=heads[found.branch])
    return found.branch, None


def _free(branch: str, heads: Mapping[str, str]) -> str:
    """The name, or the first numbered form of it that no branch has."""
    number, name = 1, branch
    while name in heads:
        number += 1
        name = f"{branch}/{number}"
    return name


def report(
    run: Tracker, metrics: Mapping[str, Any], *, capture: Capture | None = None, **options: Any
) -> None:
    """Capture, wait until the state is on disk, and report the metrics to Ray with a checkpoint
    that names it.

    :param run: what ``track`` returned.
    :param metrics: the metrics for Ray's ``report``. The state has the ones that are numbers.
    :param capture: a capture that was already made, to name instead.
    :param options: what else Ray's ``report`` takes.
    """
    _check(run, capture)
    said = values.named(metrics, "metrics")
    if capture is None:
        capture = run.capture(
            metrics={key: value for key, value in said.items() if _is_number(value)}
        )
    with checkpoint(run, capture) as made:
        _Worker.here().ray.report(said, checkpoint=made, **options)


def _check(run: object, capture: object) -> None:
    if not isinstance(run, Tracker):
        raise InvalidInput(f"run is {values.shown(run)}: give what track returned")
    if capture is not None and not isinstance(capture, Capture):
        raise InvalidInput(f"capture is {values.shown(capture)}: give what run.capture returned")


def _is_number(value: Any) -> TypeGuard[SupportsFloat]:
    return hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0


@contextmanager
def checkpoint(run: Tracker, capture: Capture) -> Iterator[Any]:
    """A checkpoint of Ray that names a state, once the state is on disk; its folder exists until
    the block ends."""
    _check(run, capture)
    worker = _Worker.here()
    state = capture.wait("durable")
    name = Named(str(run.training.core.location), state.uid, run.branch, worker.owner)
    with tempfile.TemporaryDirectory(prefix="datastates-") as folder:
        (Path(folder) / _file(worker.rank)).write_bytes(msgspec.json.encode(name))
        yield worker.ray.Checkpoint.from_directory(folder)


def named(checkpoint: Any, rank: int = 0) -> Named:
    """What a checkpoint of Ray such as ``result.checkpoint`` names for a rank; for a rank that it
    does not know, what it names for rank 0.

        found = named(result.checkpoint)
        weights = datastates.open(found.repository).load(found.state, only="model")["model"]

    :raises InvalidInput: it is not a checkpoint that names a state.
    """
    if not callable(values.attribute(checkpoint, "as_directory")):
        raise InvalidInput(
            f"checkpoint is {values.shown(checkpoint)}: give a checkpoint of Ray, such as"
            " result.checkpoint"
        )
    with checkpoint.as_directory() as folder:
        for file in (_file(rank), _file(0)):
            path = Path(folder) / file
            if path.is_file():
                try:
                    return msgspec.json.decode(path.read_bytes(), type=Named)
                except msgspec.MsgspecError as exc:
                    raise InvalidInput(
                        f"{checkpoint} names no state ({exc}): it is damaged, or of a newer version"
                    ) from exc
    raise InvalidInput(
        f"{checkpoint} names no state, as it was not made by datastates.integrations.ray: start"
        " without it"
    )


def _file(rank: int) -> str:
    return f"datastates.{rank}.json" if rank else "datastates.json"
