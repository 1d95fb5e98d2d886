"""The cost of a capture: the time that it blocks, its memory, and the overhead of a training that
captures every step.

    python benchmarks/capture.py [--quick] [--part blocking|tiny|training|memory|start] [--json
    FILE] [--folder DIR] python benchmarks/capture.py --part training --rounds 12 --method
    "datastates, every step durable" python benchmarks/capture.py --part start [--size 1M|30M|100M]
    [--seconds 30]

Every method is measured in turn, round after round, in one run; a training segment with captures is
compared with the segments without on both sides of it. Compare the wall and CPU overhead of the
run: a method that does not block may still use the training's cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from capture_peers import (
    DcpAsync,
    ForeachCopy,
    Method,
    Objects,
    Ours,
    Prototype,
    TorchSave,
    TorchSnapshot,
    state_bytes,
    state_tensors,
)
from capture_start import SIZES, start
from common import machine, out, short, spread, table
from gpt import LARGE, MEDIUM, TINY, Trainer

import datastates
from datastates.config import Config

Update = Callable[[], object]

WARM_UP = 5
"""Captures that are not counted, so that every method has touched the memory that it reuses. The
first is reported separately."""

IN_A_ROW = 3
"""Captures of a method in its turn. The first follows the work of another method, and is reported
separately."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One capture, in seconds: until ``capture`` returned, until the tensors could change, until it
    was done."""

    blocked_s: float
    copied_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A sequence of training steps: their mean wall time, CPU time and blocked time, the time to
    finish after them, and the time of the warm-up steps before them."""

    warm_up_s: float
    step_s: float
    cpu_s: float
    blocked_s: float
    drain_s: float


# How long a capture blocks


@dataclass(frozen=True, slots=True)
class Samples:
    """The captures of one method: its very first, the first of each later turn, and those in
    sequence."""

    very_first: Sample
    first_of_turn: list[Sample]
    in_a_row: list[Sample]


def blocking(
    objects: Objects, update: Update, methods: dict[str, Method], folder: Path, rounds: int
) -> dict[str, Samples]:
    """Run each method in turn, ``rounds`` times after a warm-up turn. ``update`` changes the
    tensors before each capture.

    Dirty pages of a method are written before the next method starts, so that they do not slow it.
    """
    turns: dict[str, list[list[Sample]]] = {name: [] for name in methods}
    for name, method in methods.items():
        method.prepare(objects, _fresh(folder, name))
    for index in range(1 + rounds):
        for name, method in methods.items():
            os.sync()
            turn = []
            for _ in range(WARM_UP if index == 0 else IN_A_ROW):
                update()
                turn.append(_capture(method))
            turns[name].append(turn)
    for method in methods.values():
        method.close()
    return {
        name: Samples(
            warm_up[0], [turn[0] for turn in rest], [sample for turn in rest for sample in turn[1:]]
        )
        for name, (warm_up, *rest) in turns.items()
    }


def _capture(method: Method) -> Sample:
    start = time.perf_counter()
    method.capture()
    returned = time.perf_counter()
    method.fence()
    copied = time.perf_counter()
    method.finish()
    return Sample(returned - start, copied - start, time.perf_counter() - start)


def _blocking_methods() -> dict[str, Method]:
    methods: dict[str, Method] = {
        "datastates": Ours(),
        "torch.save to memory": TorchSave(fsync=False),
        "dcp.async_save, default": DcpAsync(reuse=False),
        "dcp.async_save, best": DcpAsync(reuse=True),
    }
    if importlib.util.find_spec("torchsnapshot"):
        # it requires any torch version: install it with --no-deps
        methods["torchsnapshot.async_take"] = TorchSnapshot()
    return methods


def blocking_large(folder: Path, *, quick: bool, rounds: int) -> dict[str, Any]:
    """A 100M-parameter GPT with AdamW."""
    return _blocking_report("GPT + AdamW", "large", folder, quick=quick, rounds=rounds)


def blocking_tiny(folder: Path, *, quick: bool, rounds: int) -> dict[str, Any]:
    """10,000 tensors of 1 KiB, to measure the cost of each tensor."""
    return _blocking_report("tiny tensors", "tiny", folder, quick=quick, rounds=rounds)


def pair(folder: Path, what: str, name: str, *, quick: bool, rounds: int) -> dict[str, Any]:
    """One method and the floor in turns, without threads and memory of other methods in the
    process."""
    if what == "large":
        trainer = Trainer.make(TINY if quick else LARGE)
        objects: Objects = trainer.objects
        update: Update = trainer.optimizer.step
    else:
        tensors = {f"t{index}": torch.randn(256) for index in range(500 if quick else 10_000)}
        objects, update = (
            {"tensors": tensors},
            lambda: torch._foreach_add_(list(tensors.values()), 1.0),
        )
    samples = blocking(
        objects, update, {"floor": ForeachCopy(), name: _blocking_methods()[name]}, folder, rounds
    )
    return {
        "tensors": len(state_tensors(objects)),
        "bytes": state_bytes(objects),
        "floor": samples["floor"],
        "method": samples[name],
    }


def _blocking_report(
    title: str, what: str, folder: Path, *, quick: bool, rounds: int
) -> dict[str, Any]:
    rows, found = [], {}
    for name in _blocking_methods():
        command = [
            sys.executable,
            __file__,
            "--part",
            "pair",
            "--pair",
            what,
            name,
            "--rounds",
            str(rounds),
            "--folder",
            str(folder),
        ]
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])], check=False, stdout=subprocess.PIPE
        )
        if done.returncode:
            rows.append([name, f"failed with {done.returncode}, see above", *[""] * 5])
            continue
        found[name] = one = msgspec.json.decode(done.stdout.splitlines()[-1])
        floor, samples = (msgspec.convert(one[key], Samples) for key in ("floor", "method"))
        sys.stderr.write(
            f"{title}: {name}:"
            f" {1e3 * statistics.median(sample.copied_s for sample in samples.in_a_row):.1f} ms\n"
        )
        if name == "datastates":
            rows += [
                ["floor: _foreach_copy_", *_times(floor, "copied_s", floor)],
                ["datastates, fenced", *_times(samples, "blocked_s", floor)],
            ]
        rows.append(
            [
                "datastates, unfenced" if name == "datastates" else name,
                *_times(samples, "copied_s", floor),
            ]
        )
    if not found:
        raise SystemExit("every method failed, see above")
    one = next(iter(found.values()))
    counted = len(one["method"]["in_a_row"])
    out(
        f"\n## {title}: {one['tensors']} tensors, {one['bytes'] / 1e6:.1f} MB; ms, median [min .."
        f" max] of {counted}\n"
    )
    out(
        table(
            [
                "method",
                "blocked",
                "x its floor",
                "first of a turn",
                "x its floor",
                "very first",
                "done",
            ],
            rows,
        )
    )
    return found


def _times(samples: Samples, field: str, floor: Samples) -> list[str]:
    cells = []
    for ours, theirs in (
        (samples.in_a_row, floor.in_a_row),
        (samples.first_of_turn, floor.first_of_turn),
    ):
        values = [getattr(sample, field) for sample in ours]
        cells += [
            spread(values, 1e3),
            (
                f"{statistics.median(values) / statistics.median(sample.copied_s for sample in theirs):.2f}"
            ),
        ]
    done = spread([sample.done_s for sample in samples.in_a_row], 1e3)
    return [*cells, short(1e3 * getattr(samples.very_first, field)), done]


# What a training run pays


def _training_methods() -> dict[str, Method]:
    return {
        "datastates, in memory": Ours(),
        "datastates, every step durable": Ours(durable_every=1),
        "datastates, every 5th durable": Ours(durable_every=5),
        "bare prototype, in memory": Prototype(durable_every=None),
        "bare prototype, every step durable": Prototype(durable_every=1),
        "blocking memcpy": ForeachCopy(),
        "dcp.async_save, best, no fsync": DcpAsync(reuse=True),
        "torch.save, fsync": TorchSave(fsync=True),
    }


def training(folder: Path, *, quick: bool, rounds: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """A 29M-parameter GPT with a capture at every step. Short segments of each method, or of the
    methods in ``only``, alternate with segments without captures."""
    trainer = Trainer.make(TINY if quick else MEDIUM)
    steps = 5 if quick else 15
    methods = {
        name: method for name, method in _training_methods().items() if name in (only or TRAINED)
    }
    overheads: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    segment(trainer, None, steps)
    before = segment(trainer, None, steps)
    steps_s = [before.step_s]
    for index in range(rounds):
        for name, method in methods.items():
            path = _fresh(folder, name)
            method.prepare(trainer.objects, path)
            found = segment(trainer, method, steps)
            method.close()
            shutil.rmtree(path)
            after = segment(trainer, None, steps)
            overheads[name].append(_overhead(found, before, after))
            sys.stderr.write(
                f"round {index + 1} of {rounds}: {name}: {overheads[name][-1]['wall_percent']:.1f}"
                f" % of wall time, {overheads[name][-1]['warm_up_ms']:.0f} ms in the first"
                f" {WARM_UP} steps\n"
            )
            before = after
            steps_s.append(after.step_s)
    return _training_report(trainer, overheads, steps_s, steps)


def segment(trainer: Trainer, method: Method | None, steps: int, warm_up: int = WARM_UP) -> Segment:
    """Train ``steps`` steps, each captured, after some warm-up steps. The CPU time includes work
    that continues after the last step."""
    began, blocked = time.perf_counter(), 0.0
    for index in range(warm_up + steps):
        if index == warm_up:
            start, cpu, blocked = time.perf_counter(), time.process_time(), 0.0
        trainer.backward()
        blocked += _timed(method.fence) if method else 0.0
        trainer.optimizer.step()
        blocked += _timed(method.capture) if method else 0.0
    end = time.perf_counter()
    drain = _timed(method.finish) if method else 0.0
    return Segment(
        start - began,
        (end - start) / steps,
        (time.process_time() - cpu) / steps,
        blocked / steps,
        drain,
    )


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _overhead(found: Segment, before: Segment, after: Segment) -> dict[str, float]:
    step_s = (before.step_s + after.step_s) / 2
    return {
        "warm_up_ms": 1e3 * (found.warm_up_s - WARM_UP * step_s),
        "wall_percent": 100 * (found.step_s / step_s - 1),
        "cpu_percent": 100 * (2 * found.cpu_s / (before.cpu_s + after.cpu_s) - 1),
        "blocked_ms": 1e3 * found.blocked_s,
        "drain_ms": 1e3 * found.drain_s,
    }


def _training_report(
    trainer: Trainer, overheads: dict[str, list[dict[str, float]]], steps_s: list[float], steps: int
) -> dict[str, Any]:
    size, rounds = state_bytes(trainer.objects), len(next(iter(overheads.values())))
    drift = [abs(after / before - 1) * 100 for before, after in itertools.pairwise(steps_s)]
    out(f"\n## Training, a capture at every step: state of {size / (1 << 20):.0f} MiB\n")
    out(
        f"{steps} steps a segment, after {WARM_UP} in a fresh repository to warm up; median [min .."
        f" max] of {rounds} rounds"
    )
    out(
        f"a step without: {spread(steps_s, 1e3)} ms; neighbouring segments without differ by"
        f" {spread(drift, 1)} %\n"
    )
    rows = [
        [name, *(spread([row[key] for row in found], 1) for key in found[0])]
        for name, found in overheads.items()
    ]
    out(
        table(
            [
                "method",
                f"the first {WARM_UP} steps lose ms",
                "wall overhead %",
                "CPU overhead %",
                "blocked ms a step",
                "left to finish ms",
            ],
            rows,
        )
    )
    return {"state_bytes": size, "steps": steps, "baseline_step_s": steps_s, "overheads": overheads}


# What memory it takes


def memory(folder: Path, *, quick: bool, rounds: int) -> dict[str, Any]:
    """The peak memory of a separate process that captures, compared with its memory before plus its
    arenas."""
    command = [
        sys.executable,
        __file__,
        "--part",
        "peak",
        "--folder",
        str(folder),
        *(["--quick"] if quick else []),
    ]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[
            -1
        ]
    )
    out("\n## Peak memory\n")
    out(
        f"model, optimizer and gradients {found['before'] / 1e6:.0f} MB + arenas"
        f" {found['arenas'] / 1e6:.0f} MB: peak {found['peak'] / 1e6:.0f} MB,"
        f" {found['peak'] / (found['before'] + found['arenas']):.3f} of their sum"
    )
    return found


def peak(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Capture durably at every step in this process, and print the peak memory."""
    trainer = Trainer.make(TINY if quick else LARGE)
    arenas = 2 * state_bytes(trainer.objects) + (64 << 20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    with datastates.open(
        _fresh(folder, "peak"), config=Config(memory_bytes=arenas, durable_every=1)
    ) as repo:
        run = repo.track(**trainer.objects)
        for _ in range(3):
            trainer.optimizer.step()
            run.capture().wait("durable")
        run.close()
    return {"before": before, "arenas": arenas, "peak": _status("VmHWM")}


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


# Folders


def _fresh(folder: Path, name: str) -> Path:
    path = (Path("/dev/shm") / folder.name if "to memory" in name else folder) / name.replace(
        " ", "-"
    ).replace(":", "")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


TRAINED = [*_training_methods()]

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "blocking": blocking_large,
    "tiny": blocking_tiny,
    "memory": memory,
    "training": training,
    "start": start,
}


def main() -> None:
    """Measure the selected parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=[*PARTS, "peak", "pair"], action="append")
    parser.add_argument(
        "--pair",
        nargs=2,
        metavar=("WHAT", "METHOD"),
        help="for the part pair: large or tiny, and the method",
    )
    parser.add_argument("--quick", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    parser.add_argument(
        "--size", choices=SIZES, action="append", help="for the part start: these sizes only"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="for the part start: how long each training takes",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="for the part start: threads of torch in each training (1)",
    )
    parser.add_argument(
        "--method",
        choices=TRAINED,
        action="append",
        help="for the part training: these methods only, in many rounds",
    )
    parser.add_argument("--rounds", type=int, help="how often each method is measured (5)")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' own
    with tempfile.TemporaryDirectory(prefix="datastates-capture-", dir=options.folder) as name:
        folder = Path(name)
        try:
            if options.part == ["peak"]:
                out(json.dumps(peak(folder, quick=options.quick)))
                return
            if options.part == ["pair"]:
                out(
                    msgspec.json.encode(
                        pair(folder, *options.pair, quick=options.quick, rounds=rounds)
                    ).decode()
                )
                return
            out(f"{machine()}; torch on one thread")
            parts: dict[str, Callable[..., dict[str, Any]]] = {
                **PARTS,
                "training": partial(training, only=options.method or ()),
                "start": partial(
                    start,
                    sizes=options.size or SIZES,
                    seconds=options.seconds,
                    threads=options.threads,
                ),
            }
            results = {
                part: parts[part](folder, quick=options.quick, rounds=rounds)
                for part in options.part or parts
            }
        finally:
            shutil.rmtree(Path("/dev/shm") / folder.name, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
