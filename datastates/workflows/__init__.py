"""Studies that fork from a shared prefix: plans of variants, and what runs and reads them."""

from __future__ import annotations

from .builders import (
    Choice,
    Distribution,
    LogUniform,
    Schedule,
    Uniform,
    cut,
    ensemble,
    epochs_at,
    grid,
    kfold,
    leave_out,
    repeat,
    sample,
)
from .describe import describe
from .executors import Processes, RayExecutor, SerialExecutor
from .explorer import explore
from .job import Job
from .members import Member, Population
from .outlier_report import OutlierReport, SampleScore
from .outliers import outliers
from .plan import Plan, Variant
from .population import Perturb, perturbed, population
from .reconfigure import reconfigure
from .result import Exploration, Progress, Result, read_study
from .storage import Storage, storage
from .work import Work, prefix_epochs, work, work_done

__all__ = [
    "Choice",
    "Distribution",
    "Exploration",
    "Job",
    "LogUniform",
    "Member",
    "OutlierReport",
    "Perturb",
    "Plan",
    "Population",
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
    "kfold",
    "leave_out",
    "outliers",
    "perturbed",
    "population",
    "prefix_epochs",
    "read_study",
    "reconfigure",
    "repeat",
    "sample",
    "storage",
    "work",
    "work_done",
]
