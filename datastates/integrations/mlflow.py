"""A run of MLflow for a training.

The metrics of every captured state are logged there too:

    with repo.track(model=model, optimizer=optimizer) as run:
        MlflowLog(run, experiment="gpt")
        for batch in run.steps(loader):
            run.capture(metrics={"loss": train_step(batch)})
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from datastates import values
from datastates.lineage.states import State
from datastates.training.tracker import Tracker

from .metrics_log import MetricsLog, TrainingFacts

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    # as `start_run` finds it: set_experiment, then the environment
    from mlflow.tracking.fluent import (
        _get_experiment_id,
    )
except ImportError as exc:
    raise ImportError(
        "datastates.integrations.mlflow needs MLflow: pip install 'datastates[mlflow]'"
    ) from exc

__all__ = ["MlflowLog"]

_logger = logging.getLogger(__name__)

_AT_ONCE = 1000  # metrics in one request: MLflow's limit
_PARAMS = 100
_LONGEST = 5000
_LONGEST_KEY = 250
_ODD = re.compile(r"[^\w\-. /:]")


class MlflowLog(MetricsLog):
    """A run of MLflow for one training. ``id`` is its run id.

    A resumed training continues its run. A fork gets a new run, whose parent is the run of the
    branch that it forked from. The run has the configuration as params. Its tags are our
    repository, branch, training and newest state. It ends with the training.

    :param tracker: the training.
    :param experiment: the name of the experiment, which is made if it does not exist. None takes
        MLflow's current experiment.
    :param into: the id of a run that you began, such as ``mlflow.active_run().info.run_id``. You
        end it.
    :param client: the client of the server that has the runs. None takes MLflow's tracking URI.
    """

    kind = "mlflow"

    def __init__(
        self,
        tracker: Tracker,
        *,
        experiment: str | None = None,
        into: str | None = None,
        client: MlflowClient | None = None,
    ) -> None:
        self._experiment = values.optional(values.text)(experiment, "experiment")
        self._client = client or MlflowClient()
        self._refused: set[str] = set()
        super().__init__(tracker, values.optional(values.text)(into, "into"))

    def _resume(self, id: str, facts: TrainingFacts) -> bool:
        try:
            found = self._client.get_run(id)
        except MlflowException:
            return False
        if found.info.lifecycle_stage != "active":
            return False
        self._client.update_run(id, status="RUNNING")
        return True

    def _begin(self, facts: TrainingFacts) -> str:
        return str(
            self._client.create_run(self._experiment_id(), run_name=facts.branch).info.run_id
        )

    def _experiment_id(self) -> str:
        if self._experiment is None:
            return str(_get_experiment_id())
        found = self._client.get_experiment_by_name(self._experiment)
        return str(
            self._client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )

    def _describe(self, facts: TrainingFacts, parent: str | None) -> None:
        tags = facts.named()
        if parent is not None:
            tags |= {"mlflow.parentRunId": parent, "datastates.parent": parent}
        if facts.git_commit is not None:
            tags["mlflow.source.git.commit"] = facts.git_commit
        known = self._client.get_run(self.id).data.params  # a param cannot be changed
        named = {_key(key): str(value)[:_LONGEST] for key, value in facts.config.items()}
        params = [Param(key, value) for key, value in named.items() if key not in known]
        self._client.log_batch(
            self.id, tags=[RunTag(key, value[:_LONGEST]) for key, value in tags.items()]
        )
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(self.id, params=params[start : start + _PARAMS])

    def _send(self, states: Sequence[State]) -> None:
        metrics = [
            Metric(_key(key), value, int(state.created_at.timestamp() * 1000), state.step)
            for state in states
            for key, value in state.metrics.items()
        ]
        for start in range(0, len(metrics), _AT_ONCE):
            self._log(metrics[start : start + _AT_ONCE])

    def _log(self, metrics: Sequence[Metric]) -> None:
        """Log these metrics, without those that MLflow refuses: it refuses all that come with
        one."""
        try:
            self._client.log_batch(self.id, metrics=metrics)
        except MlflowException as exc:
            if (
                exc.error_code != "INVALID_PARAMETER_VALUE"
                or self._client.get_run(self.id).info.lifecycle_stage != "active"
            ):
                raise  # not because of a metric
            if len(metrics) > 1:
                half = len(metrics) // 2
                self._log(metrics[:half])
                self._log(metrics[half:])
            elif metrics[0].key not in self._refused:
                self._refused.add(metrics[0].key)
                _logger.warning(
                    "mlflow refuses the metric %s, which is in the lineage alone: %s",
                    metrics[0].key,
                    exc,
                )

    def _end(self, head: str | None, error: BaseException | None) -> None:
        if head is not None:
            self._client.set_tag(self.id, "datastates.head", head)
        if not self._is_own:
            self._client.set_terminated(self.id, "FINISHED" if error is None else "FAILED")


def _key(name: str) -> str:
    """A name that MLflow accepts: in its characters, not too long, and in the plain form of a
    path."""
    parts = _ODD.sub("_", name)[:_LONGEST_KEY].split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "_"
