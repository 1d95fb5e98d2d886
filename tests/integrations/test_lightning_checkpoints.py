"""Checkpoints of Lightning's that are states: saved by a ModelCheckpoint, named by
``ckpt_path``, removed; what errors say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from datastates import Repository
from datastates.errors import Conflict, InvalidInput, NotFound, Unsupported
from datastates.integrations.lightning import DatastatesCallback, DatastatesCheckpointIO
from tests.integrations.lightning_jobs import BATCHES, Automatic, Items, trainer_of

pytestmark = [
    pytest.mark.long,
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("UserWarning", "FutureWarning", "DeprecationWarning")
    ),
]


class Fitted:
    """One fit: its Trainer, and what it said."""

    def __init__(
        self,
        repo: Any,
        tmp_path: Path,
        *,
        callbacks: Any = (),
        branch: str = "main",
        seed: int = 3,
        **settings: Any,
    ) -> None:
        self.said: list[str] = []
        self._given = repo
        ckpt_path = settings.pop("ckpt_path", None)
        torch.manual_seed(seed)
        plugins = [DatastatesCheckpointIO(repo, branch=branch), *trainer_plugins()]
        settings = {
            "plugins": plugins,
            "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks),
            **settings,
        }
        self.trainer = trainer_of("plain", tmp_path, [*callbacks], settings)
        self.module = Automatic(lambda *words: self.said.append(" ".join(map(str, words))))
        self.trainer.fit(self.module, *self.loaders(), ckpt_path=ckpt_path)

    @staticmethod
    def loaders() -> tuple[Any, Any]:
        return DataLoader(Items(), batch_size=4, shuffle=True), DataLoader(Items(), batch_size=13)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.module.state_dict())


class Noted(Callback):  # type: ignore[misc]  # Lightning is not looked at by mypy
    """It has a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def trainer_plugins() -> list[Any]:
    from lightning.pytorch.plugins.environments import LightningEnvironment

    return [LightningEnvironment()]


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_are_states_and_no_pickles(repo: Repository, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", monitor="val_loss", save_top_k=-1)
    fitted = Fitted(repo, tmp_path, callbacks=[saving], max_epochs=3)
    states = list(repo.log("main"))
    assert [(state.step, state.status) for state in states] == [
        (21, "durable"),
        (14, "durable"),
        (7, "durable"),
    ]
    assert [state.metrics["val_loss"] for state in reversed(states)] == [
        float(score) for score in saving.best_k_models.values()
    ]
    files = sorted((tmp_path / "saved").iterdir())
    assert [file.read_text().strip().rpartition("/")[2] for file in files] == [
        state.uid for state in reversed(states)
    ]
    assert is_equal(repo.load("main", only="model")["model"], fitted.weights)
    assert len([ref for ref in repo.refs() if ref.name.startswith("lightning/")]) == 3


@pytest.mark.parametrize("how", ["file", "address", "own", "other-repository"])
def test_a_checkpoint_restores_everything_that_lightning_restores(
    repo: Repository, tmp_path: Path, how: str
) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", save_top_k=-1)
    whole = Fitted(repo, tmp_path, callbacks=[saving], max_epochs=3)
    files = sorted((tmp_path / "saved").iterdir())
    paths = {
        "file": str(files[0]),
        "address": f"datastates://{tmp_path}/runs/main~2",
        "own": "datastates:main~2",
    }
    given: Any = repo
    path = paths.get(how, paths["address"])
    if how == "other-repository":
        repo.close()
        given = tmp_path / "others"
    later = Fitted(given, tmp_path, branch="later", max_epochs=3, ckpt_path=path)
    assert later.trainer.global_step == whole.trainer.global_step
    assert later.trainer.current_epoch == 3
    assert [line.split()[:2] for line in later.said] == [
        line.split()[:2] for line in whole.said[-len(later.said) :]
    ]


def test_best_and_last_are_found(repo: Repository, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", monitor="val_loss", save_last="link", save_top_k=2)
    fitted = Fitted(repo, tmp_path, callbacks=[saving], max_epochs=3)
    best = min((state for state in repo.log("main")), key=lambda state: state.metrics["val_loss"])
    found = fitted.trainer.validate(
        fitted.module, fitted.loaders()[1], ckpt_path="best", verbose=False
    )
    assert is_equal(fitted.weights, repo.load(best, only="model")["model"])
    assert set(found[0]) == {"val_loss"}
    again = Fitted(
        repo,
        tmp_path,
        callbacks=[ModelCheckpoint(tmp_path / "saved", save_last=True)],
        max_epochs=4,
        ckpt_path="last",
    )
    assert again.trainer.current_epoch == 4
    assert len(again.said) == BATCHES + 1
    assert sorted({state.step for state in repo.log("main")}) == [7, 14, 21, 28]


@pytest.mark.parametrize("phase", ["validate", "test", "predict"])
@pytest.mark.parametrize("kind", ["captured", "saved"])
def test_states_of_callbacks_are_there_in_every_phase(
    repo: Repository, tmp_path: Path, phase: str, kind: str
) -> None:
    saving = DatastatesCallback(repo) if kind == "captured" else ModelCheckpoint(tmp_path / "saved")
    fitted = Fitted(repo, tmp_path, callbacks=[Noted(), saving], max_epochs=1)
    noted = Noted(-1)
    plugins = [DatastatesCheckpointIO(repo), *trainer_plugins()]
    trainer = trainer_of("plain", tmp_path, [noted], {"plugins": plugins})
    fitted.module.test_step = fitted.module.predict_step = lambda batch, batch_idx: (
        fitted.module.net(batch).mean()
    )
    getattr(trainer, phase)(fitted.module, fitted.loaders()[1], ckpt_path="datastates:main")
    assert noted.count == BATCHES


def test_loops_stand_where_the_checkpoint_was_taken(repo: Repository, tmp_path: Path) -> None:
    fitted = Fitted(repo, tmp_path, callbacks=[ModelCheckpoint(tmp_path / "saved")], max_epochs=1)
    loaded = DatastatesCheckpointIO(repo).load_checkpoint("datastates:main")
    again = Fitted(repo, tmp_path, max_epochs=1, ckpt_path="datastates:main")
    assert loaded["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 1
    assert (
        again.trainer.fit_loop.state_dict()["epoch_loop.batch_progress"]["total"]
        == (fitted.trainer.fit_loop.state_dict()["epoch_loop.batch_progress"]["total"])
    )
    assert again.said == [], "one epoch was asked for, and done"
    assert again.trainer.global_step == BATCHES


def test_a_trainer_keeps_the_path_that_it_was_given(repo: Repository, tmp_path: Path) -> None:
    fitted = Fitted(repo, tmp_path, callbacks=[DatastatesCallback(repo)], max_epochs=2)
    fitted.trainer.ckpt_path = "datastates:main~5"
    fitted.trainer.validate(fitted.module, fitted.loaders()[1], verbose=False)
    assert is_equal(fitted.weights, repo.load("main~5", only="model")["model"])


def test_a_module_that_is_not_strict_takes_what_there_is(repo: Repository, tmp_path: Path) -> None:
    io = DatastatesCheckpointIO(repo)
    io.save_checkpoint(
        {"state_dict": {"net.0.weight": torch.ones(32, 8)}, "global_step": 1},
        tmp_path / "part.ckpt",
    )
    module = Automatic(lambda *_: None)
    trainer = trainer_of("plain", tmp_path, [], {"plugins": [io, *trainer_plugins()]})
    with pytest.raises(RuntimeError, match="Missing key"):
        trainer.validate(module, Fitted.loaders()[1], ckpt_path="datastates:main", verbose=False)
    module.strict_loading = False
    trainer.validate(module, Fitted.loaders()[1], ckpt_path="datastates:main", verbose=False)
    assert torch.equal(module.state_dict()["net.0.weight"], torch.ones(32, 8))


@pytest.mark.parametrize(
    ("top", "epochs", "interval", "files"),
    [(1, 3, 1.0, 1), (2, 3, 1.0, 2), (-1, 2, 0.5, 4), (0, 2, 1.0, 0)],
)
def test_as_many_checkpoints_are_kept_as_were_asked_for(
    repo: Repository, tmp_path: Path, top: int, epochs: int, interval: float, files: int
) -> None:
    saving = ModelCheckpoint(
        tmp_path / "saved", monitor="val_loss", save_top_k=top, save_on_train_epoch_end=False
    )
    Fitted(repo, tmp_path, callbacks=[saving], max_epochs=epochs, val_check_interval=interval)
    found = [*(tmp_path / "saved").iterdir()] if files else []
    assert (
        len(found)
        == len([ref for ref in repo.refs() if ref.name.startswith("lightning/")])
        == files
    )
    assert all(
        repo.state(file.read_text().strip().rpartition("/")[2]).status == "durable"
        for file in found
    )


def test_removing_a_checkpoint_takes_its_name_and_leaves_its_state(
    repo: Repository, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", save_top_k=1)
    Fitted(repo, tmp_path, callbacks=[saving], max_epochs=3)
    assert len(list((tmp_path / "saved").iterdir())) == 1
    assert len([ref for ref in repo.refs() if ref.name.startswith("lightning/")]) == 1
    assert len(list(repo.log("main"))) == 3


def test_a_training_that_goes_back_takes_the_branch_along(
    repo: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Fitted(
        repo, tmp_path, callbacks=[ModelCheckpoint(tmp_path / "saved", save_top_k=-1)], max_epochs=3
    )
    middle = repo.state("main~1")
    Fitted(
        repo,
        tmp_path,
        callbacks=[ModelCheckpoint(tmp_path / "more", save_top_k=-1)],
        max_epochs=3,
        ckpt_path="datastates:main~1",
    )
    assert repo.state("main").parents == (middle.uid,)
    assert repo.state("main@{2}").step == 21
    assert (
        f"branch main goes back to {middle.uid[:10]}, from which the training resumes"
        in caplog.text
    )
    Fitted(
        repo,
        tmp_path,
        branch="side",
        callbacks=[ModelCheckpoint(tmp_path / "side")],
        max_epochs=3,
        ckpt_path="datastates:main~2",
    )
    assert repo.state("side").parents[0] == repo.state("main~1").parents[0] or repo.state(
        "side~2"
    ) == repo.state("main~2")
    with pytest.raises(Conflict, match="does not descend"):
        Fitted(
            repo,
            tmp_path,
            branch="side",
            callbacks=[ModelCheckpoint(tmp_path / "no")],
            max_epochs=9,
            ckpt_path="datastates:main",
        )


def test_a_state_that_a_callback_captured_is_a_checkpoint(repo: Repository, tmp_path: Path) -> None:
    whole = Fitted(repo, tmp_path, callbacks=[DatastatesCallback(repo)], max_epochs=3)
    later = Fitted(
        repo, tmp_path, branch="later", seed=99, max_epochs=3, ckpt_path="datastates:main~4"
    )
    assert later.trainer.global_step == 21
    exact = Fitted(
        repo,
        tmp_path,
        seed=99,
        callbacks=[DatastatesCallback(repo, branch="exact")],
        max_epochs=3,
        ckpt_path="datastates:main~4",
    )
    assert exact.said == whole.said[-len(exact.said) :]
    assert len(exact.said) == 5
    assert repo.state("exact~4") == repo.state("main~4")
    with pytest.raises(Conflict, match="leave ckpt_path out"):
        Fitted(repo, tmp_path, callbacks=[DatastatesCallback(repo)], ckpt_path="datastates:main~4")
    with pytest.raises(InvalidInput, match="give one of them"):
        Fitted(
            repo,
            tmp_path,
            callbacks=[DatastatesCallback(repo, branch="b", start="main")],
            ckpt_path="datastates:main~4",
        )


@pytest.mark.parametrize("within", [True, False])
def test_a_checkpoint_beside_the_callback_is_exact_too(
    repo: Repository, tmp_path: Path, within: bool
) -> None:
    often = (
        {"every_n_train_steps": 4}
        if within
        else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    )
    saving = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, **often)
    whole = Fitted(
        repo,
        tmp_path,
        branch="checkpoints",
        callbacks=[DatastatesCallback(repo), saving],
        max_epochs=3,
    )
    first = list(repo.log("checkpoints"))[-1]
    again = Fitted(
        repo, tmp_path, branch="again", seed=99, callbacks=[DatastatesCallback(repo, branch="exact")], max_epochs=3,
        ckpt_path=f"datastates:{first.uid}",
    )  # fmt: skip
    assert first.step == (4 if within else BATCHES)
    assert again.said == whole.said[-len(again.said) :]
    assert sum(line[0] != "v" for line in again.said) == 21 - first.step


def test_weights_of_any_state_are_evaluated(repo: Repository, tmp_path: Path) -> None:
    fitted = Fitted(repo, tmp_path, callbacks=[DatastatesCallback(repo)], max_epochs=2)
    merged = repo.merge(["main", "main~3"], into="soup")
    fitted.trainer.validate(
        fitted.module, fitted.loaders()[1], ckpt_path="datastates:soup", verbose=False
    )
    assert is_equal(fitted.weights, repo.load(merged.uid, only="model")["model"])


def test_a_file_of_lightnings_own_is_read_as_ever(repo: Repository, tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    saving = ModelCheckpoint(tmp_path / "files", save_top_k=-1)
    Fitted(
        repo,
        tmp_path,
        callbacks=[saving],
        plugins=[TorchCheckpointIO(), *trainer_plugins()],
        max_epochs=1,
    )
    again = Fitted(repo, tmp_path, max_epochs=2, ckpt_path=saving.best_model_path)
    assert again.trainer.global_step == 2 * BATCHES


def test_errors_of_a_path_name_the_repository_and_what_is_there(
    repo: Repository, tmp_path: Path
) -> None:
    Fitted(repo, tmp_path, callbacks=[DatastatesCallback(repo)], max_epochs=1)
    with pytest.raises(NotFound, match=r"runs has no 'mian'.*main"):
        Fitted(repo, tmp_path, ckpt_path=f"datastates://{tmp_path}/runs/mian")
    with pytest.raises(NotFound, match=r"no repository in .*nowhere"):
        Fitted(repo, tmp_path, ckpt_path=f"datastates://{tmp_path}/nowhere/main")
    with pytest.raises(NotFound, match="main~99"):
        Fitted(repo, tmp_path, ckpt_path="datastates:main~99")
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        Fitted(repo, tmp_path, ckpt_path=str(tmp_path / "nothing.ckpt"))


def test_what_no_state_can_hold_is_refused_by_name(repo: Repository, tmp_path: Path) -> None:
    io = DatastatesCheckpointIO(repo)
    with pytest.raises(Unsupported, match="lightning/hyper_parameters/net"):
        io.save_checkpoint(
            {"state_dict": {}, "global_step": 1, "hyper_parameters": {"net": object()}},
            tmp_path / "a.ckpt",
        )
    assert not (tmp_path / "a.ckpt").exists()
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(InvalidInput, match="both go to branch 'main'"):
        Fitted(
            repo,
            tmp_path,
            callbacks=[DatastatesCallback(tmp_path / "runs"), ModelCheckpoint(tmp_path / "saved")],
            max_epochs=1,
        )
    with pytest.raises(InvalidInput, match="repo is None"):
        DatastatesCheckpointIO(None)  # type: ignore[arg-type]  # on purpose


def test_a_state_without_a_model_is_no_checkpoint(repo: Repository) -> None:
    with repo.track(branch="numbers", numbers=[1, 2]) as run:
        run.capture()
    with pytest.raises(InvalidInput, match="has no model, but"):
        DatastatesCheckpointIO(repo).load_checkpoint("datastates:numbers")
