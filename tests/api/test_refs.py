"""Branches and tags over the web: read by anybody who may, changed only from where they were
seen."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from datastates import Repository
from datastates.lineage.write import refs
from datastates.maintenance.retention_pass import evict
from tests.api.conftest import BASE, NAME, READ, TOKENS, WRITE, Serve

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

REFS = f"{BASE}/refs"


@pytest.fixture
def writer(repo: Repository, serve: Serve) -> TestClient:
    return serve({NAME: repo}, token=WRITE, tokens=TOKENS)


def etag(client: TestClient, name: str) -> str:
    return str(client.get(f"{REFS}/{name}").headers["etag"])


def test_refs_are_listed_by_name_and_by_kind(client: TestClient) -> None:
    names = {
        kind: [ref["name"] for ref in client.get(REFS, params={"kind": kind}).json()["items"]]
        for kind in ("branch", "tag")
    }

    assert names == {"branch": ["fork", "lone", "main", "soup"], "tag": ["best", "warm"]}
    everything = client.get(REFS).json()
    assert [ref["name"] for ref in everything["items"]] == [
        "best",
        "fork",
        "lone",
        "main",
        "soup",
        "warm",
    ]
    assert everything["next"] is None
    assert client.get(REFS, params={"kind": "note"}).status_code == 400


def test_list_that_one_has_is_not_sent_again_until_it_changes(
    writer: TestClient, repo: Repository
) -> None:
    tag = writer.get(REFS).headers["etag"]

    assert writer.get(REFS, headers={"If-None-Match": tag}).status_code == 304
    repo.tag("new", "main")
    assert writer.get(REFS, headers={"If-None-Match": tag}).status_code == 200


def test_ref_has_its_kind_version_and_state_as_its_etag(
    client: TestClient, repo: Repository
) -> None:
    answer = client.get(f"{REFS}/warm")

    assert answer.json() == {
        "name": "warm",
        "kind": "tag",
        "state": repo.state("warm").uid,
        "version": 1,
        "message": "end of shared prefix",
    }
    assert answer.headers["etag"] == f'"tag-1-{repo.state("warm").uid}"'
    assert etag(client, "main") == f'"branch-8-{repo.state("main").uid}"'
    assert client.head(f"{REFS}/main").headers["etag"] == etag(client, "main")
    missing = client.get(f"{REFS}/wram")
    assert (missing.status_code, missing.json()["kind"]) == (404, "not-found")
    assert "'warm'" in missing.json()["detail"]


@pytest.mark.parametrize("name", ["good", "exp/one", "a.b-c_d", "größe"])
def test_tag_is_made_and_says_that_it_came_from_the_web(
    writer: TestClient, repo: Repository, name: str
) -> None:
    made = writer.put(f"{REFS}/{name}", json={"kind": "tag", "rev": "main~2", "message": "why"})

    assert (made.status_code, made.headers["etag"]) == (201, f'"tag-1-{repo.state("main~2").uid}"')
    assert made.json() == writer.get(f"{REFS}/{name}").json()
    assert repo.state(name) == repo.state("main~2")
    assert [event["reason"] for event in writer.get(f"{BASE}/reflog/{name}").json()["items"]] == [
        "tag (web)"
    ]


def test_name_that_is_taken_is_a_conflict(writer: TestClient, repo: Repository) -> None:
    for body in ({"kind": "tag", "rev": "main"}, {"kind": "branch", "rev": "main"}):
        refused = writer.put(f"{REFS}/warm", json=body)
        assert (refused.status_code, refused.json()["kind"]) == (409, "conflict")
        assert (
            writer.put(f"{REFS}/warm", json=body, headers={"If-None-Match": "*"}).status_code == 412
        )
    assert repo.state("warm").step == 3


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("x", {}),
        ("x", {"kind": "tag"}),
        ("x", {"kind": "note", "rev": "main"}),
        ("x", {"kind": "tag", "rev": ""}),
        ("x", {"kind": "tag", "rev": "main~x"}),
        ("x", {"kind": "tag", "rev": "main..fork"}),
        ("x", {"kind": "tag", "rev": "main", "message": "a\x00b"}),
        ("x", {"kind": "branch", "rev": "main", "message": "why"}),
        ("abcd", {"kind": "tag", "rev": "main"}),
        ("a~b", {"kind": "tag", "rev": "main"}),
        ("x" * 201, {"kind": "tag", "rev": "main"}),
        ("a%00b", {"kind": "tag", "rev": "main"}),
        ("", {"kind": "tag", "rev": "main"}),
    ],
)
def test_what_cannot_be_a_ref_is_refused(
    writer: TestClient, repo: Repository, name: str, body: dict[str, Any]
) -> None:
    before = repo.refs()
    refused = writer.put(f"{REFS}/{name}", json=body)

    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/problem+json"
    assert repo.refs() == before


def test_state_that_is_not_there_cannot_be_named(writer: TestClient) -> None:
    assert writer.put(f"{REFS}/x", json={"kind": "tag", "rev": "main~99"}).status_code == 404


def test_old_name_with_a_part_that_is_a_dot_is_no_other_name(
    writer: TestClient, repo: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = repo.tag("a/b", "main")
    with monkeypatch.context() as older:
        # a lineage may have such names from a time when they were allowed
        older.setattr(refs, "check_name", str)
        old = repo.tag("a/./b", "main")
    path = f"{REFS}/a/%2E/b"  # a client would take a bare dot for another path

    assert writer.get(path).json()["name"] == old.name
    assert (
        writer.delete(path, headers={"If-Match": writer.get(path).headers["etag"]}).status_code
        == 204
    )
    assert writer.get(f"{REFS}/{made.name}").json()["name"] == made.name
    refused = writer.put(path, json={"kind": "tag", "rev": "main"})
    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid-input")
    assert "'a/b' would do" in refused.json()["detail"]


def test_ref_moves_only_from_the_version_that_was_seen(
    writer: TestClient, repo: Repository
) -> None:
    url, body = f"{REFS}/warm", {"rev": "main~1"}
    seen, uid = etag(writer, "warm"), repo.state("warm").uid

    assert writer.patch(url, json=body).status_code == 428
    for wrong in (
        f'"tag-2-{uid}"',
        f'"branch-1-{uid}"',
        f'"tag-1-{"0" * 24}"',
        '"1"',
        seen.strip('"'),
        f"W/{seen}",
        "nonsense",
    ):
        refused = writer.patch(url, json=body, headers={"If-Match": wrong})
        assert (refused.status_code, refused.json()["kind"]) == (412, "conflict"), wrong
    assert repo.state("warm").step == 3
    moved = writer.patch(url, json=body, headers={"If-Match": f'"other", {seen}'})
    assert (moved.status_code, moved.headers["etag"]) == (
        200,
        f'"tag-2-{repo.state("main~1").uid}"',
    )
    assert repo.state("warm").step == 7
    assert repo.reflog("warm")[0].reason == "move (web)"
    assert writer.patch(url, json={"rev": "main"}, headers={"If-Match": seen}).status_code == 412
    assert writer.patch(f"{REFS}/nobody", json=body, headers={"If-Match": seen}).status_code == 404


def test_ref_that_came_back_to_its_state_has_another_version(
    writer: TestClient, repo: Repository
) -> None:
    seen, there = etag(writer, "warm"), repo.state("warm")
    repo.move("warm", "main", expected=there)
    repo.move("warm", there, expected="main")

    assert (
        writer.patch(f"{REFS}/warm", json={"rev": "main"}, headers={"If-Match": seen}).status_code
        == 412
    )


@pytest.mark.parametrize(("kind", "rev"), [("tag", "main"), ("branch", "warm")])
def test_name_that_was_made_again_is_not_the_ref_that_was_seen(
    writer: TestClient, repo: Repository, kind: str, rev: str
) -> None:
    seen, uid = etag(writer, "warm"), repo.state(rev).uid
    repo.delete_ref("warm")
    (repo.tag if kind == "tag" else repo.branch)("warm", uid)

    assert (
        writer.patch(f"{REFS}/warm", json={"rev": "main~1"}, headers={"If-Match": seen}).status_code
        == 412
    )
    assert writer.delete(f"{REFS}/warm", headers={"If-Match": seen}).status_code == 412
    assert writer.get(f"{REFS}/warm").json() == {
        "name": "warm",
        "kind": kind,
        "state": uid,
        "version": 1,
        "message": None,
    }


def test_ref_is_sent_to_who_has_it_because_its_message_may_be_another(
    writer: TestClient, repo: Repository
) -> None:
    seen, there = etag(writer, "warm"), repo.state("warm")
    repo.delete_ref("warm")
    repo.tag("warm", there, message="another")

    answer = writer.get(f"{REFS}/warm", headers={"If-None-Match": seen})
    assert (answer.status_code, answer.json()["message"]) == (200, "another")


def test_of_many_who_move_at_once_one_does(repo: Repository, serve: Serve) -> None:
    clients = [serve({NAME: repo}, token=WRITE, tokens=TOKENS) for _ in range(4)]
    for client in clients:
        # an application makes its routes ready at the first request, within
        # warnings.catch_warnings: not in many threads
        assert client.patch(f"{REFS}/warm", json={"rev": "main"}).status_code == 428
    seen = etag(clients[0], "warm")
    begin, statuses = threading.Barrier(len(clients)), []

    def move(client: TestClient, rev: str) -> None:
        begin.wait(60)
        statuses.append(
            client.patch(f"{REFS}/warm", json={"rev": rev}, headers={"If-Match": seen}).status_code
        )

    threads = [
        threading.Thread(target=move, args=(client, f"main~{number}"))
        for number, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 412, 412, 412]
    assert clients[0].get(f"{REFS}/warm").json()["version"] == 2


def test_ref_is_deleted_and_its_reflog_stays(writer: TestClient, repo: Repository) -> None:
    url = f"{REFS}/best"

    assert writer.delete(url).status_code == 428
    assert writer.delete(url, headers={"If-Match": etag(writer, "warm")}).status_code == 412
    gone = writer.delete(url, headers={"If-Match": etag(writer, "best")})
    assert (gone.status_code, gone.content) == (204, b"")
    assert writer.get(url).status_code == 404
    assert [event["reason"] for event in writer.get(f"{BASE}/reflog/best").json()["items"]] == [
        "delete (web)",
        "tag",
    ]
    assert writer.delete(url, headers={"If-Match": "*"}).status_code == 404


def test_reflog_is_read_in_pages(client: TestClient) -> None:
    whole = client.get(f"{BASE}/reflog/main").json()
    found: list[dict[str, Any]] = []
    after: str | None = None
    for _ in range(10):
        page = client.get(
            f"{BASE}/reflog/main", params={"limit": 3, **({"after": after} if after else {})}
        ).json()
        found += page["items"]
        if (after := page["next"]) is None:
            break

    assert len(whole["items"]) == 8
    assert found == whole["items"]
    assert [event["id"] for event in found] == sorted(
        (event["id"] for event in found), reverse=True
    )
    assert client.get(f"{BASE}/reflog/nobody").status_code == 404
    assert client.get(f"{BASE}/reflog/main", params={"after": "1"}).json() == {
        "items": [],
        "next": None,
    }


def test_who_only_reads_changes_nothing(repo: Repository, serve: Serve) -> None:
    reader = serve({NAME: repo}, token=READ, tokens=TOKENS)
    before = repo.refs()

    assert reader.put(f"{REFS}/x", json={"kind": "tag", "rev": "main"}).status_code == 403
    assert (
        reader.patch(f"{REFS}/warm", json={"rev": "main"}, headers={"If-Match": '"1"'}).status_code
        == 403
    )
    assert reader.delete(f"{REFS}/warm", headers={"If-Match": '"1"'}).status_code == 403
    assert repo.refs() == before


def test_tag_of_a_state_that_is_only_in_memory_makes_it_durable(
    writer: TestClient, repo: Repository
) -> None:
    import torch

    run = repo.track(branch="live", weight=torch.zeros(8), rng=False, durable_interval_s=1e9)
    run.capture().wait("captured")
    capture = run.capture()
    assert writer.put(f"{REFS}/kept", json={"kind": "tag", "rev": "live"}).status_code == 201

    repo.core.drain()
    assert capture.status == "durable"


def test_tag_of_a_state_whose_bytes_are_gone_is_made_with_a_warning(
    writer: TestClient, repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    uid = repo.state("main~2").uid
    evict(repo.core, uid)
    writer.put(f"{REFS}/fine", json={"kind": "tag", "rev": "main"})
    assert not caplog.messages
    made = writer.put(f"{REFS}/gone", json={"kind": "tag", "rev": uid})
    assert (made.status_code, made.json()["state"]) == (201, uid)
    assert [
        "the nearest state that has its bytes is" in message for message in caplog.messages
    ] == [True]
