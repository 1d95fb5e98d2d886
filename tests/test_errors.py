"""The tree of errors is what its docstring draws, and says what a handler needs."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest

from datastates import errors
from datastates.errors import DatastatesError, InvalidInput, SyntaxProblem, Torn, Unavailable

TREE = re.compile(r"^    ([│ ]*)[├└]── (\w+)", re.MULTILINE)


def subclasses(root: type[DatastatesError]) -> list[type[DatastatesError]]:
    return [each for child in root.__subclasses__() for each in (child, *subclasses(child))]


def test_docstring_draws_the_tree_that_is() -> None:
    drawn, path = {}, ["DatastatesError"]
    for match in TREE.finditer(errors.__doc__ or ""):
        depth = len(match[1]) // 4 + 1
        path[depth:] = [match[2]]
        drawn[match[2]] = path[depth - 1]

    assert drawn == {
        each.__name__: each.__bases__[0].__name__ for each in subclasses(DatastatesError)
    }


def test_all_is_the_tree() -> None:
    assert errors.__all__ == sorted(
        {"DatastatesError", *(each.__name__ for each in subclasses(DatastatesError))}
    )


def test_kinds_are_distinct_and_stable() -> None:
    tree: list[type[DatastatesError]] = [DatastatesError, *subclasses(DatastatesError)]
    kinds = {each.__name__: each.kind for each in tree}

    assert kinds == {
        "Ambiguous": "ambiguous",
        "Cancelled": "cancelled",
        "Closed": "closed",
        "Conflict": "conflict",
        "Corrupt": "corrupt",
        "DatastatesError": "error",
        "Dirty": "dirty",
        "Disconnected": "disconnected",
        "InvalidInput": "invalid-input",
        "ProcessorFailed": "processor-failed",
        "NotFound": "not-found",
        "OverBudget": "over-budget",
        "PeerFault": "peer-fault",
        "SyntaxProblem": "syntax",
        "Torn": "torn",
        "Unauthorized": "unauthorized",
        "Unavailable": "unavailable",
        "Unsupported": "unsupported",
    }


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        ("InvalidInput", ValueError),
        ("NotFound", LookupError),
        ("Closed", RuntimeError),
        ("Disconnected", ConnectionError),
    ],
)
def test_handlers_of_builtin_errors_catch_ours(error: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, error), builtin)


def test_syntax_problem_puts_a_caret_below_the_column() -> None:
    problem = SyntaxProblem("unexpected '!'", text="step ! 3", column=6, expected=("'='", "'<'"))

    assert str(problem).splitlines() == [
        "unexpected '!' at column 6",
        "  step ! 3",
        "       ^",
        "expected '=', '<'",
    ]
    assert (problem.text, problem.column, problem.expected) == ("step ! 3", 6, ("'='", "'<'"))
    assert isinstance(problem, InvalidInput)


def test_details_travel_with_the_error() -> None:
    assert Torn("torn", paths=("model/a",)).paths == ("model/a",)
    assert Torn("torn").paths == ()
    assert Unavailable("gone", nearest="ab12").nearest == "ab12"
    assert Unavailable("gone").nearest is None
    assert Unavailable("gone", is_gone=True).is_gone


@pytest.mark.parametrize(
    "again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy]
)
@pytest.mark.parametrize(
    "error",
    [
        SyntaxProblem("unexpected '!'", text="step ! 3", column=6, expected=("'='", "'<'")),
        Torn("torn", paths=("model/a",)),
        Unavailable("gone", nearest="ab12", is_gone=True, trouble="disk"),
        *(kind("said") for kind in subclasses(DatastatesError) if kind is not SyntaxProblem),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_crosses_processes_whole(
    error: DatastatesError, again: Callable[[DatastatesError], DatastatesError]
) -> None:
    found = again(error)
    assert (type(found), str(found), found.args, vars(found)) == (
        type(error),
        str(error),
        error.args,
        vars(error),
    )
