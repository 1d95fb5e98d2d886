"""A state goes from one rank to all others."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest.mock import patch

import pytest
import torch

import datastates
from datastates import ranks
from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.ranks import MPIGroup, SoloGroup, TorchGroup
from tests.support.jobs import Kind, Say, need_mpi, run

BYTES = 20 << 20


def make(seed: int) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(4, 1024)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def broadcast(group: MPIGroup | TorchGroup, say: Say) -> None:
    """Rank 1 trains; the others take its state, rank 0 into its repository, rank 2 into live
    objects: all go on alike."""
    model, optimizer = make(group.rank)
    with (
        tempfile.TemporaryDirectory() as folder,
        datastates.open(folder, memory_bytes=256 << 20) as repo,
    ):
        if group.rank == 1:
            repo.track(
                model=model, optimizer=optimizer, durable_interval_s=1e9, group=SoloGroup()
            ).capture()
            group.broadcast(repo, "main", root=1)
        elif group.rank == 0:
            cloned = group.broadcast(repo, "main", root=1)
            assert cloned is not None
            repo.restore(cloned.state.uid, model=model, optimizer=optimizer)
        else:
            group.broadcast(repo, "main", model=model, optimizer=optimizer, root=1)
        losses = [step(model, optimizer) for _ in range(5)]
        say(*losses)


def failing_root(group: MPIGroup | TorchGroup, say: Say) -> None:
    """The root has no such state: every rank learns it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        datastates.open(folder, memory_bytes=64 << 20) as repo,
    ):
        try:
            group.broadcast(repo, "nowhere")
        except NotFound:
            say("not found")


def failing_rank(group: MPIGroup | TorchGroup, say: Say) -> None:
    """The state does not fit one rank's objects: it raises that, the others say who failed."""
    model, optimizer = make(group.rank)
    with (
        tempfile.TemporaryDirectory() as folder,
        datastates.open(folder, memory_bytes=256 << 20) as repo,
    ):
        if group.rank == 0:
            repo.track(
                model=model, optimizer=optimizer, durable_interval_s=1e9, group=SoloGroup()
            ).capture()
        wrong = {"model": torch.nn.Linear(3, 3)} if group.rank == 2 else {"model": model}
        try:
            group.broadcast(repo, "main", objects=wrong)
        except Unavailable as exc:
            say("others", "rank 2" in str(exc))
        except InvalidInput:
            say("itself")


def apart(group: MPIGroup | TorchGroup, say: Say) -> None:
    """Ranks in several networks are given an address of the root's, and not its loopback."""
    with (
        tempfile.TemporaryDirectory() as folder,
        datastates.open(folder, memory_bytes=64 << 20) as repo,
        patch.object(ranks, "network_id", lambda: f"network {group.rank}"),
        patch.object(ranks, "own_address", return_value="127.0.0.1") as own_address,
    ):
        if group.rank == 0:
            repo.track(
                tracked={"x": torch.ones(3)}, durable_interval_s=1e9, group=SoloGroup()
            ).capture()
        group.broadcast(repo, "main")
        say("asked", own_address.called)


def everything(over: Kind, say: Say) -> None:
    """One start of three interpreters serves all."""
    group = MPIGroup() if over == "mpi" else TorchGroup()
    for job in (broadcast, failing_root, failing_rank, apart):
        job(group, say)
        group.barrier()


@pytest.mark.parametrize("kind", ["torch", pytest.param("mpi", marks=need_mpi)])
def test_ranks_clone_a_state_in_a_chain_and_go_on_alike_and_all_learn_of_failures(
    kind: Kind,
) -> None:
    said = run(3, "tests.ranks.test_groups:everything", kind=kind, over=kind, timeout_s=120)
    losses, outcomes = zip(*((lines[0], lines[1:]) for lines in said), strict=True)
    assert len(set(losses)) == 1
    assert losses[0].count(" ") == 4
    assert outcomes == (
        ["not found", "others True", "asked True"],
        ["not found", "others True", "asked False"],
        ["not found", "itself", "asked False"],
    )


def test_alone_there_is_nobody_to_broadcast_to(tmp_path: object) -> None:
    with (
        datastates.open(str(tmp_path), memory_bytes=64 << 20) as repo,
        repo.track(tracked={"x": torch.ones(3)}) as run,
    ):
        run.capture()
        with SoloGroup() as group:
            assert group.broadcast(repo, "main") is None
            with pytest.raises(NotFound):
                group.broadcast(repo, "nowhere")


def test_what_is_no_group_is_refused_by_name() -> None:
    number: Any = 3
    with (
        pytest.raises(InvalidInput, match=r"group is 3: give a datastates\.ranks\.TorchGroup"),
        ranks.using(number),
    ):
        pass
