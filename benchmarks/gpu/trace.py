"""The trace of a call by torch's profiler: the waits of the host for the device, and the copied
bytes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from .place import Place

MARKED = "what is looked at"
Event = dict[str, Any]


def traced(place: Place, call: Callable[[], object]) -> list[Event]:
    """Every event of the profiler during the call, and until the device was idle after it."""
    place.finish()
    with tempfile.TemporaryDirectory(prefix="datastates-gpu-") as folder:
        path = Path(folder) / "trace.json"
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if place.is_accelerator else []),
        ]
        with profile(activities=activities) as profiler:
            with record_function(MARKED):
                call()
            place.finish()
        profiler.export_chrome_trace(str(path))
        listed: list[Event] = json.loads(path.read_text())["traceEvents"]
    return listed


def waits(events: Sequence[Event]) -> list[str]:
    """The driver's calls by which the calling thread waited."""
    (marked,) = (
        event
        for event in events
        if event.get("name") == MARKED and event.get("cat") == "user_annotation"
    )
    start, end = marked["ts"], marked["ts"] + marked["dur"]
    return [
        str(event["name"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "Synchronize" in event["name"]
        and event["tid"] == marked["tid"]
        and start <= event["ts"] <= end
    ]


def crossed(events: Sequence[Event]) -> dict[str, int]:
    """Bytes that were copied to the host, by the kind of host memory."""
    found: dict[str, int] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy" and "DtoH" in event["name"]:
            kind = "pageable" if "Pageable" in event["name"] else "pinned"
            found[kind] = found.get(kind, 0) + int(event["args"]["bytes"])
    return found
