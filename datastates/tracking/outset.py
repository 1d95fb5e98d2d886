"""The state from which a tracker starts, where its branch stands, and to which its objects are restored."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from datastates import values
from datastates.errors import Conflict, InvalidInput
from datastates.lineage.change import refs
from datastates.lineage.search import revision, walk
from datastates.lineage.states import Ref, RefKind, State
from datastates.objects.adapters import IN_BACKWARD
from datastates.objects.generators import is_generator
from datastates.objects.report import RestoreReport
from datastates.objects.rng import RngState
from datastates.opening.core import Core
from datastates.opening.missing import explain, is_elsewhere, nearest_here, nearest_kept
from datastates.system.logs import event
from datastates.system.notices import say

from .succession import holders
from .trained import go_on_training, lose_groups, regain_groups, say_gained, say_what_differs
from .training import Training

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


__all__ = ["Outset", "check_origin", "origin_of", "set_out", "stand"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outset:
    """The state from which a tracker starts; None begins a new root. ``is_fork``: the branch does not exist yet. ``is_beyond``: the branch
    stands at another state than ``start``. ``is_taken``: a living process holds the branch, which is taken over from it.
    """

    state: State | None
    is_fork: bool = False
    is_beyond: bool = False
    is_taken: bool = False


def origin_of(core: Core, branch: str, start: str | State | None, *, resume: bool, takeover: bool = False, nearest: bool = False) -> Outset:
    """The state from which a tracker starts. A branch whose head cannot be restored is moved back; no branch is made. With ``nearest``, a
    fork of a state that cannot be restored starts from the nearest one that can.

    :raises Conflict: another living process holds the branch, and ``takeover`` is False.
    """
    branch = values.text(branch, "branch")
    with core.reading() as session:
        ref, origin = _named(core, session, branch, start, resume=resume, nearest=nearest)
        if holders(core, session, branch, takeover=takeover) and ref is not None:
            return Outset(nearest_here(core, session, ref.state), is_beyond=True, is_taken=True)
        if ref is None:
            if origin is None:
                _warn_of_misspelling(session, branch)
                return Outset(None)
            if nearest:
                origin = nearest_kept(core, session, origin)
            elif not origin.status.is_restorable:
                raise explain(core, session, origin)
        else:
            head = walk.state(session, ref.state)
            begun = origin
            origin = head if is_elsewhere(core, session, head) else nearest_here(core, session, head.uid)
            if origin is None:
                raise explain(core, session, head)
            why = None if origin.uid == head.uid else explain(core, session, head)
    if ref is None:
        return Outset(origin, is_fork=True)
    if origin.uid != ref.state:
        back = event("branch.moved_back", branch=branch, state=origin.uid, reason=str(why))
        _logger.warning("branch %s goes back to state %s (step %d): %s", branch, origin.uid[:10], origin.step, why, extra=back)
        with core.writing() as session:
            refs.move(session, branch, origin.uid, expected=ref.state)
    return Outset(origin, is_beyond=begun is None or begun.uid != origin.uid)


def check_origin(core: Core, branch: str, start: str | State | None, *, resume: bool, nearest: bool = False) -> None:
    """Raise, as ``origin_of`` does, unless a training may start from there."""
    with core.reading() as session:
        _named(core, session, branch, start, resume=resume, nearest=nearest)


def _named(
    core: Core, session: Session, branch: str, start: str | State | None, *, resume: bool, nearest: bool
) -> tuple[Ref | None, State | None]:
    """The branch, if it exists, and the state that ``start`` names; of a branch that exists, the one from which ``nearest`` forked it."""
    ref = refs.find(session, branch)
    origin = None if start is None else revision.resolve(session, start.uid if isinstance(start, State) else start)
    if ref is None:
        refs.check_name(branch)
        return None, origin
    if ref.kind is not RefKind.BRANCH:
        raise Conflict(f"{branch!r} is a tag: choose another name for the branch")
    if not resume:
        raise Conflict(f"branch {branch!r} exists at {ref.state[:10]}: choose another name, or go on there with resume=True")
    if origin is not None:
        kept = nearest_kept(core, session, origin, is_told=False) if nearest else origin
        if not any(walk.is_ancestor(session, uid, ref.state) for uid in {kept.uid, origin.uid}):
            raise Conflict(f"branch {branch!r} exists and does not descend from {start!r}: choose another name, or no start")
        origin = kept
    return ref, origin


def set_out(
    training: Training, state: State, *, only: str | Sequence[str] | None, strict: bool, is_resumed: bool, rng: str | bool = "state"
) -> None:
    """Restore ``state`` into the training's objects; the first capture then shares with it what is unchanged.

    With ``rng="script"``, a fork keeps the random numbers of the script, and so does a training that is resumed with another seed.
    """
    is_reseeded = not is_resumed or (training.seed is not None and training.seed != state.config.get("seed"))
    without = [name for name, found in training.objects.items() if isinstance(found, RngState) or is_generator(found)]
    if rng != "script" or not is_reseeded:
        without = []
    report = _restored(training, state, only=only, strict=strict, is_resumed=is_resumed, without=without)
    stand(training, state, is_resumed=is_resumed)
    if is_resumed:
        go_on_training(training.branch, training.adapted, report, is_told=training.ranks.is_first, at=state.uid)
    if not training.ranks.is_first:
        return  # rank 0 logs it for all
    where = f"state {state.uid[:10]}, step {state.step}" + (f", epoch {training.loops.epoch}" if training.loops.is_counted else "")
    if not is_resumed:
        begun = event("branch.begun", branch=training.branch, state=state.uid, step=state.step)
        _logger.info("branch %s begins at %s", training.branch, where, extra=begun)
        say_what_differs(training.branch, report)
        return
    resumed = event("branch.resumed", branch=training.branch, state=state.uid, step=state.step)
    say(f"branch {training.branch} goes on from {where}", resumed)
    if forgotten := _forgotten(training, only):
        _logger.warning(
            "branch %s has %s too, and %s not tracked now: begun anew, and missing in what is captured from here; pass %s to track, or fork"
            " with start=",
            training.branch, ", ".join(forgotten), "they are" if len(forgotten) > 1 else "it is", ", ".join(forgotten),
        )  # fmt: skip


def _restored(
    training: Training, state: State, *, only: str | Sequence[str] | None, strict: bool, is_resumed: bool, without: Sequence[str]
) -> RestoreReport:
    """Restore the state, except for the objects ``without``. A resumed training first gets back the groups that it had given optimizers."""
    try:
        return training.restore(state, only=only, strict=strict, without=without)
    except InvalidInput as misfit:
        alone = is_resumed and training.ranks.size == 1
        gained = regain_groups(training.core, state, training.adapted) if alone else []
        if not gained:
            raise
        try:
            report = training.restore(state, only=only, strict=strict, without=without)
        except InvalidInput:
            lose_groups(gained)
            raise misfit from None
        except BaseException:
            lose_groups(gained)
            raise
    say_gained(training.branch, gained)
    return report


def stand(training: Training, state: State, *, is_resumed: bool) -> None:
    """Make ``state`` the one where the training stands, whatever its objects hold; the first capture shares with it what is unchanged."""
    training.step, training.micro_step = state.step, state.micro_step
    training.resumed_from, training.is_resumed = state, is_resumed
    training.line.base = training.core.tiers.placed(state.uid)
    if training.line.base is None:
        training.line.kin = training.host.line_of(state.uid)  # in memory only: shared bytes are written with the first of the two


def _forgotten(training: Training, only: str | Sequence[str] | None) -> list[str]:
    """The objects of the resumed state that this training no longer tracks, without having said so by ``only``."""
    if only is not None or training.report is None:
        return []
    return [name for name in training.report.skipped if "/" not in name and name not in ("rng", IN_BACKWARD, *training.objects)]


def _warn_of_misspelling(session: Session, branch: str) -> None:
    """Log a warning if this branch, which begins from nothing, has nearly the name of one that exists."""
    plain = re.sub(r"\d+", "0", branch)
    names = [name for name in refs.near(session, branch, RefKind.BRANCH) if re.sub(r"\d+", "0", name) != plain]
    close = get_close_matches(branch, names, n=3, cutoff=0.75)
    if close:
        _logger.warning(
            "branch %r is new and begins without a state, and there is %s: branch=%r would go on there, start=%r fork from it",
            branch, " and ".join(map(repr, close)), close[0], close[0],
        )  # fmt: skip
