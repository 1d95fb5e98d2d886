"""Bringing a state back: as a tree, into live objects, or only to check every byte of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from datastates import values
from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.objects.redivision import Redivision
from datastates.objects.report import RestoreReport, Selection, leaf_paths
from datastates.opening.core import Core
from datastates.store.passing import open_shared
from datastates.store.reading import of_state, read_tree
from datastates.store.seal import SealedChunks
from datastates.system.interrupts import undisturbed
from datastates.transport.clone.groups import Group
from datastates.transport.clone.meeting import Meeting

from .direct import restore_from
from .salvage import naming_a_way_on

if TYPE_CHECKING:
    import torch

__all__ = ["device_of", "load", "load_values", "restore", "verify"]


def device_of(value: object, what: str) -> torch.device:
    """A device of this machine.

    :raises InvalidInput: the value is not one.
    """
    import torch  # code that only looks at a lineage does without torch

    try:
        return torch.empty(0, device=torch.device(value)).device  # type: ignore[call-overload]  # whatever is none raises
    except Exception as exc:
        raise InvalidInput(f"{what} is {values.shown(value)}: give a device that is here, such as 'cpu' ({exc})") from exc


def load(
    core: Core, state: State, *, only: str | Sequence[str] | None = None, device: torch.device | str | None = None, rank: int = 0
) -> Any:
    """A state's tree; see ``Repository.load``."""
    if rank >= state.world_size:
        raise InvalidInput(f"state {state.uid} has {state.world_size} parts, and rank is {rank}: give one below that")
    with undisturbed(), naming_a_way_on(core, state), core.open_payload(state, rank=rank) as reader:
        selection = Selection(only)
        tree = read_tree(reader, wants=selection.wants, device=device)
    if only is not None:
        selection.check(leaf_paths(tree, ""))  # a value may be meant: those are always there
    return tree


def restore(
    core: Core,
    state: State,
    into: Mapping[str, object],
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    group: Group | None = None,
) -> RestoreReport:
    """Put a state into live objects, once no copy for a capture here reads them any more; see ``Repository.restore``.

    With ``group``, into those of all its ranks at once, which is collective; without one, into these alone.
    """
    for training in list(core.trainings):
        training.fence()
    if group is not None and group.size > 1:
        report = _restore_together(core, state, into, group, only=only, strict=strict)
        return replace(report, state=state.uid, step=state.step)
    own, host = Redivision(state.world_size, 0, 1), core.running
    snapshots = nullcontext(()) if host is None else host.snapshots.reading(state.uid, state.digest)
    with undisturbed(), naming_a_way_on(core, state), core.open_payload(state, rank=own.source) as reader, snapshots as near:
        report = restore_from(reader, into, only=only, strict=strict, own=own, near=near)
    return replace(report, state=state.uid, step=state.step)


def _restore_together(
    core: Core, state: State, into: Mapping[str, object], group: Group, *, only: str | Sequence[str] | None, strict: bool
) -> RestoreReport:
    """Restore on all ranks of the group: each reads what only it wants, and its share of the rest. If one fails, all fail and none has
    written.
    """
    own, meeting = Redivision(state.world_size, group.rank, group.size), Meeting(group, f"restore state {state.uid}")
    opened = partial(core.tiers.open_part, state, verify=core.config.verify)
    with meeting.united(), undisturbed(), naming_a_way_on(core, state), ExitStack() as stack:
        _check_same(state, meeting)
        reader = stack.enter_context(open_shared(meeting, state.uid, state.world_size, opened, rank=own.source))
        return restore_from(of_state(reader, state), into, only=only, strict=strict, own=own, meeting=meeting)


def load_values(core: Core, state: State, group: Group, *, wants: Callable[[str], bool]) -> Any:
    """The state's tree with its plain values, and with the tensors at the paths that are wanted if this process is alone. Collective."""
    if group.size == 1:
        with undisturbed(), naming_a_way_on(core, state), core.open_payload(state) as reader:
            return read_tree(reader, wants=wants)
    own, meeting = Redivision(state.world_size, group.rank, group.size), Meeting(group, f"read state {state.uid}")
    opened = partial(core.tiers.open_part, state, verify=core.config.verify)
    with meeting.united(), undisturbed(), naming_a_way_on(core, state), ExitStack() as stack:
        _check_same(state, meeting)
        reader = stack.enter_context(open_shared(meeting, state.uid, state.world_size, opened, rank=own.source))
        return read_tree(reader, wants=lambda path: False)


def _check_same(state: State, meeting: Meeting) -> None:
    """Raise unless all ranks restore this state: those that opened another repository may have another one of its uid."""
    own = f"{state.uid} with the digest {state.digest[:16]}"
    everyone = [said.decode() for said in meeting.meet(own.encode())]
    for rank, said in enumerate(everyone):
        if said != everyone[0]:
            raise InvalidInput(
                f"rank 0 restores state {everyone[0]}, and rank {rank} state {said}: let all ranks open the same repository, and restore"
                " the same state"
            )


def verify(core: Core, state: State) -> None:
    """Read and check every byte of a state, and bind the state to its contents by a seal; see ``Repository.verify``."""
    with undisturbed(), core.open_payload(state, verify=True) as reader:
        chunks = SealedChunks(reader)
        chunks.check()
        reader.verify_headers()
    core.seal(state.uid, chunks.seal)
