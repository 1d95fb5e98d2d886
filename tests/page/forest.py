"""Lineages for the page to show, recorded without a training: branches that fork, merge and end,
with what real ones have."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from datastates.lineage import NewState, Status
from datastates.lineage.states import Edge, EdgeKind
from datastates.lineage.write import record, refs
from tests.support.lineages import told

if TYPE_CHECKING:
    from datastates.lineage.session import Session
    from datastates.repository import Repository


class Forest:
    """Records states one upon the other, in ``session``; the same seed makes the same lineage."""

    def __init__(self, session: Session, *, seed: int = 0, now: datetime | None = None) -> None:
        self.session, self._random = session, random.Random(seed)
        self._now = now or datetime.now(UTC) - timedelta(hours=9)
        self.heads: dict[str, str] = {}
        self.steps: dict[str, int] = {}

    def grow(
        self,
        branch: str,
        count: int,
        *,
        start: str | None = None,
        lr: float = 0.1,
        status: Status = Status.EVICTED,
    ) -> str:
        """``count`` more states on a branch, the newest two durable, the others as ``status``
        says; gives the uid of the newest."""
        parent = self.heads.get(branch) or start
        step = self.steps.get(parent or "", 0)
        if branch not in self.heads and start is not None:
            refs.branch(self.session, branch, start)
        for place in range(count):
            step += 1
            state = self._state(
                branch, parent, step, lr, Status.DURABLE if place >= count - 2 else status
            )
            parent = self._add(state)
        self.heads[branch] = parent or ""
        return self.heads[branch]

    def merge(self, into: str, others: list[str]) -> str:
        """A state on ``into`` that is made of the heads of others as well."""
        parent = self.heads[into]
        edges = tuple(
            Edge(self.heads[other], EdgeKind.SOUP, 1 / (1 + len(others))) for other in others
        )
        state = self._state(into, parent, self.steps[parent] + 1, 0.1, Status.DURABLE, edges)
        self.heads[into] = self._add(state)
        return self.heads[into]

    def tag(self, name: str, uid: str, message: str) -> None:
        refs.tag(self.session, name, uid, message=message)

    def _add(self, state: NewState) -> str:
        record.record(self.session, state)
        self.steps[state.uid] = state.facts.step
        return state.uid

    def _state(
        self,
        branch: str,
        parent: str | None,
        step: int,
        lr: float,
        status: Status,
        edges: tuple[Edge, ...] = (),
    ) -> NewState:
        self._now += timedelta(seconds=1 + self._random.random())
        loss = 2.4 * math.exp(-step / 60) + 0.35 + lr * 0.4 + self._random.gauss(0, 0.04)
        metrics = {"loss": loss, "lr": lr * 0.98**step}
        if step % 5 == 0:
            metrics["val_loss"] = loss + 0.08 + abs(self._random.gauss(0, 0.02))
        return told(
            f"{self._random.getrandbits(96):024x}", f"{self._random.getrandbits(256):064x}", parent, branch, None, step,
            metrics=metrics, attributes={"epoch": step // 20, "variant": branch}, created_at=self._now, status=status,
            message=f"end of epoch {step // 20}" if step % 20 == 0 else None, edges=edges,
            bytes_total=41_943_040, bytes_new=self._random.randrange(1_000_000, 41_943_040),
        )  # fmt: skip


def plant(repository: Repository, *, rounds: int = 3) -> Forest:
    """A training that is forked into variants, some of which are merged back: about 250 states a
    round."""
    with repository.core.database.write() as session:
        forest = Forest(session)
        warm = forest.grow("main", 40)
        forest.tag("warm", warm, "end of the shared prefix")
        for index in range(rounds):
            start = forest.heads["main"]
            names = [f"round-{index}/lr-{lr}" for lr in (0.03, 0.1, 0.3)]
            for name, lr in zip(names, (0.03, 0.1, 0.3), strict=True):
                forest.grow(name, 12, start=start, lr=lr)
            for _ in range(4):
                for name, lr in zip(names, (0.03, 0.1, 0.3), strict=True):
                    forest.grow(name, 11, lr=lr)
                forest.grow("main", 16)
            forest.merge("main", names[:2])
            forest.tag(f"round-{index}-merged", forest.heads["main"], "soup of two")
            forest.grow("main", 8, status=Status.LOST if index == 0 else Status.EVICTED)
        forest.grow("main", 6, status=Status.CAPTURED)
        return forest
