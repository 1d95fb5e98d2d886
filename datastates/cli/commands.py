"""The commands, in the order in which help lists them: the module that defines each, and its heading.

A command's module is imported when the command runs, is completed or is listed by ``--help``, so that no command pays for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from .examples import EXAMPLES

__all__ = ["COMMANDS", "LazyCommands", "simplify"]

COMMANDS = {
    "branches": ("Look", "overview"),
    "best": ("Look", "overview"),
    "watch": ("Look", "overview"),
    "runs": ("Look", "overview"),
    "stats": ("Look", "overview"),
    "incomplete": ("Look", "incomplete"),
    "du": ("Look", "room"),
    "cadence": ("Look", "cadence"),
    "log": ("Look", "history"),
    "show": ("Look", "history"),
    "find": ("Look", "history"),
    "compare": ("Look", "compare"),
    "diff": ("Look", "diff"),
    "blame": ("Look", "blame"),
    "bisect": ("Look", "bisect"),
    "config": ("Look", "configured"),
    "refs": ("Look", "refs"),
    "reflog": ("Look", "refs"),
    "tag": ("Name", "refs"),
    "branch": ("Name", "refs"),
    "rm": ("Name", "refs"),
    "note": ("Name", "notes"),
    "annotate": ("Name", "notes"),
    "restore": ("Move states", "payload"),
    "export": ("Move states", "bundle"),
    "import": ("Move states", "bundle"),
    "clone": ("Move states", "clone"),
    "serve": ("Serve", "serve"),
    "token": ("Serve", "token"),
    "init": ("Set up and check", "setup"),
    "verify": ("Set up and check", "upkeep"),
    "repair": ("Set up and check", "upkeep"),
    "gc": ("Set up and check", "upkeep"),
    "reindex": ("Set up and check", "upkeep"),
    "prune": ("Set up and check", "room"),
    "doctor": ("Set up and check", "doctor"),
    "demo": ("Set up and check", "setup"),
}
"""The heading and the module of each command; the module's ``register`` adds it to a ``typer.Typer``."""


class Command(TyperCommand):
    """A command whose parameters cost no more than necessary."""

    def get_params(self, ctx: Any) -> list[Any]:
        return simplify(super().get_params(ctx))


class LazyCommands(MutableMapping[str, Any]):
    """The commands by name; each is made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError(f"{name} is not in the table of commands: add it there")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name} stays")


def _make(name: str) -> Any:
    heading, module = COMMANDS[name]
    app = typer.Typer(add_completion=False)
    import_module(f".{module}", __package__).register(app)
    app.registered_commands = [one for one in app.registered_commands if name == (one.name or getattr(one.callback, "__name__", None))]
    (info,) = app.registered_commands
    info.rich_help_panel, info.cls, info.epilog = heading, Command, f"Example: {EXAMPLES[name]}"
    return typer.main.get_command(app)


def simplify(parameters: list[Any]) -> list[Any]:
    """Show flags without a type, and take values as they are if nothing has to be converted.

    Typer converts with pydantic, whose import takes a third of the time that ``datastates log`` needs to begin.
    """
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if not isinstance(parameter.process_value, _Unconverted) and parameter.nargs == 1 and not getattr(parameter, "multiple", False):
            parameter.process_value = _Unconverted(parameter)
    return parameters


class _Unconverted:
    """The conversion for a parameter: a missing value, a default, and a text where a text is wanted stay as they are."""

    def __init__(self, parameter: Any) -> None:
        self._convert, self._parameter = parameter.process_value, parameter
        self._is_text = getattr(getattr(parameter, "type_descriptor", None), "annotation", None) is str

    def __call__(self, context: Any, value: Any) -> Any:
        of = self._parameter
        is_missing = value is None and not of.required
        is_default = value is not None and value is of.default and type(value) in (int, float, str)
        if not (is_missing or is_default or (self._is_text and type(value) is str)):
            return self._convert(context, value)
        return value if of.callback is None else of.callback(context, of, value)
