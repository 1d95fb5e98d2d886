"""Variants handed out among the groups of a job: each group takes the next variant that no other group has, and trains it where it runs.

No group waits for another in a collective, however long that one trains. A group learns what the others do from the lineage and their
claims. A group that dies loses its claim, and another group takes the variant over.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datastates.errors import Conflict
from datastates.lineage.change import studies
from datastates.lineage.states import State
from datastates.tracking.belonging import using
from datastates.tracking.together import Together
from datastates.transport.clone.groups import Group
from datastates.workflows.plans.plan import Variant

from . import record
from .claim import Claim, holder
from .job import Stop
from .outcome import failed
from .result import Exploration
from .study import Study
from .worker import Train, noted, train_variant

__all__ = ["explore_among"]

_logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_NONE_NOW = "/"  # no variant has this name
_SHARED = "groups since "
_HEARD = re.compile(r"\w+: rank \d+ of \d+ could not ")


def explore_among(study: Study, start: str, train: Train, group: Group, *, stop: Stop | None, retries: int) -> Exploration:
    """Train variants of a study in this group until all are over, whichever group trained them; see ``explore``. Collective among its
    ranks.
    """
    ranks = Together(group)
    with ExitStack() as stack:
        since = ranks.first("begin the study", partial(_begin, stack, study, start), int)
        ours = _Ours(study, ranks, since)
        stack.callback(ours.let_go)
        reused = frozenset(ours.done())
        while name := ranks.first("choose a variant", ours.choose, str):
            if name != _NONE_NOW:
                ours.train(study.plan[name], train, stop, retries)
        return study.report(ours.errors(), reused)


def _begin(stack: ExitStack, study: Study, start: str) -> int:
    """Begin the study, or join the groups that have begun it; returns when they did, in microseconds. One group holds the study's claim.

    :raises Conflict: an explorer of another kind holds the claim.
    """
    repo = study.repo
    folder, name = record.claims_folder(repo), record.claim_name(repo, study.name)
    with _turn(folder, f"{name}-begin"):
        since = time.time_ns() // 1000
        claim = Claim.take(folder, name, f"{_SHARED}{since}, process {os.getpid()} on {repo.node}")
        if claim is None:
            note = holder(folder, name) or ""
            if not note.startswith(_SHARED):
                raise Conflict(f"study {study.name!r} is being explored by {note or 'another process'}: wait for it, or end it")
            since = int(note.removeprefix(_SHARED).partition(",")[0])
        stack.enter_context(claim or nullcontext())
        study.begin(start)
    return since


@contextmanager
def _turn(folder: Path, name: str) -> Iterator[None]:
    """Let groups do this one after the other; it takes each only a moment."""
    while (claim := Claim.take(folder, name, f"process {os.getpid()}")) is None:
        time.sleep(_LOOK_S / 10)
    with claim:
        yield


@dataclass(slots=True)
class _Ours:
    """The part of a study that one group trains. Only rank 0 calls ``choose``; all ranks call the other methods."""

    study: Study
    ranks: Together
    since: int
    claim: Claim | None = None

    def let_go(self) -> None:
        """Release the variant that this group holds, so that others can take it."""
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.close()

    def done(self) -> dict[str, State]:
        """The variants that are finished."""
        study, refs = self.study, record.refs_of(self.study.repo)
        digests = {one.name: study.plan.digest(one.name, study.config) for one in study.plan.variants}
        found = {name: record.finished(study.repo, study.name, name, digest, refs) for name, digest in digests.items()}
        return {name: state for name, state in found.items() if state is not None}

    def errors(self) -> dict[str, str]:
        """Why variants failed since the first of the groups began."""
        with self.study.repo.core.reading() as session:
            return studies.failures(session, self.study.name, self.since)

    def choose(self) -> str:
        """The next variant, which is now claimed; an empty name when all are over; ``_NONE_NOW`` while others hold all that is left."""
        self.let_go()
        done, errors = self.done(), self.errors()
        lost: set[str] = set()
        is_over = True
        for variant in self.study.plan.variants:
            if variant.name in done:
                continue
            if variant.parent in lost or (variant.name in errors and self._is_lost(variant)):
                lost.add(variant.name)
                continue
            is_over = False
            if (variant.parent is None or variant.parent in done) and self._take(variant):
                return variant.name
        if not is_over:
            time.sleep(_LOOK_S)
        return "" if is_over else _NONE_NOW

    def _is_lost(self, variant: Variant) -> bool:
        """Whether a failed variant is given up: no group holds it, and its error is still recorded after that check."""
        folder, claim = self._claim_of(variant)
        return holder(folder, claim) is None and variant.name in self.errors()

    def _take(self, variant: Variant) -> bool:
        """Claim the variant; False if another group holds it, or it is over since the last look."""
        self.claim = Claim.take(*self._claim_of(variant), f"process {os.getpid()} on {self.study.repo.node}")
        if self.claim is None:
            return False
        if variant.name in self.done() or variant.name in self.errors():
            self.let_go()
            return False
        return True

    def _claim_of(self, variant: Variant) -> tuple[Path, str]:
        repo = self.study.repo
        return record.claims_folder(repo), record.claim_name(repo, self.study.name, variant.name)

    def train(self, variant: Variant, train: Train, stop: Stop | None, retries: int) -> None:
        """Train the variant, again if it fails."""
        study, repo = self.study.name, self.study.repo
        start = record.start_tag(study) if variant.parent is None else record.done_tag(study, variant.parent)
        assignment = self.study.assign(variant, repo.state(start))
        for attempt in range(1, 2 + retries):
            error = None
            with noted(repo, study, variant.name) if self.ranks.is_first else nullcontext():
                if self.ranks.is_first:
                    _logger.info("study %s: %s begins, attempt %d", study, variant.name, attempt)
                try:
                    with using(self.ranks.group):
                        train_variant(repo, assignment, train, stop=stop, group=self.ranks.group)
                except Exception as exc:  # the user's function may raise anything: the variant failed
                    error = exc
                said = self.ranks.ended("train a variant", None if error is None else _text(variant.name, error))
            if not said:
                return
            rank = min(said, key=lambda each: (_HEARD.match(said[each]) is not None, each))
            if self.ranks.is_first:
                why = f"rank {rank} of {self.ranks.size}: {said[rank]}" if self.ranks.size > 1 else said[rank]
                _logger.warning("variant %s of study %s failed: %s", variant.name, study, why)
                with repo.core.writing() as session:
                    studies.fail(session, study, variant.name, why)


def _text(variant: str, error: Exception) -> str:
    outcome = failed(variant, error)
    return f"{outcome.error}\n\n{outcome.traceback}".rstrip()
