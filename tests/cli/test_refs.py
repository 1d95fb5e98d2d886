"""``tag``, ``branch``, ``refs`` and ``reflog``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Invoke, uid

pytestmark = pytest.mark.usefixtures("root")


def test_bare_commands_list_their_kind(invoke: Invoke) -> None:
    assert [ref["name"] for ref in invoke("tag", "--json").lines] == ["warm"]
    assert [ref["name"] for ref in invoke("branch", "--json").lines] == ["fork", "main"]
    assert invoke("refs", "--json").lines == [
        {"name": "fork", "kind": "branch", "state": uid("f", 6), "version": 4, "message": None},
        {"name": "main", "kind": "branch", "state": uid("1", 8), "version": 8, "message": None},
        {"name": "warm", "kind": "tag", "state": uid("1", 3), "version": 1, "message": "end of the prefix"},
    ]


def test_list_for_people_has_a_row_for_each(invoke: Invoke) -> None:
    lines = invoke("refs").out.splitlines()

    assert lines[0].split() == ["name", "kind", "state", "step", "status", "captured", "message"]
    assert lines[3].split()[:5] == ["warm", "tag", uid("1", 3)[:10], "3", "durable"]
    assert lines[3].endswith("end of the prefix")
    assert not any(line.endswith(" ") for line in lines)


def test_tag_is_made_with_its_message(invoke: Invoke) -> None:
    made = invoke("tag", "good", "main~2", "-m", "low loss", "--json")

    assert made.code == 0
    assert made.json == {"name": "good", "kind": "tag", "state": uid("1", 6), "version": 1, "message": "low loss"}
    assert "good" in invoke("tag").out
    assert invoke("branch", "twig", "warm").out == f"branch twig names {uid('1', 3)[:10]} (step 3)\n"


def test_taken_name_is_a_conflict(invoke: Invoke) -> None:
    failed = invoke("tag", "warm", "main")

    assert failed.code == 4
    assert failed.err.startswith("error: tag 'warm' already names")
    assert failed.out == ""


def test_move_compares_and_swaps(invoke: Invoke) -> None:
    assert invoke("branch", "fork", "main", "--move", "--expected", "main~3").code == 4
    assert invoke("branch", "fork", "main", "--move", "--expected", "fork").code == 0
    assert invoke("show", "fork", "--json").json["uid"] == uid("1", 8)
    assert invoke("branch", "fork", "main~1", "--move").out == f"branch fork moved from {uid('1', 8)[:10]} to {uid('1', 7)[:10]}\n"


def test_delete_forgets_the_name_and_keeps_its_log(invoke: Invoke) -> None:
    gone = invoke("tag", "warm", "--delete")

    assert gone.code == 0
    assert uid("1", 3) in gone.out, "or nobody could name it again"
    assert invoke("tag", "--json").out == ""
    assert [(event["old"], event["new"]) for event in invoke("reflog", "warm", "--json").lines] == [
        (uid("1", 3), None),
        (None, uid("1", 3)),
    ]
    assert invoke("tag", "warm", "--delete").code == 3


def test_kinds_are_not_mixed_up(invoke: Invoke) -> None:
    assert invoke("tag", "fork", "--delete").code == 3
    assert "datastates branch" in invoke("tag", "fork", "--delete").err
    assert invoke("branch", "warm", "main", "--move").code == 3
    assert len(invoke("refs", "--json").lines) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("tag", "new"),
        ("tag", "--delete"),
        ("tag", "warm", "main", "--delete"),
        ("tag", "new", "main", "--expected", "main"),
        ("tag", "warm", "main", "--move", "-m", "why"),
        ("branch", "fork", "--move"),
        ("branch", "new", "main", "-m", "why"),
        ("reflog",),
    ],
)
def test_wrong_command_lines_end_with_2_and_change_nothing(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    before = invoke("refs", "--json").out

    assert invoke(*arguments).code == 2
    assert invoke("refs", "--json").out == before


def test_reflog_is_newest_first_and_limited(invoke: Invoke) -> None:
    events = invoke("reflog", "main", "--limit", "2", "--json").lines

    assert [event["new"] for event in events] == [uid("1", 8), uid("1", 7)]
    assert set(events[0]) == {"id", "name", "kind", "old", "new", "reason", "created_at"}
    assert len(invoke("reflog", "main", "-n", "0", "--json").lines) == 8
    assert invoke("reflog", "main", "-n", "1").out.splitlines()[1].split()[:4] == [
        "main@{0}",
        uid("1", 7)[:10],
        uid("1", 8)[:10],
        "capture",
    ]
    assert invoke("reflog", "nothing").code == 3


def test_server_repository_needs_packs(invoke: Invoke, tmp_path: Path) -> None:
    failed = invoke("--repo", "postgresql://ann:secret@nowhere.invalid/db", "refs", "--json")

    assert failed.code == 5
    assert "DATASTATES_PACKS" in failed.err
    assert "secret" not in failed.err
