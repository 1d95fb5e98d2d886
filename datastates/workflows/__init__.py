"""Studies that fork from a shared prefix: plans of variants, and what runs and reads them."""

from __future__ import annotations

from .outliers import OutlierReport, SampleScore, outliers
from .plans.builders import (
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
from .plans.plan import Plan, Variant
from .running.describe import describe
from .running.executors import Processes, RayExecutor, SerialExecutor
from .running.explorer import explore
from .running.job import Job
from .running.reconfigure import reconfigure
from .running.result import Exploration, Progress, Result, read_study
from .running.storage import Storage, storage
from .running.work import Work, prefix_epochs, work, work_done

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
