"""A callback that captures what a Trainer trains at every step, and resumes it bit for bit.

It takes a state when Lightning requests the next batch. By then everything that belongs to a step
has happened, including validation and the hooks of every callback. It takes the last state at the
end of the training.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypedDict, Unpack

import torch
from torch.nn.parallel import DistributedDataParallel

from datastates import values
from datastates.config import BackPressure, OnFailure
from datastates.engine.handle import Capture
from datastates.errors import Conflict, InvalidInput, Unsupported
from datastates.lineage.states import Revision, State
from datastates.policy.contract import Policy
from datastates.policy.retention import Retention
from datastates.repository import Repository
from datastates.repository import open as open_repository
from datastates.state.generators import RngState
from datastates.system.logs import say
from datastates.training.configuration import configuration
from datastates.training.tracker import Tracker
from datastates.values import Value

from .checkpoint_io import (
    Callback,
    DatastatesCheckpointIO,
    DDPStrategy,
    EarlyStopping,
    LightningModule,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
    check_repository,
    head_of,
    is_checkpoint,
    state_at,
    version,
)
from .data import Data, ResumableLoader


class Fit:
    """The loops of one Trainer, its other callbacks, precision, datamodule, and what hooks add
    to a checkpoint."""

    is_optional = True  # a state that another loop captured does not have it

    def __init__(self, trainer: Any, own: object) -> None:
        self._trainer, self._own = trainer, own
        self.metrics: dict[str, tuple[float, str]] = {}
        self.is_between = self.is_within = self.is_restored = False
        self.since = 0
        self._accumulates = self._made_to_accumulate = trainer.accumulate_grad_batches
        self._weights: Mapping[str, Any] | None = None
        self._gives_buffers: bool | None = None

    def state_dict(self) -> dict[str, object]:
        """Plain values, and the states of callbacks and hooks."""
        trainer = self._trainer
        return {
            "loops": self._loops(),
            "callbacks": {
                each.state_key: state for each in self._others() if (state := each.state_dict())
            },
            "precision": _by_name(trainer.precision_plugin),
            "datamodule": {} if trainer.datamodule is None else _by_name(trainer.datamodule),
            "added": self._added(),
            "metrics": {name: list(found) for name, found in self.metrics.items()},
            "accumulate": trainer.accumulate_grad_batches,
            "made_to_accumulate": self._made_to_accumulate,
            "is_between": self.is_between,
            "since": self.since,
            "gives_buffers": (
                None if (ddp := self._ddp()) is None else ddp.require_forward_param_sync
            ),
            **({} if self._weights is None else {"weights": self._weights}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything that the Trainer does not change before it trains. ``begin`` restores
        the other parts."""
        trainer = self._trainer
        self._hand_over(state["added"])
        for each in self._others():
            if each.state_key in state["callbacks"]:
                each.load_state_dict(deepcopy(state["callbacks"][each.state_key]))
        for owner, stored in (
            (trainer.precision_plugin, state["precision"]),
            (trainer.datamodule, state["datamodule"]),
        ):
            if type(owner).__qualname__ in stored:
                owner.load_state_dict(stored[type(owner).__qualname__])
        trainer.fit_loop.load_state_dict(deepcopy(state["loops"]))
        self.metrics = {name: (value, dtype) for name, (value, dtype) in state["metrics"].items()}
        self.is_between, self.is_restored = state["is_between"], True
        self.since, self._weights = state.get("since", 0), state.get("weights")
        self._gives_buffers = state.get("gives_buffers")
        if state.get("made_to_accumulate", self._made_to_accumulate) == self._made_to_accumulate:
            # a Trainer that was made with another number keeps that number
            self._accumulates = state["accumulate"]

    def begin(self) -> None:
        """Put back what Lightning cleared meanwhile, and what only a training needs; called when
        it is about to train."""
        if not self.is_restored:
            return
        if self.is_between:
            self._trainer.fit_loop.epoch_loop.restarting = (
                False  # otherwise a training by steps would resume in an epoch that is over
            )
            self.is_between = False
        if self._weights is not None:
            module = self._trainer.lightning_module
            module.load_state_dict(self._weights, strict=module.strict_loading)
            self._weights = None
        ddp = self._ddp()
        if ddp is not None and self._gives_buffers is not None:
            ddp.require_forward_param_sync = self._gives_buffers
        self._trainer.accumulate_grad_batches = self._accumulates
        found, device = self._trainer.callback_metrics, self._trainer.lightning_module.device
        for name, (value, dtype) in self.metrics.items():
            found[name] = torch.tensor(value, dtype=getattr(torch, dtype), device=device)

    def hold_weights(self) -> None:
        """Keep the weights for the next capture if the end of the training puts their average in
        their place: more epochs begin with them.
        """
        if any(
            isinstance(each, WeightAveraging | StochasticWeightAveraging) for each in self._others()
        ):
            self._weights = deepcopy(self._trainer.lightning_module.state_dict())

    def release_weights(self) -> None:
        self._weights = None

    def stoppers(self) -> list[str]:
        """The callbacks that have stopped the training."""
        return [
            type(each).__name__
            for each in self._others()
            if self.is_restored and _has_stopped(each)
        ]

    def _ddp(self) -> DistributedDataParallel | None:
        """The wrapper around the model, if there is one. It may copy the buffers of rank 0 to all
        ranks in the next forward. A new wrapper does. After a step of manual optimization, each
        rank keeps its own buffers.
        """
        model = self._trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None

    def _loops(self) -> dict[str, object]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        # Data has the place
        state["state_dict"] = {
            key: value for key, value in state["state_dict"].items() if key != "combined_loader"
        }
        if self.is_within:
            # Lightning counts the epoch as done, but a resumed run begins with its other batches
            for count in state["epoch_progress"].values():
                for name in ("processed", "completed"):
                    count[name] -= 1
        return state

    def _others(self) -> Iterator[Any]:
        return (each for each in self._trainer.callbacks if each is not self._own)

    def _added(self) -> dict[str, object]:
        """The entries that hooks on checkpoints add to one, or replace."""
        trainer, module = self._trainer, self._trainer.lightning_module
        hooked = [
            each
            for each in self._others()
            if type(each).on_save_checkpoint is not Callback.on_save_checkpoint
        ]
        is_hooked = type(module).on_save_checkpoint is not LightningModule.on_save_checkpoint
        if not hooked and not is_hooked:
            return {}
        usual = self._checkpoint()
        checkpoint = {**usual}
        for each in hooked:
            each.on_save_checkpoint(trainer, module, checkpoint)
        if is_hooked:
            module.on_save_checkpoint(checkpoint)
        return {
            key: value
            for key, value in checkpoint.items()
            if key not in usual or value is not usual[key]
        }

    def _hand_over(self, added: Mapping[str, Any]) -> None:
        """Call the hooks that take from a checkpoint what others put there."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = {**self._checkpoint(), **added}
        for each in self._others():
            each.on_load_checkpoint(trainer, module, checkpoint)
        module.on_load_checkpoint(checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        """A checkpoint as hooks see it. Its other entries are in the state."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": version,
            "state_dict": trainer.lightning_module.state_dict(),
            "callbacks": {},
        }


class Metrics:
    """The metrics that were logged since the last call."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._seen: dict[str, torch.Tensor] = {}

    def all(self) -> dict[str, torch.Tensor]:
        """Every number that was logged, with its newest value."""
        found = self._trainer.callback_metrics.items()
        return {
            name: value.detach()
            for name, value in found
            if isinstance(value, torch.Tensor) and value.numel() == 1
        }

    def fresh(self) -> dict[str, torch.Tensor]:
        """The numbers that were logged since the last call.

        Lightning also returns older numbers, such as the results of the last validation. They are
        still in the same memory.
        """
        found = self.all()
        fresh = {
            name: value
            for name, value in found.items()
            if name not in self._seen or self._seen[name].data_ptr() != value.data_ptr()
        }
        self._seen = found
        return fresh


def _has_stopped(callback: object) -> bool:
    if isinstance(callback, EarlyStopping):
        return bool(callback.stopping_reason.value)
    if isinstance(callback, Timer):
        left: float | None = callback.time_remaining()
        return left is not None and left <= 0
    return False


def _by_name(owner: Any) -> dict[str, Any]:
    """The state of an object under the name of its class, as in Lightning's checkpoints; empty
    if it has none."""
    state = owner.state_dict()
    return {type(owner).__qualname__: state} if state else {}


# The parts of a fit that cannot be repeated exactly after a resume, each with what to do about
# it.


def inexact(trainer: Any, module: Any, loaders: Sequence[ResumableLoader]) -> list[str]:
    """One phrase for each such part: its name, what happens, and the remedy."""
    return [*_of_data(trainer, loaders), *_of_loop(trainer, module)]


def _of_data(trainer: Any, loaders: Sequence[ResumableLoader]) -> Iterator[str]:
    for index, kept in enumerate(loaders):
        name = "the train dataloader" if len(loaders) == 1 else f"train dataloader {index}"
        loader = kept.loader
        if isinstance(loader, Iterator):
            yield (
                f"{name} is an iterator, whose place cannot be found again: give what it iterates"
                " over"
            )
        elif getattr(loader, "persistent_workers", False):
            yield (
                f"{name} keeps its workers, where a dataset that draws random numbers draws others:"
                " persistent_workers=False repeats them"
            )
    if trainer.reload_dataloaders_every_n_epochs > 1:
        yield (
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs} is"
            " counted from where a training resumes: use 1"
        )


def _of_loop(trainer: Any, module: Any) -> Iterator[str]:
    step = getattr(module, "training_step", None)
    if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
        yield (
            "training_step takes dataloader_iter, so states are taken in the middle of a step: take"
            " the batch"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval is a time, and the clock is not restored: give a count of batches"
    if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
        yield (
            "StochasticWeightAveraging has a schedule of its own, which a resumed training does not"
            " always repeat: use WeightAveraging"
        )
    finetuning = [
        type(each).__name__
        for each in trainer.callbacks
        if any(kind.__name__ == "BaseFinetuning" for kind in type(each).__mro__)
    ]
    if finetuning:
        yield (
            f"{', '.join(finetuning)} changes the optimizer's groups before a state is restored:"
            " resume such a training by ckpt_path"
        )


_logger = logging.getLogger(__name__)


class TrackOptions(TypedDict, total=False):
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


class DatastatesCallback(Callback):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """Captures every step of ``trainer.fit`` as a state of a branch. The same script, started
    again, resumes where it stopped.

        trainer = L.Trainer(max_epochs=3, callbacks=[DatastatesCallback("runs", branch="main")])
        trainer.fit(model, loader)

    A branch that exists is resumed. A new one begins without a state, or forks from ``start``. A
    state has ``model``, ``optimizer``, ``scheduler`` (lists, where there are several), ``trainer``
    (loops, callbacks, precision, datamodule), ``data`` and ``rng``. ``newest`` is the newest
    capture. The processes of ``strategy="ddp"`` capture each state together.
    """

    @values.checked
    def __init__(
        self,
        repo: Repository | str | os.PathLike[str],
        *,
        branch: values.Text = "main",
        start: Revision | None = None,
        every: values.Positive | None = 1,
        config: object = None,
        **options: Unpack[TrackOptions],
    ) -> None:
        """Make a callback for one Trainer.

        :param repo: the repository, or its folder, which is opened for each ``fit``.
        :param branch: the branch that captures move.
        :param start: the state from which a new branch forks.
        :param every: capture every n-th step of the optimizers. None means the end of each epoch. A
            step after which Lightning validates and the end of the training are always captured.
        :param config: the configuration of this training, in addition to the hyper-parameters of
            module and datamodule.
        :param options: as in ``Repository.track``.
        """
        super().__init__()
        check_repository(repo)
        if unknown := sorted(options.keys() - TrackOptions.__annotations__):
            raise TypeError(f"DatastatesCallback has no option {', '.join(unknown)}")
        self._given, self.branch, self._start, self.every = repo, branch, start, every
        self._config, self._options = config, options
        self._repo: Repository | None = None
        self._run: Tracker | None = None
        self.newest: Capture | None = None
        self._data: Data | None = None
        self._restart_polling()

    def _restart_polling(self) -> None:
        self._rng: Mapping[str, Any] | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._val_check: float | None = None
        self._stepped, self._since, self._epoch = 0, 0, 0
        self._loss: torch.Tensor | None = None
        self._is_epoch_new = self._is_trained = self._is_validated = False

    @property
    def run(self) -> Tracker | None:
        """The tracker of the training, while it runs."""
        return self._run

    # --- before the first batch -------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move behind the other callbacks, and have the loaders keep their place."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        if trainer.world_size > 1 and type(trainer.strategy) is not DDPStrategy:
            raise Unsupported(
                f"the Trainer has {trainer.world_size} processes by"
                f" {type(trainer.strategy).__name__}, of which states are not captured: use"
                ' strategy="ddp", where each has the whole model, or devices=1'
            )
        if self._data is not None and self._data.trainer is not trainer:
            raise Conflict(
                "this DatastatesCallback is in a fit of another Trainer: make one for each"
                " Trainer, with a separate branch"
            )
        if any(
            isinstance(each, DatastatesCallback) and each is not self for each in trainer.callbacks
        ):
            raise InvalidInput(
                "the Trainer has two DatastatesCallbacks: each moves one branch, give it one"
            )
        io = trainer.strategy.checkpoint_io
        if (
            isinstance(io, DatastatesCheckpointIO)
            and trainer.checkpoint_callbacks
            and io.branch == self.branch
            and io.is_of(self._given)
        ):
            raise InvalidInput(
                f"checkpoints and captures both go to branch {self.branch!r}: give"
                " DatastatesCheckpointIO another branch="
            )
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        data = self._data = Data(
            trainer, lambda is_catching_up: self._on_request(trainer, is_catching_up)
        )
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
        self._repo = (
            self._given if isinstance(self._given, Repository) else open_repository(self._given)
        )
        self._fit, self._metrics = Fit(trainer, self), Metrics(trainer)
        objects = {
            "model": pl_module,
            **_named("optimizer", trainer.optimizers),
            **_named("scheduler", [each.scheduler for each in trainer.lr_scheduler_configs]),
            "trainer": self._fit,
            "data": self._data,
        }
        config = {**_hyperparameters(trainer, pl_module), **configuration(self._config)}
        start, options = self._start, self._options.copy()
        if trainer.ckpt_path is not None:
            if trainer.world_size > 1:
                raise Unsupported(
                    f"ckpt_path={str(trainer.ckpt_path)!r} would give {trainer.world_size}"
                    " processes the random numbers and the data position of one of them: leave"
                    " ckpt_path out to resume from the branch, or pass start= and a new branch to"
                    " DatastatesCallback"
                )
            start, options = self._begin_at(trainer.ckpt_path, options)
        # logs, and the place in a share, differ between ranks
        own = ("trainer", "data") if trainer.world_size > 1 else ()
        self._run = self._repo.track(
            branch=self.branch,
            start=start,
            config=config,
            objects=objects,
            own=own,
            **options,
        )
        self._stepped, self._since = trainer.global_step, self._fit.since
        self._stop_again(trainer)
        if self._run.report is not None and any(
            path.split("/")[0] == "rng" for path in self._run.report.restored
        ):
            self._rng = RngState().state_dict()
        if self._loaded is not None:
            self._data.load_state_dict(self._loaded["data"])
            self._rng = self._loaded["rng"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put back what Lightning clears before it trains, and warn about what cannot be exact."""
        if self._run is None or self._data is None:
            return
        notes = inexact(trainer, pl_module, self._data.loaders)
        if notes:
            _logger.warning(
                "branch %s: a resumed training may differ from one that never stopped (%s)",
                self.branch,
                "; ".join(notes),
            )
        is_within = (
            self._fit.is_restored and not self._fit.is_between and trainer.fit_loop.restarting
        )
        self._fit.begin()
        self._metrics.fresh()
        for each in self._data.loaders:
            each.claim(is_resumable=True)
        if is_within and trainer.val_check_batch is not None:
            # on resume, Lightning validates again if the last batch was due for validation; that
            # validation was done before the capture
            self._val_check, trainer.val_check_batch = trainer.val_check_batch, math.nan

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Note that a state before the next batch is of the end of an epoch."""
        self._is_epoch_new = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that the state before the next batch has the metrics of a validation."""
        self._is_validated = self._run is not None and not trainer.sanity_checking

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note what the state of this step will record."""
        if not self._is_trained and self._data is not None:
            for each in self._data.loaders:
                each.claim(is_resumable=False)
        self._is_trained, self._epoch = True, trainer.current_epoch
        found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # Lightning divides the loss by the number of accumulated batches
        share = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._loss = (
            found.detach() * share
            if isinstance(found, torch.Tensor) and found.numel() == 1
            else None
        )

    # --- states -----------------------------------------------------------------------------------

    def _on_request(self, trainer: Any, is_catching_up: bool) -> None:
        """Called when Lightning requests a batch: the step before it is over."""
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
        self._fit.metrics = {
            name: (float(value), str(value.dtype).removeprefix("torch."))
            for name, value in self._metrics.all().items()
        }
        self._fit.since = self._since
        self.newest = run.capture(
            step=trainer.global_step, metrics=metrics, attributes={"epoch": self._epoch}
        )

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
        """The random numbers and the place in the data, which checkpoints that others write
        lack."""
        if self._run is None or self._data is None:
            return {}
        self._data.is_between = _is_over(trainer := self._data.trainer) and trainer.training
        try:
            return {"rng": RngState().state_dict(), "data": self._data.state_dict()}
        finally:
            self._data.is_between = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the fit that begins continue with the random numbers and the data of a
        checkpoint."""
        if self._data is not None:  # no fit begins where Lightning validates, tests or predicts
            self._loaded = state_dict

    # --- the end ----------------------------------------------------------------------------------

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the branch's head durable."""
        if stage == "fit":
            self._end(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Make what was captured durable; the error is passed on."""
        self._end(trainer, exception)

    def _end(self, trainer: Any, exception: BaseException | None) -> None:
        if self._data is not None and self._data.trainer is not trainer:
            return  # the end of a fit of another Trainer, which was refused
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
            self._restart_polling()
            if repo is not None and repo is not self._given:
                repo.close()

    def _stop_again(self, trainer: Any) -> None:
        """Leave a training stopped that one of its callbacks had stopped: they look at their own
        state only after another step."""
        stoppers = self._fit.stoppers()
        if trainer.strategy.reduce_boolean_decision(bool(stoppers), all=False):
            trainer.should_stop = True
            who = ", ".join(stoppers) or "a callback"
            say(
                f"branch {self.branch}: {who} has stopped this training: to go on, leave it out, or"
                " give a Timer more time"
            )

    def _begin_at(self, path: object, options: TrackOptions) -> tuple[State | None, TrackOptions]:
        """The start of a fit that Lightning restores by ``ckpt_path``. If the path names a state of
        this repository, the branch forks from it."""
        assert self._repo is not None, "it was opened"
        if self._start is not None:
            raise InvalidInput(
                f"start={self._start!r} and ckpt_path={str(path)!r}: give one of them"
            )
        state = state_at(path, self._repo)
        head = head_of(self._repo, self.branch)
        if head is not None and (state is None or state.uid != head):
            raise Conflict(
                f"branch {self.branch!r} exists at {head[:10]}, and ckpt_path={str(path)!r} is"
                " another state: leave ckpt_path out to resume there, or name another branch"
            )
        if state is not None and is_checkpoint(state):
            options["only"] = ["model"]  # Lightning restores the other objects
        return state, options


def _is_over(trainer: Any) -> bool:
    """Whether every batch of the epoch was trained on."""
    return bool(
        trainer.fit_loop.batch_idx + 1 >= trainer.num_training_batches
        or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    )


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
        _logger.info(
            "hyper-parameters that are no plain values are not recorded: %s", ", ".join(left)
        )
    return found
