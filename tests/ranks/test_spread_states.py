"""Spread models and optimizers of a real job of four ranks, as torch's own tests of state dicts
have them."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.spread_cases import CASES, SIZE
from tests.support.effort import part
from tests.support.jobs import run


def test_states_do_what_torch_asks_of_state_dicts(tmp_path: Path) -> None:
    names = part(CASES)
    assert (
        run(SIZE, "tests.ranks.spread_cases:ask", folder=str(tmp_path), names=names, timeout_s=170)
        == [names] * SIZE
    )
