"""What the public docstrings promise: the parameters are all listed, and every example runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import datastates
import datastates.api
import datastates.studies
import datastates.testing
from datastates import Config
from datastates.integrations import saved
from tests.support.entries import own_members

FIRST = {
    *(
        "open",
        "connect",
        "Repository.track",
        "Repository.state",
        "Repository.load",
        "Repository.restore",
        "Repository.tag",
    ),
    *(
        "Repository.branch",
        "Repository.move",
        "Repository.log",
        "Repository.find",
        "Repository.diff",
        "Repository.merge",
    ),
    *(
        "Repository.ensemble",
        "Repository.serve",
        "Tracker.epochs",
        "Tracker.steps",
        "Tracker.capture",
        "Tracker.guard",
        "Capture.wait",
    ),
    *("Peer.clone", "explore", "grid", "sample", "kfold", "leave_out", "outliers"),
}
"""What users meet first: each has an example."""


def public() -> Iterator[tuple[str, Any]]:
    """Every public function, class and method, by its qualified name."""
    for package in (datastates, datastates.studies, datastates.api, datastates.testing):
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isfunction(found):
                yield name, found
            elif inspect.isclass(found):
                yield name, found
                for member, method in own_members(found).items():
                    if not member.startswith("_") and inspect.isfunction(method):
                        yield f"{name}.{member}", method


PUBLIC = dict(public())


def example(docstring: str | None) -> str:
    """The indented block of a docstring."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    starts = [
        row for row in range(1, len(lines)) if lines[row].startswith("    ") and not lines[row - 1]
    ]
    if not starts:
        return ""
    code = []
    for line in lines[starts[0] :]:
        if line and not line.startswith("    "):
            break
        code.append(line[4:])
    return "\n".join(reversed([*dropwhile(lambda line: not line, reversed(code))]))


EXAMPLES = {name: code for name, found in PUBLIC.items() if (code := example(found.__doc__))}


@pytest.mark.parametrize(
    "name", [name for name, found in PUBLIC.items() if not inspect.isclass(found)]
)
def test_function_with_more_than_three_parameters_lists_them(name: str) -> None:
    asked = [each for each in inspect.signature(PUBLIC[name]).parameters if each != "self"]
    told = inspect.getdoc(PUBLIC[name]) or ""

    assert len(asked) <= 3 or [each for each in asked if f":param {each}:" not in told] == []


def test_what_users_meet_first_has_an_example() -> None:
    assert FIRST - set(EXAMPLES) == set()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What examples may name: a repository with a trained branch, and something to train."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    targets = inputs.sin().sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = nn.Linear(4, 1)
        return made, torch.optim.AdamW(made.parameters(), lr=1e-2)

    model, optimizer = build()

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    def losses_of(model: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        losses: torch.Tensor = (model(inputs[indices]) - targets[indices]).square().flatten()
        return losses

    with datastates.open("trained", config=Config(memory_bytes=64 << 20)) as repo:
        with repo.track(branch="main", model=model, optimizer=optimizer) as run:
            for batch in run.steps(loader):
                run.capture(metrics={"loss": train_step(batch)})
        given = {
            "repo": repo,
            "model": model,
            "optimizer": optimizer,
            "loader": loader,
            "inputs": inputs,
            "targets": targets,
        }
        workflows = {name: getattr(datastates.studies, name) for name in datastates.studies.__all__}
        yield {
            **workflows,
            **given,
            "build": build,
            "train_step": train_step,
            "losses_of": losses_of,
            "datastates": datastates,
        }
    saved.close_unused()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_of_a_docstring_runs(name: str, world: dict[str, Any]) -> None:
    exec(compile(EXAMPLES[name], f"<example of {name}>", "exec"), world)
