"""``log --incomplete``, and what ``show`` says of a state of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from datastates.cli import lists
from datastates.lineage import Database
from tests.support.parts import Job, run_job

if TYPE_CHECKING:
    from tests.cli.conftest import Invoke


def job_of(root: Path, size: int = 3) -> Job:
    database = Database(f"sqlite:///{root}/lineage.db")
    try:
        return run_job(database, size=size)
    finally:
        database.close()


def test_what_waits_and_what_was_given_up_are_two_tables(root: Path, invoke: Invoke) -> None:
    job = job_of(root)
    done = invoke("log", "--incomplete")
    waits, dropped = (block.splitlines()[1].split() for block in done.out.split("\n\n"))
    assert (done.code, waits[:5]) == (0, [job.waits[:10], "ddp", "6", "2", "3"])
    assert dropped[:6] == [job.given_up[:10], "ddp", "5", "1", "3", "skipped"]
    assert "there was no room in memory" in done.out
    found = invoke("log", "--incomplete", "--json").json
    assert (
        found["waiting"][0]["missing"],
        found["given_up"][0]["why"],
        found["total_given_up"],
    ) == ([2], "skipped", 1)


def test_whose_process_is_late_and_what_to_do_is_said(
    root: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "LATE_S", 0.0)
    database = Database(f"sqlite:///{root}/lineage.db")
    try:
        job = run_job(database, of_one_job=True)
    finally:
        database.close()
    waits = f"state {job.waits} (branch ddp, step 6) waits for the parts of rank 2 of 3"
    for words in (("log", "ddp"), ("log", "ddp", "--sort", "step")):
        assert waits in invoke(*words).err
        assert "`datastates log --incomplete` shows whose process that is" in invoke(*words).err
    assert waits not in invoke("log", "ddp", "--json").err
    assert waits not in invoke("log", "main").err
    said = invoke("log", "--incomplete").err
    assert (
        "rank 2 of 3 is process 102 on host1, of which nothing is to be seen from here: look on"
        " host1" in said
    )


def test_a_rank_that_ended_or_never_came_is_said(root: Path, invoke: Invoke) -> None:
    database = Database(f"sqlite:///{root}/lineage.db")
    try:
        run_job(database, of_one_job=True, ended=True)
    finally:
        database.close()
    said = invoke("log", "--incomplete").err
    assert (
        "rank 2 of 3 is process 102 on host1, which has ended: start the job again, which resumes"
        in said
    )


def test_a_rank_of_which_no_process_is_known_is_said(root: Path, invoke: Invoke) -> None:
    job_of(root)
    assert (
        "rank 2 of 3 tracks nothing here: start all ranks of the job"
        in invoke("log", "--incomplete").err
    )


@pytest.mark.usefixtures("root")
def test_nothing_waits_in_a_repository_of_single_processes(invoke: Invoke) -> None:
    done = invoke("log", "--incomplete")
    assert (done.code, done.out) == (0, "")
    assert "no state waits for parts of other ranks" in done.err
    assert invoke("log", "--incomplete", "--json").json == {
        "waiting": [],
        "given_up": [],
        "total_given_up": 0,
    }


def test_show_lists_the_parts_by_rank(root: Path, invoke: Invoke) -> None:
    job = job_of(root)
    out = invoke("show", job.whole[0]).out
    parts = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("part ")]
    assert parts == [
        f"rank {rank}, {rank + 1}.0 MiB, loss={loss}: memory on host{rank // 2}, {rank + 1}.0 KiB"
        f" added there (run {job.runs[rank][:10]})"
        for rank, loss in enumerate(("1.8", "2", "2.2"))
    ]
    assert "\nby rank     loss = 1.8 to 2.2, mean 2\n" in out
    assert "loss@" not in out
    assert "loss=0.8 (0.8 to 1.2, mean 1)" in invoke("log", "ddp", "--oneline").out
    assert "loss@" not in invoke("find", "branch = ddp").out
    assert "loss@2" in invoke("find", "metrics.'loss@2' > 0").out.splitlines()[0]
    assert [
        part["run"] for part in invoke("show", job.whole[0], "--json").json["parts"]
    ] == job.runs
    assert "waits for the parts of rank 2" in invoke("show", job.waits).err


def test_stats_say_in_one_line_what_each_rank_measured(root: Path, invoke: Invoke) -> None:
    job_of(root)
    lines = [
        line.split(maxsplit=1)[1]
        for line in invoke("show").out.splitlines()
        if line.startswith("metric")
    ]
    assert lines == [
        "loss: 0.142857 to 1.8, 14 states, and 3 ranks have their own",
        "val_loss: 0.333333 to 1, 3 states",
    ]
    assert {"loss@0", "loss@1", "loss@2"} < {
        each["key"] for each in invoke("show", "--json").json["metrics"]
    }


def test_show_lists_the_parts_of_many_ranks_by_place(root: Path, invoke: Invoke) -> None:
    job = job_of(root, size=20)
    parts = [
        line.split(maxsplit=1)[1]
        for line in invoke("show", job.whole[0]).out.splitlines()
        if line.startswith("parts ")
    ]
    assert (len(parts), parts[0].split(",")[0]) == (10, "memory on host0: rank 0-1")


def test_show_says_nothing_of_parts_where_one_process_captured(root: Path, invoke: Invoke) -> None:
    out = invoke("show", "main~5").out
    assert "part" not in out
    assert "\nreplica " in out
