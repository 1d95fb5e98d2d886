"""Who is let in, that servers, peers and repositories end in any order, and that nothing of them
stays."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Peer, Repository, Server
from datastates.errors import Closed, DatastatesError, Disconnected, InvalidInput, Unauthorized
from datastates.maintenance.location import DATABASE
from datastates.storage.memory import MemoryTier
from tests.support import warm
from tests.support.secrets_kept import keep
from tests.transport.clones.peers.pairs import SLOT, Made, Paused, Training, memory_free, train

TOKEN = "a token that is long enough"


# --- who is let in --------------------------------------------------------------------------------


def test_a_token_is_needed_where_there_is_one(
    made: Made, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = made.repo()
    train(repo, Training(0), 1)
    server = repo.serve(url, token=TOKEN)

    for wrong in (None, "another token, long enough", TOKEN + "!"):
        with pytest.raises(Unauthorized):
            made.peer(server, token=wrong)
    assert server.stats().refused == 3
    keep(tmp_path / "token", TOKEN + "\n")
    assert (
        made.peer(server, token=TOKEN).refs()
        == made.peer(server, token_file=tmp_path / "token").refs()
        != []
    )
    monkeypatch.setenv("DATASTATES_TOKEN", TOKEN)
    made.peer(server).clone("main", objects=Training(1).objects)
    made.peer(repo.serve(url)).refs()


def test_who_has_a_token_talks_to_nobody_without_it(made: Made, url: str) -> None:
    with pytest.raises(Unauthorized):
        made.peer(made.repo().serve(url), token=TOKEN)


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(("server", "peer", "repo"))), ids="-".join)
def test_ends_come_in_any_order_and_twice(made: Made, url: str, order: tuple[str, ...]) -> None:
    repo = made.repo()
    train(repo, Training(0), 1)
    server = repo.serve(url)
    peer = made.peer(server)
    ends: dict[str, Server | Peer | Repository] = {"server": server, "peer": peer, "repo": repo}
    peer.refs()

    for name in (*order, *order):
        ends[name].close()

    with pytest.raises(Closed):
        peer.refs()
    with pytest.raises(Disconnected):
        datastates.connect(server.url, timeout_s=2)


@pytest.mark.usefixtures("small_requests")
@pytest.mark.parametrize("who", ["server", "peer"])
def test_a_clone_under_way_ends_with_either_side(made: Made, url: str, who: str) -> None:
    """The state has more chunks than are asked for at once, and the first one waits until the
    end has begun."""
    tensors, paused = (
        {f"layer-{number}": torch.full((1 << 20,), number + 1.0) for number in range(30)},
        Paused(),
    )
    into = {name: torch.zeros(1 << 20) for name in tensors}
    repo = made.repo()
    repo.track(tensors=tensors, rng=False).capture().wait()
    server = repo.serve(url)
    peer = made.peer(server, timeout_s=2)
    transfer = peer.begin_clone("main", tensors=into, atomic=True, on_progress=paused)
    assert paused.began.wait(60)
    closing = threading.Thread(
        target=peer.close if who == "peer" else lambda: server.close(grace_s=0)
    )
    closing.start()
    threading.Timer(0.5, paused.go.set).start()

    with pytest.raises(Closed if who == "peer" else Disconnected):
        transfer.wait(60)
    closing.join(60)
    assert not closing.is_alive()
    assert not any(tensor.any() for tensor in into.values())
    server.close()
    assert pins(repo) == 0


def pins(repo: Repository) -> int:
    """Readers that hold states in memory."""
    memory = repo.core.tiers.captured
    assert isinstance(memory, MemoryTier)
    return sum(state.readers for state in memory._states.values())


def lasting() -> Counter[str]:
    """What is open in this process, and its threads by what they are for; pools that grow to a
    bound are left out."""
    threads = [
        thread.name.split("_")[0]
        for thread in threading.enumerate()
        if not thread.name.startswith(("asyncio", "datastates-ucx_"))
    ]
    return Counter(threads) + Counter(
        name for name in map(_open_file, os.listdir("/proc/self/fd")) if DATABASE not in name
    )


def _open_file(descriptor: str) -> str:
    """What an open file is; sockets and their like by kind."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]
    except FileNotFoundError:
        return "closed meanwhile"


def succeed(url: str, repo: Repository, other: Repository) -> None:
    with repo.serve(url) as server, datastates.connect(server.url) as peer:
        peer.clone("main", objects=Training(1, 1024).objects)
        peer.clone("main", objects=Training(1, 1024).objects, atomic=False)
        peer.clone("main", objects=Training(1, 1024).objects, chain=True)


def fail(url: str, repo: Repository, other: Repository) -> None:
    with repo.serve(url, token=TOKEN) as server:
        with pytest.raises(Unauthorized):
            datastates.connect(server.url)
        with datastates.connect(server.url, token=TOKEN) as peer:
            for chain in (False, True):
                with pytest.raises(InvalidInput):
                    peer.clone("main", objects=Training(1, 128).objects, chain=chain)
            with pytest.raises(InvalidInput):
                peer.push("main", repo=repo)
            with pytest.raises(DatastatesError):
                peer.clone("nothing", repo=other)


def cancel(url: str, repo: Repository, other: Repository) -> None:
    with repo.serve(url) as server, datastates.connect(server.url) as peer:
        for chain in (False, True):
            wheres: list[dict[str, Any]] = [{"objects": Training(1, 1024).objects}, {"repo": other}]
            for where in wheres:
                paused = Paused()
                transfer = peer.begin_clone("main", on_progress=paused, chain=chain, **where)
                assert paused.began.wait(60)
                transfer.cancel()
                paused.go.set()
                with pytest.raises(DatastatesError):
                    transfer.wait()
        peer.begin_clone("main", objects=Training(1, 1024).objects).cancel()  # nobody waits for it


@pytest.mark.parametrize("work", [succeed, fail, cancel])
def test_nothing_stays(
    made: Made, url: str, work: Callable[[str, Repository, Repository], None]
) -> None:
    """The first time may leave what lives as long as the process: the loop's thread, the driver
    of UCX."""
    repo, other = made.repo(slots=64), made.repo(slots=64)
    train(repo, Training(0, 1024), 2)
    other.track(weight=torch.zeros(1), rng=False, branch="own")
    work(url, repo, other)
    free, before = memory_free(repo), lasting()

    for _ in range(3):
        work(url, repo, other)

    patience = threading.Event()
    for _ in range(1000):
        if not (lasting() - before) and not pins(repo):
            break
        patience.wait(0.02)
    assert lasting() - before == Counter()
    assert pins(repo) == 0
    assert (memory_free(repo), memory_free(other)) == (free, 64 * SLOT)


# --- forks ----------------------------------------------------------------------------------------

_FORK = """
import os, signal, sys, torch, datastates
from datastates.errors import Closed

signal.alarm(40)

torch.set_num_threads(1)
weights = {"weight": torch.arange(1000.0)}
with datastates.open(sys.argv[1]) as repo:
    repo.track(weights=weights, rng=False).capture().wait("durable")
    server = repo.serve(sys.argv[2])
    peer = datastates.connect(server.url)
    transfer = peer.begin_clone("main", weights={"weight": torch.zeros(1000)})
    child = os.fork()
    if not child:
        signal.alarm(30)
        code = 7
        for use in (peer.refs, transfer.wait, lambda: peer.clone("main", weights={})):
            try:
                use()
                code = 1
            except Closed as exc:
                assert "parent" in str(exc)
        with datastates.open(sys.argv[1]) as own, own.serve("memory://") as mine, datastates.connect(mine.url) as again:
            into = {"weight": torch.zeros(1000)}
            again.clone("main", weights=into)
            code = code if torch.equal(into["weight"], weights["weight"]) else 2
        peer.close()
        server.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    transfer.wait()
    into = {"weight": torch.zeros(1000)}
    peer.clone("main", weights=into)
    assert torch.equal(into["weight"], weights["weight"])
    peer.close()
"""


def test_a_forked_child_serves_and_clones_by_itself_and_leaves_its_parents_alone(
    tmp_path: Path, url: str
) -> None:
    """UCX itself works in the parent only."""
    command = [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-c",
        _FORK,
        str(tmp_path / "runs"),
        url,
    ]
    done = warm.run(command, capture_output=True, text=True, timeout=50, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
