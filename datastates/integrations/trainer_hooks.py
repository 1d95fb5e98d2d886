"""Hooks in one Trainer's loop where transformers calls no callback, and the search for the Trainer
that a callback belongs to.

A callback cannot set where a Trainer begins: the loop counts epochs and batches in local variables,
which it reads from a checkpoint's folder. ``Hooks`` therefore override methods of the one Trainer
that has the callback, as a subclass would. They do not change its class.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import EarlyStoppingCallback, Trainer, TrainerControl
from transformers.trainer_callback import ExportableState

from datastates.errors import Unsupported
from datastates.state.generators import RngState
from datastates.state.loaders import parts_of, put_mark
from datastates.state.passes import Pass

if TYPE_CHECKING:
    from .transformers import DatastatesCallback

LOOP = "trainer"
"""The top-level name under which a state records where its Trainer stood."""

_LEAST_CAPACITY = 4096
_SUMS = "_metrics"
_TOKENS = "_total_train_tokens"


class TrainerLoop:
    """The loop of one Trainer: its ``TrainerState``, control and callbacks, the loss since the last
    log, the place in the data.

    ``epoch`` is the epoch that runs, or ran last. ``turn`` is its pass over the data, or None
    between two epochs; ``left`` is then what the last pass leaves for the next. ``before`` holds
    how many batches were used before the newest step, and the random numbers then. ``best`` is the
    uid of the best state. ``load_state_dict`` does not restore ``TrainerState``: the Trainer itself
    reads it, from ``trainer_state``.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.epoch = -1
        self.turn: Pass | None = None
        self.left: Mapping[str, Any] = {}
        self.before: tuple[int, Mapping[str, Any]] | None = None
        self.best: str | None = None
        self._history = _History()

    @property
    def form(self) -> list[object]:
        """The settings that decide what a count of batches means."""
        args = self.trainer.args
        found: list[object] = [
            self.trainer._train_batch_size,
            args.gradient_accumulation_steps,
            args.dataloader_drop_last,
        ]
        return found if args.world_size == 1 else [*found, args.world_size]

    def state_dict(self) -> dict[str, object]:
        """Plain values, and three small tensors."""
        trainer = self.trainer
        history, length = self._history.written(trainer.state.log_history)
        return {
            "state": json.dumps(_plain_state(trainer), default=_plain),
            "history": history,
            "history_length": length,
            "tr_loss": trainer._tr_loss,
            "last_logged": trainer._globalstep_last_logged,
            "flos": float(trainer.current_flos),
            "meters": _meters(trainer),
            "epoch": self.epoch + (self.turn is None),
            "place": None if self.turn is None else self.turn.place,
            "before": None if self.turn is None else self.before,
            "left": dict(self.left),
            "form": self.form,
            "best": self.best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back the sums that the Trainer keeps between two logs.

        The Trainer has read its ``TrainerState``, and is about to begin."""
        trainer = self.trainer
        trainer._tr_loss = state["tr_loss"].detach().clone().to(trainer._tr_loss.device)
        # the loss before this call does not count in its mean
        trainer._total_loss_scalar = -float(trainer._tr_loss)
        trainer._globalstep_last_logged = state["last_logged"]
        trainer.current_flos = state["flos"]
        self.best = state["best"]
        _put_meters(trainer, json.loads(state["meters"]))
        for callback, attributes in _saved_callbacks(trainer, json.loads(state["state"])):
            vars(callback).update(attributes)

    @staticmethod
    def trainer_state(state: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the ``TrainerState`` that a stored loop holds."""
        lines = state["history"].numpy().tobytes()[: state["history_length"]].splitlines()
        return {**json.loads(state["state"]), "log_history": [json.loads(line) for line in lines]}


class _History:
    """The log as lines of JSON in one tensor. Existing lines are not written again, and the
    capacity doubles, so that the layout stays.
    """

    def __init__(self) -> None:
        self._tensor = torch.zeros(_LEAST_CAPACITY, dtype=torch.uint8)
        self._length = self._count = 0
        self._log: object = None

    def written(self, log: list[dict[str, Any]]) -> tuple[torch.Tensor, int]:
        """The tensor, and how much of it is used."""
        if log is not self._log or len(log) < self._count:
            self._log, self._length, self._count = log, 0, 0
        if len(log) > self._count:
            added = "".join(
                json.dumps(entry, default=_plain) + "\n" for entry in log[self._count :]
            ).encode()
            self._reserve(self._length + len(added))
            self._tensor[self._length : self._length + len(added)] = torch.frombuffer(
                bytearray(added), dtype=torch.uint8
            )
            self._length, self._count = self._length + len(added), len(log)
        return self._tensor, self._length

    def _reserve(self, size: int) -> None:
        capacity = len(self._tensor)
        while capacity < size:
            capacity *= 2
        if capacity > len(self._tensor):
            self._tensor = torch.cat(
                [self._tensor, torch.zeros(capacity - len(self._tensor), dtype=torch.uint8)]
            )


def _plain_state(trainer: Any) -> dict[str, Any]:
    state = {
        each.name: getattr(trainer.state, each.name)
        for each in dataclasses.fields(trainer.state)
        if each.name != "log_history"
    }
    return {**state, "stateful_callbacks": _callback_states(trainer)}


def _callback_states(trainer: Any) -> dict[str, Any]:
    """The callbacks' states in the Trainer's own form: one state under the name of a class, or a
    list of several."""
    found: dict[str, list[Any]] = {}
    for callback in _exportable(trainer):
        found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _exportable(trainer: Any) -> list[Any]:
    return [
        each
        for each in (*trainer.callback_handler.callbacks, trainer.control)
        if isinstance(each, ExportableState)
    ]


def _saved_callbacks(trainer: Any, state: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The callbacks, with the attributes that each had reached; what they were made with stays
    as it is now."""
    saved = {
        name: [*states] if isinstance(states, list) else [states]
        for name, states in state["stateful_callbacks"].items()
    }
    callbacks = [each for each in _exportable(trainer) if not isinstance(each, TrainerControl)]
    return [
        (each, waiting.pop(0)["attributes"])
        for each in callbacks
        if (waiting := saved.get(type(each).__name__))
    ]


def _meters(trainer: Any) -> str:
    """The sums that TRL's trainers keep between two logs."""
    found = {name: getattr(trainer, name) for name in (_SUMS, _TOKENS) if hasattr(trainer, name)}
    try:
        return json.dumps(found)
    except (TypeError, ValueError):  # another trainer's own attribute, of another kind
        return "{}"


def _put_meters(trainer: Any, found: Mapping[str, Any]) -> None:
    live = getattr(trainer, _SUMS, {})
    for part, sums in found.get(_SUMS, {}).items():
        if isinstance(sums, dict) and part in live:
            live[part].clear()
            live[part].update(sums)
    if _TOKENS in found and hasattr(trainer, _TOKENS):
        setattr(trainer, _TOKENS, found[_TOKENS])


def _plain(value: Any) -> object:
    """The plain number of a NumPy number, or of a tensor of one element."""
    return value.item() if callable(getattr(value, "item", None)) else str(value)


_logger = logging.getLogger(__name__)

_HOOKED = (
    *(
        "train",
        "_load_from_checkpoint",
        "_init_training_state",
        "_load_rng_state",
        "get_batch_samples",
    ),
    *("_maybe_log_save_evaluate", "_save_checkpoint"),
)
_FILE = "trainer_state.json"


class Hooks:
    """Hooks over the methods of ``trainer``. Each method still does its work, and only that while
    the Trainer does not have the callback. Everything belongs to the training thread.

    ``trainer_state`` is where the Trainer should begin, in the form of its ``trainer_state.json``.
    None: it begins from nothing. ``rng`` holds the random numbers of the restored state until the
    loop has reached the place where it was captured. ``folder`` is the checkpoint's folder in its
    place.
    """

    def __init__(self, trainer: Any, callback: DatastatesCallback) -> None:
        missing = [name for name in _HOOKED if not hasattr(trainer, name)]
        if missing:
            raise Unsupported(
                f"the Trainer of transformers {transformers.__version__} has no {missing[0]}:"
                " datastates works with 5.4 and newer, and was tested up to 5.23"
            )
        self.trainer, self.callback = trainer, callback
        self.folder: str | None = None
        self.trainer_state: dict[str, Any] | None = None
        self.place: dict[str, Any] = {}
        self.rng: dict[str, object] | None = None
        self._replay: dict[str, Any] | None = None
        self._replayed: Iterator[Any] | None = None
        self._stands_for: object = None
        self._begun_after = 0
        self._is_after_epoch = False
        for name in _HOOKED:
            own, hook = getattr(trainer, name), getattr(self, name.strip("_"))
            setattr(trainer, name, functools.wraps(own)(functools.partial(self._call, own, hook)))

    def _call(self, own: Any, hook: Any, *args: Any, **options: Any) -> Any:
        is_followed = any(each is self.callback for each in self.trainer.callback_handler.callbacks)
        return hook(own, *args, **options) if is_followed else own(*args, **options)

    # --- where it begins --------------------------------------------------------------------------

    def train(
        self, own: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Begin at the head of the branch, or at ``resume_from_checkpoint``."""
        folder = self.callback.prepare_start(
            resume_from_checkpoint, trial=args[0] if args else options.get("trial")
        )
        with self._ending():
            if self.trainer_state is None:
                return own(folder, *args, **options)
            with (
                TemporaryDirectory(prefix="datastates-") as self.folder,
                _without_evaluation_at_start(self.trainer.args),
            ):
                (Path(self.folder) / _FILE).write_text(json.dumps(self.trainer_state))
                return own(self.folder, *args, **options)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        error: BaseException | None = None
        try:
            yield
        except BaseException as exc:
            error = exc
            raise
        finally:
            self.folder = self.trainer_state = self.rng = self._replay = self._replayed = (
                self._stands_for
            ) = None
            self.callback.end(error)

    def load_from_checkpoint(self, own: Any, folder: str, *args: Any, **options: Any) -> Any:
        """Leave the weights to the state, which is restored once the optimizer exists too."""
        return None if folder == self.folder else own(folder, *args, **options)

    def init_training_state(self, own: Any, *args: Any, **options: Any) -> tuple[int, int]:
        """The epoch to begin with, and how many of its batches were used."""
        epoch, batches = own(*args, **options)
        loop, trainer = self.callback.loop, self.trainer
        if self.trainer_state is not None:
            max_steps, epochs = args[0], args[2]
            if trainer.state.global_step >= max_steps or self._is_stopped_early():
                epoch, batches = epochs, 0
            elif self.place["form"] == loop.form:
                place = self.place["place"]
                epoch, batches = (
                    self.place["epoch"],
                    (0 if place is None or trainer.args.ignore_data_skip else place["batches"]),
                )
            else:
                _logger.warning(
                    "branch %s resumes with other batches than its state was captured with"
                    " (per_device_train_batch_size, gradient_accumulation_steps,"
                    " dataloader_drop_last or the number of processes changed). The Trainer"
                    " computes epoch and place in the data from its count of steps",
                    self.callback.branch,
                )
        loop.epoch, self._begun_after = epoch - 1, batches
        return epoch, batches

    def _is_stopped_early(self) -> bool:
        """Whether the callback that ended the training would end it again."""
        saved = self.trainer.state.stateful_callbacks.get(EarlyStoppingCallback.__name__, {})
        count = (
            saved.get("attributes", {}).get("early_stopping_patience_counter", 0)
            if isinstance(saved, dict)
            else 0
        )
        stopping = (
            each
            for each in self.trainer.callback_handler.callbacks
            if isinstance(each, EarlyStoppingCallback)
        )
        return any(count >= each.early_stopping_patience for each in stopping)

    # --- the data ---------------------------------------------------------------------------------

    def begin_epoch(self, loader: Any) -> None:
        """Called when an epoch is about to begin."""
        loop = self.callback.loop
        self._is_after_epoch = False
        loop.epoch += 1
        loop.turn = Pass(loader, lambda _: False, ())
        place, self.place = self.place, {}
        if self.callback.is_reseeded:
            for part in () if place.get("place") else parts_of(loader):
                # an epoch that had begun ends in its order
                args = self.trainer.args
                seed = args.seed if args.data_seed is None else args.data_seed
                put_mark(part, {"initial_seed": int(seed)})
        else:
            loop.turn.recall(place.get("left", {}))
        for part in (
            loader,
            getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None),
        ):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(loop.epoch)  # as the Trainer is about to do: the order depends on it
        batches, self._begun_after = self._begun_after, 0
        loop.turn.watch(batches)
        if batches and self.callback.replay and place.get("form") == loop.form:
            self._replay = place

    def end_epoch(self, control: Any) -> None:
        """Called when an epoch is over. Later states resume with the next epoch, unless the
        training was stopped within this one."""
        loop = self.callback.loop
        self._is_after_epoch = True
        is_stopped = control.should_training_stop and not control.should_epoch_stop
        if loop.turn is None or (is_stopped and not _is_whole(loop.turn)):
            return
        loop.turn.leave()
        loop.left, loop.turn = loop.turn.left_behind, None

    def get_batch_samples(self, own: Any, batches: Any, *args: Any, **options: Any) -> Any:
        """The batches of the next step; the step before it is complete."""
        self.callback.capture_if_due()
        found = self._next_batches(own, batches, *args, **options)
        if found[0]:  # a stream may be at its end
            self.callback.begin_step()
        return found

    def _next_batches(self, own: Any, batches: Any, *args: Any, **options: Any) -> Any:
        loop = self.callback.loop
        if self._replay is not None:
            self._stands_for = batches
            place, self._replay = self._replay, None
            self._replayed = self._read_again(place)
        if loop.turn is None:
            return own(batches, *args, **options)
        loop.before = (loop.turn.batches, RngState().state_dict())
        if batches is self._stands_for and self._replayed is not None:
            # the Trainer skipped by index, and drew other numbers
            return own(self._replayed, *args, **options)
        found = own(batches, *args, **options)
        loop.turn.batches += len(found[0])
        return found

    def _read_again(self, stored: dict[str, Any]) -> Iterator[Any]:
        """The remaining batches of the epoch, the same as without a stop: the earlier batches are
        read again, with their random numbers.

        Accelerate's loaders read one batch ahead when they hand out the last one: after the random
        numbers of the steps before it.
        """
        turn, place, (count, rng) = self.callback.loop.turn, stored["place"], stored["before"]
        assert turn is not None, "within an epoch"
        # Those are of the state's last batch, not of this one.
        begun = {
            key: value for key, value in place.items() if key not in ("before_ahead", "prints")
        }
        batches = turn.resume_at({**begun, "batches": count}, None)
        RngState().load_state_dict(rng)
        for _ in range(place["batches"] - count):
            next(batches or iter(()), None)
        self._put_rng()
        return batches or iter(())

    def load_rng_state(self, own: Any, folder: str | None) -> None:
        """Put back the random numbers of the state: at the beginning of an epoch, or once the
        batches before its place were skipped."""
        if folder is None or folder != self.folder:
            own(folder)
        else:
            self._put_rng()

    def _put_rng(self) -> None:
        if self.rng is not None:
            RngState().load_state_dict(self.rng)
            self.rng = None

    # --- what is kept -----------------------------------------------------------------------------

    def maybe_log_save_evaluate(self, own: Any, *args: Any, **options: Any) -> None:
        """Capture the last step of an epoch after its last log, evaluation and save."""
        own(*args, **options)
        if self._is_after_epoch:
            self.callback.capture_if_due(is_end=self.trainer.control.should_training_stop)

    def save_checkpoint(self, own: Any, *args: Any, **options: Any) -> None:
        """Write a checkpoint folder, if folders are wanted."""
        if self.callback.folders:
            own(*args, **options)


def _is_whole(turn: Pass) -> bool:
    """Whether every batch of an epoch was used; False if the number of batches is not known."""
    length = turn.place["length"]
    return isinstance(length, int) and turn.batches >= length


def trainer_around(callback: object) -> Any:
    """The Trainer that calls this event of ``callback``, which gets everything but its Trainer;
    None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        handler = getattr(found, "callback_handler", None) if isinstance(found, Trainer) else None
        if handler is not None and any(each is callback for each in handler.callbacks):
            return found
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None


@contextmanager
def _without_evaluation_at_start(args: Any) -> Iterator[None]:
    """Switch off the evaluation at the start: the training that never stopped evaluated at its
    own start, and not here."""
    before, args.eval_on_start = args.eval_on_start, False
    try:
        yield
    finally:
        args.eval_on_start = before
