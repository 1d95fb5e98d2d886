"""Browsing, cloning and pushing what another process serves; here both ends are in one process,
over both transports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import NotFound, State, Status, Unavailable, values
from datastates.errors import InvalidInput, OverBudget, SyntaxProblem
from datastates.lineage.states import EdgeKind
from datastates.lineage.write import clones
from tests.support.records import clones_of
from tests.test_repository import memory_held
from tests.transport.clones.peers.pairs import MIB, Made, Training, grown, train

# --- browsing -------------------------------------------------------------------------------------


def test_a_peer_browses_as_the_repository_itself_does(made: Made, url: str) -> None:
    repo = made.repo()
    train(repo, Training(0))
    repo.tag("warm", "main~1", message="half way")
    repo.core.drain()  # the tagged state becomes durable meanwhile
    peer = made.peer(repo.serve(url))

    assert [(ref.name, ref.kind, ref.state, ref.message) for ref in peer.refs()] == [
        (ref.name, ref.kind, ref.state, ref.message) for ref in repo.refs()
    ]
    assert peer.state("main~2") == repo.state("main~2")
    assert peer.log("main") == repo.log("main")
    assert peer.log("main", limit=2) == repo.log("main", limit=2)
    assert (
        peer.find("step > 1 and attr.kind = 'toy'")
        == repo.find("step > 1 and attr.kind = 'toy'")
        != []
    )
    assert len(peer.find("step > 0", limit=2)) == 2


def test_long_histories_come_in_pages(made: Made, url: str) -> None:
    repo = made.repo()
    uids = grown(repo, count=2_500, branch="long")
    peer = made.peer(repo.serve(url))

    assert [state.uid for state in peer.log("long")] == uids[::-1]
    assert [state.uid for state in peer.log("long", limit=1_700)] == uids[::-1][:1_700]
    assert {state.uid for state in peer.find("step >= 0")} == set(uids)


def test_texts_that_are_too_long_to_travel_are_refused_or_cut(
    made: Made, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, other, training = made.repo(), made.repo(), Training(0)
    run = train(repo, training, 1)
    with pytest.raises(InvalidInput, match="message has 16385 characters: at most 16384 fit"):
        run.capture(message="x" * 16_385)
    with pytest.raises(InvalidInput, match="at most 16384 fit"):
        repo.tag("long", "main", message="x" * 16_385)
    with pytest.raises(InvalidInput, match="there are 10001 metrics: a state has at most 10000"):
        run.capture(metrics={f"m{number}": 0.0 for number in range(10_001)})
    with monkeypatch.context() as earlier:
        earlier.setattr(values, "MESSAGE_LENGTH", 1 << 20)
        earlier.setattr(values, "NAMES", 1 << 20)
        metrics = {f"m{number}": float(number) for number in range(10_001)}
        run.capture(message="x" * 16_385, metrics=metrics).wait()
        repo.tag("long", "main", message="y" * 16_385)
    peer = made.peer(repo.serve(url))

    said = peer.log("main")[0]
    assert said.message == "x" * 16_383 + "…"
    assert len(said.metrics) == 10_000
    assert [len(ref.message or "") for ref in peer.refs()] == [16_384, 0]
    assert peer.clone("main", repo=other, tags=True).state.uid == said.uid


def test_errors_come_as_what_they_were(made: Made, url: str) -> None:
    repo = made.repo()
    train(repo, Training(0), 1)
    peer = made.peer(repo.serve(url))

    with pytest.raises(NotFound, match="mian"):
        peer.state("mian")
    with pytest.raises(NotFound, match="mian"):
        peer.clone("mian", objects=Training(1).objects)
    with pytest.raises(SyntaxProblem) as caught:
        peer.find("step >> 3")
    with pytest.raises(SyntaxProblem) as own:
        repo.find("step >> 3")
    assert (caught.value.column, caught.value.text, str(caught.value)) == (
        own.value.column,
        own.value.text,
        str(own.value),
    )
    with pytest.raises(InvalidInput, match="give one of them"):
        peer.clone("main")


# --- into live objects ----------------------------------------------------------------------------


@pytest.mark.parametrize("atomic", [True, False, None])
def test_objects_are_what_the_sources_are(made: Made, url: str, atomic: bool | None) -> None:
    ours, theirs = Training(0, 1024), Training(1, 1024)
    repo = made.repo()
    train(repo, ours)
    peer = made.peer(repo.serve(url))
    assert theirs.optimizer.state == {}

    cloned = peer.clone("main", objects=theirs.objects, atomic=atomic)

    assert theirs.bits() == ours.bits()
    assert cloned.state == repo.state("main")
    assert cloned.report is not None
    assert (
        cloned.bytes_moved
        == sum(cloned.by_source.values())
        >= 3 * 4 * sum(value.numel() for value in ours.model.parameters())
    )


def test_only_what_is_named_is_moved(made: Made, url: str) -> None:
    ours, theirs = Training(0, 1024), Training(1, 1024)
    repo = made.repo()
    train(repo, ours)
    server = repo.serve(url)

    made.peer(server).clone("main", objects=theirs.objects, only="model")

    for mine, its in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert theirs.optimizer.state == {}
    assert server.stats().bytes_sent < 0.8 * repo.state("main").bytes_total


def test_what_does_not_fit_is_refused_before_a_byte_moves(made: Made, url: str) -> None:
    ours, other = Training(0), Training(1, 128)
    repo = made.repo()
    train(repo, ours)
    server = repo.serve(url)
    before = other.bits()

    with pytest.raises(InvalidInput, match=r"256"):
        made.peer(server).clone("main", objects=other.objects)

    assert server.stats().bytes_sent == 0
    assert other.bits() == before


def test_a_clone_is_one_state_while_training_goes_on(made: Made, url: str) -> None:
    """The arena holds few states: what is being cloned is pinned, and captures evict the others."""
    ours, theirs = Training(0, 1024), Training(1, 1024)
    repo = made.repo(slots=24)
    run = train(repo, ours, 2)
    peer = made.peer(repo.serve(url))
    bits = {run.capture().wait().uid: ours.bits()}

    for _ in range(6):
        transfer = peer.begin_clone("main", objects=theirs.objects)
        for _ in range(3):
            ours.step()
            bits[run.capture().wait().uid] = ours.bits()
        assert transfer.wait().state.uid in bits
        assert theirs.bits() == bits[transfer.state.uid]
    assert any(state.status is Status.EVICTED for state in repo.log("main"))


def test_a_training_goes_on_bit_for_bit_from_a_clone(made: Made, url: str) -> None:
    ours, theirs = Training(0), Training(1)
    repo, other = made.repo(), made.repo()
    train(repo, ours)
    peer = made.peer(repo.serve(url))

    cloned = peer.clone("main", repo=other)
    further = [ours.step() for _ in range(5)]
    with other.track(**theirs.objects, branch="here", start=cloned.state.uid) as run:
        again = [theirs.step() for _ in range(5)]
        now = run.capture().wait()

    assert again == further
    assert theirs.bits() == ours.bits()
    assert other.state("here~1").uid == cloned.state.uid
    assert other.state(now.uid).step == cloned.state.step + 1


# --- into a repository ----------------------------------------------------------------------------


def facts(state: State) -> tuple[Any, ...]:
    """What a state is in every lineage."""
    return (
        state.uid,
        state.digest,
        state.step,
        state.metrics,
        state.attributes,
        state.message,
        state.created_at,
        state.edges,
        state.parents,
    )


def test_a_repository_takes_over_a_state_with_all_that_led_to_it(made: Made, url: str) -> None:
    repo, other = made.repo(), made.repo()
    train(repo, Training(0), 4)
    side = grown(
        repo, "".join(state.uid for state in repo.log("main", limit=1)), kind=EdgeKind.MERGE
    )[0]
    repo.tag("warm", "main~2", message="half way")
    peer = made.peer(repo.serve(url))

    cloned = peer.clone("main", repo=other, tags=True)

    assert side not in {state.uid for state in other.log(cloned.state.uid)}, "it is no ancestor"
    assert list(map(facts, other.log(cloned.state.uid))) == list(map(facts, repo.log("main")))
    assert [state.status for state in other.log(cloned.state.uid)] == [
        Status.CAPTURED,
        *[Status.EVICTED] * 3,
    ]
    assert [(ref.name, ref.state, ref.message) for ref in other.refs()] == [
        ("warm", repo.state("warm").uid, "half way")
    ]
    theirs, ours = Training(1), Training(2)
    other.restore(cloned.state.uid, objects={**theirs.objects, "rng": datastates.RngState()})
    repo.restore("main", objects={**ours.objects, "rng": datastates.RngState()})
    assert theirs.bits() == ours.bits()
    with other.core.database.read() as session, repo.core.database.read() as there:
        assert [each.source_repository for each in clones_of(session, cloned.state.uid)] == [
            clones.repository_uid(there)
        ]


def test_a_second_clone_into_a_repository_moves_nothing(made: Made, url: str) -> None:
    repo, other = made.repo(), made.repo()
    train(repo, Training(0, 1024))
    server = repo.serve(url)
    peer = made.peer(server)
    first = peer.clone("main", repo=other)
    sent, held = server.stats().bytes_sent, memory_held(other)

    second = peer.clone("main", repo=other)

    assert first.bytes_moved == sent > 0
    assert (second.bytes_moved, server.stats().bytes_sent, memory_held(other)) == (0, sent, held)
    assert second.state.uid == first.state.uid


def test_a_fork_that_shares_nine_tenths_moves_one_tenth(made: Made, url: str) -> None:
    tensors = {f"layer-{number}": torch.full((MIB,), float(number)) for number in range(20)}
    repo, other = made.repo(slots=64), made.repo(slots=64)
    run = repo.track(tensors=tensors, rng=False)
    run.capture().wait()
    server = repo.serve(url)
    peer = made.peer(server)
    peer.clone("main", repo=other)
    whole = server.stats().bytes_sent
    tensors["layer-3"].add_(0.5)
    tensors["layer-7"].add_(0.5)
    run.capture().wait()

    peer.clone("main", repo=other)

    moved = server.stats().bytes_sent - whole
    assert whole >= 80 * MIB
    assert 0.1 * whole <= moved <= 0.101 * whole


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A database that several open, to be named before ``made``: it outlives them."""
    if request.param == "postgresql":
        return {"where": request.getfixturevalue("postgresql_url"), "packs": tmp_path / "packs"}
    return {"where": tmp_path / "shared"}


def test_processes_that_share_a_database_add_a_replica(
    where: dict[str, Any], made: Made, url: str
) -> None:
    repo, other = made.repo(**where), made.repo(**where)
    ours, theirs = Training(0), Training(1)
    train(repo, ours)
    before = list(map(facts, repo.log("main")))

    cloned = made.peer(repo.serve(url)).clone("main", repo=other)

    assert list(map(facts, other.log("main"))) == before
    other.restore(cloned.state.uid, objects={**theirs.objects, "rng": datastates.RngState()})
    assert theirs.bits() == ours.bits()
    with other.core.database.read() as session:
        arrivals = clones_of(session, cloned.state.uid)
        assert [each.source_repository for each in arrivals] == [clones.repository_uid(session)]


def test_a_copy_of_a_repository_takes_over_what_came_after_it_was_copied(
    made: Made, url: str
) -> None:
    run = train(source := made.repo(made.folder / "original"), Training(0))
    run.capture().wait("durable")
    shutil.copytree(made.folder / "original", made.folder / "copy")
    newest = [run.capture().wait() for _ in range(3)][-1]
    copy = made.repo(made.folder / "copy")
    made.peer(source.serve(url)).clone("main", repo=copy)
    assert [state.uid for state in copy.log(newest.uid)] == [
        state.uid for state in source.log("main")
    ]


def test_a_state_that_does_not_fit_leaves_nothing(made: Made, url: str) -> None:
    repo, small = made.repo(), made.repo(slots=2)
    train(repo, Training(0, 2048), 1)
    server = repo.serve(url)

    with pytest.raises(OverBudget):
        made.peer(server).clone("main", repo=small)

    assert memory_held(small) == 0
    assert (small.refs(), small.find("step >= 0")) == ([], [])
    assert server.stats().bytes_sent == 0


def test_an_evicted_state_names_the_nearest_that_is_there(made: Made, url: str) -> None:
    repo = made.repo(slots=4)
    weight = torch.full((1 << 20,), -2.0)  # 4 MiB
    run = repo.track(weights={"weight": weight}, rng=False)
    kept = run.capture().wait("durable")
    weight.fill_(-1)
    gone = run.capture().wait()
    for number in range(8):
        weight.fill_(number)
        run.capture().wait()
    repo.flush()
    assert repo.state(gone.uid).status is Status.EVICTED
    peer = made.peer(repo.serve(url))

    with pytest.raises(Unavailable) as caught:
        peer.clone(gone.uid, weights={"weight": weight})

    assert caught.value.nearest == kept.uid


def test_a_state_on_disk_is_cloned_too(made: Made, url: str) -> None:
    ours, theirs = Training(0), Training(1)
    with datastates.open(made.folder / "disk") as writer:
        train(writer, ours, 1)
    reader = made.repo(made.folder / "disk")

    made.peer(reader.serve(url)).clone(
        "main", objects={**theirs.objects, "rng": datastates.RngState()}
    )

    assert theirs.bits() == ours.bits()


# --- pushing --------------------------------------------------------------------------------------


def test_a_push_takes_a_state_and_its_ancestry_there(made: Made, url: str) -> None:
    repo, other = made.repo(), made.repo()
    ours, theirs = Training(0), Training(1)
    train(repo, ours)
    repo.tag("warm", "main~1")
    if url.startswith("ucx"):
        with pytest.raises(InvalidInput, match=r"must show a token, on 127\.0\.0\.1 too"):
            other.serve(url, is_writable=True)
    peer = made.peer(
        other.serve(url, token="a token that is long enough", is_writable=True),
        token="a token that is long enough",
    )

    pushed = peer.push("main", repo=repo, tags=True)

    assert list(map(facts, other.log(pushed.state.uid))) == list(map(facts, repo.log("main")))
    assert [ref.name for ref in other.refs()] == ["warm"]
    other.restore(pushed.state.uid, objects={**theirs.objects, "rng": datastates.RngState()})
    assert theirs.bits() == ours.bits()


def test_a_server_that_is_not_writable_takes_no_push(made: Made, url: str) -> None:
    repo, other = made.repo(), made.repo()
    train(repo, Training(0), 1)
    peer = made.peer(other.serve(url))

    with pytest.raises(InvalidInput, match="is_writable=True"):
        peer.push("main", repo=repo)

    assert other.find("step >= 0") == []
