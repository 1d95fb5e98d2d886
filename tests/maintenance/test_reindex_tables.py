"""Every table of a lineage that was lost with its database, and rebuilt from the folder alone:
row by row what it was."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates import Config, Repository, State
from datastates.lineage.schema import metadata
from datastates.lineage.write import attachments
from datastates.lineage.write.refs import annotate
from datastates.maintenance.location import DATABASE
from datastates.maintenance.retention_pass import evict

QUIET = Config(memory_bytes=64 << 20, durable_interval_s=None)
ROOT = Path(__file__).parents[2]
TOKEN = "a token of at least sixteen characters"

NOT_COMPARED = {
    "part": "states of one part have no rows there",
}
LEFT_OUT = {
    "folder": {"seen_at", "path"},  # where it was opened last
    "state": {"bytes_new"},  # what it added to memory, or to the disk
}
STATES = {"state.jump_id", "segment.fork_id", "segment.first_id", "stretch.least_id", "stretch.most_id", "stretch.first_id",
          "stretch.last_id", "stretch.gap_id"}  # fmt: skip


def train(repo: Repository, branch: str, count: int, start: str | None = None) -> list[State]:
    weight = torch.zeros(30)
    with repo.track(
        branch=branch,
        weight=weight,
        rng=False,
        config={"lr": 0.5, "deep": {"er": "x"}},
        durable_every=2,
        start=start,
    ) as run:
        found = []
        for number in range(count):
            weight += 1
            found.append(
                run.capture(metrics={"loss": 1 / (number + 1)}, attributes={"n": number}).wait()
            )
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lineage with something in every table: trainings, names, notes, clones, seals, a study,
    a report, changed attributes."""
    root = tmp_path_factory.mktemp("made")
    with (
        datastates.open(root / "theirs", config=QUIET) as theirs,
        datastates.open(root / "runs", config=QUIET) as repo,
    ):
        states = train(repo, "main", 5)
        repo.tag("warm", states[3], message="shared")
        train(repo, "fork", 3, start="warm")
        repo.tag("gone", "main~1")
        repo.delete_ref("gone")
        repo.merge(["main", "fork"], only="weight", into="soup")
        repo.notes.write("Diverges.", state="main")
        train(theirs, "away", 2)
        theirs.tag("published", "away")
        with (
            theirs.serve("tcp://127.0.0.1:0", token=TOKEN) as server,
            datastates.connect(server.url, token=TOKEN) as peer,
        ):
            cloned = peer.clone("away", repo=repo, tags=True).state
        repo.flush()
        study(repo)
        with repo.core.writing() as session:
            annotate(session, states[3].uid, {"n": None, "reviewed": True})
            facts = {"count": 3}
            attachments.keep(
                session,
                "labels",
                facts,
                [
                    attachments.NewSample(1, 7, {"score": 0.5}, b"\x89PNG"),
                    attachments.NewSample(2, 9, {}),
                ],
            )
        repo.verify(states[3])
    with datastates.open(root / "runs", config=QUIET) as repo:
        evict(repo.core, states[1].uid)
        repo.verify(cloned)
        with repo.core.writing() as session:
            attachments.begin(session, "sweep", "c")
    return root / "runs"


def study(repo: Repository) -> None:
    """A study of which one variant was trained, one failed twice, and one is begun later."""
    with repo.core.writing() as session:
        planned = [
            attachments.PlannedVariant(name, parent, 3, {"lr": lr})
            for name, parent, lr in (("a", None, 0.1), ("b", "a", 0.2), ("c", None, 0.3))
        ]
        attachments.plan(session, "sweep", planned)
    for variant in ("a", "b", "b"):
        with repo.core.writing() as session:
            attachments.begin(session, "sweep", variant)
        with repo.core.writing() as session:
            attachments.end(session, "sweep", variant, 1.5)
            if variant == "b":
                attachments.fail(session, "sweep", variant, "ValueError: no")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each table holds, with uids and names for the ids of rows, in an order that does not
    depend on them."""
    with closing(sqlite3.connect(folder / DATABASE)) as found:
        found.row_factory = sqlite3.Row
        raw = {
            name: [dict(row) for row in found.execute(f"SELECT * FROM {name}")]
            for name in metadata.tables
        }
    named = {
        "state": {row["id"]: row["uid"] for row in raw["state"]},
        "run": {row["id"]: row["uid"] for row in raw["run"]},
        "report": {row["id"]: row["name"] for row in raw["report"]},
    }
    named["segment"] = {
        row["id"]: (row["name"], named["state"].get(row["first_id"])) for row in raw["segment"]
    }
    return {
        name: sorted((_named(name, row, named) for row in listed if _counts(name, row)), key=repr)
        for name, listed in raw.items()
        if name not in NOT_COMPARED
    }


def _counts(table: str, row: dict[str, Any]) -> bool:
    """What is in memory only is gone with its process, whatever the lineage said of it."""
    return table != "replica" or row["tier"] not in ("memory", "arena")


def _named(table: str, row: dict[str, Any], named: dict[str, dict[int, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column in metadata.tables[table].columns:
        keys = [key.column.table.name for key in column.foreign_keys]
        target = (
            keys[0]
            if keys
            else (
                "state"
                if f"{table}.{column.name}" in STATES
                else "segment"
                if column.name == "segment_id"
                else None
            )
        )
        value = row[column.name]
        if column.name in LEFT_OUT.get(table, ()) or (column.name == "id" and column.primary_key):
            continue
        found[column.name] = (
            named[target].get(value) if target is not None and value is not None else value
        )
    if found.get("status") in (
        "evicted",
        "lost",
    ):
        # a state that left memory unwritten was not told of again
        found["status"] = "gone"
    return found


def check_same(
    before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]
) -> None:
    for name, listed in before.items():
        assert [row for row in after[name] if row not in listed] == [
            row for row in listed if row not in after[name]
        ], name
        assert len(after[name]) == len(listed), name


def lose(folder: Path) -> None:
    for path in folder.glob(f"{DATABASE}*"):
        path.unlink()


def test_every_table_is_what_it_was(folder: Path) -> None:
    before = rows(folder)
    assert {name for name, listed in before.items() if not listed} == set(), (
        "each table has something to lose"
    )
    assert before["clone"][0]["source"]
    lose(folder)
    report = datastates.reindex(folder)
    after = rows(folder)
    assert report.lacking == ()
    assert (report.clones, report.seals, report.variants) == (1, 2, 3)
    check_same(before, after)


def test_what_came_after_a_rebuilding_is_not_lost_by_the_next_one(folder: Path) -> None:
    lose(folder)
    datastates.reindex(folder)
    with datastates.open(folder, config=QUIET) as repo:
        late = train(repo, "late", 3)
        repo.verify("late")
        with repo.core.writing() as session:
            attachments.plan(
                session,
                "sweep",
                [
                    attachments.PlannedVariant("a", None, 5, {"lr": 0.1}),
                    attachments.PlannedVariant("d", None, 1, {}),
                ],
            )
        repo.tag("newer", "late")
        repo.move("warm", "newer", expected="warm")
    before = rows(folder)
    lose(folder)
    assert datastates.reindex(folder).lacking == ()
    after = rows(folder)
    check_same(before, after)
    with datastates.open(folder, config=QUIET) as repo:
        assert repo.state("late").uid == late[-1].uid
