"""Searches whose trials fork from a shared prefix: Optuna's and Hydra's."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import datastates
from tests.examples.test_examples import EXAMPLES, run
from tests.support import warm

TRIALS = 14
OUTCOME = re.compile(r"Trial (\d+) (?:finished with value: (\S+)|(pruned))")


def search(folder: Path, *, killed_after: int | None = None) -> dict[str, str]:
    """Run the search in a process; the values of its trials, of those that were pruned the word.
    The process is killed when so many trials are over."""
    command = [sys.executable, "-W", "error", "-W", "ignore:invalid escape sequence"]
    found: dict[str, str] = {}
    with warm.Popen(
        [*command, str(EXAMPLES / "optuna_prefix.py"), str(folder), str(TRIALS)],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if match := OUTCOME.search(line):
                found[match[1]] = match[2] or match[3]
            if len(found) == killed_after:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == (0 if killed_after is None else -signal.SIGKILL), "".join(said)
    return found


def test_a_search_that_was_killed_goes_on_with_the_same_trials(tmp_path: Path) -> None:
    expected = search(tmp_path / "whole")
    assert len(expected) == TRIALS
    killed = search(tmp_path / "parts", killed_after=8)
    assert killed.items() < expected.items()
    first = "attr.trial >= 0 and attr.trial < 7 and status != lost"
    with datastates.open(tmp_path / "parts") as repo:
        before = {state.uid for state in repo.find(first)}
    assert search(tmp_path / "parts") == expected
    with datastates.open(tmp_path / "parts") as repo:
        assert before == {state.uid for state in repo.find(first)}, "nothing is trained again"
        states = repo.find("attr.trial >= 0 and status != lost")
        branches = {ref.name for ref in repo.refs()}
    pruned = {number for number, value in expected.items() if value == "pruned"}
    assert 0 < len(pruned) < TRIALS
    for state in states:
        number = str(state.attributes["trial"])
        assert (
            state.status.is_restorable == (number not in pruned) == (f"trial-{number}" in branches)
        )
    assert all(state.config["sgd.lr"] for state in states)


def test_jobs_of_a_sweep_fork_from_one_prefix_and_have_their_configurations(tmp_path: Path) -> None:
    sweep = ("hydra_sweep.py", "--multirun", "lr=0.1,0.01", "momentum=0.0,0.9", "epochs=2")
    states = []
    for _ in range(2):
        run(*sweep, cwd=tmp_path)
        with datastates.open(tmp_path / "runs" / "hydra") as repo:
            states.append({state.uid for state in repo.find("step > 0")})
            heads = {ref.name: repo.state(ref.name) for ref in repo.refs()}
            prefix = {repo.state(f"{name}~2").uid for name in heads if name.startswith("sweep/")}
    assert states[0] == states[1], "nothing is trained again"
    assert prefix == {heads.pop("prefix").uid}
    assert {name: (one.config["lr"], one.config["momentum"]) for name, one in heads.items()} == {
        f"sweep/epochs=2,lr={lr},momentum={momentum}": (lr, momentum)
        for lr in (0.1, 0.01)
        for momentum in (0.0, 0.9)
    }


@pytest.mark.parametrize(
    ("name", "package", "wanted"),
    [("optuna_prefix.py", "optuna", "optuna"), ("hydra_sweep.py", "hydra", "hydra-core")],
)
def test_each_is_short_and_says_what_to_install(name: str, package: str, wanted: str) -> None:
    path = EXAMPLES / name
    script = f"import runpy, sys; sys.modules['{package}'] = None; runpy.run_path({str(path)!r})"
    done = warm.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip().endswith(f": pip install {wanted}")
    assert len(path.read_text().splitlines()) < 60
