"""How often a rank looks at what refs name: the first as often as it is asked to, the others the
more seldom the more they are."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import datastates
from datastates.engine.periodic import RefWatcher
from datastates.engine.runner import Runner
from datastates.engine.scheduler import RefsChanged
from datastates.lineage.database import Database
from datastates.lineage.query import names
from datastates.lineage.states import Ref, RefKind
from datastates.lineage.write import refs

if TYPE_CHECKING:
    from datastates.lineage.session import Session


def test_a_name_that_was_committed_after_a_younger_one_is_seen(
    tmp_path: Path, postgresql_url: str
) -> None:
    with (
        datastates.open(postgresql_url, packs=tmp_path, memory_bytes=32 << 20) as repo,
        repo.track(x=torch.ones(3), rng=False) as run,
    ):
        state = run.capture().wait()
        runner = repo.core.runner()
        assert isinstance(runner, Runner)
        named = RefWatcher(repo.core.database, runner.outbox)
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
    with (
        datastates.open(tmp_path, memory_bytes=32 << 20) as repo,
        repo.track(x=torch.ones(3), rng=False) as run,
    ):
        state = run.capture().wait()
        runner = repo.core.runner()
        assert isinstance(runner, Runner)
        ranks = {(0, 10_000): True, (1, 2): True, (1, 10_000): False}
        looking = {rank: RefWatcher(repo.core.database, runner.outbox) for rank in ranks}
        for (rank, size), named in looking.items():
            named.join(rank, size)
            assert named.look() is not None, "what nobody has seen is looked at"
        repo.tag("kept", state)
        runner._changed.wait_for(lambda: False, 0.05)
        for place, sees in ranks.items():
            assert (looking[place].look() is not None) is sees
            found = looking[place].look(is_forced=True)
            assert found is not None
            assert found.tagged == {state.uid}


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_a_look_reads_only_the_refs_that_changed_and_knows_all(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path if backend == "sqlite" else request.getfixturevalue("postgresql_url")
    with (
        datastates.open(url, packs=tmp_path / "packs", memory_bytes=32 << 20) as repo,
        repo.track(x=torch.ones(3), rng=False) as run,
    ):
        first, second = run.capture().wait(), run.capture().wait()
        for number in range(50):
            repo.tag(f"tag-{number}", first)
        runner = repo.core.runner()
        assert isinstance(runner, Runner)
        named = RefWatcher(repo.core.database, runner.outbox)
        while named.look() is not None:
            pass

        def seen() -> RefsChanged:
            found = named.look(is_forced=True)
            assert found is not None
            there = repo.refs()
            assert found.branches == {
                ref.name: ref.state for ref in there if ref.kind is RefKind.BRANCH
            }
            assert found.tagged == {ref.state for ref in there if ref.kind is RefKind.TAG}
            while named.look() is not None:
                pass
            return found

        repo.branch("side", first)
        assert seen().branches["side"] == first.uid
        repo.move("side", second, expected=first)
        repo.tag("other", second)
        assert second.uid in seen().tagged
        repo.rename("other", "renamed")
        repo.rename("side", "elsewhere")
        assert seen().tagged == {first.uid, second.uid}
        repo.delete_ref("renamed")
        repo.delete_ref("elsewhere")
        assert seen().tagged == {first.uid}
        repo.branch("last", first)
        read, moved, here = list[str](), names.moved, threading.get_ident()

        def reading(session: Session, after: int) -> dict[str, Ref | None]:
            found = moved(session, after)
            if threading.get_ident() == here:  # the engine looks too
                read.extend(found)
            return found

        monkeypatch.setattr("datastates.engine.periodic.names.moved", reading)
        seen()
        assert set(read) == {"last"}, "nothing else was read"
