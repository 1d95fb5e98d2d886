"""A Trainer of transformers or TRL with a lineage: one callback captures its steps, and resumes at
the head of the branch.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[DatastatesCallback("runs")])
    trainer.train()

The same script, started again, resumes where it stopped, bit for bit.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

import datastates
from datastates import Capture, Repository, State, Tracker, values
from datastates.errors import Conflict, InvalidInput, NotFound, Unavailable, Unsupported
from datastates.state.generators import RngState
from datastates.state.geometry import is_storable
from datastates.system.logs import say
from datastates.training.configuration import configuration
from datastates.training.start import origin_of

from .trainer_hooks import LOOP, Hooks, TrainerLoop, trainer_around

_WATCHED = (
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("seed", "data_seed"),
)


def configuration_of(args: Any, more: object) -> dict[str, object]:
    """The arguments of a training by their own names, and what the user adds."""
    found = {
        name: _recordable(name, value)
        for name, value in args.to_dict().items()
        if value is not None
    }
    return {**found, **configuration(more)}


def changes(args: Any, before: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """The arguments that differ from those with which the state was captured: both values, by
    name."""
    now = configuration(configuration_of(args, None))
    return {
        name: (before[name], now[name])
        for name in _WATCHED
        if name in before and name in now and before[name] != now[name]
    }


def _recordable(name: str, value: object) -> object:
    try:
        configuration({name: value})
    except InvalidInput:
        return str(value)[:200]
    return value


try:
    from accelerate.utils import DistributedType
    from transformers import Trainer, TrainerCallback, set_seed
except ImportError as exc:
    raise ImportError(
        "datastates.integrations.transformers needs transformers: pip install"
        " 'datastates[transformers]'"
    ) from exc

_logger = logging.getLogger(__name__)

_ALIKE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Types in which each process has the whole model: it trains alone, or under
DistributedDataParallel."""

_OPTIONS = frozenset(signature(Repository.track).parameters) - {
    "self",
    "more",
    "branch",
    "start",
    "objects",
    "config",
}


# mypy skips transformers
class DatastatesCallback(TrainerCallback):  # type: ignore[misc]
    """Captures each step of the Trainer that it is given to. ``train()`` then begins at the head of
    ``branch``.

    A state has everything on which the next step depends: model, optimizer, schedule, scaler,
    random numbers, and the order of the data with the place in it. It also has the Trainer's own
    state with its log and best metric, and the state of callbacks such as early stopping. It
    includes the evaluation and the log of its step.
    ``trainer.train(resume_from_checkpoint="main~3")`` accepts a revision too.

    ``TrainingArguments`` that differ from those with which the state was trained win over it: the
    learning rate and its schedule, weight decay, betas, and the seed.

    :param repo: the repository, or where it is; it is then opened.
    :param branch: the branch that captures move; one that exists is resumed.
    :param start: the state from which a new branch forks.
    :param every: every n-th step is captured, as are the last step and each step that is evaluated.
    :param replay: whether a training that resumes within an epoch reads the used batches again, so
        that code that draws random numbers while data is read draws the same ones. False skips by
        index: quick, and as exact if no code draws.
    :param folders: whether the Trainer also writes its own checkpoint folders, as ``save_strategy``
        says.
    :param objects: further objects to track, by name, such as an average of the weights.
    :param config: the configuration to record in addition to the ``TrainingArguments``.
    :param options: options of ``Repository.track``, such as ``cadence``, ``retention`` and
        ``resume``. ``only`` says what a fork takes of ``start``; with ``"model"`` the training
        begins with its first step.
    """

    def __init__(
        self,
        repo: Repository | str | Path,
        branch: str = "main",
        *,
        start: str | State | None = None,
        every: int = 1,
        replay: bool = True,
        folders: bool = True,
        objects: Mapping[str, object] | None = None,
        config: object = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - _OPTIONS):
            raise TypeError(
                f"{', '.join(unknown)}: no option of DatastatesCallback or of track. Pass further"
                " objects to track in objects="
            )
        self.branch = values.text(branch, "branch")
        self.start = None if start is None else values.revision(start, "start")
        self._resume = values.flag(options.pop("resume", True), "resume")
        self._only = values.optional(values.patterns)(options.pop("only", None), "only")
        self.every = values.positive(every, "every")
        self.replay, self.folders = values.flag(replay, "replay"), values.flag(folders, "folders")
        self._objects, self._config, self._options = (
            values.named(objects or {}, "objects"),
            config,
            options,
        )
        self.repo = repo if isinstance(repo, Repository) else datastates.open(repo)
        self._run: Tracker | None = None
        self._hooks: Hooks | None = None
        self._loop: TrainerLoop | None = None
        self._begin: State | None = None
        self._back: State | None = None
        self._newest: Capture | None = None
        self._captured = self._begun = 0
        self._metrics: dict[str, float] = {}
        self._is_evaluated = self._is_beginning = self.is_reseeded = False

    @property
    def run(self) -> Tracker | None:
        """The tracker of the training that runs, or ran last; None before the first."""
        return self._run

    @property
    def best(self) -> State | None:
        """The state that ``load_best_model_at_end`` loads; None if the Trainer has none, or does
        not look for one."""
        return (
            None
            if self._loop is None or self._loop.best is None
            else self.repo.state(self._loop.best)
        )

    @property
    def loop(self) -> TrainerLoop:
        """The loop of the Trainer; not part of the public interface."""
        assert self._loop is not None, "a hook is called by a Trainer"
        return self._loop

    def attach(self, trainer: Any) -> None:
        """Attach the callback to ``trainer``. Needed only if it was added later than by
        ``Trainer(callbacks=[…])``, and then before ``train()``.

        :raises Conflict: it belongs to another Trainer.
        :raises InvalidInput: ``trainer`` is not a Trainer, or already has a callback of this kind.
        :raises Unsupported: this version of transformers is not known.
        """
        if not isinstance(trainer, Trainer):
            raise InvalidInput(
                f"trainer is {values.shown(trainer)}: give a Trainer of transformers"
            )
        if any(
            isinstance(each, DatastatesCallback) and each is not self
            for each in trainer.callback_handler.callbacks
        ):
            raise InvalidInput(
                "the Trainer has two DatastatesCallbacks: each moves one branch, give it one"
            )
        if self._hooks is not None and self._hooks.trainer is not trainer:
            raise Conflict(
                "this DatastatesCallback belongs to another Trainer: make one for each"
                " Trainer, with a separate branch"
            )
        if self._hooks is None:
            self._hooks, self._loop = Hooks(trainer, self), TrainerLoop(trainer)
            if all(each is not self for each in trainer.callback_handler.callbacks):
                trainer.add_callback(self)

    # --- where it begins --------------------------------------------------------------------------

    def prepare_start(self, asked: Any, *, trial: object) -> Any:
        """Find where ``train(resume_from_checkpoint=asked)`` begins. Returns the argument that the
        Trainer itself should get."""
        assert self._hooks is not None
        _refuse(self._hooks.trainer, trial)
        self._is_beginning, self.is_reseeded, self._back = True, False, None
        self._captured = self._begun
        is_folder = (
            isinstance(asked, str | os.PathLike) and (Path(asked) / "trainer_state.json").is_file()
        )
        rev = (
            None if is_folder or asked is None or isinstance(asked, bool) else self._revision(asked)
        )
        start = self.start
        if rev is not None:
            if any(ref.name == self.branch for ref in self.repo.refs()):
                self._back = rev
            else:
                start = rev.uid
        origin = origin_of(
            self.repo.core,
            self.branch,
            start,
            resume=self._resume,
            takeover=self._options.get("takeover", False),
            nearest=self._options.get("nearest", False),
        )
        self._begin, self._start = origin.state, start
        if is_folder:
            if self._begin is not None:
                raise Conflict(
                    f"branch {self.branch!r} has states, and {asked} is a folder: choose another"
                    " branch for what comes from it"
                )
            return asked
        begin = self._back or self._begin
        is_whole = origin.is_beyond or self._only is None
        wanted = self._stored_loop(begin) if is_whole and begin is not None else None
        if wanted is None:
            return asked if begin is None else None
        self._hooks.trainer_state, self._hooks.place = TrainerLoop.trainer_state(wanted), wanted
        return None

    def _revision(self, asked: Any) -> State:
        try:
            return self.repo.state(asked)
        except (NotFound, InvalidInput) as exc:
            raise type(exc)(
                f"resume_from_checkpoint is {str(asked)!r}, which is no folder of a checkpoint and"
                f" no state: {exc}"
            ) from exc

    def _stored_loop(self, state: State) -> Any:
        """The Trainer's loop in the state. None if no Trainer captured it: then only its model is
        used."""
        args = self.loop.trainer.args
        rank = args.process_index if state.world_size == args.world_size else 0
        try:
            return self.repo.load(state, only=LOOP, rank=rank)[LOOP]
        except InvalidInput:  # the state has no such part
            return None

    # --- events -----------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called when the Trainer is made."""
        trainer = trainer_around(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called when everything is made and prepared: track it, and restore it to where the
        branch stands."""
        if not self._is_beginning:
            self._begin_late()
        assert self._hooks is not None
        trainer, optimizer, scheduler = self._hooks.trainer, more["optimizer"], more["lr_scheduler"]
        if self._run is not None and self._captured > self._begun:
            raise InvalidInput(
                f"memory ran out after step {self._captured}, and auto_find_batch_size would begin"
                " again with smaller batches: set per_device_train_batch_size, and start again"
            )
        self._end_run(None)
        is_whole = self._hooks.trainer_state is not None
        model, begin = more["model"], self._back or self._begin
        is_reseeded = begin is not None and "seed" in changes(args, begin.config)
        run = self._run = self.repo.track(
            branch=self.branch,
            start=self._start,
            resume=self._resume,
            only=self._only if is_whole or self._begin is None else (self._only or "model"),
            objects={
                **self._objects,
                **_parts(trainer, model, optimizer, scheduler),
                LOOP: self.loop,
            },
            config=configuration_of(args, self._config),
            **{
                "frozen": all(
                    map(is_storable, model.parameters())
                ),  # not if bitsandbytes quantized them
                "hyperparameters": "script",
                **({"rng": "script"} if is_reseeded else {}),
                **self._of_ranks(args.world_size),
            },
        )
        if (run.resumed_from and run.resumed_from.uid) != (self._begin and self._begin.uid):
            raise Conflict(
                f"branch {self.branch!r} was moved while this training began: start it again"
            )
        if self._back is not None and self._back.uid != (run.head and run.head.uid):
            run.restore(self._back)
        self._newest, self._captured, self._begun = None, state.global_step, state.global_step
        self.begin_step()
        if is_whole:
            self._go_on(args, self._back or run.resumed_from)
        if run.group.rank == 0:
            _warn(
                self.branch,
                [
                    *_inexact(args, more["train_dataloader"], self.replay),
                    *_inexact_in_trl(trainer, self._objects),
                ],
            )

    def _of_ranks(self, size: int) -> dict[str, Any]:
        """The options of ``track``.

        With several processes each has its own loop: the loss since the last log, the place in
        its share."""
        own = self._options.get("own", ())
        return (
            self._options
            if size == 1
            else {**self._options, "own": [LOOP, *([own] if isinstance(own, str) else own)]}
        )

    def _begin_late(self) -> None:
        """Attach a callback that was added after the Trainer was made. That is too late if the
        branch has a state."""
        trainer = trainer_around(self)
        origin = origin_of(
            self.repo.core,
            self.branch,
            self.start,
            resume=self._resume,
            takeover=self._options.get("takeover", False),
            nearest=self._options.get("nearest", False),
        )
        if trainer is None or origin.state is not None:
            raise InvalidInput(
                f"this training would begin at step 0, and branch {self.branch!r} should resume"
                " from a state: give the callback to the Trainer as callbacks=[…], or call"
                " callback.attach(trainer) before trainer.train()"
            )
        _refuse(trainer, None)
        self.attach(trainer)
        self._begin, self._start, self._is_beginning = None, self.start, True

    def _go_on(self, args: Any, state: State | None) -> None:
        assert self._hooks is not None
        if state is not None and args.load_best_model_at_end:
            self._find_best(state)
        self._hooks.rng = RngState().state_dict()
        changed = {} if state is None else changes(args, state.config)
        self.is_reseeded = bool(changed.keys() & {"seed", "data_seed"})
        if "seed" in changed:
            set_seed(args.seed)
            self._hooks.rng = RngState().state_dict()
        if changed and self._run is not None and self._run.group.rank == 0:
            said = ", ".join(
                f"{name} {before!r} -> {now!r}" for name, (before, now) in changed.items()
            )
            say(f"branch {self.branch}: {said}, as TrainingArguments say now")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the beginning of the epoch's data, so that a resume can return to it."""
        if self._hooks is not None:
            self._hooks.begin_epoch(more["train_dataloader"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note that the next state resumes with another epoch."""
        if self._hooks is not None:
            self._hooks.end_epoch(control)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Take numbers of the log as metrics of the state of this step."""
        if self._is_beginning:
            self._metrics.update(_numbers(logs or {}))

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Take numbers of the evaluation likewise; the step is captured."""
        if self._is_beginning:
            self._metrics.update(_numbers(metrics or {}))
            self._is_evaluated = True

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record the last states, and restore the best model."""
        self.end(None)
        if self._run is None or not args.load_best_model_at_end or state.best_global_step is None:
            return
        best, is_loaded = self.best, _has_folder(state)
        if best is None or best.step != state.best_global_step:
            if not is_loaded:
                _logger.warning(
                    "the best model, of step %s, is not loaded: it has no state",
                    state.best_global_step,
                )
            return
        try:
            self.repo.restore(best, model=more["model"], only="model", group=self._run.group)
        except Unavailable as exc:
            if not is_loaded:
                _logger.warning(
                    "the best model, of step %s, is not loaded: %s", state.best_global_step, exc
                )

    # --- captures ---------------------------------------------------------------------------------

    def capture_if_due(self, *, is_end: bool = False) -> None:
        """Capture the newest step if it is complete, was not captured, and is due.

        Name its state if it is the best so far."""
        assert self._hooks is not None
        run, trainer = self._run, self._hooks.trainer
        state, step = trainer.state, trainer.state.global_step
        if run is None or not self._is_beginning or step == self._begun:
            return
        if step > self._captured and (is_end or self._is_evaluated or step % self.every == 0):
            self._newest, self._captured = run.capture(step=step, metrics=self._metrics), step
        newest, is_best = (
            self._newest,
            trainer.args.load_best_model_at_end and state.best_global_step == step,
        )
        if (
            is_best
            and newest is not None
            and newest.step == step
            and newest.uid != self.loop.best
            and not newest.is_skipped
        ):
            self._keep_best(newest.wait())

    def begin_step(self) -> None:
        """Called when the next step begins: what is logged from here on is of that step."""
        self._metrics, self._is_evaluated = {}, False

    def _find_best(self, begun: State) -> None:
        """Find the best state among ``begun`` and its ancestors. ``begun`` does not record that it
        is the best itself: that was found only after its capture.
        """
        step = self.loop.trainer.state.best_global_step
        if step is None:
            return
        with suppress(NotFound):
            found = self.repo.state(f"{begun.uid}@step:{step}")
            if found.step == step:
                self._keep_best(found)

    def _keep_best(self, state: State) -> None:
        """Name the state with a ref, so that it stays in memory or on disk."""
        name = f"best/{self.branch}"
        self.loop.best = state.uid
        if self._run is None or self._run.group.rank:
            return  # rank 0 names it for all
        before = next((ref.state for ref in self.repo.refs() if ref.name == name), None)
        if before is None:
            self.repo.tag(name, state, message="the best model so far")
        elif before != state.uid:
            self.repo.move(name, state, expected=before)

    def end(self, error: BaseException | None) -> None:
        """Called when the training is over, or ``error`` broke it off."""
        self._is_beginning = False
        self._end_run(error)

    def _end_run(self, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.__exit__(None if error is None else type(error), error, None)


def _parts(trainer: Any, model: Any, optimizer: Any, scheduler: Any) -> dict[str, object]:
    scaler = getattr(trainer.accelerator, "scaler", None)
    found = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return found if scaler is None else {**found, "scaler": scaler}


def _refuse(trainer: Any, trial: object) -> None:
    """Refuse what one state cannot hold, or one branch cannot follow."""
    kinds = [
        kind for kind in ("deepspeed", "fsdp") if getattr(trainer, f"is_{kind}_enabled", False)
    ]
    if trainer.accelerator.distributed_type not in _ALIKE:
        kinds.append(trainer.accelerator.distributed_type.value)
    if kinds:
        raise Unsupported(
            f"this Trainer trains with {kinds[0]}, which divides the model among processes: train"
            " in one process, or in several that torchrun starts, where each has the whole model"
        )
    if trial is not None:
        raise Unsupported(
            "hyperparameter_search trains many variants with one Trainer: give each a Trainer, and"
            " a branch"
        )


def _has_folder(state: Any) -> bool:
    """Whether the Trainer has loaded the best model from one of its folders."""
    folder = state.best_model_checkpoint
    return (
        folder is not None
        and Path(folder).is_dir()
        and Path(folder).name.endswith(f"-{state.best_global_step}")
    )


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    plain = {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) or hasattr(value, "item")
    }
    return {
        name: float(value)
        for name, value in plain.items()
        if not isinstance(value, bool) and _is_one(value)
    }


def _is_one(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        or getattr(value, "size", None) == 1
        or math.prod(getattr(value, "shape", (0,))) == 1
    )


def _inexact(args: Any, loader: Any, replay: bool) -> Iterable[str]:
    """What keeps a resumed training from repeating this one, each with what to do about it."""
    if args.ignore_data_skip:
        yield "ignore_data_skip begins a resumed epoch with its first batch again: leave it False"
    if args.dataloader_num_workers and args.dataloader_persistent_workers:
        yield (
            "persistent workers remember the random numbers of earlier epochs:"
            " dataloader_persistent_workers=False, if data draws any"
        )
    if args.dataloader_num_workers and not getattr(args, "dataloader_in_order", True):
        yield "dataloader_in_order=False hands batches out as they come: leave it True"
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        yield (
            "the data is streamed: a resumed epoch reads it from its beginning and drops what was"
            " used, so it has to give the same items in the same order again; a dataset with a"
            " length and __getitem__ knows its place"
        )
    if not replay and args.dataloader_num_workers:
        yield "replay=False gives workers other random numbers: leave it True, if data draws any"
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size changes the batches when memory runs out: set"
            " per_device_train_batch_size to what it found"
        )


def _inexact_in_trl(trainer: Any, tracked: Mapping[str, object]) -> Iterable[str]:
    """Likewise, of what only TRL's trainers have."""
    args = trainer.args
    uses = getattr(args, "num_iterations", 1) * (getattr(args, "steps_per_generation", None) or 1)
    if args.gradient_accumulation_steps % uses:
        yield (
            f"each generation is used for {uses} batches, over several steps, and is in no state:"
            " num_iterations * steps_per_generation has to divide gradient_accumulation_steps"
        )
    reference = getattr(trainer, "ref_model", None)
    if getattr(args, "sync_ref_model", False) and all(
        each is not reference for each in tracked.values()
    ):
        yield (
            'sync_ref_model moves the reference model, which is in no state: objects={"reference":'
            " trainer.ref_model}"
        )


def _warn(branch: str, said: Iterable[str]) -> None:
    if texts := list(said):
        _logger.warning(
            "branch %s: a resumed training may differ from one that never stopped (%s)",
            branch,
            "; ".join(texts),
        )
