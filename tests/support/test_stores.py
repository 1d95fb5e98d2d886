"""The servers of external tiers, and each fault of the proxy in front of S3."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stores import (
    AnswerStatus,
    BodyOf,
    CutBody,
    Delay,
    DropRequest,
    Fault,
    FaultyProxy,
    IgnoreRange,
    LoseResponse,
    RedisServer,
    S3Server,
    need,
    process_state,
    redis_missing,
    redis_server,
    s3_missing,
    wait_until,
)

obstore: Any = pytest.importorskip("obstore")
BaseError: type[Exception] = obstore.exceptions.BaseError

BLOB = bytes(range(256)) * 64
PATH = "/objects/tests/blob"


def store(server: S3Server, endpoint: str = "", *, retries: int = 0) -> Any:
    """A client, by way of a proxy if an endpoint is given."""
    url = server.bucket("objects")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment(endpoint).items():
            patch.setenv(name, value)
        return obstore.store.from_url(f"{url}/tests", retry_config={"max_retries": retries})


def get(objects: Any, path: str = "blob") -> bytes:
    return bytes(obstore.get(objects, path).bytes())


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    obstore.put(store(s3), "blob", BLOB)
    with FaultyProxy(s3) as proxy:
        yield proxy


def test_s3_keeps_objects_when_it_is_stopped_and_killed(s3: S3Server) -> None:
    objects = store(s3)
    obstore.put(objects, "a/one", BLOB)
    s3.stop()
    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append(get(objects, "a/one")))
    reader.start()
    reader.join(0.1)
    assert answers == []
    s3.resume()
    reader.join()
    assert answers == [BLOB]
    s3.kill()
    with pytest.raises(BaseError):
        get(objects, "a/one")
    s3.restart()
    assert get(objects, "a/one") == BLOB


def test_s3_creates_an_object_only_once(s3: S3Server) -> None:
    objects = store(s3)
    obstore.put(objects, "once", BLOB, mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(objects, "once", b"other", mode="create")
    assert get(objects, "once") == BLOB


def test_s3_completes_a_multipart_upload_only_once_and_lists_no_other(s3: S3Server) -> None:
    """Without a client library, because obstore has no multipart upload that only creates."""
    objects = store(s3)
    target = "/objects/tests/parts/once"
    identifiers = []
    for status in (200, 412):
        started = s3.request("POST", f"{target}?uploads").body.decode()
        identifiers.append(started.partition("<UploadId>")[2].partition("<")[0])
        part = s3.request("PUT", f"{target}?partNumber=1&uploadId={identifiers[-1]}", BLOB)
        tag = f"<PartNumber>1</PartNumber><ETag>{dict(part.headers)['ETag']}</ETag>"
        body = f"<CompleteMultipartUpload><Part>{tag}</Part></CompleteMultipartUpload>"
        finished = s3.request(
            "POST",
            f"{target}?uploadId={identifiers[-1]}",
            body.encode(),
            headers={"If-None-Match": "*"},
        )
        assert finished.status == status
    assert b"parts/once" in s3.request("GET", "/objects?uploads").body
    assert s3.request("DELETE", f"{target}?uploadId={identifiers[-1]}").status == 204
    assert b"parts/once" not in s3.request("GET", "/objects?uploads").body
    listed = [each["path"] for page in obstore.list(objects, prefix="parts") for each in page]
    assert listed == ["parts/once"]


def test_a_request_is_forwarded_and_counted(proxy: FaultyProxy, s3: S3Server) -> None:
    objects = store(s3, proxy.endpoint)
    obstore.put(objects, "copy", BLOB, use_multipart=False)
    assert get(objects, "copy") == BLOB
    assert bytes(obstore.get_range(objects, "copy", start=10, length=5)) == BLOB[10:15]
    assert obstore.head(objects, "copy")["size"] == len(BLOB)
    obstore.delete(objects, "copy")
    assert proxy.counts() == {"PUT": 1, "GET": 2, "HEAD": 1, "POST": 1}
    assert proxy.response_bytes() >= len(BLOB) + 5
    assert proxy.request_bytes() >= len(BLOB)


def test_a_multipart_upload_is_forwarded(proxy: FaultyProxy, s3: S3Server) -> None:
    """Swift sends the answer to its last request in chunks."""
    objects = store(s3, proxy.endpoint)
    obstore.put(objects, "parts", BLOB, use_multipart=True)
    assert proxy.counts() == {"POST": 2, "PUT": 1}
    assert get(objects, "parts") == BLOB


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (AnswerStatus(500), "500"),
        (AnswerStatus(503), "503"),
        (AnswerStatus(429), "429"),
        (CutBody(100), "body"),
        (DropRequest(), "error sending request"),
        (LoseResponse(), "error sending request"),
    ],
    ids=str,
)
def test_a_read_fails_as_often_as_the_fault_says(
    proxy: FaultyProxy, s3: S3Server, fault: Fault, message: str
) -> None:
    objects = store(s3, proxy.endpoint)
    proxy.inject(fault, method="GET", path=PATH, requests=2)
    proxy.inject(AnswerStatus(500), method="GET", path="/another")
    for _ in range(2):
        with pytest.raises(BaseError, match=message):
            get(objects)
    assert get(objects) == BLOB
    assert proxy.counts() == {"GET": 3}


@pytest.mark.parametrize(("fault", "status"), [(DropRequest(), 404), (LoseResponse(), 200)])
def test_a_write_is_lost_or_its_response_is(
    proxy: FaultyProxy, s3: S3Server, fault: Fault, status: int
) -> None:
    name = type(fault).__name__
    proxy.inject(fault, method="PUT", path=name)
    with pytest.raises(BaseError):
        obstore.put(store(s3, proxy.endpoint), name, BLOB, use_multipart=False)
    assert s3.request("GET", f"/objects/tests/{name}").status == status


def test_a_range_is_ignored(proxy: FaultyProxy, s3: S3Server) -> None:
    objects = store(s3, proxy.endpoint)
    proxy.inject(IgnoreRange(), method="GET", path=PATH)
    with pytest.raises(BaseError, match="non-partial"):
        obstore.get_range(objects, "blob", start=10, length=5)
    assert proxy.response_bytes() == len(BLOB)


def test_the_body_is_that_of_another_object(proxy: FaultyProxy, s3: S3Server) -> None:
    objects = store(s3, proxy.endpoint)
    other = BLOB[::-1]
    obstore.put(objects, "other", other)
    proxy.inject(BodyOf("/objects/tests/other"), method="GET", path=PATH, requests=2)
    assert get(objects) == other
    assert bytes(obstore.get_range(objects, "blob", start=10, length=5)) == other[10:15]
    assert get(objects) == BLOB


def test_a_request_is_delayed_until_the_proxy_closes(s3: S3Server) -> None:
    with FaultyProxy(s3) as proxy:
        proxy.inject(Delay(3600))
        endings: list[Exception] = []

        def read() -> None:
            try:
                get(store(s3, proxy.endpoint))
            except BaseError as error:
                endings.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(0.2)
        assert endings == []
    reader.join()
    assert len(endings) == 1


def test_redis_answers_after_it_was_stopped_and_forgets_when_killed(redis: RedisServer) -> None:
    assert redis.command("SET", "key", BLOB) == b"OK"
    redis.stop()
    answers: list[bytes | None] = []
    reader = threading.Thread(target=lambda: answers.append(redis.command("GET", "key")))
    reader.start()
    reader.join(0.1)
    assert answers == []
    redis.resume()
    reader.join()
    assert answers == [BLOB]
    redis.kill()
    with pytest.raises(ConnectionRefusedError):
        redis.command("GET", "key")
    redis.restart()
    assert redis.command("GET", "key") is None


def test_redis_keeps_data_asks_for_a_password_and_is_limited(tmp_path: Path) -> None:
    need(redis_missing())
    with redis_server(
        tmp_path, password="secret", maxmemory_bytes=8 << 20, is_lasting=True
    ) as server:
        server.command("SET", "key", BLOB)
        with pytest.raises(RuntimeError, match="OOM"):
            server.command("SET", "large", bytes(8 << 20), "GET")
        server.kill()
        server.restart()
        assert server.command("GET", "key") == BLOB
        server.password = ""
        with pytest.raises(RuntimeError, match="NOAUTH"):
            server.command("GET", "key")


_HOLDER = """
import pathlib, signal, sys
from tests.support.stores import redis_server, s3_server
with s3_server(pathlib.Path(sys.argv[1])) as s3, redis_server(pathlib.Path(sys.argv[1])) as redis:
    print(*s3.pids(), *redis.pids(), flush=True)
    signal.pause()
"""


def test_servers_end_with_a_killed_process(tmp_path: Path) -> None:
    need(s3_missing() or redis_missing())
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 7
        assert all(process_state(pid) != "X" for pid in pids)
        holder.kill()
    wait_until(lambda: all(process_state(pid) == "X" for pid in pids), "a server outlives the test")
