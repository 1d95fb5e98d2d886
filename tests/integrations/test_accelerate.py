"""A training with Accelerate is tracked by one line, and repeats every loss wherever it was
ended."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import datastates
from datastates import Config, Conflict, Repository, Tracker
from datastates.errors import InvalidInput, Unsupported
from datastates.integrations.accelerate import track
from tests.integrations.accelerating import KINDS, forget
from tests.support import effort
from tests.support.forge import Forge, forge

ROOT = Path(__file__).parents[2]
CALL = "tests.integrations.accelerating:train"
CONFIG = Config(memory_bytes=64 << 20, durable_interval_s=None)
KILLS, EPOCHS = (10, 8) if effort.IS_THOROUGH else (2, 2)


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts trainings; each imports nothing anew."""
    with forge(
        tmp_path_factory.mktemp("forge"), ["accelerate", "tests.integrations.accelerating"]
    ) as opened:
        yield opened


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", config=CONFIG) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _fresh_states() -> Iterator[None]:
    yield
    forget()


def placed(line: str) -> tuple[str, str]:
    """What a training says of a batch: its place, and the loss."""
    place, loss = line.split()
    return place, loss


class Stopped(Exception):
    """The training was stopped."""


# --- killed ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.exact(
    "accelerate", "killed", "shuffled", "accumulation", "mixed-precision", "scheduler", "stateful"
)
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(0, marks=pytest.mark.exact("accelerate", "workers-0")),
        pytest.param(2, marks=pytest.mark.exact("accelerate", "workers-2")),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_is_killed_again_and_again_repeats_every_loss(
    kind: str, workers: int, smith: Forge, tmp_path: Path
) -> None:
    def arguments(branch: str, seed: int) -> dict[str, Any]:
        return {
            "folder": str(tmp_path / "runs"),
            "branch": branch,
            "kind": kind,
            "workers": workers,
            "seed": seed,
            "epochs": EPOCHS,
        }

    never = dict(map(placed, smith.run(CALL, **arguments("never", 11))))
    assert len(never) == EPOCHS * 7 + 1
    draw = random.Random(effort.SEED + workers)
    seen: set[tuple[str, str]] = set()
    for kill in range(KILLS):
        job = smith.start(CALL, **arguments("killed", 90 + kill))
        lines = [job.lines.readline() for _ in range(draw.randrange(1, 4))]
        job.kill(signal.SIGKILL)
        seen.update(map(placed, [*lines, *job.say()]))
        assert job.wait() == -signal.SIGKILL
    seen.update(map(placed, smith.run(CALL, **arguments("killed", 99))))
    assert seen == never.items()


@pytest.mark.long
@pytest.mark.exact("accelerate", "fork", "moved")
def test_two_variants_fork_and_leave_their_parent_alone(smith: Forge, tmp_path: Path) -> None:
    common: dict[str, Any] = {"folder": str(tmp_path / "runs"), "kind": "all", "workers": 0}
    never = smith.run(CALL, branch="main", seed=1, **common)
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        before = repo.log("main")
        start = next(state.uid for state in before if (state.step, state.micro_step) == (3, 1))
    same = smith.run(CALL, branch="same", seed=2, start=start, **common)
    other = smith.run(
        CALL,
        branch="other",
        seed=2,
        start=start,
        only=["model", "loops", "rng", "accelerator"],
        lr=0.5,
        **common,
    )
    assert same == never[-len(same) :], "it goes on in the middle of an accumulation"
    assert 0 < len(same) == len(other)
    assert other != same
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        assert repo.log("main") == before
        assert {len(repo.log(name)) for name in ("same", "other")} == {len(before)}


# --- what is tracked ------------------------------------------------------------------------------


class Counter:
    """An object of a script's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def parts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    set_seed(seed)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(
        TensorDataset(torch.linspace(-1, 1, 24).view(12, 2)), batch_size=3, shuffle=True
    )
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), loader


def given(value: object, _: Accelerator) -> object:
    return value


def accelerator(steps: int = 1) -> Accelerator:
    forget()
    return Accelerator(cpu=True, gradient_accumulation_steps=steps)


def losses(
    accelerator: Accelerator,
    run: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    loader: Any,
    *,
    stop: int | None = None,
) -> list[str]:
    found = []
    for (batch,) in run.steps(loader):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.capture()
        found.append(float(loss.detach()).hex())
        if len(found) == stop:
            break
    return found


def test_each_prepared_object_has_a_name_and_registered_ones_too(repo: Repository) -> None:
    found = accelerator()
    (first, its, scheduler, loader), (second, other, *_) = parts(), parts(1)
    prepared = found.prepare(first, second, its, other, scheduler, loader)
    counter = Counter()
    found.register_for_checkpointing(counter)
    with track(found, repo, seen=[1]) as run:
        counter.count = 3
        run.capture()
    tree = repo.load("main")
    assert {
        "model",
        "model_1",
        "optimizer",
        "optimizer_1",
        "scheduler",
        "accelerator",
        "registered",
        "seen",
        "rng",
    } == tree.keys()
    assert tree["registered"] == [{"count": 3}]
    assert list(tree["model_1"]) == list(second.state_dict())
    assert prepared


def test_a_state_goes_on_without_accelerate_and_one_without_goes_on_with_it(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    def with_it(branch: str, stop: int | None = None, seed: int = 0) -> list[str]:
        found = accelerator()
        objects = found.prepare(*parts(seed))
        with track(found, repo, branch=branch) as run:
            return losses(found, run, *objects, stop=stop)

    def without(branch: str, stop: int | None = None, seed: int = 0) -> list[str]:
        found, objects = accelerator(), parts(seed)
        with repo.track(
            branch=branch, **dict(zip(("model", "optimizer", "scheduler"), objects, strict=False))
        ) as run:
            return losses(found, run, *objects, stop=stop)

    never = with_it("never")
    assert without("without") == never
    assert with_it("one", 2) + without("one", seed=5) == never
    assert without("other", 2) + with_it("other", seed=5) == never


def test_an_accumulation_is_counted_as_accelerate_does_and_its_gradients_are_in_the_state(
    repo: Repository,
) -> None:
    found = accelerator(3)
    objects = found.prepare(*parts())
    with track(found, repo) as run:
        never = losses(found, run, *objects)
    places = [(state.step, state.micro_step) for state in reversed(repo.log("main"))]
    assert places == [
        (0, 1),
        (0, 2),
        (1, 0),
        (2, 0),
    ], "the last batch of the loader ends an accumulation"
    assert repo.load("main~2")["gradients"]["model"].keys() == objects[0].state_dict().keys()
    assert repo.load("main")["gradients"]["model"] == {}
    for back in (3, 2, 1):
        found = accelerator(3)
        objects = found.prepare(*parts(7))
        with track(found, repo, branch=f"from-{back}", start=f"main~{back}") as run:
            assert losses(found, run, *objects) == never[-back:]


def test_gradients_that_are_left_out_are_said_when_training_starts(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    found = accelerator(3)
    objects = found.prepare(*parts())
    with track(found, repo, gradients=False) as run:
        assert "gradients are not tracked, and 3 batches make a step" in caplog.text
        losses(found, run, *objects)
    assert "gradients" not in repo.load("main")


def test_what_was_prepared_too_late_and_a_loop_without_steps_are_said_once(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    found = accelerator()
    model, optimizer, scheduler, loader = parts()
    found.prepare(model, optimizer, loader)
    with track(found, repo) as run:
        found.prepare(scheduler)
        for _ in range(3):
            run.capture()
    assert caplog.text.count("a scheduler was prepared after track") == 1
    caplog.clear()
    found = accelerator()
    found.prepare(*parts())
    with track(found, repo, branch="by-hand") as run:
        for _ in range(3):
            run.capture()
    assert caplog.text.count("no loader is looped over by run.steps") == 1


def test_what_cannot_be_tracked_is_refused_with_the_next_step(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = accelerator()
    with pytest.raises(InvalidInput, match=r"prepared nothing yet: call accelerator\.prepare"):
        track(found, repo)
    model, _ = found.prepare(*parts()[:2])
    with pytest.raises(InvalidInput, match="model: the name of what the accelerator prepared"):
        track(found, repo, model=model)
    for kind, said in (
        (DistributedType.DEEPSPEED, "DEEPSPEED keeps the states"),
        (
            DistributedType.FSDP,
            "1 processes train together by FSDP, .* launch them with --multi_gpu or --cpu",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Accelerator, "distributed_type", property(partial(given, kind)))
            with pytest.raises(Unsupported, match=said):
                track(found, repo)
    assert repo.refs() == []


def test_gradients_of_several_processes_are_in_no_state(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = accelerator(3)
    objects = found.prepare(*parts())
    monkeypatch.setattr(Accelerator, "num_processes", property(partial(given, 2)))
    said = r"2 processes accumulate gradients, .* capture where accelerator\.sync_gradients is true"
    with track(found, repo) as run, pytest.raises(Unsupported, match=said):
        losses(found, run, *objects)
    with track(found, repo, branch="without", gradients=False) as run:
        assert len(losses(found, run, *objects)) == 4


def test_a_cell_that_is_run_again_goes_on_or_says_why_not(repo: Repository) -> None:
    found = accelerator()
    objects = found.prepare(*parts())
    with track(found, repo, branch="never") as run:
        never = losses(found, run, *objects)
    found = accelerator()
    objects = found.prepare(*parts())
    # the block is what fails
    with pytest.raises(KeyboardInterrupt), track(found, repo) as run:  # noqa: PT012
        losses(found, run, *objects, stop=2)
        raise KeyboardInterrupt
    with track(found, repo) as run:
        assert losses(found, run, *objects) == never[2:], "the cell that trains"
    found.prepare(*parts(3))
    with pytest.raises(InvalidInput, match="model_1"):
        track(found, repo)
    found = accelerator()
    objects = found.prepare(*parts(3))
    with track(found, repo, branch="again", start="main~2") as run:
        assert losses(found, run, *objects) == never[2:], "the cell that prepares, too"


def test_another_optimizer_is_refused_and_nothing_is_lost(repo: Repository) -> None:
    found = accelerator()
    objects = found.prepare(*parts())
    with track(found, repo) as run:
        losses(found, run, *objects, stop=2)
    found, (model, *_) = accelerator(), parts()
    found.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(InvalidInput, match="optimizer"):
        track(found, repo)
    assert repo.state("main").step == 2
    assert not repo.verify().damage


def test_an_accelerate_that_keeps_what_it_prepared_elsewhere_is_refused(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = accelerator()
    objects = found.prepare(*parts())
    del found._schedulers
    with pytest.raises(Unsupported, match="has no _schedulers: datastates was tested with"):
        track(found, repo)
    assert objects


# --- what Accelerate's own tests of its checkpoints ask for ---------------------------------------


@pytest.mark.exact("accelerate", "validation")
def test_three_epochs_are_two_and_one_that_was_restored(repo: Repository) -> None:
    """Like ``test_can_resume_training``: with a loader for validation, and random numbers drawn
    between epochs."""

    def train(branch: str, epochs: int, seed: int) -> tuple[list[float], Any, Any]:
        found = accelerator()
        model, optimizer, scheduler, loader, valid = found.prepare(*parts(seed), parts(seed)[3])
        drawn: list[float] = []
        with track(found, repo, branch=branch, drawn=drawn) as run:
            for _ in run.epochs(epochs):
                losses(found, run, model, optimizer, scheduler, loader)
                drawn.append(
                    random.random() + float(sum(model(batch).sum() for (batch,) in valid).detach())
                )
                run.capture()
        return drawn, model.state_dict(), optimizer.state_dict()

    never = train("never", 3, 42)
    train("stopped", 2, 42)
    again = train("stopped", 3, 7)
    assert again[0] == never[0]
    assert all(map(torch.equal, again[1].values(), never[1].values()))
    assert all(
        torch.equal(one["momentum_buffer"], other["momentum_buffer"])
        for one, other in zip(again[2]["state"].values(), never[2]["state"].values(), strict=True)
    )


def test_a_scheduler_is_where_it_was(repo: Repository) -> None:
    """Like ``test_with_scheduler``."""
    found = accelerator()
    *_, scheduler, loader = objects = found.prepare(*parts())
    with track(found, repo) as run:
        losses(found, run, *objects)
        at_the_end = scheduler.state_dict()
        run.restore("main~2")
        assert scheduler.state_dict() != at_the_end
        run.restore("main@{1}")
        assert scheduler.state_dict() == at_the_end
    assert loader


def test_objects_without_a_state_are_refused_before_anything_is_tracked() -> None:
    """Like ``test_invalid_registration``: Accelerate refuses them itself."""
    found = accelerator()
    with pytest.raises(ValueError, match="Item at index 0"):
        found.register_for_checkpointing(torch.tensor([1, 2]))


def test_so_many_states_are_kept_as_were_asked_for(tmp_path: Path) -> None:
    """Like ``test_with_save_limit`` and ``test_checkpoint_deletion``."""
    found = accelerator()
    objects = found.prepare(*parts())
    with (
        datastates.open(tmp_path / "runs", config=CONFIG) as repo,
        track(found, repo, durable_every=1, retention="latest:2") as run,
    ):
        losses(found, run, *objects)
        repo.prune("latest:2")
    with datastates.open(tmp_path / "runs", config=CONFIG) as repo:
        assert [state.status.is_restorable for state in repo.log("main")] == [
            True,
            True,
            False,
            False,
        ]


def test_a_name_that_is_there_is_not_written_over(repo: Repository) -> None:
    """Like the directory of a checkpoint that is there already."""
    found = accelerator()
    objects = found.prepare(*parts())
    with track(found, repo) as run:
        losses(found, run, *objects, stop=1)
    with pytest.raises(Conflict, match="exists at"):
        track(found, repo, resume=False)


def test_a_loader_that_skips_its_first_batches_goes_on(repo: Repository) -> None:
    """Like ``test_skip_first_batches``: whoever skips batches with Accelerate's loader has that
    place found too."""

    def train(branch: str, seed: int, stop: int | None = None) -> list[str]:
        found = accelerator()
        model, optimizer, scheduler, loader = found.prepare(*parts(seed))
        rest = found.skip_first_batches(loader, 1)
        with track(found, repo, branch=branch) as run:
            return losses(found, run, model, optimizer, scheduler, rest, stop=stop)

    never = train("never", 0)
    assert len(never) == 3
    assert train("stopped", 0, 2) + train("stopped", 5) == never


@pytest.mark.filterwarnings("ignore:.*does not support.*:UserWarning")
def test_the_script_of_the_documents_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/frameworks/accelerate.md").read_text(), re.DOTALL
    )
    monkeypatch.setenv("DATASTATES_MEMORY", "64M")
    seen: dict[str, list[float]] = {}
    capture = Tracker.capture
    for name, stops in (("never", [None]), ("stopped", [5, 8, None])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        taken = seen[name] = []
        for stop in stops:

            def noting(
                run: Tracker,
                *,
                metrics: dict[str, Any],
                taken: list[float] = taken,
                stop: int | None = stop,
            ) -> Any:
                taken.append(float(metrics["loss"].detach()))
                made = capture(run, metrics=metrics)
                if len(taken) == stop:
                    raise Stopped
                return made

            monkeypatch.setattr(Tracker, "capture", noting)
            forget()
            with suppress(Stopped):
                exec(compile(code, "docs/frameworks/accelerate.md", "exec"), {})
    assert seen["stopped"] == seen["never"]
    assert len(seen["never"]) == 3 * 7
