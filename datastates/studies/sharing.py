"""Workers that do not share the explorer's disk.

A worker without that disk trains in a private repository on its machine. It clones starting states
from other workers or from the explorer, and pushes results to the explorer. The explorer alone
writes to the study's lineage. All connections prove the study's token.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from datastates.errors import Cancelled, DatastatesError, Disconnected, NotFound, Unavailable
from datastates.lineage.query import pages
from datastates.lineage.states import State, Status
from datastates.maintenance.environment import network_id
from datastates.maintenance.location import Location, locate
from datastates.storage.tiers import CAPTURED

from . import records
from .processes import repository_at

if TYPE_CHECKING:
    from datastates.config import Config
    from datastates.repository import Repository
    from datastates.transport.serving import Server

    from .worker import Assignment

_logger = logging.getLogger(__name__)
_BEAT_S = 1.0
_LEASE_S = 30.0
_PUSH_S = 30.0
_CONNECT_S = 5.0
_LOOK_BACK = 100  # states of a branch


@dataclass(frozen=True, slots=True)
class Share:
    """The addresses at which the explorer serves its repository, if any, and the token of the
    study."""

    urls: tuple[str, ...]
    token: str = field(repr=False)


NO_SHARE = Share((), "")

# --- At the explorer ---


class Reception:
    """Serves the explorer's repository to the workers of its study.

    It listens only where a worker needs it: on loopback for a worker of this network, else at the
    address from which this machine reaches the worker. ``url``, if given, is served from the
    beginning. Used by the explorer's thread.
    """

    def __init__(self, repo: Repository, url: str | None) -> None:
        self._repo, self._token = repo, secrets.token_urlsafe(32)
        self._servers: dict[str, Server] = {}
        if url is not None:
            self._serve(url)

    @property
    def share(self) -> Share:
        """The addresses so far, and the token."""
        return Share(tuple(server.url for server in self._servers.values()), self._token)

    def admit(self, node: str, addresses: Collection[str]) -> None:
        """Listen where a worker with these addresses can connect, if there is such an address."""
        hosts = {"127.0.0.1"}
        if node != network_id():
            hosts = {source_address(each) or "127." for each in addresses}
            hosts = {host for host in hosts if not host.startswith("127.")}
        for url in {f"tcp://{host}:0" for host in hosts} - self._servers.keys():
            _logger.info("the explorer serves %s to workers without its disk", url)
            self._serve(url)

    def close(self) -> None:
        """End all servers."""
        for server in self._servers.values():
            server.close()

    def _serve(self, url: str) -> None:
        self._servers[url] = self._repo.serve(url, token=self._token, is_writable=True)


def adopt(
    repo: Repository, assignment: Assignment, parent: State, *, result: str | None = None
) -> None:
    """Move the branch of a variant to ``result``, or else to its newest state that was pushed here
    and continues the branch. The state becomes durable in the background."""
    study, variant = assignment.study, assignment.variant.name
    state = _newest(repo, study, variant) if result is None else repo.state(result)
    if state is None or state.attributes.get(records.DIGEST) != assignment.digest:
        return
    path = {one.uid for one in repo.log(state, limit=state.generation - parent.generation + 1)}
    if parent.uid not in path:
        return
    branch = records.branch_of(study, variant)
    ref = records.refs_of(repo).get(branch)
    if ref is None:
        repo.branch(branch, state)
    elif ref.state != state.uid and (result is not None or ref.state in path):
        repo.move(branch, state, expected=ref.state)
    if repo.core.running is not None:
        repo.core.running.want(state.uid)


def _newest(repo: Repository, study: str, variant: str) -> State | None:
    asked = f'attr.{records.STUDY} = "{study}" and attr.{records.VARIANT} = "{variant}"'
    with repo.core.reading() as session:
        found = pages.find(session, asked, limit=_LOOK_BACK).states
    return next(
        (state for state in found if state.status.is_restorable and repo.core.tiers.has(state.uid)),
        None,
    )


# --- At a worker ---


class Link:
    """A worker's private repository, and its connection to the explorer, for the time of one
    variant. The caller closes it.

    ``url`` is the address at which the worker serves its states to other workers. A thread sends a
    heartbeat to the explorer, and pushes the newest durable state of the variant.

    :raises Unavailable: the explorer serves no address, or does not answer at any.
    """

    def __init__(
        self, share: Share, claim: str, config: Config, threads: int, of: Assignment
    ) -> None:
        # the transport takes a while to import, and few studies share
        from datastates.transport.peer import connect

        failure = Unavailable("it serves no address")
        for url in share.urls:
            try:
                self._peer = connect(url, token=share.token, timeout_s=_CONNECT_S)
                break
            except Disconnected as exc:
                failure = exc
        else:
            raise failure
        self._share, self._of = share, of
        # further tiers are the explorer's to fill, and to prune
        self.repository = repository_at(private_location(claim), replace(config, tiers=()), threads)
        self.url = _served(self.repository, share.token, towards=self._peer.urls[0])
        self._branch = records.branch_of(of.study, of.variant.name)
        self._answered = time.monotonic()
        self._pushed: set[str] = set()
        self._came: dict[str, str] = {}
        self._over = threading.Event()
        self._beats = threading.Thread(
            target=self._beat, name="datastates-explorer-watch", daemon=True
        )
        self._beats.start()

    def check(self) -> None:
        """Raise if the explorer has not answered for the time of a lease.

        :raises Cancelled: it has not.
        """
        if time.monotonic() - self._answered > _LEASE_S:
            raise Cancelled(
                f"the explorer at {self._peer.urls[0]} has not answered for {_LEASE_S:.0f} s, and"
                " what was captured stays on this machine: explore again to resume"
            )

    def place(self, sources: Sequence[str]) -> None:
        """Put the variant's branch where the explorer has it, unless the branch here is ahead.

        ``sources`` are workers that may have the state at which it starts.
        """
        try:
            at = self._peer.state(self._branch).uid
        except NotFound:
            at = None
        base = at or self._of.origin
        self.fetch(base, sources)
        refs = records.refs_of(self.repository)
        ref = refs.get(self._branch)
        path = [] if ref is None else self.repository.log(ref.state)
        if ref is not None and base not in {state.uid for state in path}:
            done = records.done_tag(self._of.study, self._of.variant.name)
            for name in {self._branch, done} & refs.keys():
                self.repository.delete_ref(name)
            ref = None
        if ref is None and at is not None:
            self.repository.branch(self._branch, at)

    def fetch(self, uid: str, sources: Sequence[str]) -> str:
        """Bring a state into this repository, unless it is here; returns where it came from."""
        if uid not in self._came:
            if records.is_in_memory(self.repository, uid):
                self._came[uid] = CAPTURED
            elif records.is_here(self.repository, uid):
                self._came[uid] = "disk"
            else:
                clone(self.repository, uid, [*sources, self._peer.urls[0]], self._share.token)
                self._came[uid] = "peer"
        return self._came[uid]

    def deliver(self, state: State) -> None:
        """Push a state to the explorer, again if that fails. The explorer itself pulls a state of
        several parts.

        :raises Cancelled: the explorer does not answer any more.
        """
        while state.world_size == 1 and state.uid not in self._pushed:
            self.check()
            try:
                self._push(state)
            except Unavailable as exc:
                _logger.warning("state %s is pushed again: %s", state.uid[:10], exc)
                time.sleep(_BEAT_S)

    def close(self) -> None:
        """Push the newest durable state, and disconnect."""
        self._over.set()
        self._beats.join()
        with suppress(DatastatesError):
            self._push_newest()
        self._peer.close()

    def _beat(self) -> None:
        pushed = time.monotonic()
        while not self._over.wait(_BEAT_S):
            try:
                self._peer.state(records.start_tag(self._of.study))
                self._note_answer()
                if time.monotonic() - pushed >= _PUSH_S:
                    self._push_newest()
                    pushed = time.monotonic()
            except DatastatesError as exc:
                _logger.info("the explorer at %s does not answer: %s", self._peer.urls[0], exc)

    def _note_answer(self, *_: int) -> None:
        self._answered = time.monotonic()

    def _push_newest(self) -> None:
        ref = records.refs_of(self.repository).get(self._branch)
        states = [] if ref is None else self.repository.log(ref.state, limit=_LOOK_BACK)
        ours = (each for each in states if each.attributes.get(records.DIGEST) == self._of.digest)
        state = next((each for each in ours if each.status is Status.DURABLE), None)
        if state is not None and state.world_size == 1 and state.uid not in self._pushed:
            self._push(state)

    def _push(self, state: State) -> None:
        self._peer.push(state.uid, repo=self.repository, on_progress=self._note_answer)
        self._pushed.add(state.uid)


def private_location(claim: str) -> Location:
    """The repository of this machine for a study, in the folder for temporary files (``TMPDIR``).
    Workers of one machine share it.

    :raises Unavailable: the folder belongs to another user.
    """
    root = Path(tempfile.gettempdir()) / f"datastates-{claim}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise Unavailable(f"{root} belongs to another user: set TMPDIR to another folder")
    return locate(root, environ={})


def clone(repository: Repository, uid: str, urls: Sequence[str], token: str) -> None:
    """Bring a state into the repository's memory from the sources that have it.

    :raises DatastatesError: no source has it.
    """
    from datastates.transport.peer import connect

    with connect(tuple(dict.fromkeys(urls)), token=token, timeout_s=_CONNECT_S) as peer:
        came = peer.clone(uid, repo=repository)
    _logger.debug("state %s came from %s", uid[:10], ", ".join(came.by_source))


_servers: WeakKeyDictionary[Repository, tuple[str, Server]] = WeakKeyDictionary()


def _served(repository: Repository, token: str, *, towards: str) -> str:
    """The address at which this process serves its states to workers of the study with the
    token."""
    known = _servers.get(repository)
    if known is None or known[0] != token:
        if known is not None:
            known[1].close()
        host = source_address(urlsplit(towards).hostname or "") or "127.0.0.1"
        known = token, repository.serve(f"tcp://{host}:0", token=token)
        _servers[repository] = known
    return known[1].url


def source_address(host: str) -> str | None:
    """The IPv4 address of this machine from which it reaches another one; None if there is no
    route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent: the kernel only picks the interface
        except OSError:
            return None
        return str(probe.getsockname()[0])
