"""How often a rank looks at what refs name: the first as often as it is asked to, the others the more seldom the more they are."""

from __future__ import annotations

from pathlib import Path

import torch

import datastates
from datastates.capture.named import Named
from datastates.capture.runner import Runner


def test_of_many_ranks_only_the_first_looks_whenever_it_is_asked_to(tmp_path: Path) -> None:
    with datastates.open(tmp_path, memory_bytes=32 << 20) as repo, repo.track(x=torch.ones(3), rng=False) as run:
        state = run.capture().wait()
        host = repo.core.host()
        assert isinstance(host, Runner)
        ranks = {(0, 10_000): True, (1, 2): True, (1, 10_000): False}
        looking = {rank: Named(repo.core.database, host._register.journal) for rank in ranks}
        for (rank, size), named in looking.items():
            named.join(rank, size)
            assert named.look() is not None, "what nobody has seen is looked at"
        repo.tag("kept", state)
        host._changed.wait_for(lambda: False, 0.05)
        for place, sees in ranks.items():
            assert (looking[place].look() is not None) is sees
            found = looking[place].look(is_forced=True)
            assert found is not None
            assert found.tagged == {state.uid}
