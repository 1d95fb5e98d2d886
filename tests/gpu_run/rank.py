"""A rank of a job that runs a case of ``make gpu``, whose folder only pytest finds by itself."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.jobs import ROOT, Say


def work(folder: str, device: str, made: str, say: Say) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu.place import Place
    from gpu.ranks import train
    from gpu.where import Where

    place = Place(Where(device, is_quick=True))
    for way in place.ways():
        say(train(place, way, Path(folder) / f"runs-{way}", made))
