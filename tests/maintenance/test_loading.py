"""Ranks that restore together restore one state."""

from __future__ import annotations

from pathlib import Path

import torch

import datastates
from datastates.errors import InvalidInput
from datastates.maintenance.loading import restore
from tests.support.thread_ranks import ThreadGroup, on_threads


def test_ranks_whose_repositories_have_other_states_restore_nothing(tmp_path: Path) -> None:
    tracked = {"x": torch.zeros(1000)}
    with (
        datastates.open(tmp_path, memory_bytes=64 << 20) as repo,
        repo.track(tracked=tracked, rng=False) as run,
    ):
        states = [run.capture().wait("durable")]
        tracked["x"] += 1
        states.append(run.capture().wait("durable"))
        into = [{"tracked": {"x": torch.full((1000,), -1.0)}} for _ in states]

        def restored(group: ThreadGroup) -> object:
            return restore(
                repo.core, states[group.rank], into[group.rank], only=None, strict=True, group=group
            )

        for refused in on_threads(2, restored)[0]:
            assert isinstance(refused, InvalidInput)
            assert f"and rank 1 state {states[1].uid}" in str(refused)
        assert all(bool((each["tracked"]["x"] == -1).all()) for each in into)
