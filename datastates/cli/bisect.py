"""``bisect``: the first state at which something turned bad."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import InvalidInput, Unavailable

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.algebra.bisection import Bisection, Judge, Verdict
    from datastates.lineage import State
    from datastates.repository import Repository

__all__ = ["register"]

_SKIP, _NOT_RUN = 125, (126, 127)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bisect)


def bisect(
    context: typer.Context,
    good: Annotated[str, typer.Argument(metavar="GOOD", help="A state that is good.", autocompletion=ref_names)],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="A descendant of it that is bad.", autocompletion=ref_names)],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", metavar="CONDITION", help="A state is bad where this holds: 'loss > 5'. Nothing is restored.", show_default=False
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="COMMAND",
            help="A state is bad where it ends with 1 to 124; 0: good, 125: skip. {path}: a folder of its safetensors, {uid}: its uid.",
            show_default=False,
        ),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="MODULE:FUNCTION",
            help="A state is bad where this returns True; it takes what repo.load returns. None skips.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Restore only these objects for it: model; may be repeated.", show_default=False),
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Forget what an earlier bisection of this question found.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Find the first bad state between two, by restoring about log2 of their number.

    A bisection that was broken off goes on when the same command is given again. States whose bytes are gone are not tried: the answer may
    then be a range.
    """
    shell = Shell(context, repo, as_json)
    asked = [(kind, said) for kind, said in (("metric", metric), ("run", command), ("python", function)) if said is not None]
    if len(asked) != 1:
        raise InvalidInput(
            "what is bad is said by one of --metric 'loss > 5', --run COMMAND and --python MODULE:FUNCTION: give one of them"
        )
    ((kind, said),) = asked
    with shell.repository() as repository:
        from datastates.algebra.bisection import bisect_by, judge_of

        if kind == "metric":
            found = repository.bisect(good, bad, said)
            return _say(shell, found, said)
        if kind == "run":
            judge = _command_judge(repository, said, only)
        else:
            from .functions import function_of

            judge = judge_of(repository.core, function_of(said, "says whether a state is bad"), only)
        one, other = repository.state(good), repository.state(bad)
        by = f"{kind} {said} {' '.join(only or ())}".strip()
        notes = _notes_of(repository, f"{one.uid} {other.uid} {by}")
        if reset and notes is not None:
            notes.unlink(missing_ok=True)
        try:
            found = bisect_by(repository.core, one, other, _telling(shell, judge), by=by, verdicts=notes)
        except KeyboardInterrupt:
            if notes is not None:
                shell.hint("to go on: the same command again; --reset begins anew")
            raise
    return _say(shell, found, said)


def _notes_of(repository: Repository, question: str) -> Path | None:
    """The file that keeps the verdicts of a question, in the repository's folder; None if nothing may be written."""
    folder = repository.location.root or repository.location.packs.parent
    name = f"bisect-{hashlib.blake2b(question.encode(), digest_size=8).hexdigest()}.json"
    return folder / name if os.access(folder, os.W_OK) else None


def _telling(shell: Shell, judge: Judge) -> Judge:
    """A judge that prints each verdict as it is found."""

    def told(state: State) -> Verdict:
        verdict = judge(state)
        shell.hint(f"step {state.step}, {state.uid[:10]}: {verdict}")
        return verdict

    return told


def _command_judge(repository: Repository, command: str, only: list[str] | None) -> Judge:
    from datastates.algebra.bisection import Verdict

    def judge(state: State) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="datastates-bisect-") as folder:
            if "{path}" in command:
                try:
                    _write(repository, state, Path(folder), only)
                except Unavailable:
                    return Verdict.SKIPPED
            filled = command.replace("{uid}", state.uid).replace("{path}", shlex.quote(folder))
            code = subprocess.run(["/bin/sh", "-c", filled], check=False, stdin=subprocess.DEVNULL, stdout=2).returncode
        if code in _NOT_RUN or not 0 <= code < 128:
            how = "could not be run" if code in _NOT_RUN else "was ended by a signal or with a code of 128 or more"
            raise InvalidInput(f"{filled!r} {how} (exit code {code}), which says nothing of state {state.uid}: mend the command, and go on")
        return Verdict.GOOD if code == 0 else Verdict.SKIPPED if code == _SKIP else Verdict.BAD

    return judge


def _write(repository: Repository, state: State, folder: Path, only: list[str] | None) -> None:
    from datastates.export.tensors import export, plan_export

    export(plan_export(repository.load(state, only=only or None), state, folder))


def _say(shell: Shell, found: Bisection, question: str) -> None:
    if shell.as_json:
        shell.write_json(
            {
                "first": None if found.first is None else found.first.uid,
                "good": found.good.uid,
                "bad": found.bad.uid,
                "candidates": [state.uid for state in found.candidates],
                "restores": found.restores,
                "tried": found.tried,
            }
        )
        return
    from .render import state_text

    if found.first is not None:
        shell.write(state_text(found.first))
        shell.write(f"is the first bad one by {question!r}; step {found.good.step}, {found.good.uid[:10]} before it is good")
    else:
        for state in found.candidates:
            shell.write(state_text(state))
        shell.write(f"one of these {len(found.candidates)} is the first bad one by {question!r}: those before the last could not be judged")
    shell.hint(f"states tried: {found.restores}")
