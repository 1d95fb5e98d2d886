"""Studies that fork from a shared prefix: plans of variants, and what runs and reads them."""

from __future__ import annotations

from datastates.studies.executors import Processes, RayExecutor, SerialExecutor
from datastates.studies.explore import explore
from datastates.studies.outlier_scores import SampleScore
from datastates.studies.outliers import OutlierReport, outliers
from datastates.studies.plan import Plan, Variant
from datastates.studies.plan_builders import (
    Choice,
    Distribution,
    LogUniform,
    Schedule,
    Uniform,
    cut,
    ensemble,
    epochs_at,
    grid,
    halving,
    kfold,
    leave_out,
    repeat,
    sample,
)
from datastates.studies.results import (
    Exploration,
    Progress,
    Result,
    Storage,
    Work,
    describe,
    prefix_epochs,
    read_study,
    storage,
    work,
    work_done,
)
from datastates.studies.worker import Job, reconfigure

__all__ = [
    "Choice",
    "Distribution",
    "Exploration",
    "Job",
    "LogUniform",
    "OutlierReport",
    "Plan",
    "Processes",
    "Progress",
    "RayExecutor",
    "Result",
    "SampleScore",
    "Schedule",
    "SerialExecutor",
    "Storage",
    "Uniform",
    "Variant",
    "Work",
    "cut",
    "describe",
    "ensemble",
    "epochs_at",
    "explore",
    "grid",
    "halving",
    "kfold",
    "leave_out",
    "outliers",
    "prefix_epochs",
    "read_study",
    "reconfigure",
    "repeat",
    "sample",
    "storage",
    "work",
    "work_done",
]
