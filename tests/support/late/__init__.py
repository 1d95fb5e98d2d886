"""Devices that are really asynchronous, on any machine: what is queued on them runs later, as
late as an adversary likes."""

from .device import LateDevices, Lateness
from .dispatch import Hazard

__all__ = ["Hazard", "LateDevices", "Lateness"]
