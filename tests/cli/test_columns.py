"""Which columns, order and stretch of time ``log`` and ``find`` show, and what they say of names
that nothing has."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.text import Text

from datastates.cli.tables import Column, TextTable, cut
from datastates.lineage import Database
from datastates.lineage.write import record
from tests.cli.conftest import Invoke, uid
from tests.support.lineages import told

pytestmark = pytest.mark.usefixtures("root")


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_what_was_asked_for_comes_first_then_the_loss(invoke: Invoke) -> None:
    assert rows(invoke("find", "step > 6 order by attr.lr").out)[0][:6] == [
        "state",
        "step",
        "branch",
        "loss",
        "lr",
        "status",
    ]
    assert rows(invoke("find", "metrics.val_loss < 0.6").out)[0][:5] == [
        "state",
        "step",
        "branch",
        "val_loss",
        "loss",
    ]
    assert rows(invoke("find", "step > 3").out)[0][:5] == [
        "state",
        "step",
        "branch",
        "loss",
        "val_loss",
    ]


def test_rows_say_their_branch(invoke: Invoke) -> None:
    found = {row[0]: row[2] for row in rows(invoke("find", "step = 5 or step = 6").out)[1:]}

    assert found == {
        uid(prefix, step)[:10]: name
        for prefix, name in (("1", "main"), ("f", "fork"))
        for step in (5, 6)
    }


def test_columns_are_those_that_are_named(invoke: Invoke) -> None:
    out = rows(
        invoke(
            "find", "step = 4 and branch = main", "--columns", "val_loss,attr.kind,lr,branch"
        ).out
    )

    assert out == [
        ["state", "step", "val_loss", "kind", "lr", "branch"],
        [uid("1", 4)[:10], "4", "0.5", "base", "0.1", "main"],
    ]
    assert rows(invoke("log", "main~1", "-n", "1", "-c", "run.host,loss").out)[1][2:] == [
        "node7",
        "0.142857",
    ]


def test_log_and_find_sort_by_what_is_named(invoke: Invoke) -> None:
    sorted_ = rows(invoke("log", "--sort", "val_loss", "-n", "2").out)

    assert sorted_[0][:5] == ["state", "step", "branch", "val_loss", "loss"]
    assert [row[1] for row in sorted_[1:]] == ["6", "4"]
    assert [
        row[1]
        for row in rows(invoke("find", "branch = main", "--sort", "loss desc,step", "-n", "2").out)[
            1:
        ]
    ] == ["1", "2"]
    assert [
        state["step"] for state in invoke("log", "warm..main~1", "--sort", "step", "--json").lines
    ] == [4, 5, 6, 7]
    assert [
        state["step"]
        for state in invoke("log", "fork", "--sort", "step", "--json", "-n", "0").lines
    ] == [1, 2, 3, 4, 5, 6]


def test_since_bounds_by_age_and_by_date(invoke: Invoke, root: Path) -> None:
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.write() as session:
        new = told(
            "e" * 24,
            "d" * 64,
            uid("1", 8),
            "main",
            None,
            9,
            created_at=datetime.now(UTC) - timedelta(minutes=30),
        )
        record.record(session, new)
    database.close()

    assert [state["step"] for state in invoke("log", "--since", "2h", "--json").lines] == [9]
    assert [
        state["step"] for state in invoke("find", "step > 0", "--since", "now-1h", "--json").lines
    ] == [9]
    assert len(invoke("log", "--since", "2026-01-01", "--json").lines) == 12
    assert invoke("log", "--since", "10m").out == ""
    assert "step 9" in invoke("log", "--since", "2h", "--oneline").out
    failed = invoke("log", "--since", "yesterday")
    assert failed.code == 5
    assert "2h" in failed.err


def test_csv_has_whole_uids_and_everything(invoke: Invoke) -> None:
    found = list(csv.DictReader(io.StringIO(invoke("find", "step < 3 order by step", "--csv").out)))

    assert [row["uid"] for row in found] == [uid("1", 1), uid("1", 2)]
    assert float(found[1]["metrics.val_loss"]) == 1.0
    assert found[0]["metrics.val_loss"] == ""
    assert found[1]["branch"] == "main"
    assert found[1]["attr.kind"] == "base"
    assert datetime.fromisoformat(found[0]["created"]).tzinfo is not None
    assert (
        invoke("log", "fork", "-n", "1", "--csv", "-c", "loss").out
        == f"uid,metrics.loss\n{uid('f', 6)},0.25\n"
    )


@pytest.mark.parametrize(
    ("arguments", "close"),
    [
        (("find", "metrics.los < 1"), "metrics.loss"),
        (("find", "order by attr.knd"), "attr.kind"),
        (("find", "step > 1", "--sort", "vall_loss"), "metrics.val_loss"),
        (("find", "step > 1", "--columns", "loss,knd"), "attr.kind"),
        (("log", "--sort", "metrics.lss"), "metrics.loss"),
        (("log", "--columns", "statsu"), "no metric 'statsu'"),
    ],
)
def test_unknown_names_are_told_with_a_close_one(
    invoke: Invoke, arguments: tuple[str, ...], close: str
) -> None:
    failed = invoke(*arguments)

    assert (failed.code, failed.out) == (5, "")
    assert close in failed.err
    assert msgspec.json.decode(invoke(*arguments, "--json").err)["error"]["kind"] == "syntax"


def test_log_says_where_it_stopped(invoke: Invoke) -> None:
    page = invoke("log", "-n", "4", "--oneline", "--no-graph")

    assert len(page.out.splitlines()) == 4
    assert page.err == "these are the newest 4: -n 0 shows all, -n another number\n"
    for number in ("11", "0"):
        assert invoke("log", "-n", number, "--no-graph").err == ""
    assert invoke("log", "-n", "4", "--json").err == ""


def test_evicted_states_say_what_they_were(invoke: Invoke) -> None:
    assert "evicted (was 1.0 MiB)" in invoke("log", "warm~1", "-n", "1").out
    assert "durable, 1.0 MiB" in invoke("log", "warm", "-n", "1").out
    assert "was 1.0 MiB" in invoke("show", "warm~1").out


def test_an_empty_repository_says_what_to_do(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("init", tmp_path / "new").code == 0
    for command in (
        ("log",),
        ("find", "step > 3"),
        ("find", "metrics.loss < 1 order by attr.x"),
        ("refs",),
    ):
        said = invoke("--repo", tmp_path / "new", *command)
        assert (said.code, said.out) == (0, "")
        assert "yet in" in said.err
        assert "datastates " in said.err
        told = invoke("--repo", tmp_path / "new", *command, "--json")
        assert (told.code, told.out, told.err) == (0, "", "")


def table() -> TextTable:
    made = TextTable(
        [
            Column("name", is_flexible=True),
            Column("step", True),
            Column("note", is_flexible=True, rank=2),
            Column("age", rank=3),
        ]
    )
    made.add("a-rather-long-branch-name", "12", "something", "3 days ago")
    made.add("main", "7", "", "1 hour ago")
    return made


@pytest.mark.parametrize("width", range(10, 60))
def test_tables_fit_and_show_where_something_is_missing(width: int) -> None:
    lines = [str(line) for line in table().lines(width)]
    whole = [str(line) for line in table().lines(None)]

    assert all(cell_len(line) <= width for line in lines)
    assert all(line in whole or "…" in "".join(lines) or table().left_out(width) for line in lines)
    assert all(number in "".join(lines) for number in ("12", "7")) or width < 20, (
        "numbers are whole or not there"
    )
    assert ("age" in lines[0]) == ("age" not in table().left_out(width))


def test_wide_letters_take_two_columns() -> None:
    text = Text("状態が良い")
    assert cut(text, 6).plain == "状態 …"
    assert text.plain == "状態が良い", "the text itself stays"
    made = TextTable([Column("name"), Column("note")])
    made.add("状態", "x")
    assert [line.plain.rstrip() for line in made.lines(None)] == ["name  note", "状態  x"]
