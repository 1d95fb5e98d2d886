"""Trials of Ray Tune and workers of Ray Train as branches, and checkpoints of Ray that only name
a state."""

from __future__ import annotations

import logging
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import datastates
from datastates import NotFound, Repository
from datastates.errors import InvalidInput
from tests.integrations.raying import job, step, train
from tests.support.effort import IS_THOROUGH, SEED, effort

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS, AT, RATE = 2, 6, 4, 0.01
"""With ten times the rate eight epochs end in NaN, which any state repeats."""

ray: Any = pytest.importorskip("ray")
pytest.importorskip("ray.tune")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # Ray's, of many kinds
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Tune takes over Ctrl-C, and never gives it back."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray on this machine; its workers import the tests."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            num_cpus=2,
            runtime_env={"env_vars": environment},
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder that all workers share."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def losses(epochs: int = EPOCHS, how: dict[str, Any] | None = None) -> list[str]:
    """Those of the steps of a training that never stopped and knows nothing of Ray."""
    how = how or {}
    accumulate = how.get("accumulate", 1)
    model, optimizer, loader = job(RATE, how.get("workers", 0))
    found = []
    for count, (inputs,) in enumerate((batch for _ in range(epochs) for batch in loader), 1):
        loss = step(
            model,
            optimizer,
            inputs,
            is_last=count % accumulate == 0,
            is_half=how.get("is_half", False),
        )
        found += [loss.hex()] if count % accumulate == 0 else []
    return found


def recorded(repo: Repository, branch: str) -> list[str]:
    return [float(state.metrics["loss"]).hex() for state in reversed(repo.log(branch))]


def files(checkpoint: Any) -> dict[str, int]:
    """What Ray carries about, with its bytes."""
    with checkpoint.as_directory() as folder:
        return {
            path.name: path.stat().st_size
            for path in Path(folder).rglob("*")
            if not path.name.startswith(".")
        }


def tuned(
    runs: Path, space: dict[str, Any], *, scheduler: Any = None, max_failures: int = 0
) -> list[Any]:
    tuner = ray.tune.Tuner(
        ray.tune.with_resources(train, {"cpu": 1}),
        param_space={"lr": RATE, "epochs": EPOCHS, "runs": str(runs), **space},
        tune_config=ray.tune.TuneConfig(scheduler=scheduler),
        run_config=ray.tune.RunConfig(
            name="tried",
            storage_path=str(runs.parent / "storage"),
            verbose=0,
            failure_config=ray.tune.FailureConfig(max_failures=max_failures),
        ),
    )
    found = tuner.fit()
    assert not found.errors
    return list(found)


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(1800)  # each kill costs Ray a process
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            {}, marks=pytest.mark.exact("ray", "killed", "shuffled", "workers-0", "moved")
        ),
        pytest.param(
            {"workers": 2, "accumulate": 2, "is_half": True},
            marks=pytest.mark.exact(
                "ray", "killed", "workers-2", "accumulation", "mixed-precision"
            ),
        ),
    ],
)
def test_a_trial_that_was_killed_goes_on_in_another_process_from_the_state_that_its_checkpoint_names(
    how: dict[str, Any], runs: Path
) -> None:
    from datastates.integrations.ray import named

    kills = effort(10, 1)
    epochs = effort(8, 2) * how.get("accumulate", 1)
    expected = losses(epochs, how)
    dies = sorted(random.Random(SEED).sample(range(2, len(expected) + 1), kills))
    (result,) = tuned(runs, {"dies_at": dies, "how": how, "epochs": epochs}, max_failures=kills)
    assert sorted(path.name for path in runs.glob("died-*")) == sorted(
        f"died-{step}" for step in dies
    )
    found = named(result.checkpoint)
    with datastates.open(found.repository) as repo:
        assert recorded(repo, found.branch) == expected
        assert repo.state(found.state) == repo.state(found.branch)
        moves = [
            (event.old, event.new) for event in repo.reflog(found.branch) if event.reason == "move"
        ]
        assert [[repo.state(uid).step for uid in move if uid is not None] for move in moves] == [
            [step, step - 1] for step in reversed(dies)
        ], "what was captured and not reported is trained again"
        assert repo.state(found.state).attributes == {"ray.trial": found.branch}
        assert repo.state(found.state).config["lr"] == RATE
    assert files(result.checkpoint).keys() == {"datastates.json"}
    assert sum(files(result.checkpoint).values()) < 1000
    # Ray drops lines of processes that were killed soon after their report
    told = list(result.metrics_dataframe["hex"])
    assert told == [loss for loss in expected if loss in told]
    assert told[-1] == expected[-1]


@pytest.mark.usefixtures("cluster")
@pytest.mark.exact("ray", "fork")
def test_a_trial_that_takes_over_the_state_of_another_goes_on_in_a_branch_that_forks_there(
    runs: Path,
) -> None:
    pbt = ray.tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        metric="score",
        mode="max",
        perturbation_interval=AT,  # once: each costs two processes
        quantile_fraction=0.5,
        resample_probability=0.0,
        hyperparam_mutations={"score": [1, 2]},
        custom_explore_fn=lambda config: {**config, "score": 1},
        synch=True,
    )
    tuned(runs, {"score": ray.tune.grid_search([1, 2])}, scheduler=pbt)
    with datastates.open(runs) as repo:
        names = sorted(ref.name for ref in repo.refs())
        first = names[0]
        (winner,) = {name for name in names if not name.startswith(first)}
        fork = f"{first}/2"
        assert repo.state(f"{fork}~{STEPS - AT}") == repo.state(f"{winner}~{STEPS - AT}"), (
            "the winner's state, and no copy of it"
        )
        assert repo.state(f"{fork}~{STEPS - AT - 1}").attributes["ray.trial"] == first
        assert recorded(repo, winner) == recorded(repo, fork) == losses(), (
            "either goes on as the winner would have"
        )
        assert len(repo.log(first)) == AT, "what it had is still there"


@pytest.mark.skipif(not IS_THOROUGH, reason="Ray Train takes half a minute to begin")
@pytest.mark.usefixtures("cluster")
@pytest.mark.exact("ray", "killed", "shuffled", "workers-0")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.exact("ray", "ranks"))])
def test_workers_of_train_that_were_killed_go_on_from_what_their_checkpoint_names(
    runs: Path, workers: int
) -> None:
    from ray.train.torch import TorchTrainer

    from datastates.integrations.ray import named

    config = {"lr": RATE, "epochs": EPOCHS, "runs": str(runs), "dies_at": [4]}
    result = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="fitted",
            storage_path=str(runs.parent / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    ).fit()
    assert (runs / "died-4").exists()
    branches = ["fitted", *(f"fitted/rank-{rank}" for rank in range(1, workers))]
    with datastates.open(runs) as repo:
        assert sorted(ref.name for ref in repo.refs()) == branches
        for rank, branch in enumerate(branches):
            assert recorded(repo, branch) == losses()
            assert named(result.checkpoint, rank).state == repo.state(branch).uid
    assert files(result.checkpoint).keys() == {
        "datastates.json",
        *(f"datastates.{rank}.json" for rank in range(1, workers)),
    }


def test_a_checkpoint_that_names_no_state_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from datastates.integrations.ray import Named, named

    checkpoint = ray.train.Checkpoint.from_directory(str(tmp_path))
    with pytest.raises(InvalidInput, match="was not made by"):
        named(checkpoint)
    (tmp_path / "datastates.json").write_text('{"state": 3}')
    with pytest.raises(InvalidInput, match="damaged, or of a newer version"):
        named(checkpoint)
    (tmp_path / "datastates.json").write_text(
        '{"repository": "runs", "state": "abc", "branch": "main", "owner": "main"}'
    )
    assert named(checkpoint, rank=3) == Named("runs", "abc", "main", "main"), (
        "a rank that is new goes on from that of rank 0"
    )


def test_a_checkpoint_of_another_repository_is_refused_with_the_one_that_it_names(
    tmp_path: Path,
) -> None:
    from datastates.integrations.ray import Named, _onwards, _Worker

    worker, found = (
        _Worker("tried/1", 0, is_trial=True),
        Named("/elsewhere/runs", "0" * 24, "tried/1", "tried/1"),
    )
    with (
        datastates.open(tmp_path / "runs") as repo,
        pytest.raises(NotFound, match=r"names state 0+ of /elsewhere/runs, and .* has no such"),
    ):
        _onwards(repo, worker, "tried/1", found)


def test_outside_of_ray_a_training_is_sent_to_track(tmp_path: Path) -> None:
    from datastates.integrations.ray import track

    with (
        pytest.raises(InvalidInput, match=r"Ray runs no training function here: .*repo\.track"),
        track(tmp_path / "runs", count=1),
    ):
        pass
    assert not os.path.exists(tmp_path / "runs")
