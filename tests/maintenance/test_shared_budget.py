"""States that share packs lose their bytes one by one, and the folder stays within its bound."""

from __future__ import annotations

from pathlib import Path

import torch

import datastates
from datastates import Config, Status


def train(folder: Path, steps: int, **config: object) -> datastates.Repository:
    repo = datastates.open(folder, config=Config(durable_every=1, **config))  # type: ignore[arg-type]
    weight = torch.zeros(2000)
    run = repo.track(weight=weight, rng=False)
    for step in range(steps):
        weight.normal_()
        run.capture(metrics={"score": float(step)})
    repo.core.drain()
    return repo


def size(repo: datastates.Repository) -> int:
    return sum(path.stat().st_size for path in repo.location.packs.glob("*.*.*"))


def test_pruning_half_of_the_states_of_shared_packs_frees_their_bytes(tmp_path: Path) -> None:
    with train(tmp_path, 200) as repo:
        before, durable = (
            size(repo),
            [state.uid for state in repo.log("main", limit=None) if state.status is Status.DURABLE],
        )
        assert len(durable) == 200
        assert len(list(repo.location.packs.glob("*.safetensors"))) < 60
        planned = repo.prune("latest:20", dry_run=True)
        report = repo.prune("latest:20")
        assert len(report.dropped) == len(planned.dropped) >= 170
        assert size(repo) < before // 4
        for uid in durable[:20]:
            repo.load(uid)
        assert repo.verify().damage == ()


def test_a_training_of_small_states_stays_within_its_bound(tmp_path: Path) -> None:
    with train(tmp_path, 600, retention="all at-most:1M") as repo:
        repo.core.drain()
    with datastates.open(tmp_path) as repo:
        assert size(repo) <= 1 << 20
        kept = [state for state in repo.log("main", limit=None) if state.status is Status.DURABLE]
        assert 60 < len(kept) < 130
        assert repo.verify().damage == ()
