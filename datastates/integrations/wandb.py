"""A run of W&B for a training.

The metrics of every captured state are logged there too:

    with repo.track(model=model, optimizer=optimizer) as run:
        log = WandbLog(run, project="gpt")  # further options of wandb.init
        for batch in run.steps(loader):
            run.capture(metrics={"loss": train_step(batch)})
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.training.tracker import Tracker

from .metrics_log import MetricsLog, TrainingFacts

try:
    import wandb
except ImportError as exc:
    raise ImportError(
        "datastates.integrations.wandb needs W&B: pip install 'datastates[wandb]'"
    ) from exc

__all__ = ["WandbLog"]

_STEP = "step"
_GIVEN = ("id", "resume", "reinit")


class WandbLog(MetricsLog):
    """A run of W&B for one training. ``id`` is its id. ``run`` is W&B's own object, for your own
    pictures and tables.

    A resumed training continues its run. A fork gets a new run, which has the id of the run of the
    branch that it forked from. The run's config has ours and, under ``datastates``, our repository,
    branch and training. Its summary has the newest state. Metrics are drawn over ``step``, the step
    of the state, because W&B's own count only grows and a resumed training repeats some steps. The
    run ends with the training.

    :param tracker: the training.
    :param into: your own run to log to, such as ``wandb.run``. You finish it.
    :param init: further options of ``wandb.init``: ``project``, ``entity``, ``group``, ``tags``,
        ``mode`` …
    """

    kind = "wandb"
    run: Any

    def __init__(self, tracker: Tracker, *, into: Any = None, **init: Any) -> None:
        if taken := [name for name in _GIVEN if name in init]:
            raise TypeError(
                f"{', '.join(taken)}: the lineage says which run of W&B is resumed. To log to a run"
                " of yours, pass into="
            )
        self._init = init
        if into is not None:
            if not isinstance(into, wandb.Run):
                raise InvalidInput(
                    f"into is {values.shown(into)}: give a run of W&B, such as wandb.run"
                )
            self.run = into
        super().__init__(tracker, None if into is None else str(into.id))

    def _resume(self, id: str, facts: TrainingFacts) -> bool:
        self.run = self._open(id, facts)  # W&B makes it again under its id if it was lost
        return True

    def _begin(self, facts: TrainingFacts) -> str:
        id = secrets.token_hex(4)
        self.run = self._open(id, facts)
        return id

    def _open(self, id: str, facts: TrainingFacts) -> Any:
        given = {"name": facts.branch, **self._init}
        return wandb.init(**given, id=id, resume="allow", reinit="create_new")

    def _describe(self, facts: TrainingFacts, parent: str | None) -> None:
        described = {key.removeprefix("datastates."): value for key, value in facts.named().items()}
        config: Mapping[str, Any] = {
            **facts.config,
            "datastates": described if parent is None else {**described, "parent": parent},
        }
        self.run.config.update(config, allow_val_change=True)
        self.run.define_metric(_STEP)
        self.run.define_metric("*", step_metric=_STEP)

    def _send(self, states: Sequence[State]) -> None:
        for state in states:
            self.run.log({**state.metrics, _STEP: state.step, "datastates.uid": state.uid})

    def _end(self, head: str | None, error: BaseException | None) -> None:
        if head is not None:
            self.run.summary["datastates.head"] = head
        if not self._is_own:
            self.run.finish(exit_code=0 if error is None else 1)
