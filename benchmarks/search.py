"""Optuna's TPE sampler with a shared prefix, and without one: the best value at equal epochs.

    python benchmarks/search.py [--seeds N] [--epochs N]

Each search chooses the learning rate, momentum, weight decay and dropout of a small MLP. A model is
always trained for 8 epochs. Without a prefix, each trial trains all of them. With one, the first 6
are trained once, and each trial is a fork for 2 epochs. One prefix has a usual learning rate, and
one has a rate that is far too low. The search minimizes the loss on held-out pictures. The accuracy
is measured for the best trial, on further pictures.

Fashion-MNIST is used if Debian's dataset-fashion-mnist is installed, otherwise scikit-learn's
digits.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch
from common import machine, out, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import datastates

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from fashion import load

PREFIX, LENGTH, BATCH = 6, 8, 32
DEFAULT = {"momentum": 0.9, "weight_decay": 1e-4, "dropout": 0.1}
METHODS = {
    "each trial from the beginning": None,
    "a prefix with lr 0.03": 0.03,
    "a prefix with lr 0.0003": 0.0003,
}
"""By their names, the learning rates of the prefix."""

SHARES = (0.5, 0.8, 1.0)
"""The parts of the budget after which the best value is noted."""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of one search: the best losses after parts of its budget, the accuracy of the
    last of them, how many trials it had, and the time."""

    losses: tuple[float, ...]
    accuracy: float
    trials: int
    took_s: float


class Data:
    """Pictures to train on, to choose by, and to test with."""

    def __init__(self, seed: int) -> None:
        images, labels, self.name = load(4000)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        part = len(images) // 4
        self.train, self.held, self.test = (
            order[: 2 * part],
            order[-2 * part : -part],
            order[-part:],
        )
        self.images, self.labels = images.flatten(1), labels

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """The mean loss on some pictures."""
        return cross_entropy(model(self.images[rows]), self.labels[rows])


def build(data: Data, values: dict[str, Any]) -> dict[str, Any]:
    """The model and its optimizer, with these values."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(data.images.shape[1], 64),
        nn.ReLU(),
        nn.Dropout(values["dropout"]),
        nn.Linear(64, 10),
    )
    options = {key: value for key, value in values.items() if key != "dropout"}
    return {"model": model, "sgd": torch.optim.SGD(model.parameters(), **options)}


def train(data: Data, model: nn.Module, sgd: torch.optim.Optimizer, epochs: int) -> None:
    """Train in place."""
    for _ in range(epochs):
        for rows in data.train[torch.randperm(len(data.train))].split(BATCH):
            sgd.zero_grad()
            data.loss(model, rows).backward()
            sgd.step()


def suggested(trial: optuna.Trial) -> dict[str, float]:
    """The values of a trial."""
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "momentum": trial.suggest_float("momentum", 0.0, 0.99),
        "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.6),
    }


def search(data: Data, budget: int, seed: int, rate: float | None) -> Found:
    """Search until the epochs are spent. ``rate`` is the learning rate of the prefix, if there is one."""
    began, spent, best = time.perf_counter(), 0, float("inf")
    accuracy, noted = 0.0, dict.fromkeys(SHARES, float("inf"))
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    with tempfile.TemporaryDirectory() as folder, datastates.open(folder) as repo:
        if rate is not None:
            tracked = build(data, {**DEFAULT, "lr": rate})
            with repo.track(**tracked) as run:
                train(data, **tracked, epochs=PREFIX)
                run.capture()
            spent = PREFIX
        epochs, start = (LENGTH, None) if rate is None else (LENGTH - PREFIX, "main")
        while spent + epochs <= budget:
            trial = study.ask()
            tracked = build(data, suggested(trial))
            branch = f"trial-{trial.number}"
            with repo.track(branch=branch, start=start, **tracked) as run:
                train(data, **tracked, epochs=epochs)
                model = tracked["model"].eval()
                with torch.no_grad():
                    loss = data.loss(model, data.held).nan_to_num(100.0).item()
                    right = model(data.images[data.test]).argmax(1) == data.labels[data.test]
                run.capture(metrics={"loss": loss})
            study.tell(trial, loss)
            spent += epochs
            if loss < best:
                best, accuracy = loss, right.float().mean().item()
            noted |= {share: best for share in SHARES if spent <= share * budget}
    took_s = time.perf_counter() - began
    return Found(tuple(noted.values()), accuracy, len(study.trials), took_s)


def main(seeds: int, budget: int) -> None:
    """Print a table with both methods."""
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    out(f"{machine()}; {optuna.__name__} {optuna.__version__}")
    logging.getLogger("datastates").setLevel(logging.ERROR)
    found: dict[str, list[Found]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        data = Data(seed)
        for method, rate in METHODS.items():
            found[method].append(search(data, budget, seed, rate))
    out(
        f"{data.name}; {budget} epochs for each search, {seeds} seeds: median [least .. greatest]\n"
    )
    rows = [row(method, results) for method, results in found.items()]
    header = ["method", "trials", *(f"loss at {share:.0%}" for share in SHARES), "accuracy", "time"]
    out(table([*header], rows))
    alone, *others = found.items()
    for method, results in others:
        pairs = zip(alone[1], results, strict=True)
        gains = [one.losses[-1] - other.losses[-1] for one, other in pairs]
        out(
            f"\n{method}: the loss is lower by {interval(gains)}, in"
            f" {sum(gain > 0 for gain in gains)} of {seeds} seeds"
        )


def row(method: str, results: Sequence[Found]) -> list[str]:
    """The line of a method."""
    losses = [interval([each.losses[at] for each in results]) for at in range(len(SHARES))]
    took_s = f"{statistics.median(each.took_s for each in results):.1f} s"
    accuracy = interval([each.accuracy for each in results])
    return [method, str(results[0].trials), *losses, accuracy, took_s]


def interval(values: Sequence[float]) -> str:
    """Median, least and greatest, to four digits."""
    return f"{statistics.median(values):.4f} [{min(values):.4f} .. {max(values):.4f}]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=160)
    arguments = parser.parse_args()
    main(arguments.seeds, arguments.epochs)
