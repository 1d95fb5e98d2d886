"""How often a rank looks at what refs name: the first as often as it is asked to, the others the more seldom the more they are."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

import datastates
from datastates.capture.named import Named
from datastates.capture.runner import Runner
from datastates.lineage.change import refs
from datastates.lineage.database import Database


def test_a_name_that_was_committed_after_a_younger_one_is_seen(tmp_path: Path, postgresql_url: str) -> None:
    with datastates.open(postgresql_url, packs=tmp_path, memory_bytes=32 << 20) as repo, repo.track(x=torch.ones(3), rng=False) as run:
        state = run.capture().wait()
        host = repo.core.host()
        assert isinstance(host, Runner)
        named = Named(repo.core.database, host._register.journal)
        late, early = Database(postgresql_url), Database(postgresql_url)
        with closing(late), closing(early):
            with late.write() as session:
                refs.tag(session, "late", state.uid)
                with early.write() as other:
                    refs.tag(other, "early", state.uid)
                seen = named.look()
                assert seen is not None
                assert "late" not in {ref.name for ref in repo.refs()}
                assert named.look() is not None, "somebody still writes an older line"
            assert named.look() is not None
        assert named.look() is not None, "that one may have begun before the older line was there"
        assert named.look() is None


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
