"""With frozen=False, a state leaves out what was never trained, records that it does, and fits
models that have it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Repository
from datastates.errors import InvalidInput, Unsupported

NO: dict[str, Any] = {"frozen": "no"}
BASE = {"0.weight", "0.bias"}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(
        tmp_path / "runs", config=datastates.Config(memory_bytes=64 << 20)
    ) as opened:
        yield opened


def made(*, width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A frozen base, buffers that change, and a head that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, width), nn.BatchNorm1d(width, affine=False), nn.Linear(width, 1)
    ).to(dtype)
    model[0].requires_grad_(False)
    return model


def train(
    repo: Repository,
    until: int,
    *,
    thaws_at: int | None = None,
    freezes_at: int | None = None,
    **options: Any,
) -> list[float]:
    """Go on, or begin, on branch main; the losses from there.

    The optimizer has the frozen parameters too."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    with repo.track(**{"model": model, "optimizer": optimizer, "frozen": False, **options}) as run:
        for step in range(run.step, until):
            if step == thaws_at:
                model[0].requires_grad_(True)
            if step == freezes_at:
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            loss.backward()
            optimizer.step()
            run.capture(step=step + 1)
            losses.append(loss.item())
    return losses


def test_a_state_has_all_but_what_was_never_trained(repo: Repository) -> None:
    train(repo, 3)
    tree = repo.load("main")
    assert set(made().state_dict()) - set(tree["model"]) == BASE
    assert tree["frozen_parameters"] == {"model": "0.bias\n0.weight"}
    assert set(tree["optimizer"]["state"]) == {"2.weight", "2.bias"}
    assert tree["optimizer"]["param_groups"][0]["params"] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]


def test_without_the_option_a_state_is_whole_and_has_no_record(repo: Repository) -> None:
    train(repo, 1, frozen=True)
    tree = repo.load("main")
    assert set(tree["model"]) >= BASE
    assert "frozen_parameters" not in tree


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("changes", [{}, {"thaws_at": 2}, {"thaws_at": 2, "freezes_at": 4}])
def test_a_training_goes_on_with_equal_losses(
    stop: int, changes: dict[str, int], repo: Repository
) -> None:
    torch.manual_seed(1)
    whole = train(repo, 7, branch="whole", **changes)
    torch.manual_seed(1)
    assert (
        train(repo, stop, branch="cut", **changes) + train(repo, 7, branch="cut", **changes)
        == whole
    )


def test_what_was_trained_and_is_frozen_later_stays_in_the_states(repo: Repository) -> None:
    train(repo, 6, thaws_at=1, freezes_at=3)
    assert set(repo.load("main")["model"]) >= BASE
    assert "frozen_parameters" not in repo.load("main")
    train(repo, 7, thaws_at=1, freezes_at=3)  # the script does not come by there again
    assert set(repo.load("main")["model"]) >= BASE


def test_what_a_whole_state_restored_stays_in_the_states(repo: Repository) -> None:
    train(repo, 2, frozen=True)
    train(repo, 4, frozen=False)
    assert set(repo.load("main")["model"]) >= BASE


def test_a_branch_can_be_whole_again(repo: Repository) -> None:
    train(repo, 2)
    train(repo, 3, frozen=True)
    assert set(repo.load("main")["model"]) >= BASE


def test_a_restore_counts_nothing_as_missing(repo: Repository) -> None:
    train(repo, 2)
    model: Any = made()
    base = model[0].weight.clone()
    report = repo.restore("main", model=model)
    assert report
    assert not report.missing
    assert "frozen_parameters" not in report.skipped
    assert torch.equal(model[0].weight, base)
    assert torch.equal(model[2].weight, repo.load("main")["model"]["2.weight"])
    model[0].requires_grad_(True)  # for inference nobody freezes
    assert repo.restore("main", model=model, only="model")


def test_a_model_with_other_frozen_parameters_is_refused(repo: Repository) -> None:
    train(repo, 2)
    model = made()
    model.append(nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(InvalidInput, match=r"model/3\.weight"):
        repo.restore("main", model=model)
    assert set(repo.restore("main", model=model, strict=False).missing) == {
        "model/3.weight",
        "model/3.bias",
    }


def test_another_object_that_is_missing_is_still_missing(repo: Repository) -> None:
    train(repo, 2)
    model = made()
    model.append(nn.BatchNorm1d(1, affine=False))
    with pytest.raises(InvalidInput, match=r"model/3\.running_mean"):
        repo.restore("main", model=model)


def test_two_states_differ_only_in_what_they_have(repo: Repository) -> None:
    train(repo, 3)
    repo.tag("first", "main")
    train(repo, 4)
    diff = repo.diff("first", "main")
    assert {change.path for change in diff.tensors if change.path.startswith("model/")} <= {
        f"model/{name}" for name in made().state_dict()
    }
    assert not [path for path in diff.values if path.startswith("frozen_parameters")]


def test_a_tracker_goes_back_to_a_state(repo: Repository) -> None:
    train(repo, 2)
    repo.tag("early", "main")
    model = made()
    with repo.track(model=model, frozen=False) as run:
        assert run.restore("early", strict=False)
        run.capture()
    assert not BASE & set(repo.load("main")["model"])


@pytest.mark.parametrize("is_thawed", [True, False])
def test_going_back_to_before_a_parameter_was_trained_is_warned_of(
    is_thawed: bool, repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    model = made()
    with repo.track(model=model, frozen=False) as run:
        run.capture()
        repo.tag("early", "main")
        model[0].requires_grad_(is_thawed)
        run.capture()
        with caplog.at_level(logging.WARNING):
            run.restore("early")
            run.restore("early", only="model/2.*")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == is_thawed
    assert all(
        "2 parameters, such as model/0.bias, are trained here and keep" in line for line in said
    )


@pytest.mark.parametrize("rest", ["keep", "drop"])
def test_a_merged_state_leaves_out_what_its_parents_left_out(rest: str, repo: Repository) -> None:
    train(repo, 2, branch="one")
    train(repo, 3, branch="two")
    merged = repo.merge(["one", "two"], rest=rest)
    assert repo.restore(merged, model=made())


def test_several_models_have_a_record_each(repo: Repository) -> None:
    models = [made(), made(width=5)]
    with repo.track(models=models, frozen=False) as run:
        run.capture()
    assert set(repo.load("main")["frozen_parameters"]) == {"models/0", "models/1"}
    assert repo.restore("main", models=[made(), made(width=5)])


def test_the_names_that_records_need_are_taken(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="the name 'frozen_parameters' is taken"):
        repo.track(model=made(), objects={"frozen_parameters": [1]})
    with pytest.raises(InvalidInput, match="frozen"):
        repo.track(model=made(), **NO)


@pytest.mark.parametrize("record", [[1], {"model": 3}, {"model": {"count": 2}}, {"model": None}])
def test_a_forged_record_is_no_record(record: object, repo: Repository) -> None:
    from datastates.state.restore import restore_into

    model = made()
    stored = {name: value.clone() for name, value in model.state_dict().items() if name not in BASE}
    with pytest.raises(InvalidInput, match=r"model/0\.weight"):
        restore_into({"model": model}, {"model": stored, "frozen_parameters": record})


def test_nothing_is_logged(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(repo, 2)
        train(repo, 4)
    assert not caplog.records


class Packed(nn.Parameter):
    """As bitsandbytes' parameters: packed bytes that only their module can read."""


class Quantized(nn.Module):
    """As bitsandbytes' layers: what belongs to the packed bytes is neither a parameter nor a
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.ones(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))
        self.scale = torch.ones(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.scale
        destination[f"{prefix}weight.quant_state.packed"] = self.scale + 1
        destination[f"{prefix}SCB"] = self.scale


def test_what_belongs_to_a_quantized_parameter_is_left_out_with_it(repo: Repository) -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"base": Quantized(), "head": nn.Linear(2, 2)})

    with pytest.raises(
        Unsupported, match=r"model/base\.weight is a tensor subclass.*track\(frozen=False\)"
    ):
        repo.track(model=model())
    with repo.track(model=model(), frozen=False) as run:
        run.capture()
    assert set(repo.load("main")["model"]) == {"base.calls", "head.weight", "head.bias"}
    assert repo.restore("main", model=model())
