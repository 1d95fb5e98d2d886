"""Outliers: the samples of which a training could not make sense."""

from .report import OutlierReport, SampleScore
from .study import outliers

__all__ = ["OutlierReport", "SampleScore", "outliers"]
