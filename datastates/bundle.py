"""States as a folder that can be carried elsewhere: their bytes, their lineage and their tags.

    <folder>/packs/          packs and manifests, as a repository has them
    <folder>/lineage.json    every state in question, oldest first, whole or (ancestors) without bytes; which were asked for; tags
    <folder>/lineage.blake3  the digest of that file, in hex; written last: a folder without it is no bundle

Nothing in it is executed or unpickled. Whoever imports it checks each byte: manifests against the lineage, chunks against manifests.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from .arrivals import make_tags
from .errors import Conflict, Corrupt, InvalidInput, NotFound, PeerFault, Unavailable
from .landing.untrusted import check_manifest
from .lineage import clones, walk
from .lineage import refs as lineage_refs
from .lineage.lookup import ids_of
from .lineage.record import mark
from .lineage.states import Ref, RefKind, State, Status
from .manifest import Manifest
from .records import record_of, record_of_ref, ref_of, state_of
from .store.files import sync_folder
from .store.local import LocalTier
from .store.placing import own_bytes
from .store.tier import Payload, Placed, Reader
from .transport.protocol import RefRecord, StateRecord

if TYPE_CHECKING:
    from .repository import Repository

__all__ = ["Bundle", "export_bundle", "import_bundle"]

_VERSION = 1
_LINEAGE, _DIGEST, _PACKS = "lineage.json", "lineage.blake3", "packs"


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a bundle holds: states with their bytes, those asked for first; how many ancestors without bytes; tags.

    ``bytes_new`` is what was written for it.
    """

    states: tuple[State, ...]
    ancestors: int
    tags: tuple[Ref, ...]
    bytes_new: int


class _Lineage(msgspec.Struct, frozen=True):
    """The file ``lineage.json``. ``held`` are the uids of states with bytes."""

    version: int
    repository: str
    held: tuple[str, ...]
    states: tuple[StateRecord, ...]
    tags: tuple[RefRecord, ...]


def export_bundle(repository: Repository, revs: Sequence[str], folder: str | os.PathLike[str], *, with_parents: bool = False) -> Bundle:
    """Write states to a new folder, with the lineage and the tags of all their ancestors.

    ``with_parents`` takes the bytes of what merged states were made of too, so that they can be made again elsewhere.

    :raises Conflict: there is something in the folder.
    :raises Unavailable: the bytes of a state are gone; names the nearest ancestor that has them.
    """
    root = Path(folder)
    if isinstance(revs, str) or not revs:
        raise InvalidInput(f"a bundle takes a list of states, not {revs!r}")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise Conflict(f"{root} is not empty: name a new folder")
    states = _chosen(repository, revs, with_parents=with_parents)
    was_there = root.exists()
    try:
        bytes_new = _write_packs(repository, states, root / _PACKS)
        lineage = _lineage_of(repository, states)
        _write_lineage(lineage, root)
    except BaseException:
        shutil.rmtree(root / _PACKS if was_there else root, ignore_errors=True)
        raise
    return Bundle(tuple(states), len(lineage.states) - len(states), tuple(map(ref_of, lineage.tags)), bytes_new)


def import_bundle(repository: Repository, folder: str | os.PathLike[str]) -> Bundle:
    """Bring the states of a bundle into a repository: durable, with their ancestry, edges, metrics, attributes and tags.

    States that are here already stay as they are. Bytes come first, then the lineage in one transaction.

    :raises NotFound: there is no bundle in the folder.
    :raises Corrupt: a byte of it is wrong; names the file.
    :raises Conflict: another state of the same uid is here.
    """
    root = Path(folder)
    lineage = _read_lineage(root)
    states = _states(lineage)
    with repository._database.read() as session:
        _check_same(clones.known(session, states), states)
    placed = _take_packs(repository, [states[uid] for uid in lineage.held], states, root / _PACKS)
    with repository._database.write(durable=True) as session:
        clones.import_ancestry(session, list(states.values())[::-1])
        for uid, each in placed.items():
            packs = [(pack.name, pack.size) for pack in each.manifest.packs]
            node, added = repository._home.check_writable(), own_bytes(each.manifest)
            mark(session, uid, Status.DURABLE, tier="local", node=node, bytes=added, packs=packs)
    tags = [ref_of(record) for record in lineage.tags]
    make_tags(repository, tags)
    held = tuple(repository.state(uid) for uid in lineage.held)
    return Bundle(held, len(states) - len(held), tuple(tags), sum(each.bytes_new for each in placed.values()))


# Out


def _chosen(repository: Repository, revs: Sequence[str], *, with_parents: bool) -> list[State]:
    chosen = {state.uid: state for state in map(repository.state, revs)}
    for state in list(chosen.values()) if with_parents else ():
        if "merge.method" in state.attributes:
            base = state.attributes.get("merge.base")
            made_of = [*state.parents, *([] if base is None else [str(base)])]
            chosen |= {uid: repository.state(uid) for uid in made_of if uid not in chosen}
    return list(chosen.values())


def _write_packs(repository: Repository, states: Sequence[State], folder: Path) -> int:
    tier, base, written = LocalTier(folder, direct=repository.config.direct_io), None, 0
    for state in states:
        with repository._open_payload(state, verify=True) as reader:
            placed = _copy(reader, tier, base)
        base, written = placed.manifest, written + placed.bytes_new
    return written


def _copy(reader: Reader, into: LocalTier, base: Manifest | None) -> Placed:
    """Chunks are read, and thereby checked, as they are; what ``base`` has is not written again."""
    chunks = [reader.chunk(index) for index in range(len(reader.manifest.content.chunks))]
    bare = msgspec.structs.replace(reader.manifest, packs=(), refs=())
    return into.put(Payload(bare, chunks), base=base)


def _lineage_of(repository: Repository, states: Sequence[State]) -> _Lineage:
    uids = [state.uid for state in states]
    with repository._reading() as session:
        above = {id_ for uid in uids for id_ in walk.ancestor_ids(session, uid)}
        everything = walk.states(session, sorted({*above, *ids_of(session, uids)}))  # parents have lower ids than their children
        names = {state.uid for state in everything}
        tags = [ref for ref in lineage_refs.refs(session, RefKind.TAG) if ref.state in names]
        where = clones.repository_uid(session)
    return _Lineage(_VERSION, where, tuple(uids), tuple(map(record_of, everything)), tuple(map(record_of_ref, tags)))


def _write_lineage(lineage: _Lineage, root: Path) -> None:
    plain = msgspec.to_builtins(lineage)
    for state in plain["states"]:
        for name in ("metrics", "attributes"):
            state[name] = {key: _finite(value) for key, value in state[name].items()}
    body = json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False).encode()
    for name, data in ((_LINEAGE, body), (_DIGEST, blake3(body).hexdigest().encode())):
        with (root / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(root)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they stand in a list."""
    return [str(value)] if isinstance(value, float) and not math.isfinite(value) else value


# In


def _read_lineage(root: Path) -> _Lineage:
    try:
        body, wanted = (root / _LINEAGE).read_bytes(), (root / _DIGEST).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError as exc:
        raise NotFound(f"{root} holds no bundle, or one that was not written to its end: there is no {exc.filename}") from exc
    except OSError as exc:
        raise Unavailable(f"{root} cannot be read: {exc}") from exc
    if blake3(body).hexdigest() != wanted:
        raise Corrupt(f"{root / _LINEAGE} fails its digest in {_DIGEST}: it was changed or cut")
    try:
        plain = json.loads(body)
        if plain["version"] != _VERSION:
            raise Unavailable(f"{root} is a bundle of version {plain['version']}, this datastates reads version {_VERSION}: upgrade it")
        for state in plain["states"]:
            for name in ("metrics", "attributes"):
                state[name] = {key: float(value[0]) if isinstance(value, list) else value for key, value in state[name].items()}
        return msgspec.convert(plain, _Lineage)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as exc:
        raise Corrupt(f"{root / _LINEAGE} is no lineage: {exc}") from exc


def _states(lineage: _Lineage) -> dict[str, State]:
    """By uid, each behind its parents."""
    states: dict[str, State] = {}
    for record in lineage.states:
        try:
            state = state_of(record)
        except PeerFault as exc:
            raise Corrupt(f"the bundle has a state that cannot be one: {exc}") from exc
        lacking = [uid for uid in state.parents if uid not in states]
        if lacking:
            raise Corrupt(f"the bundle has state {state.uid} without its parent {lacking[0]}, or before it")
        states[state.uid] = state
    strangers = [uid for uid in lineage.held if uid not in states]
    if strangers:
        raise Corrupt(f"the bundle claims the bytes of {strangers[0]}, which is none of its states")
    return states


def _check_same(here: dict[str, str], states: dict[str, State]) -> None:
    for uid, digest in here.items():
        if states[uid].digest != digest:
            raise Conflict(
                f"state {uid} is here with the digest {digest[:16]}, the bundle's has {states[uid].digest[:16]}: one of them is forged"
            )


def _take_packs(repository: Repository, held: Sequence[State], states: dict[str, State], folder: Path) -> dict[str, Placed]:
    if not folder.is_dir():
        raise NotFound(f"{folder} is not there: the bundle is not whole")
    source = LocalTier(folder)
    placed: dict[str, Placed] = {}
    base: Manifest | None = None
    for state in held:
        try:
            reader = source.open(state.uid, verify=True)
        except NotFound as exc:
            raise Corrupt(f"the bundle says that it has the bytes of state {state.uid}, and has not: {exc}") from exc
        with reader:
            _check_manifest(reader.manifest, state, states)
            placed[state.uid] = _copy(reader, repository._local, base)
        base = placed[state.uid].manifest
    return placed


def _check_manifest(manifest: Manifest, state: State, states: dict[str, State]) -> None:
    """The manifest is sound, and says of its parents what the lineage does: its digest covers theirs."""
    check_manifest(msgspec.structs.replace(manifest, packs=(), refs=()))
    parents = {uid: digest for uid, digest in zip(manifest.origin.parents, manifest.origin.parent_digests, strict=True) if uid in states}
    if manifest.digest != state.digest or parents != {uid: states[uid].digest for uid in state.parents}:
        raise Corrupt(f"state {state.uid} has another digest, or other parents, in its manifest than in {_LINEAGE}")
