"""Studies that fork from a shared prefix: plans of variants, and what runs and reads them."""

from __future__ import annotations

from .job import Job
from .plan import Plan, Variant

__all__ = ["Job", "Plan", "Variant"]
