"""``import --pattern`` and ``restore --pattern``: checkpoint files of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Invoke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files of a training."""
    made = tmp_path / "checkpoints"
    made.mkdir()
    for step in range(4):
        torch.save(
            {"model": {"w": torch.full((3,), float(step))}, "step": step}, made / f"step_{step}.pt"
        )
    return made


def test_a_folder_becomes_a_branch_by_one_command_and_comes_out_again(
    folder: Path, invoke: Invoke, tmp_path: Path
) -> None:
    assert invoke("init", "runs").code == 0
    dry = invoke("import", folder, "--pattern", "step_{step}.pt", "--dry-run")
    assert "4 files would go to branch imported" in dry.out
    assert "step 3: step_3.pt (torch)" in dry.out

    done = invoke("import", folder, "--pattern", "step_{step}.pt", "--branch", "old")
    assert (done.code, done.out) == (0, "4 states on branch old\n"), done
    again = invoke(
        "import", folder, "--pattern", "step_{step}.pt", "--branch", "old", "--json"
    ).json
    assert (again["states"], len(again["known"])) == ([], 4)

    out = invoke(
        "restore",
        "old",
        "--history",
        "--into",
        tmp_path / "out",
        "--pattern",
        "step_{step}.pt",
        "--json",
    )
    assert sorted(line["step"] for line in out.lines) == [0, 1, 2, 3]
    found = torch.load(tmp_path / "out" / "step_2.pt", weights_only=True)
    assert (found["step"], found["model"]["w"].tolist()) == (2, [2.0, 2.0, 2.0])


def test_what_is_refused_is_named_with_the_next_step(
    folder: Path, invoke: Invoke, tmp_path: Path
) -> None:
    assert invoke("init", "runs").code == 0
    (folder / "step_2.pt").write_bytes(b"nothing")
    failed = invoke("import", folder, "--pattern", "step_{step}.pt")
    assert (failed.code, "step_2.pt" in failed.err) == (5, True)
    skipped = invoke("import", folder, "--pattern", "step_{step}.pt", "--skip-bad")
    assert (skipped.code, "step_2.pt was left out" in skipped.out) == (0, True)
    assert "--pattern" in invoke("import", folder).err
    assert invoke("export", "imported").code == invoke("restore", "imported").code == 2
    for more in ([], ["--history"]):
        refused = invoke("restore", "imported", "--into", "out", "--format", "zip", *more)
        assert refused.code == 5


def test_an_import_makes_the_repository_and_a_dry_run_does_not(
    folder: Path, invoke: Invoke, tmp_path: Path
) -> None:
    source, bundle = tmp_path / "source", tmp_path / "bundle"
    assert (
        invoke("--repo", source, "import", folder, "--pattern", "step_{step}.pt", "--dry-run").code
        != 0
    )
    assert not source.exists()
    done = invoke(
        "--repo", source, "import", folder, "--pattern", "step_{step}.pt", "--branch", "one"
    )
    assert (done.code, done.out) == (0, "4 states on branch one\n"), done
    assert invoke("--repo", source, "export", "one", "--bundle", bundle).code == 0

    for other in (tmp_path / "nothing", folder):
        missing = invoke("--repo", tmp_path / "new", "import", other)
        assert (missing.code, "holds no bundle" in missing.err) == (3, True)
        assert not (tmp_path / "new").exists()
    done = invoke("--repo", tmp_path / "new", "import", bundle)
    assert done.code == 0, done
    assert done.out.startswith(f"1 state from {bundle}")
    assert "; 3 ancestors without bytes" in done.out
