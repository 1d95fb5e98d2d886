"""``datastates.connect``: another process's repository, to browse and to clone from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self, TypedDict, Unpack

from datastates import values
from datastates.config import Config, Data, data_plane
from datastates.errors import Closed, InvalidInput
from datastates.lineage.states import Ref, State
from datastates.opening.core import Opened, core_of
from datastates.transport import loop
from datastates.transport.clone.groups import Group, group_of
from datastates.transport.contract import Tls, tls_of
from datastates.transport.session.handshake import read_token
from datastates.transport.session.session import Session

from .landing import Shadows
from .listing import Page, all_pages
from .pull import Arrival, IntoObjects, IntoRepository, Pull
from .push import Push
from .records import ref_of
from .sources import Sources
from .together import clone_together
from .transfer import Cloned, Progress, Transfer

__all__ = ["Peer", "connect"]


def _revision(value: object) -> str:
    return values.text(values.revision(value, "rev"), "rev")  # it has to be sent


def _repository(value: object, what: str) -> object:
    core_of(value, what)
    return value


@values.takes(
    token=values.optional(values.token),
    token_file=values.optional(values.path),
    tls=values.optional(tls_of),
    timeout_s=values.seconds,
    data=values.optional(data_plane),
)
def connect(
    url: str | Sequence[str],
    *,
    token: str | bytes | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: Tls | None = None,
    timeout_s: float = 10.0,
    data: str | None = None,
) -> Peer:
    """Connect to a repository that another process serves; or to several, which then share the work of a clone.

        with repo.serve("tcp://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
            print(peer.refs())

    :param url: where the server listens; several urls become sources of one clone.
    :param token: the server's token; if not given, ``token_file`` is read, or else ``DATASTATES_TOKEN``.
    :param token_file: a file that holds the token.
    :param tls: certificates for TLS 1.3.
    :param timeout_s: a peer that is silent for this many seconds is treated as dead.
    :param data: the data plane that carries the bytes, as for ``Repository.serve``; None: as ``DATASTATES_DATA`` says.
    :raises Disconnected: the server does not answer (of several: none does).
    :raises Unauthorized: the token is missing or wrong.
    :raises Unsupported: the two sides have no data plane in common.
    """
    urls = tuple(values.patterns(url, "url") or ())
    if not urls:
        raise InvalidInput("connect needs a url, such as ucx://10.0.0.2:4711")
    carries = Config.from_environment().data if data is None else Data(data)
    sources = Sources(urls, read_token(token, token_file), tls, timeout_s, carries)
    loop.run(sources.sessions())
    return Peer(sources)


class CloneOptions(TypedDict, total=False):
    """The options of ``Peer.clone`` and ``Peer.begin_clone``; see there."""

    into: Mapping[str, object] | None
    repo: Opened | None
    only: str | Sequence[str] | None
    strict: bool
    atomic: bool | None
    skip_equal: bool
    tags: bool
    chain: bool
    on_progress: Progress | None
    group: Group | None


_CLONED = CloneOptions(
    into=None, repo=None, only=None, strict=True, atomic=None, skip_equal=False, tags=False, chain=False, on_progress=None, group=None
)


class Peer:
    """The repositories of other processes, as one: questions go to the first that answers. Safe from any thread but the transport's."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._shadows = Shadows()

    @property
    def urls(self) -> tuple[str, ...]:
        """The urls to which it is connected."""
        return self.sources.urls

    # --- the lineage -------------------------------------------------------------------------------------------------------

    def refs(self) -> list[Ref]:
        """Every branch and tag there, by name."""
        return [ref_of(record) for record in loop.run(self.sources.first(Session.refs))]

    def state(self, rev: str | State) -> State:
        """The state that a revision names there."""
        return next(iter(loop.run(self.sources.resolve(_revision(rev))).values()))

    @values.takes(limit=values.optional(values.count))
    def log(self, rev: str | State = "main", *, limit: int | None = None) -> list[State]:
        """A state and its ancestors there, newest first."""
        asked = _revision(rev)
        return self._listed(lambda session: partial(session.log, asked), limit)

    @values.takes(query=values.text, limit=values.optional(values.count))
    def find(self, query: str, *, limit: int | None = None) -> list[State]:
        """The states there that match a query."""
        return self._listed(lambda session: partial(session.find, query), limit)

    def _listed(self, question: Callable[[Session], Page], limit: int | None) -> list[State]:
        return loop.run(self.sources.listed(lambda session: all_pages(question(session), limit)))

    # --- clones ------------------------------------------------------------------------------------------------------------

    @values.unpacks(CloneOptions, **_CLONED)
    def clone(self, rev: str | State, **options: Unpack[CloneOptions]) -> Cloned:
        """Bring a state from the peer's memory into live objects, or into a repository's memory; every byte is checked.

            with repo.serve("tcp://127.0.0.1:0") as server, datastates.connect(server.url) as peer:
                peer.clone("main", into={"model": model, "optimizer": optimizer})

        :param rev: the state, by its name at the peer.
        :param into: live objects by name, as for ``Repository.restore``.
        :param repo: a repository that takes over the state with its ancestry; only chunks that it lacks are moved.
        :param only: which parts of the objects, as for ``Repository.restore``.
        :param strict: as for ``Repository.restore``.
        :param atomic: True changes the objects at the very end, all at once, which needs memory for a second copy. False receives
            tensors in place; a clone that fails leaves them *dirty*: trackers refuse to capture them until they are cloned into again
            or restored. None: True if there is memory for it.
        :param skip_equal: do not move chunks that the objects hold already (not with ``atomic``).
        :param tags: whether the tags of the ancestry come along to ``repo``.
        :param chain: whether receivers of one state pass it on to each other, so that one copy leaves the source.
        :param on_progress: called with the bytes that are done, and their total.
        :param group: the ranks of a job that clone the state together, each calling this with ``into`` and its own objects. Each is sent
            what it alone wants, and its share of what several want, which it passes on. All get the state that rank 0 finds; or all fail,
            and then no object has changed.
        :raises NotFound: the revision does not exist there.
        :raises Unavailable: the state's bytes are nowhere any more (or Disconnected: no source is left).
        :raises InvalidInput: the state does not fit the objects; nothing was moved.
        :raises Corrupt: a chunk came with a wrong digest twice.
        :raises Dirty: a clone in place failed; its cause says why.
        """
        group = options["group"]
        if group is None or group_of(group, "group").size == 1:
            with self.begin_clone(rev, **options) as transfer:
                return transfer.wait()
        into = options["into"]
        others = [name for name in ("repo", "skip_equal", "tags", "chain") if options[name]]
        if into is None or others or options["atomic"] is False:
            raise InvalidInput(
                "a group clones into live objects, all at once: give into={...}, and leave repo=, atomic=False, skip_equal=, tags= and "
                "chain= out; broadcast of a datastates.ranks group brings a state into the repository of each rank"
            )
        into, only = values.named(into, "into"), values.patterns(options["only"])
        strict, on_progress = values.flag(options["strict"], "strict"), options["on_progress"]
        return clone_together(self.sources, _revision(rev), into, group, only=only, strict=strict, on_progress=on_progress)

    @values.takes(
        into=values.optional(values.named),
        repo=values.optional(_repository),
        only=values.patterns,
        strict=values.flag,
        atomic=values.optional(values.flag),
        skip_equal=values.flag,
        tags=values.flag,
        chain=values.flag,
        resumable=values.flag,
        on_progress=values.optional(values.callback),
        group=values.optional(group_of),
    )
    @values.unpacks(CloneOptions, **_CLONED)
    def begin_clone(self, rev: str | State, *, resumable: bool = False, **options: Unpack[CloneOptions]) -> Transfer:
        """Start ``clone`` in the background: ``wait`` for it or ``await`` it, on the thread that owns the objects.

        :param rev: as for ``clone``.
        :param into: as for ``clone``.
        :param repo: as for ``clone``.
        :param only: as for ``clone``.
        :param strict: as for ``clone``.
        :param atomic: as for ``clone``.
        :param skip_equal: as for ``clone``.
        :param tags: as for ``clone``.
        :param chain: as for ``clone``.
        :param resumable: keep what came if it fails: ``Transfer.resume`` continues, ``Transfer.close`` releases it.
        :param on_progress: as for ``clone``.
        :param group: None, or a group of one: ranks that clone together must use ``clone``.
        """
        into, repo, group = options["into"], options["repo"], options["group"]
        if group is not None and group.size > 1:
            raise InvalidInput(
                "ranks clone together on their training threads: call clone(group=...), which returns once all have the state"
            )
        if (into is None) == (repo is None):
            raise InvalidInput("a clone goes into live objects (into={...}) or into a repository (repo=...): give one of them")
        opened = loop.run(self.sources.open(_revision(rev), chain=options["chain"]))
        try:
            arrival: Arrival
            if into is not None:
                arrival = IntoObjects(
                    opened,
                    into,
                    only=options["only"],
                    strict=options["strict"],
                    atomic=options["atomic"],
                    skip_equal=options["skip_equal"],
                    shadows=self._shadows,
                )
            else:
                assert repo is not None, "one of them is given"
                arrival = IntoRepository.of(self.sources, opened, repo.core, tags=options["tags"])
            return Transfer(Pull(opened, arrival, timeout_s=self.sources.timeout_s, is_kept=resumable), options["on_progress"])
        except BaseException:
            loop.run(opened.close())
            raise

    def push(self, rev: str | State, *, repo: Opened, tags: bool = False, on_progress: Progress | None = None) -> Cloned:
        """Bring a state of ``repo`` into the peer's memory, with its ancestry; the peer must be served with ``is_writable``.

        :param rev: the state, by its name in ``repo``.
        :param repo: the repository that has the state.
        :param tags: whether the tags of its ancestry go along.
        :param on_progress: called with the bytes that are done, and their total.
        :raises InvalidInput: the peer accepts no states.
        """
        return self.begin_push(rev, repo=repo, tags=tags, on_progress=on_progress).wait()

    @values.takes(repo=_repository, tags=values.flag, on_progress=values.optional(values.callback))
    def begin_push(self, rev: str | State, *, repo: Opened, tags: bool = False, on_progress: Progress | None = None) -> Transfer:
        """Start ``push`` in the background.

        :param rev: the state, by its name in ``repo``.
        :param repo: the repository that has the state.
        :param tags: whether the tags of its ancestry go along.
        :param on_progress: called with the bytes that are done, and their total.
        """
        return Transfer(Push(self.sources, repo.core, repo.core.state(_revision(rev)), tags=tags), on_progress)

    # --- the end -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connections; transfers under way fail. Idempotent."""
        if not self.sources.is_closed and self.sources.is_ours:
            self.sources.is_closed = True
            with suppress(Closed):  # the process is ending
                loop.run(self.sources.close())
            self._shadows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Peer {', '.join(self.urls)}{' (closed)' if self.sources.is_closed else ''}>"
