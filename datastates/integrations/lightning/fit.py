"""What a Trainer holds between two steps, besides module, optimizers, schedulers and data, as one object to track."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch

from .framework import Callback, LightningModule, version

__all__ = ["Fit", "Metrics"]


class Fit:
    """The loops of one Trainer, its other callbacks, precision, datamodule, and what hooks add to a checkpoint."""

    is_optional = True  # a state that another loop captured does not have it

    def __init__(self, trainer: Any, own: object) -> None:
        self._trainer, self._own = trainer, own
        self.metrics: dict[str, tuple[float, str]] = {}
        self.is_between = self.is_within = self.is_restored = False

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
            "is_between": self.is_between,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put everything back but the metrics, which Lightning clears before it trains."""
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
        trainer.accumulate_grad_batches = state["accumulate"]

    def begin(self) -> None:
        """Put back what Lightning cleared meanwhile; called when it is about to train."""
        if not self.is_restored:
            return
        if self.is_between:
            self._trainer.fit_loop.epoch_loop.restarting = False  # otherwise a training by steps would go on in an epoch that is over
            self.is_between = False
        found, device = self._trainer.callback_metrics, self._trainer.lightning_module.device
        for name, (value, dtype) in self.metrics.items():
            found[name] = torch.tensor(value, dtype=getattr(torch, dtype), device=device)

    def _loops(self) -> dict[str, object]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        state["state_dict"] = {key: value for key, value in state["state_dict"].items() if key != "combined_loader"}  # Data has the place
        if self.is_within:
            self._take_back(state["epoch_progress"])
        return state

    def _take_back(self, epochs: dict[str, dict[str, int]]) -> None:
        """Uncount an epoch that ``max_steps`` ended: Lightning counts it as done, and a run with a higher ``max_steps`` goes on in it."""
        for count in epochs.values():
            for name in ("processed", "completed"):
                count[name] -= 1

    def _others(self) -> Iterator[Any]:
        return (each for each in self._trainer.callbacks if each is not self._own)

    def _added(self) -> dict[str, object]:
        """The entries that hooks on checkpoints add to one."""
        trainer, module = self._trainer, self._trainer.lightning_module
        hooked = [each for each in self._others() if type(each).on_save_checkpoint is not Callback.on_save_checkpoint]
        is_hooked = type(module).on_save_checkpoint is not LightningModule.on_save_checkpoint
        if not hooked and not is_hooked:
            return {}
        checkpoint = self._checkpoint()
        usual = checkpoint.keys() | set()
        for each in hooked:
            each.on_save_checkpoint(trainer, module, checkpoint)
        if is_hooked:
            module.on_save_checkpoint(checkpoint)
        return {key: value for key, value in checkpoint.items() if key not in usual}

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
        """The numbers that were logged since the last call. Lightning keeps the others as they are, such as those of the last
        validation.
        """
        found = dict(self._trainer.callback_metrics)
        fresh = {name: value for name, value in found.items() if self._seen.get(name) is not value}
        self._seen = found
        return {name: value for name, value in fresh.items() if isinstance(value, torch.Tensor) and value.numel() == 1}


def _by_name(owner: Any) -> dict[str, Any]:
    """The state of an object under the name of its class, as in Lightning's checkpoints; empty if it has none."""
    state = owner.state_dict()
    return {type(owner).__qualname__: state} if state else {}
