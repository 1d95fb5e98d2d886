"""The client: each route by a method, our values, our errors; it pages, resumes and reconnects by itself."""

from __future__ import annotations

import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

import datastates
from datastates import Repository
from datastates.algebra.histogram import histogram
from datastates.api import client as module
from datastates.api import downloads, following
from datastates.api.client import Client
from datastates.api.models import StateDetail
from datastates.content.manifest import CHUNK_BYTES
from datastates.errors import Ambiguous, Conflict, Corrupt, Disconnected, InvalidInput, NotFound, PeerFault, SyntaxProblem, Unauthorized
from datastates.lineage import RefKind, Run
from datastates.lineage.change import refs
from datastates.lineage.show.branches import Life
from tests.api.conftest import ADMIN, NAME, READ, WRITE
from tests.api.live import live


@pytest.fixture
def url(repo: Repository) -> Iterator[str]:
    with live({NAME: repo}) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, token=ADMIN) as made:
        yield made


# What it says


def test_states_are_those_of_the_repository(client: Client, repo: Repository) -> None:
    assert client.repository == NAME
    for rev in ("main", "warm", "soup", "main~3", "main@best:loss"):
        assert client.state(rev) == repo.state(rev)
    detail = client.show("warm")
    assert isinstance(detail, StateDetail)
    assert detail.uid == repo.state("warm").uid
    assert {ref.name for ref in detail.refs} == {"warm"}
    assert len(detail.children) == 2
    assert detail.run_record is not None
    run = client.run(detail.run_record.uid)
    assert all(getattr(run, field.name) == getattr(detail.run_record, field.name) for field in fields(Run))
    assert (run.life, run.branches) == (Life.ENDED, ("main",))
    assert client.show(repo.state("soup")).parents == repo.state("soup").parents


def test_a_metric_that_is_no_number_comes_back_as_one(client: Client) -> None:
    assert math.isnan(client.state("main@step:3").metrics["val/loss"])
    assert math.isnan(next(state for state in client.log("main") if state.step == 3).metrics["val/loss"])


def test_pages_follow_each_other_by_themselves(client: Client, repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 3)
    query = "step > 1 order by step"
    assert [state.uid for state in client.find(query)] == [state.uid for state in repo.find(query)]
    assert list(client.find(query, limit=4)) == repo.find(query)[:4]
    assert list(client.find(limit=0)) == []
    assert len(list(client.find())) == len(repo.find("limit 1000"))
    assert [state.step for state in client.log("main")] == list(range(8, 0, -1))
    assert [state.step for state in client.log("main", limit=4)] == [8, 7, 6, 5]
    assert list(client.reflog("main")) == repo.reflog("main")
    assert [run.uid for run in client.runs(limit=1)] == [run.uid for run in client.runs()][:1]


def test_what_the_repository_holds_is_told(client: Client, repo: Repository) -> None:
    assert [info.name for info in client.repositories()] == [NAME]
    assert client.repositories()[0].scope == "admin"
    assert list(client.refs()) == repo.refs()
    assert [ref.name for ref in client.refs(RefKind.TAG)] == ["best", "warm"]
    assert client.ref("warm").message == "end of shared prefix"
    stats = client.stats()
    assert (stats.states, stats.branches, stats.tags) == (len(repo.find("limit 1000")), 4, 2)
    assert "loss" in {key.key for key in stats.metrics}
    page = client.graph("main", "fork", count=5)
    assert (len(page.rows), page.total) == (5, 11)
    assert client.graph(around="warm", count=3).rows[1].state.uid == repo.state("warm").uid
    series = client.series(["main", "fork"], "loss")
    assert {line.head for line in series.lines} == {"main", "fork"}
    assert [fork.state for fork in series.forks] == [repo.state("warm").uid]
    assert client.series("main", ["loss"], points=10).lines[0].total == 8
    named = {tensor.path: tensor.shape for tensor in client.tensors("main")}
    assert named["model/0.weight"] == (4, 6)
    assert all(tensor.norm is not None for tensor in client.tensors("main", norms=True))


def test_a_diff_is_that_of_the_repository(client: Client, repo: Repository) -> None:
    ours, theirs = client.diff("main~1", "main"), repo.diff("main~1", "main")
    assert [tensor.path for tensor in ours.tensors] == [tensor.path for tensor in theirs.tensors]
    assert (ours.old, ours.new, ours.base) == (theirs.old, theirs.new, theirs.base)
    changed = next(tensor for tensor in ours.tensors if tensor.path == "model/0.weight")
    assert changed.distance == pytest.approx(next(t for t in theirs.tensors if t.path == "model/0.weight").distance)
    assert {t.path for t in client.diff("main~1", "main", only="model/2*").tensors} == {"model/2.weight", "model/2.bias"}
    assert client.diff("main~1", "main", tensors=False).tensors == ()
    assert {tensor.change for tensor in client.diff("main~1", "main", stat=True).tensors} <= {"same", "unread"}


def test_comparisons_parallels_and_histograms_are_those_of_the_repository(client: Client, repo: Repository) -> None:
    assert client.compare(["main", repo.state("fork")]).metrics == repo.compare(["main", "fork"]).metrics
    drawn = client.parallels(name="o", taken="last")
    assert [branch.branch for branch in drawn.branches] == ["fork", "lone", "soup"]
    assert next(axis for axis in drawn.axes if axis.key == "metrics.loss").values[0] == repo.state("fork").metrics["loss"]
    spread = client.histogram("main", "model/0.weight", bins=8).states[0]
    assert spread == histogram(repo.core, ["main"], "model/0.weight", bins=8).states[0]
    assert len(client.histogram(["main", repo.state("fork")], "model/0.weight", scale="log").states) == 2
    with pytest.raises(NotFound, match=r"model/0.weight"):
        client.histogram("main", "model/0.wieght")


# What it changes


def test_names_are_made_moved_and_taken_away(client: Client, repo: Repository) -> None:
    made = client.tag("runs/v1,ü%2F#1", "main~2", message="ok")
    assert (made.kind, made.state, made.version, made.message) == (RefKind.TAG, repo.state("main~2").uid, 1, "ok")
    with pytest.raises(Conflict):
        client.tag(made.name, "main")
    moved = client.move(made.name, "main~1", expected=made)
    assert (moved.state, moved.version) == (repo.state("main~1").uid, 2)
    with pytest.raises(Conflict):
        client.move(made.name, "main", expected=made)
    with pytest.raises(Conflict):
        client.delete_ref(made)
    client.delete_ref(moved)
    with pytest.raises(NotFound):
        client.ref(made.name)
    assert [event.reason.split()[0] for event in client.reflog(made.name)] == ["delete", "move", "tag"]
    assert client.branch("aside", repo.state("fork")).kind is RefKind.BRANCH


def test_name_with_a_part_that_is_a_dot_is_no_other_name(client: Client, repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    made = client.tag("a/b", "main")
    with monkeypatch.context() as older:
        older.setattr(refs, "check_name", str)  # a lineage may have such names from a time when they were allowed
        old = repo.tag("a/./b", "main")

    assert client.ref(old.name) == old
    client.delete_ref(old)
    assert client.ref(made.name) == made
    with pytest.raises(NotFound, match=r"a/\.\./b"):
        client.ref("a/../b")
    with pytest.raises(InvalidInput, match="'a/b' would do"):
        client.tag(old.name, "main")


def test_attributes_are_set_and_taken_away(client: Client, repo: Repository) -> None:
    state = client.annotate("main", reviewed=True, note="smooth", lr=0.5, rate=None)
    assert state.attributes == {"branch": "main", "reviewed": True, "note": "smooth", "lr": 0.5}
    assert repo.state("main").attributes == state.attributes


def test_bytes_are_dropped_but_not_those_of_a_ref(client: Client, repo: Repository) -> None:
    with pytest.raises(Conflict):
        client.evict("warm")
    gone = client.evict("main~1")
    assert gone.uid == repo.state("main~1").uid
    assert gone.bytes > 0
    assert client.state("main~1").status == "evicted"
    assert client.evict("warm", force=True).uid == repo.state("warm").uid


# What goes wrong


def test_errors_are_ours_by_their_kind(client: Client) -> None:
    with pytest.raises(SyntaxProblem) as caught:
        list(client.find("metrics.loss < "))
    assert caught.value.column == 16
    assert caught.value.expected
    assert caught.value.text == "metrics.loss < "
    assert str(caught.value).count("at column 16") == 1
    with pytest.raises(NotFound, match="nothing-like-it"):
        client.state("nothing-like-it")
    with pytest.raises(NotFound) as missing:
        client.show("f" * 24)
    assert type(missing.value) is NotFound
    assert issubclass(Ambiguous, NotFound)
    with pytest.raises(InvalidInput):
        client.graph(count=10**6)
    with pytest.raises(InvalidInput):
        client.tag("no spaces please", "main")


def test_a_token_is_wanted_and_may_be_too_weak(url: str) -> None:
    with Client(url, repository=NAME) as nobody, pytest.raises(Unauthorized):
        nobody.state("main")
    with Client(url, token="x" * 20, repository=NAME) as stranger, pytest.raises(Unauthorized):
        stranger.events()
    with Client(url, token=READ) as reader:
        assert reader.repositories()[0].scope == "read"
        assert reader.state("main").step == 8
        with pytest.raises(Unauthorized):
            reader.tag("mine", "main")
    with Client(url, token=WRITE) as writer:
        writer.tag("mine", "main")
        with pytest.raises(Unauthorized):
            writer.evict("main~1")


def test_who_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", repository=NAME, timeout_s=5) as client:
        assert not client.is_healthy()
        with pytest.raises(Disconnected, match=f"127.0.0.1:{port}.*datastates serve"):
            client.state("main")
        with pytest.raises(Disconnected):
            client.events(patience_s=0.1)
        with pytest.raises(Disconnected):
            client.download("a" * 24, "nowhere.safetensors", patience_s=0.1)


def test_another_program_that_answers_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "api" / "v1").mkdir(parents=True)
    (tmp_path / "api" / "v1" / "repositories").write_text("<html>hello</html>")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: Quiet(*args, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with Client(f"http://127.0.0.1:{server.server_port}") as client:
            with pytest.raises(PeerFault, match="is it datastates"):
                client.repositories()
            with pytest.raises(NotFound):
                Client(client.url, repository="x").state("main")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_which_repository_must_be_clear(repo: Repository) -> None:
    with live({"one": repo, "two words/é": repo}) as url:
        with Client(url, token=READ) as client, pytest.raises(InvalidInput, match="one, two words/é"):
            client.state("main")
        with Client(url, token=READ, repository="one") as client:
            assert client.state("main") == repo.state("main")
    with pytest.raises(InvalidInput, match="http"):
        Client("127.0.0.1:8642")


# Downloads


@pytest.fixture
def large(tmp_path: Path) -> Iterator[tuple[Repository, torch.Tensor]]:
    """A state of several pieces."""
    values = torch.randn(5 * CHUNK_BYTES // 8, dtype=torch.float64)
    with datastates.open(tmp_path / "large", memory_bytes=64 << 20) as opened:
        with opened.track(rng=False, tree={"w": values, "b": torch.ones(3)}) as run:
            run.capture(step=1).wait("durable")
        yield opened, values


class Faulty(httpx.BaseTransport):
    """Asks the real server, until ``spoil`` has something to say about an answer."""

    def __init__(self, spoil: Callable[[httpx.Request, bytes], bytes]) -> None:
        self.real, self.spoil, self.ranges = httpx.HTTPTransport(), spoil, list[str]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self.real.handle_request(request)
        if "range" not in request.headers:
            return response
        self.ranges.append(request.headers["range"])
        body = self.spoil(request, response.read())
        return httpx.Response(response.status_code, headers=response.headers, content=body)

    def close(self) -> None:
        self.real.close()


def spoiled(client: Client, spoil: Callable[[httpx.Request, bytes], bytes]) -> Faulty:
    """The client, whose ranges pass through ``spoil`` from now on."""
    transport = Faulty(spoil)
    client._http.close()
    client._http = httpx.Client(base_url=client.url, headers=client._http.headers, transport=transport)
    return transport


def test_a_download_is_the_state(large: tuple[Repository, torch.Tensor], tmp_path: Path) -> None:
    repo, values = large
    with live({NAME: repo}) as url, Client(url, token=READ) as client:
        path = client.download("main", tmp_path / "out" / "main.safetensors")
        assert torch.equal(safetensors.torch.load_file(path)["tree/w"], values)
        assert [file.name for file in path.parent.iterdir()] == ["main.safetensors"]
        only = client.download("main", tmp_path / "b.safetensors", only="tree/b")
        assert set(safetensors.torch.load_file(only)) == {"tree/b"}
        with pytest.raises(InvalidInput):
            client.download("main", tmp_path / "c.safetensors", only=["nothing"])
        assert not list(tmp_path.glob("*c.safetensors*"))


def test_a_download_that_broke_off_goes_on_where_it_stopped(
    large: tuple[Repository, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "PIECE_BYTES", 4 << 20)
    repo, values = large
    path = tmp_path / "main.safetensors"
    with live({NAME: repo}) as url, Client(url, token=READ) as client:

        def break_off(request: httpx.Request, body: bytes) -> bytes:
            if len(broken.ranges) > 2:
                raise httpx.ReadError("gone")
            return body

        broken = spoiled(client, break_off)
        with pytest.raises(Disconnected):
            client.download("main", path, patience_s=0)
        assert not path.exists()
        again = spoiled(client, lambda request, body: body)
        client.download("main", path)
    assert broken.ranges[:2] + again.ranges == sorted(broken.ranges[:2] + again.ranges, key=lambda said: int(re.findall(r"\d+", said)[0]))
    assert again.ranges[0] == "bytes=8388608-12582911"
    assert torch.equal(safetensors.torch.load_file(path)["tree/w"], values)


def test_what_arrives_damaged_is_not_written(large: tuple[Repository, torch.Tensor], tmp_path: Path) -> None:
    repo, values = large
    path = tmp_path / "main.safetensors"
    with live({NAME: repo}) as url, Client(url, token=READ) as client:
        spoiled(client, lambda request, body: body[:1000] + bytes([body[1000] ^ 1]) + body[1001:])
        with pytest.raises(Corrupt, match="did not arrive"):
            client.download("main", path)
        assert not path.exists()
        spoiled(client, lambda request, body: body)
        assert torch.equal(safetensors.torch.load_file(client.download("main", path))["tree/w"], values)


def test_two_downloads_to_one_path_do_not_mix(large: tuple[Repository, torch.Tensor], tmp_path: Path) -> None:
    repo, _ = large
    path = tmp_path / "main.safetensors"
    with live({NAME: repo}) as url, Client(url, token=READ) as first, Client(url, token=READ) as second:

        def meet(request: httpx.Request, body: bytes) -> bytes:
            with pytest.raises(Conflict, match="another process"):
                second.download("main", path)
            return body

        met = spoiled(first, meet)
        first.download("main", path)
        assert met.ranges


# Events


def test_events_begin_now_or_after_one(client: Client, repo: Repository) -> None:
    uid = repo.state("main").uid
    with client.events() as events:
        repo.tag("a", uid)
        client.tag("b", uid)
        assert [next(events).name for _ in range(2)] == ["a", "b"]
        last = events.last
    assert last is not None
    with client.events(after=last - 1) as events:
        assert next(events) == repo.reflog("b")[0]
    with client.events(after=0) as events:
        assert [next(events).id for _ in range(last)] == list(range(1, last + 1))


def test_events_go_on_when_the_server_comes_back(repo: Repository) -> None:
    uid = repo.state("main").uid
    with live({NAME: repo}) as url:
        client = Client(url, token=READ, repository=NAME)
        events = client.events(patience_s=60)
        repo.tag("before", uid)
        assert next(events).name == "before"
    repo.tag("between", uid)
    with client, events, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: [next(events).name for _ in range(2)])
        with live({NAME: repo}, port=int(url.rpartition(":")[2])):
            repo.tag("after", uid)
            assert waiting.result(60) == ["between", "after"]


def test_events_end_when_they_are_closed(client: Client) -> None:
    events = client.events()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(events))
        events.close()
        assert waiting.result(60) == []
    events.close()


def test_events_of_a_server_that_stays_away_end_with_an_error(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_FIRST_WAIT_S", 0.01)
    with live({NAME: repo}) as url:
        client = Client(url, token=READ, repository=NAME)
        events = client.events(patience_s=0.05)
    with client, events, pytest.raises(Disconnected):
        next(events)


# All of it


def test_every_operation_of_the_document_is_a_method(url: str, client: Client, tmp_path: Path) -> None:
    asked: set[tuple[str, str]] = set()
    client._http.event_hooks = {"request": [lambda request: asked.add((request.method.lower(), request.url.path))]}
    client.repositories(), client.is_healthy(), client.metrics()
    (
        client.show("main"),
        list(client.find()),
        list(client.log()),
        client.tensors("main"),
        client.annotate("main", x=1),
        client.evict("main~1"),
    )
    client.download("main", tmp_path / "x.safetensors"), client.refs(), client.ref("main"), list(client.reflog("main")), list(client.runs())
    client.move("new", "main~2", expected=client.tag("new", "main"))
    client.delete_ref(client.branch("other", "main"))
    client.delete_note(client.edit_note(client.write_note("first", state="main", author="ada"), "second"))
    assert list(client.notes("main")) == []
    (
        client.run(next(client.runs()).uid),
        client.graph(),
        client.graph_overview(fold=True),
        client.series("main", "loss"),
        client.diff("main~2", "main"),
        client.compare(["main~2", "main"]),
        client.parallels(),
        client.histogram("main", "model/0.weight"),
        client.stats(),
    )
    client.studies(), client.merges(), client.outlier_reports()
    client.processes(), client.incomplete(), client.storage(), client.forecast(), list(client.clones()), client.servers()
    for call in (lambda: client.study("lr"), lambda: client.outlier_report(1), lambda: client.picture(1, 0)):
        with pytest.raises(NotFound):  # tests/api/test_studies.py has those that are there
            call()
    assert [branch.name for branch in client.branches(sort="name")] == ["fork", "lone", "main", "soup"]
    client.events().close()
    paths = httpx.get(f"{url}/api/v1/openapi.json", headers={"Authorization": f"Bearer {READ}"}).json()["paths"]
    missing = [
        operation["operationId"]
        for path, operations in paths.items()
        for method, operation in operations.items()
        if not any(method == done and re.fullmatch(re.sub(r"\\\{[^}]+\\\}", ".+", re.escape(path)), at) for done, at in asked)
    ]
    assert missing == []
    assert len(paths) >= 15
