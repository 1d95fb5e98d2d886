"""Manifests and bundles that were changed at random: each is answered or refused, in a second and
64 MiB.

    .venv/bin/python -m tests.drivers.mutations manifests --count 25000 --seed 1
    .venv/bin/python -m tests.drivers.mutations bundles --count 2500 --seed 1

What is not goes to ``tests/corpus``, whose cases the tests try again for ever, and is named; the
exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import shutil
import struct
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
from blake3 import blake3

import datastates
from datastates import Config, DatastatesError, Repository
from datastates.files.bundle import export_bundle, import_bundle, write_chunks
from datastates.state.digest import decode, state_digest, wrap
from datastates.state.generators import RngState
from datastates.state.manifest import CHUNK_BYTES, VERSION, Chunk, Content, Manifest, Origin
from datastates.state.tree import unflatten
from datastates.storage.pack_reader import MappedReader
from datastates.storage.parallel_read import SealedChunks
from datastates.transport.untrusted import read_manifest
from tests.support.cloning import sent

CORPUS = Path(__file__).parents[1] / "corpus"
MOST_S = 1.0
MOST_BYTES = 64 << 20

_BUSY = 20
_CASE_BYTES = 256 << 10

_NUMBERS = [
    -1,
    0,
    1,
    2,
    3,
    255,
    299,
    301,
    4096,
    CHUNK_BYTES,
    1 << 31,
    1 << 40,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
]
_WORDS = [
    "",
    *"dltoDxaq",
    "coo",
    "csr",
    "qt",
    "qc",
    "model",
    "float32",
    "int8",
    "complex128",
    "../x",
    "<f4",
    "F",
    "%",
]
_KEYS = [
    msgspec.msgpack.encode(each)
    for each in (float("nan"), 1, ["tuple", [1, 2]], ["int", b"\x7f" * 300], ["bytearray", b"a"])
]
_TAGS = [
    "list",
    "tuple",
    "dict",
    "odict",
    "counter",
    "set",
    "frozenset",
    "deque",
    "array",
    "nscalar",
    "ndtype",
    "range",
    "size",
]


# --- changes --------------------------------------------------------------------------------------


def junk(random: Random, depth: int = 0) -> Any:
    """Something that may stand anywhere."""
    match random.randrange(9 if depth < 3 else 5):
        case 0:
            return random.choice(_NUMBERS)
        case 1:
            return random.choice(_WORDS)
        case 2:
            return random.choice([None, True, False, float("nan"), float("inf"), 0.5])
        case 3:
            return random.randbytes(random.randrange(6))
        case 4:
            return random.choice(_KEYS)
        case 5:
            return [junk(random, depth + 1)] * random.choice([0, 1, 2, 50])
        case 6:
            return [
                random.choice(_TAGS),
                [junk(random, depth + 1) for _ in range(random.randrange(4))],
                *([[]] * random.randrange(2)),
            ]
        case 7:
            return [junk(random, depth + 1) for _ in range(random.randrange(5))]
        case _:
            return {random.choice(_WORDS): junk(random, depth + 1)}


def change(plain: Any, random: Random) -> None:
    """Replace, drop, double or swap a few parts of nested lists and dicts."""
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        places = list(_places(plain))
        if not places:
            return
        container, key = random.choice(places)
        match random.randrange(6):
            case 0 | 1 | 2:
                container[key] = junk(random)
            case 3:
                del container[key]
            case 4 if isinstance(container, list):
                most = 1000 if len(places) < 1000 else 1  # twice would be a million times as much
                container[key:key] = [container[key]] * random.choice([1, 1, most])
            case _:
                other, there = random.choice(places)
                container[key] = _copy(other[there])


def _places(item: Any) -> Any:
    pairs = (
        enumerate(item)
        if isinstance(item, list)
        else item.items()
        if isinstance(item, dict)
        else ()
    )
    for key, child in list(pairs):
        yield item, key
        yield from _places(child)


def _copy(item: Any) -> Any:
    if isinstance(item, list):
        return [_copy(child) for child in item]
    return {key: _copy(child) for key, child in item.items()} if isinstance(item, dict) else item


def bite(data: bytes, random: Random) -> bytes:
    """Change bytes: a few bits, a number, the end, or a stretch."""
    at = random.randrange(len(data) + 1)
    match random.randrange(6):
        case 0 | 1:
            changed = bytearray(data)
            for _ in range(random.choice([1, 1, 3, 20])):
                if changed:
                    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
            return bytes(changed)
        case 2:
            return (
                data[:at]
                + struct.pack("<Q", random.choice(_NUMBERS) & ((1 << 64) - 1))
                + data[at + 8 :]
            )
        case 3:
            return data[:at]
        case 4:
            return data[:at] + random.randbytes(random.randrange(40)) + data[at:]
        case _:
            return data[:at] + data[random.randrange(len(data) + 1) :]


# --- manifests ------------------------------------------------------------------------------------


def honest() -> Manifest:
    """A manifest with a little of everything."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    tied = torch.ones(5)
    plain = {
        3: [torch.zeros(2, 3), "text", 1 << 70, {1, 2}, (1.5, None), {"a": {"b": [1, "c"]}}],
        "array": np.zeros(20_000, np.float32),
        "small": np.arange(5),
        "tied": [tied, tied],
        "wide": torch.ones(1).expand(4),
        "sparse": torch.sparse_coo_tensor(
            torch.ones(2, 3).long(), torch.ones(3), (3, 3), check_invariants=True
        ),
        float("nan"): Counter("abba"),
        ("a", 1): slice(1, None),
    }
    return sent(
        {"model": linear, "optimizer": optimizer, "plain": plain, "rng": RngState()}
    ).manifest


def plain_of(manifest: Manifest) -> dict[str, Any]:
    """The manifest as nested lists."""
    content, unpack = manifest.content, msgspec.msgpack.decode
    plain: dict[str, Any] = {
        "skeleton": unpack(content.skeleton),
        "values": unpack(content.values),
        "tensors": unpack(content.tensors),
    }
    rest = {
        "chunks": content.chunks,
        "origin": manifest.origin,
        "packs": manifest.packs,
        "refs": manifest.refs,
    }
    return plain | {name: unpack(msgspec.msgpack.encode(part)) for name, part in rest.items()}


def framed(plain: dict[str, Any], *, is_digest_right: bool) -> bytes:
    """A manifest of these parts, whatever they are, in a frame that is right."""
    parts = {name: msgspec.msgpack.encode(part) for name, part in plain.items()}
    content = [msgspec.Raw(parts[name]) for name in ("skeleton", "values", "tensors")]
    digest = "0" * 64
    if is_digest_right:
        try:
            chunks = msgspec.convert(plain["chunks"], tuple[Chunk, ...])
            origin = msgspec.convert(plain["origin"], Origin)
            digest = state_digest(
                Content(content[0], content[1], content[2], chunks), origin.parent_digests
            )
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):
            pass
    whole = [
        VERSION,
        digest,
        msgspec.Raw(parts["origin"]),
        [*content, msgspec.Raw(parts["chunks"])],
        msgspec.Raw(parts["packs"]),
    ]
    body = msgspec.msgpack.encode([*whole, msgspec.Raw(parts["refs"])])
    return wrap(VERSION, body)


def changed_manifest(plain: dict[str, Any], random: Random) -> bytes:
    """One case."""
    plain = _copy(plain)
    if random.random() < 0.75:
        change(
            plain[
                random.choice(
                    [
                        "skeleton",
                        "values",
                        "values",
                        "tensors",
                        "tensors",
                        "chunks",
                        "origin",
                        "packs",
                        "refs",
                    ]
                )
            ],
            random,
        )
        try:
            return framed(plain, is_digest_right=random.random() < 0.95)
        except (TypeError, OverflowError, ValueError):  # of that no manifest can be made
            return b""
    data = bite(framed(plain, is_digest_right=True), random)
    if random.random() < 0.8 and len(data) > 52:  # the frame agrees again
        body = data[20:-32]
        frame = struct.pack("<8sIQ", b"DSMANIF\0", 1, len(body)) + body
        data = frame + blake3(frame).digest()
    return data


def take_manifest(data: bytes) -> None:
    """What is done with a manifest before a byte of its state is there, and what a restore makes
    of it."""
    parts = read_manifest(data, source="a stranger")
    unflatten(parts.skeleton, parts.values, [None] * len(parts.specs), is_sketch=True)
    unflatten(parts.skeleton, parts.values, [None] * len(parts.specs))


# --- bundles --------------------------------------------------------------------------------------


def make_bundle(folder: Path) -> None:
    """A bundle of three states, of which one is without bytes, and a tag."""
    weights: dict[str, Any] = {"zeros": torch.zeros(20_000), "w": torch.arange(5.0), "n": 3}
    with opened(folder / "made") as repo:
        with repo.track(branch="main", rng=False, box=weights) as run:
            for number in range(3):
                run.capture(
                    metrics={"loss": float(number), "odd": float("nan")},
                    attributes={"a": "b"},
                    message="m",
                ).wait()
                weights["w"] += 1
        repo.tag("it", "main")
        export_bundle(repo, ["main", "main~1"], folder / "bundle")


def opened(folder: Path) -> Repository:
    return datastates.open(
        folder, config=Config(memory_bytes=64 << 20, durable_interval_s=None, direct_io=False)
    )


def change_bundle(root: Path, random: Random) -> None:
    """Change a bundle in place."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    path = random.choice(files)
    match random.randrange(7):
        case 0:
            path.write_bytes(bite(path.read_bytes(), random))
        case 1:
            path.write_bytes(random.choice(files).read_bytes())
        case 2:
            path.unlink()
        case 3 | 4:
            plain = json.loads((root / "lineage.json").read_text())
            change(plain, random)
            relabel(root, plain)
        case _:
            path = random.choice(sorted((root / "packs").glob("*.manifest")))
            plain = plain_of(decode(path.read_bytes(), source="ours"))
            change(
                plain[
                    random.choice(
                        ["skeleton", "values", "tensors", "chunks", "origin", "packs", "refs"]
                    )
                ],
                random,
            )
            try:
                path.write_bytes(framed(plain, is_digest_right=True))
            except (TypeError, OverflowError, ValueError):
                return
            reseal(root)


def relabel(root: Path, plain: Any) -> None:
    """The lineage, and the bundle's digest with it."""
    try:
        body = json.dumps(plain, default=str).encode()
    except (ValueError, TypeError):
        return
    (root / "lineage.json").write_bytes(body)
    (root / "lineage.blake3").write_text(blake3(body).hexdigest())


def reseal(root: Path) -> None:
    """Have the lineage and the digests of chunks say what manifests and packs do, as far as they
    make sense."""
    plain = json.loads((root / "lineage.json").read_text())
    for path in (root / "packs").glob("*.manifest"):
        try:
            manifest = decode(path.read_bytes(), source="ours")
            with MappedReader(root / "packs", manifest, verify=False) as reader:
                chunks = SealedChunks(reader)
                chunks.check()
                write_chunks(root, path.name.partition(".")[0], chunks.digests)
                plain["seals"][path.name.partition(".")[0]] = chunks.seal
        except (DatastatesError, OSError, IndexError, ValueError, OverflowError, MemoryError):
            continue
        for state in plain["states"]:
            if state["uid"] == manifest.origin.uid:
                state["digest"] = manifest.digest
    relabel(root, plain)


def take_bundle(root: Path, into: Repository) -> bool:
    """Import it and read what came; whether anything did."""
    brought = import_bundle(into, root)
    for state in brought.states:
        into.verify(state)
        into.load(state)
    return True


# --- judging --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What became of the cases.

    ``found`` are those that were neither answered nor refused in time and memory."""

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    largest_bytes: int = 0
    found: list[str] = field(default_factory=list)

    def judge(self, act: Callable[[], object], keep: Callable[[], str]) -> bool:
        """Do it; whether it was answered. ``keep`` puts a case away that is found, and names it."""
        before, began, wall = _resident(reset=True), time.thread_time(), time.perf_counter()
        error: BaseException | None = None
        try:
            act()
        except DatastatesError as refusal:
            self.refused[type(refusal).__name__] += 1
        except BaseException as exc:
            error = exc
        else:
            self.answered += 1
        # The machine may be busy: what counts is the work. Who waits for something for ever works
        # on nothing.
        took, grown = (
            max(time.thread_time() - began, (time.perf_counter() - wall) / _BUSY),
            _resident() - before,
        )
        self.slowest_s, self.largest_bytes = (
            max(self.slowest_s, took),
            max(self.largest_bytes, grown),
        )
        if error is not None or took > MOST_S or grown > MOST_BYTES:
            self.found.append(f"{keep()}: {error!r}, {took:.2f} s, {grown >> 20} MiB")
        if isinstance(error, KeyboardInterrupt):
            raise error
        return error is None

    def __str__(self) -> str:
        refused = ", ".join(f"{count} {kind}" for kind, count in self.refused.most_common())
        return (
            f"{self.answered} answered, {sum(self.refused.values())} refused ({refused}),"
            f" {len(self.found)} found; slowest {self.slowest_s:.2f} s, largest"
            f" {self.largest_bytes / (1 << 20):.1f} MiB"
        )


def _resident(*, reset: bool = False) -> int:
    """What this process has in memory; without ``reset`` at most, since then."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    wanted = b"VmRSS:" if reset else b"VmHWM:"
    line = next(
        line
        for line in Path("/proc/self/status").read_bytes().splitlines()
        if line.startswith(wanted)
    )
    return int(line.split()[1]) << 10


def try_manifests(count: int, seed: int) -> Tally:
    """So many changed manifests."""
    tally, random, plain = Tally(), Random(seed), plain_of(honest())
    take_manifest(framed(plain, is_digest_right=True))
    for _ in range(count):
        data = changed_manifest(plain, random)
        while len(data) > _CASE_BYTES:  # that is more work, and may be
            data = changed_manifest(plain, random)
        # bound now
        tally.judge(lambda data=data: take_manifest(data), lambda data=data: keep_manifest(data))  # type: ignore[misc]
    return tally


def try_bundles(count: int, seed: int) -> Tally:
    """So many changed bundles, each imported into a repository that has nothing of it."""
    tally, random = Tally(), Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bundle(folder)
        shutil.copytree(folder / "bundle", folder / "case")
        number, into = 0, opened(folder / "into-0")
        take_bundle(folder / "case", into)
        fresh = True
        for _ in range(count):
            shutil.rmtree(folder / "case")
            shutil.copytree(folder / "bundle", folder / "case")
            change_bundle(folder / "case", random)
            if any(
                path.stat().st_size > _CASE_BYTES
                for path in (folder / "case").rglob("*")
                if path.suffix != ".safetensors"
            ):
                relabel(folder / "case", {})
            if fresh:
                into.close()
                shutil.rmtree(into.location.packs.parent)
                number += 1
                into = opened(folder / f"into-{number}")
            answered = tally.answered
            # bound now
            tally.judge(
                lambda into=into: take_bundle(folder / "case", into),  # type: ignore[misc]
                lambda: keep_bundle(folder / "case"),
            )
            fresh = tally.answered > answered or bool(into.find("step >= 0"))
        into.close()
    return tally


def keep_manifest(data: bytes) -> str:
    """Into the corpus; its name."""
    path = CORPUS / "manifests" / f"{hashlib.sha256(data).hexdigest()[:12]}.xz"
    path.write_bytes(lzma.compress(data))
    return path.name


def keep_bundle(root: Path) -> str:
    """Into the corpus; its name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(root, arcname="bundle", filter=lambda info: _plain_info(info))
    data = buffer.getvalue()
    path = CORPUS / "bundles" / f"{hashlib.sha256(data).hexdigest()[:12]}.tar.xz"
    path.write_bytes(lzma.compress(data))
    return path.name


def _plain_info(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def kept_manifests() -> list[Path]:
    """The corpus."""
    return sorted((CORPUS / "manifests").glob("*.xz"))


def kept_bundles() -> list[Path]:
    """The corpus."""
    return sorted((CORPUS / "bundles").glob("*.tar.xz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["manifests", "bundles"])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    torch.set_num_threads(1)
    tally = (try_manifests if said.what == "manifests" else try_bundles)(said.count, said.seed)
    sys.stdout.write(
        f"{said.what}, seed {said.seed}: {tally}\n"
        + "".join(f"  found {each}\n" for each in tally.found)
    )
    sys.exit(1 if tally.found else 0)


if __name__ == "__main__":
    main()
