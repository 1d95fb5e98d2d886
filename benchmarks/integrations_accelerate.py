"""The part of Accelerate for ``integrations.py``: its loop alone, with ``save_state`` after each
step, and with captures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from integrations import DURABLE, MEMORY, Setting, Steps, Way

import datastates
from datastates.config import Config
from datastates.integrations.accelerate import track


def ways() -> list[Way]:
    """Each way, and what it is compared with."""
    # save_state logs each checkpoint that it deletes
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    return [
        Way("Accelerate", _loop(None)),
        Way("Accelerate, datastates", _loop(MEMORY), "Accelerate", "own loop, datastates"),
        Way(
            "Accelerate, datastates, every step durable",
            _loop(DURABLE),
            "Accelerate",
            "own loop, datastates, every step durable",
        ),
        Way(
            "Accelerate, save_state at every step",
            _loop(None, saves=True),
            "Accelerate",
            "own loop, datastates, every step durable",
        ),
    ]


def _loop(
    cadence: Mapping[str, Any] | None, *, saves: bool = False
) -> Callable[[Setting, Path], Steps]:
    """A training. ``cadence`` is the same as in the plain loop. ``saves`` keeps Accelerate's newest
    three checkpoints."""

    def begin(setting: Setting, folder: Path) -> Steps:
        names = ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=3
        )
        accelerator = Accelerator(cpu=True, project_config=names)
        plain = setting.model()
        model, optimizer, loader = accelerator.prepare(
            plain, setting.optimizer(plain), setting.loader()
        )

        def update(tokens: Any) -> Any:
            with accelerator.accumulate(model):
                loss = model(tokens)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        if cadence is None:
            while True:
                for (tokens,) in loader:
                    loss = update(tokens)
                    yield accelerator.save_state() if saves else loss
        with (
            datastates.open(folder, config=Config(retention="latest:3")) as repo,
            track(accelerator, repo, **cadence) as run,
        ):
            while True:
                for (tokens,) in run.steps(loader):
                    yield run.capture(metrics={"loss": update(tokens)})

    return begin
