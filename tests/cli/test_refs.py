"""``refs``, ``tag``, ``branch`` and ``rm``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Invoke, uid

pytestmark = pytest.mark.usefixtures("root")


def test_one_command_lists_all_names(invoke: Invoke) -> None:
    assert invoke("refs", "--json").lines == [
        {"name": "fork", "kind": "branch", "state": uid("f", 6), "version": 4, "message": None},
        {"name": "main", "kind": "branch", "state": uid("1", 8), "version": 8, "message": None},
        {
            "name": "warm",
            "kind": "tag",
            "state": uid("1", 3),
            "version": 1,
            "message": "end of the prefix",
        },
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
    assert made.json == {
        "name": "good",
        "kind": "tag",
        "state": uid("1", 6),
        "version": 1,
        "message": "low loss",
    }
    assert "good" in invoke("refs").out
    assert (
        invoke("branch", "twig", "warm").out == f"branch twig names {uid('1', 3)[:10]} (step 3)\n"
    )


def test_taken_name_is_a_conflict(invoke: Invoke) -> None:
    failed = invoke("tag", "warm", "main")

    assert failed.code == 4
    assert failed.err.startswith("error: tag 'warm' already names")
    assert failed.out == ""


def test_move_compares_and_swaps(invoke: Invoke) -> None:
    assert invoke("branch", "fork", "main", "--move", "--expected", "main~3").code == 4
    assert invoke("branch", "fork", "main", "--move", "--expected", "fork").code == 0
    assert invoke("show", "fork", "--json").json["uid"] == uid("1", 8)
    assert (
        invoke("branch", "fork", "main~1", "--move").out
        == f"branch fork moved from {uid('1', 8)[:10]} to {uid('1', 7)[:10]}\n"
    )


def test_delete_forgets_the_name_and_keeps_its_log(invoke: Invoke) -> None:
    gone = invoke("rm", "warm")

    assert gone.code == 0
    assert uid("1", 3) in gone.out, "or nobody could name it again"
    assert "warm" not in invoke("refs").out
    assert [(event["old"], event["new"]) for event in invoke("refs", "warm", "--json").lines] == [
        (uid("1", 3), None),
        (None, uid("1", 3)),
    ]
    assert invoke("rm", "warm").code == 3


def test_kinds_are_not_mixed_up(invoke: Invoke) -> None:
    assert "`datastates branch fork REV --move`" in invoke("tag", "fork", "main", "--move").err
    assert invoke("branch", "warm", "main", "--move").code == 3
    assert len(invoke("refs", "--json").lines) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("tag", "new"),
        ("tag",),
        ("branch", "new"),
        ("tag", "new", "main", "--expected", "main"),
        ("tag", "warm", "main", "--move", "-m", "why"),
        ("branch", "fork", "--move"),
        ("branch", "new", "main", "-m", "why"),
        ("branch", "fork", "new", "--rename", "--move"),
    ],
)
def test_wrong_command_lines_end_with_2_and_change_nothing(
    invoke: Invoke, arguments: tuple[str, ...]
) -> None:
    before = invoke("refs", "--json").out

    assert invoke(*arguments).code == 2
    assert invoke("refs", "--json").out == before


def test_what_a_name_has_named_is_newest_first_and_limited(invoke: Invoke) -> None:
    events = invoke("refs", "main", "--limit", "2", "--json").lines

    assert [event["new"] for event in events] == [uid("1", 8), uid("1", 7)]
    assert set(events[0]) == {"id", "name", "kind", "old", "new", "reason", "created_at"}
    assert len(invoke("refs", "main", "-n", "0", "--json").lines) == 8
    assert invoke("refs", "main", "-n", "1").out.splitlines()[1].split()[:4] == [
        "main@{0}",
        uid("1", 7)[:10],
        uid("1", 8)[:10],
        "capture",
    ]
    assert invoke("refs", "nothing").code == 3


def test_server_repository_needs_packs(invoke: Invoke, tmp_path: Path) -> None:
    failed = invoke("--repo", "postgresql://ann:secret@nowhere.invalid/db", "refs", "--json")

    assert failed.code == 5
    assert "DATASTATES_PACKS" in failed.err
    assert "secret" not in failed.err


def test_branch_is_renamed_with_its_history(invoke: Invoke) -> None:
    assert invoke("branch", "-m", "main", "exp").out == "branch main is exp now\n"
    assert [ref["name"] for ref in invoke("refs", "--json").lines] == ["exp", "fork", "warm"]
    (exp,) = [one for one in invoke("branches", "--json").lines if one["name"] == "exp"]
    assert exp["states"] == 8
    assert invoke("branch", "-m", "exp", "fork").code == 4
    assert invoke("branch", "-m", "nothing", "new").code == 3
    assert invoke("branch", "-m", "exp").code == invoke("branch", "-m", "exp", "a", "b").code == 2


def test_tag_of_a_state_whose_bytes_are_gone_is_made_with_a_warning(
    invoke: Invoke, caplog: pytest.LogCaptureFixture
) -> None:
    done = invoke("tag", "gone", "main~6")

    assert done.code == 7
    assert done.out.startswith("tag gone names")
    assert caplog.messages == [
        f"tag 'gone' names state {uid('1', 2)[:10]} (step 2), which is evicted and cannot be"
        f" restored: the nearest state that has its bytes is {uid('1', 1)[:10]} (step 1)"
    ]
    moved = invoke("tag", "warm", "main~6", "--move", "--json")
    assert (moved.code, moved.json["state"]) == (7, uid("1", 2))
    assert "tag 'warm' names" in caplog.messages[1]
    tags = [ref for ref in invoke("refs", "--json").lines if ref["kind"] == "tag"]
    assert [ref["state"] for ref in tags] == [uid("1", 2)] * 2
    assert invoke("tag", "fine", "main").code == invoke("branch", "twig", "main~6").code == 0
