"""Ranks of one job that clone a state to each other: the groups of ``transport.groups``, with
what needs a repository."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from datastates.lineage.query import names, walk
from datastates.lineage.states import State
from datastates.maintenance.core import AnyRepository, Core
from datastates.maintenance.environment import network_id
from datastates.state.adapters import given_objects
from datastates.storage.parallel_read import open_shared
from datastates.storage.reading import of_state
from datastates.system.failures import Failure, describe, revive
from datastates.system.logs import event
from datastates.training.collective import Ranks, find, using
from datastates.transport.peer import connect
from datastates.transport.serving import own_address
from datastates.transport.transfer import Cloned

from . import collective, values
from .collective import AnyGroup, CollectiveCall, Group
from .errors import Corrupt, InvalidInput, Unavailable

if TYPE_CHECKING:
    from .repository import Repository

__all__ = ["Group", "MPIGroup", "SoloGroup", "TorchGroup", "find", "latest", "using"]

_LOOPBACK = "127.0.0.1"


class _Invitation(msgspec.Struct, frozen=True):
    """The address at which the root serves, for every rank; or the reason why it does not."""

    url: str = ""
    token: str = ""
    uid: str = ""
    parts: int = 1
    failure: Failure | None = None


class _Broadcasting(collective.Group):
    """A group that clones a state of one rank to all others."""

    def broadcast(
        self,
        repo: Repository,
        rev: str | State,
        *,
        root: int = 0,
        timeout_s: float = 10.0,
        data: str | None = None,
        objects: Mapping[str, object] | None = None,
        **more: object,
    ) -> Cloned | None:
        """Clone a state from the root's repository to every other rank, in a chain; collective.
        ``data`` as for ``Repository.serve``, ``objects`` and ``more`` as for ``Peer.clone``.

        A state of several parts, all of which the root must be able to reach, goes to each rank
        straight from the root. Each other rank takes it into the live objects that it names, or
        into its own ``repo``'s memory. The root serves on its own address only while this runs,
        with a token that the group exchanges. Returns what this rank cloned (the root: None) once
        all ranks are done.

        :raises Unavailable: another rank failed; names it. What this rank cloned stays. Its own
            error is raised as it is.
        :raises InvalidInput: there is no such rank.
        """
        if not 0 <= root < self.size:
            raise InvalidInput(f"rank {root} cannot be the root of a group of {self.size}")
        into = given_objects(more, objects, _Broadcasting.broadcast)
        networks = self.exchange(network_id().encode())
        if self.rank == root:
            self._give(
                repo,
                rev,
                is_one_host=len(set(networks)) == 1,
                root=root,
                timeout_s=timeout_s,
                data=data,
            )
            return None
        return self._take(repo, into, root=root, timeout_s=timeout_s, data=data)

    def _give(
        self,
        repo: Repository,
        rev: str | State,
        *,
        is_one_host: bool,
        root: int,
        timeout_s: float,
        data: str | None,
    ) -> None:
        token, server = secrets.token_urlsafe(32), None
        try:
            state = repo.core.state(rev)
            host = _LOOPBACK if is_one_host else own_address()
            server = (
                repo.serve(f"ucx://{host}:0", token=token, timeout_s=timeout_s, data=data)
                if self.size > 1
                else None
            )
            invitation = _Invitation(
                server.url if server is not None else "", token, state.uid, state.world_size
            )
        except Exception as exc:  # after any error, the other ranks must not wait for ever
            self.exchange(msgspec.msgpack.encode(_Invitation(failure=describe(exc))))
            raise
        try:
            self.exchange(msgspec.msgpack.encode(invitation))
            self._agree(None, root)
        finally:
            if server is not None:
                server.close()

    def _take(
        self,
        repo: Repository,
        into: Mapping[str, object],
        *,
        root: int,
        timeout_s: float,
        data: str | None,
    ) -> Cloned | None:
        invitation = msgspec.msgpack.decode(self.exchange(b"")[root], type=_Invitation)
        if invitation.failure is not None:
            raise revive(invitation.failure)
        cloned, error = None, None
        try:
            with connect(
                invitation.url, token=invitation.token, timeout_s=timeout_s, data=data
            ) as peer:
                into_repo, is_chain = None if into else repo, invitation.parts == 1
                cloned = peer.clone(invitation.uid, objects=into, repo=into_repo, chain=is_chain)
        except BaseException as exc:  # raised below, once the other ranks know
            error = exc
        self._agree(error, root)
        return cloned

    def _agree(self, error: BaseException | None, root: int) -> None:
        """Wait for every rank, and raise this rank's error, or an error that names another one."""
        outcomes = self.exchange(
            b"" if error is None else f"{type(error).__name__}: {error}".encode()[:10_000]
        )
        if error is not None:
            raise error
        failed = [
            (rank, said.decode(errors="replace"))
            for rank, said in enumerate(outcomes)
            if said and rank != root
        ]
        if failed:
            rank, said = failed[0]
            raise Unavailable(
                f"{len(failed)} of {self.size - 1} ranks did not get the state; rank {rank}: {said}"
            )


class SoloGroup(_Broadcasting, collective.SoloGroup):
    """A single process, so that the same script runs without ``mpiexec``. There is no other rank to
    broadcast to."""


class MPIGroup(_Broadcasting, collective.MPIGroup):
    """The ranks of an MPI communicator, ``COMM_WORLD`` by default; making one is collective.

    :raises Unsupported: mpi4py is not installed.
    """


class TorchGroup(_Broadcasting, collective.TorchGroup):
    """The ranks of torch.distributed, or of its group ``of``. Making one is collective among these
    ranks.

    :raises InvalidInput: torch.distributed is not initialised, or ``of`` is not one of its groups,
        or this process is not in it.
    :raises Unavailable: a rank did not come, or cannot be connected to.
    """


_logger = logging.getLogger(__name__)


@values.checked
def latest(
    repo: AnyRepository, branch: values.Text = "main", *, group: AnyGroup | None = None
) -> State:
    """The newest state of a branch of which every part verifies, read again. Collective: each rank
    reads its share, and all get the same state.

    If a part is damaged, cannot be reached by any rank, or does not fit the other
    parts, all ranks check the state before it.

        state = datastates.ranks.latest(repo)
        run = repo.track(branch=f"from-{state.step}", start=state, model=model, optimizer=optimizer)

    :param repo: the repository, which every rank has opened.
    :param branch: the branch whose states are checked, from its head along first parents.
    :param group: the ranks; None: as for ``track``.
    :raises NotFound: there is no such branch.
    :raises Unavailable: none of its states verifies.
    """
    core, ranks = repo.core, Ranks(find() if group is None else group)
    uid = ranks.first("find the branch", partial(_head, core, branch), str)
    while uid:
        with ranks.synchronized("look at a state"):
            state = core.state(uid)
        missing = _missing(core, state, ranks)
        why = (
            f"of its {state.world_size} parts {', '.join(map(str, sorted(missing)))} does not"
            " verify"
            if missing
            else ""
        )
        why = why or _misfit(core, state, ranks)
        if not why:
            return state
        if ranks.is_first:
            about = event("state.passed_over", state=uid, step=state.step, parts=sorted(missing))
            _logger.warning(
                "branch %s: state %s (step %d) is passed over: %s",
                branch,
                uid[:10],
                state.step,
                why,
                extra=about,
            )
        uid = ranks.first("find an older state", partial(_older, core, state), str)
    raise Unavailable(
        f"no state of branch {branch!r} verifies: bring its files back (`datastates repair --from"
        " FOLDER`), or begin anew"
    )


def _head(core: Core, branch: str) -> str:
    with core.reading() as session:
        found = walk.nearest_restorable(session, names.get(session, branch).state)
    return "" if found is None else found.uid


def _older(core: Core, state: State) -> str:
    if not state.parents:
        return ""
    with core.reading() as session:
        found = walk.nearest_restorable(session, state.parents[0])
    return "" if found is None else found.uid


def _missing(core: Core, state: State, ranks: Ranks) -> set[int]:
    """The parts that verify nowhere.

    One rank reads each part. All other ranks read it only if that rank cannot."""
    parts = set(range(state.world_size))
    mine = {part for part in parts if part % ranks.size == ranks.rank}
    left = parts - _told(_sound(core, state, mine), ranks)
    return left - _told(_sound(core, state, left - mine), ranks) if left else left


def _misfit(core: Core, state: State, ranks: Ranks) -> str:
    """Why parts that each verify do not make this state together; empty if they do."""
    meeting, opened = (
        CollectiveCall(ranks.group, f"look at state {state.uid}"),
        partial(core.tiers.open_part, state),
    )
    try:
        with (
            meeting.synchronized(),
            open_shared(meeting, state.uid, state.world_size, opened, rank=0) as reader,
        ):
            of_state(reader, state)
    except (Corrupt, Unavailable) as exc:
        return str(exc)
    return ""


def _told(sound: list[int], ranks: Ranks) -> set[int]:
    everyone = ranks.group.exchange(msgspec.msgpack.encode(sound))
    return {part for said in everyone for part in msgspec.msgpack.decode(said, type=list[int])}


def _sound(core: Core, state: State, parts: Collection[int]) -> list[int]:
    return [part for part in sorted(parts) if _is_sound(core, state, part)]


def _is_sound(core: Core, state: State, part: int) -> bool:
    try:
        with core.tiers.open_part(state, part)[0] as reader:
            reader.verify()
    except Exception as exc:  # after any error, the other ranks wait for this rank's result
        _logger.info(
            "state %s: part %d does not verify here: %s: %s",
            state.uid[:10],
            part,
            type(exc).__name__,
            exc,
        )
        return False
    return True
