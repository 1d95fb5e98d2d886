"""Ranks that are killed at any stage of a capture: no half state is ever visible, the others go
on, and a new job does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.errors import NotFound, Unavailable
from datastates.lineage.query.incomplete import waiting
from datastates.lineage.states import Status
from datastates.ranks import SoloGroup, latest
from tests.support.effort import seeds
from tests.support.forge import Forge, forge
from tests.support.part_deaths import STAGES
from tests.support.ranks import problems_of, ranks_of
from tests.support.records import part_digests

STEPS = 5
JOB = "tests.support.part_deaths:rank_of"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with forge(tmp_path_factory.mktemp("jobs"), ["tests.support.part_deaths"]) as opened:
        yield opened


def expected(step: int) -> torch.Tensor:
    return torch.arange(27.0).reshape(9, 3) + 10 * step


@pytest.mark.parametrize("seed", seeds(10, 100))
def test_a_rank_that_is_killed_leaves_whole_states_or_none(
    seed: int, tmp_path: Path, jobs: Forge, request: Any
) -> None:
    choose = random.Random(seed)
    size, stage = choose.randint(2, 3), choose.choice((*STAGES, None))
    dying, at = choose.randrange(size), choose.randint(1, STEPS)
    url, packs = str(tmp_path / "runs"), None
    if seed % 2:
        url, packs = request.getfixturevalue("postgresql").migrated(), str(tmp_path / "packs")
    datastates.open(url, packs=packs).close()
    options = {"url": url, "packs": packs, "size": size, "steps": STEPS, "seed": seed, "at": at}
    running = [
        jobs.start(JOB, rank=rank, stage=stage if rank == dying else None, **options)
        for rank in range(size)
    ]
    said = [job.say() for job in running]
    codes = [job.wait() for job in running]
    assert all(
        code == 0 or (code == -9 and rank == dying and stage) for rank, code in enumerate(codes)
    ), jobs.errors()
    told = {
        kind: {line.split()[1] for lines in said for line in lines if line.startswith(kind)}
        for kind in ("whole", "none")
    }
    assert not told["whole"] & told["none"], "all ranks heard the same"
    with datastates.open(url, packs=packs) as repo:
        states = []
        with suppress(NotFound):
            states = list(repo.log("main"))[::-1]
        with repo.core.reading() as session:
            assert waiting(session) == []
            assert all(len(part_digests(session, state.uid)) == size for state in states)
        assert [state.parents for state in states] == [
            (),
            *((state.uid,) for state in states[:-1]),
        ][: len(states)]
        for uid in told["none"]:
            with pytest.raises(NotFound):
                repo.state(uid)
        assert {repo.state(uid).uid for uid in told["whole"]} == told["whole"]
        for state in states:
            if state.status is Status.DURABLE:
                assert problems_of(repo, state) == []
                assert torch.equal(repo.load(state)["rows"], expected(state.step))
        newest = None
        with suppress(NotFound, Unavailable):
            newest = latest(repo, group=SoloGroup())
        assert newest == next(
            (state for state in reversed(states) if state.status is Status.DURABLE), None
        )
    with ranks_of(
        url, None if packs is None else [Path(packs)] * size, size, job=f"again-{seed}"
    ) as ranks:
        captures = [rank.capture() for rank in ranks]
        again = [capture.wait("durable", timeout_s=60) for capture in captures][-1]
        assert again.parents == (() if newest is None else (newest.uid,))
        assert torch.equal(ranks[0].repo.load("main")["rows"], expected(again.step))
