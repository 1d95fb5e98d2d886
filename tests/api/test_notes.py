"""Notes over the web: read by whoever may read, written by whoever may write."""

from __future__ import annotations

import json

from datastates import Repository
from tests.api.conftest import BASE, NAME, READ, TOKENS, WRITE, Serve

NOTES = f"{BASE}/notes"


def test_a_note_is_written_read_edited_and_deleted(repo: Repository, serve: Serve) -> None:
    writer = serve({NAME: repo}, token=WRITE, tokens=TOKENS)
    uid = repo.state("main").uid

    made = writer.post(NOTES, json={"text": "Diverges *here*", "state": uid, "author": "ada"})
    of_branch = writer.post(NOTES, json={"text": "<b>bad</b>", "branch": "main"})

    assert (made.status_code, of_branch.status_code) == (201, 201)
    note = made.json()
    assert {key: note[key] for key in ("state", "branch", "author", "text", "edited_at")} == {
        "state": uid,
        "branch": None,
        "author": "ada",
        "text": "Diverges *here*",
        "edited_at": None,
    }
    assert writer.get(f"{BASE}/states/{uid}").json()["notes"] == [note]
    assert writer.get(NOTES, params={"branch": "main"}).json()["items"] == [of_branch.json()]
    assert [one["uid"] for one in writer.get(NOTES).json()["items"]] == [
        of_branch.json()["uid"],
        note["uid"],
    ]
    first = writer.get(NOTES, params={"limit": 1}).json()
    assert writer.get(NOTES, params={"limit": 1, "after": first["next"]}).json() == {
        "items": [note],
        "next": None,
    }

    seen = {"If-Match": made.headers["ETag"]}
    edited = writer.patch(f"{NOTES}/{note['uid']}", json={"text": "It did not"}, headers=seen)
    assert (edited.status_code, edited.json()["text"]) == (200, "It did not")
    assert edited.json()["edited_at"] is not None
    now = {"If-Match": edited.headers["ETag"]}
    assert writer.delete(f"{NOTES}/{note['uid']}", headers=now).status_code == 204
    assert writer.delete(f"{NOTES}/{note['uid']}", headers=now).json()["kind"] == "not-found"
    assert [each.text for each in repo.notes] == ["<b>bad</b>"]


def test_the_second_of_two_who_edit_one_note_is_refused(repo: Repository, serve: Serve) -> None:
    writer = serve({NAME: repo}, token=WRITE, tokens=TOKENS)
    made = writer.post(NOTES, json={"text": "first", "branch": "main"})
    url, seen = f"{NOTES}/{made.json()['uid']}", {"If-Match": json.dumps(made.json()["created_at"])}

    first = writer.patch(url, json={"text": "mine"}, headers=seen)
    second = writer.patch(url, json={"text": "theirs"}, headers=seen)
    gone = writer.delete(url, headers=seen)

    assert seen["If-Match"] == made.headers["ETag"]
    assert [(answer.status_code, answer.json()["kind"]) for answer in (second, gone)] == [
        (412, "conflict")
    ] * 2
    assert "read it again" in second.json()["detail"]
    assert [writer.patch(url, json={"text": "x"}).status_code, writer.delete(url).status_code] == [
        428,
        428,
    ]
    assert [note.text for note in repo.notes] == ["mine"]
    assert (
        writer.patch(
            url,
            json={"text": "theirs"},
            headers={"If-Match": json.dumps(first.json()["edited_at"])},
        ).status_code
        == 200
    )


def test_whoever_may_only_read_writes_nothing(repo: Repository, serve: Serve) -> None:
    note = repo.notes.write("kept", state="main")
    reader = serve({NAME: repo}, token=READ, tokens=TOKENS)

    answers = (
        reader.post(NOTES, json={"text": "x", "branch": "main"}),
        reader.patch(f"{NOTES}/{note.uid}", json={"text": "x"}),
        reader.delete(f"{NOTES}/{note.uid}"),
    )

    assert [answer.status_code for answer in answers] == [403] * 3
    assert [one["text"] for one in reader.get(NOTES).json()["items"]] == ["kept"]
    assert list(repo.notes) == [note]


def test_what_is_no_note_is_refused_with_the_reason(repo: Repository, serve: Serve) -> None:
    writer = serve({NAME: repo}, token=WRITE, tokens=TOKENS)
    uid = repo.state("main").uid

    for body, status, said in (
        ({"text": " ", "state": uid}, 400, "empty"),
        ({"text": "x" * 16_385, "state": uid}, 400, "16384"),
        ({"text": "x"}, 400, "name one"),
        ({"text": "x", "branch": "nobody"}, 404, "nobody"),
        ({"text": "x", "state": "0" * 24}, 404, "0" * 24),
    ):
        answer = writer.post(NOTES, json=body)
        assert answer.status_code == status
        assert said in answer.json()["detail"]
    assert list(repo.notes) == []
