"""Copies to external tiers: putting a state on S3 and Redis, and restoring it from there, compared
with bare clients and other libraries. Also what the copies cost a training.

    python benchmarks/tiers.py [--rounds 5] [--quick] [--part s3|redis] [--folder DIR] [--json FILE]
    python benchmarks/tiers.py --overhead [--rounds 5]

The servers are started here: OpenStack Swift with its API of S3, and Redis (``scripts/stores``
installs both). They share the cores with the client, so compare ratios, and the CPU time of the
client. It covers all threads of this process, and none of the servers.

The methods take turns, round after round, after a round that does not count. Each round has new
bytes. The floors are bare clients that move the same bytes to and from the same server:

- S3: a multipart put and ranged gets by obstore, with the sizes and the concurrency of the tier.
- Redis: SET and GET of 4 MiB values on one socket, without a library.

Peers are measured if they are installed: boto3 with torch.save, torch.distributed.checkpoint with
s3fs, and redis. A ``KeyedTier`` of three methods is measured like the copy of a repository. After
each restore, the tensors are compared with those that were put.

``--overhead`` trains the model of ``capture.py`` with a capture at every step. Every tenth state is
durable. It compares no copies, copies to S3, and no copies while another process uploads as many
bytes with a bare client.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from capture import Segment, segment
from capture_peers import Objects, Ours, state_bytes
from common import machine, out, short, spread, table
from gpt import MEDIUM, TINY, Trainer
from restore import copy_into, size_of, tensors_of

import datastates
from datastates import Config
from datastates.demo.model import Shape
from datastates.storage import KeyedTier, ObjectTier, Payload, Tier
from datastates.storage.keyed import REQUEST_BYTES, REQUESTS
from datastates.storage.remote import UPLOAD_PART_BYTES, tier_of_url

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.stores import (
    RedisServer,
    S3Server,
    redis_missing,
    redis_server,
    s3_missing,
    s3_server,
)

STATE = Shape(layers=6, heads=6, width=384, context=256, vocabulary=5_000)
"""12.6M parameters; with AdamW 151 MB."""

QUICK = Shape(layers=2, heads=4, width=256, context=64, vocabulary=512)
"""1.7M parameters; with AdamW 21 MB."""

FLOOR = "floor: bare client"
PUT = "datastates, put of the tier"
COPY = "datastates, from durable to external"
RESTORE, LOAD, ONLY = "datastates, restore", "datastates, load", 'datastates, load(only="model")'
BOTO3, DCP = "torch.save + boto3", "DCP + s3fs"
KEYED = "KeyedTier of three methods"
READ = "datastates, chunks of the tier"
REDIS_PY = "redis-py"


class Goal(NamedTuple):
    """The least speed relative to the floor, and the most client CPU seconds per GB."""

    speed: float
    cpu_s_per_gb: float | None = None


PUT_GOALS = {PUT: Goal(0.8, 0.6)}
RESTORE_GOALS = {RESTORE: Goal(0.8), LOAD: Goal(0.8)}
REDIS_GOALS = {PUT: Goal(0.8), READ: Goal(0.8)}
ONLY_GOAL = 1.1
"""The most bytes that ``load(only="model")`` may read, relative to the bytes of the model."""

OVERHEAD_GOAL = 1.0
"""The most that copies may add to the wall time of a training, in percentage points."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a method."""

    size: int
    seconds: float
    cpu_s: float

    @property
    def speed(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds


Samples = dict[str, list[Sample]]
Way = Callable[[], Sample]


def timed(size: int, work: Callable[[], object]) -> Sample:
    """The time of one call, and the CPU time of all threads of this process meanwhile."""
    cpu, start = time.process_time(), time.perf_counter()
    work()
    return Sample(size, time.perf_counter() - start, time.process_time() - cpu)


def take_turns(ways: dict[str, Way], found: Samples) -> None:
    """Call each method once, and note its sample."""
    for name, way in ways.items():
        sample = way()
        found.setdefault(name, []).append(sample)
        sys.stderr.write(f"{name}: {sample.seconds:.2f} s, {sample.cpu_s:.2f} s of CPU\n")


def show(title: str, found: Samples, goals: dict[str, Goal]) -> None:
    """A table of these samples, each method next to the floor of the same round."""
    rows = []
    for name, samples in found.items():
        ratios = [
            ours.speed / floor.speed for ours, floor in zip(samples, found[FLOOR], strict=True)
        ]
        cpu = [sample.cpu_s / sample.size * 1e9 for sample in samples]
        rows.append(
            [
                name,
                spread([sample.seconds for sample in samples], 1e3),
                short(statistics.median(sample.speed for sample in samples) / 1e9),
                spread(ratios),
                spread(cpu),
                _verdict(goals.get(name), statistics.median(ratios), statistics.median(cpu)),
            ]
        )
    out(f"\n## {title}; median [min .. max] of {len(found[FLOOR])}\n")
    out(table(["way", "ms", "GB/s", "speed / floor", "client CPU s/GB", "goal"], rows))


def _verdict(goal: Goal | None, speed: float, cpu: float) -> str:
    if goal is None:
        return ""
    said = f"speed {goal.speed}: {_met(speed >= goal.speed)}"
    if goal.cpu_s_per_gb is None:
        return said
    return f"{said}; CPU {goal.cpu_s_per_gb}: {_met(cpu <= goal.cpu_s_per_gb)}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def peer(module: str, what: str) -> Any:
    """A library that is measured if it is installed, else None and a message."""
    if importlib.util.find_spec(module) is None:
        out(f"Skipped: {what}, because {module} is not installed.")
        return None
    return importlib.import_module(module)


# --- the state


class Source:
    """A GPT and its AdamW, with new bytes in each round."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.objects = Trainer.make(shape).objects
        for parameter in self.objects["model"].parameters():
            parameter.grad = None
        self.live = tensors_of(self.objects)
        self.saved = {name: tensor.clone() for name, tensor in self.live.items()}
        self.size = size_of(self.live)
        self.model_size = size_of(
            {name: each for name, each in self.live.items() if name.startswith("model/")}
        )
        self._repo = datastates.open(folder / "source", config=self.config())
        self._run = self._repo.track(rng=False, **self.objects)

    def config(self, tiers: Sequence[Tier | str] = ()) -> Config:
        """Memory for two states. States are written only when it is requested."""
        memory = 2 * self.size + (64 << 20)
        return Config(memory_bytes=memory, durable_interval_s=None, tiers=list(tiers))

    @contextmanager
    def renewed(self) -> Iterator[Payload]:
        """New bytes in every tensor, and the state of them in memory."""
        for name, tensor in self.live.items():
            if tensor.numel() > 1:
                tensor.normal_()
            self.saved[name].copy_(tensor)
        state = self._run.capture().wait()
        memory = self._repo.core.tiers.captured
        assert memory is not None
        with memory.open(state.uid) as reader:
            chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
            yield Payload(reader.manifest, chunks)

    def restored(self, work: Callable[[], object]) -> Sample:
        """The time of a call that restores all tensors, which are set to zero before it."""
        with torch.no_grad():
            for tensor in self.live.values():
                tensor.fill_(0)
        sample = timed(self.size, work)
        self.compare(self.live)
        return sample

    def compare(self, found: dict[str, torch.Tensor]) -> None:
        """End the program unless these tensors are those that were put."""
        for name, tensor in found.items():
            if not torch.equal(tensor, self.saved[name]):
                raise SystemExit(f"{name} is not what was put")

    def compare_model(self, tree: dict[str, Any]) -> None:
        """The same for the model in a tree that was loaded."""
        names = [name for name in self.saved if name.startswith("model/")]
        self.compare({name: tree["model"][name.removeprefix("model/")] for name in names})

    def close(self) -> None:
        """Free the memory."""
        self._run.close()
        self._repo.close()


# --- S3


class CountedTier(ObjectTier):
    """Counts the bytes that are read from packs."""

    bytes_read = 0

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        self.bytes_read += length
        return super().read_range(key, start, length)


class PlainTier(KeyedTier):
    """The least that a user writes: three methods, an object for each chunk, and a listing to find
    out whether it is there."""

    name = "plain"

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def read(self, key: str) -> memoryview:
        import obstore

        try:
            return memoryview(obstore.get(self._store, key).bytes())
        except FileNotFoundError as exc:
            raise KeyError(key) from exc

    def write(self, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self._store, key, data, use_multipart=False)

    def keys(self, prefix: str) -> Iterator[str]:
        import obstore

        folder = prefix[: prefix.rfind("/") + 1]
        for page in obstore.list(self._store, prefix=folder or None):
            for item in page:
                if item["path"].startswith(prefix):
                    yield item["path"]


@dataclass(slots=True)
class S3Round:
    """The methods of one round: they put a state under their own prefixes, and get it back."""

    source: Source
    payload: Payload
    folder: Path
    url: str
    """The bucket and the prefix of this round."""

    read: list[int] = field(default_factory=list)
    """The bytes that ``load(only="model")`` read."""

    def puts(self, boto3: Any, s3fs: Any) -> dict[str, Way]:
        """The methods that put."""
        data = b"".join(self.payload.chunks)
        tier = self._tier("put")
        ways: dict[str, Way] = {
            FLOOR: partial(timed, len(data), partial(self._bare_put, data)),
            PUT: partial(timed, len(data), partial(tier.put, self.payload)),
            COPY: partial(self._copied, "copy", f"{self.url}/copy"),
            KEYED: partial(self._copied, "keyed", PlainTier(self._tier("keyed").store)),
        }
        if boto3 is not None:
            ways[BOTO3] = partial(timed, self.source.size, partial(self._boto3_put, boto3))
        if s3fs is not None:
            ways[DCP] = partial(timed, self.source.size, self._dcp_save)
        return ways

    def gets(self, boto3: Any, s3fs: Any) -> dict[str, Way]:
        """The methods that read what ``puts`` has put."""
        source, size = self.source, sum(chunk.nbytes for chunk in self.payload.chunks)
        plain = PlainTier(self._tier("keyed").store)
        ways: dict[str, Way] = {
            FLOOR: partial(timed, size, partial(self._bare_get, size)),
            RESTORE: partial(self._restored, "copy", self._tier("copy")),
            LOAD: self._loaded,
            ONLY: self._loaded_model,
            KEYED: partial(self._restored, "keyed", plain),
        }
        if boto3 is not None:
            ways[BOTO3] = partial(source.restored, partial(self._boto3_get, boto3))
        if s3fs is not None:
            ways[DCP] = partial(source.restored, self._dcp_load)
        return ways

    def _tier(self, prefix: str) -> CountedTier:
        url = f"{self.url}/{prefix}"
        tier = tier_of_url(url)
        assert isinstance(tier, ObjectTier)
        return CountedTier(tier.store, url=url)

    # the floor

    def _bare_put(self, data: bytes) -> None:
        import obstore

        obstore.put(
            self._tier("bare").store,
            "state",
            data,
            use_multipart=True,
            chunk_size=UPLOAD_PART_BYTES,
            max_concurrency=REQUESTS,
        )

    def _bare_get(self, size: int) -> None:
        import obstore

        store = self._tier("bare").store

        def get(start: int) -> int:
            length = min(REQUEST_BYTES, size - start)
            return len(obstore.get_range(store, "state", start=start, length=length))

        with ThreadPoolExecutor(REQUESTS) as pool:
            if sum(pool.map(get, range(0, size, REQUEST_BYTES))) != size:
                raise SystemExit("the bare client got fewer bytes than it put")

    # datastates

    def _copied(self, name: str, tier: Tier | str) -> Sample:
        """The time between durable and external. Afterwards only the external copy is left."""
        folder = self.folder / name
        with (
            datastates.open(folder, config=self.source.config([tier])) as repo,
            repo.track(rng=False, **self.source.objects) as run,
        ):
            capture = run.capture()
            capture.wait("durable")
            sample = timed(self.source.size, partial(capture.wait, "external"))
        shutil.rmtree(folder / "packs")
        return sample

    def _restored(self, name: str, tier: Tier) -> Sample:
        with datastates.open(self.folder / name, config=self.source.config([tier])) as repo:
            restore = partial(repo.restore, "main", objects=self.source.objects)
            return self.source.restored(restore)

    def _loaded(self) -> Sample:
        config = self.source.config([self._tier("copy")])
        with datastates.open(self.folder / "copy", config=config) as repo:
            tree: dict[str, Any] = {}
            sample = timed(self.source.size, lambda: tree.update(repo.load("main")))
        self.source.compare_model(tree)
        return sample

    def _loaded_model(self) -> Sample:
        tier = self._tier("copy")
        with datastates.open(self.folder / "copy", config=self.source.config([tier])) as repo:
            tree: dict[str, Any] = {}
            before = tier.bytes_read
            sample = timed(
                self.source.model_size, lambda: tree.update(repo.load("main", only="model"))
            )
            self.read.append(tier.bytes_read - before)
        self.source.compare_model(tree)
        return sample

    # peers

    def _boto3_put(self, boto3: Any) -> None:
        with io.BytesIO() as file:
            torch.save(self.source.live, file)
            file.seek(0)
            boto3.client("s3").upload_fileobj(file, *self._place("boto3"))

    def _boto3_get(self, boto3: Any) -> None:
        with io.BytesIO() as file:
            boto3.client("s3").download_fileobj(*self._place("boto3"), file)
            file.seek(0)
            copy_into(self.source.live, torch.load(file, weights_only=True))

    def _dcp_save(self) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FsspecWriter(f"{self.url}/dcp")
        save(dict(self.source.live), storage_writer=writer, no_dist=True)

    def _dcp_load(self) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FsspecReader(f"{self.url}/dcp")
        load(dict(self.source.live), storage_reader=reader, no_dist=True)

    def _place(self, name: str) -> tuple[str, str]:
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        return bucket, f"{prefix}/{name}"


def s3(folder: Path, *, quick: bool, rounds: int) -> dict[str, Any]:
    """Put a state on S3, and restore it from there alone."""
    if missing := s3_missing():
        out(f"Skipped: S3, because there is {missing}.")
        return {}
    boto3, s3fs = peer("boto3", BOTO3), peer("s3fs", DCP)
    put, got, read = Samples(), Samples(), list[int]()
    with (
        s3_server(folder / "s3") as server,
        closing(Source(folder, QUICK if quick else STATE)) as source,
    ):
        bucket = _bucket(server)
        for index in range(rounds + 1):
            sys.stderr.write(f"S3, round {index} of {rounds}\n")
            with source.renewed() as payload:
                one = S3Round(source, payload, folder / f"round-{index}", f"{bucket}/{index}")
                take_turns(one.puts(boto3, s3fs), put)
                take_turns(one.gets(boto3, s3fs), got)
            read += one.read
            empty(bucket)
            shutil.rmtree(one.folder)
            if index == 0:
                put, got, read = Samples(), Samples(), []
        count, size, model = len(source.saved), source.size, source.model_size
    title = f"{count} tensors, {size / 1e6:.0f} MB"
    show(f"S3, put: {title}", put, PUT_GOALS)
    show(f"S3, restore from the bucket alone: {title}", got, RESTORE_GOALS)
    ratio = statistics.median(read) / model
    out(
        f'\nload(only="model") read {statistics.median(read) / 1e6:.1f} MB for a model of'
        f" {model / 1e6:.1f} MB: {ratio:.2f} times its bytes"
        f" (goal {ONLY_GOAL}: {_met(ratio <= ONLY_GOAL)})"
    )
    return {"put": _plain(put), "restore": _plain(got), "read": read, "model": model}


def _bucket(server: S3Server) -> str:
    """The URL of a bucket that all clients of this process find by the environment."""
    os.environ |= server.environment()
    # Swift does not know the checksums that newer clients of AWS add to a body
    os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
    os.environ["AWS_RESPONSE_CHECKSUM_VALIDATION"] = "when_required"
    return server.bucket("bench")


def empty(url: str) -> None:
    """Delete every object of a bucket."""
    import obstore

    tier = tier_of_url(url)
    assert isinstance(tier, ObjectTier)
    for key in list(tier.keys("")):
        obstore.delete(tier.store, key)


def _plain(found: Samples) -> dict[str, list[dict[str, float]]]:
    return {name: [asdict(sample) for sample in samples] for name, samples in found.items()}


# --- Redis


class BareRedis:
    """The floor: SET and GET on one socket, into memory that is used again and again."""

    def __init__(self, host: str, port: int, chunks: Sequence[memoryview]) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._chunks = chunks
        self._memory = memoryview(bytearray(max(chunk.nbytes for chunk in chunks) + 64))

    def put(self) -> None:
        """Set each chunk."""
        for index, chunk in enumerate(self._chunks):
            key = b"bare-%06d" % index
            self._socket.sendall(
                b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, chunk.nbytes)
            )
            self._socket.sendall(chunk)
            self._socket.sendall(b"\r\n")
            if self._socket.recv(5, socket.MSG_WAITALL) != b"+OK\r\n":
                raise SystemExit("Redis refused a value of the bare client")

    def get(self) -> None:
        """Get each chunk."""
        for index, chunk in enumerate(self._chunks):
            key = b"bare-%06d" % index
            self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
            head = b"$%d\r\n" % chunk.nbytes
            wanted, done = len(head) + chunk.nbytes + 2, 0
            while done < wanted:
                got = self._socket.recv_into(self._memory[done:wanted])
                if not got:
                    raise SystemExit("Redis closed the connection of the bare client")
                done += got
            if self._memory[: len(head)] != head:
                raise SystemExit("the bare client got another value than it set")

    def close(self) -> None:
        self._socket.close()


def redis(folder: Path, *, quick: bool, rounds: int) -> dict[str, Any]:
    """Put a state on Redis, and get all of its chunks."""
    if missing := redis_missing():
        out(f"Skipped: Redis, because there is {missing}.")
        return {}
    library = peer("redis", REDIS_PY)
    put, got = Samples(), Samples()
    with (
        redis_server(folder / "redis") as server,
        closing(Source(folder, QUICK if quick else STATE)) as source,
    ):
        for index in range(rounds + 1):
            sys.stderr.write(f"Redis, round {index} of {rounds}\n")
            with source.renewed() as payload:
                puts, gets = _redis_ways(server, payload, library)
                take_turns(puts, put)
                take_turns(gets, got)
            server.command("FLUSHALL")
            if index == 0:
                put, got = Samples(), Samples()
        title = f"{len(payload.chunks)} chunks, {source.size / 1e6:.0f} MB"
    show(f"Redis, put: {title}", put, REDIS_GOALS)
    show(f"Redis, get: {title}", got, REDIS_GOALS)
    return {"put": _plain(put), "get": _plain(got)}


def _redis_ways(
    server: RedisServer, payload: Payload, library: Any
) -> tuple[dict[str, Way], dict[str, Way]]:
    chunks, size = payload.chunks, sum(chunk.nbytes for chunk in payload.chunks)
    tier = tier_of_url(f"redis://{server.host}:{server.port}/1")
    bare = BareRedis(server.host, server.port, chunks)

    def read() -> None:
        with tier.open(payload.manifest.origin.uid) as reader:
            reader.ahead(range(len(chunks)))
            for index in range(len(chunks)):
                reader.chunk(index)

    puts: dict[str, Way] = {
        FLOOR: partial(timed, size, bare.put),
        PUT: partial(timed, size, partial(tier.put, payload)),
    }
    gets: dict[str, Way] = {FLOOR: partial(timed, size, bare.get), READ: partial(timed, size, read)}
    if library is not None:
        client = library.Redis(server.host, server.port)

        def set_all() -> None:
            for index, chunk in enumerate(chunks):
                client.set(f"peer-{index}", chunk)

        def get_all() -> None:
            for index in range(len(chunks)):
                client.get(f"peer-{index}")

        puts[REDIS_PY] = partial(timed, size, set_all)
        gets[REDIS_PY] = partial(timed, size, get_all)
    return puts, gets


# --- what a training pays

EVERY = 10
"""Which states are durable, and copied."""

NO_COPIES, COPIES, BARE_COPIES = (
    "no copies",
    "copies to S3",
    "no copies; another process uploads",
)

_UPLOADER = """
import sys, obstore
from datastates.storage.remote import REQUESTS, UPLOAD_PART_BYTES, tier_of_url

url, size = sys.argv[1], int(sys.argv[2])
store, data = tier_of_url(url).store, bytes(size)
print("ready", flush=True)
for line in sys.stdin:
    obstore.put(store, "bare", data, use_multipart=True, chunk_size=UPLOAD_PART_BYTES,
        max_concurrency=REQUESTS)
    print("done", flush=True)
"""


class CopiedStates(Ours):
    """Every tenth state is durable, and copied to S3, each time to another prefix."""

    def __init__(self, bucket: str) -> None:
        super().__init__(durable_every=EVERY, states=None)
        self._bucket, self._prefixes = bucket, count()

    def prepare(self, objects: Objects, folder: Path) -> None:
        self._tiers = [f"{self._bucket}/{next(self._prefixes)}"]
        super().prepare(objects, folder)

    def finish(self) -> None:
        super().finish()
        for capture in self._captures[EVERY - 1 :: EVERY]:
            capture.wait("external")

    def close(self) -> None:
        super().close()
        empty(self._bucket)


class OtherProcess(Ours):
    """Every tenth state is durable. Another process uploads as many bytes when its capture
    starts."""

    def __init__(self, bucket: str) -> None:
        super().__init__(durable_every=EVERY, states=None)
        self._bucket = bucket

    def prepare(self, objects: Objects, folder: Path) -> None:
        super().prepare(objects, folder)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _UPLOADER, f"{self._bucket}/bare", str(state_bytes(objects))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._uploads = 0
        self._wait()

    def capture(self) -> None:
        if (len(self._captures) + 1) % EVERY == 0:
            assert self._process.stdin is not None
            self._process.stdin.write("upload\n")
            self._process.stdin.flush()
            self._uploads += 1
        super().capture()

    def finish(self) -> None:
        super().finish()
        for _ in range(self._uploads):
            self._wait()
        self._uploads = 0

    def _wait(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit("the process that uploads has ended, see above")

    def close(self) -> None:
        super().close()
        self._process.communicate()
        empty(self._bucket)


def overhead(folder: Path, *, quick: bool, rounds: int) -> dict[str, Any]:
    """Train with every tenth state durable, with and without copies to S3. Each segment is compared
    with the segments without captures before and after it."""
    if missing := s3_missing():
        out(f"Skipped: S3, because there is {missing}.")
        return {}
    trainer, steps = Trainer.make(TINY if quick else MEDIUM), 2 * EVERY
    found: dict[str, list[dict[str, float]]] = {}
    with s3_server(folder / "s3") as server:
        bucket = _bucket(server)
        methods = {
            NO_COPIES: Ours(durable_every=EVERY, states=None),
            COPIES: CopiedStates(bucket),
            BARE_COPIES: OtherProcess(bucket),
        }
        segment(trainer, None, steps)
        before = segment(trainer, None, steps)
        for index in range(rounds):
            for name, method in methods.items():
                path = folder / f"training-{index}"
                path.mkdir()
                method.prepare(trainer.objects, path)
                captured = segment(trainer, method, steps)
                method.close()
                shutil.rmtree(path)
                after = segment(trainer, None, steps)
                found.setdefault(name, []).append(_compared(captured, before, after))
                sys.stderr.write(f"{name}, round {index + 1} of {rounds}: {found[name][-1]}\n")
                before = after
    _show_overhead(found, state_bytes(trainer.objects), steps)
    return found


def _compared(captured: Segment, before: Segment, after: Segment) -> dict[str, float]:
    step_s, cpu_s = (before.step_s + after.step_s) / 2, (before.cpu_s + after.cpu_s) / 2
    return {
        "wall overhead %": 100 * (captured.step_s / step_s - 1),
        "CPU overhead %": 100 * (captured.cpu_s / cpu_s - 1),
        "blocked ms a step": 1e3 * captured.blocked_s,
        "left to finish ms": 1e3 * captured.drain_s,
        "a step without captures, ms": 1e3 * step_s,
    }


def _show_overhead(found: dict[str, list[dict[str, float]]], size: int, steps: int) -> None:
    rounds = len(found[NO_COPIES])
    out(
        f"\n## Training, every {EVERY}th state durable: {size / 1e6:.0f} MB, {steps} steps a"
        f" segment; median [min .. max] of {rounds}\n"
    )
    columns = list(found[NO_COPIES][0])
    rows = [
        [name, *(spread([one[column] for one in each]) for column in columns)]
        for name, each in found.items()
    ]
    out(table(["method", *columns], rows))
    wall = {name: [one["wall overhead %"] for one in each] for name, each in found.items()}
    out("")
    for name, other in ((COPIES, NO_COPIES), (BARE_COPIES, NO_COPIES), (COPIES, BARE_COPIES)):
        points = [ours - theirs for ours, theirs in zip(wall[name], wall[other], strict=True)]
        goal = ""
        if (name, other) == (COPIES, NO_COPIES):
            is_met = statistics.median(points) <= OVERHEAD_GOAL
            goal = f" (goal {OVERHEAD_GOAL:g}: {_met(is_met)})"
        out(f"- {name}, minus {other}: {spread(points)} percentage points{goal}")


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"s3": s3, "redis": redis}


def main() -> None:
    """Measure the selected parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--overhead", action="store_true", help="only what copies cost a training")
    parser.add_argument("--rounds", type=int, help="how often each method is measured (5)")
    parser.add_argument("--quick", action="store_true", help="a small state, and one round")
    parser.add_argument("--folder", type=Path, help="where the servers and repositories are")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    if importlib.util.find_spec("obstore") is None:
        out("Skipped: obstore is not installed: pip install 'datastates[s3]'")
        return
    rounds = options.rounds or (1 if options.quick else 5)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' own
    out(f"{machine()}; torch on one thread\n")
    parts = {"overhead": overhead} if options.overhead else PARTS
    found = {}
    with tempfile.TemporaryDirectory(
        prefix="datastates-tiers-", dir=options.folder, ignore_cleanup_errors=True
    ) as name:
        for part in (not options.overhead and options.part) or parts:
            folder = Path(name) / part
            folder.mkdir()
            found[part] = parts[part](folder, quick=options.quick, rounds=rounds)
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
