"""What is exact where, as the tests declare it; the table of ``docs/frameworks/index.md`` is made
of it.

A test that shows that something is exact (each loss of the training that was interrupted equals
that of the one that was not, as ``float.hex``) carries a marker that names the framework and what
was tried:

    @pytest.mark.exact("accelerate", "killed", "shuffled", "accumulation")
    def test_killed_training_repeats_every_loss(...): ...

    @pytest.mark.parametrize("workers", [
        pytest.param(0, marks=pytest.mark.exact("lightning", "workers-0")),
        pytest.param(2, marks=pytest.mark.exact("lightning", "workers-2")),
    ])
    def test_...

What cannot be exact, and is said when training begins, is declared by the test that sees it said:

    @pytest.mark.inexact("transformers", "iterable", "an `IterableDataset` without a place begins
    again: its batches are read and dropped") def test_...

The words are literals; those that there are stand in ``FRAMEWORKS`` and ``ASPECTS``, and a new one
is a line there (its row appears with the first test that names it). A test takes a few lines of
these wherever it lies under ``tests/``; nothing is imported to read them. Then

    python -m tests.integrations.cases

writes the page anew, and ``test_cases.py`` fails until that was done. After a conflict in the page,
take either side and write it again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks" / "index.md"
BEGIN, END = "<!-- made by tests/integrations/cases.py -->", "<!-- until here -->"

FRAMEWORKS = {
    "loop": "Your own loop",
    "accelerate": "Accelerate",
    "transformers": "Trainer",
    "lightning": "Lightning",
    "dcp": "DCP",
    "ray": "Ray",
    "keras": "Keras",
    "files": "`save` and `load`",
}
"""The columns, by the word that a marker says."""

ASPECTS = {
    "killed": "Killed by `SIGKILL` at any step, started again",
    "shuffled": "Shuffled data, dropout",
    "workers-0": "A loader without workers",
    "workers-2": "A loader with two workers",
    "stateful": "A `StatefulDataLoader`",
    "iterable": "An `IterableDataset`",
    "accumulation": "Gradient accumulation",
    "mixed-precision": "Mixed precision",
    "fp16": "fp16 with a `GradScaler` (on a CPU)",
    "scheduler": "Learning-rate schedules",
    "validation": "Validation in between",
    "fork": "A fork continues exactly as its parent",
    "best": "The best state, loaded at the end",
    "peft": "Adapters of PEFT",
    "moved": "Restored in another process",
    "ranks": "Several ranks",
}
"""The rows, by the word that a marker says."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one test declares of one aspect of a framework.

    ``limit`` says what is not exact; None: it is."""

    framework: str
    aspect: str
    test: str
    limit: str | None = None


def declared(folder: Path = ROOT / "tests") -> list[Case]:
    """What all tests declare, in the order of the files."""
    return [
        case
        for path in sorted(folder.rglob("test_*.py"))
        for case in read(path.read_text(), str(path.relative_to(folder.parent)))
    ]


def read(source: str, path: str) -> Iterator[Case]:
    """What the tests of a file declare.

    :raises ValueError: a marker that is not read: not on a test, or not in words that there are.
    """
    if "mark.exact(" not in source and "mark.inexact(" not in source:
        return
    tree = ast.parse(source)
    owners = {
        id(call): node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
        for call in ast.walk(decorator)
    }
    for call in ast.walk(tree):
        match call:
            case ast.Call(
                func=ast.Attribute(
                    attr="exact" | "inexact" as kind, value=ast.Attribute(attr="mark")
                ),
                args=args,
            ):
                where = f"{path}:{call.lineno}"
                words = [_word(arg, where) for arg in args]
                if id(call) not in owners:
                    raise ValueError(
                        f"{where}: a marker of a case stands on a test, or in its parametrize"
                    )
                yield from _cases(kind, words, f"{path}::{owners[id(call)]}", where)


def _word(node: ast.expr, where: str) -> str:
    match node:
        case ast.Constant(value=str(word)):
            return word
    raise ValueError(f"{where}: the words of a case are literal texts: nothing is run to read them")


def _cases(kind: str, words: list[str], test: str, where: str) -> Iterator[Case]:
    framework, *aspects = words
    limit = aspects.pop() if kind == "inexact" else None
    unknown = [word for word in [framework] if word not in FRAMEWORKS] + [
        word for word in aspects if word not in ASPECTS
    ]
    if unknown or not aspects:
        raise ValueError(
            f"{where}: {unknown or 'no aspect'}: see FRAMEWORKS and ASPECTS in"
            " tests/integrations/cases.py"
        )
    for aspect in aspects:
        yield Case(framework, aspect, test, limit)


def table(cases: Iterable[Case]) -> str:
    """The table in Markdown, what is not exact, and the tests behind it."""
    known: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        known.setdefault((case.framework, case.aspect), []).append(case)
    columns = [word for word in FRAMEWORKS if any(framework == word for framework, _ in known)]
    rows = [word for word in ASPECTS if any(aspect == word for _, aspect in known)]
    head = ["", *(FRAMEWORKS[word] for word in columns)]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [
        _line([ASPECTS[row], *(_cell(known.get((column, row), [])) for column in columns)])
        for row in rows
    ]
    limits = [
        f"- {FRAMEWORKS[column]}, {_lower(ASPECTS[row])}: {limit.rstrip('.')}."
        for column in columns
        for row in rows
        for limit in dict.fromkeys(
            case.limit for case in known.get((column, row), []) if case.limit
        )
    ]
    tests = []
    for column in columns:
        named = dict.fromkeys(
            case.test
            for (framework, _), found in known.items()
            if framework == column
            for case in found
        )
        tests += [f"- {FRAMEWORKS[column]}: `{test}`" for test in sorted(named)]
    parts = [
        "\n".join(lines),
        *(
            ["A message names these limits when training begins:", "\n".join(limits)]
            if limits
            else []
        ),
    ]
    return "\n\n".join([*parts, "The tests behind the table:", "\n".join(tests)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cases: list[Case]) -> str:
    """One word: what holds, whatever more was tried."""
    if not cases:
        return ""
    is_limited = [case.limit is not None for case in cases]
    return (
        "no, see below"
        if all(is_limited)
        else "exact, but see below"
        if any(is_limited)
        else "exact"
    )


def _lower(title: str) -> str:
    return title if title[1:2].isupper() else title[0].lower() + title[1:]


def in_page(page: str, made: str) -> str:
    """The page with the table that was made in the place of the one that it has."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(in_page(PAGE.read_text(), table(declared())))
