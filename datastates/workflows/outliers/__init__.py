"""Outliers: the samples that a training could not make sense of."""

from .ranking import SampleScore
from .report import OutlierReport
from .study import outliers

__all__ = ["OutlierReport", "SampleScore", "outliers"]
