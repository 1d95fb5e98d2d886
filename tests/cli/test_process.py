"""The terminal as a process: how it is found, how it ends, and what it costs to start."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from datastates.cli.app import COMMANDS, EXIT_CODES, WORDS, code_of
from datastates.errors import DatastatesError
from tests.cli.conftest import Invoke, uid
from tests.support import warm

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide" / "terminal.md"
TERMINAL = [sys.executable, "-W", "error", "-m", "datastates"]


def run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
    }
    return warm.run(
        [*TERMINAL, *arguments],
        cwd=cwd,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def kinds(error: type[DatastatesError] = DatastatesError) -> set[str]:
    return {error.kind}.union(*(kinds(each) for each in error.__subclasses__()))


def test_every_kind_of_error_has_an_exit_code() -> None:
    assert set(EXIT_CODES) == kinds()
    assert code_of(ValueError()) == 1
    assert 2 not in EXIT_CODES.values(), "which is a wrong command line"


def test_every_command_is_documented() -> None:
    guide = GUIDE.read_text()

    assert COMMANDS
    assert [name for name in COMMANDS if f"`datastates {name}" not in guide] == []


def test_every_exit_code_is_documented() -> None:
    guide = GUIDE.read_text()

    assert [code for code in {0, 2, 130, *EXIT_CODES.values()} if f"| {code} |" not in guide] == []


def test_repository_is_found_by_option_environment_or_from_here_upwards(
    root: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = root / "packs" / "leases"
    inner.mkdir(parents=True)
    monkeypatch.chdir("/")

    assert invoke("--repo", root, "refs").code == 0
    assert invoke("refs", "--repo", root).code == 0
    assert invoke("refs").code == 3
    monkeypatch.chdir(inner)
    assert invoke("refs").code == 0
    monkeypatch.setenv("DATASTATES_REPO", str(root.parent / "nothing"))
    assert invoke("refs").code == 3
    monkeypatch.setenv("DATASTATES_REPO", str(root))
    assert invoke("refs").code == 0


def test_missing_repository_names_the_next_step(invoke: Invoke) -> None:
    failed = invoke("log")

    assert failed.code == 3
    assert "datastates init" in failed.err
    assert not Path("runs").exists(), "reading makes nothing"


def test_json_option_may_stand_before_or_behind_the_command(root: Path, invoke: Invoke) -> None:
    assert invoke("--json", "refs").lines == invoke("refs", "--json").lines
    for arguments in (("--json", "show", "nope"), ("show", "nope", "--json")):
        failed = invoke(*arguments)
        assert json.loads(failed.err)["error"]["kind"] == "not-found"
        assert (failed.code, failed.out) == (3, "")


def modules_of(root: Path, *arguments: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    code = f"""
import sys
from datastates.cli import main
sys.argv = ['datastates', *{list(arguments)!r}]
try: main()
finally: print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("log", "--help"),
        ("log", "--oneline"),
        ("tag", "new", "main"),
        ("find", "step > 3"),
        ("--version",),
    ],
)
def test_lineage_commands_do_without_torch(root: Path, arguments: tuple[str, ...]) -> None:
    assert "torch" not in modules_of(root, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [("log",), ("refs",), ("refs", "main"), ("find", "step > 3")],
)
def test_commands_that_look_import_what_they_need(root: Path, arguments: tuple[str, ...]) -> None:
    found = modules_of(root, *arguments)

    slow = {
        "torch",
        "numpy",
        "sqlalchemy.orm",
        "alembic",
        "pydantic",
        "rich.console",
        "fastapi",
        "networkx",
        "msgspec",
        "datastates.repository",
    }
    slow |= {"lark"} if arguments[0] != "find" else {"msgspec"}
    assert found & slow == ({"msgspec"} if arguments[0] in ("find", "log") else set()), (
        "each of these takes a tenth of a command's time or more"
    )
    files = {function.partition(".")[0] for _, function in COMMANDS.values()}
    loaded = {file for file in files if f"datastates.cli.{file}" in found}
    assert loaded == {COMMANDS[arguments[0]][1].partition(".")[0]}, "no other command's file"


def test_help_lists_commands_by_what_they_are_for_and_flags_without_a_type(root: Path) -> None:
    out = run("--help", cwd=root, COLUMNS="120").stdout

    for heading in {heading for heading, _ in COMMANDS.values()}:
        assert f"─ {heading} ─" in out
    assert all(f"│ {name} " in out for name in COMMANDS)
    assert "<bool>" not in out
    for command in ("log", "find", "serve", "tag"):
        assert "<bool>" not in run(command, "--help", cwd=root).stdout
    assert "<int" in run("log", "--help", cwd=root).stdout, "what takes a value says which"


def test_there_are_at_most_thirty_commands() -> None:
    assert len(COMMANDS) <= 30


@pytest.mark.parametrize("word", sorted(WORDS))
def test_words_of_git_and_others_lead_to_our_commands(invoke: Invoke, word: str) -> None:
    refused = invoke(word, "main")

    assert (refused.code, refused.out) == (2, "")
    assert f"there is no command '{word}'" in refused.err
    named = re.findall(r"`datastates (\w+)", WORDS[word])
    assert set(named) <= COMMANDS.keys()


def test_a_misspelt_command_gets_the_closest_one(invoke: Invoke) -> None:
    assert "did you mean `datastates branches`" in invoke("branchs").err
    assert "`datastates --help` lists them" in invoke("xyzzy").err


def test_hints_and_errors_repeat_the_repository_that_was_named(
    root: Path, invoke: Invoke, tmp_path: Path
) -> None:
    root = root.rename(tmp_path / "my runs")
    given = f"`datastates --repo '{root}'"
    for words in (["--repo", root, "branches"], ["branches", "--repo", root]):
        assert f"{given} restore 1600000000 " in invoke(*words, "--best", "val_loss").err
    assert (
        f"{given} tag warm {uid('1', 8)[:10]} --move`"
        in invoke("tag", "warm", "main", "--repo", root).err
    )
    missing = invoke("--repo", tmp_path / "none", "log").err
    assert f"`datastates init {tmp_path / 'none'}`" in missing, "this command names it already"


def test_help_names_the_exit_codes(tmp_path: Path) -> None:
    out = " ".join(run("--help", cwd=tmp_path, COLUMNS="200").stdout.split())

    assert (
        "0 done; 1 unexpected; 2 wrong command line; 3 not found; 4 conflict; 5 invalid input; 6"
        " corrupt; 7 unavailable;" in out
    )
    assert "8 refused, or a peer broke the protocol; 130" in out


def test_reader_that_goes_away_is_no_failure(root: Path) -> None:
    command = f"set -o pipefail; {shlex.join(TERMINAL)} log --json | head -n 1 >/dev/null"
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    closed = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shlex.join(TERMINAL)} log | true"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (closed.returncode, closed.stderr) == (0, "")


def test_output_has_no_colours_when_it_is_piped(root: Path) -> None:
    for arguments in (["log"], ["refs"], ["show", "main"], ["show", "nope"]):
        done = run(*arguments, cwd=root)
        assert "\x1b" not in done.stdout + done.stderr


def test_output_on_a_terminal_has_colours_unless_they_are_turned_off(root: Path) -> None:
    command = ["script", "-qec", shlex.join([*TERMINAL, "refs"]), "/dev/null"]
    environ = {
        key: value
        for key, value in os.environ.items()
        if key not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
    } | {"TERM": "xterm"}
    coloured = subprocess.run(
        command, cwd=root, env=environ, capture_output=True, text=True, timeout=60, check=False
    ).stdout
    plain = subprocess.run(
        command,
        cwd=root,
        env={**environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout

    assert "\x1b[1;32m" in coloured
    assert "\x1b[1;32m" not in plain
    assert "warm" in plain


def test_long_lines_do_not_fold_into_the_lanes_on_a_narrow_terminal(root: Path) -> None:
    command = [
        "script",
        "-qec",
        f"stty cols 30; {shlex.join([*TERMINAL, 'log', '--oneline'])} 2>/dev/null",
        "/dev/null",
    ]
    environ = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    environ.pop("COLUMNS", None)
    out = subprocess.run(
        command, cwd=root, env=environ, capture_output=True, text=True, timeout=60, check=False
    ).stdout

    lines = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
    assert sum(bool(re.match("[│├ ]*[*o] ", line)) for line in lines) == 11
    assert all(line[0] in "*o│├" and len(line) <= 30 for line in lines)
    assert "…" in out


def test_errors_are_one_message_unless_a_traceback_is_asked_for(root: Path) -> None:
    assert "Traceback" not in run("show", "nope", cwd=root).stderr
    assert "Traceback" in run("show", "nope", cwd=root, DATASTATES_TRACEBACK="1").stderr


def test_file_that_is_no_database_ends_in_a_message(tmp_path: Path) -> None:
    (tmp_path / "lineage.db").write_text("something else entirely, for longer than a page " * 100)
    done = run("log", cwd=tmp_path)

    assert done.returncode in (5, 6)
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_interrupt_ends_with_130(root: Path) -> None:
    code = """
import os, signal, sys
from datastates.cli import history, main
history._select = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ['datastates', 'log']
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "interrupted"), [("branches --watch", "lists._said"), ("doctor", "doctor._torch")]
)
def test_interrupt_leaves_a_terminal_with_its_cursor(
    root: Path, command: str, interrupted: str
) -> None:
    code = f"""
import os, signal, sys
from datastates.cli import doctor, lists, main
{interrupted} = lambda *_: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ['datastates', *'{command}'.split()]
main()
"""
    shown = ["script", "-qec", shlex.join([sys.executable, "-c", code]), "/dev/null"]
    environ = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        shown, cwd=root, env=environ, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 130, done.stdout
    assert done.stdout.count("\x1b[?25l") == done.stdout.count("\x1b[?25h"), (
        "as often shown as hidden"
    )


@pytest.mark.parametrize("delay_s", [0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4])
def test_interrupt_while_it_starts_is_quiet(root: Path, delay_s: float) -> None:
    """From our first import on; until then it is Python that starts."""
    code = (
        "import sys; print(flush=True); sys.argv = ['datastates', 'verify', 'main']; from"
        " datastates.cli import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(delay_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert process.returncode in (
        130,
        7,
    ), "it was interrupted, or had found by then that the bytes are not there"
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err
    assert process.returncode == 7 or err == ""


def test_interrupt_that_whoever_started_us_ignores_is_ignored(root: Path) -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from datastates.cli import history, main
select = history._select
history._select = lambda *given, **more: (os.kill(os.getpid(), signal.SIGINT), select(*given, **more))[1]
sys.argv = ['datastates', 'log', '--oneline']
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "step 8" in done.stdout


def test_completion_knows_commands_and_names(root: Path) -> None:
    def complete(line: str) -> list[str]:
        environ = {
            "_DATASTATES_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        }
        code = "import sys; sys.argv = ['datastates']; from datastates.cli import main; main()"
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**inherited, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert complete("datastates re") == ["refs", "restore", "repair"]
    assert complete("datastates show ") == ["fork", "main", "warm"]
    assert complete("datastates tag w") == ["warm"]
    assert complete("datastates branch ") == ["fork", "main"]
    assert complete("datastates log warm..m") == ["warm..main"]
    assert complete("datastates --repo /nothing show ") == []
    assert complete("datastates branches --best ") == ["loss", "val_loss"]
    assert complete("datastates branches --group c") == ["config.lr"]
    assert complete("datastates log --columns loss,v") == ["loss,val_loss"]
    assert complete("datastates find at") == ["attr.kind", "attr.lr"]
    assert complete("datastates --repo /nothing find l") == []
    assert complete(f"datastates --repo {root} show w") == ["warm"]


def test_uid_is_printed_whole_where_it_is_the_subject(root: Path) -> None:
    assert run("show", "warm", cwd=root).stdout.splitlines()[0] == f"state       {uid('1', 3)}"
