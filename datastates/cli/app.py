"""All commands together, and what surrounds each of them: global options, errors, the end of a pipe."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from datastates.errors import DatastatesError

from .commands import LazyCommands, simplify
from .interrupt import INTERRUPTED
from .shell import AsJson, Globals, Repo

__all__ = ["app", "run"]

EPILOG = (
    "Exit codes: 0 done; 1 unexpected; 2 wrong command line; 3 not found; 4 conflict; 5 invalid input; 6 corrupt;"
    " 7 unavailable; 8 refused, or a peer broke the protocol; 130 interrupted."
    " DATASTATES_TRACEBACK=1 shows tracebacks, NO_COLOR=1 turns colours off."
)


class Group(TyperGroup):
    """The group of commands. Every command that fails ends in the same way: with a message on standard error and a documented exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = LazyCommands()

    def get_params(self, ctx: Any) -> list[Any]:
        return simplify(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _leave_pipe()
            raise typer.Exit(0) from None
        except (DatastatesError, OSError) as error:
            raise typer.Exit(_complain(error, as_json=_wants_json(ctx))) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _wants_json(context: Any) -> bool:
    return isinstance(context.obj, Globals) and context.obj.as_json


def _complain(error: BaseException, *, as_json: bool) -> int:
    from .exits import code_of, complain

    complain(error, as_json=as_json)
    return code_of(error)


app = typer.Typer(
    name="datastates",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from datastates import __version__

        typer.echo(f"datastates {__version__}")
        raise typer.Exit


@app.callback()
def _begin(
    context: typer.Context,
    repo: Repo = None,
    packs: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Where the packs of a postgresql:// repository are (default: DATASTATES_PACKS).", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """The lineage of a training: every state that was captured, by name, by metric, by ancestry."""
    context.obj = Globals(repo, packs, as_json)


def run() -> None:
    """Run the command line of this process; ends it with the command's exit code."""
    try:
        app()
    except SystemExit:
        _flush()
        raise
    except Exception as error:  # the one place where a command ends: an error that no user caused is shown with its trace
        sys.exit(_complain(error, as_json="--json" in sys.argv[1:]))


def _flush() -> None:
    """Write buffered output now, while a closed pipe is not an error yet."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_pipe()


def _leave_pipe() -> None:
    """End quietly when our reader has seen enough (``| head``): that is not a failure, and nothing may be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
