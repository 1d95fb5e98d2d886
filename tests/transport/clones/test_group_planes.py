"""Parts of states go from ranks to ranks, whatever these meet over and whatever carries the
bytes; and by the calls that hand states on."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config
from datastates.errors import DatastatesError, Unavailable, Unsupported
from datastates.ranks import SoloGroup, TorchGroup
from datastates.training.collective import find
from datastates.transport import same_host
from datastates.transport.contract import Tls
from tests.support.jobs import Kind, Say, job, need_mpi, run
from tests.transport.certificates import certificate
from tests.transport.clones.processes import MIB, make, same

HERE = "tests.transport.clones.test_group_planes"
TOKEN = "a token that is long enough for a job"
CHUNKS = 6
WIRE = {same_host.SWITCH: "0", "DATASTATES_TOKEN": TOKEN}
BUDGET = 3 * (CHUNKS + 4) * 4 * MIB


def tls_of(folder: str | None) -> Tls | None:
    if folder is None:
        return None
    made = Path(folder) / "certificate.pem"
    return Tls(certificate=made, key=Path(folder) / "key.pem", trusted=made)


def serve(folder: str, url: str, tls: str | None, data: str | None, say: Say) -> None:
    """Capture a state, each rank its part, and serve it until the end."""
    with datastates.open(
        folder, config=Config(memory_bytes=BUDGET, durable_interval_s=None)
    ) as repo:
        tracker = repo.track(weights=make(1, CHUNKS), rng=False)
        tracker.capture().wait()
        server = repo.serve(url, group=tracker.group, tls=tls_of(tls), data=data)
        say("serving", server.url)
        threading.Event().wait()  # the test ends it


def take(url: str, tls: str | None, data: str | None, say: Say) -> None:
    """Clone what is served, all ranks together: first into an object of rank 1 that it does not
    fit."""
    group, tensors = find(), make(2, CHUNKS)
    with datastates.connect(url, tls=tls_of(tls), data=data) as peer:
        try:
            peer.clone(
                "main",
                weights=torch.nn.Linear(2, 2) if group.rank == 1 else tensors,
                group=group,
            )
        except DatastatesError as exc:
            say("failed", exc.kind, same(tensors, make(2, CHUNKS)))
        cloned = peer.clone("main", weights=tensors, group=group)
        say("cloned", same(tensors, make(1, CHUNKS)), cloned.bytes_moved)


@pytest.mark.parametrize("how", ["tls", "ucx", pytest.param("mpi", marks=need_mpi)])
def test_parts_of_ranks_go_to_ranks_and_to_one_process(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "ucx":
        pytest.importorskip("ucxx", reason="UCXX is not installed")
    kind: Kind = "mpi" if how == "mpi" else "torch"
    tls = str(tmp_path) if how == "tls" else None
    if tls is not None:
        certificate(tmp_path)
    url, data = ("ucx://127.0.0.1:0", "ucx") if how == "ucx" else ("tcp://127.0.0.1:0", None)
    for name, value in WIRE.items():
        monkeypatch.setenv(name, value)
    with job(
        2,
        f"{HERE}:serve",
        folder=str(tmp_path / "job"),
        url=url,
        tls=tls,
        data=data,
        environ=WIRE,
        timeout_s=220,
    ) as ranks:
        urls = [ranks.heard(rank, "serving").split()[1] for rank in range(2)]
        said = run(
            2,
            f"{HERE}:take",
            kind=kind,
            url=urls[1],
            tls=tls,
            data=data,
            environ=WIRE,
            timeout_s=170,
        )
        assert [lines[0] for lines in said] == ["failed invalid-input True"] * 2, (
            "all failed, and no object has changed"
        )
        words = [lines[1].split() for lines in said]
        assert [each[:2] for each in words] == [["cloned", "True"]] * 2
        moved = [int(each[2]) for each in words]
        assert CHUNKS * 4 * MIB <= sum(moved) < (CHUNKS + 4) * 4 * MIB, (
            "what all want left the sources once"
        )
        with (
            datastates.connect(urls[0], tls=tls_of(tls), data=data) as peer,
            datastates.open(tmp_path / "mine", memory_bytes=BUDGET) as repo,
        ):
            state = peer.clone("main", repo=repo).state
            assert same(repo.load(state)["weights"], make(1, CHUNKS))
            if how == "ucx":  # a rank that is gone
                ranks.kill(1)
                tensors = make(2, CHUNKS)
                with pytest.raises(Unavailable, match="rank 1"):
                    # its branch has moved back: the state is lost
                    peer.clone(state, weights=tensors)
                assert same(tensors, make(2, CHUNKS))


# --- broadcast, push ------------------------------------------------------------------------------


def capture(folder: str, say: Say) -> None:
    with datastates.open(
        folder, config=Config(memory_bytes=BUDGET, durable_interval_s=None)
    ) as repo:
        say(repo.track(weights=make(1, CHUNKS), rng=False).capture().wait("durable").uid)


def broadcast(folder: str, say: Say) -> None:
    """Rank 0 has a state of two parts on disk; rank 1 takes it into its repository, rank 2 into
    live objects."""
    group, tensors = TorchGroup(), make(2, CHUNKS)
    with (
        tempfile.TemporaryDirectory() as other,
        datastates.open(folder if group.rank == 0 else other, memory_bytes=BUDGET) as repo,
    ):
        cloned = group.broadcast(
            repo, "main", objects={"weights": tensors} if group.rank == 2 else None
        )
        found = (
            tensors
            if group.rank == 2
            else repo.load("main" if cloned is None else cloned.state)["weights"]
        )
        say(
            same(found, make(1, CHUNKS)),
            (repo.state("main") if cloned is None else cloned.state).world_size,
        )
        group.barrier()


def test_a_state_of_several_parts_is_broadcast_and_is_not_pushed(tmp_path: Path) -> None:
    run(2, f"{HERE}:capture", folder=str(tmp_path / "job"))
    assert run(3, f"{HERE}:broadcast", folder=str(tmp_path / "job")) == [["True 2"]] * 3
    theirs, ours = (
        datastates.open(tmp_path / "job", memory_bytes=BUDGET),
        datastates.open(tmp_path / "mine", memory_bytes=BUDGET),
    )
    with theirs as repo, ours as mine:
        said = pytest.raises(
            Unsupported, match="a push takes states of one part: serve it here, and clone it there"
        )
        with (
            mine.serve(token=TOKEN, is_writable=True) as server,
            datastates.connect(server.url, token=TOKEN) as peer,
            said,
        ):
            peer.push("main", repo=repo)
        with (
            repo.serve(token=TOKEN) as server,
            datastates.connect(server.url, token=TOKEN) as peer,
        ):
            # as it says
            assert same(mine.load(peer.clone("main", repo=mine).state)["weights"], make(1, CHUNKS))
        assert SoloGroup().broadcast(repo, "main") is None
