"""Outliers: the samples of which a training could not make sense."""

from .ranking import SampleScore
from .report import OutlierReport
from .study import outliers

__all__ = ["OutlierReport", "SampleScore", "outliers"]
