"""Ranks of one job without a job: repositories of one lineage, each of which captures its part
of each state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import datastates
from datastates.config import Config
from datastates.engine import handle
from datastates.engine.handle import Part
from datastates.errors import Corrupt, NotFound, Unavailable
from datastates.training import start
from tests.support.records import part_digests

if TYPE_CHECKING:
    from datastates.lineage.states import State
    from datastates.repository import Repository
    from datastates.training.tracker import Tracker


class Rank:
    """One rank: its repository, its copy of a tensor that all ranks hold and of which each
    stores a part, and what tracks it."""

    def __init__(
        self, repo: Repository, part: Part, *, branch: str = "main", rows: int = 9, **options: Any
    ) -> None:
        self.repo, self.part = repo, part
        self.rows = torch.arange(3.0 * rows).reshape(rows, 3)
        with pytest.MonkeyPatch.context() as patch:
            for module in (start, start):  # the other ranks train with this one
                patch.setattr(module, "holders", lambda *args, **terms: [])
            self.run = repo.track(
                rows=self.rows, rank=part.rank, branch=branch, rng=False, **options
            )
        as_rank(self.run, part)

    def capture(self, **said: Any) -> datastates.Capture:
        """The next step."""
        self.rows += 10
        return self.run.capture(**said)

    def skip(self) -> None:
        """The next step, of which this rank has no room for its part."""
        slots = self.run.training.runner.slots
        # one capture finds no room
        acquire, slots.acquire = slots.acquire, lambda *args, **options: None  # type: ignore[method-assign]
        try:
            assert self.capture().is_skipped
        finally:
            slots.acquire = acquire  # type: ignore[method-assign]  # as it was


def as_rank(run: Tracker, part: Part) -> None:
    """Let a tracker that has captured nothing capture a part of each state, as ``track`` does in
    a job."""
    run.training.line.part, run.training.line.uids = part, handle.DerivedUids(part.job)


@contextmanager
def ranks_of(
    url: str | Path, packs: Sequence[Path] | None, size: int, job: str = "job", **config: Any
) -> Iterator[list[Rank]]:
    """So many ranks in this process.

    ``packs``: a folder for each; None: the repository's own for all."""
    given = Config(**{"memory_bytes": 64 << 20, "durable_interval_s": None, **config})
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        # each rank is a process of its own, as far as it knows
        patch.setattr(start, "end_earlier", lambda core, branch, check: None)
        ranks = []
        for rank in range(size):
            repo = stack.enter_context(
                datastates.open(url, packs=None if packs is None else packs[rank], config=given)
            )
            ranks.append(Rank(repo, Part(rank, size, job)))
        yield ranks


def problems_of(repo: Repository, state: State) -> list[str]:
    """What is wrong with the parts of a state, as far as this process can open them; nothing, if
    every byte is as it was captured."""
    with repo.core.database.read() as session:
        digests = part_digests(session, state.uid)
    found = []
    for rank in range(state.world_size):
        try:
            with repo.core.tiers.open_part(state, rank)[0] as reader:
                reader.verify()
                if digests and reader.manifest.digest != digests[rank]:
                    found.append(
                        f"rank {rank}: its digest is {reader.manifest.digest[:16]}, the lineage"
                        f" knows {digests[rank][:16]}"
                    )
        except (Corrupt, NotFound, Unavailable) as exc:
            found.append(f"rank {rank}: {type(exc).__name__}")
    return found
