"""One rank of a job without torch.distributed: it captures some steps, skips one now and then,
and may be killed at a stage."""

from __future__ import annotations

import faulthandler
import os
import random
from collections.abc import Callable
from typing import Any

import datastates
from datastates.config import Config
from datastates.engine import outbox, rank_reports
from datastates.engine.commit import Commits
from datastates.engine.handle import Part
from datastates.engine.outbox import Outbox
from datastates.errors import Unavailable
from datastates.lineage.write.parts import record_parts
from tests.support.ranks import Rank

STAGES = (
    "copied",
    "entered",
    "within",
    "committed",
    "told",
    "heard",
    "pack-renamed",
    "manifest-renamed",
    "marked-durable",
)

_ENDS_AFTER_S = 90.0
"""A rank that hangs ends by itself, with the stacks of all its threads."""


class Death:
    """Kills this process at the n-th time that it comes to a stage."""

    def __init__(self, stage: str | None, at: int) -> None:
        self.stage, self.left = stage, at

    def come_to(self, stage: str) -> None:
        """Where it may die."""
        if stage == self.stage:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), 9)

    def before(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """It may die before this is done."""

        def dying(*args: Any, **options: Any) -> Any:
            self.come_to(stage)
            return function(*args, **options)

        return dying

    def after(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Or after it."""

        def dying(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            self.come_to(stage)
            return found

        return dying


def rank_of(
    url: str,
    packs: str | None,
    rank: int,
    size: int,
    steps: int,
    seed: int,
    stage: str | None,
    at: int,
    say: Callable[..., object],
) -> None:
    """A rank of job ``job-SEED``; it says a line for each of its captures: ``whole`` or
    ``none``, uid and step."""
    faulthandler.dump_traceback_later(_ENDS_AFTER_S, exit=True)
    choose, death = random.Random(f"{seed}/{rank}"), Death(stage, at)
    # this process ends with the test
    Commits.enter = death.before("copied", Commits.enter)  # type: ignore[method-assign]
    # likewise
    Outbox.record = death.before("entered", Outbox.record)  # type: ignore[method-assign]
    rank_reports.__dict__["record_parts"] = death.after("within", record_parts)
    outbox.__dict__["report"] = death.after("committed", rank_reports.report)
    Outbox._apply_reply = death.before("told", Outbox._apply_reply)  # type: ignore[method-assign]  # likewise
    Outbox._apply_reply = death.after("heard", Outbox._apply_reply)  # type: ignore[method-assign]  # likewise
    config = Config(
        memory_bytes=64 << 20,
        durable_interval_s=None,
        durable_every=2,
        direct_io=False,
        group_patience_s=1.5,
        on_step=death.come_to,
    )
    with datastates.open(url, packs=packs, config=config) as repo:
        captured = []
        it = Rank(repo, Part(rank, size, f"job-{seed}"))
        for _ in range(steps):
            for _ in range(choose.choice((0, 10, 3000))):
                os.sched_yield()
            if choose.random() < 0.1:
                it.skip()
            else:
                captured.append(it.capture())
        for capture in captured:
            try:
                say("whole", capture.wait(timeout_s=60).uid, capture.step)
            except Unavailable:
                say("none", capture.uid, capture.step)
