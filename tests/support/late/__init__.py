"""Devices that are really asynchronous, on any machine: what is queued on them runs later, as
late as an adversary likes."""

from .device import LateDevices as LateDevices
from .dispatch import Hazard as Hazard
from .streams import Lateness as Lateness
