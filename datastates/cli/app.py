"""All commands together: their list, ``Shell``, which gives a command its repository and output,
and the handling of errors and of closed pipes.

Also the import of ``MODULE:FUNCTION`` arguments and the completion of names.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer  # typer itself reads the annotations of these functions
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from datastates.errors import Corrupt, DatastatesError, InvalidInput, SyntaxProblem, Unavailable
from datastates.lineage.views.text import clean
from datastates.system import logs

from .interrupt import INTERRUPTED, orderly
from .tables import TextTable, clean_line, clean_lines, cut

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from datastates.lineage.database import Database
    from datastates.lineage.session import Session
    from datastates.lineage.states import State
    from datastates.maintenance.location import Location
    from datastates.repository import Repository

EXAMPLES = {
    "branches": "datastates branches 'val_loss < 0.2' --best val_loss",
    "runs": "datastates runs -n 5",
    "log": "datastates log main --columns val_loss --since 7d",
    "show": "datastates show main@best:val_loss",
    "find": "datastates find 'val_loss < 0.2 and step > 500 order by val_loss limit 5'",
    "diff": "datastates diff main~3 main --only model",
    "blame": "datastates blame main --only 'model/*' --size",
    "bisect": "datastates bisect main~3 main --metric 'val_loss > 0.13'",
    "refs": "datastates refs main",
    "branch": "datastates branch second-try main@best:val_loss",
    "tag": "datastates tag baseline main~3 --message 'before the new schedule'",
    "rm": "datastates rm second-try --bytes --dry-run",
    "note": "datastates note main --message 'diverges *after* the warm-up'",
    "restore": "datastates restore main@best:val_loss --into weights.safetensors --only model",
    "export": "datastates export baseline --bundle baseline-bundle",
    "import": "datastates import baseline-bundle --repo elsewhere",
    "clone": "datastates clone tcp://127.0.0.1:4711/main --repo mine",
    "copy": "datastates copy baseline --to s3",
    "agent": "datastates agent status",
    "cadence": "datastates cadence main --mtbf 6h",
    "serve": "datastates serve http://127.0.0.1:8642 tcp://127.0.0.1:4711",
    "token": "datastates token clone.token",
    "du": "datastates du",
    "prune": "datastates prune --keep 'latest:5 best:3:val_loss' --dry-run",
    "gc": "datastates gc --dry-run",
    "demo": "datastates demo --short",
    "init": "datastates init elsewhere",
    "doctor": "datastates doctor",
    "verify": "datastates verify",
    "repair": "datastates repair --lineage --replace",
}
"""The examples by the name of the command."""


# --- The commands in the order of the help, each with its module and heading ---


COMMANDS = {
    "branches": ("Look", "lists.branches"),
    "runs": ("Look", "lists.runs"),
    "log": ("Look", "history.log"),
    "show": ("Look", "history.show"),
    "find": ("Look", "history.find"),
    "diff": ("Look", "compare.diff"),
    "blame": ("Look", "compare.blame"),
    "bisect": ("Look", "compare.bisect"),
    "refs": ("Name and note", "names.list_refs"),
    "branch": ("Name and note", "names.branch"),
    "tag": ("Name and note", "names.tag"),
    "rm": ("Name and note", "names.rm"),
    "note": ("Name and note", "names.note"),
    "restore": ("Move states", "move.restore"),
    "export": ("Move states", "move.export_states"),
    "import": ("Move states", "move.import_states"),
    "clone": ("Move states", "move.clone"),
    "copy": ("Move states", "upkeep.copy"),
    "agent": ("Run trainings", "agent.agent"),
    "cadence": ("Run trainings", "compare.cadence"),
    "serve": ("Serve", "serve.serve"),
    "token": ("Serve", "serve.token"),
    "du": ("Disk space", "upkeep.du"),
    "prune": ("Disk space", "upkeep.prune"),
    "gc": ("Disk space", "upkeep.gc"),
    "demo": ("Set up and check", "doctor.demo"),
    "init": ("Set up and check", "doctor.init"),
    "doctor": ("Set up and check", "doctor.doctor"),
    "verify": ("Set up and check", "upkeep.verify"),
    "repair": ("Set up and check", "upkeep.repair"),
}
"""The heading of each command, and its function, by module."""

_LISTS = "`datastates branches` shows trainings, `log` their states, `refs` all names"
_TAKE = 'track(start="REV") in a script continues from a state, `datastates restore` writes files'
WORDS = {
    **dict.fromkeys(("ls", "list"), _LISTS),
    **dict.fromkeys(("checkout", "switch", "load"), _TAKE),
    "status": "use `datastates runs`",
    **dict.fromkeys(("add", "commit", "save"), "run.capture() in a training captures a state"),
    "merge": "use repo.merge in Python",
    "reset": "use `datastates branch NAME REV --move`",
    "push": "use `datastates copy --to TIER`, or `datastates export`",
    **dict.fromkeys(("pull", "fetch"), "use `datastates clone tcp://HOST:PORT/REV`"),
    **dict.fromkeys(("delete", "remove"), "use `datastates rm NAME`"),
    **dict.fromkeys(("mv", "rename"), "use `datastates branch --rename OLD NEW`"),
    **dict.fromkeys(("best", "top"), "use `datastates branches --best METRIC`"),
    "watch": "use `datastates branches --watch`",
    "compare": "use `datastates diff REV REV…`",
    "config": "use `datastates show REV`, or `datastates diff --config REV REV`",
    "stats": "use `datastates show`",
    "incomplete": "use `datastates log --incomplete`",
    "reflog": "use `datastates refs NAME`",
    "annotate": "use `datastates note REV --metric KEY=NUMBER`",
    "reindex": "use `datastates repair --lineage`",
}
"""What to use instead of other words that people type."""

Repo = Annotated[
    str | None,
    typer.Option(
        "--repo",
        "-r",
        metavar="URL",
        help=(
            "The repository's folder or postgresql://… (default: DATASTATES_REPO, else found from"
            " here upwards, else ./runs)."
        ),
        show_default=False,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Write JSON; lists as one object a line.", show_default=False),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Only these objects or tensors: model, 'model/*.weight'. May be repeated.",
        show_default=False,
    ),
]
MOST = 10**9
"""The largest number that an option which counts takes: databases count to 2**63 at most."""

Limit = Annotated[
    int, typer.Option("--limit", "-n", min=0, max=MOST, help="Show at most this many. 0 shows all.")
]
_OUR_COMMAND = re.compile(r"`datastates(?= (?!init|demo|token|agent|--)|`)")
PIPED_WIDTH = 10_000
"""The width for output that a program reads, so that nothing is folded or cut."""

EPILOG = (
    "Exit codes: 0 done; 1 unexpected; 2 wrong command line; 3 not found; 4 conflict; 5 invalid"
    " input; 6 corrupt; 7 unavailable; 8 refused, or a peer broke the protocol; 130 interrupted."
    " DATASTATES_TRACEBACK=1 shows tracebacks, NO_COLOR=1 turns colours off."
)
EXIT_CODES = {
    "error": 1,
    "torn": 1,
    "closed": 1,
    "not-found": 3,
    "ambiguous": 3,
    "conflict": 4,
    "invalid-input": 5,
    "syntax": 5,
    "unsupported": 5,
    "corrupt": 6,
    "unavailable": 7,
    "over-budget": 7,
    "disconnected": 7,
    "unauthorized": 8,
    "peer-fault": 8,
    "dirty": 1,
    "processor-failed": 1,
    "cancelled": 130,
}
"""Exit codes by the kind of error. 2 is a wrong command line. An error that is not listed is a
defect and gives 1."""


class Command(TyperCommand):
    """A command whose parameters cost no more than necessary."""

    def get_params(self, ctx: Any) -> list[Any]:
        return simplify(super().get_params(ctx))


@cache
def command_of(name: str) -> Any:
    """The command of this name. Its module is imported now."""
    heading, path = COMMANDS[name]
    module, function = path.split(".")
    found = getattr(import_module(f".{module}", __package__), function)
    if isinstance(found, typer.Typer):
        group = typer.main.get_command(found)
        group.rich_help_panel = heading  # type: ignore[attr-defined] # typer's own groups have it
        return group
    app = typer.Typer(add_completion=False)
    app.command(name, cls=Command, rich_help_panel=heading, epilog=f"Example: {EXAMPLES[name]}")(
        found
    )
    return typer.main.get_command(app)


def simplify(parameters: list[Any]) -> list[Any]:
    """Show flags without a type, and take values as they are if nothing has to be converted.

    Typer converts with pydantic, whose import takes a third of the time that ``datastates log``
    needs to begin.
    """
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if (
            not isinstance(parameter.process_value, _Unconverted)
            and parameter.nargs == 1
            and not getattr(parameter, "multiple", False)
        ):
            parameter.process_value = _Unconverted(parameter)
    return parameters


class _Unconverted:
    """The conversion for a parameter: a missing value, a default, and a text where a text is
    wanted stay as they are."""

    def __init__(self, parameter: Any) -> None:
        self._convert, self._parameter = parameter.process_value, parameter
        self._is_text = (
            getattr(getattr(parameter, "type_descriptor", None), "annotation", None) is str
        )

    def __call__(self, context: Any, value: Any) -> Any:
        of = self._parameter
        is_missing = value is None and not of.required
        is_default = value is not None and value is of.default and type(value) in (int, float, str)
        if not (is_missing or is_default or (self._is_text and type(value) is str)):
            return self._convert(context, value)
        return value if of.callback is None else of.callback(context, of, value)


# --- The repository and the output of a command ---


@dataclass(slots=True)
class Globals:
    """The options before the command."""

    repo: str | None = None
    packs: str | None = None
    as_json: bool = False

    def in_commands(self, text: str) -> str:
        """The text, with the given ``--repo`` and ``--packs`` in each of our commands in it."""
        given = [("--packs", self.packs), ("--repo", self.repo)]
        options = "".join(f" {name} {shlex.quote(value)}" for name, value in given if value)
        return _OUR_COMMAND.sub(rf"`datastates{options.replace(chr(92), chr(92) * 2)}", text)


class Shell:
    """The context of a command, which makes it first from its own options and those before it."""

    def __init__(
        self, context: typer.Context, repo: str | None = None, as_json: bool = False
    ) -> None:
        options = context.ensure_object(Globals)
        # errors are reported the same way
        options.as_json = self.as_json = as_json or options.as_json
        options.repo = repo or options.repo
        self._globals = options

    @cached_property
    def console(self) -> Console:
        """rich's console, for colours and for output that moves or folds."""
        from rich.console import Console

        return Console(
            highlight=False,
            markup=False,
            emoji=False,
            width=None if sys.stdout.isatty() else PIPED_WIDTH,
        )

    @property
    def is_watched(self) -> bool:
        """Whether a person sees output that moves, such as a progress bar."""
        return not self.as_json and self.console.is_terminal and sys.stderr.isatty()

    @property
    def width(self) -> int | None:
        """The columns of the terminal; None if a program reads the output."""
        return shutil.get_terminal_size().columns if is_terminal() else None

    @property
    def url(self) -> str:
        """The url of the command's repository, as it was named or found."""
        from datastates.maintenance.location import discover

        return self._globals.repo or discover()

    def location(self, *, must_exist: bool = True) -> Location:
        """The location of the repository.

        :raises NotFound: with ``must_exist``, the repository does not exist.
        """
        from datastates.maintenance.location import locate

        return locate(self.url, self._globals.packs, must_exist=must_exist)

    @contextmanager
    def database(self) -> Iterator[Database]:
        """The lineage, open; needs torch only if a lease is free, because then the states of
        dead processes are settled first."""
        from datastates.lineage.database import Database
        from datastates.maintenance.lease import held_in

        location = self.location()
        if held_in(location.packs, is_held=False):
            with self.repository() as repository:
                yield repository.core.database
            return
        database = Database(location.database_url, create=False)
        try:
            yield database
        finally:
            database.close()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        with self.database() as database, database.read() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A durable transaction that changes its lineage."""
        orderly()
        with self.database() as database:
            with database.write(durable=True) as session:
                yield session
            from datastates.maintenance.backup import back_up

            with suppress(DatastatesError, OSError):  # the next backup has it
                back_up(database, self.location())

    @contextmanager
    def repository(self, *, must_exist: bool = True) -> Iterator[Repository]:
        """The whole repository, including payload: imports torch.

        Without ``must_exist``, a repository that is missing is made."""
        location = self.location(must_exist=must_exist)
        from datastates.repository import open as open_repository

        orderly()
        url = location.database_url if location.root is None else location.root
        with open_repository(url, packs=location.packs) as repository:
            yield repository

    def write(self, *items: str | Text | TextTable | RenderableType) -> None:
        """Write for people; a ``str`` is a line. On a terminal nothing is wider than it; for a
        program there are neither colours nor trailing blanks. Whatever others wrote into it cannot
        steer the terminal.
        """
        for item in items:
            if isinstance(item, TextTable):
                self._write_lines(item.lines(self.width))
                left_out = item.left_out(self.width)
                if left_out:
                    self.hint(
                        f"no room here for {', '.join(left_out)}: a wider terminal shows more"
                    )
            elif isinstance(item, str | Text):
                self._write_lines([Text(item) if isinstance(item, str) else item])
            else:
                self._write_rich(item)

    def write_cut(self, lines: Iterable[Text]) -> None:
        """Write lines that may be cut to the width of a terminal, but must not fold."""
        self._write_lines([line if self.width is None else cut(line, self.width) for line in lines])

    def _write_lines(self, lines: Iterable[Text]) -> None:
        has_colours = (
            is_terminal()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") not in ("dumb", "unknown")
        )
        for line in map(clean_line, lines):
            if has_colours:
                self.console.print(line, soft_wrap=True)
            else:
                sys.stdout.write(line.plain + "\n")

    def _write_rich(self, item: RenderableType) -> None:
        from rich.segment import Segments

        segments = (
            each if each.control else each._replace(text=clean_lines(each.text))
            for each in self.console.render(item)
        )
        if self.console.is_terminal:
            self.console.print(Segments(segments))
            return
        with self.console.capture() as captured:
            self.console.print(Segments(segments))
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def hint(self, text: str) -> None:
        """Write a remark of one line on standard error, except with JSON. Commands in it, between
        backticks, get the repository that was named."""
        if self.as_json:
            return
        sys.stdout.flush()  # the output that it refers to comes first
        text = clean(self._globals.in_commands(text))
        is_dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        sys.stderr.write((typer.style(text, dim=True) if is_dim else text) + "\n")

    def write_json(self, value: object, **more: object) -> None:
        """Write one object, on a separate line. ``more`` are fields that are not in ``value``."""
        import msgspec

        if more:
            value = {**msgspec.to_builtins(value, enc_hook=str), **more}
        sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")

    def write_lines(self, values: Iterable[object]) -> None:
        for value in values:
            self.write_json(value)

    def write_states(self, states: Iterable[State]) -> None:
        """Write one state a line. ``restorable`` is whether some tier holds its bytes."""
        for each in states:
            self.write_json(each, restorable=each.status.is_restorable)

    def report(self, record: object, *lines: str) -> None:
        """Write a record: with ``--json`` as an object, else as these lines."""
        if self.as_json:
            self.write_json(record)
        else:
            self.write(*lines)


def is_terminal() -> bool:
    """Whether a person reads standard output."""
    forced = os.environ.get("FORCE_COLOR")
    return sys.stdout.isatty() if forced is None else forced != ""


# --- Main program: global options, errors, the end of a pipe ---


class Group(TyperGroup):
    """The group of commands.

    Every command that fails ends in the same way: with a message on standard error and a
    documented exit code."""

    def get_params(self, ctx: Any) -> list[Any]:
        return simplify(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command_of(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = get_close_matches(name, COMMANDS, n=1)
            hint = WORDS.get(name) or (f"did you mean `datastates {close[0]}`?" if close else "")
            ctx.fail(f"there is no command {name!r}: {hint or '`datastates --help` lists them'}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _leave_pipe()
            raise typer.Exit(0) from None
        except (DatastatesError, OSError) as error:
            raise typer.Exit(complain(error, ctx.ensure_object(Globals))) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


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
            metavar="FOLDER",
            help="Where the packs of a postgresql:// repository are (default: DATASTATES_PACKS).",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Checkpoints of trainings with their history: states, branches, tags, metrics."""
    context.obj = Globals(repo, packs, as_json)


def run() -> None:
    """Run the command line of this process; ends it with the command's exit code."""
    try:
        app()
    except SystemExit:
        try:  # write buffered output now, while a closed pipe is not an error yet
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_pipe()
        raise
    except Exception as error:
        # the one place where a command ends: an error that no user caused is shown with its trace
        sys.exit(complain(error, Globals(as_json="--json" in sys.argv[1:])))


def _leave_pipe() -> None:
    """End quietly when our reader has seen enough (``| head``): that is not a failure, and
    nothing may be written at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- Exit codes and reports of errors ---


def code_of(error: BaseException) -> int:
    return EXIT_CODES.get(error.kind, 1) if isinstance(error, DatastatesError) else 1


def complain(error: BaseException, options: Globals) -> int:
    """Report an error on standard error: one red message, or a JSON object. Returns the exit code.

    The traceback is optional."""
    if os.environ.get("DATASTATES_TRACEBACK"):
        traceback.print_exception(error)
    if options.as_json:
        import msgspec

        sys.stderr.write(msgspec.json.encode({"error": _describe(error)}).decode() + "\n")
        return code_of(error)
    if isinstance(error, DatastatesError):
        text = options.in_commands(str(error))
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = (
            f"unexpected {type(error).__name__}: {error}\nDATASTATES_TRACEBACK=1 shows where it"
            " comes from"
        )
    said = clean_lines(logs.text(f"error: {text}"))
    has_colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    sys.stderr.write((typer.style(said, fg="red") if has_colours else said) + "\n")
    return code_of(error)


def _describe(error: BaseException) -> dict[str, object]:
    described: dict[str, object] = {"kind": "error", "message": logs.text(str(error))}
    if isinstance(error, DatastatesError):
        described["kind"] = error.kind
    if isinstance(error, SyntaxProblem):
        described |= {"text": error.text, "column": error.column, "expected": list(error.expected)}
    if isinstance(error, Unavailable | Corrupt):
        described["nearest"] = error.nearest
    return described


# --- The user's function that ``MODULE:FUNCTION`` names ---


def function_of(said: str, purpose: str) -> Callable[..., Any]:
    """The function. Modules of the current folder are found too. ``purpose`` describes its result,
    such as ``gives a picture``.

    :raises InvalidInput: there is no such function.
    """
    module, _, name = said.partition(":")
    if not (module and name):
        raise InvalidInput(
            f"{said!r} names no function: write MODULE:FUNCTION, such as shop.data:check"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as exc:
        raise InvalidInput(
            f"{said!r} cannot be imported from here ({exc}): run the command in the folder of that"
            " module"
        ) from exc
    if not callable(found):
        raise InvalidInput(f"{module} has no function {name!r}: name one that {purpose}")
    function: Callable[..., Any] = found
    return function


# --- Completion of names: reads the lineage, needs no torch, and never reports errors ---


def ref_names(context: typer.Context, incomplete: str) -> list[str]:
    """Branches and tags that begin with this text; the last part of a range is completed too."""
    head, dots, last = incomplete.rpartition("..")
    return [f"{head}{dots}{name}" for name, _ in _refs(context) if name.startswith(last)]


def branch_names(context: typer.Context, incomplete: str) -> list[str]:
    return [
        name for name, kind in _refs(context) if kind == "branch" and name.startswith(incomplete)
    ]


def tag_names(context: typer.Context, incomplete: str) -> list[str]:
    return [name for name, kind in _refs(context) if kind == "tag" and name.startswith(incomplete)]


def field_names(context: typer.Context, incomplete: str) -> list[str]:
    """Metrics by their bare names, then settings and attributes, that begin with the last word of
    this text."""
    head, last = re.fullmatch(r"(.*[\s,(])?(.*)", incomplete, re.DOTALL).groups("")  # type: ignore[union-attr] # it matches every text
    return [head + name for name in _fields(context) if name.startswith(last)]


def metric_names(context: typer.Context, incomplete: str) -> list[str]:
    """Metrics that begin with this text."""
    return [
        name
        for name, kind in _fields(context).items()
        if kind == "metrics" and name.startswith(incomplete)
    ]


def group_names(context: typer.Context, incomplete: str) -> list[str]:
    """What ``branches --group`` takes."""
    names = (name for name, kind in _fields(context).items() if kind != "metrics")
    return [name for name in ("study", *names) if name.startswith(incomplete)]


def _fields(context: typer.Context) -> dict[str, str]:
    """The names of metrics, and the whole names of settings and attributes, with their kinds."""
    from datastates.lineage.query.fields import known_names

    named: dict[str, str] = {}
    for session in _completing(context):
        for name, key in known_names(session).items():
            kind = name.partition(".")[0]
            named[key if kind == "metrics" else name] = kind
    return named


def _refs(context: typer.Context) -> list[tuple[str, str]]:
    from datastates.lineage.query import names

    return [
        (ref.name, ref.kind.value)
        for session in _completing(context)
        for ref in names.refs(session)
    ]


def _completing(context: typer.Context) -> Iterator[Session]:
    """The lineage, open for the completion of a line; nothing if it cannot be read."""
    # while a line is completed no callback has run: the options are only in the parameters
    outer = context.find_root().params
    context.obj = Globals(repo=outer.get("repo"), packs=outer.get("packs"))
    with (
        suppress(DatastatesError, OSError),
        Shell(context, context.params.get("repo")).reading() as session,
    ):
        yield session


Rev = Annotated[
    str,
    typer.Argument(
        metavar="REV",
        help="A state: uid, name, main~3, main@best:val_loss, …",
        autocompletion=ref_names,
    ),
]
"""The argument of a command about one state."""
