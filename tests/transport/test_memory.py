"""The transport within one process keeps the contract."""

from __future__ import annotations

import pytest

from datastates.transport.contract import Transport
from datastates.transport.memory import MemoryTransport

from .suite import TransportSuite


class TestMemory(TransportSuite):
    @pytest.fixture
    def transport(self) -> Transport:
        return MemoryTransport()

    @pytest.fixture
    def url(self) -> str:
        return "memory://"
