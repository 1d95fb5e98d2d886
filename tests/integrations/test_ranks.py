"""Trainings in several processes are one training: each state has a part of each rank, and all
ranks that were killed go on exactly."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import datastates
from tests.support.effort import IS_THOROUGH, SEED, effort
from tests.support.forge import Forge, Job, forge
from tests.support.jobs import free_port

from .together import RANKS

TRAIN = "tests.integrations.together:train"
MODULES = {"accelerate": "accelerating", "transformers": "trainers", "lightning": "lightning_jobs"}
KILLS, EPOCHS = effort(10, 1), effort(8, 4)
AWAITED, LINES = 2, 10
"""A state is durable by the end of this step, or batch, and before a rank has said so many
lines."""

pytestmark = pytest.mark.long


def begin(smith: Forge, **arguments: Any) -> list[Job]:
    """All ranks of a job."""
    port = free_port()
    return [smith.start(TRAIN, rank=rank, port=port, **arguments) for rank in range(RANKS)]


def ended(smith: Forge, jobs: Sequence[Job]) -> list[list[str]]:
    """What each rank said that ended well."""
    said = [job.say() for job in jobs]
    assert [job.wait() for job in jobs] == [0] * RANKS, smith.errors()
    return said


def killed(smith: Forge, jobs: Sequence[Job], lines: int) -> list[list[str]]:
    """What each rank said until all were killed, once the first had said so many lines."""
    first = [line for line in (jobs[0].lines.readline() for _ in range(lines)) if line]
    for job in jobs:
        job.kill(signal.SIGKILL)
    said = [job.say() for job in jobs]
    assert {job.wait() for job in jobs} <= {-signal.SIGKILL, 0}, smith.errors()
    return [[*(line.rstrip("\n") for line in first), *said[0]], *said[1:]]


MORE: list[Any] = [
    ("accelerate", {"kind": "plain", "workers": 2}),
    ("accelerate", {"kind": "dispatched", "workers": 0}),
    ("transformers", {"case": "bf16"}),
    ("transformers", {"case": "evaluated"}),
    (
        "lightning",
        {"kind": "plain", "workers": 2, "accumulate_grad_batches": 3, "precision": "bf16-mixed"},
    ),
    ("lightning", {"kind": "manual", "workers": 0, "strategy": "ddp_find_unused_parameters_true"}),
]


@pytest.mark.parametrize(
    ("framework", "options"),
    [
        pytest.param(
            "accelerate",
            {"kind": "all", "workers": 0},
            marks=pytest.mark.exact("accelerate", "ranks"),
        ),
        (
            "accelerate",
            {"kind": "stateful", "workers": 0},
        ),  # the order comes from a generator that Accelerate gives the sampler of a job
        pytest.param(
            "transformers",
            {"case": "accumulation in workers"},
            marks=pytest.mark.exact("transformers", "ranks"),
        ),
        pytest.param(
            "lightning",
            {"kind": "plain", "workers": 0},
            marks=pytest.mark.exact("lightning", "ranks"),
        ),
        *(MORE if IS_THOROUGH else []),
    ],
)
def test_ranks_that_were_all_killed_go_on_exactly(
    framework: str, options: dict[str, Any], tmp_path: Path
) -> None:
    choose = random.Random(f"{framework} {SEED}")
    with forge(tmp_path, [f"tests.integrations.{MODULES[framework]}"]) as smith:
        job = {"framework": framework, "epochs": EPOCHS, **options}
        whole = ended(smith, begin(smith, folder=str(tmp_path / "whole"), is_tracked=False, **job))
        job |= {"folder": str(tmp_path / "killed"), "awaited": AWAITED}
        said = [
            killed(smith, begin(smith, **job), choose.randrange(1, 3)) for _ in range(KILLS - 1)
        ]
        said.append(killed(smith, begin(smith, **job), LINES))
        rest = ended(smith, begin(smith, **job))

    for rank in range(RANKS):
        for lines in (ranks[rank] for ranks in said):
            assert lines == [] or any(
                lines == whole[rank][at : at + len(lines)] for at in range(len(whole[rank]))
            ), (rank, lines)
        assert rest[rank] == whole[rank][-len(rest[rank]) :]
        assert 0 < len(rest[rank]) < len(whole[rank]), (
            "it did not begin anew: a state was durable before the last kill"
        )
    folder = tmp_path / "killed" / ("" if framework == "accelerate" else "runs")
    with datastates.open(folder) as repo:
        assert {state.world_size for state in repo.log("main")} == {RANKS}
