"""A training that freezes or unfreezes layers on its way goes on with what it trained, although
its script does not come by there again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import datastates
from datastates import PermutationSampler, Repository
from datastates.errors import InvalidInput

THAWS_AT = 4
"""The step before which the script unfreezes its first layer."""


def made(*, is_frozen: bool = True) -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_(not is_frozen)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def train(
    repo: Repository, until: int, *, thaws_at: int | None = THAWS_AT, freezes_at: int | None = None
) -> list[float]:
    """Go on, or begin, on branch main; the losses from there."""
    model, optimizer = made()
    losses = []
    with repo.track(branch="main", model=model, optimizer=optimizer) as run:
        for step in range(run.step, until):
            if step == thaws_at:
                model[0].requires_grad_(True)
            if step == freezes_at:
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.capture()
    return losses


@pytest.mark.parametrize("stop", [THAWS_AT - 2, THAWS_AT, THAWS_AT + 1, THAWS_AT + 3])
def test_a_stopped_training_goes_on_with_what_it_had_unfrozen_and_frozen(
    tmp_path: Path, stop: int
) -> None:
    freezes_at = THAWS_AT + 2
    with datastates.open(tmp_path / "whole") as repo:
        expected = train(repo, 10, freezes_at=freezes_at)
    with datastates.open(tmp_path / "stopped") as repo:
        assert (
            train(repo, stop, freezes_at=freezes_at) + train(repo, 10, freezes_at=freezes_at)
            == expected
        )


def test_whoever_starts_it_again_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "datastates")
    with datastates.open(tmp_path) as repo:
        train(repo, 6)
        assert "again" not in caplog.text
        train(repo, 7)
    assert (
        "branch main: 2 parameters (model/0.weight, model/0.bias) are trained again, as in the"
        " state that was restored" in caplog.text
    )


def test_going_back_goes_back_to_what_was_trained_there(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        train(repo, 6)
        model, optimizer = made()
        with repo.track(branch="main", model=model, optimizer=optimizer) as run:
            assert trained(model) == [True] * 4
            report = run.restore("main~3", strict=True)
            assert report.frozen == ("model/0.weight", "model/0.bias")
            assert trained(model) == [False, False, True, True]


def test_a_script_that_runs_on_trains_what_it_says_and_tells_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in two phases, the second of which trains all layers of the model of the first."""
    caplog.set_level(logging.INFO, "datastates")
    model, optimizer = made()
    with datastates.open(tmp_path) as repo:
        for is_frozen in (True, False, False, True):
            model[0].requires_grad_(not is_frozen)
            with repo.track(branch="main", model=model, optimizer=optimizer) as run:
                assert trained(model) == [not is_frozen, not is_frozen, True, True]
                run.capture()
        other, its = made(is_frozen=False)
        with repo.track(branch="main", model=other, optimizer=its):
            assert trained(other) == [
                False,
                False,
                True,
                True,
            ], "a new model is that of a script which begins anew"
    assert (
        caplog.text.count(
            "(model/0.weight, model/0.bias) are frozen where it goes on, and trained here"
        )
        == 1
    )
    assert (
        caplog.text.count(
            "(model/0.weight, model/0.bias) are trained where it goes on, and frozen here"
        )
        == 1
    )
    assert caplog.text.count("are frozen again") == 1


def test_a_script_whose_branch_was_moved_elsewhere_meanwhile_trains_what_the_state_did(
    tmp_path: Path,
) -> None:
    model, optimizer = made()
    with datastates.open(tmp_path) as repo:
        with repo.track(branch="main", model=model, optimizer=optimizer) as run:
            run.capture()
            run.capture()
        repo.move("main", "main~1", expected=repo.state("main").uid)
        model[0].requires_grad_(True)
        with repo.track(branch="main", model=model, optimizer=optimizer):
            assert trained(model) == [False, False, True, True]


def test_a_guard_that_goes_on_with_the_following_batches_leaves_what_the_script_unfroze(
    tmp_path: Path,
) -> None:
    """The good state lies before the line that unfreezes, and the loop does not come by there
    again."""
    model, optimizer = made()
    losses = iter([1.0] * THAWS_AT + [float("nan")] + [1.0] * 9)
    with (
        datastates.open(tmp_path) as repo,
        repo.track(branch="main", model=model, optimizer=optimizer) as run,
    ):
        guard = run.guard()
        for epoch in run.epochs(3):
            if epoch == 1:
                model[0].requires_grad_(True)
            for _ in run.steps(range(THAWS_AT)):
                optimizer.zero_grad()
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()
                if not guard.rewound(next(losses)):
                    run.capture()
            assert trained(model) == [epoch > 0, epoch > 0, True, True]
        assert [rewind.good.step for rewind in guard.rewinds] == [THAWS_AT - 1]


@pytest.mark.parametrize("data", ["skip", "reshuffle"])
def test_a_guard_goes_back_over_a_group_that_was_added_meanwhile(
    tmp_path: Path, data: Literal["skip", "reshuffle"]
) -> None:
    """Who goes on with the following batches keeps the group, as it was when it was new; who
    goes back in the data will add it again."""
    model, _ = made()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    order = PermutationSampler(64, seed=1)
    with (
        datastates.open(tmp_path) as repo,
        repo.track(branch="main", model=model, optimizer=optimizer, order=order) as run,
    ):
        guard = run.guard(data=data)
        for step, _ in enumerate(run.steps(order.batches(8, epochs=None))):
            if step == THAWS_AT:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            if guard.rewound(float("nan") if step == THAWS_AT else 1.0):
                break
            run.capture()
        assert guard.rewinds[0].good.step == THAWS_AT - 1
        is_kept = data == "skip"
        assert [group["lr"] for group in optimizer.param_groups] == (
            [0.1, 0.01] if is_kept else [0.1]
        )
        assert trained(model) == [is_kept, is_kept, True, True]
        assert set(optimizer.state) == set(model[2].parameters())
        good = repo.load(guard.rewinds[0].good.uid)
        assert all(
            torch.equal(good["model"][name], tensor) for name, tensor in model.state_dict().items()
        )
        assert (
            good["optimizer"]["state"]["2.weight"]["step"]
            == optimizer.state[next(model[2].parameters())]["step"]
            == THAWS_AT - 1
        )
        if not is_kept:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        run.capture().wait()
        assert len(repo.load("main")["optimizer"]["param_groups"]) == 2


def test_a_guard_that_cannot_go_back_leaves_the_groups_as_they_are(tmp_path: Path) -> None:
    model, _ = made(is_frozen=False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.1)
    with (
        datastates.open(tmp_path) as repo,
        repo.track(branch="main", model=model, optimizer=optimizer) as run,
    ):
        guard = run.guard()
        optimizer.add_param_group({"params": list(model[0].parameters())})
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        model.register_buffer("later", torch.zeros(1))
        with pytest.raises(InvalidInput, match="later"):
            guard.rewound(float("nan"))
        assert len(optimizer.param_groups) == 2
        assert set(optimizer.state) == set(model.parameters())


def test_a_fork_and_a_restore_train_what_their_script_says_and_the_fork_tells_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    with datastates.open(tmp_path) as repo:
        train(repo, 6)
        model, optimizer = made()
        with repo.track(branch="fork", start="main", model=model, optimizer=optimizer):
            assert trained(model) == [False, False, True, True]
        assert (
            "branch fork: 2 parameters (model/0.weight, model/0.bias) are trained where it begins,"
            " and frozen here" in caplog.text
        )
        report = repo.restore("main", model=model)
        assert (report.frozen, report.unfrozen) == ((), ("model/0.weight", "model/0.bias"))
        assert trained(model) == [False, False, True, True]
        assert repo.restore("main", model=model, only="model/2.*").unfrozen == ()


def test_a_state_that_no_training_captured_freezes_nothing(tmp_path: Path) -> None:
    """All its tensors are without a gradient, as in a file."""
    model, optimizer = made(is_frozen=False)
    with datastates.open(tmp_path) as repo:
        with repo.track(branch="main", weights=dict(model.state_dict())) as run:
            run.capture()
        report = repo.restore("main", weights=model)
        assert (report.frozen, report.unfrozen) == ((), ())
        with repo.track(branch="main", weights=model, optimizer=optimizer, strict=False):
            assert trained(model) == [True] * 4


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{folder / 'meet'}", world_size=1, rank=0)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_what_ddp_would_not_exchange_is_left_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with datastates.open(tmp_path / "runs") as repo, alone(tmp_path):
        train(repo, 6)
        model, optimizer = made()
        with repo.track(branch="main", model=DistributedDataParallel(model), optimizer=optimizer):
            assert trained(model) == [False, False, True, True]
    assert "set requires_grad before DistributedDataParallel wraps the model" in caplog.text


def by_groups(repo: Repository, until: int) -> list[float]:
    """Go on, or begin, on branch main: the first layer joins the optimizer in a group of its
    own, with a rate of its own."""
    model, _ = made()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    with repo.track(branch="main", model=model, optimizer=optimizer, schedule=schedule) as run:
        for step in range(run.step, until):
            if step == THAWS_AT:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            run.capture()
    return losses


@pytest.mark.parametrize("stop", [THAWS_AT, THAWS_AT + 1, THAWS_AT + 3])
def test_a_stopped_training_goes_on_with_the_groups_that_its_optimizer_had_got(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: int
) -> None:
    caplog.set_level(logging.INFO, "datastates")
    with datastates.open(tmp_path / "whole") as repo:
        expected = by_groups(repo, 10)
    with datastates.open(tmp_path / "stopped") as repo:
        assert by_groups(repo, stop) + by_groups(repo, 10) == expected
    assert ("branch main: SGD has 2 parameters in a group of their own again" in caplog.text) is (
        stop > THAWS_AT
    )


@pytest.mark.parametrize("names", [("generator", "discriminator"), ("discriminator", "generator")])
def test_a_group_comes_back_with_the_parameters_of_the_model_that_the_optimizer_trains(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """Both models have parameters of the same names, as those of a GAN, or a model and its
    average."""

    def start() -> tuple[dict[str, nn.Sequential], torch.optim.SGD]:
        models = {name: made()[0] for name in names}
        return models, torch.optim.SGD(models["discriminator"][2].parameters(), lr=0.1)

    with datastates.open(tmp_path) as repo:
        models, optimizer = start()
        with repo.track(branch="main", objects={**models, "optimizer": optimizer}) as run:
            optimizer.add_param_group({"params": list(models["discriminator"][0].parameters())})
            run.capture()
        models, optimizer = start()
        with repo.track(branch="main", objects={**models, "optimizer": optimizer}):
            assert list(map(id, optimizer.param_groups[1]["params"])) == list(
                map(id, models["discriminator"][0].parameters())
            )


def test_a_group_of_the_parameters_of_two_models_comes_back(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        for is_first in (True, False):
            first, second = made()[0], made()[0]
            optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
            with repo.track(branch="main", first=first, second=second, optimizer=optimizer) as run:
                if is_first:
                    optimizer.add_param_group({"params": list(first.parameters())})
                run.capture()
                assert list(map(id, optimizer.param_groups[1]["params"])) == list(
                    map(id, first.parameters())
                )


def test_an_optimizer_whose_groups_fit_none_of_the_state_is_left_as_it_is_and_refused(
    tmp_path: Path,
) -> None:
    with datastates.open(tmp_path) as repo:
        by_groups(repo, 6)
        model, _ = made()
        everything = list(model.parameters())
        for parameters in (everything[:2], everything[2:3]):
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            with pytest.raises(
                InvalidInput,
                match="1 of the state's 2 parameter groups: call add_param_group for the rest",
            ):
                repo.track(branch="main", model=model, optimizer=optimizer)
            assert len(optimizer.param_groups) == 1


def test_a_fork_trains_no_group_that_its_script_did_not_ask_for(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo:
        by_groups(repo, 6)
        model, _ = made()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(InvalidInput, match="1 of the state's 2 parameter groups"):
            repo.track(branch="fork", start="main", model=model, optimizer=optimizer)
        assert len(optimizer.param_groups) == 1
