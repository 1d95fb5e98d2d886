"""What a run says of the code that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datastates.lineage.states import GIT_REMOTE
from datastates.maintenance import environment


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


def test_a_run_outside_a_checkout_names_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told() == (None, None)


def test_a_run_names_the_commit_where_git_takes_too_long_to_look_for_changes(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git("commit", "--quiet", "--allow-empty", "-m", "begin")
    run = subprocess.run

    def slow(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "status" in command:
            raise subprocess.TimeoutExpired(command, 5)
        # handed on as they are
        return run(command, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(subprocess, "run", slow)
    assert told() == (git("rev-parse", "HEAD"), None)


ASKS = """
import json
from datastates.maintenance.environment import describe_run

def ask():
    run = describe_run({})
    print(json.dumps([run.git_commit, run.git_dirty, run.config.get("datastates.git_root"), run.config.get("datastates.git_remote")]))

ask()
"""


def asked(*command: str, given: str | None = None) -> list[object]:
    """What a script says: commit, whether there are changes, root and remote.

    ``given`` goes to its standard input."""
    done = subprocess.run(
        [sys.executable, *command], input=given, capture_output=True, text=True, check=True
    )
    found: list[object] = json.loads(done.stdout.splitlines()[0])
    return found


def test_the_commit_is_that_of_the_script_and_not_of_the_working_directory(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    code = tmp_path_factory.mktemp("code")
    script = code / "jobs" / "[train].py"
    script.parent.mkdir()
    script.write_text(ASKS)
    assert asked(str(script)) == [None, None, None, None], "its folder is no checkout"
    git("commit", "--quiet", "--allow-empty", "-m", "begin")
    here = [git("rev-parse", "HEAD"), False, str(checkout), None]
    assert asked(str(script)) == [
        None,
        None,
        None,
        None,
    ], "the working directory is none of its business"

    git("-C", str(code), "init", "--quiet")
    assert asked(str(script)) == [None, None, str(code), None], "nothing is committed yet"
    (script.parent / "t.py").write_text("the pattern [train].py matches this name")
    git("-C", str(code), "add", "jobs/t.py")
    git("-C", str(code), "commit", "--quiet", "-m", "begin")
    commit = git("-C", str(code), "rev-parse", "HEAD")
    assert asked(str(script)) == [commit, True, str(code), None], "git does not track the script"

    git("-C", str(code), "add", "jobs/[[]train].py")
    git("-C", str(code), "commit", "--quiet", "-m", "the script")
    git("-C", str(code), "remote", "add", "origin", "https://someone:s3cret@example.org/code.git")
    there = [
        git("-C", str(code), "rev-parse", "HEAD"),
        False,
        str(code),
        "https://***@example.org/code.git",
    ]
    assert asked(str(script)) == there
    link = checkout / "link.py"
    link.symlink_to(script)
    assert asked(str(link)) == asked("-m", "cProfile", str(script)) == there
    assert asked("-c", ASKS) == asked("-", given=ASKS) == here, "no script: the working directory"

    script.write_text(ASKS + "#")
    assert asked(str(script)) == [there[0], True, *there[2:]]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://s3cret@example.org/code.git", "https://***@example.org/code.git"),
        ("https://a:s3@cret@example.org/@b/code.git", "https://***@example.org/@b/code.git"),
        ("ssh://git@example.org/code.git", "ssh://git@example.org/code.git"),
        ("ssh://git:s3cret@example.org/code.git", "ssh://git:***@example.org/code.git"),
        ("https://example.org/code.git?token=s3cret", "https://example.org/code.git?token=***"),
        ("git@example.org:code.git", "git@example.org:code.git"),
    ],
)
def test_credentials_in_the_url_of_a_remote_are_masked(
    checkout: Path, url: str, shown: str
) -> None:
    git("remote", "add", "upstream", url)
    git("config", "branch.main.remote", "upstream")
    git("checkout", "--quiet", "-B", "main")
    assert environment.describe_run({}).config[GIT_REMOTE] == shown
    assert "s3cret" not in repr(environment.describe_run({}))


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
