"""A training that goes on from any state, in a process that has never seen it, repeats the one
that never stopped, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forge import Forge, forge
from tests.support.resuming import FURTHER

pytest.importorskip("torchdata")

LENGTH = 34
"""Batches of the training that never stops; an epoch has 13, so that every resumed one crosses
an epoch's end."""

KINDS = [
    "mlp",
    "cnn_foreach",
    "cnn_fused",
    "gpt",
    "autocast",
    "workers",
    "sampler",
    "sampler_workers",
    "untracked",
    "untracked_workers",
]


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings."""
    with forge(tmp_path_factory.mktemp("forge")) as opened:
        yield opened


@pytest.mark.exact(
    "loop",
    "moved",
    "shuffled",
    "workers-0",
    "workers-2",
    "stateful",
    "accumulation",
    "mixed-precision",
    "scheduler",
)
@pytest.mark.parametrize(
    "kind", [*KINDS, pytest.param("half", marks=pytest.mark.exact("loop", "fp16"))]
)
def test_losses_and_weights_are_those_of_the_training_that_never_stopped(
    smith: Forge, tmp_path: Path, kind: str
) -> None:
    never = [
        line.split()
        for line in smith.run(
            "tests.support.resuming:start", folder=str(tmp_path), kind=kind, batches=LENGTH
        )
    ]
    assert len({loss for _, loss, _ in never}) == LENGTH
    choose = random.Random(kind)
    # One in the middle of an epoch, the one at its end, and what chance brings.
    stops = sorted({4, 12, choose.randrange(LENGTH - FURTHER)})
    uids = [never[stop][0] for stop in stops]
    again = [
        line.split()
        for line in smith.run(
            "tests.support.resuming:resume",
            folder=str(tmp_path),
            kind=kind,
            uids=uids,
            further=FURTHER,
        )
    ]
    for number, stop in enumerate(stops):
        resumed = again[number * FURTHER : (number + 1) * FURTHER]
        assert [line[1:] for line in resumed] == [
            line[1:] for line in never[stop + 1 : stop + 1 + FURTHER]
        ]
