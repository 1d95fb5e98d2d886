"""The commands ``diff``, ``blame``, ``bisect`` and ``cadence``."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from datastates.errors import InvalidInput, Unavailable
from datastates.lineage.query import revision
from datastates.lineage.views import comparison
from datastates.lineage.views.text import short, step_text, time_text
from datastates.policy.contract import read_duration, read_percent, span

from .app import AsJson, Only, Repo, Rev, Shell, branch_names, function_of, ref_names
from .move import progress
from .tables import (
    Column,
    TextTable,
    facts_table,
    state_text,
    stored_text,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from datastates.compare.blame import Bisection, Blame, Judge, Verdict
    from datastates.compare.diff import Diff, TensorChange
    from datastates.lineage import State
    from datastates.lineage.views.comparison import Comparison, ComparisonRow
    from datastates.policy.text import Advice
    from datastates.repository import Repository

_KINDS = (("config", "config."), ("metrics", "metrics."), ("attributes", "attr."), ("code", ""))
STAT = (
    "no payload was read: 'unread' tensors lie in chunks that differ, and may have changed; without"
    " --stat they are compared"
)
_MOST_MODULES = 20
_SKIP = 125
_NOT_RUN = (126, 127)


def diff(
    context: typer.Context,
    revs: Annotated[
        list[str],
        typer.Argument(
            metavar="REV",
            help="One state to compare with main, two states, or up to 32 side by side.",
            autocompletion=ref_names,
        ),
    ],
    only: Only = None,
    config: Annotated[
        bool, typer.Option("--config", help="Compare only the configurations.")
    ] = False,
    stat: Annotated[
        bool,
        typer.Option(
            "--stat", help="Read no payload: tensors that may have changed count as 'unread'."
        ),
    ] = False,
    tensors: Annotated[
        bool,
        typer.Option("--tensors", "-t", help="Show each tensor, those that changed most first."),
    ] = False,
    rng: Annotated[bool, typer.Option("--rng", help="Show random generators, too.")] = False,
    show_same: Annotated[
        bool, typer.Option("--all", "-a", help="Also show what is the same.")
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Compare states: configuration, metrics, code, and the tensors of each module.

    Three states or more become columns of a table. No payload is read for them."""
    shell = Shell(context, repo, as_json)
    revs = [*revs, "main"] if len(revs) == 1 else revs
    comparison.check_count(len(revs))
    if len(revs) > 2 or config:
        return _diff_many(shell, revs, is_config=config, show_same=show_same)
    with shell.repository() as repository, progress(shell, "comparing") as show:
        found = repository.diff(*revs, only=only or None, stat=stat, on_progress=show)
    if shell.as_json:
        return shell.write_json(found)
    if not rng:
        found = _without_generators(found)
    shell.write(*_heading(found), _summary(found))
    compared = [] if stat else list(found.tensors)
    if tensors:
        compared.sort(key=lambda tensor: -(tensor.relative or 0.0))
        shown = [each for each in compared if show_same or each.change != "same"]
        shell.write(*([_tensors_table(shown)] if shown else []))
    elif any(each.change != "same" for each in compared):
        shell.write("", _modules_table(compared, show_same=show_same))
        shell.hint("--tensors shows each tensor, --only 'model/*' some of them")
    for remark in [*([STAT] if stat and not found.lacking else []), *_instead(found)]:
        shell.hint(remark)
    return None


# --- ``diff`` of configurations, or of three states or more: a table with a column for each ---


def _diff_many(shell: Shell, revs: list[str], *, is_config: bool, show_same: bool) -> None:
    with shell.reading() as session:
        found = comparison.compare(session, revs, [revision.resolve(session, rev) for rev in revs])
    if is_config:
        found = replace(found, metrics=(), attributes=(), code=())
    if shell.as_json:
        return shell.write_json(found)
    shell.write(_table_compare(found, show_same=show_same))
    same = sum(not row.differs for kind, _ in _KINDS for row in getattr(found, kind))
    if same and not show_same:
        shell.hint(f"{same} more are the same in all of them: --all shows them, too")
    return None


def _table_compare(found: Comparison, *, show_same: bool) -> TextTable:
    """A table with a column for each state; the best value of each metric is green."""
    table = TextTable(
        [
            Column("", is_flexible=True),
            *(Column(each.rev, is_number=True, is_flexible=True) for each in found.states),
        ]
    )
    table.add("state", *(Text(short(each.state.uid), "yellow") for each in found.states))
    table.add("step", *(step_text(each.state) for each in found.states))
    if any(each.branch != each.rev for each in found.states):
        table.add("branch", *(each.branch or "" for each in found.states))
    for kind, prefix in _KINDS:
        for row in getattr(found, kind):
            if row.differs or show_same:
                table.add(prefix + row.key, *_cells(row))
    table.add("bytes", *(stored_text(each.state) for each in found.states))
    table.add("stored", *(", ".join(each.places) for each in found.states))
    if any(not each.state.status.is_restorable for each in found.states):
        table.add(
            "restorable",
            *(
                "nothing" if each.nearest is None else short(each.nearest.uid)
                for each in found.states
            ),
        )
    return table


def _cells(row: ComparisonRow) -> list[Text]:
    best = _best(row)
    return [
        Text(_value(value, "-"), "green" if best is not None and value == best else "")
        for value in row.values
    ]


def _best(row: ComparisonRow) -> float | None:
    numbers: Sequence[float] = [
        value for value in row.values if isinstance(value, int | float) and math.isfinite(value)
    ]
    if row.direction is None or not row.differs or len(numbers) < 2:
        return None
    return min(numbers) if row.direction == "min" else max(numbers)


def _value(value: object, missing: str) -> str:
    text = missing if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- ``diff`` of two states: a summary, then the modules or the tensors ---


def _without_generators(found: Diff) -> Diff:
    """The diff without the states of random generators, which differ after each step."""

    def is_shown(path: str) -> bool:
        return "rng" not in path.split("/") and not path.endswith("/prints")

    return replace(
        found,
        tensors=tuple(each for each in found.tensors if is_shown(each.path)),
        values={path: pair for path, pair in found.values.items() if is_shown(path)},
    )


def _instead(found: Diff) -> list[str]:
    """The bytes that are lacking, and the command that compares the states that can be had
    instead."""
    if not found.lacking:
        return []
    nearest = {lacking.state: lacking.nearest for lacking in found.lacking}
    sides = [nearest.get(state.uid, state) for state in (found.old, found.new)]
    remarks = [f"tensors could not be compared: {lacking.why}" for lacking in found.lacking]
    if sides[0] is not None and sides[1] is not None and sides[0].uid != sides[1].uid:
        remarks.append(
            f"the nearest that can be: `datastates diff {short(sides[0].uid)}"
            f" {short(sides[1].uid)}`"
        )
    return remarks


def _heading(found: Diff) -> list[RenderableType]:
    base = (
        "they have no common ancestor"
        if found.base is None
        else f"their nearest common ancestor is {short(found.base.uid)}"
    )
    if found.base is not None and found.base.uid in {found.old.uid, found.new.uid}:
        steps = found.new.step - found.old.step
        base = f"{abs(steps)} step{'' if abs(steps) == 1 else 's'} {'on' if steps >= 0 else 'back'}"
    return [state_text(found.old), state_text(found.new), base]


def _change(old: object, new: object) -> str:
    return f"{_value(old, 'nothing')} -> {_value(new, 'nothing')}"


def _tensors_table(tensors: list[TensorChange]) -> RenderableType:
    made = table("tensor", "shape", "norm", "change / norm", "cosine", "largest change", "changed")
    for tensor in tensors:
        if tensor.distance is None:
            was = (
                ""
                if tensor.old_shape is None
                else f", was {tensor.old_dtype} {_shape(tensor.old_shape)}"
            )
            made.add_row(tensor.path, _shape(tensor.shape), f"{tensor.change}{was}")
            continue
        recast = "" if tensor.old_dtype is None else f" {tensor.old_dtype} -> {tensor.dtype}"
        made.add_row(
            tensor.path,
            _shape(tensor.shape) + recast,
            _number(tensor.norm),
            _number(tensor.relative),
            "" if tensor.cosine is None else f"{tensor.cosine:.6f}",
            "" if not tensor.largest else f"{_number(tensor.largest)} at {_shape(tensor.at or ())}",
            f"{100 * (tensor.fraction or 0.0):.3g} %",
        )
    return made


def _summary(found: Diff) -> RenderableType:
    """How many tensors changed, and everything that is not a tensor."""
    counts = [
        f"{found.count(change)} {change}"
        for change in dict.fromkeys(tensor.change for tensor in found.tensors)
    ]
    facts: list[tuple[str, object]] = [
        ("tensors", "not compared" if found.lacking else ", ".join(counts) or "none")
    ]
    # the configuration comes first, because it explains the other changes
    for name in ("config", "metrics", "values", "attributes", "versions"):
        word = name if name == "config" else name.removesuffix("s")
        facts += [(word, f"{key}: {_change(*each)}") for key, each in getattr(found, name).items()]
    if found.code is not None:
        facts.append(("code", _change(*found.code)))
    return facts_table(facts)


def _modules_table(tensors: Sequence[TensorChange], *, show_same: bool) -> TextTable:
    """A row for each module, or for groups of modules if there are many."""
    paths = [_module_of(tensor.path) for tensor in tensors]
    depth = max(map(len, paths))
    while depth > 1 and len({path[:depth] for path in paths}) > _MOST_MODULES:
        depth -= 1
    modules: dict[tuple[str, ...], list[TensorChange]] = {}
    for path, tensor in zip(paths, tensors, strict=True):
        modules.setdefault(path[:depth], []).append(tensor)
    made = TextTable(
        [
            Column("module", is_flexible=True),
            *(Column(name, is_number=True) for name in ("tensors", "changed")),
            *(Column(name, is_number=True) for name in ("norm", "change / norm")),
            Column("largest change", is_number=True, rank=1),
        ]
    )
    for parts, own in modules.items():
        changed = [tensor for tensor in own if tensor.change != "same"]
        measured = [tensor for tensor in changed if tensor.distance is not None]
        if changed or show_same:
            old = math.hypot(*(tensor.old_norm or 0.0 for tensor in measured))
            moved = math.hypot(*(tensor.distance or 0.0 for tensor in measured))
            made.add(
                f"{parts[0]}/{'.'.join(parts[1:])}".rstrip("/"),
                str(len(own)),
                str(len(changed)),
                _number(math.hypot(*(tensor.norm or 0.0 for tensor in measured))),
                _number(moved / old if old else None),
                _number(max((tensor.largest or 0.0 for tensor in measured), default=None)),
            )
    return made


def _module_of(path: str) -> tuple[str, ...]:
    """The tracked object and the module of a tensor, as parts. A tensor in the state of an
    optimizer belongs to the module of its parameter."""
    name, *rest = path.split("/")
    inner = rest[1:2] if rest[:1] == ["state"] else rest
    return name, *[part for each in inner for part in each.split(".")][:-1]


def _shape(sizes: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# --- ``blame``: the state that last changed each tensor ---


def blame(
    context: typer.Context,
    rev: Rev = "main",
    only: Only = None,
    size: Annotated[
        bool,
        typer.Option(
            "--size", help="Also by how much, relative to the old norm: reads both versions."
        ),
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show which state last changed each tensor, along first parents.

    It compares digests, and reads bytes only where small tensors share a changed chunk. If the
    bytes of states are gone, it shows between which states a tensor changed.
    """
    shell = Shell(context, repo, as_json)
    with (
        shell.repository() as repository,
        progress(shell, "states", is_of_bytes=False) as show,
    ):
        found = repository.blame(rev, only=only or None, size=size, on_progress=show)
    if shell.as_json:
        from datastates.compare.blame import to_plain

        shell.write_lines(to_plain(each) for each in found)
        return
    made = table("tensor", "shape", "last changed", *(["change / norm"] if size else []), "how")
    for each in found:
        how = f"{each.change}{', by a merge or from its other parents' * each.is_merged}"
        much = [_number(each.relative)] if size else []
        made.add_row(each.path, _shape(each.shape), _when(each), *much, how)
    shell.write(made)
    if any(each.earliest is not None for each in found):
        shell.hint("the bytes of the states in between are gone, or are not here")


def _when(found: Blame) -> str:
    last = f"step {found.state.step}, {found.state.uid[:10]}"
    earliest = found.earliest
    return (
        last
        if earliest is None
        else f"at or after step {earliest.step}, {earliest.uid[:10]}; at or before {last}"
    )


# --- ``bisect``: the first bad state ---


def bisect(
    context: typer.Context,
    good: Annotated[
        str, typer.Argument(metavar="GOOD", help="A state that is good.", autocompletion=ref_names)
    ],
    bad: Annotated[
        str,
        typer.Argument(
            metavar="BAD", help="A descendant of it that is bad.", autocompletion=ref_names
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="CONDITION",
            help="A state is bad where this holds: 'loss > 5'. Nothing is restored.",
            show_default=False,
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="COMMAND",
            help=(
                "A state is bad where it ends with 1 to 124; 0: good, 125: skip. {path}: a folder"
                " of its safetensors, {uid}: its uid."
            ),
            show_default=False,
        ),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="MODULE:FUNCTION",
            help=(
                "A state is bad where this returns True; it takes what repo.load returns. None"
                " skips."
            ),
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            help="Restore only these objects for it: model. May be repeated.",
            show_default=False,
        ),
    ] = None,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Forget what an earlier bisection of this question found."),
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Find the first bad state between two, by restoring about log2 of their number.

    Give the same command again to resume an interrupted bisection. States whose bytes are gone are
    not tried: the answer may then be a range.
    """
    shell = Shell(context, repo, as_json)
    asked = [
        (kind, said)
        for kind, said in (("metric", metric), ("run", command), ("python", function))
        if said is not None
    ]
    if len(asked) != 1:
        raise InvalidInput(
            "what is bad is said by one of --metric 'loss > 5', --run COMMAND and --python"
            " MODULE:FUNCTION: give one of them"
        )
    ((kind, said),) = asked
    with shell.repository() as repository:
        from datastates.compare.blame import bisect_by, judge_of

        if kind == "metric":
            found = repository.bisect(good, bad, said)
            return _say_bisect(shell, found, said)
        if kind == "run":
            judge = _command_judge(repository, said, only)
        else:
            judge = judge_of(
                repository.core, function_of(said, "says whether a state is bad"), only
            )
        one, other = repository.state(good), repository.state(bad)
        by = f"{kind} {said} {' '.join(only or ())}".strip()
        notes = _notes_of(repository, f"{one.uid} {other.uid} {by}")
        if reset and notes is not None:
            notes.unlink(missing_ok=True)
        try:
            found = bisect_by(
                repository.core, one, other, _telling(shell, judge), by=by, verdicts=notes
            )
        except KeyboardInterrupt:
            if notes is not None:
                shell.hint("the same command resumes the search; --reset starts again")
            raise
    return _say_bisect(shell, found, said)


def _notes_of(repository: Repository, question: str) -> Path | None:
    """The file that keeps the verdicts of a question, in the repository's folder; None if
    nothing may be written."""
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
    from datastates.compare.blame import Verdict
    from datastates.files.checkpoints import export, plan_export

    def judge(state: State) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="datastates-bisect-") as folder:
            if "{path}" in command:
                try:
                    tree = repository.load(state, only=only or None)
                    export(plan_export(tree, state, Path(folder)))
                except Unavailable:
                    return Verdict.SKIPPED
            filled = command.replace("{uid}", state.uid).replace("{path}", shlex.quote(folder))
            code = subprocess.run(
                ["/bin/sh", "-c", filled], check=False, stdin=subprocess.DEVNULL, stdout=2
            ).returncode
        if code in _NOT_RUN or not 0 <= code < 128:
            how = (
                "could not be run"
                if code in _NOT_RUN
                else "was ended by a signal or with a code of 128 or more"
            )
            raise InvalidInput(
                f"{filled!r} {how} (exit code {code}), which says nothing of state {state.uid}:"
                " mend the command, and go on"
            )
        return Verdict.GOOD if code == 0 else Verdict.SKIPPED if code == _SKIP else Verdict.BAD

    return judge


def _say_bisect(shell: Shell, found: Bisection, question: str) -> None:
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
    if found.first is not None:
        shell.write(state_text(found.first))
        shell.write(
            f"is the first bad one by {question!r}; step {found.good.step}, {found.good.uid[:10]}"
            " before it is good"
        )
    else:
        for state in found.candidates:
            shell.write(state_text(state))
        shell.write(
            f"one of these {len(found.candidates)} is the first bad one by {question!r}: those"
            " before the last could not be judged"
        )
    shell.hint(f"states tried: {found.restores}")


# --- ``cadence``: how often states of a branch should become durable, by the measured costs ---


def cadence(
    context: typer.Context,
    branch: Annotated[
        str | None,
        typer.Argument(
            metavar="BRANCH",
            help="Its trainings (default: whatever was trained last).",
            autocompletion=branch_names,
        ),
    ] = None,
    mtbf: Annotated[
        str | None,
        typer.Option(
            "--mtbf",
            metavar="TIME",
            help="The time between failures of a process: 90m, 6h, 2d (default: as observed here).",
        ),
    ] = None,
    node_mtbf: Annotated[
        str,
        typer.Option(
            "--node-mtbf",
            metavar="TIME",
            help="The time between losses of a node with its disk, for two levels.",
        ),
    ] = "30d",
    overhead: Annotated[
        str,
        typer.Option(
            "--overhead", metavar="SHARE", help="The share of the time that CheckFreq may take."
        ),
    ] = "3.5%",
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show how often states became durable, at which cost, and what cadences would choose."""
    from datastates.policy.computed import CheckFreq, TwoLevel
    from datastates.policy.text import advise

    shell = Shell(context, repo, as_json)
    asked = TwoLevel(None if mtbf is None else read_duration(mtbf), read_duration(node_mtbf))
    share = CheckFreq(read_percent(overhead)).overhead
    with shell.reading() as session:
        found = advise(
            session, branch, mtbf_s=asked.mtbf_s, node_mtbf_s=asked.node_mtbf_s, overhead=share
        )
    if shell.as_json:
        shell.write_json(found)
        return
    shell.write(*_facts(found))
    if found.alternatives:
        made = TextTable(
            [
                Column("cadence"),
                Column("a state every", is_number=True),
                Column("waste", is_number=True),
                Column("why", is_flexible=True),
            ]
        )
        for each in found.alternatives:
            waste = f"{100 * each.waste:.3g}%"
            made.add(each.choice.cadence, span(each.interval_s), waste, each.choice.why)
        shell.write("", made)
        shell.hint(
            "waste is what writes and failures are expected to cost; say one of these as"
            ' track(cadence="…") or DATASTATES_CADENCE'
        )
    else:
        shell.hint(
            "no training here has measured what writing costs: a cadence is learnt from three"
            " writes of a training with this version"
        )


def _facts(found: Advice) -> Iterator[str]:
    if found.run is not None and found.started_at is not None:
        yield (
            f"branch {found.branch or '-'}, training {short(found.run)} of"
            f" {time_text(found.started_at)}"
        )
    if found.chosen is not None:
        yield f"it went by {found.chosen.cadence}: {found.chosen.why}"
    costs = found.costs
    if costs is not None:
        yield (
            f"a capture came every {span(costs.interval_s)} and held the training for"
            f" {span(costs.held_s)}; a write took {span(costs.write_s)} and delayed by"
            f" {span(costs.overhead_s)} ({costs.captures} captures, {costs.writes} writes)"
        )
    seen = found.failures
    why = "as given" if found.is_given else "with one in 24 h added"
    died = f"{seen.died} of {seen.processes} processes died in {span(seen.ran_s)}"
    yield f"{died}: reckoned with is a failure every {span(found.mtbf_s)}, {why}"
