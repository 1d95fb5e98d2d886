"""The quality of scores that find faulty samples, and their cost in epochs.

    python benchmarks/outliers.py [--seeds N] [--first SEED] [--json FILE]

Data: Fashion-MNIST, a mixture like Covertype, and breast-cancer. Faults: labels of any other class,
labels of one similar class, inputs that belong to no class (near to the classes, and far), and wrong
targets of a regression. Each seed draws other faults, another model and other folds.

A peer trains one run of 20 epochs (AUM, Data Maps), or 5 folds of 20 epochs (cleanlab, 80 epochs).
The product gets a run of 15 epochs with 12 states, which costs at most 20 epochs with its forward
passes. A second product run gets 5 folds in addition, which costs at most 80 epochs together.
Without Debian's dataset-fashion-mnist, scikit-learn's digits replace Fashion-MNIST.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, out, table
from numpy.typing import NDArray
from sklearn.datasets import (
    load_breast_cancer,
    load_digits,
    make_classification,
    make_friedman1,
)
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss

import datastates
from datastates import Config, Repository
from datastates.studies import Job, OutlierReport, SerialExecutor, explore, kfold, outliers

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from fashion import load

Floats = NDArray[np.float64]
Kept = dict[str, tuple[Floats, float]]
"""The scores of a method, higher is more suspicious, and its cost in epochs."""

EPOCHS, OWN_EPOCHS, FOLD_EPOCHS, FOLDS, COUNT = 20, 15, 13, 5, 2000
DATA = ("breast-cancer", "covertype-like", "Fashion-MNIST")
FAULTS = (
    "uniform flips",
    "class-dependent flips",
    "near inputs",
    "far inputs",
    "regression errors",
)
GOAL = 0.01
SIMILAR = np.array([6, 1, 4, 0, 2, 7, 0, 9, 8, 5])
"""For each class of Fashion-MNIST a similar one; trousers and bags have none."""
SHARES = (0.365, 0.488, 0.062, 0.02, 0.02, 0.025, 0.02)
"""Of Covertype's seven classes, the rarest raised to 2 %."""


@dataclass(frozen=True, slots=True)
class Case:
    """Samples of which some are faulty. ``targets`` are classes, or standardised values."""

    inputs: Tensor
    targets: Tensor
    is_faulty: NDArray[np.bool_]
    classes: int
    rate: float
    seed: int

    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(100 * self.seed + seed)
        width = 128 if self.inputs.shape[1] > 300 else 64
        model = nn.Sequential(
            nn.Linear(self.inputs.shape[1], width), nn.ReLU(), nn.Linear(width, self.classes or 1)
        )
        return model, torch.optim.AdamW(model.parameters(), lr=self.rate)

    def loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        if self.classes:
            return cross_entropy(outputs, self.targets[rows])
        return mse_loss(outputs[:, 0], self.targets[rows])

    def epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        for batch in rows[torch.randperm(len(rows))].split(64 if len(self.inputs) > 1000 else 32):
            optimizer.zero_grad()
            self.loss(model(self.inputs[batch]), batch).backward()
            optimizer.step()

    def outputs(self, model: nn.Module, rows: Tensor) -> Floats:
        with torch.no_grad():
            found: Floats = model(self.inputs[rows]).double().numpy()
        return found


def plain(name: str, regression: bool, seed: int) -> Any:
    """Inputs and targets without faults."""
    if name == "breast-cancer":
        x, y = load_breast_cancer(return_X_y=True)
        x = (x - x.mean(0)) / x.std(0)
        return (x[:, :20], x[:, 23]) if regression else (x, y)
    if name == "covertype-like" and regression:
        return make_friedman1(COUNT, n_features=20, noise=1.0, random_state=seed)
    if name == "covertype-like":
        x, y = make_classification(
            COUNT,
            n_features=54,
            n_informative=12,
            n_redundant=8,
            n_classes=7,
            weights=list(SHARES),
            flip_y=0,
            class_sep=1.2,
            random_state=seed,
        )
        return (x - x.mean(0)) / x.std(0), y
    images, labels, _ = load(COUNT)
    if regression:  # the brightness of the lower half, from the upper half
        half = images.shape[2] // 2
        return images[:, 0, :half].flatten(1).numpy(), images[:, 0, half:].mean((1, 2)).numpy()
    return images.flatten(1).numpy(), labels.numpy()


def plant(name: str, fault: str | None, seed: int) -> Case:
    """The data with a fault in 10 % of the samples; inputs of no class are 5 %."""
    random, is_regression = np.random.default_rng(seed), fault == "regression errors"
    x, y = (np.array(each, dtype=np.float64) for each in plain(name, is_regression, seed))
    count, classes = len(y), 0 if is_regression else int(y.max()) + 1
    at = random.choice(count, count // 10, replace=False)
    if fault is None:
        at = at[:0]
    elif fault == "uniform flips":
        y[at] = (y[at] + random.integers(1, classes, len(at))) % classes
    elif fault == "class-dependent flips":
        to = SIMILAR if classes == 10 else (np.arange(classes) + 1) % classes
        may = np.flatnonzero(y == 1) if classes == 2 else np.flatnonzero(to[y.astype(int)] != y)
        at = random.choice(may, count // 10, replace=False)
        y[at] = to[y[at].astype(int)]
    elif is_regression:
        y[at] += random.choice([-1, 1], len(at)) * random.uniform(1, 3, len(at)) * y.std()
    else:
        at = at[: count // 20]
        x[at] = no_class(name, fault, x, at, random)
        y[at] = random.integers(0, classes, len(at))
    if is_regression:
        y = (y - y.mean()) / y.std()
    targets = torch.tensor(y, dtype=torch.float32 if is_regression else torch.int64)
    is_faulty = np.isin(np.arange(count), at)
    rate = 1e-3 if name == "Fashion-MNIST" else 3e-3
    return Case(torch.tensor(x, dtype=torch.float32), targets, is_faulty, classes, rate, seed)


def no_class(
    name: str, fault: str, x: Floats, at: NDArray[np.int64], random: np.random.Generator
) -> Floats:
    """Near: digits among clothes, or each column from another sample. Far: noise."""
    shape = (len(at), x.shape[1])
    if fault == "far inputs":
        return random.uniform(0, 1, shape) if name == DATA[2] else 3 * random.normal(size=shape)
    if name == DATA[2]:
        digits = torch.tensor(load_digits().images[random.choice(1797, len(at), False)] / 16)
        side = int(x.shape[1] ** 0.5)
        large: Floats = interpolate(digits[:, None], size=side, mode="bilinear").flatten(1).numpy()
        return large
    shuffled: Floats = np.take_along_axis(x, random.integers(0, len(x), shape), axis=0)
    return shuffled


# --- Peers ---


def margins(values: Floats, targets: NDArray[np.int64]) -> Floats:
    """The value of the target minus the largest other value, ``[..., n]``."""
    rows = np.arange(len(targets))
    others = values.copy()
    others[..., rows, targets] = -np.inf
    found: Floats = values[..., rows, targets] - others.max(-1)
    return found


def chances_of(outputs: Floats) -> Floats:
    found: Floats = torch.from_numpy(outputs).softmax(-1).numpy()
    return found


def peers(case: Case) -> Kept:
    """AUM (Pleiss et al. 2020), Data Maps (Swayamdipta et al. 2020) and cleanlab (Northcutt et al.
    2021). For a regression, the residual over held-out folds, which is cleanlab's too."""
    everything, count = torch.arange(len(case.targets)), len(case.targets)
    model, optimizer = case.build(0)
    along = []
    for _ in range(EPOCHS):
        case.epoch(model, optimizer, everything)
        along.append(case.outputs(model, everything))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(case.seed))
    held_out = np.zeros((count, case.classes or 1))
    for fold in range(FOLDS):
        held = order[fold::FOLDS]
        rows = torch.cat([order[other::FOLDS] for other in range(FOLDS) if other != fold])
        model, optimizer = case.build(fold + 1)
        for _ in range(EPOCHS):
            case.epoch(model, optimizer, rows)
        held_out[held.numpy()] = case.outputs(model, held)
    folds = EPOCHS * (FOLDS - 1)
    if not case.classes:
        return {"cleanlab, residual": (_residual(case, held_out[:, 0]), folds)}
    targets = case.targets.numpy()
    known = chances_of(np.stack(along))[:, np.arange(count), targets]
    return {
        "AUM": (-margins(np.stack(along), targets).mean(0), EPOCHS),
        "Data Maps, confidence": (-known.mean(0), EPOCHS),
        "Data Maps, variability": (known.std(0), EPOCHS),
        "cleanlab, self-confidence": (_quality(case, held_out, "self_confidence"), folds),
        "cleanlab, normalized margin": (_quality(case, held_out, "normalized_margin"), folds),
    }


def _quality(case: Case, held_out: Floats, method: str) -> Floats:
    """cleanlab's score, or its published formula if it is not installed."""
    targets, chances = case.targets.numpy(), chances_of(held_out)
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        own = chances[np.arange(len(targets)), targets]
        return -(own if method == "self_confidence" else margins(chances, targets))
    return -np.asarray(get_label_quality_scores(targets, chances, method=method))


def _residual(case: Case, predicted: Floats) -> Floats:
    return np.abs(case.targets.numpy() - predicted)


# --- The product ---


def train(repo: Repository, case: Case) -> None:
    """One branch on all data, with a state each epoch. The untrained state gets a tag."""
    model, optimizer = case.build(0)
    with repo.track(branch="main", model=model, optimizer=optimizer) as run:
        for epoch in range(OWN_EPOCHS + 1):
            if epoch:
                case.epoch(model, optimizer, torch.arange(len(case.targets)))
            run.capture(step=epoch, attributes={"epoch": epoch}).wait()
            if not epoch:
                repo.tag("untrained", run.head)


def product(case: Case) -> tuple[Kept, list[OutlierReport]]:
    """The default scores of one run, and the default scores of the run with folds."""
    data = list(zip(case.inputs.split(1024), case.targets.split(1024), strict=True))
    plan = kfold(FOLDS, epochs=FOLD_EPOCHS, samples=len(case.targets), seed=case.seed)

    def train_fold(job: Job) -> None:
        model, optimizer = case.build(0)
        job.track(model=model, optimizer=optimizer)
        for _ in job.epochs():
            case.epoch(model, optimizer, torch.tensor(job.train))
            job.report()

    with (
        tempfile.TemporaryDirectory() as folder,
        datastates.open(folder, config=Config(durable_every=1, memory_bytes=1 << 28)) as repo,
    ):
        train(repo, case)
        model, _ = case.build(0)
        one = outliers(repo, "main", model=model, data=data)
        executor = SerialExecutor()
        explore(repo, "untrained", plan, train_fold, executor, study="folds", progress=False)
        both = outliers(repo, "main", model=model, data=data, study="folds", plan=plan)
    found = {
        f"{name}{where}": (report.scores.columns[name], report.cost.total)
        for report, where in ((one, ""), (both, " with folds"))
        for name in report.scores.columns
        if where == "" or name.startswith("held-out") or name == "loss"
    }
    return found, [one, both]


# --- Tables ---


def judge(case: Case, score: Floats) -> float:
    """The average precision."""
    finite = np.nan_to_num(score, nan=0.0, posinf=1e30, neginf=-1e30)
    return float(average_precision_score(case.is_faulty, finite))


def spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def summarise(
    fault: str, judged: dict[str, dict[str, list[float]]], costs: dict[str, float]
) -> str:
    """A row for each method, and whether the goal is reached on each data set."""
    own = [method for method in costs if method.startswith("product")]
    rows = [
        [method, f"{costs[method]:.1f}", *(spread(judged[data][method]) for data in DATA)]
        for method in costs
    ]
    lines = [table([fault, "epochs", *DATA], rows)]
    for data in DATA:
        means = {method: statistics.mean(found) for method, found in judged[data].items()}
        for most in sorted({costs[each] for each in costs if each not in own}):
            peer = max(
                (e for e in costs if e not in own and costs[e] <= most), key=means.__getitem__
            )
            mine = max((e for e in own if costs[e] <= costs[peer]), key=means.__getitem__)
            difference = means[mine] - means[peer]
            lines.append(
                f"{data}, at most {most:.0f} epochs: {mine} {means[mine]:.3f}, best peer {peer}"
                f" {means[peer]:.3f}: {difference:+.3f}, goal"
                f" {'met' if difference >= -GOAL else 'missed'}"
            )
    return "\n".join(lines)


def calibration(case: Case, report: OutlierReport) -> dict[str, tuple[float, ...]]:
    """For each score: the rate, suspects, false suspects expected and found, and recall."""
    found: dict[str, tuple[float, ...]] = {}
    for name, selection in report.selections.items():
        suspects = selection.suspects
        false = int((suspects & ~case.is_faulty).sum())
        recall = (suspects & case.is_faulty).sum() / max(1, case.is_faulty.sum())
        expected = selection.false_suspects
        rate = suspects.mean()
        told = float("nan") if expected is None else expected
        found[name] = (float(rate), float(suspects.sum()), told, float(false), float(recall))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    out(machine())
    out(
        f"{load(1)[2]}; {options.seeds} seeds from {options.first}; average precision, mean ± spread"
    )
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    told: dict[str, dict[str, dict[str, list[tuple[float, ...]]]]] = {}
    for fault in (*FAULTS, None):
        judged: dict[str, dict[str, list[float]]] = {data: {} for data in DATA}
        costs: dict[str, float] = {}
        told[fault or "none"] = {data: {} for data in DATA}
        for data in DATA:
            for seed in range(options.first, options.first + options.seeds):
                case = plant(data, fault, seed)
                own, reports = product(case)
                for name, values in calibration(case, reports[0]).items():
                    told[fault or "none"][data].setdefault(name, []).append(values)
                if fault is None:
                    continue
                found = peers(case) | {f"product, {name}": each for name, each in own.items()}
                for method, (score, epochs) in found.items():
                    judged[data].setdefault(method, []).append(judge(case, score))
                    costs[method] = max(costs.get(method, 0.0), epochs)
        if fault is not None:
            results[fault] = judged
            out(summarise(fault, judged, costs))
        out(f"{time.monotonic() - began:.0f} s")
    header = ["fault", "data", "score", "rate", "suspects", "expected false", "false", "recall"]
    rows = [
        [fault, data, name, *(f"{statistics.mean(each):.3g}" for each in zip(*found, strict=True))]
        for fault, of in told.items()
        for data, scores in of.items()
        for name, found in scores.items()
    ]
    out(table(header, rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "judged": results, "told": told}))


if __name__ == "__main__":
    main()
