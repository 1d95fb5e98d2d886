"""Lists that a peer gives page by page: each comes to an end, whatever the peer does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from datastates import Peer, Repository
from datastates.errors import Disconnected, PeerFault
from datastates.transport import sources, transfer
from datastates.transport.protocol import StatePage, StateRecord
from datastates.transport.serving import RepositoryStore
from tests.transport.clones.peers.pairs import Made, Training, train
from tests.transport.stores import record


def served(made: Made) -> Repository:
    """A repository with one state."""
    repo = made.repo()
    train(repo, Training(0), 1)
    return repo


def lying(pages: Iterator[list[StateRecord]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is listed next: these pages, and always one more."""

    async def page(self: object, rev: str, **options: object) -> StatePage:
        await asyncio.sleep(0)
        return StatePage(tuple(next(pages)), "more")

    monkeypatch.setattr("datastates.transport.session.Session.log", page)
    monkeypatch.setattr("datastates.transport.session.Session.find", page)


def strangers() -> Iterator[list[StateRecord]]:
    """A page of two states that nobody has seen, for ever; each has a parent that is not there
    either."""
    for number in itertools.count(1):
        yield [record(f"{2 * number + n:024x}", step=number) for n in range(2)]


def listed(kind: str, peer: Peer, made: Made) -> None:
    """Ask for a list, as a user does."""
    if kind == "clone":
        peer.clone("main", repo=made.repo())
    else:
        peer.log("main") if kind == "log" else peer.find("step > 0")


@pytest.mark.parametrize("kind", ["log", "find", "clone"])
def test_a_list_without_end_is_given_up_in_time(
    made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = made.peer(served(made).serve("memory://"), timeout_s=0.1)
    monkeypatch.setattr(
        "datastates.transport.receive_states.lacks_parents", lambda repo, states: True
    )
    lying(strangers(), monkeypatch)

    with pytest.raises(Disconnected, match="without coming to an end for 2 s"):
        listed(kind, peer, made)


@pytest.mark.parametrize("kind", ["log", "clone"])
def test_a_list_that_goes_round_is_the_peers_fault(
    made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = made.peer(served(made).serve("memory://"))
    monkeypatch.setattr(
        "datastates.transport.receive_states.lacks_parents", lambda repo, states: True
    )
    lying(itertools.repeat([record("ab" * 12)]), monkeypatch)

    with pytest.raises(PeerFault, match="twice"):
        listed(kind, peer, made)


@pytest.mark.parametrize("kind", ["log", "find", "clone"])
def test_a_list_that_takes_too_much_memory_is_the_peers_fault(
    made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sources, transfer):
        monkeypatch.setattr(module, "LISTED_BYTES", 1 << 20)
    monkeypatch.setattr(
        "datastates.transport.receive_states.lacks_parents", lambda repo, states: True
    )
    numbers = itertools.count()

    def page(self: RepositoryStore, what: str, limit: int, after: str | None) -> StatePage:
        return StatePage(
            tuple(record(f"{next(numbers):024x}", message="m" * 10_000) for _ in range(limit)),
            "more",
        )

    monkeypatch.setattr(RepositoryStore, "log", page)
    monkeypatch.setattr(RepositoryStore, "find", page)
    peer = made.peer(served(made).serve("memory://"))
    assert len(peer.log("main", limit=11)) == 11
    with pytest.raises(PeerFault, match="more than 1048576 bytes of memory: pass a limit"):
        listed(kind, peer, made)
