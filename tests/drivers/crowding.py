"""A training that captures at every step and serves, an honest client that clones from it again and
again, and a crowd that only connects.

    python -m tests.drivers.crowding --connections 1000 --seconds 20 --rounds 3

Rounds without the crowd, with it, and with the same crowd at bare listeners of another process take
turns: the last says what the crowd itself takes of the machine. What is printed at the end compares
them. Each connection of the crowd says nothing, half a frame or half of TLS's first word; one that
is closed comes again after ``--again`` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

WORDS = (b"", b"\0\0", b"\0\0\0\x40abc", b"\x16\x03\x01\x02\0\x01", b"GET / HTTP/1.1\r\nHost:")
TOKEN = "a token that strangers do not know"
DESCRIPTORS = 1024


@dataclass(slots=True)
class Phase:
    """What a round came to; ``cpu`` says which share of the time the threads that serve ran, by
    their names."""

    steps: int
    seconds: float
    descriptors: int
    resident_mib: float
    clones: int
    longest_clone_s: float
    failed: list[str]
    cpu: dict[str, float]


@dataclass(slots=True)
class Outcome:
    """Rounds without the crowd, with it elsewhere and with it here, and what the servers
    counted."""

    quiet: list[Phase] = field(default_factory=list)
    elsewhere: list[Phase] = field(default_factory=list)
    crowded: list[Phase] = field(default_factory=list)
    servers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """By how much longer a step takes beside the crowd: the median of rounds that follow
        each other."""
        return _longer(self.quiet, self.crowded)

    @property
    def overhead_of_its_own(self) -> float:
        """By how much longer it takes than beside the same crowd at somebody else's listeners."""
        return _longer(self.elsewhere, self.crowded)


def _longer(before: list[Phase], after: list[Phase]) -> float:
    return (
        statistics.median(
            b.seconds / b.steps / (a.seconds / a.steps) for a, b in zip(before, after, strict=True)
        )
        - 1
    )


# --- the training ---------------------------------------------------------------------------------


def train(folder: str) -> None:
    """Train, capture and serve until the input ends; answer each line of it with what happened
    since the last."""
    import torch

    import datastates
    from datastates.config import Config
    from datastates.transport.contract import Tls

    resource.setrlimit(
        resource.RLIMIT_NOFILE, (DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    torch.set_num_threads(1)
    where = Path(folder)
    tls = Tls(certificate=where / "certificate.pem", key=where / "key.pem")
    model = torch.nn.Sequential(
        torch.nn.Linear(768, 768), torch.nn.ReLU(), torch.nn.Linear(768, 768)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    listen(asked)
    with datastates.open(
        where / "repo", config=Config(memory_bytes=128 << 20, durable_interval_s=2.0)
    ) as repo:
        servers = [
            repo.serve("tcp://127.0.0.1:0", token=TOKEN),
            repo.serve("tcp://127.0.0.1:0", token=TOKEN, tls=tls),
        ]
        web = repo.serve("http://127.0.0.1:0")
        with repo.track(model=model, optimizer=optimizer) as run:
            run.capture().wait()
            _say([each.url for each in (*servers, web)])
            _go_on(model, optimizer, run, servers, asked)


def listen(asked: queue.SimpleQueue[str]) -> None:
    """Lines of the input, as they come."""

    def read() -> None:
        for line in sys.stdin:
            asked.put(line)
        asked.put("end")

    threading.Thread(target=read, daemon=True).start()


def _go_on(
    model: Any, optimizer: Any, run: Any, servers: list[Any], asked: queue.SimpleQueue[str]
) -> None:
    import torch

    steps, began, ran = 0, time.monotonic(), _ran()
    while True:
        for _ in range(4):
            loss = model(torch.randn(64, 768)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.capture()
        steps += 1
        with suppress(queue.Empty):
            if asked.get_nowait() == "end":
                return
            now, before, ran = time.monotonic(), ran, _ran()
            said = {
                "steps": steps,
                "seconds": now - began,
                "descriptors": len(os.listdir("/proc/self/fd")),
                "resident_mib": (
                    int(Path("/proc/self/statm").read_text().split()[1])
                    * resource.getpagesize()
                    / (1 << 20)
                ),
                "servers": [_counts(each) for each in servers],
                "cpu": {name: (ran[name] - before.get(name, 0.0)) / (now - began) for name in ran},
            }
            _say(said)
            steps, began = 0, time.monotonic()


def _ran() -> dict[str, float]:
    """The seconds for which the threads that wait for connections have run so far."""
    names = ("datastates-transport", "datastates-web")
    clocks = {
        each.name: time.pthread_getcpuclockid(each.ident)
        for each in threading.enumerate()
        if each.ident and each.name in names
    }
    return {name: time.clock_gettime(clock) for name, clock in clocks.items()}


def _say(matter: object) -> None:
    sys.stdout.write(f"{json.dumps(matter)}\n")
    sys.stdout.flush()


def _counts(server: Any) -> dict[str, Any]:
    stats = server.stats()
    return {
        "peers": stats.peers_ever,
        "refused": stats.refused,
        "for": dict(stats.refused_for),
        "connections": stats.connections,
        "pins_revoked": stats.pins_revoked,
    }


# --- the crowd ------------------------------------------------------------------------------------


def crowd(urls: list[str], count: int, again_s: float) -> None:
    """Keep so many connections to each address half open, until the input ends."""
    most = 3 * count + 100
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, max(most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    )
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    listen(asked)
    selector = selectors.DefaultSelector()
    due: list[tuple[float, int]] = [
        (time.monotonic() + again_s * n / (count * len(urls)), n) for n in range(count * len(urls))
    ]
    while asked.empty():
        now = time.monotonic()
        while due and due[0][0] <= now:
            _, number = due.pop(0)
            selector.register(
                _connect(urls[number % len(urls)]),
                selectors.EVENT_READ | selectors.EVENT_WRITE,
                number,
            )
        for key, events in selector.select(0.02):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if events & selectors.EVENT_WRITE:
                with suppress(OSError):
                    connection.send(WORDS[key.data // len(urls) % len(WORDS)])
                selector.modify(connection, selectors.EVENT_READ, key.data)
            elif _is_over(connection):
                selector.unregister(connection)
                connection.close()
                due.append((now + again_s, key.data))


def bare(count: int) -> None:
    """So many listeners that hold 64 connections each and close what comes beyond, and nothing
    else, until the input ends."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    listen(asked)
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=512) for _ in range(count)]
    _say([f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in listeners])
    selector, held = (
        selectors.DefaultSelector(),
        {each: list[tuple[float, socket.socket]]() for each in listeners},
    )
    for each in listeners:
        selector.register(each, selectors.EVENT_READ)
    while asked.empty():
        for key, _ in selector.select(0.1):
            listener = key.fileobj
            assert isinstance(listener, socket.socket)
            connection, now = listener.accept()[0], time.monotonic()
            if len(held[listener]) >= 64 and held[listener][0][0] < now - 10:
                held[listener].pop(0)[1].close()
            if len(held[listener]) < 64:
                held[listener].append((now, connection))
            else:
                connection.close()


def _connect(url: str) -> socket.socket:
    where = urlsplit(url)
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex((where.hostname, where.port))
    return connection


def _is_over(connection: socket.socket) -> bool:
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


# --- the honest client, and who brings them together ----------------------------------------------


class Client:
    """Clones the newest state again and again, by each way in turn, each time over a connection
    of its own."""

    def __init__(self, urls: list[str], folder: Path) -> None:
        self._urls, self._trusted = urls, folder / "certificate.pem"
        self._is_over = threading.Event()
        self.took: list[float] = []
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._clone)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _clone(self) -> None:
        import torch

        import datastates
        from datastates.transport.contract import Tls

        while not self._is_over.wait(0.5):
            for url, tls in zip(self._urls, (None, Tls(trusted=self._trusted)), strict=True):
                began = time.monotonic()
                model = torch.nn.Sequential(
                    torch.nn.Linear(768, 768), torch.nn.ReLU(), torch.nn.Linear(768, 768)
                )
                try:
                    with datastates.connect(url, token=TOKEN, tls=tls) as peer:
                        peer.clone("main", model=model, only="model")
                except datastates.DatastatesError as exc:
                    self.failed.append(f"{type(exc).__name__}: {exc}")
                self.took.append(time.monotonic() - began)

    def since(self) -> tuple[int, float, list[str]]:
        """Clones, the longest, and what failed since this was last asked."""
        took, failed, self.took, self.failed = self.took, self.failed, [], []
        return len(took), max(took, default=0.0), failed


def measure(connections: int, seconds: float, rounds: int, again_s: float = 10.0) -> Outcome:
    """Rounds without the crowd and with it, in turn."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _certify(folder)
        with _started("train", str(folder)) as trainer, _started("bare", "3") as stranger:
            assert trainer.stdout is not None
            assert stranger.stdout is not None
            others = json.loads(stranger.stdout.readline())
            urls = json.loads(trainer.stdout.readline())
            client = Client(urls[:2], folder)
            try:
                _phase(trainer, client, min(seconds, 5.0))  # until all is warm
                for _ in range(rounds):
                    outcome.quiet.append(_phase(trainer, client, seconds)[0])
                    for phases, at in ((outcome.elsewhere, others), (outcome.crowded, urls)):
                        with _started("crowd", str(connections), str(again_s), *at):
                            _phase(trainer, client, min(seconds, again_s))  # until all are there
                            phase, outcome.servers = _phase(trainer, client, seconds)
                            phases.append(phase)
            finally:
                client.close()
    return outcome


def _phase(
    trainer: subprocess.Popen[str], client: Client, seconds: float
) -> tuple[Phase, list[dict[str, Any]]]:
    _ask(trainer)
    client.since()
    time.sleep(seconds)
    said = _ask(trainer)
    servers: list[dict[str, Any]] = said.pop("servers")
    clones, longest_s, failed = client.since()
    return Phase(**said, clones=clones, longest_clone_s=longest_s, failed=failed), servers


def _ask(trainer: subprocess.Popen[str]) -> dict[str, Any]:
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    said: dict[str, Any] = json.loads(trainer.stdout.readline())
    return said


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A part of this file as a process of its own, which ends with its input."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.drivers.crowding", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def _certify(folder: Path) -> None:
    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl is not installed"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    names = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(folder / "key.pem"),
        "-out",
        str(folder / "certificate.pem"),
    ]
    subprocess.run([*command, *names], check=True, capture_output=True)


def report(outcome: Outcome, out: IO[str] = sys.stdout) -> None:
    """What came of it."""
    for kind, phases in (
        ("quiet", outcome.quiet),
        ("elsewhere", outcome.elsewhere),
        ("crowded", outcome.crowded),
    ):
        for each in phases:
            step_ms = 1000 * each.seconds / each.steps
            out.write(
                f"{kind:9} step {step_ms:6.2f} ms  descriptors {each.descriptors:4}  resident"
                f" {each.resident_mib:6.0f} MiB  "
                f"clones {each.clones} (longest {each.longest_clone_s:.2f} s, failed"
                f" {len(each.failed)})"
                f"  {', '.join(f'{name[11:]} {100 * share:.1f} %' for name, share in each.cpu.items())}\n"
            )
            for problem in each.failed[:3]:
                out.write(f"         {problem}\n")
    out.write(f"a step takes {100 * outcome.overhead:+.1f} % beside the crowd, ")
    out.write(
        f"{100 * outcome.overhead_of_its_own:+.1f} % against the same crowd at other listeners\n"
    )
    for server in outcome.servers:
        out.write(f"{json.dumps(server)}\n")


def main() -> None:
    """From the command line."""
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    elif sys.argv[1:2] == ["bare"]:
        bare(int(sys.argv[2]))
    elif sys.argv[1:2] == ["crowd"]:
        crowd(sys.argv[4:], int(sys.argv[2]), float(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        for name, kind, default in (
            ("connections", int, 1000),
            ("seconds", float, 15.0),
            ("rounds", int, 3),
            ("again", float, 10.0),
        ):
            parser.add_argument(f"--{name}", type=kind, default=default)
        given = parser.parse_args()
        report(measure(given.connections, given.seconds, given.rounds, given.again))


if __name__ == "__main__":
    main()
