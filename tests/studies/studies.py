"""Trainings that the tests of explorers run: a small model on scikit-learn's digits, in whatever
process they are sent to."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import datastates
from datastates import Config, PermutationSampler, Repository, State, Tracker
from datastates.state.tree import flatten
from datastates.studies import Plan, Variant, halving
from datastates.studies.records import make_durable
from datastates.studies.worker import Job, seed_everything

ROWS = 400
BATCH = 50
FAULTS = "DATASTATES_TEST_FAULTS"
WIDTH = "DATASTATES_TEST_WIDTH"
EVERY_STATE = Config(memory_bytes=96 << 20, durable_every=1, durable_interval_s=None)
CONFIG = Config(memory_bytes=96 << 20, durable_interval_s=None)


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels."""
    folder = (
        importlib.util.find_spec("sklearn") or pytest.skip("scikit-learn is not installed")
    ).submodule_search_locations
    assert folder is not None
    # importing it takes seconds
    data = np.loadtxt(
        Path(folder[0]) / "datasets" / "data" / "digits.csv.gz", delimiter=",", max_rows=ROWS
    )
    return torch.tensor(data[:, :-1] / 16, dtype=torch.float32), torch.tensor(
        data[:, -1], dtype=torch.int64
    )


def build(config: Any) -> tuple[nn.Module, torch.optim.Optimizer, PermutationSampler]:
    """A model that draws random numbers while it trains."""
    width = int(os.environ.get(WIDTH, "32"))
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))
    return (
        model,
        torch.optim.Adam(model.parameters(), lr=config.get("lr", 1e-2)),
        PermutationSampler(ROWS, seed=3),
    )


def one_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, sampler: PermutationSampler, run: Any
) -> float:
    """Every row once; the loss of the last batch."""
    x, y = digits()
    loss = torch.zeros(())
    for rows in run.steps(sampler.batches(BATCH)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def prefix(
    folder: str | Path, *, packs: str | Path | None = None, config: Config = CONFIG
) -> Repository:
    """A repository whose branch ``main`` was trained for an epoch; it is left open."""
    torch.set_num_threads(1)
    seed_everything(5)
    repo = datastates.open(folder, packs=packs, config=config)
    model, optimizer, sampler = build({})
    with repo.track(model=model, optimizer=optimizer, sampler=sampler) as run:
        loss = one_epoch(model, optimizer, sampler, run)
        run.capture(metrics={"loss": loss})
    return repo


def train(job: Job) -> None:
    """What every test trains unless it says otherwise."""
    model, optimizer, sampler = build(job.config)
    run = job.track(model=model, optimizer=optimizer, sampler=sampler)
    if job.is_new:
        for group in optimizer.param_groups:
            group["lr"] = job.config.get("lr", 1e-2)
    for epoch in job.epochs():
        loss = one_epoch(model, optimizer, sampler, run)
        meet(job.variant.name, epoch, run)
        job.report(loss=loss)


def meet(variant: str, epoch: int, run: Tracker) -> None:
    """The faults that ``faults`` planned for this place: once each, or always.

    What was captured before is durable by then."""
    folder = os.environ.get(FAULTS)
    if folder is None:
        return
    plan = json.loads((Path(folder) / "plan").read_text())
    what, is_always = plan.get(f"{variant}:{epoch}", (None, False))
    variant = variant.replace("/", "-")
    if what is None or not (first(Path(folder) / f"met-{variant}-{epoch}") or is_always):
        return
    if run.head is not None:
        make_durable(run.training.core, run.head.uid)
    match what:
        case "raise":
            raise ValueError(f"planned for {variant}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            raise KeyboardInterrupt
        case "hang":
            (Path(folder) / f"hangs-{variant}").write_text(str(os.getpid()))
            while True:
                signal.pause()
        case "block":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as code that never returns to Python
            (Path(folder) / f"hangs-{variant}").write_text(str(os.getpid()))
            while True:
                signal.pause()


def first(path: Path) -> bool:
    """Whether nobody made this file before."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def faults(folder: Path, **places: str) -> dict[str, str]:
    """The environment in which variants meet faults: ``low="1:kill"``, with an exclamation mark
    each time, else the first time only."""
    folder.mkdir(exist_ok=True)
    plan = {}
    for variant, what in places.items():
        epoch, kind = what.split(":")
        plan[f"{variant.replace('_', '-')}:{epoch}"] = (kind.rstrip("!"), kind.endswith("!"))
    (folder / "plan").write_text(json.dumps(plan))
    return {FAULTS: str(folder)}


def tree(epochs: int = 2) -> Plan:
    """Five variants on two levels; two of them with seeds of their own."""
    return Plan(
        (
            Variant("low", None, epochs, {"lr": 1e-3}),
            Variant("high", None, epochs, {"lr": 3e-2}),
            Variant("low-a", "low", 2, {"seed": 1}),
            Variant("low-b", "low", 1, {"seed": 2}),
            Variant("high-a", "high", 1, {}),
        )
    )


def rungs() -> Plan:
    """Four variants, of which two have a second rung, and one has a third."""
    rates = {"low": 1e-3, "high": 3e-2, "mid": 1e-2, "huge": 3.0}
    variants = tuple(Variant(name, None, 5, {"lr": rate}) for name, rate in rates.items())
    return halving(Plan(variants), "loss", every=2, keep=0.5)


def essence(
    repo: Repository, study: str, plan: Plan
) -> dict[str, list[tuple[str, int, dict[str, float]]]]:
    """What two runs of a study must have in common, bit for bit: by variant its states' digests,
    steps and metrics since the start."""
    return {
        name: [(state.digest, state.step, state.metrics) for state in path]
        for name, path in _paths(repo, study, plan).items()
    }


def contents(
    repo: Repository, study: str, plan: Plan
) -> dict[str, list[tuple[str, int, dict[str, float]]]]:
    """As ``essence``, but for Python's own generator of random numbers, from which other threads
    of a process may draw."""
    return {
        name: [(_content(repo.load(state.uid)), state.step, state.metrics) for state in path]
        for name, path in _paths(repo, study, plan).items()
    }


def results(
    repo: Repository, study: str, plan: Plan
) -> dict[str, tuple[str, list[tuple[int, dict[str, float]]]]]:
    """As ``contents``, where the bytes of each variant's last state alone are in the
    repository."""
    return {
        name: (_content(repo.load(path[0].uid)), [(state.step, state.metrics) for state in path])
        for name, path in _paths(repo, study, plan).items()
    }


def _paths(repo: Repository, study: str, plan: Plan) -> dict[str, list[State]]:
    start = repo.state(f"start/{study}").uid
    refs = {ref.name for ref in repo.refs()}
    names = [f"done/{study}/{variant.name}" for variant in plan.variants]
    if plan.halving is not None:
        names = [name for name in names if name in refs]
    found = {name.removeprefix(f"done/{study}/"): repo.log(name) for name in names}
    return {
        name: path[: [state.uid for state in path].index(start)] for name, path in found.items()
    }


def _content(tree: dict[str, Any]) -> str:
    del tree["rng"]["python"]
    flat = flatten(tree)
    found = hashlib.sha256(repr((flat.values, [leaf.path for leaf in flat.tensors])).encode())
    for leaf in flat.tensors:
        found.update(leaf.tensor.numpy().tobytes())
    return found.hexdigest()


def counts(repo: Repository) -> dict[str, int]:
    """How often each ref moved, and how many states there are: what a run that repeats nothing
    leaves as it is."""
    found = {ref.name: len(repo.reflog(ref.name)) for ref in repo.refs()}
    return {**found, "": len(repo.find("step >= 0"))}


def all_end(pids: Iterable[int]) -> bool:
    """Whether each of these processes is gone, or a zombie; one that has let go of its streams
    may take a moment more."""
    left, deadline = set(pids), time.monotonic() + 60
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if is_running(pid)}
        time.sleep(0.01)
    return not left


def is_running(pid: int) -> bool:
    """Whether a process is there that is no zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
