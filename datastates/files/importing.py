"""A folder of checkpoint files as a branch of states, in the order of their steps; and states as
such files again.

Imported states have the attributes ``import.file`` and ``import.format``. ``import.wrapped`` is the
name under which the tensors of a file without other names are stored. An import that was
interrupted continues with the next file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Literal, Protocol

from datastates import values
from datastates.collective import SoloGroup
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.lineage.states import Ref, Revision, State
from datastates.maintenance.core import Opened, core_of

from .checkpoints import (
    TAKEN,
    WRAPPED,
    Format,
    format_of,
    read,
    unwrapped,
    words_about,
    wrapped,
    write,
)

__all__ = ["Exported", "Imported", "Source", "export_files", "find_files", "import_files"]

FILE = "import.file"
FORMAT = "import.format"
_STEP = "{step}"
_ENDINGS = {
    Format.TORCH: ".pt",
    Format.SAFETENSORS: ".safetensors",
    Format.HUGGING_FACE: "",
    Format.DCP: "",
}


class _Repository(Opened, Protocol):
    """A repository, as far as this module needs it."""

    def refs(self) -> list[Ref]:
        """Every branch and tag."""

    def state(self, rev: str | State) -> State:
        """The state that a revision names."""

    def log(self, rev: str | State | None = "main") -> Sequence[State]:
        """A state and its ancestors, newest first."""

    def load(self, rev: str | State) -> Any:
        """A state's containers."""

    def track(
        self,
        *,
        branch: str,
        objects: Mapping[str, object],
        rng: Literal[False],
        strict: bool,
        group: SoloGroup,
    ) -> Any:
        """Follow a branch."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file or a folder that is a checkpoint, by its name within its folder."""

    name: str
    path: Path
    step: int
    format: Format


@dataclass(frozen=True, slots=True)
class Imported:
    """``states`` are the states of this import, oldest first. ``known`` are files of an earlier
    import. ``waiting`` are files that a dry run leaves. ``refused`` has the reason by name for each
    file that was left out.
    """

    branch: str
    states: tuple[State, ...]
    known: tuple[Source, ...]
    waiting: tuple[Source, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Exported:
    """A state, and the file or folder to which it was written."""

    state: State
    path: Path


def find_files(
    folder: str | os.PathLike[str], pattern: str, refused: dict[str, str] | None = None
) -> list[Source]:
    """The checkpoints of a folder by their steps. ``{step}`` in the pattern matches digits, ``*``
    matches anything within a name.

    :param refused: takes by name what is no checkpoint, and why. Without it, that is an error.
    :raises InvalidInput: the pattern does not show where the step is, two files have the same step,
        or one is no checkpoint.
    :raises NotFound: nothing matches.
    """
    sources = []
    for step, (name, path) in sorted(_matching(folder, pattern).items()):
        try:
            sources.append(Source(name, path, step, format_of(path, Path(folder))))
        except InvalidInput as exc:
            if refused is None:
                raise
            refused[name] = str(exc)
    return sources


def _matching(folder: str | os.PathLike[str], pattern: str) -> dict[int, tuple[str, Path]]:
    """The name and the path of each thing that is called like the pattern, by its step."""
    root, pattern = Path(values.path(folder, "folder")), values.string(pattern, "pattern")
    if pattern.count(_STEP) != 1 or pattern.startswith("/") or ".." in pattern.split("/"):
        raise InvalidInput(
            f"the pattern {pattern!r} is to name files within the folder, with {{step}} once: such"
            " as 'step_{step}.pt'"
        )
    if f"*{_STEP}" in pattern or f"{_STEP}*" in pattern:
        raise InvalidInput(
            f"the pattern {pattern!r} leaves open which digits are the step: give what separates *"
            " and {step}, as in '*_{step}.pt'"
        )
    if not root.is_dir():
        raise NotFound(f"{root} is no folder: name the one that the checkpoints are in")
    shape = re.compile(
        re.escape(pattern).replace(re.escape(_STEP), r"(\d{1,18})").replace(r"\*", "[^/]*")
    )
    found: dict[int, tuple[str, Path]] = {}
    for path in root.glob("*".join(map(escape, re.split(r"\*+", pattern.replace(_STEP, "*"))))):
        name = path.relative_to(root).as_posix()
        match = shape.fullmatch(name)
        if match is None:
            continue
        step = int(match[1])
        if step in found:
            raise InvalidInput(
                f"{found[step][0]} and {name} are both of step {step}: give a pattern that fits one"
                " of them"
            )
        found[step] = name, path
    if not found:
        raise NotFound(
            f"nothing in {root} is called like {pattern!r}: see what is there, and give another"
            " pattern"
        )
    return found


@values.checked
def import_files(
    repository: _Repository,
    folder: str | os.PathLike[str],
    pattern: str,
    *,
    branch: values.Text = "imported",
    skip_bad: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Make each checkpoint of a folder a durable state of a branch, in the order of their steps.

    Files are never unpickled freely (``weights_only``). The same call continues an interrupted
    import, and takes files that were added since.

    :param folder: the folder of the checkpoints.
    :param pattern: their names, with ``{step}`` for the step: ``step_{step}.pt``,
        ``checkpoint-{step}``.
    :param branch: a new branch, or the branch of an earlier import.
    :param skip_bad: leave out files that are refused, instead of ending at the first.
    :param dry_run: read nothing, and only list the files.
    :param on_progress: called with how many files are done, and how many there are.
    :raises InvalidInput: a file is damaged, or its format is not known; names it.
    :raises Unsupported: reading a file would execute code from it; names the file.
    :raises Conflict: the branch is not of an import, or a file is of a step that the branch has
        passed.
    """
    core_of(repository, "repository")
    refused: dict[str, str] = {}
    sources = find_files(folder, pattern, refused if skip_bad else None)
    head, known = _known(repository, branch)
    waiting = [source for source in sources if source.name not in known]
    if (
        late := [source.name for source in waiting if head is not None and source.step <= head]
    ) and not skip_bad:
        raise Conflict(
            f"{late[0]} is not beyond step {head}, where branch {branch} stands: import it to"
            " another branch"
        )
    done = [source for source in sources if source.name in known]
    if dry_run:
        return Imported(branch, (), tuple(done), tuple(waiting), refused)
    made: list[State] = []
    refused |= dict.fromkeys(late, f"is not beyond step {head}")
    with _Line(repository, branch) as line:
        for number, source in enumerate(waiting, 1):
            if source.name not in refused:
                try:
                    made.append(line.add(source))
                except InvalidInput as exc:
                    if not skip_bad:
                        raise
                    refused[source.name] = str(exc)
            if on_progress is not None:
                on_progress(number, len(waiting))
    return Imported(branch, tuple(made), tuple(done), (), refused)


def _known(repository: _Repository, branch: str) -> tuple[int | None, set[str]]:
    """The step at which a branch stands, and the files from which it was imported."""
    if all(ref.name != branch for ref in repository.refs()):
        return None, set()
    states = repository.log(branch)
    if FILE not in states[0].attributes:
        raise Conflict(
            f"branch {branch} is there, and its newest state was not imported: name another one"
        )
    return states[0].step, {
        str(state.attributes[FILE]) for state in states if FILE in state.attributes
    }


class _Part:
    """One part of a checkpoint, tracked as it is; what a resumed branch would restore into it is
    ignored."""

    value: object = None

    def state_dict(self) -> object:
        return self.value

    def load_state_dict(self, state: object) -> None:
        """Do nothing: the next file replaces the part."""


class _Line:
    """The branch that is made, with one tracker for as long as the files have the same parts."""

    def __init__(self, repository: _Repository, branch: str) -> None:
        self._repository, self._branch = repository, branch
        self._parts: dict[str, _Part] = {}
        self._run: Any = None

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._run is not None:
            self._run.close()

    def add(self, source: Source) -> State:
        tree, under = wrapped(read(source.path), TAKEN)
        if self._run is None or tree.keys() != self._parts.keys():
            if self._run is not None:
                self._run.close()
            self._run, self._parts = None, {name: _Part() for name in tree}
        for name, value in tree.items():
            self._parts[name].value = value
        if self._run is None:
            self._run = self._repository.track(
                branch=self._branch, objects=self._parts, rng=False, strict=False, group=SoloGroup()
            )
        about = {FILE: source.name, FORMAT: str(source.format)} | (
            {} if under is None else {WRAPPED: under}
        )
        try:
            state: State = self._run.capture(step=source.step, attributes=about).wait("durable")
        except InvalidInput as exc:
            raise InvalidInput(f"{source.path} holds what no state can: {exc}") from exc
        return state


# Out


@values.checked
def export_files(
    repository: _Repository,
    revs: Sequence[Revision],
    folder: values.FilePath,
    *,
    format: Format | str = Format.TORCH,
    pattern: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Exported]:
    """Write each state to a separate file or folder in the format of other tools. Imported states
    keep their original layout.

    :param revs: the states.
    :param folder: the folder for the files.
    :param format: ``torch`` (``torch.save``), ``safetensors`` (only tensors, one file), ``hf`` or
        ``dcp`` (a folder each).
    :param pattern: their names, with ``{step}`` or ``{uid}``. None means ``step_{step}`` and the
        ending of the format.
    :param on_progress: called with how many states are written, and how many there are.
    :raises Conflict: a file exists already.
    :raises InvalidInput: two states would have the same name, or one holds what the format cannot.
    :raises Unavailable: the bytes of a state are gone; names the nearest ancestor that has them.
    """
    core_of(repository, "repository")
    kind, root = Format(format), Path(folder)
    name = f"step_{_STEP}{_ENDINGS[kind]}" if pattern is None else pattern
    states = [repository.state(rev) for rev in revs]
    places: dict[Path, State] = {}
    for state in states:
        path = root / name.replace(_STEP, str(state.step)).replace("{uid}", state.uid)
        if path in places:
            raise InvalidInput(
                f"{places[path].uid} and {state.uid} would both be {path.name}: give a pattern with"
                " {uid}"
            )
        if path.exists():
            raise Conflict(f"{path} is there already: name another folder, or remove it")
        places[path] = state
    for number, (path, state) in enumerate(places.items(), 1):
        tree = repository.load(state)
        write(
            tree if kind is Format.HUGGING_FACE else unwrapped(tree, state.attributes),
            kind,
            path,
            words_about(state),
        )
        if on_progress is not None:
            on_progress(number, len(places))
    return [Exported(state, path) for path, state in places.items()]
