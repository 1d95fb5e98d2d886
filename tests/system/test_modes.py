"""Whatever mode torch is in where we are called, the same bytes are captured and come back, and
can be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
from datastates import Config, PermutationSampler

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

QUIET = Config(memory_bytes=256 << 20, durable_interval_s=None)
WIDTH = 1500  # so wide that weights are copied in the background


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "default device": default_device,
    "device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def make() -> dict[str, Any]:
    """Of each sort of tensor one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    loose = {
        "sparse": torch.eye(4).to_sparse(),
        "rows": torch.eye(4).to_sparse_csr(),
        "view": torch.ones(40)[10:20],
        "whole": torch.arange(5),
    }
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loose": loose,
        "sampler": PermutationSampler(10),
    }


def train(made: dict[str, Any]) -> float:
    """One step."""
    made["optimizer"].zero_grad()
    loss = made["model"](torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    made["optimizer"].step()
    return float(loss.detach())


def leaves(tree: Any) -> list[torch.Tensor]:
    """Every tensor of a tree, dense."""
    if isinstance(tree, torch.Tensor):
        return [tree if tree.layout is torch.strided else tree.to_dense()]
    return (
        [leaf for child in tree.values() for leaf in leaves(child)]
        if isinstance(tree, dict)
        else []
    )


@modes
def test_a_training_is_captured_and_resumed_in_any_mode(tmp_path: Path, mode: Mode) -> None:
    made = make()
    train(made)
    with datastates.open(tmp_path, config=QUIET) as repo:
        with mode():
            run = repo.track(**made)
            run.capture()
        train(made)
        run.capture().wait("durable")
        train(made)
        with mode():
            run.capture().wait("durable")
            tree = repo.load("main")
        assert all(
            torch.equal(one, other)
            for one, other in zip(leaves(tree), leaves(repo.load("main")), strict=True)
        )
        expected = train(made)
        run.close()
    with datastates.open(tmp_path, config=QUIET) as repo:
        fresh = make()
        with mode():
            run = repo.track(**fresh)
        assert train(fresh) == expected
        assert run.capture().wait("durable").step == 4


@modes
def test_what_is_loaded_belongs_to_the_caller_in_any_mode(tmp_path: Path, mode: Mode) -> None:
    with datastates.open(tmp_path, config=QUIET) as repo:
        with repo.track(**make()) as run:
            run.capture().wait("durable")
        with mode():
            tree = repo.load("main", only="model")
        weight = nn.Parameter(tree["model"]["0.weight"])
        weight.square().sum().backward()
        assert weight.grad is not None


@modes
def test_merges_and_samplers_do_the_same_in_any_mode(tmp_path: Path, mode: Mode) -> None:
    with datastates.open(tmp_path, config=QUIET) as repo, repo.track(model=nn.Linear(3, 3)) as run:
        run.capture()
        run.capture().wait()
        with mode():
            repo.merge(["main", "main~1"], into="soup")
            order = list(PermutationSampler(10, seed=3))
        repo.verify_merge("soup")
        assert order == list(PermutationSampler(10, seed=3))


@pytest.mark.parametrize("inside", [True, False])
def test_tensors_that_were_made_for_inference_are_captured_and_restored(
    tmp_path: Path, inside: bool
) -> None:
    with torch.inference_mode():
        model = nn.Linear(WIDTH, WIDTH)
    with (
        datastates.open(tmp_path, config=QUIET) as repo,
        repo.track(model=model, optimizer=torch.optim.SGD(model.parameters())) as run,
    ):
        before = model.weight.tolist()[0]
        run.capture().wait("durable")
        with torch.inference_mode():
            model.weight.zero_()
        with torch.inference_mode() if inside else nullcontext():
            repo.restore("main", model=model)
        assert model.weight.tolist()[0] == before
