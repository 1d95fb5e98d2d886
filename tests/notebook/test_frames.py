"""What ``log`` and ``find`` return: lists, and frames where pandas is installed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import datastates
from datastates.errors import Unsupported
from datastates.notebook import States, frame
from tests.notebook.test_html import capture, chain, state


def test_a_frame_has_a_row_a_state_and_columns_named_as_in_a_query() -> None:
    pytest.importorskip("pandas")
    states = States(
        [
            state(2, "f" * 24, attributes={"seed": 1}, config={"lr": 0.1}, message="two"),
            state(1, metrics={"acc": 0.5}, attributes={"note": "x"}),
        ]
    )

    made = states.frame()

    assert list(made.index) == [each.uid for each in states]
    assert made.index.name == "uid"
    assert list(made.columns) == [
        *("step", "created", "status", "message", "parent", "run", "bytes_total", "bytes_new"),
        *("metrics.acc", "metrics.loss", "attr.note", "attr.seed", "config.lr"),
    ]
    assert made["step"].tolist() == [2, 1]
    assert made["metrics.loss"].iloc[0] == pytest.approx(1 / 3)
    assert math.isnan(made["metrics.loss"].iloc[1]), "it has none"
    assert made["attr.seed"].tolist() == [1, None]
    assert made["config.lr"].tolist() == [0.1, None]
    assert made["parent"].iloc[0] == "f" * 24
    assert made["created"].iloc[0].to_pydatetime() == states[0].created_at
    assert str(made["created"].dtype) == "datetime64[us, UTC]"
    assert made["metrics.acc"].dtype == made["metrics.loss"].dtype == "float64"


def test_nan_and_infinity_stay_what_they_are() -> None:
    pytest.importorskip("pandas")
    made = frame(
        [state(1, metrics={"loss": float("nan")}), state(2, metrics={"loss": float("inf")})]
    )

    assert math.isnan(made["metrics.loss"].iloc[0])
    assert made["metrics.loss"].iloc[1] == math.inf


def test_no_states_make_an_empty_frame_with_its_columns() -> None:
    pytest.importorskip("pandas")
    made = States().frame()

    assert len(made) == 0
    assert str(made["created"].dtype) == "datetime64[us, UTC]"
    assert made["step"].dtype == "int64"


def test_ten_thousand_states_make_a_frame_quickly() -> None:
    pytest.importorskip("pandas")
    states = States(chain(10_000))
    states[:1].frame()  # the import

    began = time.perf_counter()
    made = states.frame()

    assert time.perf_counter() - began < 20
    assert made["metrics.loss"].min() == pytest.approx(1e-4)


def test_a_repository_gives_frames_of_what_it_finds(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with datastates.open(tmp_path) as repo:
        first = capture(repo, "main", None, 1, metrics={"loss": 0.5})
        second = capture(repo, "main", first, 2, metrics={"loss": float("nan")})

        assert repo.log().frame().index.tolist() == [second, first]
        assert repo.find("metrics.loss < 1").frame()["step"].tolist() == [1]
        assert (
            repo.ancestors(second).frame().index.tolist()
            == repo.descendants(first).frame()["parent"].tolist()
            == [first]
        )


def test_lists_stay_lists() -> None:
    states = States(chain(3))

    assert states == chain(3)
    assert isinstance(states, list)
    assert states[0] == chain(3)[0]
    assert isinstance(states[:2], States)
    assert len(states[:2]) == 2
    assert type(states + states) is list
    assert json.loads(msgspec.json.encode(states))[0]["step"] == 2
    assert repr(states) == repr(chain(3))


def test_without_pandas_the_list_works_and_the_frame_says_what_to_install() -> None:
    code = """
import sys
sys.modules["pandas"] = None
from datastates.notebook import States
from tests.notebook.test_html import chain
states = States(chain(2))
print(len(states), "<table>" in states._repr_html_())
try:
    states.frame()
except Exception as error:
    print(type(error).__name__, error)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (
        done.stdout
        == "2 True\nUnsupported a frame needs pandas, which is not installed: pip install pandas\n"
    ), done.stderr
    assert issubclass(Unsupported, datastates.DatastatesError)
