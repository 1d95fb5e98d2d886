"""Kills of an S3 server and of trainings that copy their states there: every state that the lineage
calls ``external`` restores from the bucket alone.

    python -m tests.drivers.external --count 50 --what server
    python -m tests.drivers.external --count 50 --what training --seed 5
    python -m tests.drivers.external --seconds 1200    # one training with a slow tier

In each round, a training makes every state durable. The S3 server is killed or stopped at a random
moment, or the training is killed. ``--what both`` does both. Then the server runs again. Each new
external state is loaded with a copy of the lineage and without local packs. Each other state on the
tier is read completely.

Then the repository is opened again, until it has copied what is left. Each state that was durable
is external by then, or the log names it as dropped. All external states are loaded. The next round
resumes the training, sometimes without its local packs. After ``ROUNDS_OF_A_FOLDER`` rounds a new
folder begins. Folders alternate between ``Config(tiers=[url])`` and ``packs=url``.

``--seconds`` trains without kills, with a tier that takes about one state of five. The disk is full
for a moment in the middle, so the log has to name states that were dropped.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import datastates
from datastates import Config, Repository, Status
from datastates.errors import DatastatesError
from datastates.maintenance import keeper
from datastates.storage.remote import tier_of_url
from datastates.storage.tier import Tier
from datastates.testing import FaultyDisk
from tests.support.dying import Say
from tests.support.forge import Forge, Job, forge
from tests.support.stores import S3Server, s3_server

ROUNDS_OF_A_FOLDER = 3
STEPS = 16
"""The steps of a training that nobody kills."""

TENSORS = {"large": (2 << 20, 5), "medium": (1 << 20, 3), "small": (30_000, 1), "still": (9_000, 0)}
"""The numbers in each tensor, and after how many steps it changes. A pack with ``large`` exceeds 8
MiB, so it is a multipart upload."""

STEPS_PER_S = 2
"""How many steps a second the training with a slow tier makes."""

_DRAIN_S = 120.0
"""Copies of the states of one training that take longer on a healthy server are an anomaly."""

_DROPPED = re.compile(r"state (\w+) left the disk before it was copied to the s3 tier")


@dataclass(frozen=True, slots=True)
class Place:
    """A repository with a tier in a bucket. With ``is_bucket``, its packs are there."""

    folder: str
    url: str
    seed: int
    is_bucket: bool

    @property
    def packs(self) -> Path:
        """The local packs."""
        return Path(self.folder) / "packs"

    def open(self, bytes_per_s: int | None = None) -> Repository:
        """Open it. ``bytes_per_s`` limits the copies."""
        config = Config(
            memory_bytes=256 << 20,
            durable_every=1,
            durable_interval_s=None,
            retention="latest:1",
            copy_bytes_per_s=bytes_per_s,
        )
        if self.is_bucket:
            return datastates.open(self.folder, packs=self.url, scratch=self.packs, config=config)
        return datastates.open(self.folder, config=replace(config, tiers=[self.url]))


@dataclass
class Report:
    """What was done, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    anomalies: list[str] = field(default_factory=list)
    longest_close_s: float = 0.0
    durable: dict[str, int] = field(default_factory=dict)
    """The steps of the states of the current folder that were said to be durable."""

    fates: dict[str, str] = field(default_factory=dict)
    """What became of each state that was said to be durable."""

    loaded: set[str] = field(default_factory=set)

    def hear(self, line: str) -> None:
        """Take note of a line of a training."""
        match line.split():
            case ["begin", step]:
                newest = max(self.durable.values(), default=0)
                if int(step) < newest:
                    self.note(f"a training resumed at step {step}, and step {newest} was durable")
            case ["durable", uid, step]:
                self.durable[uid] = int(step)
            case ["closed", seconds]:
                self.longest_close_s = max(self.longest_close_s, float(seconds))
            case _:
                self.note(f"a training said {line!r}")

    def note(self, anomaly: str) -> None:
        """Take note of an anomaly."""
        self.counts["ANOMALIES"] += 1
        self.anomalies.append(anomaly)
        sys.stderr.write(f"ANOMALY: {anomaly}\n")


def value(name: str, seed: int, step: int) -> torch.Tensor:
    """A tensor at a step."""
    count, every = TENSORS[name]
    changed = step - step % every if every else 0
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed} {changed}".encode()))
    return torch.rand(count, generator=generator)


def model_at(seed: int, step: int) -> torch.nn.ParameterDict:
    """The model at a step."""
    return torch.nn.ParameterDict(
        {
            name: torch.nn.Parameter(value(name, seed, step), requires_grad=every > 0)
            for name, (_, every) in TENSORS.items()
        }
    )


def train(
    place: list[object], steps: int, say: Say, pause_s: float = 0.0, bytes_per_s: int | None = None
) -> None:
    """Train on from the newest state. With a pause after each step, the disk is full once."""
    faulthandler.enable()
    torch.set_num_threads(1)
    keeper.LEAST_S = 0.3
    at = Place(*place)  # type: ignore[arg-type]  # it passed through JSON
    with at.open(bytes_per_s) as repo:
        model = model_at(at.seed, 0)
        run = repo.track(model=model, rng=False)
        begin = run.resumed_from.step if run.resumed_from is not None else 0
        assert _is_at(dict(model), at.seed, begin), f"resumed with other values than at {begin}"
        say("begin", begin)
        for step in range(begin + 1, begin + steps + 1):
            with torch.no_grad():
                for name, parameter in model.items():
                    parameter.copy_(value(name, at.seed, step))
            is_full = pause_s > 0 and step == steps // 2
            with FaultyDisk(at.packs) if is_full else nullcontext() as disk:
                if disk is not None:
                    disk.fail(errno.ENOSPC)
                capture = run.capture(step=step)
                threading.Event().wait(pause_s)
            say("durable", capture.wait("durable").uid, step)
        began = time.monotonic()
        run.close()
        say("closed", time.monotonic() - began)


def _is_at(tree: dict[str, torch.Tensor], seed: int, step: int) -> bool:
    return tree.keys() == TENSORS.keys() and all(
        torch.equal(tensor, value(name, seed, step)) for name, tensor in tree.items()
    )


# --- what has to be there afterwards


def check(place: Place, report: Report, *, is_all: bool = True) -> None:
    """Load external states from the bucket alone, and read each other state that is visible there.

    Without ``is_all``, only those are loaded that were not before."""
    alone = replace(place, folder=f"{place.folder}-alone")
    shutil.copytree(place.folder, alone.folder, ignore=shutil.ignore_patterns("packs"))
    external = set[str]()
    with alone.open() as repo:
        for state in repo.find("step >= 0"):
            if state.status is not Status.EXTERNAL:
                continue
            external.add(state.uid)
            if state.uid in report.loaded and not is_all:
                continue
            report.counts["external states loaded from the bucket alone"] += 1
            try:
                if not _is_at(repo.load(state.uid)["model"], place.seed, state.step):
                    report.note(f"external state {state.uid} has other values")
            except DatastatesError as exc:
                report.note(f"external state {state.uid} does not restore: {exc}")
    tier = tier_of_url(place.url)
    for uid in set(tier.uids()) - external:
        _read(tier, uid, report)
    tier.close()
    report.loaded |= external
    shutil.rmtree(alone.folder)


def _read(tier: Tier, uid: str, report: Report) -> None:
    report.counts["states on the tier before the lineage said so"] += 1
    try:
        with tier.open(uid) as reader:
            for index in range(len(reader.manifest.content.chunks)):
                reader.chunk(index)  # compares it with its digest
    except DatastatesError as exc:
        report.note(f"state {uid} is visible on the tier, and damaged: {exc}")


def drain(place: Place, report: Report, smith: Forge, patience_s: float = _DRAIN_S) -> None:
    """Open the repository with a healthy server until it has copied what is left."""
    deadline = time.monotonic() + patience_s
    with place.open() as repo, repo.track(model=model_at(place.seed, 0), rng=False) as run:
        left = before = len(_waiting(repo))
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = len(_waiting(repo))
        if left:
            report.note(f"{left} states wait for {patience_s:.0f} s: {repo.trouble}")
        report.counts["states copied by a later opening"] += before - left
        began = time.monotonic()
        run.close()
        report.longest_close_s = max(report.longest_close_s, time.monotonic() - began)
        dropped = set(_DROPPED.findall(smith.errors()))
        for uid in report.durable:
            status = repo.state(uid).status
            if status is Status.EXTERNAL:
                report.fates[uid] = "on the tier"
            elif status is Status.DURABLE:
                report.fates[uid] = "waiting"
            elif uid in dropped:
                report.fates[uid] = "dropped by name"
            else:
                report.fates[uid] = "lost without a word"
                report.note(f"state {uid} was durable, and is {status}")


def _waiting(repo: Repository) -> list[str]:
    return [state.uid for state in repo.find("step >= 0") if state.status is Status.DURABLE]


# --- rounds


def round_in(
    smith: Forge, server: S3Server, place: Place, choose: random.Random, what: str, report: Report
) -> None:
    """One training, one kill, and what it leaves."""
    if choose.random() < 1 / 4:
        shutil.rmtree(place.packs, ignore_errors=True)
        report.counts["trainings resumed without local packs"] += 1
    job = smith.start("tests.drivers.external:train", place=_plain(place), steps=STEPS)
    for _ in range(choose.randrange(1, STEPS)):
        if line := job.lines.readline():
            report.hear(line)
    _pause(choose, most_s=0.3)
    if what != "training":
        _hinder(server, choose, report)
    if what != "server":
        job.kill(signal.SIGKILL)
        report.counts["kills of a training"] += 1
    _end(job, smith, report, is_killed=what != "server")
    server.heal()
    check(place, report, is_all=False)
    drain(place, report, smith)
    check(place, report)


def _plain(place: Place) -> list[object]:
    return [place.folder, place.url, place.seed, place.is_bucket]


def _hinder(server: S3Server, choose: random.Random, report: Report) -> None:
    """Kill or stop the server. In two cases of three it continues soon."""
    act = choose.choice(("kill", "stop"))
    getattr(server, act)()
    _pause(choose, most_s=2.0)
    if choose.random() < 2 / 3:
        server.heal()
    else:
        act += " until the training ended"
    report.counts[f"server: {act}"] += 1


def _pause(choose: random.Random, most_s: float) -> None:
    threading.Event().wait(most_s * 10 ** choose.uniform(-3, 0))


def _end(job: Job, smith: Forge, report: Report, *, is_killed: bool = False) -> None:
    for line in job.say():
        report.hear(line)
    code = job.wait()
    if code != (-signal.SIGKILL if is_killed else 0):
        report.note(f"a training ended with {code}:\n{smith.errors()[-4000:]}")


def drive(folder: Path, server: S3Server, count: int, *, what: str, seed: int = 0) -> Report:
    """So many rounds: what was done. The environment names the server."""
    choose, report, bucket = random.Random(seed), Report(), server.bucket(f"external-{seed}")
    with forge(folder, ["tests.drivers.external"]) as smith:
        for number in range(count):
            of_folder, is_later = divmod(number, ROUNDS_OF_A_FOLDER)
            if not is_later:
                name = f"{what}-{of_folder}"
                place = Place(str(folder / name), f"{bucket}/{name}", of_folder, of_folder % 2 == 1)
                report.durable.clear()
            round_in(smith, server, place, choose, what, report)
            report.counts["rounds"] += 1
            sys.stderr.write(f"after {number + 1} rounds: {dict(report.counts)}\n")
    return report


def drive_slowly(folder: Path, server: S3Server, seconds: float) -> Report:
    """One training without kills, with a tier that takes about one state of five."""
    report, url = Report(), f"{server.bucket('external-slowly')}/run"
    place, steps = Place(str(folder / "run"), url, 0, False), int(seconds * STEPS_PER_S)
    mean_bytes = sum(4 * count / every for count, every in TENSORS.values() if every)
    with forge(folder, ["tests.drivers.external"]) as smith:
        options = {
            "steps": steps,
            "pause_s": 1 / STEPS_PER_S,
            "bytes_per_s": int(mean_bytes * STEPS_PER_S / 5),
        }
        _end(
            smith.start("tests.drivers.external:train", place=_plain(place), **options),
            smith,
            report,
        )
        drain(place, report, smith, patience_s=_DRAIN_S + seconds)
        check(place, report)
    return report


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--what", choices=("server", "training", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="one training with a slow tier, no kills")
    parser.add_argument("--folder", type=Path, help="where to work; everything is left there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("datastates").setLevel(logging.ERROR)
    folder, began = given.folder or Path(tempfile.mkdtemp(prefix="external-")), time.monotonic()
    with s3_server(folder / "server") as server:
        os.environ.update(server.environment())
        if given.seconds is None:
            report = drive(folder, server, given.count, what=given.what, seed=given.seed)
        else:
            report = drive_slowly(folder, server, given.seconds)
    fates = Counter(f"states that became durable: {fate}" for fate in report.fates.values())
    for name, number in sorted((report.counts + fates).items()):
        sys.stdout.write(f"{number:8d}  {name}\n")
    sys.stdout.write(f"{report.longest_close_s:8.1f}  seconds, the longest run.close()\n")
    sys.stdout.write(f"{time.monotonic() - began:8.0f}  seconds\n")
    if given.folder is None and not report.anomalies:
        shutil.rmtree(folder)
    sys.exit(1 if report.anomalies else 0)


if __name__ == "__main__":
    main()
