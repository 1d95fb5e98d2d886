"""The refs and state attributes by which a study is recorded in the lineage, and how they are read
back.

There is no other record. The file also has claims, which give a study one explorer and a variant
one worker, and ``Outcome``, the report of one attempt.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from datastates.errors import Conflict, NotFound, Unavailable
from datastates.lineage.query import pages
from datastates.lineage.states import Ref, RefKind, State, Status
from datastates.lineage.write import clones
from datastates.lineage.write.refs import check_name
from datastates.maintenance.core import Core, explain
from datastates.maintenance.lease import LEASES
from datastates.system.files import FileLock, hold, is_held, make_folder_like

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datastates.repository import Repository

STUDY = "study"
VARIANT = "variant"
DIGEST = "variant_digest"
EPOCH = "epoch"
SAMPLES = "samples"
SAMPLES_ALL = "samples_all"
SET = "variant_set"
"""The attributes of every state that a job reports.

The last one has what the variant set in restored optimizers, if anything.
"""

_DURABLE_S = 60.0
_ASK_AGAIN_S = 0.05


def branch_of(study: str, variant: str) -> str:
    """The branch on which a variant is trained."""
    return check_name(f"{study}/{variant}")


def done_tag(study: str, variant: str) -> str:
    """The tag of a finished variant's last state."""
    return check_name(f"done/{study}/{variant}")


def start_tag(study: str) -> str:
    """The tag of the state from which a study forks."""
    return check_name(f"start/{study}")


def refs_of(repository: Repository) -> dict[str, Ref]:
    """Every branch and tag, by name."""
    return {ref.name: ref for ref in repository.refs()}


def finished(
    repository: Repository,
    study: str,
    variant: str,
    digest: str,
    refs: Mapping[str, Ref] | None = None,
) -> State | None:
    """The result of a variant, or None.

    :raises Conflict: another plan finished it.
    """
    ref = (refs if refs is not None else refs_of(repository)).get(done_tag(study, variant))
    if ref is None:
        return None
    state = repository.state(ref.state)
    check_digest(state, study, variant, digest)
    return state


def reports(
    repository: Repository,
    study: str,
    variant: str,
    origin: State,
    refs: Mapping[str, Ref] | None = None,
) -> list[State]:
    """The states that a variant that forked from ``origin`` has reported so far, first epoch
    first."""
    ref = (refs if refs is not None else refs_of(repository)).get(branch_of(study, variant))
    if ref is None:
        return []
    head = repository.state(ref.state)
    length = head.generation - origin.generation
    path = repository.log(head, limit=length) if length > 0 else []
    return [
        state
        for state in reversed(path)
        if (state.attributes.get(STUDY), state.attributes.get(VARIANT)) == (study, variant)
    ]


def states_of(repository: Repository, study: str) -> list[State]:
    """All states that a study has reported, newest first."""
    with repository.core.reading() as session:
        return list(pages.find_all(session, f'attr.{STUDY} = "{study}"'))


def check_digest(state: State, study: str, variant: str, digest: str) -> None:
    """Raise unless the state is of the variant as the plan describes it now.

    :raises Conflict: it is not.
    """
    if state.attributes.get(DIGEST) != digest:
        raise Conflict(
            f"variant {variant!r} of study {study!r} was trained by another plan: its"
            f" configuration, data or epochs differ (state {state.uid[:10]}); give the changed"
            " variant or the study another name"
        )


def make_durable(core: Core, uid: str, *, timeout_s: float = _DURABLE_S) -> State:
    """The state, once it is durable. This process or another one may have it in memory.

    :raises Unavailable: the state's bytes are gone, or that process does not write it.
    """
    runner = core.running
    if runner is not None:
        runner.want(uid)
        runner.drain()
    deadline = time.monotonic() + timeout_s
    while True:
        state = core.state(uid)
        if state.status is not Status.CAPTURED:
            if state.status.is_restorable:
                return state
            with core.database.read() as session:
                raise explain(core, session, state)
        if time.monotonic() > deadline:
            raise Unavailable(
                f"state {uid[:10]} (step {state.step}) is only in the memory of another process,"
                f" which did not write it in {timeout_s:.0f} s: see whether it lives, or start from"
                " a durable state"
            )
        time.sleep(_ASK_AGAIN_S)  # that process looks at refs once a second


def tag_done(repository: Repository, study: str, variant: str, digest: str, state: State) -> State:
    """Tag a durable state as a variant's result. Returns the tagged state, which another worker may
    have tagged first.

    :raises Conflict: another plan finished it.
    """
    try:
        repository.tag(done_tag(study, variant), state.uid)
    except Conflict:
        return finished(repository, study, variant, digest) or state
    return state


def tag_start(repository: Repository, study: str, start: str) -> State:
    """The state from which a study forks, tagged and durable.

    :raises Conflict: the study began from another state.
    """
    state = repository.state(start)
    name = start_tag(study)
    try:
        repository.tag(name, state.uid)
    except Conflict:
        there = repository.state(name)
        if there.uid != state.uid:
            raise Conflict(
                f"study {study!r} began from {there.uid[:10]} (step {there.step}), and {start!r} is"
                f" {state.uid[:10]} (step {state.step}) now: start from {name!r}, or give the study"
                " another name"
            ) from None
    return make_durable(repository.core, state.uid)


def claims_folder(repository: Repository) -> Path:
    """The folder of claims, next to the packs. It also has the leases of runs."""
    return repository.location.packs / LEASES


def claim_name(
    repository: Repository, study: str, variant: str = "", rank: int | None = None
) -> str:
    """The file name of the claim on a study, on one of its variants, or on the part of one rank
    in a variant."""
    with repository.core.database.read() as session:
        lineage = clones.repository_uid(session)
    kind = "variant" if variant else "study"
    name = (
        f"{kind}-{hashlib.sha256(chr(0).join((lineage, study, variant)).encode()).hexdigest()[:32]}"
    )
    return name if rank is None else f"{name}-{rank}"


def back_to_what_is_here(repository: Repository, branch: str, origin: State) -> State:
    """The state from which a branch can resume in this process, or ``origin`` if there is no
    branch. The branch is moved back to the state.

    Call it while holding the claim. States that existed only in another process's memory then
    belonged to a dead process.

    :raises Unavailable: not even ``origin`` can be read here.
    """
    ref = refs_of(repository).get(branch)
    if ref is None or ref.kind is not RefKind.BRANCH:
        return origin
    head = repository.state(ref.state)
    length = max(0, head.generation - origin.generation)
    for state in [*repository.log(head, limit=length), origin] if length else [origin]:
        if state.uid == origin.uid or (state.status.is_restorable and is_here(repository, state)):
            if state.uid != head.uid and head.generation > state.generation:
                repository.move(branch, state, expected=head)
            return state
    raise AssertionError("origin is the last of them")


def is_here(repository: Repository, rev: State | str) -> bool:
    """Whether this process can open a state without a peer."""
    try:
        repository.core.open_payload(repository.state(rev), verify=False).close()
    except (Unavailable, NotFound):
        return False
    return True


def is_in_memory(repository: Repository, uid: str) -> bool:
    """Whether this process's memory holds a state."""
    captured = repository.core.tiers.captured
    return captured is not None and captured.has(uid)


# --- Claims: one explorer for a study, one worker for a variant ---


class Claim:
    """An exclusive lock on ``<folder>/<name>``, with a note for others to read.

    Made by ``take``; a context manager."""

    def __init__(self, held: FileLock) -> None:
        self._held = held

    @classmethod
    def take(cls, folder: Path, name: str, note: str) -> Self | None:
        """The claim, or None if another process holds it."""
        make_folder_like(folder.parent, folder)
        held = hold(folder / name)
        if held is None:
            return None
        try:
            held.write(note)
        except BaseException:
            held.close()
            raise
        return cls(held)

    def close(self) -> None:
        """Release the claim and remove the file; idempotent. Does nothing in a forked child."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def holder(folder: Path, name: str) -> str | None:
    """The note of the claim's holder. None if the claim is free."""
    path = folder / name
    try:
        return path.read_text() if is_held(path) else None
    except FileNotFoundError:
        return None


# --- Outcome of one attempt at a variant ---


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a task: the uid of the result, or an error with its traceback. ``source`` is
    where the starting state came from.

    ``is_death``: the error is that a process died, which may not be the variant's fault.
    ``url``: where a worker without the explorer's disk serves its states. ``took_s``: the time
    that such a worker took. ``addresses``: the addresses of a worker that could not connect
    to the explorer.
    ``is_ended``: the worker ended the variant, which exceeded a limit. ``is_declined``: the worker
    left a variant that was ended there to others. ``node``: its machine and network.
    """

    variant: str
    uid: str | None
    error: str | None = None
    traceback: str = ""
    source: str | None = None
    is_death: bool = False
    url: str | None = None
    took_s: float = 0.0
    addresses: tuple[str, ...] | None = None
    is_ended: bool = False
    is_declined: bool = False
    node: str = ""


def failed(variant: str, error: BaseException) -> Outcome:
    """The outcome of a variant that raised."""
    return Outcome(
        variant,
        None,
        f"{type(error).__name__}: {error}",
        "".join(traceback.format_exception(error)),
    )
