"""The examples that ``--help`` shows do what they say, in a repository as a training leaves it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main

import datastates
from datastates.cli.app import EXAMPLES, app, command_of

from .conftest import Invoke

GO_ON = {"serve", "demo", "doctor", "copy"}
"""What does not end by itself, takes long, or needs a tier: of these the line is only read."""
FIRST = ("branch", "init", "tag", "export", "import")


@pytest.fixture
def trained(invoke: Invoke) -> Path:
    """A repository ``runs`` in the working directory, with five durable states on ``main``."""
    with (
        datastates.open("runs", memory_bytes=32 << 20) as repo,
        repo.track(model=torch.nn.Linear(2, 2), rng=False) as run,
    ):
        for step in range(5):
            run.capture(metrics={"val_loss": 0.1 + 0.01 * (step - 2) ** 2}, step=501 + step).wait(
                "durable"
            )
    return Path("runs")


def test_each_example_runs(trained: Path, invoke: Invoke) -> None:
    for name in sorted(
        EXAMPLES.keys() - GO_ON - {"clone"},
        key=lambda each: FIRST.index(each) if each in FIRST else len(FIRST),
    ):
        arguments = shlex.split(EXAMPLES[name])[1:]
        done = invoke(*arguments)
        assert (done.code, done.err.startswith("error")) == (0, False), f"{EXAMPLES[name]}: {done}"
        assert done.out or done.err, f"{EXAMPLES[name]} says nothing"
    assert Path("weights.safetensors").exists()


def test_the_example_of_a_clone_runs(trained: Path, invoke: Invoke) -> None:
    with datastates.open(trained) as repo, repo.serve("tcp://127.0.0.1:0") as server:
        port = server.url.rpartition(":")[2]
        done = invoke(*shlex.split(EXAMPLES["clone"].replace(":4711", f":{port}"))[1:])
    assert done.code == 0, done
    with datastates.open("mine") as mine:
        (tag,) = mine.refs()
        assert len(mine.log(tag.name)) == 5


@pytest.mark.parametrize("name", sorted(GO_ON))
def test_the_example_of_a_command_that_does_not_run_here_is_understood(name: str) -> None:
    group: Any = typer.main.get_command(app)
    command = command_of(name)
    assert command.make_context(
        name,
        shlex.split(EXAMPLES[name])[2:],
        parent=group.make_context("datastates", [], resilient_parsing=True),
    )


def test_help_ends_with_the_example(invoke: Invoke) -> None:
    out = " ".join(invoke("branches", "--help").out.split())
    assert out.endswith(f"Example: {EXAMPLES['branches']}")
