"""The process that runs UCX: what a stranger, a peer's address and death can do to it, and that
nothing reaches the training."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from datastates.errors import DatastatesError, Disconnected, PeerFault, Unavailable
from datastates.transport import loop
from datastates.transport.contract import Channel, Tls
from datastates.transport.fetch import fetch
from datastates.transport.registry import transport_for
from datastates.transport.server import Server
from datastates.transport.session import Session
from datastates.transport.ucx import Helper, UcxTransport
from datastates.transport.ucx_messages import Region
from tests.support.effort import effort
from tests.transport.certificates import certificate
from tests.transport.intruder import children, listening, mangled, remote_write
from tests.transport.stores import UID, MemorySink, MemoryStore, chunks

pytest.importorskip("ucxx", reason="UCXX is not installed: pip install 'datastates[cu13]'")

PATIENCE_S = 60.0
PIECES = 24
CANARY = b"canary" * 10


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DATASTATES_NEAR", "0")
    loop.stop()
    yield
    loop.stop()


def ucx() -> UcxTransport:
    transport = transport_for("ucx://")
    assert isinstance(transport, UcxTransport)
    return transport


def helper() -> Helper:
    found = ucx().helper
    assert found is not None
    return found


async def echo() -> None:
    transport = ucx()
    link = await transport.link(await transport.address())
    into, data = bytearray(5 << 20), random.randbytes(5 << 20)
    await asyncio.gather(link.send(3, memoryview(data)), link.receive(3, memoryview(into)))
    assert into == data
    await link.abort()


# --- a stranger at the port -----------------------------------------------------------------------

VICTIM = """
import ctypes, os, sys
from pathlib import Path
from datastates.transport import loop
from datastates.transport.contract import Channel, Tls
from datastates.transport.fetch import fetch
from datastates.transport.registry import transport_for
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.transport.stores import UID, MemorySink, MemoryStore, chunks

canary = ctypes.create_string_buffer(b"canary" * 10, 60)
role, data, url, *tls = sys.argv[1:]
token = b"0123456789abcdef"

async def serve():
    given = Tls(certificate=Path(tls[0]), key=Path(tls[1])) if tls else None
    server = Server(MemoryStore({UID: chunks(0, 6, 1 << 20)}), url, token=token, data=data, tls=given)
    await server.start()
    return server

async def clone():
    session = await Session.connect(url, token=token, data=data, tls=Tls(trusted=Path(tls[0])) if tls else None, timeout_s=30)
    opened, feed = await session.open(UID)
    sink = MemorySink(opened.manifest)
    await fetch(sink, [feed], timeout_s=30)
    assert len(sink.accepted) == 6
    return session, sink

kept = loop.run(serve() if role == "serve" else clone())
print(os.getpid(), ctypes.addressof(canary), kept.url if role == "serve" else "cloned", flush=True)
for line in sys.stdin:
    print(canary.raw == b"canary" * 10 and (role == "serve" or loop.run(kept[0].refs()) is not None), flush=True)
"""


class Victim:
    """A process that serves or clones, and has a canary in its memory."""

    def __init__(self, role: str, data: str, url: str, *tls: Path, near: str = "0") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", VICTIM, role, data, url, *map(str, tls)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DATASTATES_NEAR": near},
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pid, canary, self.said = self.process.stdout.readline().split()
        self.pid, self.canary = int(pid), int(canary)
        self._ask, self._hear = self.process.stdin, self.process.stdout

    def is_well(self) -> bool:
        self._ask.write("?\n")
        self._ask.flush()
        return self._hear.readline().strip() == "True"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._ask.close()
        self._hear.close()


@pytest.mark.parametrize("way", ["ucx", "ucx with TLS", "auto", "near"])
def test_a_remote_write_to_any_port_reaches_no_training(way: str, tmp_path: Path) -> None:
    """Every port that a server, a client or a process of theirs listens on, with and without
    TLS, near and far."""
    made = certificate(tmp_path, "IP:127.0.0.1") if "TLS" in way else Tls()
    tls = [each for each in (made.certificate, made.key) if each is not None]
    trusted = [made.trusted] if made.trusted is not None else []
    data, near = way.split()[0] if way != "near" else "auto", "1" if way == "near" else "0"
    victims: list[Victim] = []
    try:
        victims.append(Victim("serve", data, "ucx://127.0.0.1:0", *tls, near=near))
        victims.append(Victim("clone", data, victims[0].said, *trusted, near=near))
        tried = 0
        for victim in victims:
            helpers = children(victim.pid)
            assert bool(helpers) == (data == "ucx"), (
                "UCX runs where it was chosen, and nowhere else"
            )
            for pid in (victim.pid, *helpers):
                for place in listening(pid):
                    assert place[0] == "127.0.0.1"
                    remote_write(place, victim.canary, b"OWNED")
                    tried += 1
        assert tried == (3 if data == "ucx" else 1)
        assert all(victim.is_well() for victim in victims)
    finally:
        for victim in victims:
            victim.end()


def test_a_helper_that_a_stranger_ends_is_named_and_the_next_one_works() -> None:
    async def work() -> str:
        await echo()
        ended = helper()
        (place,) = listening(ended.pid)
        await asyncio.to_thread(remote_write, place, 0x1000, b"OWNED")
        await asyncio.wait_for(asyncio.shield(ended._ended), PATIENCE_S / 2)
        await echo()
        assert helper() is not ended
        return str(ended.error)

    said = loop.run(work(), timeout_s=PATIENCE_S)
    assert "was ended by SIGSEGV" in said


def test_the_user_says_which_ports_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", "21000-21900")
    loop.run(echo(), timeout_s=PATIENCE_S)
    assert [(host, 21000 <= port <= 21900) for host, port in listening(helper().pid)] == [
        ("127.0.0.1", True)
    ]


def test_an_address_that_is_served_later_moves_it_to_the_device_of_that_address() -> None:
    async def work() -> None:
        await echo()
        before = helper()
        listener = await ucx().listen("ucx://0.0.0.0:0", forget)
        assert before.is_over
        await echo()
        assert {place[0] for place in listening(helper().pid)} >= {"127.0.0.1"}
        await listener.close()

    loop.run(work(), timeout_s=PATIENCE_S)


async def forget(channel: Channel) -> None:
    await channel.close()


# --- addresses that peers make up -----------------------------------------------------------------


def test_made_up_addresses_end_a_helper_at_most() -> None:
    """As many as it takes to end it once, and more."""
    ends = []

    async def work() -> None:
        transport = ucx()
        for seed in range(300):
            address = mangled(await transport.address(), seed)
            try:
                async with asyncio.timeout(20):
                    link = await transport.link(address)
                    await link.abort()
            except (Disconnected, PeerFault) as exc:
                if "was ended by" in str(exc):
                    ends.append(str(exc))
            if ends and seed > 20:
                break
            if helper().is_over:
                # it moves something: ends in a row that moved nothing are another test's
                await echo()
        await echo()

    loop.run(work(), timeout_s=3 * PATIENCE_S)
    assert all("SIGABRT" in end or "SIGSEGV" in end for end in ends)


def test_a_helper_that_dies_again_and_again_is_given_up_for_a_while_and_its_end_is_named() -> None:
    async def work() -> None:
        transport = ucx()
        for _ in range(3):
            await transport.address()
            os.kill(helper().pid, signal.SIGKILL)
            await asyncio.shield(helper()._ended)
        with pytest.raises(Unavailable, match=r"was ended by SIGKILL.*3 in a row"):
            await transport.address()

    loop.run(work(), timeout_s=PATIENCE_S)


def test_a_helper_that_stops_while_it_makes_a_link_is_ended_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        address = await ucx().address()
        stopped = helper()
        os.kill(stopped.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("datastates.transport.ucx._LINK_S", 0.2)
            with pytest.raises(
                Disconnected, match=rf"pid {stopped.pid}\) does not answer any more"
            ):
                await asyncio.wait_for(ucx().link(address), PATIENCE_S / 2)
        await echo()
        assert helper() is not stopped

    loop.run(work(), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("what", ["socket.socketpair", "os.pipe", "Region", "_spawn"])
def test_a_helper_that_cannot_be_started_leaves_no_descriptor(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async def work() -> None:
        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as full:
            full.setattr(f"datastates.transport.ucx.{what}", refuse)
            with pytest.raises(Unavailable, match=r"cannot be started.*Too many open files"):
                await Helper.start({})
        assert os.listdir("/proc/self/fd") == before

    loop.run(work(), timeout_s=PATIENCE_S)


# --- what it may and may not ----------------------------------------------------------------------


def test_the_helper_has_nothing_worth_having(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASTATES_TOKEN", "secret-of-the-training")
    loop.run(echo(), timeout_s=PATIENCE_S)
    place = Path(f"/proc/{helper().pid}")
    environment = (place / "environ").read_bytes()
    assert b"secret-of-the-training" not in environment
    assert b"CUDA_VISIBLE_DEVICES=\0" in environment
    opened = set[str]()
    for each in (place / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            opened.add(os.readlink(each))
    assert {each for each in opened if each.startswith("/")} <= {
        "/dev/null",
        "/memfd:datastates-out (deleted)",
        "/memfd:datastates-in (deleted)",
    }
    assert "torch" not in (place / "maps").read_text()
    assert os.getsid(helper().pid) == helper().pid
    for task in (place / "task").iterdir():
        facts = dict(
            line.split(":\t")
            for line in (task / "status").read_text().splitlines()
            if ":\t" in line
        )
        assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
        assert int(facts["CapEff"], 16) & ~(1 << 14) == 0
    limits = {
        line[:26].strip(): line[26:47].strip()
        for line in (place / "limits").read_text().splitlines()
    }
    assert limits["Max core file size"] == limits["Max file size"] == limits["Max processes"] == "0"
    assert int(limits["Max address space"]) < 4 << 30
    assert helper().open == ()


CONFINED = """
import ctypes, errno, os, signal, socket, sys
from datastates.transport import ucx_helper as confinement
parent, secret, where, memory = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
import mmap, subprocess
libc = ctypes.CDLL(None, use_errno=True)

def system(*arguments):
    if libc.syscall(*arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")

class Stretch(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

into = ctypes.create_string_buffer(8)
here, there = Stretch(ctypes.addressof(into), 8), Stretch(where, 8)
tries = {
    "read a file": lambda: open(secret).read(),
    "write a file": lambda: open(secret, "w"),
    "read a process's memory file": lambda: open(f"/proc/{parent}/mem", "rb"),
    "debug": lambda: system(101, 16, parent, 0, 0),
    "read a process": lambda: system(310, parent, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
    "write to a process": lambda: system(311, parent, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
    "signal": lambda: os.kill(parent, 0),
    "take a descriptor": lambda: os.pidfd_open(parent),
    "start a program": lambda: os.execv("/bin/true", ["true"]),
    "fork": os.fork,
    "reach a local socket": lambda: socket.socket(socket.AF_UNIX),
    "make memory code": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "write to what is sent": lambda: mmap.mmap(memory, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE),
    "change its size": lambda: os.ftruncate(memory, 0),
    "connect rings of the kernel": lambda: system(425, 1, into),
}
still_open = confinement.before() + confinement.after()
done = []
for what, attempt in tries.items():
    try:
        attempt()
    except OSError:
        continue
    done.append(what)
socket.create_server(("127.0.0.1", 0)).close()
os.write(1, repr((still_open, done)).encode())
os._exit(0)
"""


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="names system calls by the numbers of x86-64"
)
def test_what_confines_it_keeps_it_from_the_training_and_its_files(tmp_path: Path) -> None:
    secret, memory = tmp_path / "token", ctypes.create_string_buffer(b"memory of the training")
    secret.write_text("secret")
    region = Region("datastates-out", 4096, is_written_here=True)
    copy = os.dup(region.fd)
    region.hand_over(is_writable_there=False)
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                CONFINED,
                str(os.getpid()),
                str(secret),
                str(ctypes.addressof(memory)),
                str(copy),
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            pass_fds=[copy],
        )
    finally:
        os.close(copy)
    assert (done.returncode, done.stdout) == (0, "([], [])"), done.stderr


def test_neither_side_can_change_what_the_other_one_reads() -> None:
    out, into = (
        Region("out", 1 << 20, is_written_here=True),
        Region("in", 1 << 20, is_written_here=False),
    )
    copies = [os.dup(region.fd) for region in (out, into)]
    out.hand_over(is_writable_there=False)
    into.hand_over(is_writable_there=True)
    try:
        for copy in copies:
            with pytest.raises(PermissionError):
                os.ftruncate(copy, 0)
            with pytest.raises(PermissionError):
                fcntl.fcntl(copy, 1033, 8)
        with pytest.raises(PermissionError):
            mmap.mmap(copies[0], 1 << 20, mmap.MAP_SHARED, mmap.PROT_WRITE)
        mmap.mmap(copies[1], 1 << 20, mmap.MAP_SHARED, mmap.PROT_WRITE)[:2] = b"hi"
    finally:
        for copy in copies:
            os.close(copy)
    stretch = asyncio.run(into.take(None, 2))
    assert bytes(into.view(stretch)) == b"hi"
    assert into.view(stretch).readonly
    stretch = asyncio.run(out.take(None, 2))
    out.view(stretch)[:] = b"we"


# --- life and death -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["end", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_the_helper_ends_with_its_training_however_that_ends(how: str) -> None:
    script = f"""
        import os
        from datastates.transport import loop
        from tests.transport.test_ucx import echo
        from datastates.transport.registry import transport_for
        loop.run(echo())
        print(transport_for("ucx://").helper.pid, flush=True)
        {"" if how == "end" else how}
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=root,
    )
    place = Path(f"/proc/{done.stdout.strip()}/stat")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if place.read_text().rpartition(") ")[2][0] == "Z":
                break
        except OSError:
            break
        assert time.monotonic() < deadline, done
        threading.Event().wait(0.01)


def test_a_loop_that_is_stopped_while_a_helper_ends_leaves_the_next_loop_a_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_reaped, reap, threads = threading.Event(), Helper._reap, list[threading.Thread]()

    def reap_late(helper: Helper) -> None:
        is_reaped.wait(1.0)
        reap(helper)

    async def lose() -> None:
        await echo()
        helper().lost("gone")
        threads.append(threading.current_thread())

    monkeypatch.setattr(Helper, "_reap", reap_late)
    loop.run(lose(), timeout_s=PATIENCE_S)
    loop.stop()
    is_reaped.set()
    threads[0].join(10)
    assert not threads[0].is_alive()
    loop.run(echo(), timeout_s=PATIENCE_S)


def test_a_report_that_nobody_asked_for_ends_the_helper() -> None:
    from datastates.transport.ucx_messages import Ended

    async def work() -> None:
        await echo()
        with pytest.raises(ValueError, match="nobody asked for"):
            helper().take(Ended(999_999))

    loop.run(work(), timeout_s=PATIENCE_S)


async def clone(url: str, sinks: list[MemorySink], on_progress: Callable[[int, int], None]) -> None:
    session = await Session.connect(url, data="ucx", timeout_s=PATIENCE_S)
    try:
        opened, feed = await session.open(UID)
        assert feed is not None
        if not sinks:
            sinks.append(MemorySink(opened.manifest))
        await fetch(sinks[0], [feed], timeout_s=PATIENCE_S, on_progress=on_progress)
    finally:
        await session.close()


def kill_in_the_middle(kills: int, seed: int) -> None:
    """Clones over UCX; somewhere in the middle of each the helper of either end is killed. Most
    go on by themselves, the rest is cloned again, which brings what is missing."""
    rng, state, outcomes = random.Random(seed), chunks(seed, PIECES, 1 << 20), Counter[str]()
    far = UcxTransport()
    server = Server(
        MemoryStore({UID: state}),
        "ucx://127.0.0.1:0",
        data="ucx",
        timeout_s=PATIENCE_S,
        transport=far,
    )
    loop.run(server.start(), timeout_s=PATIENCE_S)
    for _ in range(kills):
        at, transport = rng.randrange(1, PIECES), rng.choice([far, ucx()])
        pending, sinks = [transport], list[MemorySink]()

        def progress(
            done: int, total: int, at: int = at, pending: list[UcxTransport] = pending
        ) -> None:
            if pending and done * PIECES >= at * total:
                found = pending.pop().helper
                assert found is not None
                os.kill(found.pid, signal.SIGKILL)

        for _ in range(5):
            try:
                loop.run(clone(server.url, sinks, progress), timeout_s=PATIENCE_S)
                break
            except DatastatesError as exc:
                outcomes[type(exc).__name__] += 1
        assert not pending
        assert len(sinks[0].accepted) == PIECES
        assert sinks[0].memory == state
    loop.run(server.close(), timeout_s=PATIENCE_S)
    assert outcomes.total() <= kills // 5, outcomes


def test_clones_go_on_when_a_helper_is_killed_in_the_middle() -> None:
    kill_in_the_middle(5, seed=0)


@pytest.mark.long
@pytest.mark.parametrize("share", range(5))
def test_two_hundred_helpers_are_killed_in_the_middle(share: int) -> None:
    kill_in_the_middle(effort(40, 12), seed=share)
