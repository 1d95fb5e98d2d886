"""Which samples a training could not make sense of."""

from .report import OutlierReport, SampleScore
from .study import outliers

__all__ = ["OutlierReport", "SampleScore", "outliers"]
