"""Scripts that save by DCP or by ``datastates.save`` are killed: what was reported is there, and
they go on exactly."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import datastates
from tests.support.effort import SEED, effort
from tests.support.forge import Forge, forge

STEPS = effort(60, 16)
KILLS = effort(10, 2)


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASTATES_MEMORY", "32M")
        with forge(
            tmp_path_factory.mktemp("forge"), ["tests.integrations.file_training"]
        ) as opened:
            yield opened


def trained(
    smith: Forge, folder: Path, kind: str, workers: int, kill_after: int | None = None
) -> list[list[str]]:
    """What a training said; it is killed after so many lines, wherever it is then."""
    job = smith.start(
        "tests.integrations.file_training:train",
        folder=str(folder),
        kind=kind,
        workers=workers,
        steps=STEPS,
    )
    lines = []
    if kill_after is not None:
        lines = [job.lines.readline() for _ in range(kill_after)]
        job.kill(signal.SIGKILL)
    lines += [f"{line}\n" for line in job.say()]
    code = job.wait()
    assert code == (0 if kill_after is None else -signal.SIGKILL) or (
        kill_after is not None and code == 0
    ), smith.errors()
    return [line.split() for line in lines if line.endswith("\n")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param(
            *("save", 0),
            marks=pytest.mark.exact(
                "dcp", "killed", "shuffled", "scheduler", "moved", "accumulation", "mixed-precision"
            ),
        ),
        pytest.param(*("save", 2), marks=pytest.mark.exact("dcp", "stateful", "workers-2")),
        pytest.param(
            *("async_save", 0), marks=pytest.mark.exact("dcp", "killed", "stateful", "workers-0")
        ),
        pytest.param(
            *("files", 0),
            marks=pytest.mark.exact(
                "files",
                "killed",
                "shuffled",
                "scheduler",
                "moved",
                "accumulation",
                "mixed-precision",
                "stateful",
                "workers-0",
            ),
        ),
        pytest.param(*("files", 2), marks=pytest.mark.exact("files", "workers-2")),
    ],
)
def test_killed_script_repeats_every_loss_and_has_every_state_that_was_reported(
    kind: str, workers: int, smith: Forge, tmp_path: Path
) -> None:
    expected = {
        int(step): loss for _, step, loss in trained(smith, tmp_path / "none", "nothing", workers)
    }
    choose = random.Random(SEED)
    saved: dict[str, int] = {}
    said: list[list[str]] = []
    for number in range(KILLS + 1):
        lines = trained(
            smith,
            tmp_path / "runs",
            kind,
            workers,
            choose.randrange(1, 2 * STEPS // KILLS + 2) if number < KILLS else None,
        )
        begun = int(lines[0][1]) if lines else None
        assert begun is None or begun >= max(saved.values(), default=0), (
            "a state that was reported is lost"
        )
        said += lines
        saved.update(
            {uid: int(step) for what, step, *rest in lines if what == "saved" for uid in rest}
        )

    losses = [(int(line[1]), line[2]) for line in said if line[0] == "loss"]
    assert {step for step, _ in losses} == expected.keys()
    assert [(step, loss) for step, loss in losses if expected[step] != loss] == []
    with datastates.open(tmp_path / "runs") as repo:
        log = {state.uid: state for state in repo.log("main")}
        assert saved.items() <= {uid: state.step for uid, state in log.items()}.items()
        assert {state.status for state in log.values()} == {"durable"}
        assert [state.step for state in log.values()] == [*range(STEPS, 0, -1)]
        assert not repo.verify().damage
