"""Trainings by Lightning that are killed and started again: each loss is that of the one that
never stopped and had no callback of ours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.effort import effort
from tests.support.forge import Forge, forge

pytest.importorskip("lightning")

JOB = "tests.integrations.lightning_jobs:train"


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """A forge that has imported Lightning."""
    with forge(tmp_path_factory.mktemp("forge"), ["tests.integrations.lightning_jobs"]) as opened:
        yield opened


def losses_after_kills(
    lightning: Forge, folder: Path, kind: str, kills: int, seed: int, **options: Any
) -> tuple[int, int]:
    """Kill a training so many times, each time further on; raises unless every process says what
    the plain training says there.

    :returns: how many batches there are, and with how many the last process went on.
    """
    # of several loaders at once, ours begins each with its first batch: their seeds are drawn in
    # another order than without it
    plain = lightning.run(
        JOB, folder=str(folder / "plain"), kind=kind, ours=kind == "several", **options
    )
    whole = {line.rsplit(" ", 1)[0]: line for line in plain}
    assert len(whole) == len(plain), "each line is of its own batch"
    count = sum(not line.startswith("validated") for line in plain)
    choose = random.Random(seed)
    for at in sorted(choose.sample(range(1, 20), kills)):
        job = lightning.start(
            JOB, folder=str(folder), kind=kind, at=at, seed=choose.randrange(1000), **options
        )
        said = job.say()
        assert job.wait() in (-9, 0), lightning.errors()[-3000:]
        assert [line for line in said if whole.get(line.rsplit(" ", 1)[0]) != line] == [], (
            f"before the kill at {at}"
        )
    said = lightning.run(JOB, folder=str(folder), kind=kind, **options)
    assert [line for line in said if whole.get(line.rsplit(" ", 1)[0]) != line] == []
    assert not said or said[-1] == plain[-1]
    return count, sum(not line.startswith("validated") for line in said)


@pytest.mark.long
@pytest.mark.exact("lightning", "killed", "shuffled", "scheduler", "validation")
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(0, marks=pytest.mark.exact("lightning", "workers-0")),
        pytest.param(
            2,
            marks=pytest.mark.exact("lightning", "workers-2"),
        ),
    ],
)
def test_killed_training_repeats_every_loss(lightning: Forge, tmp_path: Path, workers: int) -> None:
    count, rest = losses_after_kills(
        lightning, tmp_path, "plain", effort(10, 3), seed=workers, workers=workers
    )
    assert 0 < rest < count


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "plateau", "validating", "callbacks", "limited", "steps", "generator", "several",
        pytest.param("manual", marks=pytest.mark.exact("lightning", "killed")),
        pytest.param("stateful", marks=pytest.mark.exact("lightning", "stateful")),
        pytest.param("iterable", marks=pytest.mark.exact("lightning", "iterable")),
    ],
)  # fmt: skip
def test_killed_training_of_another_kind_repeats_every_loss(
    lightning: Forge, tmp_path: Path, kind: str
) -> None:
    losses_after_kills(lightning, tmp_path, kind, effort(10, 3), seed=len(kind))


@pytest.mark.long
@pytest.mark.exact("lightning", "accumulation", "mixed-precision")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_killed_training_with_accumulation_and_mixed_precision_repeats_every_loss(
    lightning: Forge, tmp_path: Path, workers: int, precision: str, accumulate: int
) -> None:
    options = {"workers": workers, "precision": precision, "accumulate_grad_batches": accumulate}
    losses_after_kills(lightning, tmp_path, "plain", effort(10, 2), seed=accumulate, **options)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_killed_training_with_manual_optimization_repeats_every_loss(
    lightning: Forge, tmp_path: Path, workers: int, precision: str
) -> None:
    losses_after_kills(
        lightning,
        tmp_path,
        "manual",
        effort(10, 2),
        seed=workers,
        workers=workers,
        precision=precision,
    )
