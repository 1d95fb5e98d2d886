"""``note``."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Invoke, uid

pytestmark = pytest.mark.usefixtures("root")


def test_notes_are_written_listed_edited_and_deleted(invoke: Invoke) -> None:
    made = invoke("note", "main~2", "-m", "Diverges *here*", "--author", "ada", "--json").json
    branch = invoke("note", "--branch", "main", "-m", "two\nlines", "--json").json

    assert (made["state"], made["text"], made["author"]) == (uid("1", 6), "Diverges *here*", "ada")
    assert (branch["branch"], branch["state"]) == ("main", None)
    assert [note["uid"] for note in invoke("note", "--json").lines] == [branch["uid"], made["uid"]]
    lines = invoke("note", "main~2").out.splitlines()
    assert lines[0].startswith(f"{made['uid']}  state {uid('1', 6)[:10]}  ada, ")
    assert lines[1:] == ["    Diverges *here*"]
    assert invoke("note", "--branch", "main").out.splitlines()[1:] == ["    two", "    lines"]

    assert (
        invoke("note", "--edit", made["uid"], "-m", "better").out
        == f"note {made['uid']} is changed; it read: {made['text']}\n"
    )
    assert (
        invoke("note", "--delete", made["uid"]).out
        == f"note {made['uid']} is deleted; it read: better\n"
    )
    assert [note["text"] for note in invoke("note", "--json").lines] == ["two\nlines"]


def test_a_note_cannot_steer_the_terminal(invoke: Invoke) -> None:
    invoke("note", "main", "-m", "\x1b]0;evil\x07 \u202e", "--author", "\x1b[31m")

    out = invoke("note").out
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_what_is_missing_or_too_much_is_said(invoke: Invoke) -> None:
    assert "no notes on warm yet" in invoke("note", "warm").err
    assert invoke("note", "-m", "of what?").code == 2
    assert invoke("note", "main", "--branch", "main", "-m", "x").code == 2
    assert invoke("note", "--edit", "0" * 24).code == 2
    assert invoke("note", "--delete", "0" * 24).code == 3
    assert invoke("note", "main", "-m", " ").code == 5


def test_metrics_are_added_to_a_state_and_shown(invoke: Invoke) -> None:
    done = invoke(
        "note",
        "main~2",
        "--metric",
        "test/loss=0.3",
        "--metric",
        "acc=nan",
        "--author",
        "ann",
    )

    assert (done.code, done.out) == (
        0,
        f"state {uid('1', 6)[:10]} has test/loss = 0.3, acc = nan\n",
    )
    assert "metrics by ann: test/loss=0.3, acc=nan" in invoke("show", "main~2").out
    (line,) = invoke("show", "main~2", "--json").json["added"]
    assert (line["name"], line["reason"]) == (uid("1", 6), "metrics by ann: test/loss=0.3, acc=nan")
    assert invoke("note", "main~2", "--metric", "test/loss=0.2").code == 4
    changed = invoke("note", "main~2", "--metric", "test/loss=0.2", "--replace", "--json").json
    assert changed["metrics"]["test/loss"] == 0.2
    assert invoke("show", "main@best:test/loss", "--json").json["uid"] == uid("1", 6)
    assert invoke("note", "main", "--metric", "loss").code == 2
    assert invoke("note", "--metric", "loss=1").code == 2
    assert invoke("note", "main", "--metric", "loss=1", "-m", "x").code == 2
    assert invoke("note", "nothing", "--metric", "loss=1").code == 3
