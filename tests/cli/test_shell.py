"""What commands share: whatever others wrote cannot steer the terminal, and counts have bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.text import Text

import datastates
from datastates.cli.app import COMMANDS, MOST, Globals, Shell, command_of, complain
from datastates.cli.tables import Column, TextTable, facts_table, table
from datastates.errors import NotFound
from tests.cli.conftest import Invoke

EVIL = "\x1b]0;evil\x07\u202e\x9b31m"
"""It would change the title of the window, the direction of the line and the colour."""


@pytest.fixture
def shell() -> Shell:
    return Shell(typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None))))


@pytest.fixture(params=[False, True], ids=["piped", "coloured"])
def coloured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether colours are written."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1" if request.param else "")
    return bool(request.param)


def items() -> Iterator[Any]:
    """A line with ``EVIL`` and ``x`` in every form that can be written."""
    yield f"{EVIL}x"
    yield Text(f"{EVIL}x", "red")
    lines = TextTable([Column(EVIL)])
    lines.add(Text(f"{EVIL}x", "red"))
    yield lines
    facts = table(EVIL)
    facts.add_row(f"{EVIL}x")
    facts.add_row(Text(f"{EVIL}x", style="red"))
    yield facts
    yield facts_table([(EVIL, f"{EVIL}x")])


@pytest.mark.parametrize("item", list(items()), ids=["str", "text", "table", "rich", "facts"])
def test_whatever_is_written_cannot_steer_the_terminal(
    shell: Shell, coloured: bool, item: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.write(item)

    out = capsys.readouterr().out
    assert "x" in out
    assert not {"\x07", "\u202e", "\x9b"} & set(out)
    assert "\x1b]" not in out
    assert coloured or "\x1b" not in out


def test_a_line_that_others_wrote_stays_one(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.write("note: fine\nstate abc: every byte as it was captured")
    shell.hint("one\ntwo")

    assert [len(said.splitlines()) for said in capsys.readouterr()] == [1, 1]


def test_remarks_and_errors_cannot_steer_the_terminal(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.hint(EVIL)
    complain(NotFound(f"{EVIL}\nnext"), Globals())
    complain(RuntimeError(EVIL), Globals())

    err = capsys.readouterr().err
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(err)
    assert err.splitlines()[2] == "next", "lines of a message stay lines"


def test_names_and_values_of_others_are_shown_harmless_and_are_exact_as_json(
    tmp_path: Path, invoke: Invoke
) -> None:
    weight = torch.ones(1)
    with datastates.open(tmp_path / "runs", memory_bytes=32 << 20) as repo:
        with repo.track(rng=False, tree={EVIL: weight}, config={EVIL: 1}) as run:
            run.capture(attributes={EVIL: EVIL}).wait("durable")
        weight += 1
        with repo.track(rng=False, tree={EVIL: weight}, config={EVIL: EVIL}) as run:
            run.capture(attributes={EVIL: 1}, message=EVIL).wait("durable")
    for command in (
        ["diff", "--config", "main~1", "main"],
        ["diff", "main~1"],
        ["diff", "main~1", "--tensors"],
        ["diff", "main", "main~1", "main"],
        ["blame"],
        ["show", "main"],
    ):
        done = invoke(*command)
        assert done.code == 0, done.err
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(done.out + done.err), command
    assert invoke("show", "main", "--json").json["config"] == {EVIL: EVIL}


def test_every_option_that_counts_has_bounds() -> None:
    counts = {
        f"{name} {option.opts[0]}": option.max
        for name in COMMANDS
        for option in command_of(name).params
        if has_type(option, int)
    }

    assert {"log --limit", "find --limit", "branches --times", "serve --port"} <= counts.keys()
    assert [option for option, most in counts.items() if most is None or most > MOST] == []


def has_type(option: Any, wanted: type) -> bool:
    return option.type_descriptor.annotation is wanted


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("number", [MOST + 1, 2**63, 10**30])
@pytest.mark.parametrize(
    "command",
    [
        ["log"],
        ["log", "--follow"],
        ["find", "step > 0"],
        ["runs"],
        ["refs", "main"],
        ["log", "--incomplete"],
        ["du"],
    ],
)
def test_count_that_is_too_large_is_a_wrong_command_line(
    invoke: Invoke, command: list[str], number: int
) -> None:
    refused = invoke(*command, "-n", str(number))

    assert (refused.code, refused.out) == (2, "")
    assert "--limit" in refused.err
