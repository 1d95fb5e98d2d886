"""A folder of TensorBoard events for a training.

The metrics of every captured state are logged there too:

    with repo.track(model=model, optimizer=optimizer) as run:
        log = TensorboardLog(run, "events")
        for batch in run.steps(loader):
            run.capture(metrics={"loss": train_step(batch)})
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.training.tracker import Tracker

from .metrics_log import MetricsLog, TrainingFacts

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as exc:
    raise ImportError(
        "datastates.integrations.tensorboard needs TensorBoard: pip install"
        " 'datastates[tensorboard]'"
    ) from exc

__all__ = ["TensorboardLog"]


class TensorboardLog(MetricsLog):
    """A folder of events for one training, named as its branch. ``id`` is its name in ``folder``.
    ``writer`` logs anything else that you want.

    A resumed training continues in its folder. New points of steps that it repeats replace the old
    ones. A fork gets a new folder. The text ``datastates`` has our repository, branch and training,
    the configuration, and the run from which it was forked. Writing to it ends with the training.

    :param tracker: the training.
    :param folder: the folder that TensorBoard reads (``--logdir``).
    :param into: your own ``SummaryWriter``, instead of ``folder``. You close it.
    """

    kind = "tensorboard"
    writer: SummaryWriter

    def __init__(
        self,
        tracker: Tracker,
        folder: str | os.PathLike[str] = "events",
        *,
        into: SummaryWriter | None = None,
    ) -> None:
        self._folder = Path(values.path(folder, "folder"))
        if into is not None:
            if not isinstance(into, SummaryWriter):
                raise InvalidInput(f"into is {values.shown(into)}: give a SummaryWriter")
            self.writer = into
        super().__init__(tracker, None if into is None else str(into.log_dir))

    def _resume(self, id: str, facts: TrainingFacts) -> bool:
        if facts.start is None or not (self._folder / id).is_dir():
            return False
        self.writer = SummaryWriter(str(self._folder / id), purge_step=facts.start.step + 1)
        return True

    def _begin(self, facts: TrainingFacts) -> str:
        id = facts.branch
        if (self._folder / id).exists():  # of a branch that had this name before
            id = f"{id}-{facts.run[:8]}"
        self.writer = SummaryWriter(str(self._folder / id))
        return id

    def _describe(self, facts: TrainingFacts, parent: str | None) -> None:
        described = {
            **facts.named(),
            **({} if parent is None else {"datastates.parent": parent}),
            **facts.config,
        }
        self.writer.add_text(
            "datastates", _table(described), 0 if facts.start is None else facts.start.step
        )

    def _send(self, states: Sequence[State]) -> None:
        for state in states:
            for key, value in state.metrics.items():
                self.writer.add_scalar(
                    key, value, state.step, walltime=state.created_at.timestamp()
                )
        self.writer.flush()

    def _end(self, head: str | None, error: BaseException | None) -> None:
        if head is not None:
            self.writer.add_text("datastates.head", head)
        if self._is_own:
            self.writer.flush()
        else:
            self.writer.close()


def _table(described: Mapping[str, object]) -> str:
    """The values as Markdown, in which TensorBoard shows texts."""
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in described.items())]
    )
