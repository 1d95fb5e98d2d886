"""The cost of a clone: a state from one process into the live tensors of another, and the slowdown
of the source's training.

    python benchmarks/clone.py [--quick] [--part large|tiny|latency|serving] [--hosts [--gbit N]]
    [--json FILE] [--rounds N]

Two processes, a sender and a receiver, with every method in turn, round after round. Before each
transfer the receiver's memory is cleared. After it, every byte is compared. The floor sends one
piece of prefaulted memory as the transport does, without checks and without tensors. UCXX can be
started only once in a process, so datastates has a second pair of processes. With ``--hosts`` the
two processes are in separate network namespaces, as on two hosts. With ``--gbit`` the link between
them has that many Gbit/s. Without it, the link is as fast as the cores, which both ends share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch is there, in the children too
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
os.environ.setdefault("UCX_LOG_FILE", "stderr")

import torch
import xxhash
from capture_peers import Objects, state_bytes, state_tensors
from clone_peers import FLOOR, WAYS, Ours, Way, why_not
from common import machine, out, short, spread, table
from gpt import LARGE, MEDIUM, TINY, Trainer
from namespaces import INTERFACE, SENDER, enter, two_hosts

GOAL = 0.85
"""The goal for datastates, into live tensors and verified, relative to the floor's speed."""

LATENCY_GOAL_MS = 30.0

OURS = (
    "datastates, in place",
    "datastates, atomic",
    "datastates over TCP, in place",
    "datastates over TCP, atomic",
    "datastates over TLS, in place",
    "datastates over UCX, in place",
)
"""Read from the source's memory, as on one host, and over a connection, as between two hosts."""

OVER_THE_WIRE = OURS[2:]


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer: the time until all bytes were received, and the CPU time of both processes."""

    seconds: float
    cpu_s: float


# What is sent


@dataclass(frozen=True, slots=True)
class Load:
    """The objects whose state is cloned, and a training step if there is one."""

    objects: Objects
    step: Callable[[], None] | None = None


def _large(quick: bool) -> Load:
    return Load(Trainer.make(TINY if quick else LARGE).objects)


def _tiny(quick: bool) -> Load:
    torch.manual_seed(0)
    return Load(
        {"tensors": {f"t{index}": torch.randn(256) for index in range(500 if quick else 10_000)}}
    )


def _megabyte(quick: bool) -> Load:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 256)).sum().backward()
    optimizer.step()
    return Load({"model": model, "optimizer": optimizer})


def _training(quick: bool) -> Load:
    trainer = Trainer.make(TINY if quick else MEDIUM)

    def step() -> None:
        trainer.backward()
        trainer.optimizer.step()

    return Load(trainer.objects, step)


LOADS: dict[str, Callable[[bool], Load]] = {
    "large": _large,
    "tiny": _tiny,
    "latency": _megabyte,
    "serving": _training,
}


# The two processes


def work(
    role: str,
    part: str,
    names: list[str],
    quick: bool,
    host: str | None,
    orders: Connection,
    wire: Connection,
) -> None:
    """A sender or a receiver: make the state, prepare every method, then execute commands until
    None arrives."""
    if host is not None:
        enter(host)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' own
    load = LOADS[part](quick)
    side = (Sender if role == "sender" else Receiver)(load)
    for name in names:
        way = side.ways[name] = WAYS[name]()
        if host is not None:
            way.address, way.interface = SENDER, INTERFACE
        way.objects, way.wire = load.objects, wire
        side.prepare(way)
    orders.send([len(side.expected), state_bytes(load.objects)])
    for order, name in iter(orders.recv, None):
        side.act(order, side.ways[name], orders)
    for way in side.ways.values():
        way.close()
    orders.close()
    os._exit(0)  # a progress thread of UCXX may outlive its interpreter


class Side:
    """One of the two processes."""

    def __init__(self, load: Load) -> None:
        self.load, self.ways = load, dict[str, Way]()
        self.expected = [
            xxhash.xxh3_128_digest(_bytes(tensor)) for tensor in state_tensors(load.objects)
        ]

    def prepare(self, way: Way) -> None:
        """Prepare a method."""
        raise NotImplementedError

    def act(self, order: str, way: Way, orders: Connection) -> None:
        """Execute a command and return its result."""
        raise NotImplementedError


class Sender(Side):
    """Serves, and trains at the same time."""

    def prepare(self, way: Way) -> None:
        way.offer()

    def act(self, order: str, way: Way, orders: Connection) -> None:
        if order == "train":
            orders.send(self.train(8))
        elif order == "transfer":
            way.wire.send("ready")
            cpu = time.process_time()
            self.serve(way)
            orders.send({"cpu_s": time.process_time() - cpu})
        else:
            helper = threading.Thread(target=self.serve, args=(way,))
            helper.start()
            orders.send(self.train(8))
            helper.join()

    def serve(self, way: Way) -> None:
        """Join every transfer until the receiver ends."""
        while way.wire.recv() == "go":
            way.serve()

    def train(self, steps: int) -> list[float]:
        """The seconds of each training step."""
        assert self.load.step is not None
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.load.step()
            seconds.append(time.perf_counter() - start)
        return seconds


class Receiver(Side):
    """Fetches, and checks that the bytes are right."""

    def prepare(self, way: Way) -> None:
        way.expect()

    def act(self, order: str, way: Way, orders: Connection) -> None:
        orders.send(self.transfer(way) if order == "transfer" else self.pull(way, orders))

    def transfer(self, way: Way) -> dict[str, float]:
        """One transfer into cleared memory."""
        for tensor in way.landed():
            tensor.detach().zero_()
        way.wire.recv()
        cpu, start = time.process_time(), time.perf_counter()
        way.wire.send("go")
        way.fetch()
        found = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        way.wire.send("enough")
        if [xxhash.xxh3_128_digest(_bytes(tensor)) for tensor in way.landed()] != self.expected:
            raise SystemExit(f"{type(way).__name__} brought other bytes than were sent")
        return found

    def pull(self, way: Way, orders: Connection) -> list[float]:
        """Transfer in a loop until a stop command. Returns the seconds of each transfer."""
        seconds = []
        while not orders.poll():
            start = time.perf_counter()
            way.wire.send("go")
            way.fetch()
            seconds.append(time.perf_counter() - start)
        orders.recv()
        way.wire.send("enough")
        return seconds


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(slots=True)
class Pair:
    """A sender and a receiver."""

    names: list[str]
    sender: Connection
    receiver: Connection
    tensors: int
    size: int

    def transfer(self, name: str) -> Sample:
        """One transfer. The CPU time is the sum of both processes."""
        for end in (self.sender, self.receiver):
            end.send(("transfer", name))
        sent, received = _answer(self.sender), _answer(self.receiver)
        return Sample(received["seconds"], received["cpu_s"] + sent["cpu_s"])


def _answer(end: Connection) -> Any:
    if not end.poll(300):
        raise SystemExit("a process of this benchmark has not answered for 5 minutes")
    try:
        return end.recv()
    except EOFError:
        raise SystemExit("a process of this benchmark died, see above") from None


@contextlib.contextmanager
def _pairs(part: str, names: list[str], quick: bool, hosts: dict[str, str]) -> Iterator[list[Pair]]:
    """The processes for these methods, each on the host of its role, if it has one. All are ended
    afterwards."""
    context = multiprocessing.get_context("spawn")
    processes, pairs = [], []
    ours = [name for name in names if issubclass(WAYS[name], Ours)]
    groups = [group for group in ([name for name in names if name not in ours], ours) if group]
    try:
        for group in groups:
            wires, ends = context.Pipe(), list[Connection]()
            for role, wire in zip(("sender", "receiver"), wires, strict=True):
                end, orders = context.Pipe()
                processes.append(
                    context.Process(
                        target=work,
                        args=(role, part, group, quick, hosts.get(role), orders, wire),
                        name=role,
                    )
                )
                processes[-1].start()
                orders.close()
                ends.append(end)
            for wire in wires:
                wire.close()
            (tensors, size), _ = map(_answer, ends)
            pairs.append(Pair(group, ends[0], ends[1], tensors, size))
        yield pairs
        for end in (end for pair in pairs for end in (pair.receiver, pair.sender)):
            end.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
            process.join()


# The parts


def transfers(
    part: str, what: str, names: list[str], *, quick: bool, rounds: int, hosts: dict[str, str]
) -> dict[str, Any]:
    """Every method in turn, after a round that does not count."""
    here = _possible(names)
    samples: dict[str, list[Sample]] = {name: [] for name in here}
    with _pairs(part, here, quick, hosts) as pairs:
        owner = {name: pair for pair in pairs for name in pair.names}
        for index in range(rounds + 1):
            for name in here:
                sample = owner[name].transfer(name)
                if index:
                    samples[name].append(sample)
            sys.stderr.write(f"{part}: round {index} of {rounds}\n")
    tensors, size = pairs[0].tensors, pairs[0].size
    out(f"\n## {what}: {tensors} tensors, {size / 1e6:.1f} MB; median [min .. max] of {rounds}\n")
    _print(samples, size)
    return {
        "tensors": tensors,
        "bytes": size,
        "samples": {name: [asdict(sample) for sample in found] for name, found in samples.items()},
    }


def _possible(names: list[str]) -> list[str]:
    for name in names:
        if reason := why_not(name):
            out(f"left out: {name}: {reason}")
    return [name for name in names if not why_not(name)]


def _print(samples: dict[str, list[Sample]], size: int) -> None:
    rows = []
    for name, found in samples.items():
        seconds = [sample.seconds for sample in found]
        rows.append(
            [
                name,
                spread(seconds, 1e3),
                short(size / statistics.median(seconds) / 1e9),
                spread(_ratios(samples, name), 1) if FLOOR in samples else "",
                short(statistics.median(sample.cpu_s for sample in found) / size * 1e9),
            ]
        )
    out(table(["way", "ms", "GB/s", "speed / floor of the same round", "CPU s per GB"], rows))


def _ratios(samples: dict[str, list[Sample]], name: str) -> list[float]:
    return [
        floor.seconds / ours.seconds
        for floor, ours in zip(samples[FLOOR], samples[name], strict=True)
    ]


def large(*, quick: bool, rounds: int, hosts: dict[str, str]) -> dict[str, Any]:
    """A 100M-parameter GPT with AdamW."""
    names = [FLOOR, *(OVER_THE_WIRE if hosts else OURS), "raw socket", "gloo broadcast"]
    names += [] if hosts else ["torchft HTTPTransport", "torch.save + load, shared memory"]
    found = transfers("large", "GPT + AdamW", names, quick=quick, rounds=rounds, hosts=hosts)
    medians = {
        name: statistics.median(sample["seconds"] for sample in samples)
        for name, samples in found["samples"].items()
    }
    peers = {
        name: median
        for name, median in medians.items()
        if name != FLOOR and not issubclass(WAYS[name], Ours)
    }
    for name in [] if quick else medians:
        if issubclass(WAYS[name], Ours):
            ratio = statistics.median(
                floor["seconds"] / ours["seconds"]
                for floor, ours in zip(found["samples"][FLOOR], found["samples"][name], strict=True)
            )
            best = min(peers, key=peers.__getitem__)
            goal(f"{name}: {ratio:.3f}x the floor, wanted {GOAL}x", ratio >= GOAL)
            goal(
                f"{name}: {1e3 * medians[name]:.0f} ms, the fastest peer ({best})"
                f" {1e3 * peers[best]:.0f} ms",
                medians[name] < peers[best],
            )
    return found


def tiny(*, quick: bool, rounds: int, hosts: dict[str, str]) -> dict[str, Any]:
    """10,000 tensors of 1 KiB, to measure the cost of each tensor."""
    names = [FLOOR, *OURS, "UCXX, a message a tensor", "torch.save + load, shared memory"]
    return transfers("tiny", "tiny tensors", names, quick=quick, rounds=rounds, hosts=hosts)


def latency(*, quick: bool, rounds: int, hosts: dict[str, str]) -> dict[str, Any]:
    """A state of 1 MB."""
    names = [FLOOR, *OURS, "datastates, with connect", "raw socket"]
    names += ["torchft HTTPTransport", "torch.save + load, shared memory"]
    found = transfers(
        "latency", "a small state", names, quick=quick, rounds=rounds * 5, hosts=hosts
    )
    for name in [name for name in found["samples"] if issubclass(WAYS[name], Ours)]:
        median = 1e3 * statistics.median(sample["seconds"] for sample in found["samples"][name])
        goal(
            f"{name}: {median:.1f} ms, wanted at most {LATENCY_GOAL_MS:.0f}",
            median <= LATENCY_GOAL_MS,
        )
    return found


def serving(*, quick: bool, rounds: int, hosts: dict[str, str]) -> dict[str, Any]:
    """A 29M-parameter GPT that trains while a receiver clones its state without a pause."""
    here = _possible([FLOOR, "datastates, in place", "datastates over TCP, in place"])
    rows, found = [], {}
    with _pairs("serving", here, quick, hosts) as pairs:
        for pair in pairs:
            name = pair.names[0]
            found[name] = _slowdown(pair, name, rounds)
            slow = [
                100 * (busy / calm - 1)
                for calm, busy in zip(found[name]["calm_s"], found[name]["busy_s"], strict=True)
            ]
            speeds = [pair.size / seconds / 1e9 for seconds in found[name]["transfers_s"]]
            rows.append(
                [
                    name,
                    *(spread(found[name][key], 1e3) for key in ("calm_s", "busy_s")),
                    spread(slow, 1),
                    spread(speeds, 1),
                ]
            )
    out(
        f"\n## Training at the source while it serves: state of {pairs[0].size / 1e6:.0f} MB;"
        f" median [min .. max] of {rounds}\n"
    )
    out(
        table(
            ["served by", "step alone, ms", "step while serving, ms", "slower by %", "served GB/s"],
            rows,
        )
    )
    return found


def _slowdown(pair: Pair, name: str, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"calm_s": [], "busy_s": [], "transfers_s": []}
    for _ in range(rounds + 1):
        pair.sender.send(("train", name))
        found["calm_s"].append(statistics.median(_answer(pair.sender)))
        pair.sender.send(("train and serve", name))
        pair.receiver.send(("pull", name))
        found["busy_s"].append(statistics.median(_answer(pair.sender)))
        pair.receiver.send("stop")
        found["transfers_s"] += _answer(pair.receiver)
    return {key: values[1:] for key, values in found.items()}


def goal(text: str, is_met: bool) -> None:
    """A line that states whether a goal was met."""
    out(f"{'met   ' if is_met else 'MISSED'} {text}")


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "large": large,
    "tiny": tiny,
    "latency": latency,
    "serving": serving,
}


def main() -> None:
    """Measure the selected parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=[*PARTS], action="append")
    parser.add_argument("--quick", action="store_true", help="tiny states: does it run?")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--rounds", type=int, help="how often each way is measured (7)")
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="two network namespaces instead of loopback: the part large, for root",
    )
    parser.add_argument(
        "--gbit",
        type=float,
        help="with --hosts: what the cable carries, Gbit/s (as much as the cores can)",
    )
    options = parser.parse_args()
    if options.gbit is not None and (not options.hosts or not options.gbit > 0):
        parser.error("--gbit goes with --hosts and is more than 0")
    rounds = options.rounds or (1 if options.quick else 7)
    cable = f", a cable of {options.gbit:g} Gbit/s" if options.gbit else ""
    out(
        f"{machine()}; two processes"
        f" {'in two network namespaces' + cable if options.hosts else 'on loopback'}, torch on one"
        " thread"
    )
    parts = ["large"] if options.hosts else options.part or PARTS
    with (
        two_hosts(options.gbit) if options.hosts else contextlib.nullcontext(dict[str, str]())
    ) as hosts:
        results = {
            part: PARTS[part](quick=options.quick, rounds=rounds, hosts=hosts) for part in parts
        }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
