"""What was written in the present format is read, verified and restored, bit for bit."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import datastates
from datastates import Status
from datastates.files.bundle import import_bundle
from tests.formats.write import HERE, NAME, digest_of, facts, make

KEPT = sorted(path.parent for path in HERE.glob("*/expected.json"))


@pytest.fixture(params=KEPT, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what was written."""
    for archive in request.param.glob("*.tar.xz"):
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path, filter="data")
    (tmp_path / "expected.json").write_bytes((request.param / "expected.json").read_bytes())
    return tmp_path


@pytest.fixture
def expected(kept: Path) -> dict[str, Any]:
    """What its writer found in it."""
    found: dict[str, Any] = json.loads((kept / "expected.json").read_text())
    return found


def test_what_this_version_writes_is_kept() -> None:
    assert NAME in {path.name for path in KEPT}, "write it: python -m tests.formats.write"


def test_a_repository_of_an_earlier_build_is_what_it_was(
    kept: Path, expected: dict[str, Any]
) -> None:
    with datastates.open(kept / "runs") as repo:
        assert facts(repo) == expected
        for uid in expected["states"]:
            assert repo.verify(uid).status is Status.DURABLE
        assert repo.verify_merge("soup").parents == tuple(
            expected["states"][expected["refs"]["soup"]]["parents"]
        )


def test_a_state_of_an_earlier_build_is_restored_and_gone_on_from(
    kept: Path, expected: dict[str, Any]
) -> None:
    model, optimizer = make()
    with datastates.open(kept / "runs") as repo:
        for rev in ("main", "main~1", "fork"):
            assert repo.restore(rev, model=model, optimizer=optimizer, strict=False).restored
            assert digest_of(dict(model.state_dict())) == digest_of(dict(repo.load(rev)["model"]))
        with repo.track(model=model, optimizer=optimizer, branch="later", start="main") as run:
            after = run.capture().wait("durable")
        assert after.parents == (expected["refs"]["main"],)
        assert repo.verify("later").uid == after.uid


def test_a_bundle_of_an_earlier_build_is_taken_in(
    kept: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    with datastates.open(tmp_path / "new", memory_bytes=64 << 20) as repo:
        import_bundle(repo, kept / "bundle")
        for rev in ("soup", "main"):
            uid = expected["refs"].get(rev)
            assert repo.verify(uid).digest == expected["states"][uid]["digest"]
            assert digest_of(repo.load(uid)) == expected["states"][uid]["content"]
        assert repo.verify_merge("soup").uid == expected["refs"]["soup"]


def test_a_lineage_of_an_earlier_build_is_rebuilt_from_its_folder(
    kept: Path, expected: dict[str, Any]
) -> None:
    (kept / "runs" / "lineage.db").unlink()
    datastates.reindex(kept / "runs")
    with datastates.open(kept / "runs") as repo:
        assert facts(repo) == expected
