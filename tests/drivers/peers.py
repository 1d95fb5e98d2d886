"""A training that serves, and peers with its token that send it what they like: memory stays
bounded, and steps go on.

    .venv/bin/python -m tests.drivers.peers mutate --sessions 2000 --seed 1
    .venv/bin/python -m tests.drivers.peers offers --seconds 20
    .venv/bin/python -m tests.drivers.peers logs

``mutate`` changes valid messages at random, and sends each session's to the training. ``offers``
pushes bodies that take much memory to decode, without end, from two peers. ``logs`` has a client
list the states of a source whose log never ends.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from datastates.errors import DatastatesError, Disconnected, PeerFault
from datastates.state.digest import encode as encode_manifest
from datastates.transport import loop, requests, tcp
from datastates.transport.handshake import greet
from datastates.transport.protocol import (
    PART_BYTES,
    Answer,
    Ask,
    Digests,
    Failed,
    Find,
    Log,
    Message,
    Moved,
    Open,
    Part,
    Ping,
    Push,
    Reach,
    Ready,
    Refs,
    Release,
    Resolve,
    RunRecord,
    StatePage,
    StateRecord,
    Took,
    Want,
    encode,
)
from datastates.transport.server import Server
from datastates.transport.session import Session
from tests.drivers.crowding import listen
from tests.drivers.mutations import bite, change, framed, honest, plain_of
from tests.transport.stores import MemoryStore, record

TOKEN = "a token that these peers know"
LIMIT_BYTES = 256 << 20
"""What all peers together may take of the training's memory, by ``docs/security.md``."""

LISTED_BYTES = 1 << 30
"""What a list may take of the client's memory, by ``docs/security.md``."""

MOST_DELAY_S = 0.2
_UID = "5e0f" * 6
_ATTACK_BYTES = 79 << 20


@dataclass(slots=True)
class Phase:
    """What a while of the training came to.

    ``grown_bytes`` is the most memory that it had, beyond that of the quiet training."""

    steps: int = 0
    longest_s: float = 0.0
    grown_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        told = ", ".join(f"{count} {kind}" for kind, count in self.outcomes.most_common(8))
        return (
            f"{self.steps} steps, longest {self.longest_s:.3f} s, memory"
            f" +{self.grown_bytes / (1 << 20):.0f} MiB; {told}"
        )


# --- the training ---------------------------------------------------------------------------------


def train(folder: str) -> None:
    """Train, capture and serve until the input ends; answer each line of it with what happened
    since the last."""
    import torch

    import datastates
    from datastates.config import Config

    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    listen(asked)
    with datastates.open(
        Path(folder) / "repo", config=Config(memory_bytes=16 << 20, durable_interval_s=2.0)
    ) as repo:
        server = repo.serve("tcp://127.0.0.1:0", token=TOKEN, is_writable=True)
        with repo.track(model=model, optimizer=optimizer) as run:
            run.capture().wait()
            _say(server.url)
            steps, longest_s, began, captured = 0, 0.0, time.monotonic(), 0.0
            while True:
                model(torch.randn(16, 256)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                now = time.monotonic()
                longest_s, began, steps = max(longest_s, now - began), now, steps + 1
                if now > captured + 0.5:
                    # it waits for room, as captures do, so it is no measure of the peers
                    run.capture()
                    captured = began = time.monotonic()
                if not asked.empty():
                    if asked.get_nowait() == "end":
                        return
                    _say({"steps": steps, "longest_s": longest_s, "peak": _peak_bytes()})
                    steps, longest_s, began = 0, 0.0, time.monotonic()


def _peak_bytes() -> int:
    """The most memory since this was last called."""
    line = next(
        line
        for line in Path("/proc/self/status").read_bytes().splitlines()
        if line.startswith(b"VmHWM:")
    )
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) << 10


def _say(matter: object) -> None:
    sys.stdout.write(f"{json.dumps(matter)}\n")
    sys.stdout.flush()


class Training:
    """The training's process, as the peers' one sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url: str = self._line()
        time.sleep(2.0)  # until all is warm
        self._ask()
        time.sleep(1.0)
        self.quiet = Phase()
        said = self._ask()
        self._quiet_bytes = said["peak"]
        self.quiet = Phase(said["steps"], said["longest_s"])

    def phase(self, outcomes: Counter[str]) -> Phase:
        """What happened since this was last called."""
        said = self._ask()
        return Phase(said["steps"], said["longest_s"], said["peak"] - self._quiet_bytes, outcomes)

    def _ask(self) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def training() -> Iterator[Training]:
    """A training in a process of its own, which ends with this."""
    with tempfile.TemporaryDirectory() as folder, _started("train", folder) as process:
        yield Training(process)


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.drivers.peers", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


# --- offers without end ---------------------------------------------------------------------------


def plain_record(uid: str = _UID, /, **changed: Any) -> dict[str, Any]:
    """A state as it travels."""
    record = StateRecord(
        uid, "0" * 64, 1, 0, {"loss": 0.5}, {}, None, 0, "captured", (), (), None, 0, 0, 0
    )
    return {**msgspec.to_builtins(record), **changed}


def plain_run(**changed: Any) -> dict[str, Any]:
    """A run as it travels."""
    return {
        **msgspec.to_builtins(RunRecord(_UID, "", "", (), None, None, {}, 0, None, None, {})),
        **changed,
    }


def offer_bodies(size: int) -> dict[str, bytes]:
    """Offers of so many bytes, by what they are made of: most take many times that to decode."""
    names = [
        "".join(letters)
        for letters in itertools.islice(
            itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=3), 10_000
        )
    ]
    ancestors = {
        "attributes": plain_record(attributes=dict.fromkeys(names)),
        "metrics": plain_record(metrics=dict.fromkeys(names, 0.5)),
        "parents": plain_record(parents=["ab"] * 1000),
        "edges": plain_record(edges=[{"parent": "ab", "kind": "", "weight": 0.5}] * 1000),
        "message": plain_record(message="\U0001f600" + "a" * 16_000),
        "short": plain_record(),
    }
    found = {name: _offer(ancestry=_many(record, size)) for name, record in ancestors.items()}
    found["refs"] = _offer(refs=_many({"name": "", "kind": "tag", "state": "ab"}, size))
    found["runs"] = _offer(runs=_many(plain_run(config=dict.fromkeys(names[:2000])), size))
    found["command lines"] = _offer(runs=_many(plain_run(argv=["a"] * 1000), size))
    found["empty lists"] = _offer(manifest=_framed_values(_repeated(b"\x90", size)))
    found["well-formed"] = _well_formed(min(15_000, size >> 10))
    found["nothing"] = _offer(ancestry=_repeated(b"\xc0", size))
    found["a claim"] = _offer(ancestry=b"\xdd\x0f\xff\xff\xff")
    found["noise"] = Random(0).randbytes(size)
    return found


def _well_formed(ancestors: int) -> bytes:
    """An offer in which nothing is wrong."""
    manifest = honest()
    known = [
        plain_record(f"{n:024x}", parents=[f"{n + 1:024x}"], attributes={"phase": "train"})
        for n in range(ancestors)
    ]
    state = plain_record(manifest.origin.uid, digest=manifest.digest)
    return msgspec.msgpack.encode(
        {"manifest": encode_manifest(manifest), "state": state, "ancestry": known}
    )


def _many(item: object, size: int) -> bytes:
    encoded = msgspec.msgpack.encode(item)
    return _repeated(encoded, size // len(encoded))


def _repeated(encoded: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + encoded * count


def _offer(**parts: bytes) -> bytes:
    """An offer of which some parts are encoded already."""
    whole = {
        "manifest": msgspec.msgpack.encode(b""),
        "state": msgspec.msgpack.encode(plain_record()),
        **parts,
    }
    return bytes([0x80 + len(whole)]) + b"".join(
        msgspec.msgpack.encode(name) + part for name, part in whole.items()
    )


def _framed_values(values: bytes) -> bytes:
    """A manifest with these values, in a frame that is right, as an offer has it."""
    return msgspec.msgpack.encode(
        framed({**plain_of(honest()), "values": msgspec.Raw(values)}, is_digest_right=True)
    )


async def push_heavy(url: str, body: bytes) -> str:
    """Push a body; what became of it."""
    try:
        session = await Session.connect(url, token=TOKEN.encode())
        try:
            await session._outgoing.request(Push(0, len(body)), limit=1 << 20, offer=body)
        finally:
            await session.close()
    except DatastatesError as exc:
        return type(exc).__name__
    return "taken"


def push_for(training: Training, name: str, seconds: float, peers: int = 2) -> Phase:
    """Push one of the offers for so long, from several peers at once."""
    body = offer_bodies(_ATTACK_BYTES)[name]

    async def attack() -> Counter[str]:
        outcomes, until = Counter[str](), time.monotonic() + seconds

        async def go_on() -> None:
            while not outcomes or time.monotonic() < until:
                outcomes[await push_heavy(training.url, body)] += 1

        await asyncio.gather(*(go_on() for _ in range(peers)))
        return outcomes

    training.phase(Counter())
    return training.phase(loop.run(attack()))


# --- changed messages -----------------------------------------------------------------------------


def mutate(training: Training, sessions: int, seed: int, at_once: int = 4) -> Phase:
    """So many sessions, each of which sends a few valid messages that were changed at random,
    and then asks for the refs."""
    random, outcomes = Random(seed), Counter[str]()
    offer = msgspec.msgpack.decode(_well_formed(4))

    async def attack() -> None:
        room = asyncio.Semaphore(at_once)

        async def go_on() -> None:
            async with room:
                outcomes[await _session(training.url, random, offer)] += 1

        await asyncio.gather(*(go_on() for _ in range(sessions)))

    training.phase(outcomes)
    loop.run(attack())
    return training.phase(outcomes)


async def _session(url: str, random: Random, offer: Any) -> str:
    """Whether the last question was answered, or the connection was closed; the server may do
    nothing else."""
    try:
        async with asyncio.timeout(30):
            channel = await tcp.dial(url, timeout_s=10)
            try:
                sealed, _ = await greet(
                    channel, Ready(("tcp",), b"", 10_000), token=TOKEN.encode(), timeout_s=10
                )
                for number in range(random.choice([1, 3, 10])):
                    for body in _changed(number, random, offer):
                        await sealed.send(body)
                await sealed.send(encode(Ask(1 << 20, Refs())))
                while True:
                    reply = await sealed.receive()
                    if isinstance(reply, Answer | Failed) and reply.id == 1 << 20:
                        return "answered"
            finally:
                await channel.close()
    except (Disconnected, PeerFault):
        return "closed"
    except TimeoutError:
        return "hung"


def _changed(number: int, random: Random, offer: Any) -> list[bytes]:
    """The frames of one message, or of a push."""
    messages: list[Message] = [
        *(
            Ask(number, each)
            for each in (
                Refs(),
                Find("step > 0", 10),
                Log("main", 10),
                Resolve("main"),
                Open(_UID),
                Reach(_UID),
            )
        ),
        *(Ask(number, each) for each in (Release(0), Digests(0, (0,)), Push(0, 100))),
        *(
            Want(0, (0,), 1, (100,)),
            Took(0, 1, 1),
            Moved(b"x", True),
            Ping(0),
            Answer(0, b"", True),
            Part(number, b"x"),
        ),
    ]
    if random.random() < 0.4:
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(offer))
        if random.random() < 0.5:
            parts = plain_of(honest())
            change(parts[random.choice(sorted(parts))], random)
            plain["manifest"] = _framed(parts)
        else:
            change(plain, random)
        body = _encoded(plain)
        sent = [
            encode(Part(number, body[at : at + PART_BYTES]))
            for at in range(0, len(body), PART_BYTES)
        ]
        return [encode(Ask(number, Push(0, len(body)))), *sent]
    plain = msgspec.msgpack.decode(encode(random.choice(messages)))
    if random.random() < 0.3:
        return [bite(encode(random.choice(messages)), random) or b"\0"]
    change(plain, random)
    return [_encoded(plain)]


def _framed(parts: dict[str, Any]) -> bytes:
    try:
        return framed(parts, is_digest_right=True)
    except (TypeError, OverflowError, ValueError):  # of that no manifest can be made
        return b""


def _encoded(plain: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(plain) or b"\0"
    except (TypeError, OverflowError, ValueError):  # as above
        return b"\0"


# --- logs without end -----------------------------------------------------------------------------


class Endless(MemoryStore):
    """A source that lists states which nobody has, for ever.

    ``kind`` says of what a page consists."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._numbers = kind, itertools.count()

    def log(self, rev: str, limit: int, after: str | None) -> StatePage:
        if self._kind == "more than asked":
            limit = 10_000
        plain = record()
        if self._kind == "heavy":
            plain = msgspec.structs.replace(plain, parents=("ab",) * 1000)
        return StatePage(
            tuple(
                msgspec.structs.replace(plain, uid=f"{next(self._numbers):024x}")
                for _ in range(limit)
            ),
            "more",
        )


KINDS: dict[str, int | None] = {"ordinary": None, "heavy": None, "more than asked": 1}
"""What a source lists without end, and with which limit a client asks for it."""


def logs(kind: str) -> tuple[str, int, float]:
    """What a client in a process of its own gets that lists the states of such a source, how
    much memory it took, and how long."""
    # such a source sends what it likes; the module exports none
    setattr(requests, "PAGE_BYTES", 1 << 40)  # noqa: B010
    server = Server(Endless(kind), "tcp://127.0.0.1:0", token=TOKEN.encode(), timeout_s=60)
    loop.run(server.start())
    try:
        with _started("list", server.url, str(KINDS[kind] or 0)) as client:
            assert client.stdout is not None
            outcome, grown, took_s = json.loads(client.stdout.readline())
            return outcome, grown, took_s
    finally:
        loop.run(server.close(grace_s=0))


def list_states(url: str, limit: int) -> None:
    """List what a source has, and say what became of it."""
    import datastates

    with datastates.connect(url, token=TOKEN, timeout_s=60) as peer:
        _peak_bytes()
        before, began = _peak_bytes(), time.monotonic()
        try:
            outcome = f"{len(peer.log('main', limit=limit or None))} states"
        except DatastatesError as exc:
            outcome = f"{type(exc).__name__}: {exc}"
    _say([outcome, _peak_bytes() - before, time.monotonic() - began])


def main() -> None:
    """From the command line."""
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    elif sys.argv[1:2] == ["list"]:
        list_states(sys.argv[2], int(sys.argv[3]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("what", choices=["mutate", "offers", "logs"])
        parser.add_argument("--seconds", type=float, default=4.0)
        parser.add_argument("--sessions", type=int, default=200)
        parser.add_argument("--seed", type=int, default=0)
        given = parser.parse_args()
        if given.what == "logs":
            for kind in KINDS:
                outcome, grown, took_s = logs(kind)
                sys.stdout.write(
                    f"{kind}: {outcome}; memory +{grown / (1 << 20):.0f} MiB in {took_s:.1f} s\n"
                )
            return
        with training() as trained:
            sys.stdout.write(f"quiet: {trained.quiet}\n")
            if given.what == "mutate":
                sys.stdout.write(
                    f"seed {given.seed}: {mutate(trained, given.sessions, given.seed)}\n"
                )
            else:
                for name in offer_bodies(1 << 10):
                    sys.stdout.write(f"{name}: {push_for(trained, name, given.seconds)}\n")


if __name__ == "__main__":
    main()
