"""What a Trainer of transformers holds between two steps, as one object to track."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerControl
from transformers.trainer_callback import ExportableState

from datastates.objects.passes import Pass

__all__ = ["LOOP", "TrainerLoop"]

LOOP = "trainer"
"""The top-level name under which a state records where its Trainer stood."""

_LEAST_CAPACITY = 4096
_SUMS, _TOKENS = "_metrics", "_total_train_tokens"


class TrainerLoop:
    """The loop of one Trainer: its ``TrainerState``, control and callbacks, the loss since the last log, the place in the data.

    ``epoch`` is the epoch that runs, or ran last. ``turn`` is its pass over the data, or None between two epochs; ``left`` is then what the
    last pass leaves for the next. ``before`` holds how many batches were used before those of the newest step, and the random numbers then.
    ``best`` is the uid of the best state. ``load_state_dict`` does not put ``TrainerState`` back: the Trainer itself reads it, from
    ``told``.
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
        found: list[object] = [self.trainer._train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last]
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
        """Put back the sums that the Trainer keeps between two logs. The Trainer has read its ``TrainerState``, and is about to begin."""
        trainer = self.trainer
        trainer._tr_loss = state["tr_loss"].detach().clone().to(trainer._tr_loss.device)
        trainer._total_loss_scalar = -float(trainer._tr_loss)  # the loss before this call does not count in its mean
        trainer._globalstep_last_logged = state["last_logged"]
        trainer.current_flos = state["flos"]
        self.best = state["best"]
        _put_meters(trainer, json.loads(state["meters"]))
        for callback, attributes in _saved_callbacks(trainer, json.loads(state["state"])):
            vars(callback).update(attributes)

    @staticmethod
    def told(state: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the ``TrainerState`` that a stored loop holds."""
        lines = state["history"].numpy().tobytes()[: state["history_length"]].splitlines()
        return {**json.loads(state["state"]), "log_history": [json.loads(line) for line in lines]}


class _History:
    """The log as lines of JSON in one tensor. Lines that are there are not written again, and the room doubles, so that the layout
    stays.
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
            added = "".join(json.dumps(entry, default=_plain) + "\n" for entry in log[self._count :]).encode()
            self._reserve(self._length + len(added))
            self._tensor[self._length : self._length + len(added)] = torch.frombuffer(bytearray(added), dtype=torch.uint8)
            self._length, self._count = self._length + len(added), len(log)
        return self._tensor, self._length

    def _reserve(self, size: int) -> None:
        capacity = len(self._tensor)
        while capacity < size:
            capacity *= 2
        if capacity > len(self._tensor):
            self._tensor = torch.cat([self._tensor, torch.zeros(capacity - len(self._tensor), dtype=torch.uint8)])


def _plain_state(trainer: Any) -> dict[str, Any]:
    state = {each.name: getattr(trainer.state, each.name) for each in dataclasses.fields(trainer.state) if each.name != "log_history"}
    return {**state, "stateful_callbacks": _callback_states(trainer)}


def _callback_states(trainer: Any) -> dict[str, Any]:
    """The callbacks' states in the Trainer's own form: one state under the name of a class, or a list of several."""
    found: dict[str, list[Any]] = {}
    for callback in _exportable(trainer):
        found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in found.items()}


def _exportable(trainer: Any) -> list[Any]:
    return [each for each in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(each, ExportableState)]


def _saved_callbacks(trainer: Any, state: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The callbacks, with the attributes that each had reached; what they were made with stays as it is now."""
    saved = {name: [*states] if isinstance(states, list) else [states] for name, states in state["stateful_callbacks"].items()}
    callbacks = [each for each in _exportable(trainer) if not isinstance(each, TrainerControl)]
    return [(each, waiting.pop(0)["attributes"]) for each in callbacks if (waiting := saved.get(type(each).__name__))]


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
