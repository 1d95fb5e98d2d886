"""What a Trainer holds between two steps, besides module, optimizers, schedulers and data, as one object to track."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .framework import Callback, EarlyStopping, LightningModule, StochasticWeightAveraging, Timer, WeightAveraging, version

__all__ = ["Fit", "Metrics"]


class Fit:
    """The loops of one Trainer, its other callbacks, precision, datamodule, and what hooks add to a checkpoint."""

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
            "callbacks": {each.state_key: state for each in self._others() if (state := each.state_dict())},
            "precision": _by_name(trainer.precision_plugin),
            "datamodule": {} if trainer.datamodule is None else _by_name(trainer.datamodule),
            "added": self._added(),
            "metrics": {name: list(found) for name, found in self.metrics.items()},
            "accumulate": trainer.accumulate_grad_batches,
            "made_to_accumulate": self._made_to_accumulate,
            "is_between": self.is_between,
            "since": self.since,
            "gives_buffers": None if (ddp := self._ddp()) is None else ddp.require_forward_param_sync,
            **({} if self._weights is None else {"weights": self._weights}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put everything back that the Trainer leaves alone until it trains; ``begin`` does the rest."""
        trainer = self._trainer
        self._hand_over(state["added"])
        for each in self._others():
            if each.state_key in state["callbacks"]:
                each.load_state_dict(deepcopy(state["callbacks"][each.state_key]))
        for owner, stored in ((trainer.precision_plugin, state["precision"]), (trainer.datamodule, state["datamodule"])):
            if type(owner).__qualname__ in stored:
                owner.load_state_dict(stored[type(owner).__qualname__])
        trainer.fit_loop.load_state_dict(deepcopy(state["loops"]))
        self.metrics = {name: (value, dtype) for name, (value, dtype) in state["metrics"].items()}
        self.is_between, self.is_restored = state["is_between"], True
        self.since, self._weights = state.get("since", 0), state.get("weights")
        self._gives_buffers = state.get("gives_buffers")
        if state.get("made_to_accumulate", self._made_to_accumulate) == self._made_to_accumulate:
            self._accumulates = state["accumulate"]  # otherwise the Trainer was made with another number, which is to be obeyed

    def begin(self) -> None:
        """Put back what Lightning cleared meanwhile, and what only a training needs; called when it is about to train."""
        if not self.is_restored:
            return
        if self.is_between:
            self._trainer.fit_loop.epoch_loop.restarting = False  # otherwise a training by steps would go on in an epoch that is over
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
        """Keep the weights for the next capture if the end of the training puts their average in their place: more epochs begin with
        them.
        """
        if any(isinstance(each, WeightAveraging | StochasticWeightAveraging) for each in self._others()):
            self._weights = deepcopy(self._trainer.lightning_module.state_dict())

    def release_weights(self) -> None:
        """Keep them no longer."""
        self._weights = None

    def stoppers(self) -> list[str]:
        """The callbacks that have told the training to stop."""
        return [type(each).__name__ for each in self._others() if self.is_restored and _has_stopped(each)]

    def _ddp(self) -> DistributedDataParallel | None:
        """The wrapper that gives the buffers of rank 0 to all in the next forward, or not: after a step of manual optimization, each rank
        keeps its own. A new one always gives them.
        """
        model = self._trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None

    def _loops(self) -> dict[str, object]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        state["state_dict"] = {key: value for key, value in state["state_dict"].items() if key != "combined_loader"}  # Data has the place
        if self.is_within:
            self._take_back(state["epoch_progress"])
        return state

    def _take_back(self, epochs: dict[str, dict[str, int]]) -> None:
        """Uncount an epoch within which the training ended: Lightning counts it as done, and a run that goes on begins with its rest."""
        for count in epochs.values():
            for name in ("processed", "completed"):
                count[name] -= 1

    def _others(self) -> Iterator[Any]:
        return (each for each in self._trainer.callbacks if each is not self._own)

    def _added(self) -> dict[str, object]:
        """The entries that hooks on checkpoints add to one, or replace."""
        trainer, module = self._trainer, self._trainer.lightning_module
        hooked = [each for each in self._others() if type(each).on_save_checkpoint is not Callback.on_save_checkpoint]
        is_hooked = type(module).on_save_checkpoint is not LightningModule.on_save_checkpoint
        if not hooked and not is_hooked:
            return {}
        usual = self._checkpoint()
        checkpoint = {**usual}
        for each in hooked:
            each.on_save_checkpoint(trainer, module, checkpoint)
        if is_hooked:
            module.on_save_checkpoint(checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in usual or value is not usual[key]}

    def _hand_over(self, added: Mapping[str, Any]) -> None:
        """Call the hooks that take from a checkpoint what others put there."""
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = {**self._checkpoint(), **added}
        for each in self._others():
            each.on_load_checkpoint(trainer, module, checkpoint)
        module.on_load_checkpoint(checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        """A checkpoint as hooks see it; the rest is in the state that is captured or restored."""
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
        return {name: value.detach() for name, value in found if isinstance(value, torch.Tensor) and value.numel() == 1}

    def fresh(self) -> dict[str, torch.Tensor]:
        """The numbers that were logged since the last call. Lightning keeps the others, such as those of the last validation, and gives
        them anew, but not in other memory.
        """
        found = self.all()
        fresh = {name: value for name, value in found.items() if name not in self._seen or self._seen[name].data_ptr() != value.data_ptr()}
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
    """The state of an object under the name of its class, as in Lightning's checkpoints; empty if it has none."""
    state = owner.state_dict()
    return {type(owner).__qualname__: state} if state else {}
