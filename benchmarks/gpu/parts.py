"""The parts of a run, in order, with their weights for the division of the time.

torch is imported when a part runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .case import Case
    from .place import Place


@dataclass(frozen=True, slots=True)
class Part:
    """A part.

    ``module``, whose name may be relative to this package, has a function ``cases``."""

    name: str
    title: str
    module: str
    weight: float

    def cases(self, place: Place) -> Sequence[Case]:
        """Its cases; imports the module."""
        listed: Sequence[Case] = importlib.import_module(self.module, __package__).cases(place)
        return listed


PARTS = (
    Part("environment", "Environment", ".environment", 40),
    Part("probes", "Probes", ".probes", 50),
    Part("tests", "Tests marked gpu", ".marked", 120),
    Part("correctness", "Every step over optimizers", ".correctness", 100),
    Part("ranks", "Ranks, and devices without memory", ".ranks", 40),
    Part("capture", "Capture", ".capturing", 110),
    Part("restore", "Restore and digests", ".restoring", 45),
    Part("clone", "Clones on one machine", ".cloning", 40),
    Part("dcp", "torch.distributed.checkpoint", ".dcp", 60),
)
