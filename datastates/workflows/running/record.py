"""What a study leaves in the lineage, and how it is read back: names of refs, attributes of states. There is no other record."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from datastates.errors import Conflict, NotFound, Unavailable
from datastates.lineage.change import clones
from datastates.lineage.change.refs import check_name
from datastates.lineage.search import pages as search
from datastates.lineage.states import Ref, RefKind, State, Status
from datastates.opening.core import Core
from datastates.opening.lease import LEASES
from datastates.opening.missing import explain

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from datastates.repository import Repository

__all__ = [
    "DIGEST",
    "EPOCH",
    "SAMPLES",
    "SAMPLES_ALL",
    "SET",
    "STUDY",
    "VARIANT",
    "branch_of",
    "claim_name",
    "claims_folder",
    "done_tag",
    "finished",
    "make_durable",
    "refs_of",
    "reports",
    "start_tag",
    "states_of",
]

STUDY, VARIANT, DIGEST, EPOCH, SAMPLES, SAMPLES_ALL = "study", "variant", "variant_digest", "epoch", "samples", "samples_all"
SET = "variant_set"
"""The attributes of every state that a job reports. The last one says what the variant set in restored optimizers, if anything."""

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


def finished(repository: Repository, study: str, variant: str, digest: str, refs: Mapping[str, Ref] | None = None) -> State | None:
    """The result of a variant; None while it has none.

    :raises Conflict: another plan finished it.
    """
    ref = (refs if refs is not None else refs_of(repository)).get(done_tag(study, variant))
    if ref is None:
        return None
    state = repository.state(ref.state)
    check_digest(state, study, variant, digest)
    return state


def reports(repository: Repository, study: str, variant: str, origin: State, refs: Mapping[str, Ref] | None = None) -> list[State]:
    """The states that a variant that forked from ``origin`` has reported so far, first epoch first."""
    ref = (refs if refs is not None else refs_of(repository)).get(branch_of(study, variant))
    if ref is None:
        return []
    head = repository.state(ref.state)
    length = head.generation - origin.generation
    path = repository.log(head, limit=length) if length > 0 else []
    return [state for state in reversed(path) if (state.attributes.get(STUDY), state.attributes.get(VARIANT)) == (study, variant)]


def states_of(repository: Repository, study: str) -> list[State]:
    """All states that a study has reported, newest first."""
    with repository.core.reading() as session:
        return list(search.find_all(session, f'attr.{STUDY} = "{study}"'))


def check_digest(state: State, study: str, variant: str, digest: str) -> None:
    """Raise unless the state is of the variant as the plan describes it now.

    :raises Conflict: it is not.
    """
    if state.attributes.get(DIGEST) != digest:
        raise Conflict(
            f"variant {variant!r} of study {study!r} was trained by another plan: its configuration, data or epochs differ"
            f" (state {state.uid[:10]}); give the changed variant or the study another name"
        )


def make_durable(core: Core, uid: str, *, timeout_s: float = _DURABLE_S) -> State:
    """The state, once it survives the process that has it in memory, which may be this one or another.

    :raises Unavailable: the state's bytes are gone, or that process does not write it.
    """
    host = core.running
    if host is not None:
        host.want(uid)
        host.drain()
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
                f"state {uid[:10]} (step {state.step}) is only in the memory of another process, which did not write it"
                f" in {timeout_s:.0f} s: see whether it lives, or start from a durable state"
            )
        time.sleep(_ASK_AGAIN_S)  # that process looks at refs once a second


def tag_done(repository: Repository, study: str, variant: str, digest: str, state: State) -> State:
    """Tag a durable state as a variant's result; returns the state that has the tag now, which another worker may have tagged first.

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
                f"study {study!r} began from {there.uid[:10]} (step {there.step}), and {start!r}"
                f" is {state.uid[:10]} (step {state.step}) now: start from {name!r}, or give the study another name"
            ) from None
    return make_durable(repository.core, state.uid)


def claims_folder(repository: Repository) -> Path:
    """The folder of claims: beside the packs, with the leases of runs."""
    return repository.location.packs / LEASES


def claim_name(repository: Repository, study: str, variant: str = "", rank: int | None = None) -> str:
    """The file name of the claim on a study, on one of its variants, or on the part of one rank in a variant."""
    with repository.core.database.read() as session:
        lineage = clones.repository_uid(session)
    kind = "variant" if variant else "study"
    name = f"{kind}-{hashlib.sha256(chr(0).join((lineage, study, variant)).encode()).hexdigest()[:32]}"
    return name if rank is None else f"{name}-{rank}"


def back_to_what_is_here(repository: Repository, branch: str, origin: State) -> State:
    """The state from which a branch can go on in this process; the branch is moved back to it. ``origin`` if the branch does not exist yet.

    Call it while holding the claim: then states that only another process's memory held belonged to a process that is dead.

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


def is_here(repository: Repository, state: State) -> bool:
    """Whether this process can open a state without a peer."""
    try:
        repository.core.open_payload(state, verify=False).close()
    except (Unavailable, NotFound):
        return False
    return True


def is_in_memory(repository: Repository, uid: str) -> bool:
    """Whether this process's memory holds a state."""
    captured = repository.core.tiers.captured
    return captured is not None and captured.has(uid)
