"""Ranks that lie, stop, fork, are interrupted or have a full disk, and jobs that meet: no half
state, and nothing durable is lost."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import datastates
from datastates import Config, Status
from datastates.engine.handle import DerivedUids, Part, Work
from datastates.engine.plan import Shares
from datastates.engine.rank_reports import PendingRecord
from datastates.errors import Closed, Conflict, Corrupt, DatastatesError, Unavailable
from datastates.ranks import SoloGroup, latest
from datastates.testing import FaultyDisk
from datastates.training.tracker import Tracker
from tests.support.jobs import Ranks, Say, job, run
from tests.support.ranks import problems_of

HERE = "tests.ranks.test_attacks"
ROWS, STEPS, AT = 40, 6, 3
"""Of ``STEPS`` captures something is wrong with that of step ``AT``."""
PATIENCE_S = 1.5


def config(**more: object) -> Config:
    # they are its own
    return Config(
        **{  # type: ignore[arg-type]
            "memory_bytes": 64 << 20,
            "durable_interval_s": None,
            "durable_every": 1,
            "group_patience_s": PATIENCE_S,
            **more,
        }
    )


def rows(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 4.0).reshape(ROWS, 4) + step


# --- what ranks do --------------------------------------------------------------------------------


def lie(folder: str, how: str, say: Say) -> None:
    """Capture some steps, one of which rank 1 captures otherwise; say what became of each."""
    tensor, more, began = torch.zeros(ROWS, 4), {"x": torch.ones(3)}, time.monotonic()
    with datastates.open(folder, config=config()) as repo:
        run = repo.track(objects={"rows": tensor, "more": more}, rng=False)
        captures = []
        for step in range(1, STEPS + 1):
            tensor.copy_(rows(step))
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 1 and step == AT:
                    LIES[how](run, more, patch)
                try:
                    captures.append(run.capture())
                    captures[-1].wait(timeout_s=30)
                except DatastatesError as exc:
                    say("raised", step, exc)
            more.pop("y", None)
            run.training.forget_layout()
            dist.barrier()
        outcomes(captures, say)
        say("took", time.monotonic() - began)
        dist.barrier()


def stop(folder: str, say: Say) -> None:
    """Rank 1 stands still before a capture, until somebody lets it go on; rank 0 captures
    meanwhile."""
    rank, tensor = dist.get_rank(), torch.zeros(ROWS, 4)
    with (
        datastates.open(folder, config=config()) as repo,
        repo.track(objects={"rows": tensor}, rng=False) as run,
    ):
        captures = []
        for step in range(1, STEPS + 1):
            tensor.copy_(rows(step))
            if rank == 1 and step == AT:
                say("stopping")
                os.kill(os.getpid(), signal.SIGSTOP)
            captures.append(run.capture())
            if step < AT:
                captures[-1].wait("durable", 30)
        if rank == 0:
            began = time.monotonic()
            for capture in captures[AT - 1 :]:
                with pytest.raises(
                    Unavailable,
                    match=f"because of rank 1 .late.: it told no part within {PATIENCE_S}",
                ):
                    capture.wait(timeout_s=30)
            say("gave up", time.monotonic() - began)
        dist.barrier()
        tensor.copy_(rows(STEPS + 1))
        captures.append(run.capture())
        outcomes(captures, say)
        dist.barrier()


def fork(folder: str, say: Say) -> None:
    """Rank 1 has children, which end in two ways; it goes on."""
    tensor = torch.zeros(ROWS, 4)
    with (
        datastates.open(folder, config=config()) as repo,
        repo.track(objects={"rows": tensor}, rng=False) as run,
    ):
        captures = []
        for step in range(1, STEPS + 1):
            tensor.copy_(rows(step))
            captures.append(run.capture())
            if dist.get_rank() == 1 and step == AT:
                say("children", born(run, is_abrupt=True), born(run, is_abrupt=False))
        outcomes(captures, say)
        dist.barrier()


def born(run: Tracker, *, is_abrupt: bool) -> int:
    """How a child ends that tries to capture: 0 where it was told that it cannot."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        run.capture()
    except Closed:
        code = 0
    if not is_abrupt:
        run.close()
    os._exit(code)


def interrupt(folder: str, say: Say) -> None:
    """Capture until Ctrl-C, or until another rank is gone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tensor, captures, asked = torch.zeros(ROWS, 4), [], 0.0
    try:
        with (
            datastates.open(folder, config=config()) as repo,
            repo.track(objects={"rows": tensor}, rng=False) as run,
        ):
            for step in range(1, 10_000):
                tensor.copy_(rows(step))
                captures.append(run.capture())
                if step == AT:
                    say("durable", captures[-1].wait("durable", 30).uid)
                    dist.barrier()
                    say("ready")
                if step > AT:
                    asked = time.monotonic()
                    captures[-1].wait()
    except KeyboardInterrupt:
        say("interrupted")
    except Unavailable as exc:
        say("gave up", time.monotonic() - asked, exc)


def die(folder: str, how: str, say: Say) -> None:
    """Rank 1 dies, and rank 0 then ends by an error or a signal while its last states wait for
    the parts of rank 1."""
    tensor = torch.zeros(ROWS, 4)
    repo = datastates.open(folder, config=config(group_patience_s=60.0))
    run = repo.track(objects={"rows": tensor}, rng=False)
    for step in range(1, AT + 1):
        tensor.copy_(rows(step))
        run.capture().wait("durable", 30)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(1)
    run.capture()
    began = time.monotonic()
    try:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "block":
            with repo, run:
                dist.barrier()  # raises, as rank 1 is gone
        try:
            dist.barrier()
        finally:
            run.close()
            repo.close()
    except (RuntimeError, SystemExit) as exc:
        repo.core.close(exc)  # as the end of the process does
    say("took", time.monotonic() - began)


def fill(folder: str, say: Say, is_mended: bool) -> None:
    """The disk of rank 1 is full from a step on."""
    rank, tensor = dist.get_rank(), torch.zeros(ROWS, 4)
    packs = Path(folder) / f"node-{rank}"
    opened = datastates.open(folder, packs=str(packs), config=config())
    with (
        FaultyDisk(packs) as disk,
        suppress(Unavailable),
        opened as repo,
        repo.track(objects={"rows": tensor}, rng=False) as run,
    ):
        captures = []
        for step in range(1, STEPS + 1):
            tensor.copy_(rows(step))
            if rank == 1 and step == AT:
                disk.fail()
            captures.append(run.capture())
            captures[-1].wait("durable" if step < AT else "captured", 30)
        try:
            captures[AT - 1].wait("durable", 2)
        except TimeoutError as exc:
            say("late", exc)
        dist.barrier()
        if is_mended:
            disk.mend()
            outcomes(captures, say)
        dist.barrier()
        say("closing")


def meet(folder: str, say: Say) -> None:
    """Capture on a branch where another job may be."""
    tensor, captures = torch.zeros(ROWS, 4), []
    with datastates.open(folder, config=config()) as repo:
        run = repo.track(objects={"rows": tensor}, rng=False, takeover=True)
        say("tracks")
        try:
            for step in range(run.step + 1, run.step + STEPS + 1):
                tensor.copy_(rows(step))
                captures.append(run.capture())
                with suppress(Unavailable):
                    captures[-1].wait(timeout_s=30)
            run.close()
        except Conflict as exc:
            say("conflict", exc)
        outcomes(captures, say)
        dist.barrier()


def outcomes(captures: list[datastates.Capture], say: Say) -> None:
    """Say which became whole."""
    for capture in captures:
        try:
            say("whole", capture.step, capture.wait("durable", 30).uid)
        except DatastatesError as exc:
            say("none", capture.step, str(exc)[:500])


def other_uid(run: Tracker, more: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> None:
    """The part belongs to a state of its own."""
    patch.setattr(run.training.line, "uids", DerivedUids("another job"))


def other_size(run: Tracker, more: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> None:
    """The state is said to have one part more."""
    part = run.training.line.part
    assert part is not None
    patch.setattr(run.training.line, "part", Part(part.rank, part.size + 1, part.job))


def other_tree(run: Tracker, more: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> None:
    """There is something in the tree that no other rank has."""
    more["y"] = torch.ones(2)


def other_division(run: Tracker, more: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> None:
    """The shares are those of the other rank: some rows are there twice, and others nowhere."""
    run.training.forget_layout()
    begin = Shares.__init__

    def twice(self: Shares, leaves: Any, rank: int, *more: Any) -> None:
        begin(self, leaves, 1 - rank, *more)

    patch.setattr(Shares, "__init__", twice)


def other_digest(run: Tracker, more: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> None:
    """The digest that is told is not that of the part."""
    told = Work.make_record

    def lying(self: Work, *where: object) -> PendingRecord:
        entry = told(self, *where)  # type: ignore[arg-type]  # as it was given
        self.entry = replace(entry, new=replace(entry.new, digest="ab" * 32))
        return self.entry

    patch.setattr(Work, "make_record", lying)


LIES = {
    each.__name__: each
    for each in (other_uid, other_size, other_tree, other_division, other_digest)
}


# --- what is left ---------------------------------------------------------------------------------


def whole(said: list[list[str]]) -> dict[int, str]:
    """The states that came about, by step: all ranks say the same."""
    each = [
        {int(line.split()[1]): line.split()[2] for line in lines if line.startswith("whole ")}
        for lines in said
    ]
    assert all(found == each[0] for found in each), said
    return each[0]


def see_sound(folder: Path, states: dict[int, str], *, but: tuple[int, ...] = ()) -> None:
    """The branch has these states and no others, in one path, nothing waits, and each is as it
    was captured."""
    with datastates.open(folder) as repo:
        found = list(repo.log("main"))[::-1]
        assert {state.step: state.uid for state in found} == states
        assert [state.parents for state in found] == [(), *((state.uid,) for state in found[:-1])]
        assert repo.incomplete().waiting == ()
        for state in found:
            if state.step not in but:
                assert problems_of(repo, state) == []
                assert torch.equal(repo.load(state)["rows"], rows(state.step))


@pytest.mark.parametrize("how", sorted(LIES))
def test_a_rank_that_lies_makes_no_state_that_nobody_can_restore_go_for_the_newest(
    tmp_path: Path, how: str
) -> None:
    said = run(2, f"{HERE}:lie", folder=str(tmp_path), how=how)
    states = whole(said)
    is_found_late = how in ("other_division", "other_digest")
    lost = {"other_uid": {3, 4, 5}, "other_size": {3, 4}, "other_tree": {3, 4}}.get(how, set())
    assert set(states) == set(range(1, STEPS + 1)) - lost
    assert max(float(lines[-1].split()[1]) for lines in said) < 20
    see_sound(tmp_path, states, but=(AT,) if is_found_late else ())
    if is_found_late:
        with datastates.open(tmp_path) as repo:
            with pytest.raises(
                Corrupt, match=r"step 3\) is damaged: .*the nearest state that verifies is .*step 2"
            ):
                repo.load(states[AT])
            repo.branch("there", states[AT])
            assert latest(repo, "there", group=SoloGroup()).step == AT - 1
    else:
        words = " ".join(line for lines in said for line in lines)
        assert {
            "other_uid": "says parent",
            "other_size": "says world_size",
            "other_tree": "has another tree",
        }[how] in words


def test_what_a_rank_missed_while_it_stood_still_is_given_up_and_both_go_on(tmp_path: Path) -> None:
    with job(2, f"{HERE}:stop", folder=str(tmp_path)) as ranks:
        assert float(ranks.heard(0, "gave up").split()[2]) < PATIENCE_S + 5
        ranks.kill(1, signal.SIGCONT)
        states = whole(ranks.said())
    assert set(states) == {1, 2, STEPS + 1}
    see_sound(tmp_path, states)


def test_a_rank_may_have_children(tmp_path: Path) -> None:
    said = run(2, f"{HERE}:fork", folder=str(tmp_path))
    assert "children 0 0" in said[1]
    see_sound(tmp_path, whole(said))
    assert set(whole(said)) == set(range(1, STEPS + 1))


@pytest.mark.parametrize("how", ["block", "finally", "signal"])
def test_a_close_after_an_error_waits_for_other_ranks_for_seconds_only(
    tmp_path: Path, how: str
) -> None:
    with job(2, f"{HERE}:die", folder=str(tmp_path), how=how) as ranks:
        assert float(ranks.heard(0, "took").split()[1]) < 20, (
            "3 s, on a busy machine, and not the 60 s of group_patience_s"
        )
    with datastates.open(tmp_path) as repo:
        assert [state.step for state in repo.log("main")] == [3, 2, 1]
        assert repo.incomplete().waiting == ()


@pytest.mark.parametrize("interrupted", [(0,), (1,), (0, 1)])
def test_ctrl_c_on_any_rank_ends_the_job_and_loses_nothing_durable(
    tmp_path: Path, interrupted: tuple[int, ...]
) -> None:
    with job(2, f"{HERE}:interrupt", folder=str(tmp_path)) as ranks:
        for rank in range(2):
            ranks.heard(rank, "ready")
        for rank in interrupted:
            ranks.kill(rank, signal.SIGINT)
        said = ranks.said()
    for rank, lines in enumerate(said):
        if rank in interrupted:
            assert lines[-1] == "interrupted"
        else:
            assert float(lines[-1].split()[2]) < PATIENCE_S + 5
            assert f"because of rank {interrupted[0]}" in lines[-1]
    with datastates.open(tmp_path) as repo:
        states = {state.step: state.uid for state in repo.log("main")}
        assert repo.state("main").status is Status.DURABLE
    assert states[AT] == said[0][0].split()[1]
    assert set(states) == set(range(1, max(states) + 1))


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_full_disk_on_one_rank_is_named_on_the_others_and_what_is_durable_stays(
    tmp_path: Path, is_mended: bool
) -> None:
    said = run(2, f"{HERE}:fill", folder=str(tmp_path), is_mended=is_mended)
    late = [next(line for line in lines if line.startswith("late ")) for lines in said]
    assert "rank 1" in late[0], late
    assert "No space left" in late[1]
    assert all(lines[-1] == "closing" for lines in said)
    with datastates.open(tmp_path, packs=str(tmp_path / "node-0")) as repo:
        states = {state.step: (state.uid, state.status) for state in repo.log("main")}
    assert [step for step, (_, status) in states.items() if status is Status.DURABLE] == (
        [6, 5, 4, 3, 2, 1] if is_mended else [2, 1]
    )


def test_two_jobs_on_one_branch_make_one_path_and_the_later_one_hears_of_it(tmp_path: Path) -> None:
    with (
        job(2, f"{HERE}:meet", folder=str(tmp_path)) as one,
        job(2, f"{HERE}:meet", folder=str(tmp_path)) as two,
    ):
        jobs: list[Ranks] = [one, two]
        said = [each.said() for each in jobs]
    states = {step: uid for lines in said for step, uid in whole(lines).items()}
    conflicts = [
        any(line.startswith("conflict") for line in lines) for each in said for lines in each
    ]
    assert sum(len(whole(lines)) for lines in said) == len(states), "no step came twice"
    see_sound(tmp_path, states)
    assert any(conflicts) or len(states) == 2 * STEPS
