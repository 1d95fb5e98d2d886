"""Where to serve, and the repositories of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.transport.clones.peers.pairs import Made


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["memory://", "ucx://127.0.0.1:0"])
def url(request: pytest.FixtureRequest) -> str:
    """Where to serve."""
    if request.param.startswith("ucx"):
        pytest.importorskip("ucxx", reason="UCXX is not installed: pip install ucxx-cu13")
    return str(request.param)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    with ExitStack() as stack:
        yield Made(tmp_path, stack)
