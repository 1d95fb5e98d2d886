"""The table of what is exact where says what the tests declare."""

from __future__ import annotations

import pytest

from tests.integrations.cases import PAGE, Case, declared, in_page, read, table

MARKED = """
import pytest

@pytest.mark.exact("lightning", "killed", "shuffled")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=[pytest.mark.long, pytest.mark.exact("lightning", "workers-2")])])
def test_losses(workers): ...

@pytest.mark.inexact("transformers", "iterable", "it begins again")
def test_warning(): ...
"""


def test_the_page_has_what_the_tests_declare() -> None:
    page = PAGE.read_text()
    assert page == in_page(page, table(declared())), (
        "write it anew: python -m tests.integrations.cases"
    )


def test_markers_of_a_test_and_of_its_cases_are_read() -> None:
    assert {*read(MARKED, "tests/test_it.py")} == {
        Case("lightning", "killed", "tests/test_it.py::test_losses"),
        Case("lightning", "shuffled", "tests/test_it.py::test_losses"),
        Case("lightning", "workers-2", "tests/test_it.py::test_losses"),
        Case("transformers", "iterable", "tests/test_it.py::test_warning", "it begins again"),
    }


def test_a_cell_says_what_was_declared_of_it_and_nothing_else() -> None:
    made = table(read(MARKED, "tests/test_it.py")).splitlines()

    assert made[:2] == ["|  | Trainer | Lightning |", "| --- | --- | --- |"]
    assert "| Shuffled data, dropout |  | exact |" in made
    assert "| An `IterableDataset` | no, see below |  |" in made
    assert "- Trainer, an `IterableDataset`: it begins again." in made
    assert made[-2:] == [
        "- Trainer: `tests/test_it.py::test_warning`",
        "- Lightning: `tests/test_it.py::test_losses`",
    ]


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ('exact("lightening", "killed")', "lightening"),
        ('exact("lightning", "kiled")', "kiled"),
        ('exact("lightning")', "no aspect"),
        ('inexact("lightning", "it begins again")', "no aspect"),
        ('exact("lightning", WORKERS)', "literal"),
    ],
)
def test_a_marker_that_is_not_understood_is_refused_with_its_line(marker: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"tests/test_it\.py:1: .*{said}"):
        list(read(f"@pytest.mark.{marker}\ndef test_it(): ...", "tests/test_it.py"))


def test_a_marker_that_is_on_no_test_is_refused() -> None:
    with pytest.raises(ValueError, match="stands on a test"):
        list(
            read(
                'import pytest\nwanted = pytest.mark.exact("lightning", "killed")',
                "tests/test_it.py",
            )
        )
