"""Which transport a url gets."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from datastates.errors import Disconnected, InvalidInput, Unavailable, Unsupported
from datastates.transport import loop, tcp
from datastates.transport.handshake import offer
from datastates.transport.in_process import MemoryTransport
from datastates.transport.registry import transport_for
from datastates.transport.ucx import UcxTransport


def test_a_scheme_has_one_transport_in_a_process() -> None:
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(lambda number: transport_for(f"memory://{number}"), range(100)))
    assert len(made) == 1
    assert isinstance(made.pop(), MemoryTransport)


def test_a_scheme_may_be_written_in_any_case() -> None:
    assert transport_for("TCP://host:4711") is transport_for("tcp://host:4711")


@pytest.mark.parametrize("url", ["http://host:1", "host:4711", "", "://"])
def test_an_unknown_scheme_is_refused_with_those_that_there_are(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"tcp://… or ucx://… or memory://…"):
        transport_for(url)


@pytest.mark.parametrize(
    "url", ["tcp://[::1:4711", "tcp://h:port", "tcp://h:99999", "tcp://h", "ucx://[::1:4711"]
)
def test_a_url_without_a_host_and_a_port_is_refused_by_whoever_dials_or_listens(url: str) -> None:
    transport_for(url)
    for begin in (tcp.dial(url, timeout_s=1), tcp.listen(url, lambda channel: asyncio.sleep(0))):
        with pytest.raises(InvalidInput, match=re.escape(repr(url))):
            loop.run(begin)


@pytest.mark.parametrize("url", ["tcp://\0:1", "tcp://a b:1", f"tcp://{'a' * 300}:1"])
def test_a_name_that_no_host_can_have_reaches_nobody(url: str) -> None:
    with pytest.raises(Disconnected, match="cannot be reached"):
        loop.run(tcp.dial(url, timeout_s=30))
    with pytest.raises(Unavailable, match="cannot be listened on"):
        loop.run(tcp.listen(url, lambda channel: asyncio.sleep(0)))


@pytest.fixture
def no_ucxx(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "ucxx" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)


@pytest.mark.usefixtures("no_ucxx")
def test_without_ucxx_our_own_plane_serves_and_the_error_says_what_to_install() -> None:
    planes = transport_for("ucx://127.0.0.1:0").planes
    assert offer(planes, "ucx", "auto") == (("tcp",), "")
    with pytest.raises(Unsupported, match=r"pip install 'datastates\[cu13\]'"):
        offer(planes, "ucx", "ucx")


@pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="UCXX is not installed: pip install 'datastates[cu13]'",
)
def test_a_ucx_that_cannot_be_loaded_is_unavailable_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ucxx.py").write_text("raise OSError('libucp.so.0 of another time')\n")
    monkeypatch.syspath_prepend(tmp_path)  # where the process that runs UCX looks, too
    with pytest.raises(Unavailable, match=r"does not start \(libucp.so.0 of another time\)"):
        loop.run(UcxTransport().address(), timeout_s=60)
