"""A training that does, at random, all that a repository is asked for, and says each promise before
it goes on; somebody ends it.

What it says, a line each, to whoever knows what a repository must still have when the process is
gone:

    begin BRANCH UID LIVE      a training goes on from that state (``-``: from nothing)
    captured UID LIVE BRANCH   a state, with the digest of what was live
    durable UID LIVE           that state is on disk
    dropping UID               the process is about to drop it by name; pruning UID: by a policy
    tag NAME UID               a name; branch NAME UID: likewise; unsettled NAME: it is about to be
    moved or deleted copied                     the whole folder was copied to the folder beside it;
    rebuilt: the copy has a new lineage doing ACT NUMBER, done     around each act; ``rewriting``
    begins within the acts ``rewrite`` and ``sift`` rewritten COUNT            so many packs were
    rewritten
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import datastates
from datastates import Config, Conflict, Repository, Status, Tracker
from datastates.maintenance.retention_pass import evict
from tests.support.training import digest, make, make_small, update

Say = Callable[..., object]

ACTS = {
    "capture": 14.0,
    "burst": 4.0,
    "persist": 6.0,
    "tag": 1.5,
    "branch": 1.5,
    "move": 1.0,
    "delete": 1.5,
    "evict": 2.0,
    "prune": 0.8,
    "gc": 1.2,
    "rewrite": 1.2,
    "sift": 0.8,
    "reindex": 0.3,
    "reopen": 0.4,
}
"""What is done, and how often."""

BOUND_S = 60.0
"""No act takes so long on the slowest of machines, unless it hangs: then the stacks of all
threads are among the errors."""

BALLAST = 1_500_000
"""So many numbers that the last of them have a chunk to themselves, which is two fifths of a
state."""

LARGE = ("main", "side")
"""The branches whose states have ballast; every fifth one becomes durable."""

SMALL = "small"
"""The branch whose states have 3.9 kB; all become durable, and those of a burst share packs."""

BRANCHES = (*LARGE, SMALL)
"""The branches that are trained; others are only names."""

MOST_OF_A_BURST = 60

POLICIES = ("latest:3", "thin:2", "tagged", "every:7", "all at-most:3M", "latest:1 best:1:loss")


def frozen() -> torch.Tensor:
    """What does not change from state to state."""
    return torch.arange(40_000.0)


REWRITING = ("pack-moved", "pack-renamed", "manifest-replaced", "pack-removed")
"""The durable steps of a pack that is rewritten (``store.rewriting``)."""


@dataclass(frozen=True)
class Line:
    """What is trained on one branch.

    ``ballast`` is one number many times, and changes now and then."""

    run: Tracker
    model: nn.Module
    optimizer: torch.optim.Optimizer
    ballast: torch.Tensor

    @classmethod
    def begin(cls, repo: Repository, branch: str, say: Say) -> Line:
        """Track new objects on a branch; says where it goes on from."""
        model, optimizer, ballast, same = objects_of(is_small=branch == SMALL)
        every = 1 if branch == SMALL else None
        run = repo.track(
            model=model,
            optimizer=optimizer,
            objects=same,
            ballast=ballast,
            branch=branch,
            durable_every=every,
        )
        line = cls(run, model, optimizer, ballast)
        say("begin", branch, run.resumed_from.uid if run.resumed_from else "-", line.live)
        return line

    @property
    def live(self) -> str:
        """The digest of what is live."""
        return live_of(self.model, self.optimizer, self.ballast)


def objects_of(
    *, is_small: bool
) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, dict[str, torch.Tensor]]:
    """New objects of a line: what is trained, its ballast, and what does not change."""
    if is_small:
        return *make_small(), torch.zeros(1), {}
    return *make(), torch.zeros(BALLAST), {"frozen": frozen()}


def live_of(model: nn.Module, optimizer: torch.optim.Optimizer, ballast: torch.Tensor) -> str:
    """Of weights, momentum, and the number that the ballast is made of; begins with ``SMALL``
    for states without ballast."""
    assert bool((ballast == ballast[0]).all()), "the ballast is of two states"
    return f"{SMALL if ballast.numel() == 1 else ''}{digest(model, optimizer)}+{int(ballast[0])}"


def copy_of(folder: Path) -> Path:
    """Where the copy is whose lineage is rebuilt."""
    return folder.with_name(folder.name + "-copy")


def durable_in(repo: Repository) -> dict[str, str]:
    """The states on disk, each with the digest of what was live, which is its message."""
    return {
        state.uid: state.message or ""
        for state in repo.find("step >= 0")
        if state.status is Status.DURABLE
    }


def crash_after(steps: int) -> Callable[[str], None]:
    """An ``on_step`` that ends the process after so many durable steps of any kind."""
    left = steps

    def on_step(name: str) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os._exit(137)

    return on_step


def crash_in_rewriting(step: str) -> Callable[[str], None]:
    """An ``on_step`` that ends the process after this step, once a pack is being rewritten: some
    have names of other steps, too."""
    is_rewriting = False

    def on_step(name: str) -> None:
        nonlocal is_rewriting
        is_rewriting = is_rewriting or name == REWRITING[0]
        if is_rewriting and name == step:
            os._exit(137)

    return on_step


@dataclass
class Mixture:
    """Two trainings in one repository, and what is known of it."""

    folder: Path
    choose: random.Random
    say: Say
    config: Config
    lines: dict[str, Line] = field(default_factory=dict)
    durable: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    number: int = 0

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self.repo = datastates.open(self.folder, config=self.config)
        self.durable = durable_in(self.repo)
        self.names = [ref.name for ref in self.repo.refs() if ref.name not in BRANCHES]
        self.lines = {branch: Line.begin(self.repo, branch, self.say) for branch in BRANCHES}

    def act(self, number: int, name: str | None = None) -> None:
        """One act; chosen at random unless it is named."""
        name, self.number = name or self.choose.choices(list(ACTS), list(ACTS.values()))[0], number
        faulthandler.dump_traceback_later(BOUND_S, exit=True)
        self.say("doing", name, number)
        getattr(self, name)(f"{self.choose.randrange(1 << 40):x}-{number}")
        self.say("done")

    def capture(self, mark: str, branch: str | None = None) -> datastates.Capture:
        """A step and a capture."""
        branch = branch or self.choose.choice(BRANCHES)
        line = self.lines[branch]
        loss = update(line.model, line.optimizer)
        live = line.live
        taken = line.run.capture(metrics={"loss": loss}, message=live)
        self.say("captured", taken.uid, live, branch)
        return taken

    def burst(self, mark: str) -> list[datastates.Capture]:
        """Many captures of small states, as fast as they come; now and then the last one is
        waited for."""
        taken = [
            self.capture(mark, SMALL) for _ in range(self.choose.randrange(2, MOST_OF_A_BURST))
        ]
        if self.choose.random() < 0.5:
            state = taken[-1].wait("durable")
            self.asked.add(state.uid)
            self._promise(state.uid, state.message or "")
        return taken

    def persist(self, mark: str, branch: str | None = None) -> datastates.State:
        """A capture that is waited for until it is on disk."""
        state = self.capture(mark, branch).wait("durable")
        self.asked.add(state.uid)
        self._promise(state.uid, state.message or "")
        return state

    def tag(self, mark: str) -> None:
        """A tag of a head, which may not be on disk yet."""
        self._name("tag", mark)

    def branch(self, mark: str) -> None:
        """A branch from a head."""
        self._name("branch", mark)

    def _name(self, kind: str, mark: str) -> None:
        head = self.lines[self.choose.choice(BRANCHES)].run.head
        if head is not None:
            ref = getattr(self.repo, kind)(f"{kind}-{mark}", head)
            self.names.append(ref.name)
            self.say(kind, ref.name, ref.state)

    def move(self, mark: str) -> None:
        """A branch that nobody trains goes to a state that is on disk."""
        branches = [name for name in self.names if name.startswith("branch")]
        if branches and self.durable:
            name, uid = self.choose.choice(branches), self.choose.choice(list(self.durable))
            self.say("unsettled", name)
            ref = self.repo.move(name, uid, expected=self.repo.state(name))
            self.say("branch", name, ref.state)

    def delete(self, mark: str) -> None:
        """A name goes."""
        if self.names:
            name = self.names.pop(self.choose.randrange(len(self.names)))
            self.say("unsettled", name)
            self.repo.delete_ref(name)

    def evict(self, mark: str) -> None:
        """A state is dropped by hand, unless somebody counts on it."""
        if not self.durable:
            return
        self._evict(self.choose.choice(list(self.durable)))

    def _evict(self, uid: str) -> None:
        live = self.durable.pop(uid)
        self.say("dropping", uid)
        try:
            evict(self.repo.core, uid)
        except Conflict:
            self._promise(uid, live)

    def prune(self, mark: str) -> None:
        """What a policy does not keep is dropped: just that of which a dry run has told."""
        self.reopen(mark)
        policy = self.choose.choice(POLICIES)
        named = {ref.state for ref in self.repo.refs()}
        # A state that this process waited for stays as long as its handle is there, which is until
        # it is collected as garbage.
        going = {each.uid for each in self.repo.prune(policy, dry_run=True).dropped} | (
            self.asked & self.durable.keys()
        ) - named
        planned = {uid: self.durable.pop(uid) for uid in going}
        for uid in planned:
            self.say("pruning", uid)
        dropped = {each.uid for each in self.repo.prune(policy).dropped}
        assert dropped <= planned.keys(), f"{policy}: {dropped - planned.keys()} were not to go"
        for uid in planned.keys() - dropped:
            self._promise(uid, planned[uid])

    def gc(self, mark: str) -> None:
        """Garbage goes, of crashes before."""
        report = self.repo.gc()
        assert not report.left, report.left

    def rewrite(self, mark: str) -> None:
        """The ballast of three states lies in the pack of the first; that state goes, and then
        its pack, of which nobody needs the rest."""
        branch = self.choose.choice(LARGE)
        self.lines[branch].ballast.fill_(self.choose.randrange(1 << 20))
        first, _, _ = (self.persist(mark, branch) for _ in range(3))
        self._evict(first.uid)
        self._collect()

    def sift(self, mark: str) -> None:
        """Most states of a burst go, and then the packs that they shared, of which the others
        need little."""
        for number, taken in enumerate(self.burst(mark)):
            state = taken.wait("durable")
            self._promise(state.uid, state.message or "")
            if number % 8:
                self._evict(state.uid)
        self._collect()

    def _collect(self) -> None:
        self.say("doing", "rewriting", self.number)
        report = self.repo.gc()
        assert not report.left, report.left
        self.say("rewritten", report.rewritten)

    def reindex(self, mark: str) -> None:
        """A copy of the folder has its lineage rebuilt, and what is on disk is known there."""
        self.repo.close()
        copy = copy_of(self.folder)
        shutil.copytree(self.folder, copy)
        self._begin_again()
        self.say("copied")
        datastates.reindex(copy, replace=True)
        self.say("rebuilt")
        with datastates.open(copy) as other:
            found = durable_in(other)
            assert found == self.durable, (
                f"the copy differs by {set(found.items()) ^ set(self.durable.items())}"
            )
        shutil.rmtree(copy)

    def reopen(self, mark: str) -> None:
        """The repository is closed, and opened again."""
        self.repo.close()
        self._begin_again()

    def _begin_again(self) -> None:
        self._open()
        for uid, live in self.durable.items():
            self.say("durable", uid, live)

    def _promise(self, uid: str, live: str) -> None:
        self.durable[uid] = live
        self.say("durable", uid, live)


def work(
    folder: str,
    seed: int,
    say: Say,
    crash_at_step: int | None = None,
    crash_in: str | None = None,
    planned: tuple[int, str] | None = None,
) -> None:
    """Go on until somebody ends it, or the durable step of that number, or that one of a rewriting,
    is made; ``planned`` is the number of an act, and which.
    """
    torch.set_num_threads(1)
    on_step = (
        crash_in_rewriting(crash_in)
        if crash_in is not None
        else None
        if crash_at_step is None
        else crash_after(crash_at_step)
    )
    config = Config(
        memory_bytes=96 << 20,
        durable_every=5,
        durable_interval_s=None,
        retention="all",
        on_step=on_step,
    )
    mixture = Mixture(Path(folder), random.Random(seed), say, config)
    for number in range(100_000):
        mixture.act(number, planned[1] if planned is not None and number == planned[0] else None)
