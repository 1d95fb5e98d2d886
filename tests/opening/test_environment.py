"""What a run says of the code that it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from datastates.opening import environment


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new one, without a commit; the working directory."""
    monkeypatch.chdir(tmp_path)
    git("init", "--quiet")
    return tmp_path


def git(*words: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def told() -> tuple[str | None, bool | None]:
    run = environment.describe_run({})
    return run.git_commit, run.git_dirty


def test_a_run_names_the_commit_and_says_whether_files_of_it_were_changed(checkout: Path) -> None:
    (checkout / "train.py").write_text("pass")
    assert told() == (None, None), "nothing is committed yet"

    git("add", "train.py")
    git("commit", "--quiet", "-m", "begin")
    commit = git("rev-parse", "HEAD")
    (checkout / "notes.txt").write_text("of no commit")
    assert told() == (commit, False)

    (checkout / "train.py").write_text("print()")
    assert told() == (commit, True)

    git("checkout", "--quiet", "--detach")
    git("add", "train.py")
    assert told() == (commit, True), "what is about to be committed is a change too"


def test_a_run_outside_a_checkout_names_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert told() == (None, None)


def test_a_run_names_the_commit_where_git_takes_too_long_to_look_for_changes(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("commit", "--quiet", "--allow-empty", "-m", "begin")
    run = subprocess.run

    def slow(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "status" in command:
            raise subprocess.TimeoutExpired(command, 5)
        return run(command, **options)  # type: ignore[call-overload,no-any-return]  # handed on as they are

    monkeypatch.setattr(subprocess, "run", slow)
    assert environment._git() == (git("rev-parse", "HEAD"), None)


def test_a_changed_file_whose_name_does_not_decode_is_a_change(checkout: Path) -> None:
    git("config", "core.quotepath", "false")
    name = os.fsencode(checkout) + b"/\xe9.txt"  # as Latin-1 has it
    for text in ("one", "another"):
        with open(name, "w") as file:
            file.write(text)
        if text == "one":
            git("add", ".")
            git("commit", "--quiet", "-m", "begin")
    assert told() == (git("rev-parse", "HEAD"), True)
