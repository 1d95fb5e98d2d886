"""A study before and after its variants are trained, whoever trains them: its start, what each variant's worker is given, and its
report.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from datastates.lineage.change import studies
from datastates.lineage.states import State, Value
from datastates.workflows.plans.plan import Plan, Variant

from . import record
from .job import Assignment
from .result import Exploration, read_study, say_alike
from .storage import storage

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["Study"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Study:
    """A plan that is trained in a repository under a name; ``config`` is the configuration that the variants' configurations change."""

    repo: Repository
    name: str
    plan: Plan
    config: Mapping[str, Value] | None

    def begin(self, start: str) -> tuple[State, Exploration]:
        """The state from which the study forks, tagged and durable, and what is known of its variants, which are noted as planned.

        :raises Conflict: the study began from another state, or a variant was trained by another plan.
        """
        origin = record.tag_start(self.repo, self.name, start)  # from here on there is a study
        known = read_study(self.repo, self.name, self.plan, config=self.config)
        with self.repo.core.writing() as session:
            planned = [studies.Planned(one.name, one.parent, one.epochs, one.config) for one in self.plan.variants]
            studies.plan(session, self.name, planned)
        return origin, known

    def assign(self, variant: Variant, parent: State) -> Assignment:
        """What the worker of a variant needs of its plan."""
        plan, name = self.plan, variant.name
        return Assignment(
            self.name,
            variant,
            plan.digest(name, self.config),
            plan.config(name, self.config),
            plan.rows(variant.train or ()),
            plan.rows(variant.validation),
            parent.uid,
            plan.size,
        )

    def report(self, errors: Mapping[str, str], reused: Collection[str]) -> Exploration:
        """The result of the study; suspicious results are logged."""
        report = read_study(self.repo, self.name, self.plan, config=self.config, errors=errors, reused=reused)
        for alike in report.alike:
            _logger.warning("study %s: %s", self.name, say_alike(alike))
        return replace(report, storage=storage(self.repo, self.name))
