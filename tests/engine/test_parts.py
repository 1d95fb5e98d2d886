"""What becomes of the parts that ranks capture: a state that is whole and restorable, or none at
all, and every rank hears which."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.engine import runner
from datastates.errors import Closed, Conflict, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.query.names import replicas_of
from datastates.lineage.states import Status
from tests.support.ranks import Rank, as_rank, ranks_of
from tests.support.records import part_digests

SIZE = 3


def wait(captures: list[datastates.Capture], status: str = "captured") -> list[datastates.State]:
    return [capture.wait(status, timeout_s=60) for capture in captures]


def expected(steps: int) -> torch.Tensor:
    """The whole tensor after so many steps."""
    return torch.arange(27.0).reshape(9, 3) + 10 * steps


def test_a_state_is_visible_once_every_rank_told_its_part_and_restores_whole(
    tmp_path: Path,
) -> None:
    with ranks_of(tmp_path, None, SIZE) as ranks:
        first = [rank.capture(metrics={"loss": float(rank.part.rank)}) for rank in ranks[1:]]
        for rank in ranks[1:]:
            rank.repo.flush()
        assert [capture.status for capture in first] == [None, None]
        assert ranks[0].repo.refs() == []
        with pytest.raises(TimeoutError, match=r"waits for the parts of rank 0 of 3"):
            first[0].wait(timeout_s=0.05)
        first.append(ranks[0].capture(metrics={"loss": 0.0}))
        states = wait(first)
        assert len({(state.uid, state.digest) for state in states}) == 1
        second = wait([rank.capture() for rank in ranks], "durable")
        assert {state.parents for state in second} == {(states[0].uid,)}
        assert states[0].metrics == {"loss": 0.0}
        assert torch.equal(ranks[0].repo.load("main")["rows"], expected(2))
        for rank in ranks:
            assert rank.run.head is not None
            assert rank.run.head.uid == second[0].uid
            with rank.repo.core.tiers.durable.open_part(second[0].uid, rank.part.rank) as reader:
                origin = reader.manifest.origin
                assert (origin.parents, origin.parent_digests) == (
                    (states[0].uid,),
                    (states[0].digest,),
                )
                with rank.repo.core.reading() as session:
                    assert (
                        part_digests(session, second[0].uid)[rank.part.rank]
                        == reader.manifest.digest
                    )
    with datastates.open(tmp_path) as repo:
        assert repo.state("main").status is Status.DURABLE
        assert torch.equal(repo.load("main")["rows"], expected(2))
        assert repo.verify("main").uid == second[0].uid


def test_what_one_rank_skips_none_has_and_the_next_state_hangs_on_the_one_before(
    tmp_path: Path,
) -> None:
    with ranks_of(tmp_path, None, 2) as ranks:
        before = wait([rank.capture() for rank in ranks])
        own = ranks[0].capture()
        ranks[1].skip()
        with pytest.raises(
            Unavailable,
            match=(
                r"step 2 was skipped: it was given up because of rank 1 \(skipped\): there was no"
                r" room"
            ),
        ):
            own.wait(timeout_s=60)
        assert own.is_skipped
        after = wait([rank.capture() for rank in ranks])
        assert {state.parents for state in after} == {(before[0].uid,)}
        assert [state.step for state in ranks[1].repo.log("main")] == [3, 1]
        memory = ranks[0].repo.core.engage().memory
        assert not memory.has(own.uid), "its memory is free"


def test_a_capture_that_raises_on_one_rank_is_given_up_on_the_others_at_once(
    tmp_path: Path,
) -> None:
    with ranks_of(tmp_path, None, 2) as ranks:
        ranks[1].run.values["odd"] = threading.Lock()
        with pytest.raises(datastates.DatastatesError):
            ranks[1].capture()
        del ranks[1].run.values["odd"]
        with pytest.raises(Unavailable, match=r"because of rank 1 \(failed\)"):
            ranks[0].capture().wait(timeout_s=60)
        assert wait([rank.capture() for rank in ranks])[0].parents == ()


@pytest.mark.parametrize("on_failure", ["continue", "raise"])
def test_a_rank_that_tells_nothing_is_waited_for_as_long_as_configured(
    tmp_path: Path, on_failure: str
) -> None:
    with ranks_of(tmp_path, None, 2, group_patience_s=0.1, on_failure=on_failure) as ranks:
        own = ranks[0].capture()
        with pytest.raises(Unavailable, match=r"rank 1 \(late\): it told no part within 0.1 s"):
            own.wait(timeout_s=60)
        late = ranks[1].capture()
        with pytest.raises(Unavailable, match=r"rank 1 \(late\)"):
            late.wait(timeout_s=60)
        for rank in ranks if on_failure == "raise" else ():
            with pytest.raises(Unavailable, match=r"was given up because of rank 1 \(late\)"):
                rank.capture()
        goes_on = [rank.capture() for rank in ranks]
        assert wait(goes_on)[0].step == (3 if on_failure == "raise" else 2)


def test_a_branch_that_somebody_moved_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as ranks, datastates.open(tmp_path) as other:
        states = [wait([rank.capture() for rank in ranks])[0] for _ in range(2)]
        other.move("main", states[0].uid, expected=states[1].uid)
        for capture in [rank.capture() for rank in ranks]:
            with pytest.raises(Unavailable, match="branch 'main' is at"):
                capture.wait(timeout_s=60)
        for rank in ranks:
            with pytest.raises(Conflict, match="branch 'main' is at"):
                rank.capture()


def test_ranks_that_go_back_capture_on_from_there(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as ranks:
        states = [wait([rank.capture() for rank in ranks])[0] for _ in range(3)]
        for rank in ranks:
            rank.run.training.line.stand((states[0].uid, states[0].digest))
        ranks[0].repo.move("main", states[0].uid, expected=states[2].uid)
        for rank in ranks:
            rank.run.step = 1
        again = wait([rank.capture() for rank in ranks])
        assert {state.parents for state in again} == {(states[0].uid,)}
        assert again[0].uid not in {state.uid for state in states}


def test_a_rank_that_closes_before_the_others_told_gives_up_what_waits(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2, group_patience_s=0.2) as ranks:
        own = ranks[0].capture()
        ranks[0].repo.close()
        with pytest.raises(Unavailable, match=r"rank 1 \(late\)"):
            own.wait(timeout_s=60)
        with pytest.raises(Unavailable, match=r"rank 1 \(late\)"):
            ranks[1].capture().wait(timeout_s=60)
        with pytest.raises(Closed):
            ranks[0].capture()


def test_ranks_may_have_folders_of_their_own(tmp_path: Path, postgresql: Any) -> None:
    packs = [tmp_path / f"packs-{rank}" for rank in range(2)]
    with ranks_of(postgresql.migrated(), packs, 2) as ranks:
        state, _ = wait([rank.capture() for rank in ranks], "durable")
        assert state.status is Status.DURABLE
        assert [
            len(list(folder.glob(f"{state.uid}.{rank}.manifest")))
            for rank, folder in enumerate(packs)
        ] == [1, 1]


def capture_in_rounds(ranks: list[Rank], steps: int) -> list[list[datastates.Capture]]:
    return [[rank.capture() for rank in ranks] for _ in range(steps)]


def test_captures_that_follow_each_other_quickly_become_whole_in_order(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as ranks:
        captures = capture_in_rounds(ranks, 20)
        states = [wait(each)[0] for each in captures]
        assert [state.parents for state in states] == [(), *((state.uid,) for state in states[:-1])]
        wait(captures[-1], "durable")
        assert torch.equal(ranks[1].repo.load("main")["rows"], expected(20))


def test_what_one_rank_makes_durable_all_write(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as ranks:
        first = capture_in_rounds(ranks, 2)[0]
        uid = first[0].wait("durable", timeout_s=60).uid
        other = first[1]._progress  # nobody waits for it there
        assert other.changed.wait_for(
            lambda: other.state is not None and other.state.status is Status.DURABLE, 60
        )
        with ranks[0].repo.core.reading() as session:
            assert {each.rank for each in replicas_of(session, uid) if each.tier == "local"} == {
                0,
                1,
            }
        assert ranks[0].repo.state(uid).status is Status.DURABLE


def test_while_the_database_is_away_parts_wait_and_are_told_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_away, read, write = threading.Event(), Database.read, Database.write

    @contextmanager
    def asked(
        database: Database, how: Callable[..., Any], *args: Any, **options: Any
    ) -> Iterator[Any]:
        if is_away.is_set():
            raise Unavailable("the database does not answer (connection refused)")
        with how(database, *args, **options) as session:
            yield session

    monkeypatch.setattr(Database, "read", lambda self: asked(self, read))
    monkeypatch.setattr(Database, "write", lambda self, durable=False: asked(self, write, durable))
    monkeypatch.setattr(runner, "CHECK_EVERY_S", 0.01)
    with ranks_of(tmp_path, None, 2) as ranks:
        first = wait([rank.capture() for rank in ranks])
        own = ranks[0].capture()
        ranks[0].repo.flush()
        is_away.set()
        captures = [own, ranks[1].capture()]
        later = [rank.capture() for rank in ranks]
        ranks[0].skip()
        last = ranks[1].capture()
        for rank in ranks:
            rank.run.training.runner.rounds.hurry()
        with pytest.raises(TimeoutError):
            own.wait(timeout_s=0.2)
        is_away.clear()
        states = [wait(captures)[0], wait(later)[1]]
        assert [state.parents for state in states] == [(first[0].uid,), (states[0].uid,)]
        with pytest.raises(Unavailable, match=r"rank 0 \(skipped\)"):
            last.wait(timeout_s=60)
        assert wait([rank.capture() for rank in ranks])[0].parents == (states[1].uid,)


class Trained:
    """A rank whose tensor an optimizer changes, next to an optimizer of its own."""

    def __init__(self, rank: Rank) -> None:
        self.repo, self.weight = rank.repo, torch.zeros(9, requires_grad=True)
        self.optimizer, self.alone = (
            torch.optim.SGD([tensor])
            for tensor in (self.weight, torch.zeros(1, requires_grad=True))
        )
        self.run = rank.repo.track(
            branch="trained",
            weight=self.weight,
            optimizer=self.optimizer,
            alone=self.alone,
            own="alone",
            rank=rank.part.rank,
            rng=False,
        )
        as_rank(self.run, rank.part)

    def step(self) -> None:
        """One update of what all ranks have."""
        self.weight.grad = -torch.ones(9)
        self.optimizer.step()


def test_ranks_that_count_their_captures_and_drift_apart_make_no_state(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as both:
        one, other = map(Trained, both)
        for rank in (one, other):
            rank.step()
        whole = wait([rank.run.capture() for rank in (one, other)])[0]
        one.run.capture(message="once more")  # the other has no such state
        for rank in (one, other):
            rank.step()
        one.run.capture()
        other.run.capture()
        for rank in (one, other):
            rank.repo.flush()
        assert [state.uid for state in one.repo.log("trained")] == [whole.uid]
        with pytest.raises(Conflict, match="after 2 steps of the optimizer"):
            other.run.capture()


def test_ranks_may_step_what_is_their_own_as_often_as_they_like(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as both:
        one, other = map(Trained, both)
        for _ in range(3):
            one.alone.step()
        assert (
            len({state.uid for state in wait([rank.run.capture() for rank in (one, other)])}) == 1
        )


def test_ranks_whose_captures_are_given_their_step_may_differ_in_updates(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as both:
        one, other = map(Trained, both)
        one.step()
        assert (
            len({state.uid for state in wait([rank.run.capture(step=7) for rank in (one, other)])})
            == 1
        )


def test_ranks_that_restored_a_state_have_drifted_no_more(tmp_path: Path) -> None:
    with ranks_of(tmp_path, None, 2) as both:
        one, other = map(Trained, both)
        whole = wait([rank.run.capture() for rank in (one, other)], "durable")[0]
        one.step()
        for rank in (one, other):
            rank.run.restore(whole)
            rank.step()
        assert (
            len({state.uid for state in wait([rank.run.capture() for rank in (one, other)])}) == 1
        )
