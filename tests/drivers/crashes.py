"""Kills at random moments of all that a repository is asked for: what was promised is there
afterwards, and the folder is sound.

    python -m tests.drivers.crashes --count 1000
    python -m tests.drivers.crashes --count 200 --seed 5    # a part of it: parts of other seeds are
    others, and their counts add up

A training (``tests.support.dying``) captures large states and bursts of small ones that share
packs, persists, tags, branches, moves and deletes names, evicts, prunes, collects garbage, has
packs rewritten of which little is needed, rebuilds the lineage of a copy, and closes. In three
rounds of five it is killed at some moment of an act that was chosen beforehand, every fifth time of
a rewriting; in the fourth it ends after a durable step of a number that was (``Config.on_step``),
in the fifth after one of the steps of a rewriting. Then the folder is opened: every byte of it is
sound, each state that was reported as durable and not dropped since restores equal, bit for bit,
every branch has a head that restores, tags lead to where they led. All small states are written:
those that became durable were captured before those that were lost. Garbage is collected,
everything is sound once more, and nothing lies there that no state needs. The next round goes on in
the same folder, so that what crashes leave adds up; after ``ROUNDS_OF_A_FOLDER`` rounds everything
in it is restored, and a new one begins.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import datastates
from datastates import Repository, Status
from datastates.maintenance.lease import held_in
from datastates.storage.local import LocalTier
from tests.support.dying import (
    ACTS,
    BRANCHES,
    REWRITING,
    SMALL,
    copy_of,
    durable_in,
    frozen,
    live_of,
    objects_of,
)
from tests.support.forge import Forge, Job, forge

ROUNDS_OF_A_FOLDER = 50

_MOST_STEPS = 80
_MOST_ACTS = 40
_LOOKED_AT_AGAIN = 8
"""So many of the states that were restored in a round before are restored once more."""


@dataclass
class Promises:
    """What the trainings of one folder said and nobody took back."""

    live: dict[str, str] = field(default_factory=dict)
    durable: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    small: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    doing: str = "open"
    is_copied: bool = False
    rewritten: int = 0

    def begin(self) -> None:
        """Another process begins in the folder."""
        self.doing, self.is_copied, self.small = "open", False, []

    def hear(self, line: str) -> None:
        """Take note of a line."""
        match line.split():
            case ["doing", act, _]:
                self.doing, self.is_copied = act, False
            case ["done"]:
                self.doing = "nothing"
            case ["captured", uid, live, branch]:
                self.live[uid], self.branches[uid] = live, branch
                if branch == SMALL:
                    self.small.append(uid)
            case ["durable", uid, live]:
                assert self.live.setdefault(uid, live) == live
                self.durable[uid] = live
            case ["dropping", uid]:
                self.durable.pop(uid, None)
                self.gone.add(uid)
            case ["pruning", uid]:
                assert uid not in self.names.values(), (
                    f"a name leads to {uid}, which a policy is to drop"
                )
                self.durable.pop(uid, None)
                self.gone.add(uid)
            case ["tag" | "branch", name, uid]:
                self.names[name] = uid
            case ["unsettled", name]:
                self.names.pop(name, None)
            case ["begin", branch, uid, live]:
                assert uid == self.heads.get(branch, "-") or self.doing != "open", (
                    f"{branch} goes on from {uid}"
                )
                assert uid == "-" or self.live[uid] == live, (
                    f"{branch} goes on from {uid}, and has other weights"
                )
            case ["copied"]:
                self.is_copied = True
            case ["rebuilt"]:
                pass
            case ["rewritten", count]:
                self.rewritten += int(count)
            case _:
                raise AssertionError(f"half a line: {line!r}")


def restored(repo: Repository, uid: str) -> str:
    """The digest of a state put into fresh objects."""
    model, optimizer, ballast, same = objects_of(
        is_small=(repo.state(uid).message or "").startswith(SMALL)
    )
    for each in same.values():
        each.zero_()
    assert repo.restore(
        uid, objects={"model": model, "optimizer": optimizer, "ballast": ballast, **same}
    ).restored
    assert all(torch.equal(each, frozen()) for each in same.values()), uid
    return live_of(model, optimizer, ballast)


def check(
    folder: Path, promises: Promises, choose: random.Random, *, is_last: bool = False
) -> Counter[str]:
    """Open a folder that a process died in: every promise holds, before and after garbage is
    collected."""
    counts: Counter[str] = Counter()
    with datastates.open(folder) as repo:
        _check_sound(repo)
        durable = _check_states(repo, promises)
        _check_names(repo, promises, durable)
        collected = repo.gc()
        assert not collected.left, collected.left
        counts["packs rewritten"] += collected.rewritten
        counts["files collected"] += collected.packs + collected.temporaries + len(collected.states)
        _check_sound(repo)
        assert durable == durable_in(repo)
        again = sorted(durable.keys() & promises.seen)
        chosen = again if is_last else choose.sample(again, min(len(again), _LOOKED_AT_AGAIN))
        for uid in [*(durable.keys() - promises.seen), *chosen]:
            assert restored(repo, uid) == durable[uid], f"{uid} is not what it was"
            counts["states restored"] += 1
        promises.seen = set(durable)
        counts["promises kept"] += len(promises.durable)
    packs = folder / "packs"
    assert set(LocalTier(packs).uids()) == set(durable)
    counts["small states of ended processes that became durable"] += len(
        durable.keys() & set(promises.small)
    )
    counts["small states of ended processes that were lost"] += len(
        set(promises.small) - durable.keys() - promises.gone
    )
    counts["files of manifests that were looked at"] += len(list(packs.glob("*.manifest")))
    counts["manifests that were looked at"] += len(durable)
    assert not list(packs.glob(".tmp-*"))
    # a file that nobody holds stays of whoever died right before taking it away
    assert not held_in(packs)
    return counts


def _check_sound(repo: Repository) -> None:
    report = repo.verify()
    assert not report.damage, report.damage
    assert not report.unread, report.unread


def _check_states(repo: Repository, promises: Promises) -> dict[str, str]:
    """No process lives, so each state is durable or has no bytes; what is durable, with the
    digest of what was live."""
    states = {state.uid: state for state in repo.find("step >= 0")}
    assert {state.status for state in states.values()} <= {
        Status.DURABLE,
        Status.LOST,
        Status.EVICTED,
    }
    durable = durable_in(repo)
    missing = promises.durable.keys() - durable.keys()
    assert not missing, f"{ {uid: states[uid].status for uid in missing} } were durable"
    for uid, live in durable.items():
        assert promises.live.setdefault(uid, live) == live
    lost = [uid not in durable for uid in promises.small if uid not in promises.gone]
    assert lost == sorted(lost), (
        f"a small state is lost, and one that was captured after it is durable: {lost}"
    )
    return durable


def _check_names(repo: Repository, promises: Promises, durable: dict[str, str]) -> None:
    """Names lead to where they led; branches whose head is lost, to what can be restored of
    them."""
    refs = {ref.name: ref for ref in repo.refs()}
    for name, uid in promises.names.items():
        if name in refs:
            assert refs[name].state == uid or (
                refs[name].kind == "branch" and uid not in durable
            ), f"{name} led to {uid}"
        else:
            assert name.startswith("branch"), f"{name} led to {uid}, and is gone"
            assert uid not in durable, f"{name} led to {uid}, and is gone"
            assert repo.reflog(name)[0].new is None
    for ref in refs.values():
        assert ref.kind == "tag" or ref.state in durable, (
            f"{ref.name} leads to {ref.state}, which has no bytes"
        )
    for branch in BRANCHES:
        kept = [uid for uid in promises.durable if promises.branches.get(uid) == branch]
        newest = max((repo.state(uid).generation for uid in kept), default=0)
        assert not kept or repo.state(refs[branch].state).generation >= newest, (
            f"{branch} lost its newest state"
        )
    promises.names = {name: ref.state for name, ref in refs.items() if name not in BRANCHES}
    promises.heads = {name: ref.state for name, ref in refs.items() if name in BRANCHES}


def _check_copy(folder: Path, promises: Promises) -> int:
    """A lineage that was about to be rebuilt when its process died can be rebuilt, and knows all
    that is on disk."""
    copy = copy_of(folder)
    if copy.exists() and promises.is_copied:
        datastates.reindex(copy, replace=True)
        with datastates.open(copy) as repo:
            _check_sound(repo)
            assert durable_in(repo).keys() >= promises.durable.keys()
    shutil.rmtree(copy, ignore_errors=True)
    return int(promises.is_copied)


def _end(job: Job, promises: Promises, planned: tuple[int, str], span_s: float) -> None:
    """Kill it so long after it has begun the act that was planned."""
    while line := job.lines.readline():
        promises.hear(line)
        if line.split() == ["doing", planned[1], str(planned[0])]:
            threading.Event().wait(span_s)
            job.kill(signal.SIGKILL)
            return


def round_in(smith: Forge, folder: Path, promises: Promises, choose: random.Random) -> Counter[str]:
    """One process that dies, and what it leaves."""
    promises.begin()
    kind, seed, number = (
        choose.choices(("killed", "step", "rewriting"), (3, 1, 1))[0],
        choose.randrange(1 << 31),
        choose.randrange(_MOST_ACTS),
    )
    is_killed, is_rewriting = kind == "killed", kind == "rewriting" or choose.random() < 1 / 5
    act = choose.choice(("rewrite", "sift") if is_rewriting else (*ACTS, "burst", "burst", "burst"))
    how: dict[str, object] = {"planned": (number, act)}
    if kind == "rewriting":
        how["crash_in"] = choose.choice(REWRITING)
    elif kind == "step":
        how = {"crash_at_step": choose.randrange(1, _MOST_STEPS)}
    before = promises.rewritten
    job = smith.start("tests.support.dying:work", folder=str(folder), seed=seed, **how)
    if is_killed and is_rewriting:
        _end(job, promises, (number, "rewriting"), 10 ** choose.uniform(-4, -1.7))
    elif is_killed:
        _end(job, promises, (number, act), 10 ** choose.uniform(-4, -0.9))
    for line in job.say():
        promises.hear(line)
    code = job.wait()
    assert code == (-signal.SIGKILL if is_killed else 137), (
        f"the training ended with {code}:\n{smith.errors()}"
    )
    counts = Counter(
        {
            "rounds": 1,
            f"{'killed' if is_killed else 'ended after a durable step'}: {promises.doing}": 1,
        }
    )
    counts["lineages rebuilt after a kill"] += _check_copy(folder, promises)
    counts["packs rewritten by what was ended later"] += promises.rewritten - before
    return counts + check(folder, promises, choose)


def drive(folder: Path, count: int, *, seed: int = 0) -> Counter[str]:
    """So many rounds: what was done.

    The first promise that was not kept raises, and the folder stays as it is."""
    choose = random.Random(seed)
    counts: Counter[str] = Counter()
    with forge(folder, ["tests.support.dying"]) as smith:
        for number in range(count):
            if number % ROUNDS_OF_A_FOLDER == 0:
                runs, promises = folder / f"runs-{number // ROUNDS_OF_A_FOLDER}", Promises()
            try:
                counts += round_in(smith, runs, promises, choose)
                if number == count - 1 or (number + 1) % ROUNDS_OF_A_FOLDER == 0:
                    counts += check(runs, promises, choose, is_last=True)
                    shutil.rmtree(runs)
                    sys.stderr.write(f"after {number + 1} rounds: {dict(counts)}\n")
            except BaseException as exc:
                exc.add_note(
                    f"round {number} of seed {seed}, in {runs}, {promises.doing}; so far"
                    f" {dict(counts)}\n{smith.errors()[-4000:]}"
                )
                raise
    return counts


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; what has failed is left there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # each round says which branches went back
    logging.getLogger("datastates").setLevel(logging.ERROR)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="crashes-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    counts = drive(folder, given.count, seed=given.seed)
    for name, number in sorted(counts.items()):
        sys.stdout.write(f"{number:8d}  {name}\n")
    sys.stdout.write(f"{time.monotonic() - began:8.0f}  seconds\n")
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
