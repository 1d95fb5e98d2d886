"""Several sources and receivers, and what one can do with a clone that is under way."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading

import pytest
import torch

import datastates
from datastates import State
from datastates.errors import Cancelled, Closed
from tests.transport.clones.peers.pairs import MIB, Made, Paused, Training, memory_free, train

# --- several sources, several receivers -----------------------------------------------------------


def test_three_sources_share_the_work(made: Made, url: str) -> None:
    tensors = {f"layer-{number}": torch.full((MIB,), float(number)) for number in range(30)}
    repos = [made.repo(slots=34) for _ in range(3)]
    repos[0].track(tensors=tensors, rng=False).capture().wait()
    servers = [repos[0].serve(url)]
    first = made.peer(servers[0])
    for repo in repos[1:]:
        first.clone("main", repo=repo)
        repo.branch("main", first.state("main").uid)
        servers.append(repo.serve(url))
    sent = [server.stats().bytes_sent for server in servers]
    into = {name: torch.zeros(MIB) for name in tensors}

    cloned = made.peer([server.url for server in servers]).clone("main", tensors=into)

    assert all(torch.equal(into[name], value) for name, value in tensors.items())
    shares = [
        server.stats().bytes_sent - before for server, before in zip(servers, sent, strict=True)
    ]
    assert sum(shares) == cloned.bytes_moved >= 120 * MIB
    assert all(0.2 <= share / sum(shares) <= 0.5 for share in shares)
    assert sorted(cloned.by_source.values()) == sorted(shares)


def test_a_source_with_another_state_of_that_name_is_left_out(
    made: Made, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Training(0), Training(1)
    repo, stranger = made.repo(), made.repo()
    train(repo, ours)
    train(stranger, Training(5), 1)
    servers = [repo.serve(url), stranger.serve(url)]

    with caplog.at_level(logging.WARNING, "datastates"):
        made.peer([server.url for server in servers]).clone(
            "main", objects={**theirs.objects, "rng": datastates.RngState()}
        )

    assert theirs.bits() == ours.bits()
    assert servers[1].stats().bytes_sent == 0
    assert "which is left out" in caplog.text


def test_a_state_that_only_the_second_source_has_comes_with_all_that_led_to_it(
    made: Made, url: str
) -> None:
    first, second, here = made.repo(), made.repo(), made.repo()
    train(first, Training(5), 1)
    run = train(second, Training(0))
    second.tag("warm", "main~1")
    uid = run.head.uid if run.head is not None else ""
    peer = made.peer([first.serve(url).url, second.serve(url).url])

    assert peer.state(uid).uid == uid
    assert peer.clone(uid, repo=here, tags=True).state.uid == uid
    assert [state.uid for state in here.log(uid)] == [state.uid for state in second.log(uid)]
    assert [ref.name for ref in here.refs()] == ["warm"]


def test_one_copy_leaves_the_source_of_a_chain(made: Made, url: str) -> None:
    tensors = {f"layer-{number}": torch.full((MIB,), float(number)) for number in range(12)}
    repo = made.repo(slots=16)
    repo.track(tensors=tensors, rng=False).capture().wait()
    server = repo.serve(url)
    receivers = [{name: torch.zeros(MIB) for name in tensors} for _ in range(4)]
    peers = [made.peer(server) for _ in receivers]
    errors: list[BaseException] = []

    transfers = [
        peer.begin_clone("main", tensors=into, chain=True)
        for peer, into in zip(peers, receivers, strict=True)
    ]

    def end(transfer: datastates.Transfer) -> None:
        try:
            transfer.wait()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=end, args=(transfer,)) for transfer in transfers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert all(
        torch.equal(into[name], value) for into in receivers for name, value in tensors.items()
    )
    assert server.stats().bytes_sent <= 1.05 * repo.state("main").bytes_total


# --- transfers ------------------------------------------------------------------------------------


def test_progress_only_grows_and_ends_at_the_total(made: Made, url: str) -> None:
    repo = made.repo()
    train(repo, Training(0, 1024))
    seen: list[tuple[int, int]] = []

    cloned = made.peer(repo.serve(url)).clone(
        "main", objects=Training(1, 1024).objects, on_progress=lambda *now: seen.append(now)
    )

    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {cloned.bytes_moved}
    assert seen[-1][0] == cloned.bytes_moved


@pytest.mark.parametrize("way", ["clone", "push"])
def test_a_transfer_ends_although_what_shows_its_progress_fails(
    made: Made, url: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    repo, other = made.repo(), made.repo()
    train(repo, Training(0), 1)
    token = "a token that is long enough"

    def show(done: int, total: int) -> None:
        raise ZeroDivisionError

    if way == "clone":
        state = (
            made.peer(repo.serve(url, token=token), token=token)
            .clone("main", repo=other, on_progress=show)
            .state
        )
    else:
        server = other.serve(url, token=token, is_writable=True)
        state = made.peer(server, token=token).push("main", repo=repo, on_progress=show).state
    assert other.load(state.uid)
    assert caplog.text.count("on_progress failed") == 1


def test_a_clone_is_awaited_in_the_users_own_loop(made: Made, url: str) -> None:
    ours, theirs = Training(0), Training(1)
    repo = made.repo()
    run = train(repo, ours)  # held: a tracker that nobody holds ends, and its head becomes durable
    peer = made.peer(repo.serve(url))

    async def clone() -> State:
        return (await peer.begin_clone("main", objects=theirs.objects)).state

    assert asyncio.run(clone()) == repo.state("main")
    assert theirs.bits() == ours.bits()
    run.close()


def test_a_wait_that_is_too_short_leaves_the_clone_going(made: Made, url: str) -> None:
    ours, theirs, paused = Training(0, 1024), Training(1, 1024), Paused()
    repo = made.repo()
    train(repo, ours)

    transfer = made.peer(repo.serve(url)).begin_clone(
        "main", objects=theirs.objects, on_progress=paused
    )
    with pytest.raises(TimeoutError, match="goes on"):
        transfer.wait(0.01)
    assert not transfer.is_done
    paused.go.set()
    transfer.wait()

    assert transfer.is_done
    assert theirs.bits() == ours.bits()


def test_a_cancelled_clone_leaves_objects_as_they_were(made: Made, url: str) -> None:
    ours, theirs, paused = Training(0, 1024), Training(1, 1024), Paused()
    repo = made.repo()
    train(repo, ours)
    peer = made.peer(repo.serve(url))
    before = theirs.bits()

    transfer = peer.begin_clone("main", objects=theirs.objects, atomic=True, on_progress=paused)
    assert paused.began.wait(60)
    transfer.cancel()
    paused.go.set()
    for _ in range(2):
        with pytest.raises(Cancelled, match="was cancelled"):
            transfer.wait()

    assert theirs.bits() == before
    peer.clone("main", objects=theirs.objects)
    assert theirs.bits() == ours.bits()


def test_a_task_that_is_cancelled_cancels_its_clone(made: Made, url: str) -> None:
    theirs, paused = Training(1, 1024), Paused()
    repo = made.repo()
    train(repo, Training(0, 1024))
    peer = made.peer(repo.serve(url))
    before = theirs.bits()
    transfer = peer.begin_clone("main", objects=theirs.objects, atomic=True, on_progress=paused)

    async def give_up() -> None:
        async def wait() -> None:
            await transfer

        waiting = asyncio.create_task(wait())
        await asyncio.to_thread(paused.began.wait, 20)
        waiting.cancel()
        await asyncio.sleep(0)
        paused.go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert transfer.is_done
    assert isinstance(transfer.error, Cancelled)
    assert theirs.bits() == before


@pytest.mark.parametrize("when", ["at once", "too late"])
def test_ctrl_c_gives_up_a_clone_in_a_repository_and_leaves_nothing(
    made: Made, url: str, when: str
) -> None:
    """A signal that another thread takes is seen by the one that waits when its wait is over:
    every byte has come by then."""
    paused, main = Paused(), threading.get_ident()
    repo, other = made.repo(), made.repo()
    train(repo, Training(0, 1024))
    transfer = made.peer(repo.serve(url)).begin_clone("main", repo=other, on_progress=paused)
    assert paused.began.wait(60)

    def interrupt() -> None:
        if when == "at once":
            signal.pthread_kill(main, signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)
        paused.go.set()

    timer = threading.Timer(0.05, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        transfer.wait()
    timer.join()

    assert transfer.is_done
    assert isinstance(transfer.error, Cancelled)
    assert memory_free(other) == 32 * 4 * MIB
    assert other.find("step >= 0") == []


def test_a_closed_peer_says_so(made: Made, url: str) -> None:
    repo = made.repo()
    train(repo, Training(0), 1)
    peer = made.peer(repo.serve(url))
    peer.close()
    peer.close()

    with pytest.raises(Closed, match="connect again"):
        peer.refs()
