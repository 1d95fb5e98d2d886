"""Whoever waits on the main thread waits by a bell: Ctrl-C in the middle leaves no lock taken
that the other side needs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from datastates.transport import loop
from tests.transport.clones.peers.pairs import Made, Training, train


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield Made(tmp_path, stack)


@pytest.fixture
def no_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``Condition`` is waited for here, nor an ``Event`` or a ``Future``, which are made of
    one; but for the start of a thread."""
    wait, start = threading.Condition.wait, threading.Thread.start.__code__

    def refuse(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            assert sys._getframe(2).f_code is start, "the main thread waits for a Condition"
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", refuse)


@pytest.mark.usefixtures("no_condition")
def test_the_transport_is_waited_for_by_a_bell() -> None:
    loop.run(asyncio.sleep(0.01))
    with pytest.raises(TimeoutError):
        loop.run(asyncio.sleep(60), 0.01)


@pytest.mark.usefixtures("no_condition")
@pytest.mark.parametrize("url", ["memory://", "http://127.0.0.1:0"])
def test_a_server_begins_and_ends_by_a_bell(made: Made, url: str) -> None:
    made.repo().serve(url).close()


@pytest.mark.usefixtures("no_condition")
def test_a_transfer_is_waited_for_by_a_bell(made: Made) -> None:
    source = made.repo()
    train(source, Training(0))
    peer = made.peer(source.serve("memory://"))
    there = Training(1)
    transfer = peer.begin_clone("main", model=there.model)
    assert transfer.wait(60).state.uid == source.state("main").uid
    peer.begin_clone("main", model=there.model).close()
