"""Live events: nothing is missed, nothing comes twice, and a stream ends with whichever side
ends."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import datastates
from datastates import Repository
from datastates.api import live as module
from datastates.api.live import LiveEvents
from datastates.api.routing import Refusal
from datastates.errors import Unavailable
from datastates.lineage import Database
from datastates.lineage.views.detail import read
from tests.api.conftest import BASE, NAME, READ
from tests.api.live import GRACE_S, live

AUTHORIZED = {"Authorization": f"Bearer {READ}"}
Event = tuple[int, str, dict[str, Any]]


@pytest.fixture
def url(repo: Repository) -> Iterator[str]:
    with live({NAME: repo}) as url:
        yield url


class Stream:
    """A stream that is read line by line."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.iter_lines()
        self.comments: list[str] = []

    def next(self) -> Event:
        """The next event; raises StopIteration when the stream has ended."""
        fields: dict[str, str] = {}
        for line in self.lines:
            if not line and "event" in fields:
                return int(fields["id"]), fields["event"], json.loads(fields["data"])
            if line.startswith(":"):
                self.comments.append(line)
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
        raise StopIteration


@contextmanager
def listening(
    url: str, *, headers: dict[str, str] | None = None, **params: Any
) -> Iterator[Stream]:
    with (
        httpx.Client(timeout=30, headers=AUTHORIZED | (headers or {})) as client,
        client.stream("GET", f"{url}{BASE}/events", params=params) as response,
    ):
        assert response.status_code == 200, response.read()
        yield Stream(response)


def last_id(repo: Repository) -> int:
    with repo.core.database.read() as session:
        return read(session, 0).items[-1].id


def test_a_stream_begins_now_and_says_where(url: str, repo: Repository) -> None:
    newest = last_id(repo)
    with listening(url) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.next() == (newest, "hello", {"newest": newest})
        assert stream.comments
        made = repo.tag("seen", "main", message="x")
        id_, name, data = stream.next()
        assert (id_, name) == (newest + 1, "ref")
        assert data["id"] == id_
        assert (data["name"], data["kind"], data["old"], data["new"], data["reason"]) == (
            "seen",
            "tag",
            None,
            made.state,
            "tag",
        )


def test_a_stream_is_resumed_after_the_last_event_by_header_or_query(
    url: str, repo: Repository
) -> None:
    newest = last_id(repo)
    for resumed in (
        {"headers": {"Last-Event-ID": str(newest - 3)}},
        {"after": newest - 3},
        {"headers": {"Last-Event-ID": str(newest - 3)}, "after": 0},
    ):
        with listening(url, **resumed) as stream:
            assert stream.next() == (newest - 3, "hello", {"newest": newest})
            assert [stream.next()[0] for _ in range(3)] == [newest - 2, newest - 1, newest]


def test_an_id_that_there_never_was_begins_now(url: str, repo: Repository) -> None:
    with listening(url, after=10**9) as stream:
        assert stream.next()[0] == last_id(repo)


@pytest.mark.parametrize("bad", ["-1", "x", "99999999999999999999"])
def test_an_id_that_is_none_is_refused(url: str, bad: str) -> None:
    assert httpx.get(
        f"{url}{BASE}/events", params={"after": bad}, headers=AUTHORIZED
    ).status_code in (400, 422)


def test_captures_of_another_process_are_seen(url: str, repo: Repository, tmp_path: Path) -> None:
    with listening(url) as stream:
        stream.next()
        with (
            datastates.open(tmp_path / "runs", memory_bytes=32 << 20) as other,
            other.track(branch="elsewhere", rng=False, tree={"x": 1}) as run,
        ):
            uid = run.capture(step=1).wait().uid
        _, _, data = stream.next()
        assert (data["name"], data["new"], data["reason"]) == ("elsewhere", uid, "capture")


def test_a_reader_far_behind_gets_every_event_once_while_more_are_written(
    url: str, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 20)
    monkeypatch.setattr(module, "_PAGE", 7)
    uid, begin = repo.state("main").uid, last_id(repo)

    def write() -> None:
        for number in range(150):
            repo.tag(f"t{number}", uid)

    with ThreadPoolExecutor(1) as pool, listening(url, after=0) as stream:
        writing = pool.submit(write)
        seen: list[int] = []
        stream.next()
        while not seen or seen[-1] < begin + 150:
            seen.append(stream.next()[0])
        writing.result()
    assert seen == list(range(1, begin + 151))


def test_many_listeners_share_one_thread_that_ends_with_them(repo: Repository) -> None:
    live = LiveEvents(repo.core.database.read, name="shared", poll_s=0.01)

    def threads() -> int:
        return sum(thread.name == "datastates-events-shared" for thread in threading.enumerate())

    assert threads() == 0
    listeners = [live.listen() for _ in range(20)]
    assert threads() == 1
    repo.tag("all", "main")

    async def take() -> list[list[str]]:
        return [
            [event.name for event in found]
            for found in await asyncio.gather(*(listener.next(60) for listener in listeners))
        ]

    assert asyncio.run(take()) == [["all"]] * 20
    thread = live._thread
    assert thread is not None
    for listener in listeners:
        listener.close()
    thread.join(60)
    assert threads() == 0
    with live._lock:
        assert not live._kept


def test_no_more_listen_than_may(repo: Repository) -> None:
    live = LiveEvents(repo.core.database.read, listeners_max=2)
    first, _ = live.listen(), live.listen()
    with pytest.raises(Refusal, match="2 clients listen"):
        live.listen()
    first.close()
    live.listen()
    live.close()
    with pytest.raises(Refusal, match="about to end"):
        live.listen()


def test_one_too_many_is_told_when_to_come_again(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live({NAME: repo}) as url:
        with listening(url) as stream:
            stream.next()
            monkeypatch.setattr(
                LiveEvents, "_enter", lambda *_: (_ for _ in ()).throw(module._refusal_live("full"))
            )
            answer = httpx.get(f"{url}{BASE}/events", headers=AUTHORIZED)
        assert (answer.status_code, answer.json()["kind"], answer.headers["retry-after"]) == (
            503,
            "unavailable",
            "5",
        )


def test_a_client_that_leaves_frees_its_place(repo: Repository) -> None:
    with live({NAME: repo}) as url:
        with listening(url) as stream:
            stream.next()
        for _ in range(120):  # more than may listen at once
            with listening(url) as stream:
                stream.next()


def test_streams_end_with_the_server(repo: Repository) -> None:
    with live({NAME: repo}) as url:
        opened = listening(url)
        stream = opened.__enter__()
        stream.next()
        began = time.monotonic()
    assert time.monotonic() - began < GRACE_S / 2
    with pytest.raises(StopIteration):
        stream.next()
    opened.__exit__(None, None, None)


def test_a_quiet_stream_says_that_it_lives(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from datastates.api.routes import service

    monkeypatch.setattr(service, "HEARTBEAT_S", 0.05)
    with listening(url) as stream:
        stream.next()
        assert [next(stream.lines) for _ in range(4)] == [":", "", ":", ""]


def test_an_event_that_postgresql_commits_late_is_delivered_in_order(
    postgresql_url: str, tmp_path: Path
) -> None:
    with datastates.open(postgresql_url, packs=tmp_path / "packs", memory_bytes=32 << 20) as repo:
        with repo.track(rng=False, tree={"x": 1}) as run:
            run.capture(step=1).wait()
        with live({NAME: repo}) as url, listening(url) as stream:
            stream.next()
            uid, has_written, end = repo.state("main").uid, threading.Event(), threading.Event()
            thread = threading.Thread(
                target=_tag_late, args=(repo.core.database, uid, has_written, end), daemon=True
            )
            thread.start()
            assert has_written.wait(60)
            repo.tag("younger", uid)
            with listening(url) as late:  # what the older one is before: not yet known
                end.set()
                thread.join(60)
                assert [stream.next()[2]["name"] for _ in range(2)] == ["older", "younger"]
                hello = late.next()[0]
                assert hello == last_id(repo) or late.next()[2]["name"] == "older"


def _tag_late(
    database: Database, uid: str, has_written: threading.Event, end: threading.Event
) -> None:
    from datastates.lineage.write import refs

    with database.write() as session:
        refs.tag(session, "older", uid)
        has_written.set()
        assert end.wait(60)


def test_live_events_go_on_when_their_database_answers_again(
    repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    fails, failed = threading.Event(), threading.Event()

    @contextmanager
    def reading() -> Iterator[Any]:
        if fails.is_set():
            failed.set()
            raise Unavailable("the database is away")
        with repo.core.database.read() as session:
            yield session

    live = LiveEvents(reading, poll_s=0.01)
    listener = live.listen()
    fails.set()
    assert failed.wait(60)
    repo.tag("meanwhile", "main")
    fails.clear()
    assert [event.name for event in asyncio.run(listener.next(60))] == ["meanwhile"]
    live.close()


def test_live_events_end_when_their_repository_is_closed(tmp_path: Path) -> None:
    repo = datastates.open(tmp_path, memory_bytes=32 << 20)
    live = LiveEvents(repo.core.database.read, poll_s=0.01)
    listener = live.listen()
    repo.close()
    assert asyncio.run(listener.next(30)) == ()
    assert listener.is_over
