"""``branches``, ``runs``, and ``show`` of a repository."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from datastates.cli.lists import branches_table, duration_text, spark_text
from datastates.lineage import Database, Status
from datastates.lineage.states import facts_of
from datastates.lineage.views.branch_rows import Branches, bytes_of_runs
from datastates.lineage.views.branches import branches
from datastates.lineage.write import replicas, runs
from tests.cli.conftest import RUN, uid

if TYPE_CHECKING:
    from tests.cli.conftest import Invoke

pytestmark = pytest.mark.usefixtures("root")


def lines_of(found: Branches, width: int) -> list[str]:
    lines = branches_table(found, width=width).lines(width)
    return [line.plain.rstrip() for line in lines]


def test_branches_say_what_a_person_asks_first(invoke: Invoke) -> None:
    done = invoke("branches", "--sort", "name")
    head, fork, main = done.out.splitlines()
    assert done.code == 0
    assert head.split()[:3] == ["branch", "step", "val_loss"], "the validation metric"
    assert "main step 3" in fork
    assert "0.33333" in main
    assert "0.14286" in invoke("branches", "--metric", "loss").out


def test_branches_as_json_are_those_of_the_lineage(invoke: Invoke) -> None:
    fork, main = invoke("branches", "--sort", "name", "--json").lines
    assert (fork["name"], fork["fork"]["branch"], fork["fork"]["state"], fork["states"]) == (
        "fork",
        "main",
        uid("1", 3),
        3,
    )
    assert (main["states"], main["best"]["step"], main["best_restorable"]["step"]) == (8, 6, 6)


def test_branches_for_a_spreadsheet(invoke: Invoke) -> None:
    rows = list(
        csv.DictReader(io.StringIO(invoke("branches", "--csv", "--sort", "name", "-m", "loss").out))
    )
    assert [
        (row["branch"], row["fork_branch"], row["fork_step"], row["best_step"]) for row in rows
    ] == [
        ("fork", "main", "3", "6"),
        ("main", "", "", "7"),
    ]


def test_a_condition_and_a_part_of_the_name_choose(invoke: Invoke) -> None:
    assert [line["name"] for line in invoke("branches", "step > 7", "--json").lines] == ["main"]
    assert [line["name"] for line in invoke("branches", "--name", "or", "--json").lines] == ["fork"]
    done = invoke("branches", "step > 70")
    assert (done.code, done.out) == (0, "")
    assert "none of 2 branches fits" in done.err


def test_the_best_can_be_restored_by_the_command_that_is_said(invoke: Invoke) -> None:
    done = invoke("branches", "--best", "val_loss")
    assert [line.split()[1] for line in done.out.splitlines()[1:]] == ["main"]
    assert f"datastates restore {uid('1', 6)[:10]} --into" in done.err
    assert [
        line["best"]["step"]
        for line in invoke("branches", "--best", "loss", "--max", "--json").lines
    ] == [
        1,
        4,
    ]
    assert "did you mean metrics.val_loss" in invoke("branches", "--best", "val_los").err


def test_runs_and_numbers(invoke: Invoke) -> None:
    (run,) = invoke("runs", "--json").lines
    assert (run["uid"], run["branches"], run["life"]) == ("a" * 24, ["fork", "main"], "unknown")
    assert "fork, main" in invoke("runs").out
    stats = invoke("show", "--json").json
    assert (stats["states"], stats["branches"], stats["tags"], stats["runs"]) == (11, 2, 1, 1)
    assert "9 captured, 1 durable, 1 evicted" in invoke("show").out


def test_the_metric_of_the_query_is_shown_else_a_validation_metric_that_a_branch_has(
    invoke: Invoke,
) -> None:
    def metric(*words: str) -> str:
        return invoke("branches", *words).out.split()[2]

    assert metric() == "val_loss"
    assert metric("loss < 5") == "loss"
    assert metric("--name", "fork") == "loss", "which has no other"


def test_columns_that_do_not_fit_are_named(
    root: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")
    for command in ("branches", "runs"):
        assert "no room here for" in invoke(command).err


def test_bytes_are_those_that_a_folder_of_packs_has(root: Path, invoke: Invoke) -> None:
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.write() as session:
        for number in (4, 5):
            replicas.mark(
                session, uid("1", number), Status.DURABLE, tier="local", node="f" * 24, bytes=500
            )
        replicas.evict(session, [uid("1", 5)], tier="local", node="f" * 24)
        sizes = bytes_of_runs(session, [RUN.uid], "f" * 24)
        found = branches(session, sort="name", folder="f" * 24)
    database.close()
    assert sizes == {RUN.uid: 500}
    assert [(item.name, item.bytes) for item in found] == [("fork", 0), ("main", 500)]


def test_a_training_that_failed_says_so(invoke: Invoke, root: Path) -> None:
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.write() as session:
        runs.note(session, "a" * 24, facts_of(ValueError("no more data"), 7))
        runs.finish(session, "a" * 24)
    database.close()
    assert [line["ending"] for line in invoke("branches", "--json").lines] == 2 * [
        {"how": "failed", "error": "ValueError: no more data", "step": 7}
    ]
    assert invoke("branches").out.count("✗") == 2
    (row,) = invoke("runs").out.splitlines()[1:]
    assert row.startswith("✗")
    assert "failed at step 7: ValueError" in row
    first, _ = csv.DictReader(io.StringIO(invoke("branches", "--csv").out))
    assert (first["ending"], first["error"]) == ("failed", "ValueError: no more data")


@pytest.mark.parametrize(
    "command",
    [
        ["branches"],
        ["runs"],
        ["show"],
        ["branches", "--best", "loss"],
        ["branches", "--watch", "--times", "1"],
    ],
)
def test_an_empty_repository_says_what_to_do_next(
    invoke: Invoke, tmp_path: Path, command: list[str]
) -> None:
    assert invoke("init", str(tmp_path / "empty")).code == 0
    done = invoke("--repo", str(tmp_path / "empty"), *command)
    assert done.code == 0
    assert "nothing is captured here yet" in done.err


def test_an_unknown_metric_is_refused_with_a_similar_one(invoke: Invoke) -> None:
    refused = invoke("branches", "--best", "lossy")
    assert (refused.code, "did you mean metrics.loss?" in refused.err) == (5, True)


def test_watching_ends_after_so_many_looks(invoke: Invoke) -> None:
    done = invoke("branches", "--watch", "--times", "2", "--every", "0.1")
    assert done.code == 0
    assert done.out.count("branch") == 1, "what is as it was is not written again"
    assert invoke("branches", "--watch", "--times", "1", "--json").json["total"] == 2


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200, 10_000])
def test_tables_fit_whatever_the_width(root: Path, width: int) -> None:
    database = Database(f"sqlite:///{root}/lineage.db")
    with database.read() as session:
        found = branches(session, sort="name")
    database.close()
    head, fork, main = lines_of(found, width)
    assert max(map(len, (head, fork, main))) <= width
    assert "fork" in fork
    assert ("restorable best" in head) == (width >= 80)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0.0, 1.0], "▁█"),
        ([1.0, None, 0.0], "█·▁"),
        ([None, None], "··"),
        ([2.0, 2.0], "▁▁"),
    ],
)
def test_a_curve_as_a_line_of_bars(values: list[float | None], text: str) -> None:
    assert spark_text(values, 12) == text
    assert len(spark_text([float(number) for number in range(1000)], 12)) == 12


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (5400, "1.5 h"), (200_000, "2.3 d")],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
