"""The agent of a node: what a training captured survives the training, whatever ends it."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import datastates
from datastates import Config, Conflict
from datastates.agent.client import PATIENCE_S
from datastates.agent.messages import (
    EMPTY,
    FOLDER,
    MOST_BYTES,
    AgentStatus,
    AskStatus,
    Ended,
    Frames,
    Holds,
    Refused,
    Register,
    Settle,
    Stop,
    agent_address,
    ask,
    connect,
    frame,
    listen,
    receive,
    send,
)
from datastates.config import AgentMode
from datastates.errors import Corrupt, InvalidInput, Unavailable
from datastates.lineage.states import Status
from tests.support import jobs
from tests.support.jobs import Say, job
from tests.support.training import digest, make, update

_WAIT_S = 20.0


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the sockets: each test has its own agent. No process of it may be left."""
    made = Path(tempfile.mkdtemp(prefix="ds-", dir="/tmp"))
    monkeypatch.setenv(FOLDER, str(made))
    yield made
    for pid in _processes(made):
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
    until(lambda: not _processes(made), "the processes of the agent end")
    shutil.rmtree(made)


def _processes(folder: Path) -> list[int]:
    """The processes of agents and takeovers whose sockets are in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        is_ours = any(
            name in command for name in (b"datastates.agent.server", b"maintenance.takeover")
        )
        if is_ours and os.fsencode(folder) in environ:
            found.append(int(path.name))
    return found


def until(is_so: Callable[[], object], what: str) -> None:
    """Wait for another process."""
    deadline = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)  # nothing reports what another process does


def status() -> AgentStatus:
    return ask(agent_address(), AskStatus(), AgentStatus)


def taken_over() -> str:
    """The address of the one process that took a memory over, once it listens."""

    def found() -> bool:
        with suppress(Unavailable):
            return bool(ask(status().takeovers[0], AskStatus(), AgentStatus, 30).memories)
        return False

    until(lambda: status().takeovers and found(), "a process takes the memory over")
    return status().takeovers[0]


def train(
    *,
    repo: str,
    steps: int,
    say: Say,
    mode: str = "process",
    branch: str = "main",
    tag_at: int = -1,
    hang: bool = False,
    seed: int | None = None,
) -> None:
    """Train, say what it resumed, and each state that is captured. ``hang``: wait to be killed."""
    model, optimizer = make()
    config = Config(agent=AgentMode(mode), memory_bytes=64 << 20, durable_interval_s=None)
    with datastates.open(repo, config=config) as repository:
        run = repository.track(model=model, optimizer=optimizer, branch=branch)
        begun = run.resumed_from
        say("from", run.step, "-" if begun is None else begun.status, digest(model, optimizer))
        for _ in range(steps):
            update(model, optimizer)
            state = run.capture(message=digest(model, optimizer)).wait("captured")
            if run.step == tag_at:
                repository.tag("kept", state)
            say("captured", state.uid, state.step, digest(model, optimizer))
        say("all")
        if hang:
            signal.pause()


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str | Path:
    """A repository whose packs are in ``tmp_path/packs``."""
    if request.param == "SQLite":
        return tmp_path
    monkeypatch.setenv("DATASTATES_PACKS", str(tmp_path / "packs"))
    return str(request.getfixturevalue("postgresql_url"))


def _killed(repo: str | Path, steps: int, **options: Any) -> list[list[str]]:
    """Train, and kill the process; what it said, in words."""
    with job(
        1, "tests.agent.test_agent:train", repo=str(repo), steps=steps, hang=True, **options
    ) as ranks:
        ranks.heard(0, "all")
        ranks.kill(0)
        ranks.wait(0)
        return [line.split() for line in ranks.lines()[0]]


def _trained(repo: str | Path, steps: int, **options: Any) -> list[list[str]]:
    said = jobs.run(1, "tests.agent.test_agent:train", repo=str(repo), steps=steps, **options)
    return [line.split() for line in said[0]]


def test_a_training_that_is_killed_continues_from_its_last_capture(url: str | Path) -> None:
    first = _killed(url, 12)
    taken_over()
    second = _killed(url, 5)
    assert second[0] == ["from", "12", "captured", first[-2][3]]
    third = _trained(url, 1)
    assert third[0] == ["from", "17", "captured", second[-2][3]]
    with datastates.open(url) as repo:
        states = repo.log("main")
        assert [state.step for state in states] == [*range(18, 0, -1)]
        assert states[0].status is Status.DURABLE
        assert not repo.verify().hurt


def test_every_state_in_memory_is_whole_after_the_kill(tmp_path: Path) -> None:
    said = {words[1]: words[3] for words in _killed(tmp_path, 12) if words[0] == "captured"}
    model, optimizer = make()
    config = Config(agent=AgentMode.PROCESS, durable_interval_s=None)
    with datastates.open(tmp_path, config=config) as repo:
        run = repo.track(model=model, optimizer=optimizer)
        assert run.step == 12
        for state in repo.log("main"):
            assert state.status is Status.CAPTURED
            repo.restore(state, model=model, optimizer=optimizer)
            assert digest(model, optimizer) == said[state.uid] == state.message
        run.restore("main~5")
        update(model, optimizer)
        run.capture().wait("durable")


def test_without_a_successor_heads_and_tags_become_durable(url: str | Path, tmp_path: Path) -> None:
    said = _killed(url, 9, tag_at=4)
    taken_over()
    with datastates.open(url) as repo:
        assert repo.state("main").status is Status.CAPTURED  # it counts as alive
        ask(status().takeovers[0], Settle(), Ended, 60)
        assert {state.step: state.status for state in repo.log("main")} == {
            step: Status.DURABLE if step in (4, 9) else Status.LOST for step in range(1, 10)
        }
        model, optimizer = make()
        for name in ("main", "kept"):
            repo.restore(name, model=model, optimizer=optimizer)
            assert digest(model, optimizer) == repo.state(name).message
        assert repo.state("main").uid == said[-2][1]
        assert not list((tmp_path / "packs" / "leases").iterdir())


def test_another_process_is_told_who_holds_the_branch(tmp_path: Path) -> None:
    _killed(tmp_path, 3)
    taken_over()
    model, optimizer = make()
    with datastates.open(tmp_path) as repo:
        with pytest.raises(Conflict, match=r"held by the agent on .* durable in \d+ s: try again"):
            repo.track(model=model, optimizer=optimizer)
        # who insists gets the states at once, from the disk
        run = repo.track(model=model, optimizer=optimizer, takeover=True)
        assert run.step == 3
        assert run.resumed_from is not None
        assert run.resumed_from.status is Status.DURABLE


def test_the_agent_is_killed_and_everything_is_reported_again(tmp_path: Path) -> None:
    with job(1, "tests.agent.test_agent:train", repo=str(tmp_path), steps=8, hang=True) as ranks:
        ranks.heard(0, "all")
        first = status()
        assert [each.states for each in first.memories] == [8]
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: _holds(8, not_by=first.pid), "another agent holds the memory")
        ranks.kill(0)
        ranks.wait(0)
    assert _trained(tmp_path, 1)[0][:3] == ["from", "8", "captured"]


def _holds(states: int, *, not_by: int) -> bool:
    try:
        found = status()
    except Unavailable:
        return False
    return found.pid != not_by and [each.states for each in found.memories] == [states]


def test_an_agent_that_does_not_read_holds_nothing_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(agent=AgentMode.PROCESS, memory_bytes=64 << 20, durable_interval_s=None)
    model, optimizer = make()
    with datastates.open(tmp_path, config=config) as repo:
        run = repo.track(model=model, optimizer=optimizer)
        run.capture().wait("captured")
        os.kill(status().pid, signal.SIGSTOP)
        began, agent = time.monotonic(), repo.core.engage().agent
        assert agent is not None
        waited = 0.0
        with caplog.at_level(logging.WARNING):
            while agent.trouble is None:
                before = time.monotonic()
                agent.want("0" * 24)
                waited = max(waited, time.monotonic() - before)
                assert time.monotonic() - began < _WAIT_S
        assert waited < PATIENCE_S + 1
        assert [
            r.getMessage() for r in caplog.records if "the agent does not read" in r.msg % r.args
        ]
        assert run.capture().wait("captured").step == 2


def test_a_process_that_closes_all_descriptors_goes_on_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(agent=AgentMode.PROCESS, memory_bytes=64 << 20, durable_interval_s=None)
    model, optimizer = make()
    with datastates.open(tmp_path, config=config) as repo:
        run = repo.track(model=model, optimizer=optimizer)
        run.capture().wait("captured")
        agent = repo.core.engage().agent
        assert agent is not None
        connection = agent._socket
        assert connection is not None
        number = connection.fileno()
        with tempfile.TemporaryFile() as other:
            os.dup2(other.fileno(), number)  # a file of somebody else's gets the number
            run.capture().wait("captured")
            assert os.fstat(number).st_size == 0
        os.close(number)
        assert agent.trouble == "something in this process has closed the socket of the agent"
        until(lambda: agent.trouble is None, "it is held again")
        assert [each.states for each in status().memories] == [2]


def test_a_forked_child_does_not_keep_the_memory(tmp_path: Path) -> None:
    config = Config(agent=AgentMode.PROCESS, memory_bytes=64 << 20, durable_interval_s=None)
    model, optimizer = make()
    with datastates.open(tmp_path, config=config) as repo:
        repo.track(model=model, optimizer=optimizer).capture().wait("captured")
        agent = repo.core.engage().agent
        assert agent is not None
        child = os.fork()
        if not child:
            has_closed = agent._socket is None and not _is_open(agent._shared.fd)
            os._exit(0 if has_closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert agent.trouble is None


def test_a_fork_after_the_end_closes_nothing_of_others(tmp_path: Path) -> None:
    """The numbers of the descriptors belong to other files by then."""
    config = Config(agent=AgentMode.PROCESS, memory_bytes=64 << 20, durable_interval_s=None)
    model, optimizer = make()
    repo = datastates.open(tmp_path, config=config)
    repo.track(model=model, optimizer=optimizer).capture().wait("captured")
    agent = repo.core.engage().agent
    assert agent is not None
    repo.close()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
    child = os.fork()
    if not child:
        os._exit(0 if all(map(_is_open, files)) else 1)
    for fd in files:
        os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _held_leases() -> int:
    """How many descriptors of leases this process has."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("/leases/" in link for link in links)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_the_memory_stays_while_nothing_can_be_written(tmp_path: Path) -> None:
    _killed(tmp_path, 3)
    address = taken_over()
    packs = tmp_path / "packs"
    packs.rename(tmp_path / "away")
    packs.write_text("no folder")
    with pytest.raises(Unavailable):
        ask(address, Settle(), Ended, 60)
    found = ask(address, AskStatus(), AgentStatus)
    assert found.memories[0].trouble
    packs.unlink()
    (tmp_path / "away").rename(packs)
    ask(address, Settle(), Ended, 60)
    with datastates.open(tmp_path) as repo:
        assert repo.state("main").status is Status.DURABLE


def test_a_successor_that_dies_while_it_attaches_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _killed(tmp_path, 3)
    taken_over()
    config = Config(agent=AgentMode.PROCESS)
    model, optimizer = make()

    def fail(*_: object, **__: object) -> None:
        raise Unavailable("the database went away just now")

    before = _held_leases()
    for name in ("core.runs.hand_over", "core.Core.inheriting"):  # with the agent, and before
        with monkeypatch.context() as patch, datastates.open(tmp_path, config=config) as repo:
            patch.setattr(f"datastates.maintenance.{name}", fail)
            with pytest.raises(Unavailable, match="just now"):
                repo.track(model=model, optimizer=optimizer)
        assert _held_leases() == before
    assert _trained(tmp_path, 1)[0][:3] == ["from", "3", "captured"]


def test_damaged_memory_is_not_taken_over(tmp_path: Path) -> None:
    """The bytes of the newest state change after it was reported: the one before it is whole."""
    with job(1, "tests.agent.test_agent:train_and_damage", repo=str(tmp_path)) as ranks:
        ranks.heard(0, "damaged")
        ranks.kill(0)
        ranks.wait(0)
    said = _trained(tmp_path, 1)
    assert said[0][:3] == ["from", "2", "captured"]


def train_and_damage(*, repo: str, say: Say) -> None:
    model, optimizer = make()
    config = Config(agent=AgentMode.PROCESS, memory_bytes=64 << 20, durable_interval_s=None)
    with datastates.open(repo, config=config) as repository:
        run = repository.track(model=model, optimizer=optimizer)
        for _ in range(3):
            update(model, optimizer)
            state = run.capture().wait("captured")
        memory, arena = repository.core.tiers.captured, repository.core.arena
        assert memory is not None
        assert arena is not None
        held = memory._states[state.uid].chunks[-1]
        arena.memory(held.slot, held.key[1])[0] ^= 1
        say("damaged")
        signal.pause()


_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(
    not os.access(_GROUPS / "memory.limit_in_bytes", os.R_OK) or os.geteuid() != 0,
    reason="only root can make a control group, and only version 1 is written to here",
)
def test_a_training_that_is_killed_for_memory_continues(tmp_path: Path, folder: Path) -> None:
    """The agent is in another control group; the one of the training has 1 GiB."""
    group = _GROUPS / folder.name
    with subprocess.Popen([sys.executable, "-m", "datastates.agent.server"], cwd="/"):
        until(lambda: (folder / f"datastates-agent-{os.geteuid()}.sock").exists(), "it listens")
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(1 << 30))
            with job(
                1, "tests.agent.test_agent:train_and_fill", repo=str(tmp_path), group=str(group)
            ) as ranks:
                assert ranks.wait(0) == -signal.SIGKILL
            assert _trained(tmp_path, 1)[0][:3] == ["from", "3", "captured"]
            until(lambda: not _processes(folder), "the agent releases the memory")
        finally:
            group.rmdir()


def train_and_fill(*, repo: str, group: str, say: Say) -> None:
    (Path(group) / "tasks").write_text(str(os.getpid()))
    model, optimizer = make()
    config = Config(agent=AgentMode.PROCESS, memory_bytes=64 << 20, durable_interval_s=None)
    with datastates.open(repo, config=config) as repository:
        run = repository.track(model=model, optimizer=optimizer)
        for _ in range(3):
            update(model, optimizer)
            run.capture().wait("captured")
        say("captured")
        filled = []
        while True:
            filled.append(torch.ones(8 << 20))


def test_two_ranks_continue_from_memory(tmp_path: Path) -> None:
    with job(2, "tests.agent.test_agent:train_ranks", repo=str(tmp_path), hang=True) as ranks:
        for rank in (0, 1):
            ranks.heard(rank, "all")
        for rank in (0, 1):
            ranks.kill(rank)
            ranks.wait(rank)
        first = ranks.lines()
    said = jobs.run(2, "tests.agent.test_agent:train_ranks", repo=str(tmp_path), hang=False)
    assert [lines[0].split()[:3] for lines in said] == [["from", "4", "captured"]] * 2
    assert said[0][0].split()[3] == first[0][-1].split()[1]


def test_another_number_of_ranks_continues_from_the_disk(tmp_path: Path) -> None:
    with job(2, "tests.agent.test_agent:train_ranks", repo=str(tmp_path), hang=True) as ranks:
        for rank in (0, 1):
            ranks.heard(rank, "all")
        for rank in (0, 1):
            ranks.kill(rank)
            ranks.wait(rank)
    assert _trained(tmp_path, 1)[0][:3] == ["from", "4", "durable"]


def train_ranks(*, repo: str, hang: bool, say: Say) -> None:
    model, optimizer = make()
    config = Config(agent=AgentMode.PROCESS, memory_bytes=64 << 20, durable_interval_s=None)
    with datastates.open(repo, config=config) as repository:
        run = repository.track(model=model, optimizer=optimizer)
        begun = run.resumed_from
        say("from", run.step, "-" if begun is None else begun.status, digest(model, optimizer))
        for _ in range(4):
            torch.manual_seed(run.step)
            update(model, optimizer)
            run.capture().wait("captured")
        say("all", digest(model, optimizer))
        if hang:
            signal.pause()


# --- what comes in ---


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"procss.*inline.*process"):
        Config(agent="procss")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="DATASTATES_AGENT"):
        Config.from_environment({"DATASTATES_AGENT": "yes"})
    assert Config.from_environment({"DATASTATES_AGENT": "process"}).agent is AgentMode.PROCESS


def test_a_folder_that_others_may_write_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.chmod(0o777)
    with pytest.raises(Unavailable, match="others may write there: chmod 700"):
        agent_address()
    model, optimizer = make()
    with datastates.open(tmp_path, config=Config(agent=AgentMode.PROCESS)) as repo:
        assert repo.track(model=model, optimizer=optimizer).capture().wait("captured").step == 1
    assert "captured states are lost if this process dies, for now" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        (MOST_BYTES + 1).to_bytes(4, "little"),
        (3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
        frame(Holds("0" * 24, 0, EMPTY)),
        (5).to_bytes(4, "little") + b"\x91\xa3abc",
    ],
    ids=["too long", "no MessagePack", "too early", "unknown"],
)
def test_the_agent_refuses_strangers_and_lives(data: bytes, folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-m", "datastates.agent.server"], cwd="/") as agent:
        until(lambda: (folder / f"datastates-agent-{os.geteuid()}.sock").exists(), "it listens")
        with connect(agent_address()) as connection:
            connection.sendall(data)
            with pytest.raises(Unavailable):
                receive(connection, Ended)
        assert status().memories == ()
        with connect(agent_address()) as connection:
            send(connection, Stop())
        assert agent.wait(_WAIT_S) == 0


def test_what_is_no_training_of_this_agent_is_refused_by_name(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-m", "datastates.agent.server"], cwd="/") as agent:
        until(lambda: (folder / f"datastates-agent-{os.geteuid()}.sock").exists(), "it listens")
        register = Register(
            1, "0.0.0", ("a",), os.getpid(), (), "/", "sqlite://", "", 4096, "small"
        )
        ours = msgspec.structs.replace(register, version=datastates.__version__)
        refused = (
            (register, "runs datastates"),
            (msgspec.structs.replace(ours, pid=os.getppid()), "PID namespace"),
            (msgspec.structs.replace(ours, size=1 << 50), "give each a smaller memory_bytes"),
        )
        for told, why in refused:
            fds = [os.memfd_create("x") for _ in range(4)]
            with connect(agent_address()) as connection:
                send(connection, told, fds)
                with pytest.raises(Unavailable, match=why):
                    receive(connection, Ended)
            for fd in fds:
                os.close(fd)
        agent.terminate()
        assert agent.wait(_WAIT_S) == 0


def test_a_socket_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "@datastates-test-other-user"
    with listen(address):
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(Unavailable, match="belongs to user"):
            connect(address)


def test_frames_are_split_wherever_they_are_cut() -> None:
    whole = frame(AskStatus()) + frame(Refused("no")) + frame(Ended())
    for first, second in itertools.combinations(range(len(whole) + 1), 2):
        frames = Frames()
        found = [
            message
            for piece in (whole[:first], whole[first:second], whole[second:])
            for message, _ in frames.feed(piece)
        ]
        assert found == [AskStatus(), Refused("no"), Ended()]
    with pytest.raises(Corrupt):
        list(Frames().feed(b"\xff\xff\xff\xff"))
