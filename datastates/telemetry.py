"""What a process does with its states, for OpenTelemetry: instruments that it reads when it
collects."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from datastates.system.telemetry import COUNTERS, Activity, Counter

from . import values
from .errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

    from datastates.maintenance.core import Core

_Read = Callable[["CallbackOptions"], Iterable["Observation"]]


def instrument(core: Core, meter: Meter | None = None) -> None:
    """Make the instruments; they do not keep the repository open, and report nothing once it is
    gone.

    :raises Unsupported: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise Unsupported(
            "OpenTelemetry is not installed: pip install opentelemetry-sdk, or read repo.stats()"
        ) from error
    if meter is None:
        meter = metrics.get_meter("datastates")
    elif not isinstance(meter, metrics.Meter):
        raise InvalidInput(
            f"meter is {values.shown(meter)}: give a Meter of OpenTelemetry, or leave it out"
        )
    known, labels = weakref.ref(core), {"repository": str(core.location)}

    def counted(counter: Counter) -> _Read:
        return lambda options: [
            metrics.Observation(counter.of(each), labels) for each in _activities(known())
        ]

    def timed(number: str) -> _Read:
        return lambda options: [
            metrics.Observation(getattr(timing, number), {**labels, "stage": timing.stage})
            for each in _activities(known())
            for timing in each.timings
        ]

    for counter in COUNTERS:
        meter.create_observable_counter(
            f"datastates.{counter.name}", [counted(counter)], counter.unit, counter.said
        )
    meter.create_observable_counter(
        "datastates.stage.time", [timed("total_s")], "s", "How long each stage took in all"
    )
    meter.create_observable_counter(
        "datastates.stage.runs", [timed("count")], "{run}", "How often each stage ran"
    )


def _activities(core: Core | None) -> list[Activity]:
    """The activities to report: none until something was captured."""
    host = None if core is None else core.running
    return [] if host is None else [host.recorder.activity()]
