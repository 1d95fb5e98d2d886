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
from .job import Job
from .plan import Plan, Variant

__all__ = [
    "Choice",
    "Distribution",
    "Job",
    "LogUniform",
    "Plan",
    "Schedule",
    "Uniform",
    "Variant",
    "cut",
    "ensemble",
    "epochs_at",
    "grid",
    "kfold",
    "leave_out",
    "repeat",
    "sample",
]
