"""Ranks of one job that clone a state to each other: the groups of ``transport.groups``, with what needs a repository."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Protocol

import msgspec

from datastates.clone.peer import connect
from datastates.clone.siblings import own_address
from datastates.clone.transfer import Cloned
from datastates.errors import InvalidInput, Unavailable
from datastates.lineage.states import State
from datastates.opening.core import Opened
from datastates.opening.whereabouts import network_id
from datastates.transport.clone import groups as meeting
from datastates.transport.clone import torch_groups as torch_meeting
from datastates.transport.failures import Failure, describe, revive

__all__ = ["MPIGroup", "SoloGroup", "TorchGroup"]

_LOOPBACK = "127.0.0.1"


class Closes(Protocol):
    """The server of a state while the other ranks clone it."""

    @property
    def url(self) -> str:
        """The url at which it serves."""

    def close(self) -> None:
        """End it."""


class Serving(Opened, Protocol):
    """A repository, as ``datastates.open`` returns it, which can serve its states."""

    def serve(self, url: str, *, token: str, timeout_s: float, data: str | None) -> Closes:
        """Begin to serve."""


class _Invitation(msgspec.Struct, frozen=True):
    """The address at which the root serves, for every rank; or the reason why it does not."""

    url: str = ""
    token: str = ""
    uid: str = ""
    parts: int = 1
    failure: Failure | None = None


class _Broadcasting(meeting.Group):
    """A group that clones a state of one rank to all others."""

    def broadcast(
        self,
        repo: Serving,
        rev: str | State,
        *,
        into: Mapping[str, object] | None = None,
        root: int = 0,
        timeout_s: float = 10.0,
        data: str | None = None,
    ) -> Cloned | None:
        """Clone a state from the root's repository to every other rank, in a chain; collective. ``data`` as for ``Repository.serve``.

        A state of several parts, all of which the root must be able to reach, goes to each rank straight from the root. Each other rank
        takes it into its own ``repo``'s memory, or ``into`` live objects. The root serves on its own address only while this runs, with a
        token that the group exchanges. Returns what this rank cloned (the root: None) once all ranks are done.

        :raises Unavailable: another rank failed; names it. What this rank cloned stays. Its own error is raised as it is.
        :raises InvalidInput: there is no such rank.
        """
        if not 0 <= root < self.size:
            raise InvalidInput(f"rank {root} cannot be the root of a group of {self.size}")
        networks = self.exchange(network_id().encode())
        if self.rank == root:
            self._give(repo, rev, is_one_host=len(set(networks)) == 1, root=root, timeout_s=timeout_s, data=data)
            return None
        return self._take(repo, into, root=root, timeout_s=timeout_s, data=data)

    def _give(self, repo: Serving, rev: str | State, *, is_one_host: bool, root: int, timeout_s: float, data: str | None) -> None:
        token, server = secrets.token_urlsafe(32), None
        try:
            state = repo.core.state(rev)
            host = _LOOPBACK if is_one_host else own_address()
            server = repo.serve(f"ucx://{host}:0", token=token, timeout_s=timeout_s, data=data) if self.size > 1 else None
            invitation = _Invitation(server.url if server is not None else "", token, state.uid, state.world_size)
        except Exception as exc:  # whatever it is, the others must not wait for ever
            self.exchange(msgspec.msgpack.encode(_Invitation(failure=describe(exc))))
            raise
        try:
            self.exchange(msgspec.msgpack.encode(invitation))
            self._agree(None, root)
        finally:
            if server is not None:
                server.close()

    def _take(self, repo: Serving, into: Mapping[str, object] | None, *, root: int, timeout_s: float, data: str | None) -> Cloned | None:
        invitation = msgspec.msgpack.decode(self.exchange(b"")[root], type=_Invitation)
        if invitation.failure is not None:
            raise revive(invitation.failure)
        cloned, error = None, None
        try:
            with connect(invitation.url, token=invitation.token, timeout_s=timeout_s, data=data) as peer:
                into_repo, is_chain = repo if into is None else None, invitation.parts == 1
                cloned = peer.clone(invitation.uid, into=into, repo=into_repo, chain=is_chain)
        except BaseException as exc:  # raised below, once the other ranks know
            error = exc
        self._agree(error, root)
        return cloned

    def _agree(self, error: BaseException | None, root: int) -> None:
        """Wait for every rank, and raise this rank's error, or say which other one failed."""
        outcomes = self.exchange(b"" if error is None else f"{type(error).__name__}: {error}".encode()[:10_000])
        if error is not None:
            raise error
        failed = [(rank, said.decode(errors="replace")) for rank, said in enumerate(outcomes) if said and rank != root]
        if failed:
            rank, said = failed[0]
            raise Unavailable(f"{len(failed)} of {self.size - 1} ranks did not get the state; rank {rank}: {said}")


class SoloGroup(_Broadcasting, meeting.SoloGroup):
    """One process by itself, so that the same script runs without ``mpiexec``; there is no other rank to broadcast to."""


class MPIGroup(_Broadcasting, meeting.MPIGroup):
    """The ranks of an MPI communicator, ``COMM_WORLD`` by default; making one is collective.

    :raises Unsupported: mpi4py is not installed.
    """


class TorchGroup(_Broadcasting, torch_meeting.TorchGroup):
    """The ranks of torch.distributed, all of them or those of ``of``; making one is collective among these ranks.

    :raises InvalidInput: torch.distributed is not initialised, or ``of`` is not one of its groups, or this process is not in it.
    :raises Unavailable: a rank did not come, or cannot be connected to.
    """
