"""Every example runs as a user runs it: as a script, in its own process.

``demo.py`` in test_demo, the clone in test_clone_example, the soups in test_soup_example, the tier
in test_own_tier, the processor in test_own_processor.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import datastates.demo.main_job
from tests.support import warm

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object, cwd: Path) -> str:
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore:invalid escape sequence",
        str(EXAMPLES / name),
        *map(str, arguments),
    ]
    done = warm.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_stopped_and_started_again_resume_takes_the_steps_of_one_that_never_stopped(
    tmp_path: Path,
) -> None:
    whole = run("resume.py", "whole", 12, cwd=tmp_path)
    parts = [run("resume.py", "parts", 5, cwd=tmp_path), run("resume.py", "parts", 7, cwd=tmp_path)]

    assert whole.count("step ") == 12
    assert "".join(parts) == whole


@pytest.mark.long
def test_leave_out_tree_saves_what_its_plan_said_and_is_not_trained_twice(tmp_path: Path) -> None:
    first, again = (run("leave_out_tree.py", "study", 400, 2, 2, cwd=tmp_path) for _ in range(2))

    assert first.startswith("400 pictures of ")
    for variant in ("1", "1.1", "1.2", "2", "2.1", "2.2"):
        assert f"\n│ {variant} " in first
    assert first.count("│ done ") == 6
    assert "W_N/W_D: 2.485 of the plan, 2.485 as the lineage has it (6.6 epochs)" in first, (
        "16.4 / 6.6"
    )
    assert first == again, "the same states"


@pytest.mark.long
def test_find_outliers_finds_labels_that_were_made_wrong_and_is_not_trained_twice(
    tmp_path: Path,
) -> None:
    first, again = (run("find_outliers.py", "found", 800, 4, 2, cwd=tmp_path) for _ in range(2))
    found = re.search(
        r"(\d+) of (\d+) suspects are among the 80 labels that were made wrong", first
    )

    assert first.startswith("800 pictures of ")
    assert found is not None
    assert int(found[1]) / int(found[2]) > 0.6
    assert int(found[1]) > 56
    assert first == again, "the same states"
    assert all(
        (tmp_path / "found" / f"outliers.{suffix}").stat().st_size > 1000
        for suffix in ("html", "png", "csv")
    )


def test_own_processor_finds_the_state_whose_weight_is_not_finite_and_is_short(
    tmp_path: Path,
) -> None:
    said = run("own_processor.py", tmp_path / "runs", cwd=tmp_path).splitlines()

    assert said[0] == "step 1: finite"
    assert re.fullmatch(
        r"step 2: processor 'finite-check' failed on state \w+ \(step 2\): ValueError\('weight is not"
        r" finite'\); .*",
        said[1],
    )
    assert len(said) == 2
    assert len((EXAMPLES / "own_processor.py").read_text().splitlines()) <= 40


def test_demo_example_is_the_code_that_the_demo_command_runs() -> None:
    assert (EXAMPLES / "demo.py").resolve() == Path(datastates.demo.main_job.__file__).resolve()


def test_every_example_is_run_by_a_test() -> None:
    shared = {"docstrings.py", "fashion.py", "minilm.py"}  # what examples import
    assert {path.name for path in EXAMPLES.glob("*.py")} - shared == {
        "adapters.py",  # tests/integrations/test_transformers_docs.py
        "clone_between_processes.py",
        "ddp.py",  # test_examples_of_ranks
        "demo.py",
        "find_outliers.py",
        "fsdp.py",  # test_examples_of_ranks
        "hydra_sweep.py",  # test_search_examples
        "leave_out_tree.py",
        "lightning_soup.py",
        "mpi_data_parallel.py",  # test_examples_of_ranks
        "optuna_prefix.py",  # test_search_examples
        "own_processor.py",
        "own_tier.py",
        "parallel_variants.py",  # test_examples_of_ranks
        "pbt.py",
        "resume.py",
        "rewind.py",
        "soup.py",
    }
