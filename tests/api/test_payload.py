"""States are downloaded as the files that an export writes, in any piece, checked on the way."""

from __future__ import annotations

import shutil
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import datastates
from datastates import Repository
from datastates.api import payload
from datastates.api.payload import StateFile, range_of
from datastates.files.checkpoints import export, plan_export
from datastates.lineage.write import replicas
from datastates.state.manifest import CHUNK_BYTES
from tests.api.conftest import BASE, NAME, READ
from tests.api.live import live
from tests.support.effort import examples

MIB = 1 << 20


def odd() -> dict[str, Any]:
    """Tensors of every kind that a file has to lay out anew."""
    torch.manual_seed(5)
    shared = torch.randn(300, 7)
    return {
        "tied": [shared, shared],
        "turned": torch.randn(700, 900).t(),
        "last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "spread": torch.randn(5, 1).expand(5, 400_000),
        "line": torch.tensor([2.5]).expand(700_000),
        "gap": torch.arange(40)[::3],
        "none": torch.zeros(0, 4),
        "one": torch.tensor(7, dtype=torch.int64),
        "half": torch.randn(33).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "pairs": torch.randn(5, dtype=torch.complex128),
        "eight": torch.randn(9).to(torch.float8_e5m2),
        "large": torch.randn(3 * MIB + 11),
        "text": "not a tensor",
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("odd")
    with (
        datastates.open(made / "runs", memory_bytes=128 * MIB) as repo,
        repo.track(rng=False, tree=odd()) as run,
    ):
        run.capture(step=3).wait("durable")
    return made


@pytest.fixture(scope="module")
def odd_repo(folder: Path) -> Iterator[Repository]:
    with datastates.open(folder / "runs", memory_bytes=32 * MIB) as repo:
        yield repo


@pytest.fixture(scope="module")
def whole(odd_repo: Repository, folder: Path) -> bytes:
    """The file as an export writes it."""
    path = folder / "whole.safetensors"
    export(plan_export(odd_repo.load("main"), odd_repo.state("main"), path))
    return path.read_bytes()


@pytest.fixture(scope="module")
def served(odd_repo: Repository) -> Iterator[str]:
    with live({NAME: odd_repo}) as url:
        yield f"{url}{BASE}/states/{odd_repo.state('main').uid}/payload"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(headers={"Authorization": f"Bearer {READ}"}, timeout=60) as made:
        yield made


def test_a_download_is_the_file_that_an_export_writes(
    served: str, client: httpx.Client, whole: bytes
) -> None:
    answer = client.get(served)
    assert answer.status_code == 200
    assert answer.content == whole
    assert int(answer.headers["content-length"]) == len(whole)
    assert answer.headers["accept-ranges"] == "bytes"
    loaded = safetensors.torch.load(answer.content)
    tree = odd()
    for name in (
        "turned",
        "last",
        "spread",
        "line",
        "gap",
        "none",
        "one",
        "half",
        "flags",
        "large",
    ):
        assert torch.equal(loaded[f"tree/{name}"], tree[name]), name
    assert torch.equal(loaded["tree/tied/0"], loaded["tree/tied/1"])


def test_only_what_is_asked_for_is_sent(served: str, client: httpx.Client) -> None:
    answer = client.get(served, params={"only": ["tree/tied", "tree/f*"]})
    assert set(safetensors.torch.load(answer.content)) == {
        "tree/tied/0",
        "tree/tied/1",
        "tree/flags",
    }
    # its bytes lie at the one it is tied to
    alone = client.get(served, params={"only": "tree/tied/1"})
    assert torch.equal(safetensors.torch.load(alone.content)["tree/tied/1"], odd()["tied"][1])
    assert (
        len({answer.headers["etag"], alone.headers["etag"], client.head(served).headers["etag"]})
        == 3
    )
    missing = client.get(served, params={"only": "nothing"})
    assert 400 <= missing.status_code < 500


def test_head_says_the_size_and_sends_nothing(
    served: str, client: httpx.Client, whole: bytes, odd_repo: Repository
) -> None:
    answer, full = client.head(served), client.get(served)
    assert (answer.status_code, answer.content) == (200, b"")
    for name in ("content-length", "etag", "accept-ranges", "content-disposition", "content-type"):
        assert answer.headers[name] == full.headers[name]
    state = odd_repo.state("main")
    assert (
        answer.headers["content-disposition"]
        == f'attachment; filename="state-{state.uid[:10]}-step3.safetensors"'
    )
    assert client.get(served, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert client.head(served, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_every_range_is_that_part_of_the_file(odd_repo: Repository, whole: bytes) -> None:
    state = odd_repo.state("main")

    @settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.integers(0, len(whole) - 1), st.one_of(st.integers(1, 300), st.integers(1, len(whole)))
    )
    def check(start: int, count: int) -> None:
        with odd_repo.core.open_payload(state) as reader:
            file = StateFile(reader, state, None)
            end = min(start + count, file.size)
            pieces = list(file.pieces(start, end))
        assert b"".join(pieces) == whole[start:end]
        assert all(0 < len(piece) <= 2 * MIB for piece in pieces)

    check()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=10-", (10, 100)),
        ("bytes=90-200", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=100-", (100, 100)),
        ("bytes=500-600", (100, 100)),
        ("bytes=-0", (100, 100)),
        ("bytes=5-4", None),
        ("bytes=0-1,5-6", None),
        ("bytes=-", None),
        ("bytes=x-y", None),
        ("items=0-1", None),
        ("bytes=" + "9" * 30 + "-", None),
    ],
)
def test_ranges_are_read_as_the_standard_says(
    header: str | None, expected: tuple[int, int] | None
) -> None:
    assert range_of(header, 100) == expected


def test_a_range_is_answered_by_it_alone(served: str, client: httpx.Client, whole: bytes) -> None:
    answer = client.get(served, headers={"Range": "bytes=1000-5999"})
    assert (answer.status_code, answer.content) == (206, whole[1000:6000])
    assert answer.headers["content-range"] == f"bytes 1000-5999/{len(whole)}"
    tail = client.get(served, headers={"Range": "bytes=-77", "If-Range": answer.headers["etag"]})
    assert (tail.status_code, tail.content) == (206, whole[-77:])
    beyond = client.get(served, headers={"Range": f"bytes={len(whole)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(whole)}")
    assert beyond.json()["kind"] == "invalid-input"
    for headers in ({"Range": "bytes=0-9", "If-Range": '"another"'}, {"Range": "bytes=0-9,20-29"}):
        assert client.get(served, headers=headers).content == whole


def test_curl_resumes_a_download(served: str, whole: bytes, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    path = tmp_path / "out.safetensors"
    path.write_bytes(whole[:1_234_567])
    subprocess.run(
        [
            "curl",
            "-sS",
            "--fail",
            "-C",
            "-",
            "-H",
            f"Authorization: Bearer {READ}",
            "-o",
            str(path),
            served,
        ],
        check=True,
    )
    assert path.read_bytes() == whole


def read_into(got: bytearray, answer: httpx.Response) -> None:
    for piece in answer.iter_raw():
        got += piece


def test_damage_breaks_the_download_and_is_never_sent(
    folder: Path, whole: bytes, tmp_path: Path, client: httpx.Client
) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs")
    with datastates.open(tmp_path / "runs", memory_bytes=32 * MIB) as repo:
        uid = repo.state("main").uid
        large = odd()["large"].numpy().tobytes()
        (pack,) = (tmp_path / "runs" / "packs").glob("*.safetensors")
        data = bytearray(pack.read_bytes())
        data[data.index(large[-1000:]) + 500] ^= 1
        pack.write_bytes(data)
        with live({NAME: repo}) as url:
            address = f"{url}{BASE}/states/{uid}/payload"
            got = bytearray()
            with client.stream("GET", address, params={"only": "tree/large"}) as broken:
                assert broken.status_code == 200
                with pytest.raises(httpx.RemoteProtocolError):
                    read_into(got, broken)
            good = 8 + int.from_bytes(got[:8], "little")
            assert len(got) > 4 * MIB
            assert large.startswith(bytes(got[good:]))
            refused = client.get(
                address, params={"only": "tree/large"}, headers={"Range": "bytes=-10"}
            )
            assert refused.status_code >= 500
            assert client.get(address, params={"only": "tree/one"}).status_code == 200


def test_downloads_are_bounded_and_those_that_are_left_end(
    odd_repo: Repository, client: httpx.Client
) -> None:
    uid = odd_repo.state("main").uid
    with live({NAME: odd_repo}) as url:
        address = f"{url}{BASE}/states/{uid}/payload"
        for _ in range(3):
            opened = []
            while True:
                stream = client.stream("GET", address)
                answer = stream.__enter__()
                opened.append(stream)
                if answer.status_code != 200:
                    break
            assert (len(opened), answer.status_code, answer.headers["retry-after"]) == (9, 503, "1")
            for stream in opened:  # without reading: the server sees that they are gone
                stream.__exit__(None, None, None)
            while client.head(address).status_code == 503:
                pass


def test_memory_for_a_download_is_two_chunks_and_one_tensor_of_another_order(
    odd_repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "PIECE_BYTES", 64 << 10)
    state = odd_repo.state("main")
    tracemalloc.start()
    try:
        with odd_repo.core.open_payload(state) as reader:
            file = StateFile(reader, state, None)
            total = sum(len(piece) for piece in file.pieces(0, file.size))
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 20 * MIB
    assert peak < 2 * MIB + 2 * CHUNK_BYTES + max(
        part.bytes for part in file._parts if not payload._is_plain(part)
    )


def test_a_state_whose_bytes_are_gone_is_refused(tmp_path: Path, client: httpx.Client) -> None:
    folder = tmp_path / "runs"
    with (
        datastates.open(folder, memory_bytes=32 * MIB) as repo,
        repo.track(rng=False, tree={"x": torch.ones(3)}) as run,
    ):
        uid = run.capture(step=1).wait("durable").uid
    with datastates.open(folder, memory_bytes=32 * MIB) as repo:
        repo.core.tiers.durable.remove(uid)
        with repo.core.database.write() as session:
            replicas.evict(session, [uid], tier="local", node=repo.core.home.check_writable())
        with live({NAME: repo}) as url:
            answer = client.get(f"{url}{BASE}/states/{uid}/payload")
            # though no ancestor has any
            assert (answer.status_code, answer.json()["kind"]) == (
                410,
                "unavailable",
            )
            assert "evicted" in answer.json()["detail"]
            assert (
                client.get(f"{url}{BASE}/states/{'0' * 24}/payload").json()["kind"] == "not-found"
            )
            assert client.get(f"{url}{BASE}/states/..%2f..%2fetc/payload").status_code in (
                400,
                404,
                422,
            )
