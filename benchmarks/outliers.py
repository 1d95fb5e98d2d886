"""The quality of methods that find outliers, and their cost in epochs: Fashion-MNIST with wrong
labels.

    python benchmarks/outliers.py [--seeds N] [--samples N] [--json FILE]

10 % of the labels are replaced by another class. Each seed draws other labels, another model and
other folds. Every method trains the same small MLP for 20 epochs, or forks of it. At most 10 states
of a branch are read, and their losses averaged. Epochs are over the whole data, and a forward pass
over it counts as 1/3. Without Debian's dataset-fashion-mnist it uses scikit-learn's digits, which
separate the methods less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import machine, out, table
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

import datastates
from datastates import Config, Repository
from datastates.studies import Job, OutlierReport, Plan, SerialExecutor, explore, kfold, outliers
from datastates.studies.outlier_scores import FORWARD

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from fashion import load

EPOCHS, FLIPPED, STATES, BATCH = 20, 0.1, 10, 64
FIRST_SEED = 20  # the combination was chosen on other seeds
COMBINED = "combination: runs of 20 and 10 epochs, 3 folds forked at epoch 5 for 8"
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one method on one data set."""

    method: str
    score: Floats
    epochs: float


class Data:
    """Pictures whose labels are wrong where ``is_flipped``."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int) -> None:
        self.inputs, self.seed = images.flatten(1), seed
        generator = torch.Generator().manual_seed(seed)
        flipped = torch.randperm(len(labels), generator=generator)[: round(FLIPPED * len(labels))]
        self.labels = labels.clone()
        self.labels[flipped] = (
            labels[flipped] + torch.randint(1, 10, (len(flipped),), generator=generator)
        ) % 10
        self.is_flipped = np.isin(np.arange(len(labels)), flipped.numpy())
        self.order = torch.Generator().manual_seed(seed + 1000)

    def __len__(self) -> int:
        return len(self.labels)

    def build(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(100 * self.seed + seed)
        model = nn.Sequential(nn.Linear(self.inputs.shape[1], 128), nn.ReLU(), nn.Linear(128, 10))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        return cross_entropy(model(self.inputs[rows]), self.labels[rows], reduction="none")

    def epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        for batch in rows[torch.randperm(len(rows), generator=self.order)].split(BATCH):
            optimizer.zero_grad()
            self.loss(model, batch).mean().backward()
            optimizer.step()


def train_run(repo: Repository, data: Data, seed: int) -> None:
    """Train a branch ``run-<seed>`` on all of the data. The untrained state of the first branch,
    and the states that are forked, get tags."""
    model, optimizer = data.build(seed)
    with repo.track(branch=f"run-{seed}", model=model, optimizer=optimizer) as run:
        for epoch in range(EPOCHS + 1):
            if epoch:
                data.epoch(model, optimizer, torch.arange(len(data)))
            run.capture(step=epoch, attributes={"epoch": epoch}).wait()
            if seed == 0 and epoch in (0, 5, 10):
                repo.tag(f"epoch-{epoch}", run.head)


def fork(repo: Repository, data: Data, folds: int, prefix: int, epochs: int) -> tuple[str, Plan]:
    """Hold out each of ``folds`` parts for some epochs after epoch ``prefix`` of the first run."""
    study, plan = (
        f"{folds}-folds-from-{prefix}",
        kfold(folds, epochs=epochs, samples=len(data), seed=data.seed),
    )

    def train(job: Job) -> None:
        model, optimizer = data.build(0)
        job.track(model=model, optimizer=optimizer)
        for _ in job.epochs():
            data.epoch(model, optimizer, torch.tensor(job.train))
            job.report()

    explore(repo, f"epoch-{prefix}", plan, train, SerialExecutor(), study=study, progress=False)
    return study, plan


def read(
    repo: Repository,
    data: Data,
    branches: Sequence[str],
    study: str | None = None,
    plan: Plan | None = None,
) -> OutlierReport:
    model, _ = data.build(0)
    return outliers(
        repo,
        branches,
        study=study,
        plan=plan,
        model=model,
        loss=data.loss,
        count=len(data),
        states=STATES,
    )


def by_lineage(repo: Repository, data: Data, runs: int, epochs: int) -> Found:
    report = read(repo, data, [f"run-{seed}@step:{epochs}" for seed in range(runs)])
    return Found(
        f"losses along the lineage, {runs} run{'s'[: runs > 1]} of {epochs} epochs",
        report.scores.score,
        report.cost.total,
    )


def by_forks(repo: Repository, data: Data, folds: int, prefix: int) -> Found:
    """The held-out losses alone. No loss of the prefix is read, so its passes are not counted."""
    study, plan = fork(repo, data, folds, prefix, EPOCHS - prefix)
    report = read(repo, data, [], study, plan)
    passes = sum(
        len(source.held_out) * len(source.states)
        for source in report.sources
        if source.held_out is not None
    ) / len(data)
    method = (
        f"leave-out, {folds} folds,"
        f" {'from scratch' if prefix == 0 else f'forked at epoch {prefix} of {EPOCHS}'}"
    )
    return Found(method, report.scores.held_out, report.cost.training + FORWARD * passes)


def by_both(repo: Repository, data: Data) -> tuple[Found, OutlierReport]:
    report = read(repo, data, ["run-0", "run-1@step:10"], *fork(repo, data, 3, 5, 8))
    return Found(COMBINED, report.scores.score, report.cost.total), report


def by_cleanlab(data: Data, folds: int = 5) -> Found | None:
    """Confidence in the given label, out of sample. Empty if cleanlab is not installed."""
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        out("cleanlab is not installed, and left out: pip install cleanlab")
        return None
    order = torch.randperm(len(data), generator=data.order)
    chances = torch.zeros(len(data), 10)
    for fold in range(folds):
        held, rows = (
            order[fold::folds],
            torch.cat([order[other::folds] for other in range(folds) if other != fold]),
        )
        model, optimizer = data.build(fold)
        for _ in range(EPOCHS):
            data.epoch(model, optimizer, rows)
        with torch.no_grad():
            chances[held] = softmax(model(data.inputs[held]), dim=1)
    quality = get_label_quality_scores(data.labels.numpy(), chances.numpy())
    return Found(
        f"cleanlab, {folds} folds", -np.asarray(quality, dtype=np.float64), EPOCHS * (folds - 1)
    )


def measure(data: Data) -> tuple[list[Found], OutlierReport]:
    """Every method on one data set, in one repository."""
    with (
        tempfile.TemporaryDirectory() as folder,
        datastates.open(folder, config=Config(durable_every=1, memory_bytes=1 << 28)) as repo,
    ):
        for seed in range(3):
            train_run(repo, data, seed)
        both, report = by_both(repo, data)
        found = [
            both,
            *(by_lineage(repo, data, *runs) for runs in ((1, 20), (2, 20), (3, 12), (3, 20))),
        ]
        found += [by_forks(repo, data, 10, prefix) for prefix in (5, 10, 0)]
    peer = by_cleanlab(data)
    return [*found, *([peer] if peer else [])], report


def judge(data: Data, score: Floats) -> tuple[float, float]:
    """The area under the ROC curve, and the average precision."""
    return float(roc_auc_score(data.is_flipped, score)), float(
        average_precision_score(data.is_flipped, score)
    )


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):+.{digits}f} ± {deviation:.{digits}f}".removeprefix("+")


def summarise(judged: dict[str, list[tuple[float, float]]], epochs: dict[str, float]) -> str:
    """A row for each method, with its differences to the combination on the same data."""
    rows = []
    for method, values in judged.items():
        columns = [spread([value[at] for value in values]) for at in (0, 1)]
        for at in (0, 1):
            differences = [
                mine[at] - other[at] for mine, other in zip(judged[COMBINED], values, strict=True)
            ]
            columns.append(
                ""
                if method == COMBINED
                else (
                    f"{statistics.mean(differences):+.4f}"
                    f" ({sum(d >= 0 for d in differences)}/{len(differences)})"
                )
            )
        rows.append(
            [f"**{method}**" if method == COMBINED else method, f"{epochs[method]:.1f}", *columns]
        )
    header = [
        "method",
        "epochs",
        "AUROC",
        "average precision",
        "combination's AUROC less this (not worse in)",
        "its AP less this (not worse in)",
    ]
    return table(header, rows)


def verdict(judged: dict[str, list[tuple[float, float]]], epochs: dict[str, float]) -> str:
    """Whether the combination, at 60 epochs or less, at least equals the best other method on
    average."""
    lines = []
    for at, name in enumerate(("AUROC", "average precision")):
        means = {
            method: statistics.mean(value[at] for value in values)
            for method, values in judged.items()
        }
        best = max((method for method in means if method != COMBINED), key=means.__getitem__)
        does = "at least equals" if means[COMBINED] >= means[best] else "does not equal"
        lines.append(
            f"{name}: the combination ({epochs[COMBINED]:.1f} epochs) {does} the best of the"
            f" others, {best} ({epochs[best]:.1f} epochs)"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    images, labels, name = load(options.samples)
    out(machine())
    out(
        f"{name}, {FLIPPED:.0%} of the labels wrong, {options.seeds} seeds; mean ± standard"
        " deviation"
    )
    judged: dict[str, list[tuple[float, float]]] = {}
    epochs: dict[str, float] = {}
    rates, precisions, recalls = [], [], []
    for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
        began, data = time.monotonic(), Data(images, labels, seed)
        found, report = measure(data)
        for each in found:
            judged.setdefault(each.method, []).append(judge(data, each.score))
            epochs[each.method] = each.epochs
        suspects = report.selection.suspects
        rates.append(report.selection.noise_rate)
        precisions.append(float(data.is_flipped[suspects].mean()))
        recalls.append(float(suspects[data.is_flipped].mean()))
        out(f"seed {seed}: {time.monotonic() - began:.0f} s")
    out(summarise(judged, epochs))
    out(verdict(judged, epochs))
    out(
        f"the combination's noise rate, estimated: {spread(rates, 3)}; of the suspects at that rate"
        f" {spread(precisions, 3)} are wrong,"
    )
    out(f"and {spread(recalls, 3)} of the wrong labels are among them")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": machine(), "judged": judged, "epochs": epochs, "noise_rates": rates}
            )
        )


if __name__ == "__main__":
    main()
