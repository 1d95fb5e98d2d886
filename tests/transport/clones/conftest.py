"""Processes for the tests of clones, and a check that none of them leaves anything in this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from datastates.state import in_place
from datastates.transport import fetch, same_host
from tests.support.forge import Forge, forge
from tests.transport.clones.processes import AT_ONCE_S, Served, Start, eventually, own_threads


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    """Starts processes quickly."""
    torch.set_num_threads(1)
    with forge(tmp_path_factory.mktemp("forge"), ["tests.transport.clones.processes"]) as opened:
        yield opened


@pytest.fixture
def start(smith: Forge, tmp_path: Path) -> Iterator[Start]:
    """Starts processes that serve, which end with the test."""
    with ExitStack() as stack:

        def begin(name: str = "source", **arguments: Any) -> Served:
            return stack.enter_context(Served(smith, tmp_path / name, **arguments))

        yield begin


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most four chunks are requested together, and eight are under way."""
    monkeypatch.setattr(fetch, "CHUNKS", 4)


@pytest.fixture(params=["wire"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How chunks come into this process: over the transport, or read from the memory of a near
    one where a test says so."""
    monkeypatch.setenv(same_host.SWITCH, "1" if request.param == "near" else "0")
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_is_dirty() -> Iterator[None]:
    """What other tests of this process left half written is not what a test is about."""
    in_place._marked.clear()
    yield
    in_place._marked.clear()


@pytest.fixture(autouse=True)
def nothing_stays(way: str) -> Iterator[None]:
    """No thread of a clone and no file is left in this process by a test."""
    before = own_threads()
    yield
    eventually(lambda: own_threads() == before, AT_ONCE_S)
