"""``log``, ``show`` and ``find``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from datastates.cli import history
from datastates.lineage import Database, State
from datastates.lineage.write import record, refs
from tests.cli.conftest import RUN, Invoke, uid
from tests.support.lineages import told

pytestmark = pytest.mark.usefixtures("root")

STATE_FIELDS = [field.name for field in dataclasses.fields(State)]


def steps(text: str) -> list[str]:
    """The abbreviated uids in a short log, lanes left out."""
    return [
        next(word for word in line.split() if len(word) == 10)
        for line in text.splitlines()
        if " step " in line
    ]


def test_log_begins_at_main(invoke: Invoke) -> None:
    states = invoke("log", "--json").lines

    assert states[0]["uid"] == uid("1", 8)
    assert {state["uid"] for state in states} == {uid("1", n) for n in range(1, 9)} | {
        uid("f", n) for n in range(4, 7)
    }
    assert list(states[0]) == [*STATE_FIELDS, "restorable"]
    position = {state["uid"]: index for index, state in enumerate(states)}
    assert all(
        position[parent] > position[state["uid"]] for state in states for parent in state["parents"]
    )


def test_log_of_a_revision_is_limited(invoke: Invoke) -> None:
    assert [state["uid"] for state in invoke("log", "fork", "-n", "2", "--json").lines] == [
        uid("f", 6),
        uid("f", 5),
    ]
    assert len(invoke("log", "fork", "-n", "0", "--json").lines) == 6


def test_log_of_a_range(invoke: Invoke) -> None:
    assert [state["step"] for state in invoke("log", "warm..main~1", "--json").lines] == [
        7,
        6,
        5,
        4,
    ]
    assert {state["uid"] for state in invoke("log", "fork...main~1", "--json").lines} == {
        *(uid("1", n) for n in range(4, 8)),
        *(uid("f", n) for n in range(4, 7)),
    }


def test_log_of_all_refs_has_each_state_once(invoke: Invoke) -> None:
    assert invoke("branch", "main", "main~1", "--move").code == 0
    uids = [state["uid"] for state in invoke("log", "--all", "--json").lines]

    assert sorted(uids) == sorted(
        {uid("1", n) for n in range(1, 8)} | {uid("f", n) for n in range(4, 7)}
    )
    assert uids.index(uid("f", 4)) < uids.index(uid("1", 3))
    assert len(invoke("log", "--all", "-n", "3", "--json").lines) == 3
    assert invoke("log", "--all", "main").code == 2


def test_log_without_main_is_of_all(invoke: Invoke) -> None:
    assert invoke("rm", "main").code == 0
    assert [state["uid"] for state in invoke("log", "--json", "-n", "1").lines] == [uid("f", 6)]


def test_short_log_has_one_line_a_state_with_its_names(invoke: Invoke) -> None:
    out = invoke("log", "--oneline", "--no-graph").out.splitlines()

    assert len(out) == 11
    assert out[0] == f"{uid('1', 8)[:10]} (main) step 8"
    assert next(line for line in out if line.startswith(uid("f", 6)[:10])).endswith(
        "(fork) step 6  loss=0.25  other"
    )
    assert any("(tag: warm)" in line for line in out)
    assert [line for line in out if "evicted" in line] == [
        f"{uid('1', 2)[:10]} step 2  loss=0.5 val_loss=1  evicted"
    ]


def test_log_draws_lanes(invoke: Invoke) -> None:
    drawn = invoke("log", "--oneline").out

    assert sorted(steps(drawn)) == sorted(steps(invoke("log", "--oneline", "--no-graph").out))
    assert "|" in drawn or "│" in drawn
    assert len({line.index(" step ") for line in drawn.splitlines() if " step " in line}) > 1


def test_log_marks_the_states_that_cannot_be_restored(invoke: Invoke) -> None:
    done = invoke("log", "warm", "--oneline")
    marks = {line.split()[1]: line[0] for line in done.out.splitlines()}
    assert marks == {uid("1", 3)[:10]: "*", uid("1", 2)[:10]: "o", uid("1", 1)[:10]: "*"}
    assert "o marks states that cannot be restored" in done.err
    assert "cannot be restored" not in invoke("log", "fork", "-n", "2").err
    fields = {state["uid"]: state["restorable"] for state in invoke("log", "--json").lines}
    assert [each for each, restorable in fields.items() if not restorable] == [uid("1", 2)]
    assert [state["restorable"] for state in invoke("find", "step <= 3", "--json").lines].count(
        False
    ) == 1


def test_long_log_tells_more(invoke: Invoke) -> None:
    out = invoke("log", "fork", "-n", "1", "--no-graph").out

    assert out.splitlines()[0] == f"state {uid('f', 6)} (fork)"
    assert "  other\n  order\n" in out
    assert "1.0 MiB" in out


def test_show_tells_all_that_is_known(invoke: Invoke) -> None:
    out = invoke("show", "warm").out

    for text in (
        uid("1", 3),
        "d" * 64,
        "tag: warm",
        "durable",
        "loss = 0.333333333",
        "kind = 'base'",
        "config      lr = 0.1",
        f"parent      {uid('1', 2)[:10]}",
        f"child       {uid('1', 4)[:10]}",
        f"child       {uid('f', 4)[:10]}",
        "1.0 MiB, 1.0 KiB of it new",
        "local on node7, rank 0",
        "p.safetensors, 4.0 KiB",
        "by ann on node7, process 42",
        "train.py --lr 0.1",
        "c0ffeec0ffee with changes",
        "torch 2.13.0",
        "kept        11 captured, 10 can be restored, 1.0 KiB of data on disk",
    ):
        assert text in out
    assert "soup, weight 0.5" in invoke("show", "main").out


def test_show_as_json_has_stable_fields(invoke: Invoke) -> None:
    shown = invoke("show", "warm", "--json").json

    assert list(shown) == [
        *STATE_FIELDS,
        "refs",
        "children",
        "origins",
        "replicas",
        "packs",
        "run_record",
        "notes",
        "parts",
        "added",
        "nearest",
        "configured",
        "files",
    ]
    assert shown["children"] == [uid("1", 4), uid("f", 4)]
    assert shown["packs"] == [{"name": "p.safetensors", "bytes": 4096}]
    assert [replica["tier"] for replica in shown["replicas"]] == ["local", "memory"]
    assert shown["run_record"]["argv"] == list(RUN.argv)
    assert shown["run"] == RUN.uid
    assert shown["config"] == {"lr": 0.1}


def test_find_lists_what_the_query_asks_for(invoke: Invoke) -> None:
    found = invoke(
        "find", "metrics.loss < 0.3 and branch = main order by metrics.loss limit 2", "--json"
    )

    assert found.code == 0, found.err
    assert [state["uid"] for state in found.lines] == [uid("1", 7), uid("1", 6)]
    assert list(found.lines[0]) == [*STATE_FIELDS, "restorable"]
    table = invoke("find", "metrics.val_loss < 0.6 order by step").out.splitlines()
    assert table[0].split()[:5] == ["state", "step", "branch", "val_loss", "loss"]
    assert [line.split()[1] for line in table[1:]] == ["4", "6"]
    bare = invoke("find", "val_loss < 0.6 order by step").out.splitlines()
    assert bare == table, "the metric of that name"
    nothing = invoke("find", "step > 1000")
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "no state fits\n")


def test_find_shows_a_page_and_says_how_to_see_the_rest(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "FOUND", 4)
    steps = [state["step"] for state in invoke("find", "step > 0 order by step", "--json").lines]
    page = invoke("find", "step > 0 order by step")
    more = invoke("find", "step > 0 order by step", "-n", "6")

    assert steps == [1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8]
    assert [int(line.split()[1]) for line in page.out.splitlines()[1:]] == steps[:4]
    assert "the first 4" in page.err
    assert "-n 0" in page.err
    assert len(more.out.splitlines()) == 7
    assert "the first 6" in more.err
    for arguments in (
        ["step > 0", "-n", "0"],
        ["step > 0 limit 11"],
        ["step > 0", "-n", "11"],
        ["step > 7"],
    ):
        whole = invoke("find", *arguments)
        assert len(whole.out.splitlines()) == (2 if arguments == ["step > 7"] else 12)
        assert whole.err == ""
    assert len(invoke("find", "step > 0", "-n", "3", "--json").lines) == 3
    assert len(invoke("find", "step > 0 limit 2", "-n", "0", "--json").lines) == 2


def test_unknown_names_end_with_3(invoke: Invoke) -> None:
    failed = invoke("log", "mian")

    assert failed.code == 3
    assert "mian" in failed.err
    assert invoke("show", "main~100").code == 3


@pytest.mark.parametrize(
    "arguments", [("show", "main~~x"), ("find", "metrics.loss <"), ("log", "a..b..c")]
)
def test_syntax_ends_with_5_and_points_at_the_column(
    invoke: Invoke, arguments: tuple[str, str]
) -> None:
    failed = invoke(*arguments)
    assert failed.code == 5
    assert "^" in failed.err

    told = invoke(*arguments, "--json")
    assert told.out == ""
    error = msgspec.json.decode(told.err)["error"]
    assert error["kind"] == "syntax"
    assert error["text"] == arguments[1]
    assert error["column"] >= 1


def test_nothing_that_a_terminal_would_obey_is_printed(invoke: Invoke, root: Path) -> None:
    bad = "\x1b]0;title\x07 [red]plain\x9b31m"
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.write() as session:
        new = told(
            "e" * 24,
            "d" * 64,
            None,
            "other",
            None,
            1,
            message=f"{bad}\n{bad}",
            metrics={bad: 1.0},
            attributes={bad: bad},
        )
        record.record(session, new)
        refs.tag(session, "bad", "e" * 24, message=bad)
    database.close()

    for command in (
        ["log", "bad"],
        ["log", "bad", "--oneline"],
        ["show", "bad"],
        ["find", "step = 1"],
        ["refs"],
    ):
        out = invoke(*command).out
        assert "[red]plain" in out
        assert not set(out) & {"\x1b", "\x07", "\x9b"}


def test_settings_are_columns(invoke: Invoke) -> None:
    configured = invoke(
        "find", "config.lr = 0.1 and branch = main and step < 3", "--columns", "step,config.lr"
    ).out.splitlines()
    assert [line.split()[1:] for line in configured] == [["step", "lr"], ["2", "0.1"], ["1", "0.1"]]


def test_the_newest_of_all_histories_is_that_of_the_newest_head(invoke: Invoke) -> None:
    assert [line["uid"] for line in invoke("log", "--all", "-n", "1", "--json").lines] == [
        uid("1", 8)
    ]
    assert [line["uid"] for line in invoke("log", "--all", "-n", "3", "--json").lines] == [
        uid("1", 8),
        uid("f", 6),
        uid("f", 5),
    ]
