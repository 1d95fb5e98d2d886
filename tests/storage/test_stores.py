"""Tiers on real servers: S3, and Redis, also while these fail."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import datastates
from datastates import Config, Status
from datastates.cli.app import app
from datastates.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from datastates.lineage.write import attachments
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage import ObjectTier, RedisTier, Tier, remote
from datastates.storage.remote import tier_of_url
from datastates.testing import TierSuite
from datastates.testing.states import chunks_of, numbers, payload, small, stream
from tests.storage.test_local import flip
from tests.storage.test_remote import flip_in_bucket
from tests.support.stores import (
    AnswerStatus,
    BodyOf,
    CutBody,
    DropRequest,
    FaultyProxy,
    IgnoreRange,
    LoseResponse,
    RedisServer,
    S3Server,
    redis_server,
)

LINEAGE = "0123456789ab" * 2
PATIENCE_S = 60.0
_numbers = iter(range(1_000_000))


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of an empty prefix, without faults."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return f"{s3.bucket('tiers')}/run-{next(_numbers)}"


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3) as proxy:
        yield proxy


@pytest.fixture
def faulty(url: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> ObjectTier:
    """A tier behind a proxy with faults."""
    tier = tier_of_url(f"{url}?endpoint={proxy.endpoint}")
    assert isinstance(tier, ObjectTier)
    return tier


class TestS3(TierSuite):
    @pytest.fixture
    def tier(self, url: str) -> Iterator[Tier]:
        tier = tier_of_url(url)
        tier.check(LINEAGE)
        yield tier
        tier.close()

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        flip_in_bucket(tier, uid, chunk, byte)


class TestRedis(TierSuite):
    @pytest.fixture
    def tier(self, redis: RedisServer) -> Iterator[Tier]:
        tier = tier_of_url(f"redis://{redis.host}:{redis.port}/3?prefix=run:")
        tier.check(LINEAGE)
        yield tier
        tier.close()

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        assert isinstance(tier, RedisTier)
        with tier.open(uid) as reader:
            data = bytearray(reader.chunk(chunk))
        key = next(key for key in tier.keys("chunk/") if bytes(tier.read(key)) == bytes(data))
        data[byte] ^= 1
        tier.write(key, bytes(data))


LARGE = {"model/w": numbers(CHUNK_BYTES // 4 * 5), "optimizer/m": numbers(CHUNK_BYTES // 4 * 5, 2)}


@pytest.mark.parametrize("fault", [AnswerStatus(503), AnswerStatus(500), DropRequest()])
def test_an_upload_survives_what_passes(
    faulty: ObjectTier, proxy: FaultyProxy, fault: AnswerStatus | DropRequest
) -> None:
    proxy.inject(fault, method="PUT", requests=2)
    placed = faulty.put(payload("s", LARGE))
    assert placed.bytes_new == sum(len(chunk) for chunk in chunks_of(payload("s", LARGE)))
    with faulty.open("s") as reader:
        assert stream(reader) == chunks_of(payload("s", LARGE))


@pytest.mark.parametrize("path", [".manifest", ".safetensors"])
def test_an_upload_that_fails_leaves_no_state(
    faulty: ObjectTier, proxy: FaultyProxy, path: str
) -> None:
    proxy.inject(AnswerStatus(503), path=path, requests=1000)
    with pytest.raises(Unavailable, match="the s3 tier does not respond"):
        faulty.put(payload("s", LARGE))
    proxy.clear()
    assert list(faulty.uids()) == []
    faulty.put(payload("s", LARGE))
    with faulty.open("s") as reader:
        reader.verify()


def test_a_lost_response_of_the_manifest_is_no_conflict(
    faulty: ObjectTier, proxy: FaultyProxy
) -> None:
    proxy.inject(LoseResponse(), method="PUT", path=".manifest")
    placed = faulty.put(small("s", 1, 2))
    assert placed.bytes_new == 200
    assert placed.manifest == faulty.manifest("s")


def test_bytes_that_a_server_returns_wrongly_are_never_used(
    faulty: ObjectTier, proxy: FaultyProxy, url: str
) -> None:
    faulty.put(payload("s", LARGE))
    faulty.put(payload("other", {"model/w": numbers(CHUNK_BYTES // 4 * 5, 7)}))
    other = f"/tiers/{url.rpartition('/')[2]}/{faulty.manifest('other').packs[0].name}"
    expected = chunks_of(payload("s", LARGE))
    for fault in (CutBody(1000), IgnoreRange(), BodyOf(other)):
        proxy.clear()
        proxy.inject(fault, method="GET", path=".safetensors")
        with faulty.open("s") as reader:
            try:
                found = reader.chunk(0)
            except (Corrupt, Unavailable):
                continue
            assert bytes(found) == expected[0], fault
    with faulty.open("s") as reader:
        assert stream(reader) == expected


def test_a_part_of_a_state_is_read_without_the_rest(
    faulty: ObjectTier, proxy: FaultyProxy, tmp_path: Path
) -> None:
    model, other = torch.nn.Linear(6000, 1000), torch.nn.Linear(3000, 1000)
    config = Config(tiers=[faulty])
    with (
        datastates.open(tmp_path / "run", config=config) as repo,
        repo.track(model=model, other=other, rng=False) as run,
    ):
        run.capture().wait("external", PATIENCE_S)
    for pack in (tmp_path / "run" / "packs").glob("*.safetensors"):
        pack.unlink()
    for manifest in (tmp_path / "run" / "packs").glob("*.manifest"):
        manifest.unlink()
    again = tier_of_url(f"{faulty.url}")
    proxy.clear()
    with datastates.open(tmp_path / "run", config=Config(tiers=[again])) as repo:
        proxy.clear()
        loaded = repo.load("main", only="model")
        size = sum(each.numel() * 4 for each in model.state_dict().values())
        assert proxy.response_bytes() < 1.1 * size
    assert torch.equal(loaded["model"]["weight"], model.weight)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "refuses this process"),
        ({"AWS_ACCESS_KEY_ID": "nobody:here"}, "refuses this process"),
    ],
)
def test_a_wrong_key_is_refused_at_open(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    why: str,
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=why) as caught:
        datastates.open(tmp_path, config=Config(tiers=[url]))
    assert all(value not in str(caught.value) for value in changes.values())


def test_a_bucket_that_is_missing_is_refused_at_open(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the s3 tier has no such bucket"):
        datastates.open(tmp_path, config=Config(tiers=["s3://nowhere/run"]))


def test_two_repositories_do_not_share_a_prefix(url: str, tmp_path: Path) -> None:
    datastates.open(tmp_path / "one", config=Config(tiers=[url])).close()
    datastates.open(tmp_path / "one", config=Config(tiers=[url])).close()
    with pytest.raises(Conflict, match="holds states of the lineage"):
        datastates.open(tmp_path / "two", config=Config(tiers=[url]))


def test_a_repository_finds_its_tiers_again(url: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with (
        datastates.open(tmp_path / "run", config=Config(tiers=[url])) as repo,
        repo.track(model=model, rng=False) as run,
    ):
        uid = run.capture().wait("external", PATIENCE_S).uid
    with datastates.open(tmp_path / "run") as repo:
        assert [tier.name for tier in repo.core.tiers.further] == ["s3"]
        assert repo.core.tiers.further[0].has(uid) is True
    with datastates.open(tmp_path / "run", config=Config(tiers=[])) as repo:
        assert repo.core.tiers.further == ()


def test_a_server_that_hangs_does_not_hold_up_the_close(
    url: str, s3: S3Server, tmp_path: Path
) -> None:
    config = Config(tiers=[url])
    with datastates.open(tmp_path / "run", config=config) as repo:
        run = repo.track(weight=torch.zeros(8), rng=False)
        first = run.capture().wait("external", PATIENCE_S)
        s3.stop()
        late = run.capture().wait("durable", PATIENCE_S)
        began = time.monotonic()
        run.close()
        repo.close()
        assert time.monotonic() - began < 15, "8 s on a quiet machine"
    s3.resume()
    with (
        datastates.open(tmp_path / "run", config=config) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        repo.core.runner().drain()
        assert repo.state(first.uid).status is Status.EXTERNAL
        assert repo.state(late.uid).status is Status.EXTERNAL


def test_a_killed_server_loses_no_state_that_was_reported(
    url: str, s3: S3Server, tmp_path: Path
) -> None:
    weight = torch.zeros(CHUNK_BYTES // 2)
    config = Config(tiers=[url])
    with (
        datastates.open(tmp_path / "run", config=config) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        captures = []
        for step in range(6):
            weight += 1
            captures.append(run.capture())
            captures[-1].wait("durable", PATIENCE_S)
            if step % 2:
                s3.kill()
                time.sleep(0.2)
                s3.restart()
        for each in captures:
            while repo.state(each.uid).status is not Status.EXTERNAL:
                time.sleep(0.05)
    tier = tier_of_url(url)
    for number, each in enumerate(captures, 1):
        with tier.open(each.uid) as reader:
            reader.verify()
            assert bytes(reader.chunk(0)[:4]) == torch.full((1,), float(number)).numpy().tobytes()


def test_two_writers_of_one_state_leave_one_that_is_whole(url: str) -> None:
    tiers = [tier_of_url(url) for _ in range(4)]
    barrier, news = threading.Barrier(4), list[int]()

    def work(tier: Tier) -> None:
        barrier.wait()
        news.append(tier.put(payload("same", LARGE)).bytes_new)

    threads = [threading.Thread(target=work, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # this server may let two of them create the manifest at the same moment
    assert len(news) == 4
    assert max(news) > 0
    for tier in tiers:
        with tier.open("same") as reader:
            assert stream(reader) == chunks_of(payload("same", LARGE))


def test_a_full_redis_server_is_unavailable(tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory_bytes=8 << 20, password="abcd1234") as server:
        plain = RedisTier(server.host, server.port)
        with pytest.raises(InvalidInput, match="set REDISCLI_AUTH"):
            plain.check(LINEAGE)
        plain.close()
        tier = RedisTier(server.host, server.port, password="abcd1234")
        tier.check(LINEAGE)
        with pytest.raises(Unavailable, match="the redis tier is full"):
            tier.put(payload("large", {"w": numbers(CHUNK_BYTES)}))
        assert list(tier.uids()) == []
        tier.put(small("small", 1))
        with tier.open("small") as reader:
            reader.verify()
        tier.close()


@pytest.mark.parametrize(
    ("password", "database", "why"),
    [("wrong", 0, "set REDISCLI_AUTH"), ("abcd1234", 99, "has no such database")],
)
def test_what_redis_refuses_is_raised_at_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str, database: int, why: str
) -> None:
    with redis_server(tmp_path / "redis", password="abcd1234") as server:
        monkeypatch.setenv("REDISCLI_AUTH", password)
        url = f"redis://{server.host}:{server.port}/{database}"
        with pytest.raises(InvalidInput, match=why) as caught:
            datastates.open(tmp_path / "run", config=Config(tiers=[url]))
        assert password not in str(caught.value)


def test_a_tier_that_could_not_be_reached_at_first_is_stored_and_filled_later(
    redis: RedisServer, tmp_path: Path
) -> None:
    redis.kill()
    url = f"redis://{redis.host}:{redis.port}/0"
    with (
        datastates.open(tmp_path / "run", config=Config(tiers=[url])) as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        uid = run.capture().wait("durable", PATIENCE_S).uid
        assert "the redis tier has failed" in str(repo.trouble)
    redis.restart()
    with (
        datastates.open(tmp_path / "run") as repo,
        repo.track(weight=torch.zeros(8), rng=False) as run,
    ):
        assert repo.trouble is None
        repo.core.runner().drain()
        while repo.state(uid).status is not Status.EXTERNAL:
            time.sleep(0.05)
        with repo.core.database.read() as session:
            assert list(attachments.urls(session)) == [url]


def test_ctrl_c_ends_a_restore_from_a_server_that_hangs(redis: RedisServer, tmp_path: Path) -> None:
    url = f"redis://{redis.host}:{redis.port}/0"
    trained(tmp_path / "run", url, 1)
    for path in (tmp_path / "run" / "packs").glob("*.*.*"):
        path.unlink()
    with datastates.open(tmp_path / "run") as repo:
        redis.stop()
        began = time.monotonic()
        threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            repo.load("main")
        assert time.monotonic() - began < 15, "not the 30 s of a response"


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*1\r\n" * 5000, b"$-7\r\n", b"$9999999999\r\n", b""],
)
def test_a_stranger_on_the_port_of_redis_is_unavailable(answer: bytes) -> None:
    def be_a_stranger() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=be_a_stranger)
        thread.start()
        tier = RedisTier(*listener.getsockname())
        with pytest.raises((Unavailable, KeyError)):
            tier.read("key")
        thread.join()
        tier.close()


def test_a_redis_server_that_was_restarted_is_used_again(redis: RedisServer) -> None:
    tier = RedisTier(redis.host, redis.port)
    tier.put(small("one", 1))
    redis.kill()
    with pytest.raises(Unavailable, match="does not respond"):
        tier.has("one")
    redis.restart()
    assert not tier.has("one"), "it keeps nothing"
    tier.put(small("one", 1))
    assert list(tier.uids()) == ["one"]
    tier.close()


def invoke(folder: Path, *words: str) -> str:
    """What the terminal shows."""
    done = CliRunner().invoke(app, ["--repo", str(folder), *words])
    assert done.exit_code == 0, done.output
    return done.output


def trained(folder: Path, url: str, steps: int) -> list[str]:
    """The uids of states that a training put into the bucket."""
    weight = torch.zeros(8)
    with (
        datastates.open(folder, config=Config(tiers=[url])) as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        captures = []
        for _ in range(steps):
            weight += 1
            captures.append(
                run.capture(metrics={"loss": float(weight[0])}).wait("external", PATIENCE_S)
            )
    return [each.uid for each in captures]


def test_a_lineage_is_rebuilt_from_a_bucket_alone(url: str, tmp_path: Path) -> None:
    uids = trained(tmp_path / "lost", url, 3)
    report = datastates.reindex(tmp_path / "new", tiers=[url])
    assert (report.states, report.restorable, report.branches) == (3, 3, 1)
    with datastates.open(tmp_path / "new") as repo:
        assert [state.uid for state in repo.log("main")] == uids[::-1]
        assert repo.state("main").status is Status.EXTERNAL
        assert repo.state("main").metrics["loss"] == 3.0
        assert torch.equal(repo.load("main")["weight"], torch.full((8,), 3.0))


def test_a_damaged_pack_is_repaired_from_a_bucket(url: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", url, 2)
    for pack in (tmp_path / "run" / "packs").glob("*.safetensors"):
        flip(pack, pack.stat().st_size - 20)
    with datastates.open(tmp_path / "run", config=Config(tiers=[])) as repo:
        assert repo.verify().damage
        report = repo.repair(source=url)
        assert report.hurt == ()
        assert not repo.verify().damage


def test_states_from_before_a_tier_are_copied_on_demand(url: str, tmp_path: Path) -> None:
    weight = torch.zeros(8)
    with (
        datastates.open(tmp_path / "run") as repo,
        repo.track(weight=weight, rng=False) as run,
    ):
        first = run.capture().wait("durable", PATIENCE_S)
        weight += 1
        second = run.capture().wait("durable", PATIENCE_S)
    datastates.open(tmp_path / "run", config=Config(tiers=[url])).close()
    with datastates.open(tmp_path / "run") as repo:
        seen = list[tuple[int, int]]()
        one = repo.copy("main~1", to="s3", on_progress=lambda *done: seen.append(done))
        assert (one.copied, one.left) == ((first.uid,), {})
        rest = repo.copy(to="s3")
        assert rest.left == {}
        assert {repo.state(each.uid).status for each in (first, second)} == {Status.EXTERNAL}
        assert repo.copy("main", to="s3").copied == ()
        with pytest.raises(NotFound, match="has no tier 'gs' here"):
            repo.copy("main", to="gs")
        stats = repo.stats()
        assert stats.activity.copied == 2
        assert stats.activity.requests > 4
        assert "2 copied to further tiers" in str(stats)


def test_what_failed_uploads_left_is_collected_from_the_terminal(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", url, 1)
    tier = tier_of_url(url)
    assert isinstance(tier, ObjectTier)
    tier.write("dead.0-77.safetensors", bytes(2048))
    monkeypatch.setattr(remote, "ORPHAN_AGE", timedelta(days=-1))
    for options in (["--dry-run"], []):
        shown = invoke(tmp_path / "run", "gc", "--tier", "s3", *options)
        assert "on the s3 tier: 1 pack that no state needs" in shown
    assert not tier.holds("dead.0-77.safetensors")
    assert "0 states copied to the s3 tier" in invoke(tmp_path / "run", "copy", "--to", "s3")
    for uid in tier.uids():
        with tier.open(uid) as reader:
            reader.verify()
