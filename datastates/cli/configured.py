"""``config``: the configuration of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from .complete import ref_names
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.lineage.show.configured import Configured, Pair

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("config")(show_config)


def show_config(
    context: typer.Context,
    rev: Annotated[
        str, typer.Argument(metavar="REV", help="A state or a branch: uid, name, main~3, main@best:val_loss, …", autocompletion=ref_names)
    ] = "main",
    other: Annotated[
        str | None,
        typer.Option(
            "--diff", metavar="OTHER", help="Only what differs from this state or branch.", show_default=False, autocompletion=ref_names
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show the configuration that a state was trained with, since when each value holds, and what it was before."""
    from datastates.lineage.search import revision
    from datastates.lineage.show.configured import changes, configured

    from .render import state_text

    shell = Shell(context, repo, as_json)
    with shell.reading() as session:
        state = revision.resolve(session, rev)
        if other is None:
            return _say(shell, configured(session, state.uid))
        base = revision.resolve(session, other)
    found = changes(base.config, state.config)
    if shell.as_json:
        return shell.write_json({"state": state.uid, "other": base.uid, "changes": found})
    shell.write(state_text(base), state_text(state), *_rows(found))
    if not found:
        shell.hint("both were configured alike" if state.config else "nothing is recorded of the configuration of either")
    return None


def _say(shell: Shell, found: Configured) -> None:
    from .render import facts_table, state_text

    before, state = found.before, found.state
    if shell.as_json:
        return shell.write_json(
            {
                "state": state.uid,
                "step": state.step,
                "config": state.config,
                "since": found.since.uid,
                "before": None if before is None else before.uid,
                "changes": found.changes,
            }
        )
    shell.write(state_text(state))
    if not state.config:
        shell.hint("it was trained without track(config=…): nothing of its configuration is recorded")
    else:
        shell.write(facts_table([(key, _text(value)) for key, value in state.config.items()]))
    if before is not None:
        shell.write("", f"so since step {found.since.step}, {found.since.uid[:10]}; from its parent:", *_rows(found.changes))
    return None


def _rows(found: Mapping[str, Pair]) -> list[str]:
    return [f"{key}: {_text(old)} -> {_text(new)}" for key, (old, new) in found.items()]


def _text(value: object) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, str) else str(value)
