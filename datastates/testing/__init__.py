"""Help for tests: suites for your own tiers and processors, and faults to test against.

    from datastates.testing import TierSuite

    class TestMyTier(TierSuite):
        @pytest.fixture
        def tier(self, tmp_path):
            return MyTier(tmp_path)

The suites need pytest, and are imported when they are first used. The faults need only
``datastates``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from .faults import (
    Fault,
    FaultyDatabase,
    FaultyDisk,
    FaultyTier,
    WrappedTier,
    crash_at,
    fail_at,
)

if TYPE_CHECKING:
    from .processors import ProcessorSuite
    from .tiers import TierSuite

__all__ = [
    "Fault",
    "FaultyDatabase",
    "FaultyDisk",
    "FaultyTier",
    "ProcessorSuite",
    "TierSuite",
    "WrappedTier",
    "crash_at",
    "fail_at",
]

_SUITES = {"ProcessorSuite": "processors", "TierSuite": "tiers"}
"""The modules that need pytest, by the suite that each defines."""


def __getattr__(name: str) -> object:
    """Import a suite when it is first used. Pytest then rewrites its assertions as in a test
    file."""
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_SUITES[name]}"
    if module not in sys.modules:
        import pytest

        pytest.register_assert_rewrite(module)
    globals()[name] = value = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
