"""Every step of a training is captured, and each state equals the live tensors bit for bit, for all
optimizers and ways to step."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

import datastates
from datastates.config import Config
from datastates.state.manifest import CHUNK_BYTES
from tests.engine.build import differing
from tests.engine.optimizers import FORMS, Form

from .case import Case, Found, Skip
from .place import Place
from .trainings import ACCELERATED, WAYS, Training, by_form

STEPS, QUICK_STEPS = 8, 3

BUSY_S = 0.005
"""The time that the device is kept busy before each step, so that the host is several steps ahead.
"""

QUICK = {"AdamW-lr=0.01-foreach", "SparseAdam-lr=0.01", "layers that are frozen at first"}
LATE_QUICK = {"AdamW-lr=0.01-foreach", "two devices"}

KEPT = {
    "AdamW-lr=0.01-foreach",
    "layers that are frozen at first",
    "on a stream of the training's",
    "graph, recorded between captures",
}
"""These are also tested with states that stay on the device."""

KEPT_BYTES = 64 << 20

Make = Callable[[Place], Training]


def cases(place: Place) -> Sequence[Case]:
    """Ways to step, first those that need an accelerator, then each stock optimizer in each of its
    forms."""
    made: dict[str, Make] = {form.id: partial(by_form, form) for form in _forms(place)}
    chosen = (
        set(made | WAYS)
        if not place.is_quick
        else LATE_QUICK
        if place.where.kind == "late"
        else QUICK
    )
    return [
        *(
            Case(name, partial(_accelerated, make), limit_s=60)
            for name, make in ACCELERATED.items()
        ),
        *(
            Case(name, partial(check, make), limit_s=30)
            for name, make in (WAYS | made).items()
            if name in chosen
        ),
        *(
            _kept(name, make)
            for name, make in (made | WAYS | ACCELERATED).items()
            if name in KEPT and (name in chosen or name in ACCELERATED)
        ),
    ]


def _kept(name: str, make: Make) -> Case:
    tried = _accelerated if name in ACCELERATED else check
    return Case(
        f"{name}, kept on the device", partial(tried, make, kept_bytes=KEPT_BYTES), limit_s=60
    )


def _forms(place: Place) -> Iterator[Form]:
    yield from FORMS
    if place.is_accelerator:
        for form in FORMS:
            if (
                form.options.get("foreach")
                and "capturable" in inspect.signature(form.make).parameters
            ):
                yield replace(form, options={**form.options, "capturable": True})


def _accelerated(make: Make, place: Place, kept_bytes: int = 0) -> Found:
    if not place.is_accelerator:
        raise Skip("needs an accelerator")
    return check(make, place, kept_bytes)


def check(make: Make, place: Place, kept_bytes: int = 0) -> Found:
    """Capture each of some steps, restore the last, and compare; on late devices once for each way
    to be late.

    ``kept_bytes`` of each device are for the newest states.

    :raises AssertionError: a state differs from the live tensors.
    """
    found: Found = {}
    for way in place.ways():
        with place.running(way):
            _try_alone(make, place)
        with (
            place.running(way),
            tempfile.TemporaryDirectory(prefix="datastates-gpu-") as folder,
            datastates.open(
                folder,
                config=Config(
                    memory_bytes=96 * CHUNK_BYTES, durable_interval_s=None, device_bytes=kept_bytes
                ),
            ) as repo,
        ):
            steps = QUICK_STEPS if place.is_quick else STEPS
            newest = _captured(make(place), place, repo, steps)
            _restore(make(place), place, repo, steps, newest)
            kept = repo.stats().activity.snapshots
            if bool(kept) is not (
                kept_bytes > 0 and (place.is_accelerator or place.where.kind == "late")
            ):
                raise AssertionError(f"{kept} states were kept on the device")
            found = {"states": steps, "leaves": len(newest), "kept": kept}
    return found


def _captured(
    training: Training, place: Place, repo: datastates.Repository, steps: int
) -> dict[str, object]:
    """Capture each step, and read only the last state, because reading waits for the device.
    Returns its values."""
    with repo.track(rng=False, **training.objects) as run, training.inside():
        expected, captures = [], list[datastates.Capture]()
        for _ in range(steps):
            place.keep_busy(BUSY_S)
            training.before(run)
            training.step(len(captures))
            expected.append(training.copies())
            captures.append(run.capture())
        place.finish()
        for capture in captures:
            capture.wait(timeout_s=20)
        lived = [training.on_host(each) for each in expected]
        wrong = [
            differing(each, repo.load(capture.uid))
            for each, capture in zip(lived, captures, strict=True)
        ]
    if any(wrong):
        paths = next(filter(None, wrong))
        raise AssertionError(
            f"{sum(map(bool, wrong))} of {steps} states are wrong; in the first {len(paths)}"
            f" leaves, {paths[0]} among them"
        )
    return lived[-1]


def _restore(
    training: Training,
    place: Place,
    repo: datastates.Repository,
    steps: int,
    newest: dict[str, object],
) -> None:
    """The newest state, restored into another training."""
    torch.manual_seed(1)
    with training.inside():
        for number in range(steps):
            training.step(number)
        repo.restore("main", objects=training.objects)
        found = training.copies()
        place.finish()
    odd = differing(newest, training.tree(found))
    if odd:
        raise AssertionError(
            f"restored otherwise than captured: {len(odd)} leaves, {odd[0]} among them"
        )


def _try_alone(make: Make, place: Place) -> None:
    """:raises Skip: torch does not support this combination."""
    try:
        training = make(place)
        with training.inside():
            for number in range(3):
                training.step(number)
        place.finish()
    except (RuntimeError, TypeError, ValueError, AssertionError) as exc:
        if "CUDA error" in str(exc):
            raise
        raise Skip(f"torch alone refuses it: {(str(exc).splitlines() or [''])[0][:160]}") from exc
