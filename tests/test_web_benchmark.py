"""The benchmark of the web runs whole on a small repository, and every route answers what it is
asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import warm

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "web.py"
ROUTES = {
    "graph window",
    "search, rare filter",
    "search, sorted",
    "newest states",
    "state",
    "series",
    "stats",
    "refs",
}
FLOORS = {"floor: bare Starlette", "floor: /healthz"}


@pytest.mark.long
def test_a_small_run_measures_every_route_alone_beside_captures_and_without_thinking(
    tmp_path: Path,
) -> None:
    sizes = (
        "--states",
        "2000",
        "--readers",
        "2",
        "--think",
        "0.02",
        "--seconds",
        "0.15",
        "--rounds",
        "1",
        "--captures",
        "1",
    )
    command = [
        sys.executable,
        str(BENCHMARK),
        *sizes,
        "--no-page",
        "--folder",
        str(tmp_path),
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["2000"]
    assert set(found) == {"alone", "beside captures", "saturated"}
    for phase, routes in found.items():
        assert {name for name in routes if not name.startswith("MLflow")} == ROUTES | FLOORS
        for name, measured in routes.items():
            assert measured["answers"] > 0, (phase, name)
            assert measured["refused"] == 0, (phase, name)
            assert 0 < measured["p50_ms"] <= measured["p99_ms"], (phase, name)
    assert "2,000 states, 10,000 metrics" in done.stdout
    assert not list(tmp_path.glob("datastates-web-*")), "the copy that captures went to is gone"
