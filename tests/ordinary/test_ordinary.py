"""Ordinary scripts, ended and begun again in every ordinary way: each promise holds afterwards.

A script is written to a file and run as it stands (``scripts.py``), here or elsewhere
(``elsewhere.py``). Then ``promised`` opens what it left in this process and looks: what is called
durable restores, every branch can go on, no byte is wrong, and no loss differs from that of the
training that was never stopped.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import datastates
from datastates import Status
from tests.ordinary.elsewhere import Place
from tests.ordinary.scripts import ENDINGS, MODEL, SCRIPTS
from tests.support import warm

pytestmark = pytest.mark.long

ELSEWHERE = Path(__file__).with_name("elsewhere.py")
ALONE = "11111111-2222-3333-4444-555555555555"
"""The boot id of another machine."""

Losses = dict[int, str]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may use; pytest's own are closed to all but one."""
    made = Path(tempfile.mkdtemp(prefix="ordinary-"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of a training that was never stopped."""
    return losses(run(tmp_path_factory.mktemp("unbroken"), SCRIPTS["plain"], 20))


@functools.cache
def why_not_elsewhere() -> str | None:
    """Why no process can be put elsewhere; None when it can."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return "namespaces need root on Linux"
    with tempfile.TemporaryDirectory() as folder:
        word = msgspec.json.encode(Place(folder, host="tried")).decode()
        (Path(folder) / "nothing.py").touch()
        done = warm.run(
            [sys.executable, str(ELSEWHERE), word, f"{folder}/nothing.py"], capture_output=True
        )
    return (
        None
        if done.returncode == 0
        else f"no namespace can be made: {done.stderr.strip().splitlines()[-1]}"
    )


def start(
    folder: Path, script: str, steps: int, place: Place | None = None
) -> subprocess.Popen[str]:
    """The script in a file of its own, run with ``python FILE STEPS``."""
    file = folder / "train.py"
    file.write_text(script)
    command = [sys.executable, str(file), str(steps)]
    if place is not None:
        if (reason := why_not_elsewhere()) is not None:
            pytest.skip(reason)
        command[1:1] = [str(ELSEWHERE), msgspec.json.encode(place).decode()]
    return warm.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a script said until its end, which comes by itself."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return out, err


def run(folder: Path, script: str, steps: int, place: Place | None = None, *, code: int = 0) -> str:
    """What the script said, once it ended as expected."""
    with start(folder, script, steps, place) as process:
        out, err = end(process)
    assert process.returncode == code, err
    return out


@contextmanager
def alive(folder: Path, script: str, steps: int, place: Place | None = None) -> Iterator[str]:
    """While the block runs, the script has done its steps and lives on; what it said.

    Then it ends by itself."""
    with start(folder, script, steps, place) as process:
        assert process.stdout is not None
        try:
            said = ""
            while "done" not in said:
                line = process.stdout.readline()
                assert line, process.stderr.read() if process.stderr is not None else ""
                said += line
            yield said
            _, err = process.communicate("\n", timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, err


def losses(said: str) -> Losses:
    """Those that a script said, by step."""
    words = [line.split() for line in said.splitlines()]
    return {int(pair[0]): pair[1] for pair in words if len(pair) == 2 and pair[0].isdigit()}


def promised(folder: Path, wanted: Losses) -> int:
    """Look at what the scripts left; the step of the branch's head.

    Whatever is listed as durable restores, every byte of it checked; no state claims bytes that
    nobody has; each branch stands at a state that can be restored; what is recorded of a step is
    what the training that was never stopped has there.
    """
    with datastates.open(folder / "runs") as repo:
        for state in repo.find("step >= 0"):
            assert state.status in (Status.DURABLE, Status.LOST, Status.EVICTED)
            if state.status is Status.DURABLE:
                assert repo.verify(state.uid) == state
            assert float(state.metrics["loss"]).hex() == wanted[state.step]
        assert [ref.name for ref in repo.refs()] == ["main"]
        head = repo.state("main")
        assert head.status is Status.DURABLE
        assert repo.load("main")["optimizer"]
        return head.step


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_ends_goes_on_where_it_stopped(
    folder: Path, unbroken: Losses, ending: str
) -> None:
    codes = {
        "an error": 1,
        "SIGTERM": 128 + signal.SIGTERM,
        "SIGHUP": 128 + signal.SIGHUP,
        "Ctrl-C": -signal.SIGINT,
    }
    first = losses(run(folder, SCRIPTS["plain"] + ENDINGS[ending], 8, code=codes.get(ending, 0)))
    assert promised(folder, unbroken) == 8
    second = losses(run(folder, SCRIPTS["plain"], 14))
    assert list(second) == list(range(9, 15))
    assert {**first, **second}.items() <= unbroken.items()


@pytest.mark.parametrize(
    "script", ["in a function", "a cell that is run again", "forks", "spawns a reader"]
)
def test_a_script_of_any_shape_loses_nothing(folder: Path, unbroken: Losses, script: str) -> None:
    said = run(folder, SCRIPTS[script], 10)
    assert losses(said).items() <= unbroken.items()
    assert promised(folder, unbroken) == 10
    assert list(losses(run(folder, SCRIPTS["plain"], 12))) == [11, 12]


def test_a_child_that_was_forked_tracks_a_branch_of_its_own(folder: Path, unbroken: Losses) -> None:
    assert "child 10" in run(folder, SCRIPTS["forks and tracks in the child"], 10)
    with datastates.open(folder / "runs") as repo:
        assert {ref.name: repo.state(ref.state).step for ref in repo.refs()} == {
            "main": 10,
            "child": 11,
        }
        assert repo.state("child~1") == repo.state("main")


@pytest.mark.exact("loop", "killed")
def test_a_killed_script_goes_on_from_what_was_durable(folder: Path, unbroken: Losses) -> None:
    run(folder, SCRIPTS["killed"], 10, code=-signal.SIGKILL)
    second = losses(run(folder, SCRIPTS["plain"], 14))
    assert 6 <= min(second) <= 11
    assert second.items() <= unbroken.items()
    assert promised(folder, unbroken) == 14


@pytest.mark.parametrize("change", ["host name", "machine", "mount", "moved"])
@pytest.mark.parametrize("first", ["plain", "killed"])
def test_a_script_goes_on_elsewhere(
    folder: Path, unbroken: Losses, first: str, change: str
) -> None:
    code = -signal.SIGKILL if first == "killed" else 0
    run(folder, SCRIPTS[first], 10, Place(str(folder), host="here"), code=code)
    there, place = folder, Place(str(folder), host="here")
    match change:
        case "host name":
            place = Place(str(folder), host="there")
        case "machine":
            place = Place(str(folder), host="there", boot=ALONE)
        case "mount":
            where = folder / "mounted"
            place = Place(str(where), host="here", binds=((str(folder), str(where)),))
        case _:
            there = folder / "moved"
            there.mkdir()
            (folder / "runs").rename(there / "runs")
            place = Place(str(there), host="here")
    second = losses(run(there, SCRIPTS["plain"], 14, place))
    assert min(second) == 11 if first == "plain" else 6 <= min(second) <= 11
    assert second.items() <= unbroken.items()
    assert promised(there, unbroken) == 14


@pytest.mark.parametrize("change", ["mount", "host name", "machine"])
def test_a_living_training_is_not_declared_dead_from_elsewhere(
    folder: Path, unbroken: Losses, change: str
) -> None:
    where = folder / "mounted"
    place = {
        "mount": Place(str(where), host="here", binds=((str(folder), str(where)),)),
        "host name": Place(str(folder), host="there"),
        "machine": Place(str(folder), host="there", boot=ALONE),
    }[change]
    with alive(folder, SCRIPTS["waits when it is done"], 10, Place(str(folder), host="here")):
        look = (
            "import datastates\nrepo = datastates.open('runs')\nprint([state.status.value for state"
            " in repo.log('main')])\n"
        )
        said = run(folder, look, 0, place)
        assert "lost" not in said
        assert said.count("'") == 2 * 10
    assert promised(folder, unbroken) == 10


def test_a_training_that_copies_its_own_folder_stays_alive(folder: Path, unbroken: Losses) -> None:
    with alive(folder, SCRIPTS["uploads its folder"], 10), datastates.open(folder / "runs") as repo:
        assert repo.recovered == []
        assert {state.status for state in repo.log("main")} <= {Status.CAPTURED, Status.DURABLE}
        assert repo.state("main").step == 10
    assert promised(folder, unbroken) == 10


def test_a_copy_is_a_repository_of_its_own(folder: Path, unbroken: Losses) -> None:
    with alive(folder, SCRIPTS["waits when it is done"], 10):
        # such a file may be gone before it is copied, of which `cp -r` complains too
        half_written = shutil.ignore_patterns(".tmp-*")
        shutil.copytree(folder / "runs", folder / "copy", ignore=half_written)
    original = sorted((path.name, path.stat().st_size) for path in (folder / "runs").rglob("*"))
    with datastates.open(folder / "copy") as repo:
        for state in repo.find("step >= 0"):
            assert state.status in (Status.DURABLE, Status.LOST, Status.EVICTED)
            if state.status is Status.DURABLE:
                assert repo.verify(state.uid) == state
    assert (
        sorted((path.name, path.stat().st_size) for path in (folder / "runs").rglob("*"))
        == original
    )
    assert promised(folder, unbroken) == 10


def test_users_share_a_folder(folder: Path, unbroken: Losses) -> None:
    one, other = Place(str(folder), user=12345), Place(str(folder), user=23456)
    with alive(folder, SCRIPTS["waits when it is done"], 10, one):
        said = run(
            folder, "import datastates\nprint(len(datastates.open('runs').log('main')))\n", 0, other
        )
        assert said.strip() == "10"
    assert promised(folder, unbroken) == 10


@pytest.mark.parametrize("by", ["a read-only mount", "another user"])
def test_what_cannot_be_written_can_be_read(folder: Path, unbroken: Losses, by: str) -> None:
    run(folder, SCRIPTS["plain"], 10)
    place = (
        Place(str(folder), read_only=(str(folder / "runs"),))
        if by == "a read-only mount"
        else Place(str(folder), user=12345)
    )
    reader = (
        MODEL
        + """
repo = datastates.open("runs")
print(len(repo.log("main")), repo.restore("main", model=model, optimizer=optimizer).restored, len(repo.find("step > 5")))
try:
    repo.track(model=model, optimizer=optimizer)
except datastates.DatastatesError as error:
    print(type(error).__name__)
"""
    )
    said = run(folder, reader, 0, place).splitlines()
    assert said[0].startswith("10 ")
    assert said[-1] in ("Unavailable", "InvalidInput", "Conflict")
    terminal = (
        "import sys\nfrom datastates.cli import main\nsys.argv[1:] = ['log', '--repo',"
        " 'runs']\nmain()\n"
    )
    assert "10" in run(folder, terminal, 0, place)
    assert promised(folder, unbroken) == 10


@pytest.mark.parametrize(("memory", "every"), [(36, 1), (36, None), (256, 1)])
def test_a_full_disk_ends_no_training_and_what_was_durable_goes_on_when_there_is_room(
    folder: Path, memory: int, every: int | None
) -> None:
    script = (
        SCRIPTS["larger than the disk"]
        .replace("MEMORY", str(memory << 20))
        .replace("EVERY", str(every))
    )
    wanted = losses(run(folder, script, 12))
    small = folder / "small"
    small.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=30m", "none", str(small)], check=False
        ).returncode
    ):
        pytest.skip("a small file system needs root, and a kernel that lets it mount")
    try:
        with start(small, script, 12) as process:
            out, err = end(process)
        assert "states cannot be written for now; the training goes on" in err
        assert "No space left on device" in err
        assert losses(out) == wanted
        subprocess.run(["mount", "-o", "remount,size=1g", str(small)], check=True)
        again = losses(run(small, script, 12))
        assert again.items() <= wanted.items()
        assert promised(small, wanted) == 12
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_workers_of_a_loader_need_no_more_shared_memory_than_a_container_has(
    folder: Path, unbroken: Losses
) -> None:
    place = Place(str(folder), small=(("/dev/shm", 64 << 20),))
    said = losses(run(folder, SCRIPTS["loads data with workers"], 12, place))
    assert list(said) == list(range(1, 13))
    assert promised(folder, said) == 12
