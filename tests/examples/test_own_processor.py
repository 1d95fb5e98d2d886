"""The processors that the guide and the example show pass the suite that they tell others to pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_processor
import pytest

import datastates
from datastates import Processor
from datastates.testing import ProcessorSuite
from tests.examples.test_examples import run
from tests.test_documents import ROOT, blocks


def lines_of_the_guide() -> type[Any]:
    """The class ``Lines``, as the guide shows it."""
    shown, _, _ = blocks(ROOT / "docs" / "guide" / "processors.md")[0].partition("\nconfig = ")
    names: dict[str, Any] = {"datastates": datastates}
    exec(shown, names)  # it is what is tested
    found: type[Any] = names["Lines"]
    return found


class TestLines(ProcessorSuite):
    """A line of JSON for every state."""

    @pytest.fixture
    def processor(self, tmp_path: Path) -> Processor:
        made: Processor = lines_of_the_guide()(tmp_path / "states.jsonl")
        return made


class TestFiniteCheck(ProcessorSuite):
    """Raises for what is not finite."""

    @pytest.fixture
    def processor(self) -> Processor:
        return own_processor.FiniteCheck()


def test_example_finds_the_state_that_is_not_finite(tmp_path: Path) -> None:
    first, second = run("own_processor.py", cwd=tmp_path).splitlines()
    assert first == "step 1: finite"
    assert second.startswith("step 2: processor 'finite-check' failed on state ")
    assert "weight is not finite" in second
