"""``init`` and ``doctor``."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastates.cli import doctor
from datastates.cli.doctor import Check, Verdict
from datastates.maintenance.location import locate
from tests.cli.conftest import Invoke


def test_init_makes_a_repository_once(invoke: Invoke, tmp_path: Path) -> None:
    root = tmp_path / "new" / "place"
    made = invoke("init", root, "--json")

    assert made.json == {
        "root": str(root),
        "database": str(root),
        "packs": str(root / "packs"),
        "existed": False,
    }
    assert (root / "packs").is_dir()
    assert invoke("init", root, "--json").json["existed"] is True
    assert invoke("--repo", root, "log").out == ""
    assert (
        invoke("init").out
        == f"repository ready in {tmp_path}/runs, packs in {tmp_path}/runs/packs\n"
    )


def test_init_leaves_states_alone(invoke: Invoke, root: Path) -> None:
    before = invoke("log", "--json").out

    assert invoke("init", root).code == 0
    assert invoke("log", "--json").out == before


def test_init_refuses_a_file(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    failed = invoke("init")

    assert failed.code == 5
    assert "is a file" in failed.err


def test_init_on_a_server(invoke: Invoke, tmp_path: Path, postgresql: object) -> None:
    # the fixture's class lives in conftest.py
    url = postgresql.empty()  # type: ignore[attr-defined]
    made = invoke("--packs", tmp_path / "packs", "init", url, "--json")

    assert made.code == 0, made.err
    assert made.json["root"] is None
    assert (tmp_path / "packs").is_dir()
    assert invoke("--repo", url, "--packs", tmp_path / "packs", "refs").code == 0


def test_doctor_reports_every_subject_with_a_next_step(invoke: Invoke, root: Path) -> None:
    report = invoke("doctor", "--json").json
    found = {check["name"]: check for check in report["checks"]}

    names = {
        "python",
        "torch",
        "cuda",
        "ucx",
        "mpi",
        "mpiexec",
        "sqlite",
        "lineage",
        "postgresql",
        "agent",
        "processors",
        "memory",
        "descriptors",
        "huge pages",
    }
    assert names | {"disk space", "retention", "direct I/O", "buffered"} == set(found)
    assert report["ok"] is True
    assert found["torch"]["status"] == "ok"
    assert "11 states, 3 names" in found["lineage"]["detail"]
    assert "/s" in found["buffered"]["detail"]
    assert all(check["next"] for check in report["checks"] if check["status"] == "missing")
    assert list(root.glob(".datastates-doctor*")) == []


def test_doctor_works_where_no_repository_is(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("doctor")

    assert done.code == 0
    assert "datastates init" in done.out
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_when_something_required_does(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "lineage.db").write_text("not a database " * 1000)
    done = invoke("doctor", "--json")

    assert done.code == 7
    assert done.json["ok"] is False
    assert [check["name"] for check in done.json["checks"] if check["status"] == "failed"] == [
        "lineage"
    ]


def test_library_that_does_not_load_is_told_with_its_reason() -> None:
    check = doctor._in_other_process(
        "mpi", "json", "raise ImportError('libmpi.so is not there')", "load the module"
    )

    assert check == Check(
        "mpi",
        Verdict.WARN,
        "json is installed, but does not work: ImportError: libmpi.so is not there",
        "load the module",
    )
    assert doctor._in_other_process("x", "no_such_package", "", "do").status is Verdict.MISSING


def test_folder_without_direct_io_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no memory file system here")
    found = {check.name: check for check in doctor._files(locate(shm / "nothing").packs)}

    assert found["buffered"].status is Verdict.OK
    assert found["direct I/O"].status in (Verdict.OK, Verdict.WARN)
