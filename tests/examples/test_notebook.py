"""The notebook runs from its first cell to its last, with each cell run twice in a row, as
people run cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import datastates

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of Jupyter


def texts(cell: Any) -> Iterator[str]:
    """What a cell printed and showed, as text; not what it logged."""
    for output in cell.outputs:
        if output.get("name") != "stderr":
            yield (
                output["text"]
                if output["output_type"] == "stream"
                else output["data"]["text/plain"]
            )


def test_every_cell_can_be_run_again(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = {
        cell["id"]: (index, cell)
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
    }
    client = nbclient.NotebookClient(
        notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}}
    )
    said: dict[str, list[str]] = {}
    with client.setup_kernel():
        for name, (index, cell) in cells.items():
            for _ in range(2):
                client.execute_cell(cell, index)
                said.setdefault(name, []).append("".join(texts(cell)))

    assert said["train"] == ["step 24 after 3 epochs\n"] * 2
    for name in ("overview", "log", "find", "curves", "diff", "back"):
        first, second = said[name]
        assert first == second != "", name
    assert all(
        "text/html" in cells[name][1].outputs[0]["data"] for name in ("overview", "log", "find")
    )
    with datastates.open(tmp_path / "runs") as repo:
        assert {ref.name: repo.state(ref.state).step for ref in repo.refs()} == {
            "main": 24,
            "low": 32,
            "high": 32,
        }
        assert len(repo.find("step >= 0")) == 24 + 2 * 16, "nothing was trained twice"


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [
        cell["id"]
        for cell in notebook.cells
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count)
    ] == []
