"""A callback that captures what a Trainer trains at every step, and resumes it bit for bit.

It takes a state when Lightning asks for the next batch. By then everything that belongs to a step has happened, including validation and
the hooks of every callback. It takes the last state at the end of the training.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch

from datastates import values
from datastates.capture.handle import Capture
from datastates.config import BackPressure, OnFailure
from datastates.errors import Conflict, InvalidInput, Unsupported
from datastates.lineage.states import State, Value
from datastates.objects.rng import RngState
from datastates.policy.contract import Policy
from datastates.policy.retention import Retention
from datastates.repository import Repository
from datastates.repository import open as open_repository
from datastates.system.notices import say
from datastates.tracking.configuration import configuration
from datastates.tracking.tracker import Tracker

from .checkpoint_io import DatastatesCheckpointIO, is_checkpoint, state_at
from .data import Data
from .fit import Fit, Metrics
from .framework import Callback, DDPStrategy
from .inexact import inexact

__all__ = ["DatastatesCallback", "TrackOptions"]

_logger = logging.getLogger(__name__)


class TrackOptions(TypedDict, total=False):
    """Options of ``Repository.track``."""

    resume: bool
    takeover: bool
    gradients: bool
    only: str | Sequence[str] | None
    strict: bool
    durable_every: int | None
    durable_interval_s: float | None
    cadence: Policy | str | None
    retention: Retention | str | None
    keep_best: str | Sequence[str] | None
    back_pressure: BackPressure | str | None
    on_failure: OnFailure | str | None
    defer: bool


_USUAL: dict[str, Any] = {
    **{
        "resume": True,
        "takeover": False,
        "gradients": False,
        "only": None,
        "strict": True,
        "durable_every": None,
        "durable_interval_s": None,
    },
    **{"cadence": None, "retention": None, "keep_best": None, "back_pressure": None, "on_failure": None, "defer": True},
}


class DatastatesCallback(Callback):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """Captures every step of ``trainer.fit`` as a state of a branch; the same script started again goes on where it stopped.

        trainer = L.Trainer(max_epochs=3, callbacks=[DatastatesCallback("runs", branch="main")])
        trainer.fit(model, loader)

    A branch that exists is resumed; a new one begins anew, or forks from ``start``. A state has ``model``, ``optimizer``,
    ``scheduler`` (lists, where there are several), ``trainer`` (loops, callbacks, precision, datamodule), ``data`` and ``rng``. ``newest``
    is the newest capture. The processes of ``strategy="ddp"`` capture each state together.
    """

    @values.unpacks(TrackOptions, **_USUAL)
    def __init__(
        self,
        repo: Repository | str | os.PathLike[str],
        *,
        branch: str = "main",
        start: str | State | None = None,
        every: int | None = 1,
        config: Mapping[str, object] | None = None,
        **options: Unpack[TrackOptions],
    ) -> None:
        """Make a callback for one Trainer.

        :param repo: the repository, or its folder, which is opened for each ``fit``.
        :param branch: the branch that captures move.
        :param start: the state from which a new branch forks.
        :param every: capture every n-th step of the optimizers; None: at the end of each epoch. A step after which Lightning validates
            and the end of the training are always captured.
        :param config: the configuration of this training, in addition to the hyper-parameters of module and datamodule.
        :param options: as in ``Repository.track``.
        """
        super().__init__()
        if not isinstance(repo, Repository | str | os.PathLike):
            raise InvalidInput(f"repo is {values.shown(repo)}: give what datastates.open returned, or the folder of a repository")
        self._given, self.branch = repo, values.text(branch, "branch")
        self._start: str | State | None = None if start is None else values.revision(start, "start")
        self.every = None if every is None else values.positive(every, "every")
        self._config, self._options = config, options
        self._repo: Repository | None = None
        self._run: Tracker | None = None
        self.newest: Capture | None = None
        self._data: Data | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._rng: Mapping[str, Any] | None = None
        self._told: Mapping[str, Any] | None = None
        self._val_check: float | None = None
        self._stepped, self._since, self._epoch = 0, 0, 0
        self._loss: torch.Tensor | None = None
        self._is_epoch_new = self._is_trained = self._is_validated = False

    @property
    def run(self) -> Tracker | None:
        """The tracker of the training, while it runs."""
        return self._run

    # --- before the first batch --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move behind the other callbacks, and have the loaders keep their place."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        if trainer.world_size > 1 and type(trainer.strategy) is not DDPStrategy:
            raise Unsupported(
                f"the Trainer has {trainer.world_size} processes by {type(trainer.strategy).__name__}, of which states are not captured:"
                ' use strategy="ddp", where each has the whole model, or devices=1'
            )
        if self._data is not None and self._data.trainer is not trainer:
            raise Conflict("this DatastatesCallback is in a fit of another Trainer: make one for each, with a branch of its own")
        if any(isinstance(each, DatastatesCallback) and each is not self for each in trainer.callbacks):
            raise InvalidInput("the Trainer has two DatastatesCallbacks: each moves one branch, give it one")
        io = trainer.strategy.checkpoint_io
        if isinstance(io, DatastatesCheckpointIO) and trainer.checkpoint_callbacks and io.branch == self.branch and io.is_of(self._given):
            raise InvalidInput(f"checkpoints and captures both go to branch {self.branch!r}: give DatastatesCheckpointIO another branch=")
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        data = self._data = Data(trainer, lambda is_catching_up: self._asked(trainer, is_catching_up))
        process = trainer.strategy.process_dataloader

        def keep(loader: object) -> object:
            loader = process(loader)
            return data.keep(loader) if trainer.training else loader

        trainer.strategy.process_dataloader = keep
        end = trainer.fit_loop.on_run_end

        def end_with_weights() -> None:
            if self._run is not None:
                self._fit.hold_weights()
            end()

        trainer.fit_loop.on_run_end = end_with_weights

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Track, and restore everything to where the branch stands."""
        if self._data is None:
            return
        self._repo = self._given if isinstance(self._given, Repository) else open_repository(self._given)
        self._fit, self._metrics = Fit(trainer, self), Metrics(trainer)
        objects = {
            "model": pl_module,
            **_named("optimizer", trainer.optimizers),
            **_named("scheduler", [each.scheduler for each in trainer.lr_scheduler_configs]),
            "trainer": self._fit,
            "data": self._data,
        }
        config = {**_hyperparameters(trainer, pl_module), **configuration(self._config)}
        start, options = self._start, {**self._options}
        if trainer.ckpt_path is not None:
            if trainer.world_size > 1:
                raise Unsupported(
                    f"ckpt_path={str(trainer.ckpt_path)!r} would give {trainer.world_size} processes the random numbers and the place of"
                    " one of them: leave it out to go on where the branch stands, or give DatastatesCallback start= and a new branch"
                )
            start, options = self._begin_at(trainer.ckpt_path, options)
        own = ("trainer", "data") if trainer.world_size > 1 else ()  # logs, and the place in a share, differ between ranks
        self._run = self._repo.track(branch=self.branch, start=start, config=config, objects=objects, own=own, **options)  # type: ignore[arg-type]
        self._stepped, self._since = trainer.global_step, self._fit.since
        self._stop_again(trainer)
        if self._run.report is not None and any(path.split("/")[0] == "rng" for path in self._run.report.restored):
            self._rng = RngState().state_dict()
        if self._told is not None:
            self._data.load_state_dict(self._told["data"])
            self._rng = self._told["rng"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put back what Lightning clears before it trains, and warn about what cannot be exact."""
        if self._run is None or self._data is None:
            return
        notes = inexact(trainer, pl_module, self._data.loaders)
        if notes:
            _logger.warning("branch %s: a resumed training may differ from one that never stopped: %s", self.branch, "; ".join(notes))
        is_within = self._fit.is_restored and not self._fit.is_between and trainer.fit_loop.restarting
        self._fit.begin()
        self._metrics.fresh()
        for each in self._data.loaders:
            each.claim(is_resumable=True)
        if is_within and trainer.val_check_batch is not None:
            # Lightning validates before it goes on after a batch that is due; everything of that batch was done before the capture
            self._val_check, trainer.val_check_batch = trainer.val_check_batch, math.nan

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note that a state before the next batch is of the end of an epoch."""
        self._is_epoch_new = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that the state before the next batch has the metrics of a validation."""
        self._is_validated = self._run is not None and not trainer.sanity_checking

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what the state of this step will record."""
        if not self._is_trained and self._data is not None:
            for each in self._data.loaders:
                each.claim(is_resumable=False)
        self._is_trained, self._epoch = True, trainer.current_epoch
        found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        share = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1  # Lightning has divided the loss by it
        self._loss = found.detach() * share if isinstance(found, torch.Tensor) and found.numel() == 1 else None

    # --- states ------------------------------------------------------------------------------------------------------------

    def _asked(self, trainer: Any, is_catching_up: bool) -> None:
        """Called when Lightning asks for a batch: the step before it is over."""
        if self._run is None:
            return
        if self._val_check is not None:
            trainer.val_check_batch, self._val_check = self._val_check, None
        is_epoch_new, is_validated = self._is_epoch_new, self._is_validated
        self._is_epoch_new = self._is_validated = False
        if self._rng is not None:
            if not is_catching_up:
                RngState().load_state_dict(self._rng)
                self._rng = None
            return
        has_stepped = self._count(trainer)
        is_due = is_epoch_new if self.every is None else has_stepped and self._since == 0
        if self._is_trained and (is_due or (has_stepped and is_validated)):
            self._capture(trainer, self._run)
        elif has_stepped or is_validated:
            self._metrics.fresh()  # they are of no later state

    def _count(self, trainer: Any) -> bool:
        """Whether the optimizers have stepped since the last call; if so, count it."""
        has_stepped = bool(trainer.global_step != self._stepped)
        self._stepped = trainer.global_step
        if self.every is not None:
            self._since = (self._since + has_stepped) % self.every
        return has_stepped

    def _capture(self, trainer: Any, run: Tracker) -> None:
        self._is_trained = False
        found = self._metrics.fresh()
        if self._loss is not None:
            found.setdefault("loss", self._loss)
        metrics = {name: float(value) for name, value in found.items()}
        self._fit.metrics = {name: (float(value), str(value.dtype).removeprefix("torch.")) for name, value in self._metrics.all().items()}
        self._fit.since = self._since
        self.newest = run.capture(step=trainer.global_step, metrics=metrics, attributes={"epoch": self._epoch})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Capture the end of the training."""
        if self._run is None or self._data is None:
            return
        self._count(trainer)
        if self._is_trained:
            self._fit.is_within = not _is_over(trainer)
            self._fit.is_between = self._data.is_between = not self._fit.is_within
            self._capture(trainer, self._run)
        self._fit.release_weights()

    def state_dict(self) -> dict[str, Any]:
        """The random numbers and the place in the data, which checkpoints that others write lack."""
        if self._run is None or self._data is None:
            return {}
        self._data.is_between = _is_over(trainer := self._data.trainer) and trainer.training
        try:
            return {"rng": RngState().state_dict(), "data": self._data.state_dict()}
        finally:
            self._data.is_between = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the fit that begins continue with the random numbers and the data of a checkpoint."""
        if self._data is not None:  # no fit begins where Lightning validates, tests or predicts
            self._told = state_dict

    # --- the end -----------------------------------------------------------------------------------------------------------

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the branch's head durable."""
        if stage == "fit":
            self._end(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Make what was captured durable; the error is passed on."""
        self._end(trainer, exception)

    def _end(self, trainer: Any, exception: BaseException | None) -> None:
        if self._data is not None and self._data.trainer is not trainer:
            return  # of another Trainer, which was refused
        data, self._data = self._data, None
        run, self._run = self._run, None
        repo, self._repo = self._repo, None
        if data is not None:
            vars(trainer.strategy).pop("process_dataloader", None)
            vars(trainer.fit_loop).pop("on_run_end", None)
        try:
            if run is not None:
                run.__exit__(None if exception is None else type(exception), exception, None)
        finally:
            self._begin_anew()
            if repo is not None and repo is not self._given:
                repo.close()

    def _stop_again(self, trainer: Any) -> None:
        """Leave a training stopped that one of its callbacks had stopped: they look at their own state only after another step."""
        stoppers = self._fit.stoppers()
        if trainer.strategy.reduce_boolean_decision(bool(stoppers), all=False):
            trainer.should_stop = True
            who = ", ".join(stoppers) or "a callback"
            say(f"branch {self.branch}: {who} has stopped this training: to go on, leave it out, or give a Timer more time")

    def _begin_at(self, path: object, options: dict[str, Any]) -> tuple[State | None, dict[str, Any]]:
        """Where a fit begins that Lightning restores by ``ckpt_path``: if that names a state of this repository, the branch forks there."""
        assert self._repo is not None, "it was opened"
        if self._start is not None:
            raise InvalidInput(f"start={self._start!r} and ckpt_path={str(path)!r}: give one of them")
        state = state_at(path, self._repo)
        head = next((ref.state for ref in self._repo.refs() if ref.name == self.branch), None)
        if head is not None and (state is None or state.uid != head):
            raise Conflict(
                f"branch {self.branch!r} exists at {head[:10]}, and ckpt_path={str(path)!r} is another state: leave ckpt_path out to go on"
                " there, or name another branch"
            )
        if state is not None and is_checkpoint(self._repo, state):
            options["only"] = ["model"]  # Lightning restores the rest
        return state, options


def _is_over(trainer: Any) -> bool:
    """Whether every batch of the epoch was trained on."""
    return bool(trainer.fit_loop.batch_idx + 1 >= trainer.num_training_batches or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _named(name: str, found: list[Any]) -> dict[str, object]:
    return {} if not found else {name: found[0] if len(found) == 1 else list(found)}


def _hyperparameters(trainer: Any, module: Any) -> dict[str, Value]:
    """The hyper-parameters of module and datamodule that can be recorded."""
    found: dict[str, Value] = {}
    left: list[str] = []
    for owner in (trainer.datamodule, module):
        for name, value in dict(getattr(owner, "hparams", None) or {}).items():
            try:
                found.update(configuration({name: value}))
            except InvalidInput:
                left.append(str(name))
    if left:
        _logger.info("hyper-parameters that are no plain values are not recorded: %s", ", ".join(left))
    return found
