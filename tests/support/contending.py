"""A training that shares its repository with others: its own branch, and refs that all of them
fight for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import datastates
from datastates import Config, Conflict, Repository, Tracker
from datastates.engine.outbox import Outbox
from tests.support.training import make, update

Say = Callable[..., object]

MOVE_EVERY, RACE_EVERY = 10, 50


def train(url: str, packs: str | None, name: str, captures: int, begin: str, say: Say) -> None:
    """Say ``ready``, wait until the file ``begin`` is gone, capture so many times, then say what
    was done as JSON."""
    torch.manual_seed(sum(name.encode()))
    took = _time_records()
    model, optimizer = make()
    config = Config(memory_bytes=48 << 20, durable_interval_s=1.0)
    with (
        datastates.open(url, packs=packs, config=config) as repo,
        repo.track(branch=name, model=model, optimizer=optimizer) as run,
    ):
        say("ready")
        while Path(begin).exists():
            time.sleep(0.005)
        states: dict[str, float] = {}
        moves: list[str] = []
        won: list[str] = []
        for number in range(captures):
            loss = update(model, optimizer)
            states[run.capture(metrics={"loss": loss}).uid] = loss
            if number % MOVE_EVERY == MOVE_EVERY - 1:
                moves.append(_move_shared(repo, run))
            if number % RACE_EVERY == RACE_EVERY - 1:
                won += _race(repo, run, f"race-{number}")
        weight = {key: value.tolist() for key, value in model.state_dict().items()}
    say(json.dumps({"states": states, "moves": moves, "won": won, "took": took, "weight": weight}))


def tag(url: str, name: str, uid: str, say: Say) -> None:
    """Tag a state that is in another process's memory."""
    with datastates.open(url) as repo:
        say(repo.tag(name, uid).state)


def _move_shared(repo: Repository, run: Tracker) -> str:
    """Bring the branch of all here, from wherever it stands."""
    head = run.head
    while True:
        try:
            if "shared" not in {ref.name for ref in repo.refs()}:
                repo.branch("shared", head)
            else:
                repo.move("shared", head, expected="shared")
        except Conflict:
            continue
        assert head is not None
        return head.uid


def _race(repo: Repository, run: Tracker, tag: str) -> list[str]:
    try:
        repo.tag(tag, run.head)
    except Conflict:
        return []
    return [tag]


def _time_records() -> list[float]:
    """The seconds of every transaction that records a capture of this process, from here on."""
    took: list[float] = []
    record = Outbox.record

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return record(*arguments)
        finally:
            took.append(time.perf_counter() - began)

    # a method cannot be assigned in front of mypy
    setattr(Outbox, "record", timed)  # noqa: B010
    return took
