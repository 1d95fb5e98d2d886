"""A state goes from one rank to all others. Run as a script this file is one of those ranks."""

from __future__ import annotations

import tempfile

import pytest
import torch

import datastates
from datastates.errors import NotFound, Unavailable
from datastates.ranks.groups import MPIGroup, SoloGroup
from tests.transport.test_groups import be_a_rank, mpiexec, need_mpi, say

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


def broadcast(group: MPIGroup) -> None:
    """Rank 1 trains; the others take its state, rank 0 into its repository, rank 2 into live objects: all go on alike."""
    model, optimizer = make(group.rank)
    with tempfile.TemporaryDirectory() as folder, datastates.open(folder, memory_bytes=256 << 20) as repo:
        if group.rank == 1:
            repo.track(model=model, optimizer=optimizer, durable_interval_s=1e9).capture()
            group.broadcast(repo, "main", root=1)
        elif group.rank == 0:
            cloned = group.broadcast(repo, "main", root=1)
            assert cloned is not None
            repo.restore(cloned.state.uid, {"model": model, "optimizer": optimizer})
        else:
            group.broadcast(repo, "main", into={"model": model, "optimizer": optimizer}, root=1)
        losses = [step(model, optimizer) for _ in range(5)]
        say(*losses)


def failing_root(group: MPIGroup) -> None:
    """The root has no such state: every rank learns it."""
    with tempfile.TemporaryDirectory() as folder, datastates.open(folder, memory_bytes=64 << 20) as repo:
        try:
            group.broadcast(repo, "nowhere")
        except NotFound:
            say("not found")


def failing_rank(group: MPIGroup) -> None:
    """The state does not fit one rank's objects: it raises that, the others say who failed."""
    model, optimizer = make(group.rank)
    with tempfile.TemporaryDirectory() as folder, datastates.open(folder, memory_bytes=256 << 20) as repo:
        if group.rank == 0:
            repo.track(model=model, optimizer=optimizer, durable_interval_s=1e9).capture()
        wrong = {"model": torch.nn.Linear(3, 3)} if group.rank == 2 else {"model": model}
        try:
            group.broadcast(repo, "main", into=wrong)
        except Unavailable as exc:
            say("others", "rank 2" in str(exc))
        except datastates.InvalidInput:
            say("itself")


def everything(group: MPIGroup) -> None:
    """One start of three interpreters serves all."""
    for job in (broadcast, failing_root, failing_rank):
        job(group)
        group.barrier()


@pytest.mark.in_turn("many processes")
@need_mpi
def test_ranks_under_mpiexec_clone_a_state_in_a_chain_and_go_on_alike_and_all_learn_of_failures() -> None:
    lines = mpiexec(3, "everything", timeout_s=120, program="tests.ranks.test_groups")
    losses, said = [line for line in lines if line[0].isdigit()], [line for line in lines if not line[0].isdigit()]
    assert len(losses) == 3
    assert len(set(losses)) == 1
    assert said == ["itself", "not found", "not found", "not found", "others True", "others True"]


def test_alone_there_is_nobody_to_broadcast_to(tmp_path: object) -> None:
    with datastates.open(str(tmp_path), memory_bytes=64 << 20) as repo, repo.track(tracked={"x": torch.ones(3)}) as run:
        run.capture()
        with SoloGroup() as group:
            assert group.broadcast(repo, "main") is None
            with pytest.raises(NotFound):
                group.broadcast(repo, "nowhere")


if __name__ == "__main__":
    be_a_rank({"everything": everything}, MPIGroup)
