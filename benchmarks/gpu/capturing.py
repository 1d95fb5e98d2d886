"""The cost of a capture: the time that it blocks, the speed of its copies, its waits, the copied
bytes, and the overhead at every step."""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

import datastates

from .case import Case, Found, Skip
from .place import Place, timed
from .state import Floor, Model, opened
from .trace import crossed, traced, waits

BUSY_S = 0.3

KEPT = 3.2
"""The number of states that stay on the device, if any do."""


def cases(place: Place) -> Sequence[Case]:
    """The cases of this part."""
    return [
        Case("blocked and copied", _blocked, limit_s=60),
        Case("synchronisations", _synchronisations, limit_s=60),
        Case("behind a busy device", _behind, limit_s=40),
        Case("every step of a training", _training, limit_s=80),
        Case("four fifths frozen", _frozen, limit_s=60),
        Case("the update after a capture", _updates, limit_s=60),
        Case(
            "every step of a training, kept on the device",
            partial(_training, kept=KEPT),
            limit_s=80,
        ),
    ]


def _blocked(place: Place) -> Found:
    """Captures in turns with two floors: one contiguous copy, and one call for all tensors."""
    model = Model.make(place)
    floor, tensors = Floor.make(place, model.size), model.tensors
    views = floor.here.split([tensor.nbytes for tensor in tensors])
    targets = [
        view.view(tensor.dtype).view(tensor.shape)
        for view, tensor in zip(views, tensors, strict=True)
    ]
    samples: dict[str, list[float]] = {
        name: []
        for name in (
            "blocked_ms",
            "copied_ms",
            "done_ms",
            "floor_ms",
            "tensors_ms",
            "share_of_floor",
        )
    }
    with opened(model.size) as repo, repo.track(**model.objects) as run:
        first = _capture(model, run)
        for index in range(model.warm_up + (2 if place.is_quick else 10)):
            blocked, copied, done = _capture(model, run)
            alone = floor.to_host()
            each = timed(place, partial(torch._foreach_copy_, targets, tensors, True))
            if index >= model.warm_up:
                found = (
                    1e3 * blocked,
                    1e3 * copied,
                    1e3 * done,
                    1e3 * alone,
                    1e3 * each,
                    alone / copied,
                )
                for name, value in zip(samples, found, strict=True):
                    samples[name].append(value)
    speeds = {"GB_per_s": [model.size / each / 1e6 for each in samples["copied_ms"]]}
    return {
        "tensors": len(tensors),
        "bytes": model.size,
        "very_first_ms": 1e3 * first[0],
        **samples,
        **speeds,
    }


def _capture(model: Model, run: datastates.Tracker) -> tuple[float, float, float]:
    """Seconds until ``capture`` returned, until the copy has ended, and until the state is
    complete."""
    model.optimizer.step()
    model.place.finish()
    start = time.perf_counter()
    capture = run.capture()
    blocked = time.perf_counter() - start
    run.fence()
    model.place.finish()
    copied = time.perf_counter() - start
    capture.wait(timeout_s=50)
    return blocked, copied, time.perf_counter() - start


def _synchronisations(place: Place) -> Found:
    """Synchronizations of captures and of fenced steps: by torch's own mode, with the line in
    datastates, and by the driver's calls in a trace."""
    model = Model.make(place)
    with opened(model.size) as repo, repo.track(**model.objects) as run:
        for _ in range(model.warm_up):
            _capture(model, run)
        with _noticed(place) as noticed:
            for _ in range(3):
                run.capture()
                model.optimizer.step()
        run.capture().wait(timeout_s=50)
        place.finish()

        def call() -> None:
            run.capture()
            model.optimizer.step()

        events = waits(traced(place, call))
    if not place.is_accelerator:
        raise Skip("there is nothing to synchronise with")
    mine = threading.current_thread().name
    ours = [line for thread, line in noticed if thread == mine]
    others = sorted({f"{thread}: {line}" for thread, line in noticed if thread != mine})
    return {
        "of_the_training": max(len(ours), len(events)),
        "lines": sorted(set(ours)),
        "in_the_trace": events,
        "of_others": others,
    }


@contextmanager
def _noticed(place: Place) -> Iterator[list[tuple[str, str]]]:
    """The thread and the line of each synchronization that torch detects."""
    found: list[tuple[str, str]] = []
    set_mode: Callable[[str], object] = (
        torch.cuda.set_sync_debug_mode if place.is_accelerator else str
    )

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" in str(message) and "prototype" not in str(message):
            # not the warning of torch when the mode is set
            lines = [
                f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
                for frame in traceback.extract_stack()
                if "datastates" in frame.filename
            ]
            found.append((threading.current_thread().name, lines[-1] if lines else "torch"))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        set_mode("warn")
        try:
            yield found
        finally:
            set_mode("default")


def _behind(place: Place) -> Found:
    """The time that a capture blocks while the device is busy for ``BUSY_S``."""
    model, blocked, busy = Model.make(place), list[float](), list[float]()
    with opened(model.size) as repo, repo.track(**model.objects) as run:
        for index in range(model.warm_up + 5):
            model.optimizer.step()
            place.finish()
            start = time.perf_counter()
            place.keep_busy(BUSY_S)
            before = time.perf_counter()
            capture = run.capture()
            run.fence()
            returned = time.perf_counter()
            place.finish()
            if index >= model.warm_up:
                blocked.append(1e3 * (returned - before))
                busy.append(1e3 * (time.perf_counter() - start))
            capture.wait(timeout_s=50)
    if not place.is_accelerator:
        raise Skip("nothing keeps a CPU busy behind one's back")
    return {"blocked_ms": blocked, "busy_ms": busy}


def _updates(place: Place) -> Found:
    """The time from the call of ``capture`` until the device has done the next update, without and
    with states on the device."""
    samples: dict[str, list[float]] = {}
    kept = 0
    for name, states in (("", 0.0), ("kept_", KEPT)):
        model, blocked, updated = Model.make(place), list[float](), list[float]()
        with opened(model.size, kept=states) as repo, repo.track(**model.objects) as run:
            for index in range(model.warm_up + (2 if place.is_quick else 10)):
                place.finish()
                start = time.perf_counter()
                capture = run.capture()
                returned = time.perf_counter()
                model.optimizer.step()
                if place.is_accelerator:
                    torch.cuda.current_stream().synchronize()
                if index >= model.warm_up:
                    blocked.append(1e3 * (returned - start))
                    updated.append(1e3 * (time.perf_counter() - start))
                capture.wait(timeout_s=50)
            kept = repo.stats().activity.snapshots
        samples |= {f"{name}blocked_ms": blocked, f"{name}updated_ms": updated}
        del model
    if not place.is_accelerator:
        raise Skip("nothing is kept on a device where there is none")
    if not kept:
        raise AssertionError("no state was kept on the device")
    return {"kept": kept, **samples}


def _training(place: Place, kept: float = 0.0) -> Found:
    """Segments with a capture at every step between segments without captures. Forward and backward
    take longer than the copy."""
    if kept and not place.is_accelerator:
        raise Skip("nothing is kept on a device where there is none")
    model = Model.make(place)
    floor = Floor.make(place, model.size)
    copy, windows = floor.to_host(), 1
    del floor
    while (batch := timed(place, partial(model.backward, windows))) < 1.3 * copy and windows < (
        2 if place.is_quick else 128
    ):
        windows *= 2
    steps = 3 if place.is_quick else max(8, min(100, int(1.5 / batch)))
    overheads, plain, captured = list[float](), list[float](), list[float]()
    with opened(model.size, kept=kept) as repo, repo.track(**model.objects) as run:
        place.until_it_digests()
        for _ in range(model.warm_up):
            _capture(model, run)
        _segment(model, windows, steps, None)
        plain.append(_segment(model, windows, steps, None))
        for _ in range(1 if place.is_quick else 6):
            captured.append(_segment(model, windows, steps, run))
            plain.append(_segment(model, windows, steps, None))
            overheads.append(100 * (2 * captured[-1] / (plain[-2] + plain[-1]) - 1))
        snapshots = repo.stats().activity.snapshots
    if kept and not snapshots:
        raise AssertionError("no state was kept on the device")
    found: Found = {
        "windows": windows,
        "steps": steps,
        "copy_ms": 1e3 * copy,
        "forward_backward_ms": 1e3 * batch,
    }
    found |= {
        "plain_step_ms": [1e3 * each for each in plain],
        "captured_step_ms": [1e3 * each for each in captured],
    }
    return found | {
        "kept": snapshots,
        "is_longer_than_the_copy": batch > copy,
        "overhead_percent": overheads,
    }


def _segment(model: Model, windows: int, steps: int, run: datastates.Tracker | None) -> float:
    """The seconds of a step. Remaining work of the captures is waited for afterwards."""
    captures = list[datastates.Capture]()
    model.place.finish()
    start = time.perf_counter()
    for _ in range(steps):
        model.backward(windows)
        model.optimizer.step()
        if run is not None:
            captures.append(run.capture())
    model.place.finish()
    seconds = (time.perf_counter() - start) / steps
    for capture in captures:
        capture.wait(timeout_s=50)
    return seconds


def _frozen(place: Place) -> Found:
    """The share of bytes that a capture copies to the host if four fifths of the state do not
    change."""
    model = Model.make(place)
    whole, frozen = sum(each.numel() for each in model.model.parameters()), 0
    for parameter in sorted(model.model.parameters(), key=torch.numel, reverse=True):
        if frozen + parameter.numel() <= 0.8 * whole:
            parameter.requires_grad, parameter.grad = False, None
            frozen += parameter.numel()
    found: Found = {"frozen_percent": 100 * frozen / whole}
    with opened(model.size) as repo, repo.track(**model.objects) as run:
        for _ in range(model.warm_up):
            place.until_it_digests()
            model.backward(1)
            _capture(model, run)
        moved = crossed(traced(place, partial(_capture, model, run)))
    if not place.is_accelerator:
        raise Skip(
            f"nothing crosses without an accelerator ({found['frozen_percent']:.0f} % were frozen)"
        )
    return found | {"crossed_percent": 100 * sum(moved.values()) / model.size, "bytes": moved}
