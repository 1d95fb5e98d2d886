"""States that a policy keeps near: the parts of all ranks stay on the disks of their nodes, and
go on to a further tier together."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

import datastates
from datastates import Config, Status
from datastates.lineage.query.names import replicas_of
from datastates.policy.auto import Measures
from datastates.policy.contract import CadenceChoice, Costs, Moment
from datastates.ranks import latest
from tests.ranks.test_further_tiers import Shelf
from tests.support.jobs import Say, job, run

HERE = "tests.ranks.test_near"
COSTS = Costs(0.1, 0.1, 0.01, 0.001, 100, 10, further_s=1.0)
STATES = 7


class EveryFourthFurther(datastates.Cadence):
    """Writes each capture, and lets every fourth of them go on."""

    __slots__ = ()

    def is_due(self, moment: Moment, /) -> bool:
        return moment.index is not None

    def choose(self, costs: Costs, current: CadenceChoice | None, /) -> CadenceChoice | None:
        return current or CadenceChoice("mine", "for a test", every=1, further_every=4, costs=costs)


def opened(folder: str, node: str) -> datastates.Repository:
    config = Config(
        tiers=[Shelf(Path(folder) / "shelf")],
        memory_bytes=64 << 20,
        cadence=EveryFourthFurther(1, None),
        group_patience_s=20.0,
    )
    return datastates.open(folder, packs=str(Path(folder) / node), config=config)


def values(step: int) -> torch.Tensor:
    return torch.arange(4000.0) + step


def capture(folder: str, say: Say) -> None:
    """Capture until all is on the disks, let one of the states go on from rank 0, and be killed."""
    rank, tensor = dist.get_rank(), torch.zeros(4000)
    # it has measured, and this process ends with the test
    Measures.costs = lambda self: COSTS  # type: ignore[method-assign]
    with opened(folder, f"node-{rank}") as repo:
        training = repo.track(tensor=tensor, rng=False)
        captures = []
        for step in range(1, STATES + 1):
            tensor.copy_(values(step))
            captures.append(training.capture())
            captures[-1].wait("durable" if step == 1 else "captured", 30)
        for each in captures:  # without asking for it, or it would go on
            goal = Status.EXTERNAL if each.step == 1 or each.step % 4 == 0 else Status.DURABLE
            while repo.state(each.uid).status is not goal:
                threading.Event().wait(0.02)
        dist.barrier()
        shelf = shelved(repo, captures)
        dist.barrier()
        if rank == 0:
            captures[2].wait("external", 30)
        dist.barrier()
        say("near", *(f"{step}:{''.join(map(str, ranks))}" for step, ranks in shelf.items()))
        say(
            "passed",
            *(
                f"{step}:{''.join(map(str, ranks))}"
                for step, ranks in shelved(repo, captures).items()
            ),
        )
        dist.barrier()
        os._exit(0)


def shelved(
    repo: datastates.Repository, captures: list[datastates.Capture]
) -> dict[int, list[int]]:
    """By step, the ranks whose part is on the shelf."""
    found = defaultdict[int, list[int]](list)
    with repo.core.reading() as session:
        for each in captures:
            found[each.step] += sorted(
                one.rank for one in replicas_of(session, each.uid) if one.tier == "shelf"
            )
    return dict(found)


def go_on(folder: str, nodes: list[str], say: Say) -> None:
    """What is left, with these folders."""
    tensor = torch.zeros(4000)
    with opened(folder, nodes[dist.get_rank()]) as repo:
        found = latest(repo)
        with repo.track(branch=f"on-{found.step}", start=found, tensor=tensor, rng=False):
            say(found.step, torch.equal(tensor, values(found.step)))


def test_each_rank_keeps_its_part_near_and_a_lost_node_costs_what_was_near(tmp_path: Path) -> None:
    with job(2, f"{HERE}:capture", folder=str(tmp_path)) as ranks:
        said = ranks.said()
    assert said[0][0] == "near 1:01 2: 3: 4:01 5: 6: 7:"
    assert said[1][1] == "passed 1:01 2: 3:01 4:01 5: 6: 7:"
    assert (
        run(2, f"{HERE}:go_on", folder=str(tmp_path), nodes=["node-0", "node-1"])
        == [["7 True"]] * 2
    )
    assert (
        run(2, f"{HERE}:go_on", folder=str(tmp_path), nodes=["node-0", "node-2"])
        == [["4 True"]] * 2
    )
