"""A real training on scikit-learn's digits with planted wrong labels: two seeds, and a study
that holds each third out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import datastates
from datastates import Repository
from datastates.studies import Plan, Variant
from datastates.values import Value

COUNT, FLIPPED, EPOCHS, WARM, LATER = 900, 90, 6, 3, 3


@dataclass(frozen=True, slots=True)
class Digits:
    """``labels`` are wrong where ``is_flipped``."""

    inputs: Tensor
    labels: Tensor
    is_flipped: np.ndarray[tuple[int], np.dtype[np.bool_]]


@cache
def digits() -> Digits:
    data = load_digits()
    labels = torch.from_numpy(data.target[:COUNT].astype(np.int64))
    generator = torch.Generator().manual_seed(0)
    flipped = torch.randperm(COUNT, generator=generator)[:FLIPPED]
    labels[flipped] = (labels[flipped] + torch.randint(1, 10, (FLIPPED,), generator=generator)) % 10
    inputs = torch.from_numpy((data.data[:COUNT] / 16).astype(np.float32))
    return Digits(inputs, labels, np.isin(np.arange(COUNT), flipped.numpy()))


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def loss(model: nn.Module, indices: Tensor) -> Tensor:
    data = digits()
    return cross_entropy(model(data.inputs[indices]), data.labels[indices], reduction="none")


def thirds() -> dict[str, tuple[int, ...]]:
    """Three parts of different sizes, together all of the data."""
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1)).tolist()
    return {
        "a": tuple(sorted(order[:250])),
        "b": tuple(sorted(order[250:550])),
        "c": tuple(sorted(order[550:])),
    }


def plan() -> Plan:
    """Each variant holds one third out; the child of the last gets the first 100 of it back."""
    parts = tuple(thirds())
    variants = [
        Variant(
            f"without-{part}",
            epochs=LATER,
            train=tuple(p for p in parts if p != part),
            validation=(part,),
        )
        for part in parts
    ]
    return Plan(
        (*variants, Variant("child", parent="without-c", epochs=1, train=("back",))),
        {**thirds(), "back": thirds()["c"][:100]},
    )


def train(
    repo: Repository,
    branch: str,
    rows: Tensor,
    epochs: int,
    *,
    seed: int = 0,
    start: str | None = None,
    said: Mapping[str, Value] | None = None,
) -> None:
    """Capture each epoch; ``said`` are further attributes."""
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    with repo.track(branch=branch, start=start, model=model, optimizer=optimizer) as run:
        for epoch in range(1, epochs + 1):
            for batch in rows[torch.randperm(len(rows), generator=generator)].split(32):
                optimizer.zero_grad()
                loss(model, batch).mean().backward()
                optimizer.step()
            run.capture(attributes={"epoch": epoch, **(said or {})}).wait()
            if branch == "seed-0" and epoch == WARM:
                repo.tag("start/study", run.head)


def make(folder: Path) -> None:
    """Branches ``seed-0`` and ``seed-1``, and the study ``study`` by the names of
    docs/design/010-studies.md, forked from ``seed-0``."""
    with datastates.open(folder, config=datastates.Config(durable_every=1)) as repo:
        for seed in (0, 1):
            train(repo, f"seed-{seed}", torch.arange(COUNT), EPOCHS, seed=seed)
        for variant in plan().variants:
            rows = torch.tensor(plan().rows(variant.train or ()))
            start = f"done/study/{variant.parent}" if variant.parent else "start/study"
            said: dict[str, Value] = {
                "study": "study",
                "variant": variant.name,
                "samples": len(rows),
                "samples_all": COUNT,
            }
            train(repo, f"study/{variant.name}", rows, variant.epochs, start=start, said=said)
            repo.tag(f"done/study/{variant.name}", f"study/{variant.name}")
