"""The files of a bundle, and reading them as files of a stranger.

<folder>/packs/          packs and manifests, as a repository has them
<folder>/chunks/<uid>    the BLAKE3 of each chunk of a state, 32 bytes each, in their order
<folder>/lineage.json    every state in question, oldest first, whole or (ancestors) without bytes; which were asked for; tags; the
                         seal of each state with bytes, which binds its chunks (``seal``); the runs of the
                         states, and the notes on them
<folder>/lineage.blake3  the digest of that file, in hex: the bundle's digest, which binds everything; written last
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from datastates.content.manifest import Manifest
from datastates.errors import Corrupt, InvalidInput, NotFound, Unavailable
from datastates.lineage.states import Note
from datastates.store.files import sync_folder, write_file
from datastates.store.pack import PAGE, alignment, padded
from datastates.store.seal import DIGEST_BYTES, seal_of
from datastates.system.regular import make_regular, read_regular
from datastates.transport.protocol import RefRecord, RunRecord, StateRecord

__all__ = ["PACKS", "Lineage", "check_places", "read_chunks", "read_lineage", "write_chunks", "write_lineage"]

VERSION = 3
PACKS = "packs"

_LINEAGE, _DIGEST, _CHUNKS = "lineage.json", "lineage.blake3", "chunks"
_MOST_BYTES = 256 << 20
_UID = re.compile(r"[0-9a-f]{24}")


class Lineage(msgspec.Struct, frozen=True):
    """The file ``lineage.json``. ``held`` are the uids of states with bytes, each with its seal in ``seals``."""

    version: int
    repository: str
    held: tuple[str, ...]
    states: tuple[StateRecord, ...]
    tags: tuple[RefRecord, ...]
    seals: dict[str, str] = {}
    runs: tuple[RunRecord, ...] = ()
    notes: tuple[Note, ...] = ()


# Out


def write_chunks(root: Path, uid: str, digests: Sequence[bytes]) -> None:
    """The BLAKE3 of each chunk of a state."""
    (root / _CHUNKS).mkdir(exist_ok=True)
    _write(root / _CHUNKS / uid, b"".join(digests))


def write_lineage(lineage: Lineage, root: Path) -> str:
    """Write the last two files; returns the bundle's digest.

    :raises InvalidInput: the lineage is larger than any that can be read again.
    """
    plain = msgspec.to_builtins(lineage)
    for state in plain["states"]:
        for name in ("metrics", "attributes"):
            state[name] = {key: _finite(value) for key, value in state[name].items()}
    for run in plain["runs"]:
        run["config"] = {key: _finite(value) for key, value in run["config"].items()}
    body = json.dumps(plain, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    if len(body) > _MOST_BYTES:
        raise InvalidInput(
            f"these states have {len(lineage.states) - len(lineage.held)} ancestors, whose lineage takes {len(body)} bytes, and a bundle"
            f" holds at most {_MOST_BYTES}: name states with fewer ancestors, or write files without lineage (export --into)"
        )
    digest = blake3(body).hexdigest()
    if lineage.held:
        sync_folder(root / _CHUNKS)
    _write(root / _LINEAGE, body)
    _write(root / _DIGEST, digest.encode())
    sync_folder(root)
    return digest


def _write(path: Path, data: bytes) -> None:
    fd = make_regular(path)
    try:
        write_file(fd, path, data)
    finally:
        os.close(fd)


def _finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity: they stand in a list."""
    return [str(value)] if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(said: dict[str, Any]) -> dict[str, Any]:
    return {key: float(value[0]) if isinstance(value, list) else value for key, value in said.items()}


# In


def read_lineage(root: Path) -> tuple[Lineage, str]:
    """The lineage of a bundle, and its digest.

    :raises NotFound: there is none.
    """
    body = _read(root / _LINEAGE, _MOST_BYTES, lambda path: f"{root} holds no bundle, or one that was not written to its end: no {path}")
    said = _read(root / _DIGEST, PAGE, lambda path: f"{root} holds no bundle, or one that was not written to its end: no {path}")
    digest = blake3(body).hexdigest()
    if digest.encode() != said.strip():
        raise Corrupt(f"{root / _LINEAGE} fails its digest in {_DIGEST}: it was changed or cut")
    try:
        plain = json.loads(body)
        if plain["version"] != VERSION:
            raise Unavailable(
                f"{root} is a bundle of version {plain['version']}, and this datastates reads version {VERSION}: upgrade, or export again"
            )
        for state in plain["states"]:
            for name in ("metrics", "attributes"):
                state[name] = _numbers(state[name])
        for run in plain["runs"]:
            run["config"] = _numbers(run["config"])
        return msgspec.convert(plain, Lineage), digest
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as exc:
        raise Corrupt(f"{root / _LINEAGE} is no lineage: {exc}") from exc


def read_chunks(root: Path, manifest: Manifest, seals: Mapping[str, str]) -> list[bytes]:
    """The BLAKE3 of each chunk, checked against the seal in the lineage.

    :raises Corrupt: they do not make that seal.
    """
    uid, count = manifest.origin.uid, len(manifest.content.chunks)
    if _UID.fullmatch(uid) is None or uid not in seals:
        raise Corrupt(f"{root / _LINEAGE} has no seal of state {uid!r}, whose bytes it says it has")
    path = root / _CHUNKS / uid
    data = _read(path, DIGEST_BYTES * count, lambda path: f"the bundle has the bytes of state {uid} and not their digests: no {path}")
    digests = [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
    if len(data) != DIGEST_BYTES * count or seal_of(manifest.digest, digests) != seals[uid]:
        raise Corrupt(f"{path} has other digests of the {count} chunks of state {uid} than its seal in {_LINEAGE}: it was changed or cut")
    return digests


def check_places(manifest: Manifest) -> None:
    """Raise unless no chunk overlaps another, so that reading costs no more than the bytes there are.

    :raises Corrupt: two overlap.
    """
    places = {(ref.pack, ref.offset, chunk.length) for ref, chunk in zip(manifest.refs, manifest.content.chunks, strict=True)}
    before, end = -1, 0
    for pack, offset, length in sorted(places):
        if offset % alignment(length) or (pack == before and offset < end):
            raise Corrupt(
                f"state {manifest.origin.uid} has a chunk at {offset} of {manifest.packs[pack].name}, over another or not aligned"
            )
        before, end = pack, offset + padded(length)


def _read(path: Path, most: int, missing: Callable[[str], str]) -> bytes:
    try:
        return read_regular(path, most=most)
    except FileNotFoundError as exc:
        raise NotFound(missing(path.name)) from exc
    except OSError as exc:
        raise Unavailable(f"{path} cannot be read: {exc.strerror}") from exc
