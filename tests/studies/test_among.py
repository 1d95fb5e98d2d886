"""A job of four ranks of MPI is two groups of two, which share out the variants of a study that
forks from what all four trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import datastates
from datastates import Conflict, DatastatesError, PermutationSampler
from datastates.lineage.views.study_trees import study
from datastates.ranks import MPIGroup
from datastates.studies import Job, Plan, Variant, explore
from datastates.studies.records import Claim, claim_name, claims_folder
from datastates.training.collective import Ranks
from tests.studies.studies import EVERY_STATE, ROWS, digits
from tests.support.jobs import Say, need_mpi, run

HERE = "tests.studies.test_among"
PLAN = Plan(
    (
        *(Variant(f"v{number}", None, 1, {"lr": 10.0**-number}) for number in (1, 2, 3)),
        Variant("bad", None, 1, {"lr": 0.5}),
        Variant("bad-a", "bad", 1),
        Variant("v1-a", "v1", 1, {"seed": 3}),
    )
)


class Training:
    """A model whose gradients ranks average by a communicator of their own."""

    def __init__(self, comm: Any, rate: float) -> None:
        self.comm = comm
        self.model = nn.Sequential(nn.Linear(64, 33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 10))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        self.sampler = PermutationSampler(
            ROWS, seed=3, rank=comm.Get_rank(), num_replicas=comm.Get_size()
        )

    @property
    def tracked(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}

    def epoch(self, tracker: Any) -> float:
        x, y = digits()
        loss = torch.zeros(())
        for rows in tracker.steps(self.sampler.batches(50)):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x[rows]), y[rows])
            loss.backward()
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                self.comm.Allreduce(parameter.grad.numpy().copy(), parameter.grad.numpy())
            self.optimizer.step()
        return loss.item()


def share_out(folder: str, say: Say) -> None:
    """The prefix by all ranks; then each half takes variants."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    half: Any = world.Split(rank // 2, rank)
    torch.manual_seed(7)

    def train(job: Job) -> None:
        assert (job.group.rank, job.group.size) == (rank % 2, 2)
        say("trains", job.variant.name)
        training = Training(half, job.config["lr"])  # type: ignore[arg-type]  # a number
        tracker = job.track(**training.tracked, reduce="each")
        if job.variant.name == "bad" and job.group.rank == 1:
            raise ValueError("not this one")
        for _ in job.epochs():
            job.report(loss=training.epoch(tracker), rate=training.optimizer.param_groups[0]["lr"])

    with datastates.open(folder, config=EVERY_STATE) as repo:
        prefix = Training(world, 1e-2)
        with repo.track(**prefix.tracked) as tracker:
            say(
                "prefix",
                tracker.capture(metrics={"loss": prefix.epoch(tracker)}).wait("durable").world_size,
            )
        report = explore(
            repo, "main", PLAN, train, study="s", group=MPIGroup(half), retries=1, progress=False
        )
        say("done", ",".join(sorted(report.done)))
        say("failed", report.errors["bad"].splitlines()[0])
        world.Barrier()  # a group that asks again at once still finds what the others gave up
        again = explore(
            repo, "main", PLAN, train, study="s", group=MPIGroup(half), retries=0, progress=False
        )
        say("again", ",".join(each.variant for each in again if each.is_reused))


@pytest.mark.long
@need_mpi
def test_two_groups_of_a_job_share_out_the_variants(tmp_path: Path) -> None:
    said = run(4, f"{HERE}:share_out", kind="mpi", folder=str(tmp_path), timeout_s=170)
    trained = [
        Counter(line.split()[1] for line in lines if line.startswith("trains")) for lines in said
    ]
    assert trained[0] == trained[1]
    assert trained[2] == trained[3]
    both = trained[0] + trained[2]
    assert both.pop("bad") >= 3, (
        "two attempts, and one of the second call, or two where the groups came to it one after the"
        " other"
    )
    assert both == {"v1": 1, "v2": 1, "v3": 1, "v1-a": 1}
    assert all(trained[rank].keys() & {"v1", "v2", "v3"} for rank in (0, 2)), (
        "each group had something to do"
    )
    for lines in said:
        assert [line for line in lines if not line.startswith("trains")] == [
            "prefix 4",
            "done v1,v1-a,v2,v3",
            "failed rank 1 of 2: ValueError: not this one",
            "again v1,v2,v3,v1-a",
        ]
    with datastates.open(tmp_path) as repo:
        for name, rate in (("v1", 0.1), ("v2", 0.01), ("v3", 0.001)):
            state = repo.state(f"done/s/{name}")
            assert (state.world_size, state.metrics["rate@0"], state.metrics["rate@1"]) == (
                2,
                rate,
                rate,
            )
            assert len(repo.log(f"s/{name}")) == len(repo.log("main")) + 1
        with repo.core.reading() as session:
            tried = {each.name: each.attempts for each in study(session, "s").variants}
        assert tried.pop("bad") >= 3
        assert tried == {"v1": 1, "v2": 1, "v3": 1, "v1-a": 1, "bad-a": 0}


def end_apart(say: Say) -> None:
    """Rank 1 fails while rank 0 has two exchanges before it."""
    ranks = Ranks(datastates.ranks.find())
    error = "early"
    if ranks.rank == 0:
        say(len(ranks.group.exchange(b"in another form")))
        with pytest.raises(DatastatesError) as found, ranks.synchronized("go on"):
            pass
        error = str(found.value)
    say(ranks.ended("meet", error))
    say(ranks.first("meet", lambda: "again", str), ranks.ended("meet", None))


def test_a_rank_that_fails_before_the_others_is_heard_where_they_meet_next() -> None:
    said = run(2, f"{HERE}:end_apart")
    both = "{0: 'rank 1 of 2 could not go on: early', 1: 'early'}"
    assert said == [["2", both, "again {}"], [both, "again {}"]]


def test_groups_do_not_explore_beside_an_explorer_of_another_kind(tmp_path: Path) -> None:
    from datastates.ranks import SoloGroup

    with datastates.open(tmp_path, config=EVERY_STATE) as repo:
        with repo.track(x=torch.zeros(3)) as tracker:
            tracker.capture().wait("durable")
        claim = Claim.take(claims_folder(repo), claim_name(repo, "s"), "process 1 elsewhere")
        assert claim is not None
        with claim, pytest.raises(Conflict, match="is being explored by process 1 elsewhere"):
            explore(repo, "main", PLAN, print, study="s", group=SoloGroup(), progress=False)
