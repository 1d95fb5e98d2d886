"""Pages of the site that are not in docs/: README and similar files, and references of every public
name and every command.

A hook of mkdocs (see mkdocs.yml). ``pages`` is what it adds, by its place in the site.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
"""Documents in the top folder, and their pages in the site."""

PACKAGES = {
    "datastates": (
        "reference/datastates.md",
        "What a training script uses, as `import datastates`.",
    ),
    "datastates.errors": (
        "reference/errors.md",
        "Every error is a `DatastatesError` and has a stable `kind`.",
    ),
    "datastates.studies": (
        "reference/workflows.md",
        "Studies: plans of variants, and what runs and reads them.",
    ),
    "datastates.api": ("reference/api.md", "The web server."),
    "datastates.storage": ("reference/store.md", "What a tier of your own is made of."),
    "datastates.ranks": ("reference/ranks.md", "Several processes, one training."),
    "datastates.testing": ("reference/testing.md", "Help for tests of your own."),
}
"""Packages whose ``__all__`` is public: the page of each, and what it is for."""


def on_config(config: Any) -> Any:
    """Add every design note and every report of a run on a GPU to the site's list of pages, in
    its last section."""
    (section,) = config.nav[-1].values()
    section += [f"gpu/{path.name}" for path in sorted((ROOT / "docs" / "gpu").glob("*.md"))]
    section += [f"design/{path.name}" for path in sorted((ROOT / "docs" / "design").glob("*.md"))]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to what mkdocs found in docs/."""
    from mkdocs.structure.files import File

    for place, text in pages():
        files.append(File.generated(config, place, content=text))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """Each generated page: its place in the site, and its Markdown."""
    for document, place in DOCUMENTS.items():
        yield place, relinked((ROOT / document).read_text())
    yield "reference/index.md", index()
    for package, (place, purpose) in PACKAGES.items():
        yield place, reference(package, purpose)
    yield "reference/terminal.md", terminal()


def relinked(text: str) -> str:
    """A document of the top of the tree with its links as they are in the site; a link to what
    the site has not becomes plain text."""

    def link(match: re.Match[str]) -> str:
        name, target = match["name"], match["target"]
        if "://" in target or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        place = DOCUMENTS.get(
            path, path.removeprefix("docs/") if path.startswith("docs/") else None
        )
        if place is None:
            return f"{name} (`{path}`)" if path not in name else name
        return f"{match['mark']}[{name}]({place}{'#' + anchor if anchor else ''})"

    return re.sub(r"(?P<mark>!?)\[(?P<name>[^\]]*)\]\((?P<target>[^)\s]+)\)", link, text)


def names(package: str) -> list[str]:
    """The public names of a package, as it lists them."""
    return list(importlib.import_module(package).__all__)


def identifier(package: str, name: str) -> str:
    """The identifier of a public name in the site: the name, or the place of its definition if a
    folder of the package has the same name."""
    module = importlib.import_module(package)
    value = getattr(module, name)
    is_hidden = (
        hasattr(module, "__path__")
        and importlib.util.find_spec(f"{package}.{name}") is not None
        and not isinstance(value, ModuleType)
    )
    return f"{value.__module__}.{value.__qualname__}" if is_hidden else f"{package}.{name}"


def index() -> str:
    """Every public name, with a link to its description."""
    lines = ["# Every public name", ""]
    for package, (place, purpose) in PACKAGES.items():
        lines += [f"## `{package}`", "", purpose, ""]
        lines += [
            f"- [`{name}`]({place.removeprefix('reference/')}#{identifier(package, name)})"
            for name in names(package)
        ]
        lines.append("")
    return "\n".join(lines)


def reference(package: str, purpose: str) -> str:
    """The page of a package: the docstring of each public name."""
    listed = (f"::: {identifier(package, name)}" for name in names(package))
    return "\n\n".join([f"# `{package}`", purpose, *listed]) + "\n"


def terminal() -> str:
    """Every command with its arguments and options, from its own help."""
    from typer.main import get_command

    from datastates.cli.app import EXAMPLES, app, command_of

    group: Any = get_command(app)
    above = group.make_context("datastates", [], resilient_parsing=True)
    parts = [
        "# Commands",
        (
            "What `datastates COMMAND --help` says. [The terminal](../guide/terminal.md) has all"
            " commands in one table, and the exit codes."
        ),
    ]
    for name in sorted(EXAMPLES):
        command = command_of(name)
        context = command.context_class(command, info_name=name, parent=above)
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        parts += [
            f"## `datastates {name}`",
            f"    datastates {usage}",
            _plain(command.help or ""),
            "For example:",
            f"    {EXAMPLES[name]}",
            _table(command.params),
        ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _plain(text: str) -> str:
    return text.replace("``", "`").replace("\f", "").strip()


def _table(parameters: Iterable[Any]) -> str:
    rows = []
    for each in parameters:
        said = getattr(each, "help", None)
        if not said or getattr(each, "hidden", False):
            continue
        is_argument = each.param_type_name == "argument"
        called = (
            (each.metavar or each.name.upper())
            if is_argument
            else ", ".join([*each.opts, *each.secondary_opts])
        )
        rows.append(f"| `{called}` | {_plain(said).replace('|', chr(92) + '|')} |")
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
