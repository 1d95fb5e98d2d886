"""An arena, and what copies into it, for tests of plans and of what they lay out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from datastates.engine import copy
from datastates.engine.copy import Stager
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena


@pytest.fixture(scope="module", autouse=True)
def deferred() -> Iterator[None]:
    """Copies of small states are deferred too, which keeps these tests fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "SMALL_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    made = Arena(16 * CHUNK_BYTES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stager(arena: Arena) -> Iterator[Stager]:
    made = Stager(arena)
    yield made
    made.close()
