"""A Trainer that is killed at random steps repeats, loss by loss, the one that nobody touched:
real processes, real SIGKILL."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.effort import SEED, effort
from tests.support.forge import Forge, forge

TRAIN = "tests.integrations.trainers:train"
STEPS = {
    "qlora": 8,
    "8-bit optimizer": 8,
    "accumulation": 8,
    "accumulation in workers": 8,
    "bf16 in workers": 12,
}
KILLS = effort(10, 2)
AWAITED = 3
"""By the end of this step a state is durable, so that whatever is killed later is gone on from."""


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with forge(tmp_path_factory.mktemp("forge"), ["tests.integrations.trainers"]) as opened:
        yield opened


def by_step(lines: Sequence[str]) -> dict[tuple[str, int], list[str]]:
    """What was said of each step, in order."""
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for line in lines:
        kind, step, *rest = line.split()
        if kind != "end":
            found[kind, int(step)] += rest
    return dict(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            "accumulation in workers",
            marks=pytest.mark.exact(
                "transformers",
                "killed",
                "shuffled",
                "accumulation",
                "workers-2",
                "scheduler",
                "moved",
            ),
        ),
        pytest.param(
            "evaluated",
            marks=pytest.mark.exact("transformers", "workers-0", "validation"),
        ),
        pytest.param("qlora", marks=pytest.mark.exact("transformers", "peft")),
        "8-bit optimizer",
        "plain",
        "workers",
        "accumulation",
        "by length",
        *(
            pytest.param(
                case,
                marks=pytest.mark.exact("transformers", "mixed-precision"),
            )
            for case in ("bf16", "bf16 in workers")
        ),
    ],
)
def test_a_trainer_killed_at_random_steps_repeats_every_loss_and_log(
    case: str, trainings: Forge, tmp_path: Path
) -> None:
    whole = trainings.run(TRAIN, folder=str(tmp_path), case=case, is_tracked=False)
    choose = random.Random(f"{case} {SEED}")
    steps = STEPS.get(case, 22)
    last = choose.randrange(AWAITED + 1, steps)
    kills = [*sorted(choose.sample(range(1, last), min(KILLS - 1, last - 1))), last]
    said = [killed(trainings, tmp_path, case, step) for step in kills]
    said.append(trainings.run(TRAIN, folder=str(tmp_path), case=case))

    expected, seen = by_step(whole), set()
    for lines in said:
        for (kind, step), found in by_step(lines).items():
            assert found == expected[kind, step][: len(found)], (
                f"{kind} of step {step}, after kills at {kills}"
            )
            seen.add((kind, step))
    assert seen == expected.keys()
    assert said[-1][-1] == whole[-1], "weights, log, epoch"
    assert len(by_step(said[-1])) < len(expected), (
        "it did not begin anew: a state was durable before the last kill"
    )


def killed(trainings: Forge, folder: Path, case: str, step: int) -> list[str]:
    """What a training said that was killed in this step, or a later one."""
    job = trainings.start(TRAIN, folder=str(folder), case=case, awaited=AWAITED)
    lines = []
    for line in job.lines:
        lines.append(line)
        kind, number = line.split()[:2]
        if kind == "loss" and int(number) >= step:
            break
    job.kill(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL, trainings.errors()
    return lines
