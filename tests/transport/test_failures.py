"""Errors that cross a wire are on the other side what they were here, with all that their
classes promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from datastates.errors import (
    Corrupt,
    DatastatesError,
    Disconnected,
    SyntaxProblem,
    Torn,
    Unavailable,
)
from datastates.system.failures import describe, revive


def kinds(cls: type[DatastatesError] = DatastatesError) -> Iterator[type[DatastatesError]]:
    yield cls
    for each in cls.__subclasses__():
        yield from kinds(each)


@pytest.mark.parametrize(
    "error",
    [
        Corrupt("damaged", nearest="ab12"),
        Unavailable("gone", nearest="ab12", is_gone=True),
        Disconnected("no answer"),
        SyntaxProblem("unexpected '!'", text="step ! 3", column=6, expected=("'='", "'<'")),
        *(kind("said") for kind in dict.fromkeys(kinds()) if kind is not SyntaxProblem),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_with_its_kind_and_its_details(error: DatastatesError) -> None:
    found = revive(describe(error))
    assert (type(found), str(found)) == (type(error), str(error))
    for name in ("nearest", "is_gone", "text", "column", "expected"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_the_tensors_that_were_torn_elsewhere_are_not_named_here() -> None:
    found = revive(describe(Torn("torn", paths=("model/a",))))
    assert isinstance(found, Torn)
    assert found.paths == ()
