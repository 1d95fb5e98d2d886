"""A repository whose end is interrupted anywhere, also inside Python's own waiting and joining,
is ended by whoever comes next."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import datastates
from datastates import Config
from datastates.maintenance import backup, core, keeper
from datastates.system import threads
from tests.support.interrupting import NEVER, Interruption, codes_of

STRIDE = 7
PATIENCE_S = 60.0
"""Far less than retention's own patience at the end is here."""

WAITING = [
    each
    for place in (threading.Event, threading.Condition)
    for each in vars(place).values()
    if callable(each)
]
CODES = codes_of(threads, core, backup, keeper, *WAITING)


class Torn(BaseException):
    """What a handler raises."""


def torn() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _raises() -> Iterator[None]:
    """SIGUSR1 raises in the main thread, wherever it is not left undisturbed."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Torn

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


def ended(folder: Path, interruption: Interruption) -> Callable[[], None]:
    """A training that was captured once, and whose end began and may have been broken off; what
    ends it for good."""
    repo = datastates.open(folder, config=Config(memory_bytes=64 << 20, retention="latest:1"))
    run = repo.track(model=nn.Linear(2, 2))
    run.capture().wait("durable", timeout_s=60)
    held = repo.core.engage()
    try:
        with interruption.here():
            held.shut_down()
    except Torn:
        pass
    return held.end_unowned


def test_an_end_that_was_interrupted_anywhere_is_ended_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(keeper, "_PATIENCE_S", 10 * PATIENCE_S)
    counted = Interruption(CODES, NEVER, torn)
    ended(tmp_path / "counted", counted)()
    assert counted.steps > 20

    for at in range(0, counted.steps, STRIDE):
        interruption = Interruption(CODES, at, torn)
        finish = ended(tmp_path / str(at), interruption)
        other = threading.Thread(target=finish, daemon=True)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive(), f"interrupted at {interruption.place}, the end never comes"
