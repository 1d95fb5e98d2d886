"""MLflow, W&B and TensorBoard beside a training: each has the metrics that were given once, and
either knows the other's name for it."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Repository, State, Tracker
from datastates.errors import InvalidInput
from datastates.integrations import metrics_log
from datastates.integrations.metrics_log import MetricsLog, TrainingFacts
from tests.integrations.logs import KINDS, Theirs
from tests.support import warm
from tests.support.forge import forge
from tests.test_documents import ROOT, blocks

each_log = pytest.mark.parametrize("kind", KINDS)
# theirs
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a network, nor printed."""
    for name, value in {
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)
    # children have one of their own, which ends with them
    monkeypatch.delenv("WANDB_SERVICE", raising=False)


@pytest.fixture
def theirs(kind: str, tmp_path: Path) -> Theirs:
    """An empty log."""
    pytest.importorskip(kind)
    folder = tmp_path / "theirs"
    folder.mkdir()
    return KINDS[kind](folder)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository."""
    with datastates.open(tmp_path / "runs", memory_bytes=16 << 20) as opened:
        yield opened


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(run: Tracker, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        loss = model(torch.randn(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.capture(metrics={"loss": loss.item(), "rate": 0.1})


def trained(
    repo: Repository, theirs: Theirs, steps: int, branch: str = "main", **options: Any
) -> MetricsLog:
    """So many steps more, with the log beside them."""
    model, optimizer = job()
    with repo.track(
        branch=branch,
        model=model,
        optimizer=optimizer,
        config={"lr": 0.1, "net": {"width": 3}},
        **options,
    ) as run:
        log = theirs.beside(run)
        train(run, model, optimizer, steps)
    return log


def points(states: Sequence[State]) -> set[tuple[int, str, float]]:
    """As 32 bits, which is what TensorBoard has of them."""
    return {
        (state.step, key, as_told(value))
        for state in states
        for key, value in state.metrics.items()
    }


def as_told(value: float) -> float:
    return torch.tensor(value).item()


@each_log
def test_metrics_that_are_given_once_are_in_both_and_each_names_the_other(
    theirs: Theirs, repo: Repository, kind: str
) -> None:
    log = trained(repo, theirs, 3)
    head = repo.state("main")
    seen = theirs.runs()[log.id]

    assert {(step, key, as_told(value)) for step, key, value in seen.points} == points(
        repo.log("main")
    )
    assert len(seen.points) == 6
    assert [state.step for state in repo.find(f'attr.{kind}.run = "{log.id}" order by step')] == [
        1,
        2,
        3,
    ]
    named = {
        "repository": str(repo.core.location),
        "branch": "main",
        "run": head.run,
        "head": head.uid,
    }
    assert seen.told == {f"datastates.{key}": value for key, value in named.items()}
    assert seen.config.items() >= {"lr": "0.1", "net.width": "3", "optimizer.lr": "0.1"}.items()
    assert (seen.parent, seen.ended) == (None, "finished")


@each_log
def test_a_training_that_is_resumed_goes_on_in_its_run_and_a_fork_has_one_that_names_its_parent(
    theirs: Theirs, repo: Repository, tmp_path: Path
) -> None:
    first = trained(repo, theirs, 4)
    second = trained(repo, theirs, 3)
    fork = trained(repo, theirs, 2, "fork", start="main~2")
    again = trained(repo, theirs, 1, "fork", start="main~2")
    runs = theirs.runs()

    assert second.id == first.id != fork.id == again.id
    assert runs.keys() == {first.id, fork.id}
    assert [step for step, key, _ in runs[first.id].points if key == "loss"] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
    ]
    assert [step for step, key, _ in runs[fork.id].points if key == "loss"] == [6, 7, 8]
    assert (runs[first.id].parent, runs[fork.id].parent) == (None, first.id)
    assert runs[fork.id].told["datastates.start"] == repo.state("fork~1").uid, (
        "where it went on the last time"
    )
    assert runs[fork.id].told["datastates.branch"] == "fork"


def killed(say: Any, kind: str, folder: str, theirs: str) -> None:
    """In a process of its own: seven steps, of which the first five are on disk and told."""
    repo = datastates.open(Path(folder), memory_bytes=16 << 20)
    model, optimizer = job()
    run = repo.track(model=model, optimizer=optimizer, durable_every=1)
    log = KINDS[kind](Path(theirs)).beside(run)
    train(run, model, optimizer, 5)
    run.capture(step=5, metrics={"loss": 0.0}).wait("durable")
    say(log.id)
    signal.pause()


@pytest.mark.long
@each_log
def test_a_training_that_was_killed_goes_on_in_its_run(
    theirs: Theirs, tmp_path: Path, kind: str
) -> None:
    with forge(tmp_path) as smith:
        process = smith.start(
            "tests.integrations.test_logging:killed",
            kind=kind,
            folder=str(tmp_path / "runs"),
            theirs=str(theirs.folder),
        )
        id = process.lines.readline().strip()
        process.kill(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, smith.errors()
    with datastates.open(tmp_path / "runs", memory_bytes=16 << 20) as repo:
        log = trained(repo, theirs, 3)
        assert log.id == id
        assert {step for step, _, _ in theirs.runs()[id].points} >= {6, 7, 8}


@each_log
def test_a_training_that_fails_says_so_in_their_run(
    theirs: Theirs, repo: Repository, kind: str
) -> None:
    model, optimizer = job()
    # the block is what fails
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        log = theirs.beside(run)
        train(run, model, optimizer, 2)
        raise ZeroDivisionError
    seen = theirs.runs()[log.id]

    assert seen.ended == ("finished" if kind == "tensorboard" else "failed")
    assert len(seen.points) == 4


def test_a_run_of_mlflow_that_was_deleted_is_replaced_and_that_is_said(
    tmp_path: Path, repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    theirs = KINDS["mlflow"](tmp_path)
    first = trained(repo, theirs, 1)
    vars(theirs)["client"].delete_run(first.id)
    second = trained(repo, theirs, 1)

    assert second.id != first.id
    assert f"mlflow has no run {first.id} any more" in caplog.text
    assert [step for step, key, _ in theirs.runs()[second.id].points if key == "loss"] == [2]


def test_a_run_of_the_callers_own_is_logged_to_and_not_ended(
    tmp_path: Path, repo: Repository
) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    from datastates.integrations.mlflow import MlflowLog

    model, optimizer = job()
    with mlflow.start_run() as own:
        with repo.track(model=model, optimizer=optimizer) as run:
            log = MlflowLog(run, into=own.info.run_id)
            train(run, model, optimizer, 2)
        mlflow.log_metric("after", 1.0)
        assert (
            mlflow.active_run().info.run_id == log.id == repo.state("main").attributes["mlflow.run"]
        )
    found = mlflow.get_run(log.id)
    assert found.data.metrics.keys() == {"loss", "rate", "after"}
    assert found.info.status == "FINISHED"


def test_a_metric_that_mlflow_would_not_take_costs_no_other_one(
    tmp_path: Path,
    repo: Repository,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlflow")
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    theirs = KINDS["mlflow"](tmp_path)
    client = vars(theirs)["client"]
    log_batch = client.log_batch

    def choosy(run_id: str, metrics: Sequence[Any] = (), **more: Any) -> None:
        if any(metric.key == "refused" for metric in metrics):
            raise MlflowException("no", INVALID_PARAMETER_VALUE)
        log_batch(run_id, metrics=metrics, **more)

    monkeypatch.setattr(client, "log_batch", choosy)
    model, optimizer = job()
    with repo.track(
        model=model, optimizer=optimizer, config={"a//b": 1, "a/b": 2, "../c": 3}
    ) as run:
        log = theirs.beside(run)
        for step in range(3):
            odd = {
                "val//acc": 1.0,
                "/loss": 2.0,
                "./a/../b/": 3.0,
                "l" * 255: 4.0,
                "..": 5.0,
                "refused": 6.0,
            }
            run.capture(metrics={"plain": float(step), **odd}).wait()
    seen = theirs.runs()[log.id]

    assert {key for _, key, _ in seen.points} == {"plain", "val/acc", "loss", "a/b", "l" * 250, "_"}
    assert sorted(value for _, key, value in seen.points if key == "plain") == [0.0, 1.0, 2.0]
    assert seen.config.keys() >= {"a/b", "c"}
    assert caplog.text.count("mlflow refuses the metric refused") == 1
    assert "did not take" not in caplog.text


# --- what holds of every log ----------------------------------------------------------------------


class Kept(MetricsLog):
    """A log in a list, which can be away."""

    kind = "kept"

    def __init__(self, tracker: Tracker) -> None:
        self.sent: list[int] = []
        self.is_away = False
        self.end: tuple[str | None, BaseException | None] | None = None
        super().__init__(tracker)

    def _resume(self, id: str, facts: TrainingFacts) -> bool:
        return False

    def _begin(self, facts: TrainingFacts) -> str:
        return "1"

    def _describe(self, facts: TrainingFacts, parent: str | None) -> None:
        self.parent = parent

    def _send(self, states: Sequence[State]) -> None:
        if self.is_away:
            raise OSError("away")
        self.sent += [state.step for state in states]

    def _end(self, head: str | None, error: BaseException | None) -> None:
        self.end = (head, error)


def test_what_a_log_did_not_take_is_sent_again_and_the_training_hears_nothing_of_it(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = job()
    with repo.track(model=model, optimizer=optimizer) as run:
        log = Kept(run)
        log.is_away = True
        train(run, model, optimizer, 3)
        assert run.head is not None
        log.is_away = False
        train(run, model, optimizer, 1)
    assert log.sent == [1, 2, 3, 4]
    assert log.end == (repo.state("main").uid, None)
    assert caplog.text.count("does not take metrics for now") <= 1
    assert "did not take the metrics of" not in caplog.text


def test_a_log_that_stays_away_is_said_to_lack_what_the_lineage_has(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = job()
    with repo.track(model=model, optimizer=optimizer) as run:
        log = Kept(run)
        log.is_away = True
        train(run, model, optimizer, 3)
    assert log.sent == []
    assert "kept did not take the metrics of 3 states" in caplog.text
    assert [state.metrics["rate"] for state in repo.log("main")] == [0.1, 0.1, 0.1]


def test_a_log_that_hangs_is_not_waited_for(
    repo: Repository, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "PATIENCE_S", 0.1)
    go_on = threading.Event()

    class Hanging(Kept):
        def _send(self, states: Sequence[State]) -> None:
            go_on.wait()

    model, optimizer = job()
    with repo.track(model=model, optimizer=optimizer) as run:
        log = Hanging(run)
        train(run, model, optimizer, 1)
    go_on.set()
    assert log.end is None
    assert "kept does not answer for 0 s and is not waited for" in caplog.text


def test_a_log_does_not_keep_a_dropped_training_alive(repo: Repository) -> None:
    model, optimizer = job()
    run = repo.track(model=model, optimizer=optimizer)
    log = Kept(run)
    train(run, model, optimizer, 1)
    known = weakref.ref(model)
    del run, model, optimizer
    gc.collect()
    assert known() is None
    assert log.end is None


def test_attributes_of_a_training_are_those_of_each_state_and_a_capture_s_own_win(
    repo: Repository,
) -> None:
    model, optimizer = job()
    with repo.track(model=model, optimizer=optimizer) as run:
        run.capture()
        run.attributes["job"] = 4711
        run.capture(attributes={"lr": 0.1})
        run.capture(attributes={"job": 4712})
    assert [state.attributes for state in repo.log("main")] == [
        {"job": 4712},
        {"job": 4711, "lr": 0.1},
        {},
    ]


def test_an_attribute_of_a_training_that_cannot_be_recorded_is_named_and_counts_no_step(
    repo: Repository,
) -> None:
    model, optimizer = job()
    with repo.track(model=model, optimizer=optimizer) as run:
        run.attributes["model"] = model  # type: ignore[assignment]  # it is what is tried
        with pytest.raises(InvalidInput, match="attribute 'model'"):
            run.capture()
        del run.attributes["model"]
        assert run.capture().step == 1


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = [
        *blocks(ROOT / "docs" / "guide" / "first-steps.md"),
        *blocks(ROOT / "docs" / "frameworks" / "logging.md"),
        "repo.close()",
    ]
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(code))
    done = warm.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "extra"),
    [("mlflow", "mlflow"), ("wandb", "wandb"), ("torch.utils.tensorboard", "tensorboard")],
)
def test_a_log_that_is_not_installed_is_named_with_what_to_install(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"datastates.integrations.{extra}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'datastates\[{extra}\]'"):
        importlib.import_module(f"datastates.integrations.{extra}")
