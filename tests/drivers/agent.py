"""Kills of trainings, of their agent, and of processes that take memory over: what was captured
with ``Config(agent="process")`` is still there.

    python -m tests.drivers.agent --count 300 --what training --seed 5
    python -m tests.drivers.agent --count 100 --what agent
    python -m tests.drivers.agent --count 50 --what takeover

In each round, a training captures states, and is killed at a random moment. The next training must
continue from the newest state that was reported as captured. It loads every state that the lineage
calls restorable, and compares the values with those of the step. The newest ``SURELY_KEPT`` states
must be whole, and no state may be lost.

- ``training``: one start in five does not come. The process that holds the memory settles then, and
  an inline repository must find the branch at the same state. Heads and tags must be durable.
- ``agent``: the agent is killed first. The training must continue, and report everything to a new
  agent within ``GUARDED_AGAIN_S``.
- ``takeover``: the agent is killed soon after the training. If nothing took the memory over yet,
  the branch must be at a durable state. In half of the rounds, the next training is killed while it
  starts. ``--at`` chooses where.

After ``ROUNDS_OF_A_FOLDER`` rounds, a training closes the repository in order, and a new folder
begins. At the end, no process of the agent and no shared memory may be left. The agent has a folder
of sockets of its own, so other agents of the user do not matter.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

import datastates
from datastates import Config, Repository, State, Status
from datastates.agent import client as agent_client
from datastates.agent.messages import FOLDER, AgentStatus, AskStatus, agent_address, ask
from datastates.errors import DatastatesError, Unavailable
from datastates.lineage.write import runs
from datastates.maintenance import attach, keeper
from datastates.training import start
from tests.support.dying import Say
from tests.support.forge import Forge, Job, forge

ROUNDS_OF_A_FOLDER = 6

MOST_CAPTURES = 30
"""The most captures of a training before it is killed. Memory holds about a third of them."""

MEMORY_BYTES = 96 << 20

TENSORS = {"large": (1 << 20, 1), "medium": (600_000, 3), "small": (30_000, 1), "still": (9_000, 0)}
"""The numbers in each tensor, and after how many steps it changes."""

SURELY_KEPT = 5
"""So many of the newest states fit into ``MEMORY_BYTES`` in every case."""

GUARDED_AGAIN_S = 10.0
"""How long after the death of its agent a training may be unguarded, in seconds."""

KILL_POINTS = ("random", "engaged", "handing", "handed", "released", "restoring", "tracked")
"""Where a training that attaches is killed. ``engaged`` is before the transaction that gives it the
states, ``handing`` in it, and ``handed`` after it. ``restoring`` is before it is on the branch, and
``tracked`` after that."""

_HANG_S = 240.0
_LEFT_S = 15.0
_LINGERS_S = 90.0
_SHMEM_NOTED, _SHMEM_MOST = 64 << 20, 256 << 20
_MOST_ANOMALIES = 5
_CLONE_STEPS = 1_000_000

_AGENT, _TAKEOVER = "datastates.agent.server", "datastates.maintenance.takeover"


# --- the training


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


def _is_at(tree: dict[str, torch.Tensor], seed: int, step: int) -> bool:
    return tree.keys() == TENSORS.keys() and all(
        torch.equal(tensor, value(name, seed, step)) for name, tensor in tree.items()
    )


def config(mode: str) -> Config:
    """The settings of a training. Every third state becomes durable."""
    return Config(
        memory_bytes=MEMORY_BYTES,
        durable_every=3,
        durable_interval_s=None,
        retention="latest:3",
        agent=mode,  # type: ignore[arg-type]  # the text is accepted too
    )


def train(
    folder: str, seed: int, choice: int, say: Say, steps: int | None = None, die_at: str = ""
) -> None:
    """Train on from the newest state, once every state was read. ``die_at`` is a ``KILL_POINTS``.
    Without ``steps``, continue until somebody ends it."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(_HANG_S, exit=True)
    torch.set_num_threads(1)
    keeper.LEAST_S = 0.3
    if die_at not in ("", "random"):
        _die_at(die_at)
    with datastates.open(folder, config=config("process")) as repo:
        training = _Training(repo, folder, seed, random.Random(choice), say)
        training.begin()
        while steps is None or training.step < training.first + steps:
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            training.act()
    say("closed")


@dataclass
class _Training:
    repo: Repository
    folder: str
    seed: int
    choose: random.Random
    say: Say
    first: int = 0
    step: int = 0

    def begin(self) -> None:
        """Track the branch, and read every state."""
        self.model = model_at(self.seed, 0)
        self.say("tracking")
        self.run = self.repo.track(model=self.model, rng=False)
        origin = self.run.resumed_from
        self.first = self.step = 0 if origin is None else origin.step
        is_equal = _is_at(dict(self.model), self.seed, self.step)
        status = "-" if origin is None else origin.status.value
        self.say("begin", self.step, status, "equal" if is_equal else "different")
        read_all(self.repo, self.seed, self.say)

    def act(self) -> None:
        """Make a step, capture it, and now and then do something with it."""
        self.step += 1
        with torch.no_grad():
            for name, parameter in self.model.items():
                parameter.copy_(value(name, self.seed, self.step))
        capture = self.run.capture(step=self.step)
        state = capture.wait("captured")
        self.say("captured", state.uid, state.digest, state.step)
        act = self.choose.random()
        if act < 1 / 8:
            self._tag(state)
        elif act < 2 / 8:
            self.say("durable", capture.wait("durable").uid)
        elif act < 2 / 8 + 1 / 24:
            self._clone()

    def _tag(self, state: State) -> None:
        name = f"tag-{state.uid}"
        self.say("tagging", name, state.uid)
        self.repo.tag(name, state)
        self.say("tag", name, state.uid)

    def _clone(self) -> None:
        """Bring a state of another repository into memory."""
        step = _CLONE_STEPS + self.choose.randrange(1 << 20)
        with tempfile.TemporaryDirectory() as folder:
            with datastates.open(folder, config=config("inline")) as other:
                model = model_at(self.seed, step)
                run = other.track(model=model, rng=False)
                state = run.capture(step=step).wait("captured")
                server = other.serve("tcp://127.0.0.1:0")
                with datastates.connect(server.url) as peer:
                    peer.clone(state.uid, repo=self.repo)
            self.say("cloned", state.uid, state.digest, state.step)
            if self.choose.random() < 1 / 2:
                self._tag(state)


def inspect(folder: str, seed: int, say: Say) -> None:
    """Read every state without an agent."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(_HANG_S, exit=True)
    torch.set_num_threads(1)
    with datastates.open(folder, config=config("inline")) as repo:
        head = repo.state("main")
        say("begin", head.step, head.status.value, "equal")
        read_all(repo, seed, say)


def read_all(repo: Repository, seed: int, say: Say) -> None:
    """Load every state that can be restored, and report each state and name."""
    for state in repo.find("step >= 0"):
        status, verdict = state.status, "-"
        if status.is_restorable:
            verdict = _verdict(repo, state, seed)
            if verdict != "equal" and not repo.state(state.uid).status.is_restorable:
                status, verdict = repo.state(state.uid).status, "-"  # retention dropped it
        say("state", state.uid, state.digest, state.step, status.value, verdict)
    for ref in repo.refs():
        say("ref", ref.name, ref.state)
    say("checked")


def _verdict(repo: Repository, state: State, seed: int) -> str:
    try:
        if not _is_at(repo.load(state.uid)["model"], seed, state.step):
            return "other values"
        repo.verify(state.uid)
    except DatastatesError as exc:
        return f"{type(exc).__name__}: {exc}".replace("\n", " ")
    return "equal"


def _die_at(point: str) -> None:
    """End this process at a point of its start."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_after(call: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> None:
            call(*arguments, **options)
            die()

        return called

    owner, name, is_after = {
        "engaged": (runs, "hand_over", False),
        "handing": (runs, "hand_over", True),
        "handed": (attach.LeftMemory, "release", False),
        "released": (attach.LeftMemory, "release", True),
        "restoring": (start, "restore_start", False),
        "tracked": (agent_client.AgentClient, "track", True),
    }[point]
    setattr(owner, name, dying_after(getattr(owner, name)) if is_after else die)


# --- what has to be there


@dataclass
class Book:
    """What the trainings of a folder have reported."""

    folder: str
    seed: int
    survives: str = "memory"
    """What the next process must find: ``memory``, what was ``settled``, or what is ``durable``."""

    captured: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The digest and the step of each state on the branch, oldest first."""

    cloned: dict[str, tuple[str, int]] = field(default_factory=dict)
    on_disk: set[str] = field(default_factory=set)
    """States that are in no memory: retention may remove the old ones of them."""

    durable: dict[str, None] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    begun: tuple[int, str] = (0, "-")
    found: dict[str, tuple[str, int, Status, str]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The newest step that was reported."""
        return max((step for _, step in self.captured.values()), default=0)


@dataclass
class Report:
    """What was done, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    anomalies: list[str] = field(default_factory=list)
    most_s: dict[str, float] = field(default_factory=dict)
    """The longest time that something took, in seconds."""

    @property
    def is_full(self) -> bool:
        """Whether enough went wrong."""
        return len(self.anomalies) >= _MOST_ANOMALIES

    def note(self, anomaly: str) -> None:
        """Take note of an anomaly."""
        self.counts["ANOMALIES"] += 1
        self.anomalies.append(anomaly)
        sys.stdout.write(f"ANOMALY: {anomaly}\n")
        sys.stdout.flush()

    def took(self, what: str, seconds: float) -> None:
        """Take note of a time."""
        self.most_s[what] = max(self.most_s.get(what, 0.0), seconds)

    def hear(self, book: Book, line: str) -> str:
        """Take note of a line of a process; returns its first word."""
        match line.split(maxsplit=5):
            case ["tracking" | "closed"]:
                pass
            case ["begin", step, status, verdict]:
                book.begun = int(step), status
                book.found.clear()
                book.refs.clear()
                if verdict != "equal":
                    self.note(f"the objects have other values than at step {step}")
            case ["state", uid, digest, step, status, verdict]:
                book.found[uid] = digest, int(step), Status(status), verdict
            case ["ref", name, uid]:
                book.refs[name] = uid
            case ["checked"]:
                compare(book, self)
            case ["captured", uid, digest, step]:
                book.captured[uid] = digest, int(step)
            case ["cloned", uid, digest, step]:
                book.cloned[uid] = digest, int(step)
            case ["durable", uid]:
                book.durable[uid] = None
            case ["tagging", name, uid]:
                book.tags.pop(name, None)
            case ["tag", name, uid]:
                book.tags[name] = uid
            case _:
                self.note(f"a process said {line!r}")
        return line.split(maxsplit=1)[0]


def compare(book: Book, report: Report) -> None:
    """Compare what a process found with what had to be there."""
    counts, begun = report.counts, book.begun[0]
    least = max(
        (
            step
            for uid, (_, step) in book.captured.items()
            if book.survives != "durable" or uid in book.durable
        ),
        default=0,
    )
    if begun < least:
        report.note(f"step {least} was {book.survives}, and the branch is at step {begun}")
    counts[f"found {book.survives}"] += 1
    for uid, (digest, step, status, verdict) in book.found.items():
        counts[f"states found {status}"] += 1
        if verdict not in ("-", "equal"):
            report.note(f"state {uid} (step {step}, {status}): {verdict}")
        counts["states loaded"] += verdict == "equal"
        known = book.captured.get(uid) or book.cloned.get(uid)
        if known is not None and known != (digest, step):
            report.note(f"state {uid} was {known}, and is {(digest, step)}")
    _compare_promises(book, report)
    # what is lost now was lost before
    for uid, (_, _, status, _) in book.found.items():
        if status is Status.LOST:
            book.captured.pop(uid, None)
            book.cloned.pop(uid, None)
            for name in [name for name, named in book.tags.items() if named == uid]:
                del book.tags[name]
    if book.survives != "memory":
        book.on_disk.update(book.captured)
    if book.survives == "settled":  # the rest is in no memory any more
        keep = {uid for uid, found in book.found.items() if found[2].is_restorable}
        book.captured = {uid: known for uid, known in book.captured.items() if uid in keep}
        book.cloned = {uid: known for uid, known in book.cloned.items() if uid in keep}
    book.survives = "memory"


def _compare_promises(book: Book, report: Report) -> None:
    in_memory = book.captured.keys() - book.on_disk
    by_step = sorted(in_memory, key=lambda uid: -book.captured[uid][1])
    pinned = set(book.tags.values())
    if book.survives == "memory":
        pinned |= set(by_step[:SURELY_KEPT])
    if book.survives == "durable":
        pinned = {uid for uid in pinned if uid in book.durable}
    for uid in {*book.captured, *book.cloned}:
        if uid not in book.found:
            report.note(f"state {uid}, which was captured, is not in the lineage")
            continue
        _, step, status, _ = book.found[uid]
        if status is Status.LOST and book.survives == "memory":
            report.note(f"state {uid} (step {step}) was captured, and is lost")
        elif not status.is_restorable and uid in pinned:
            report.note(f"state {uid} (step {step}) is {status}, and had to be kept")
        elif not status.is_restorable:
            report.counts[f"reported states that are {status}"] += 1
    for name, uid in book.tags.items():
        if book.refs.get(name) != uid:
            report.note(f"tag {name} is at {book.refs.get(name)}")
    if book.survives == "settled":
        # a tag that is not in the book was cut off, or its state died with an agent before
        for name, uid in book.refs.items():
            if book.found[uid][2] is not Status.DURABLE and name in {"main", *book.tags}:
                report.note(f"{name} is at {uid}, which is {book.found[uid][2]}")


# --- processes of the agent


def processes(module: str) -> dict[int, str]:
    """The processes of a module of this driver's agent, each with its last words of the command."""
    mine, found = f"{FOLDER}={os.environ[FOLDER]}".encode(), dict[int, str]()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if module.encode() in words and mine in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = words[words.index(module.encode()) + 1].decode()
    return found


def status() -> AgentStatus | None:
    """What the agent guards; None if there is none."""
    try:
        return ask(agent_address(), AskStatus(), AgentStatus)
    except DatastatesError:
        return None


def await_guard(pid: int, report: Report, after: int = 0) -> float:
    """Wait until an agent other than ``after`` guards a training; returns how long that took."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < 60.0:
        found = status()
        if found is not None and found.pid != after:
            guarded = [each for each in found.memories if each.pid == pid]
            if guarded and (guarded[0].states or not after):
                return seconds
        time.sleep(0.02)
    report.note(f"no agent guards the training for 60 s: {status()}")
    return seconds


def kill_agent(report: Report) -> int:
    """Kill the agent; returns its process id, or 0 if there is none."""
    found = status()
    if found is None:
        return 0
    os.kill(found.pid, signal.SIGKILL)
    report.counts["kills of an agent"] += 1
    return found.pid


def await_takeovers(before: set[int]) -> dict[int, str]:
    """The processes that have taken a memory over since ``before``, once the killed agent and each
    child of it that does not run its own program yet are gone."""
    deadline = time.monotonic() + 30.0
    while processes(_AGENT) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {pid: address for pid, address in processes(_TAKEOVER).items() if pid not in before}


def settle(report: Report) -> bool:
    """Have every process that holds a memory settle now; returns whether there was one."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        found = status()
        # a process that has just begun its program has no command line for a moment
        if not processes(_AGENT) or (
            found is not None
            and not found.memories
            and set(found.takeovers) <= set(processes(_TAKEOVER).values())
        ):
            break  # all are handed over
        time.sleep(0.02)
    else:
        report.note(f"the agent still guards after 30 s: {status()}")
    began, held = time.monotonic(), processes(_TAKEOVER)
    for pid, address in held.items():
        while time.monotonic() < began + 30.0 and pid in processes(_TAKEOVER):
            try:
                ask(address, AskStatus(), AgentStatus)
            except Unavailable:  # it does not listen yet
                time.sleep(0.02)
            else:
                break
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while left := set(held) & set(processes(_TAKEOVER)):
        if time.monotonic() > began + _LINGERS_S:
            report.note(f"processes {left} do not settle: {[_trouble(held[pid]) for pid in left]}")
            break
        time.sleep(0.02)
    report.took("a settling", time.monotonic() - began)
    return bool(held)


def _trouble(address: str) -> str:
    try:
        return ask(address, AskStatus(), AgentStatus).memories[0].trouble
    except DatastatesError as exc:
        return str(exc)


def end_all() -> None:
    """Kill every process of this driver's agent."""
    for pid in (*processes(_AGENT), *processes(_TAKEOVER)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shared_bytes() -> int:
    """The shared memory of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


# --- rounds


@dataclass
class Driver:
    """Starts and kills the processes of rounds."""

    smith: Forge
    choose: random.Random
    report: Report
    what: str
    at: str | None = None

    def start(self, book: Book, **options: object) -> Job:
        """Start a training."""
        return self.smith.start(
            "tests.drivers.agent:train",
            folder=book.folder,
            seed=book.seed,
            choice=self.choose.randrange(1 << 30),
            **options,
        )

    def hear_until(self, job: Job, book: Book, word: str) -> bool:
        """Hear a job until it says this; returns False if it ends before that."""
        while line := job.lines.readline():
            if self.report.hear(book, line.strip()) == word:
                return True
        return False

    def end(self, job: Job, book: Book, *, code: int) -> bool:
        """Hear the rest of a job; returns whether it ended with this code."""
        for line in job.say():
            self.report.hear(book, line)
        found = job.wait()
        if found != code:
            errors = self.smith.errors()[-3000:]
            self.report.note(f"a process ended with {found} in {book.folder}:\n{errors}")
        return found == code

    def kill(self, job: Job, book: Book) -> bool:
        """Kill a training."""
        job.kill(signal.SIGKILL)
        self.report.counts["kills of a training"] += 1
        return self.end(job, book, code=-signal.SIGKILL)

    def pause(self, most_s: float) -> None:
        """Wait for a random time."""
        time.sleep(most_s * 10 ** self.choose.uniform(-3, 0))

    def round_in(self, book: Book) -> str:
        """Start a training, kill something, and say what was done. Empty if the folder is broken."""
        began, stale = time.monotonic(), set(processes(_TAKEOVER))
        promised, survives = book.newest, book.survives
        job = self.start(book)
        if not self.hear_until(job, book, "checked"):
            self.end(job, book, code=0)
            return ""
        self.report.took("a start with all its checks", time.monotonic() - began)
        await_guard(job.pid, self.report)
        said = (
            f"resumed at step {book.begun[0]} ({book.begun[1]}), promised {promised} ({survives})"
        )
        stale &= set(processes(_TAKEOVER))
        for number in range(self.choose.randrange(1, MOST_CAPTURES)):
            if not self.hear_until(job, book, "captured"):
                break
            if stale and number == 12:
                said += f", {len(stale)} former holders settle"
                self.report.counts["former holders that settled"] += len(stale)
                for pid in stale:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
        said += f", {len(book.captured)} captured"
        if self.what == "agent":
            said += self._lose_agent(job, book)
        self.pause(0.1)
        return said + self._kill(job, book)

    def _lose_agent(self, job: Job, book: Book) -> str:
        """Kill the agent of a training, which must continue and be guarded again."""
        before, step = kill_agent(self.report), book.newest
        began = time.monotonic()
        for _ in range(3):
            if not self.hear_until(job, book, "captured"):
                self.report.note(f"the training ends after step {step} with its agent")
        self.report.took("three captures without an agent", time.monotonic() - began)
        await_guard(job.pid, self.report, before)
        seconds = time.monotonic() - began
        self.report.took("without an agent", seconds)
        if seconds > GUARDED_AGAIN_S:
            self.report.counts["trainings unguarded for more than 10 s"] += 1
        for _ in range(self.choose.randrange(4)):
            self.hear_until(job, book, "captured")
        return f", guarded again after {seconds:.1f} s"

    def _kill(self, job: Job, book: Book) -> str:
        before = set(processes(_TAKEOVER))
        if self.what != "takeover":
            if not self.kill(job, book):
                return ""
            is_settled = self.what == "training" and self.choose.random() < 1 / 5
            return self._settle(book) if is_settled else ", killed"
        job.kill(signal.SIGKILL)
        self.report.counts["kills of a training"] += 1
        time.sleep(self.choose.choice((0.05, 0.5)) * self.choose.random())
        killed = kill_agent(self.report)
        if not self.end(job, book, code=-signal.SIGKILL):
            return ""
        if killed:
            held = await_takeovers(before)
        else:
            held = {}
            self.report.note("there is no agent")
        book.survives = "memory" if held else "durable"
        said = f", killed with its agent ({'taken over' if held else 'too early'})"
        if held and (self.at or self.choose.random() < 1 / 2):
            said += self._kill_start(book)
        return said

    def _settle(self, book: Book) -> str:
        """Nobody comes: what must not be lost becomes durable."""
        book.survives = "settled" if settle(self.report) else "memory"
        job = self.smith.start("tests.drivers.agent:inspect", folder=book.folder, seed=book.seed)
        self.report.counts["settled"] += 1
        return ", killed and settled" if self.end(job, book, code=0) else ""

    def _kill_start(self, book: Book) -> str:
        """Kill a training while it attaches."""
        point = self.at or self.choose.choice(KILL_POINTS)
        job = self.start(book, die_at=point)
        if point == "random":
            self.hear_until(job, book, "tracking")
            self.pause(2.0)
            job.kill(signal.SIGKILL)
        self.report.counts[f"kills of a start: {point}"] += 1
        return f", then a start killed ({point})" if self.end(job, book, code=-9) else ""

    def finish(self, book: Book) -> None:
        """A training closes the repository in order, and all is read again."""
        self.end(self.start(book, steps=2), book, code=0)
        book.survives = "settled"
        job = self.smith.start("tests.drivers.agent:inspect", folder=book.folder, seed=book.seed)
        self.end(job, book, code=0)


def drive(folder: Path, count: int, *, what: str, seed: int = 0, at: str | None = None) -> Report:
    """So many rounds: what was done. The environment names a folder for the agent's sockets."""
    choose, report, before = random.Random(seed), Report(), shared_bytes()
    with forge(folder, ["tests.drivers.agent"]) as smith:
        driver, book, number = Driver(smith, choose, report, what, at), None, 0
        for number in range(count):
            if book is None or number % ROUNDS_OF_A_FOLDER == 0:
                if book is not None:
                    driver.finish(book)
                book = Book(str(folder / f"{what}-{number}"), seed + number)
            began, anomalies = time.monotonic(), len(report.anomalies)
            said = driver.round_in(book)
            seconds = time.monotonic() - began
            sys.stdout.write(f"round {number + 1} ({seconds:.1f} s): {said or 'broken'}\n")
            sys.stdout.flush()
            report.counts["rounds"] += 1
            if len(report.anomalies) > anomalies:
                sys.stdout.write(f"  in {book.folder}, --what {what} --seed {seed}\n")
                end_all()
                book = None  # what is broken stays broken
            if report.is_full:
                break
        if book is not None:
            driver.finish(book)
    check_end(report, before)
    end_all()
    return report


def check_end(report: Report, shared_before: int) -> None:
    """No process of the agent is left soon after the last training, and no memory."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < _LINGERS_S:
        left = processes(_AGENT) | processes(_TAKEOVER)
        if not left:
            break
        if seconds > _LEFT_S:
            report.counts["processes left after 15 s"] = max(
                report.counts["processes left after 15 s"], len(left)
            )
        time.sleep(0.1)
    else:
        for pid, address in (processes(_AGENT) | processes(_TAKEOVER)).items():
            report.note(f"process {pid} is left: {_trouble(address or agent_address())}")
    report.took("until every process had ended", seconds)
    grown = shared_bytes() - shared_before
    report.counts["MiB of shared memory more than before"] = grown >> 20
    if grown > _SHMEM_MOST:
        report.note(f"{grown >> 20} MiB of shared memory more than before")
    elif grown > _SHMEM_NOTED:
        sys.stdout.write(f"shared memory has grown by {grown >> 20} MiB\n")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--what", choices=("training", "agent", "takeover"), default="training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at", choices=KILL_POINTS, help="where a training that attaches is killed"
    )
    parser.add_argument("--folder", type=Path, help="where to work; everything is left there")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("datastates").setLevel(logging.ERROR)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="agent-"))
    sockets, began = tempfile.mkdtemp(prefix="ag-", dir="/tmp"), time.monotonic()
    os.environ[FOLDER] = sockets
    report = drive(folder, given.count, what=given.what, seed=given.seed, at=given.at)
    for name, number in sorted(report.counts.items()):
        sys.stdout.write(f"{number:8d}  {name}\n")
    for name, seconds in sorted(report.most_s.items()):
        sys.stdout.write(f"{seconds:8.1f}  seconds, the longest: {name}\n")
    sys.stdout.write(f"{time.monotonic() - began:8.0f}  seconds\n")
    if report.anomalies:
        sys.stdout.write(f"to reproduce: --what {given.what} --seed {given.seed}; see {folder}\n")
    elif given.folder is None:
        shutil.rmtree(folder)
        shutil.rmtree(sockets)
    sys.exit(1 if report.anomalies else 0)


if __name__ == "__main__":
    main()
