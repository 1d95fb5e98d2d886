"""Ranks of one job: they track a training together, and clone states to each other."""

from datastates.tracking.belonging import find, using
from datastates.transport.clone.groups import Group

from .groups import MPIGroup, SoloGroup, TorchGroup
from .newest import latest

__all__ = ["Group", "MPIGroup", "SoloGroup", "TorchGroup", "find", "latest", "using"]
