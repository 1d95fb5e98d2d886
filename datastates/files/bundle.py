"""States as a folder that can be carried elsewhere: their bytes, their lineage and their tags
(``bundle_files`` lists the files).

A bundle is never trusted, executed or unpickled. Everything is checked before any state becomes
visible in the repository: manifests against the lineage, and chunks against digests that cannot be
forged and that the bundle's digest binds. The checked bytes are written, even if the folder changes
meanwhile. A bundle that is refused leaves no files.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from datastates import values
from datastates.errors import Conflict, Corrupt, InvalidInput, NotFound, PeerFault, Unavailable
from datastates.lineage import lookup
from datastates.lineage.lookup import ids_of
from datastates.lineage.query import names as names_query
from datastates.lineage.query import walk
from datastates.lineage.states import Note, Ref, RefKind, Run, State
from datastates.lineage.write import attachments, clones, refs
from datastates.lineage.write.replicas import mark, take_turns
from datastates.maintenance.core import Core, Opened, core_of
from datastates.state.digest import Sound
from datastates.state.manifest import Manifest, PackInfo
from datastates.storage.copying import are_equal
from datastates.storage.dedup import NAME
from datastates.storage.durable_files import next_step, write_file
from datastates.storage.local import LocalTier, StagedPut
from datastates.storage.pack import PAGE, alignment, padded
from datastates.storage.pack_reader import MappedReader
from datastates.storage.parallel_read import DIGEST_BYTES, SealedChunks, seal_of
from datastates.storage.reading import refuse_parts
from datastates.storage.tier import Payload, Placed
from datastates.system.files import make_regular, read_regular, sync_folder
from datastates.transport.protocol import RefRecord, RunRecord, StateRecord
from datastates.transport.receive_states import make_tags
from datastates.transport.untrusted import (
    check_manifest,
    record_of_ref,
    records_of,
    ref_of,
    runs_of,
    states_of,
)

__all__ = ["Bundle", "export_bundle", "import_bundle"]

VERSION = 3
PACKS = "packs"

_LINEAGE = "lineage.json"
_BUNDLE_FILES_DIGEST = "lineage.blake3"
_CHUNKS = "chunks"
_MOST_BYTES = 256 << 20
_UID = re.compile(r"[0-9a-f]{24}")


class Lineage(msgspec.Struct, frozen=True):
    """The file ``lineage.json``.

    ``held`` are the uids of states with bytes, each with its seal in ``seals``."""

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
            f"these states have {len(lineage.states) - len(lineage.held)} ancestors, whose lineage"
            f" takes {len(body)} bytes, and a bundle holds at most {_MOST_BYTES}: name states with"
            " fewer ancestors, or write files without lineage (export --into)"
        )
    digest = blake3(body).hexdigest()
    if lineage.held:
        sync_folder(root / _CHUNKS)
    _write(root / _LINEAGE, body)
    _write(root / _BUNDLE_FILES_DIGEST, digest.encode())
    sync_folder(root)
    return digest


def _write(path: Path, data: bytes) -> None:
    fd = make_regular(path)
    try:
        write_file(fd, path, data)
    finally:
        os.close(fd)


def _finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity: these become a list of a text."""
    return [str(value)] if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(said: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(value[0]) if isinstance(value, list) else value for key, value in said.items()
    }


# In


def read_lineage(root: Path) -> tuple[Lineage, str]:
    """The lineage of a bundle, and its digest.

    :raises NotFound: there is none.
    """
    body = _read(
        root / _LINEAGE,
        _MOST_BYTES,
        lambda path: f"{root} holds no bundle, or one that was not written to its end: no {path}",
    )
    said = _read(
        root / _BUNDLE_FILES_DIGEST,
        PAGE,
        lambda path: f"{root} holds no bundle, or one that was not written to its end: no {path}",
    )
    digest = blake3(body).hexdigest()
    if digest.encode() != said.strip():
        raise Corrupt(
            f"{root / _LINEAGE} fails its digest in {_BUNDLE_FILES_DIGEST}: it was changed or cut"
        )
    try:
        plain = json.loads(body)
        if plain["version"] != VERSION:
            raise Unavailable(
                f"{root} is a bundle of version {plain['version']}, and this datastates reads"
                f" version {VERSION}: upgrade, or export again"
            )
        for state in plain["states"]:
            for name in ("metrics", "attributes"):
                state[name] = _numbers(state[name])
        for run in plain["runs"]:
            run["config"] = _numbers(run["config"])
        return msgspec.convert(plain, Lineage), digest
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as exc:
        raise Corrupt(f"{root / _LINEAGE} is no lineage: {exc}") from exc


def read_chunks(root: Path, manifest: Manifest, seals: Mapping[str, str]) -> list[bytes]:
    """The BLAKE3 of each chunk, checked against the seal in the lineage.

    :raises Corrupt: they do not make that seal.
    """
    uid, count = manifest.origin.uid, len(manifest.content.chunks)
    if _UID.fullmatch(uid) is None or uid not in seals:
        raise Corrupt(f"{root / _LINEAGE} lists the bytes of state {uid!r} and has no seal of it")
    path = root / _CHUNKS / uid
    data = _read(
        path,
        DIGEST_BYTES * count,
        lambda path: f"the bundle has the bytes of state {uid} and not their digests: no {path}",
    )
    digests = [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
    if len(data) != DIGEST_BYTES * count or seal_of(manifest.digest, digests) != seals[uid]:
        raise Corrupt(
            f"{path} has other digests of the {count} chunks of state {uid} than its seal in"
            f" {_LINEAGE}: it was changed or cut"
        )
    return digests


def check_places(manifest: Manifest) -> None:
    """Raise unless no chunk overlaps another, so that reading costs no more than the bytes there
    are.

    :raises Corrupt: two overlap.
    """
    places = {
        (ref.pack, ref.offset, chunk.length)
        for ref, chunk in zip(manifest.refs, manifest.content.chunks, strict=True)
    }
    before, end = -1, 0
    for pack, offset, length in sorted(places):
        if offset % alignment(length) or (pack == before and offset < end):
            raise Corrupt(
                f"state {manifest.origin.uid} has a chunk at {offset} of"
                f" {manifest.packs[pack].name}, over another or not aligned"
            )
        before, end = pack, offset + padded(length)


def _read(path: Path, most: int, missing: Callable[[str], str]) -> bytes:
    try:
        return read_regular(path, most=most)
    except FileNotFoundError as exc:
        raise NotFound(missing(path.name)) from exc
    except OSError as exc:
        raise Unavailable(f"{path} cannot be read: {exc.strerror}") from exc


_BUNDLE_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOTE = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """The content of a bundle: states with their bytes, the number of ancestors without bytes, and
    tags. The requested states come first.

    ``bytes_new`` counts the bytes written for it. ``digest`` binds its whole content. A recipient
    who gets the digest over another channel can check that the bundle is unchanged.
    """

    states: tuple[State, ...]
    ancestors: int
    tags: tuple[Ref, ...]
    bytes_new: int
    digest: str


def export_bundle(
    repository: Opened,
    revs: Sequence[str | State],
    folder: str | os.PathLike[str],
    *,
    with_parents: bool = False,
) -> Bundle:
    """Write states to a new folder, with the lineage and the tags of all their ancestors.

    ``with_parents`` also takes the bytes of the states from which merged states were made, so that
    they can be made again elsewhere.

    :raises Conflict: the folder is not empty.
    :raises InvalidInput: no state is named, or they have more ancestors than a bundle holds.
    :raises Unavailable: the bytes of a state are gone; names the nearest ancestor that has them.
    """
    core, root = core_of(repository, "repository"), Path(folder)
    asked = values.several(values.revision)(revs, "revs")
    if not asked:
        raise InvalidInput("a bundle takes a list of states: name at least one")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise Conflict(f"{root} is not empty: name a new folder")
    states = _chosen(core, asked, with_parents=with_parents)
    was_there = root.exists()
    try:
        root.mkdir(parents=True, exist_ok=True)
        found, bytes_new = _write_packs(core, states, root)
        lineage = _lineage_of(core, states, found)
        digest = write_lineage(lineage, root)
    except BaseException:
        for path in root.iterdir() if was_there else [root]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise
    return Bundle(
        tuple(states),
        len(lineage.states) - len(states),
        tuple(map(ref_of, lineage.tags)),
        bytes_new,
        digest,
    )


def import_bundle(
    repository: Opened, folder: str | os.PathLike[str], *, digest: str | None = None
) -> Bundle:
    """Bring the states of a bundle into a repository: durable, with their ancestry, edges, metrics,
    attributes and tags.

    States that are here already stay as they are. The import is atomic: everything is checked, then
    written under other names, then becomes visible with the lineage. ``digest`` is what
    ``export_bundle`` returned, if it came over another channel than the bundle.

    :raises NotFound: there is no bundle in the folder.
    :raises Corrupt: a byte of it is wrong, or it is not the bundle of that digest; names the file.
    :raises Conflict: another state of the same uid is here.
    """
    core, root = core_of(repository, "repository"), Path(folder)
    lineage, found = read_lineage(root)
    if digest is not None and digest != found:
        raise Corrupt(
            f"{root} is the bundle of digest {found}, not {digest[:64]}: it is another one, or was"
            " changed on the way"
        )
    states, made_by = _checked_lineage(lineage)
    with core.database.read() as session:
        clones.check_ancestry(session, list(states.values()), made_by)
        refs.check_notes(lineage.notes)
        sealed = attachments.seals(session, lineage.held)
    folder_uid = core.home.check_writable()
    with ExitStack() as stack:
        staged = _stage(core, root, lineage, states, sealed, stack)
        placed = _commit(
            core,
            staged,
            states,
            made_by,
            lineage.notes,
            source=f"bundle {found[:16]}",
            folder_uid=folder_uid,
        )
    tags = [ref_of(record) for record in lineage.tags]
    make_tags(core, tags)
    held = tuple(core.state(uid) for uid in lineage.held)
    return Bundle(
        held,
        len(states) - len(held),
        tuple(tags),
        sum(each.bytes_new for each in placed.values()),
        found,
    )


# Out


def _chosen(core: Core, revs: Sequence[str], *, with_parents: bool) -> list[State]:
    chosen = {state.uid: state for state in map(core.state, revs)}
    for state in list(chosen.values()) if with_parents else ():
        if "merge.method" in state.attributes:
            chosen |= {uid: core.state(uid) for uid in state.parents if uid not in chosen}
    return list(chosen.values())


def _write_packs(core: Core, states: Sequence[State], root: Path) -> tuple[dict[str, str], int]:
    """The seal of each state, which is now recorded here too, and how many bytes were
    written."""
    tier, base, written = LocalTier(root / PACKS, direct=core.config.direct_io), None, 0
    found: dict[str, str] = {}
    for state in states:
        refuse_parts(state, "a bundle")
        with core.open_payload(state, verify=True) as reader:
            chunks = SealedChunks(reader)
            chunks.check()
            core.seal(state.uid, chunks.seal)
            bare = msgspec.structs.replace(reader.manifest, packs=(), refs=())
            placed = tier.put(Payload(bare, chunks, is_on_demand=True), base=base)
            write_chunks(root, state.uid, chunks.digests)
            found[state.uid] = chunks.seal
        base, written = placed.manifest, written + placed.bytes_new
    (root / PACKS / NAME).unlink(missing_ok=True)  # hints, which no digest covers
    return found, written


def _lineage_of(core: Core, states: Sequence[State], found: dict[str, str]) -> Lineage:
    uids = [state.uid for state in states]
    with core.reading() as session:
        above = {id_ for uid in uids for id_ in walk.ancestor_ids(session, uid)}
        # parents have lower ids than their children
        everything = lookup.states(session, sorted({*above, *ids_of(session, uids)}))
        names = {state.uid for state in everything}
        tags = [ref for ref in names_query.refs(session, RefKind.TAG) if ref.state in names]
        where = clones.repository_uid(session)
        written = names_query.of_states(session, names)
        records, made_by = records_of(session, everything)
    return Lineage(
        VERSION,
        where,
        tuple(uids),
        records,
        tuple(map(record_of_ref, tags)),
        found,
        made_by,
        tuple(written),
    )


# In


def _checked_lineage(lineage: Lineage) -> tuple[dict[str, State], dict[str, Run]]:
    """The states by uid, each after its parents, and their runs by uid."""
    states: dict[str, State] = {}
    try:
        told, made_by = states_of(lineage.states, lineage.runs), runs_of(lineage.runs)
    except PeerFault as exc:
        raise Corrupt(f"the bundle has a state or a run that cannot be one: {exc}") from exc
    for state in told:
        if _BUNDLE_DIGEST.fullmatch(state.digest) is None or state.uid in states:
            raise Corrupt(f"the bundle has state {state.uid} twice, or of a digest that is none")
        lacking = [uid for uid in state.parents if uid not in states]
        if lacking:
            raise Corrupt(
                f"the bundle has state {state.uid} without its parent {lacking[0]}, or before it"
            )
        states[state.uid] = state
    strangers = [uid for uid in lineage.held if uid not in states]
    if lost := [
        note.uid
        for note in lineage.notes
        if note.state not in states or _NOTE.fullmatch(note.uid) is None
    ]:
        raise Corrupt(f"the bundle has the note {lost[0][:24]!r}, which is on none of its states")
    if len(set(lineage.held)) < len(lineage.held):
        raise Corrupt("the bundle claims the bytes of a state twice")
    if strangers:
        raise Corrupt(f"the bundle claims the bytes of {strangers[0]}, which is none of its states")
    return states, made_by


def _stage(
    core: Core,
    root: Path,
    lineage: Lineage,
    states: dict[str, State],
    sealed: dict[str, str],
    stack: ExitStack,
) -> dict[str, tuple[StagedPut, Manifest, str]]:
    """Check every state with bytes and write it, not yet visible, with its seal."""
    folder = root / PACKS
    if not folder.is_dir():
        raise NotFound(f"{folder} is not there: the bundle is not whole")
    source, staged = LocalTier(folder), dict[str, tuple[StagedPut, Manifest, str]]()
    known: dict[tuple[bytes, int, bytes], tuple[PackInfo, int]] = {}
    for uid in lineage.held:
        try:
            sound = source.sound(uid, 0)
        except NotFound as exc:
            raise Corrupt(
                f"the bundle lists the bytes of state {uid}, which are not in it: {exc}"
            ) from exc
        manifest = _checked(sound, states[uid], states)
        check_places(manifest)
        digests = read_chunks(root, manifest, lineage.seals)
        try:
            with MappedReader(folder, manifest, verify=True) as reader:
                # without a lock, which others could hold for ever
                reader.verify_headers()
                chunks = SealedChunks(reader, digests)
                chunks.check()
                attachments.check(sealed.get(uid), chunks.seal, uid)
                _check_same(core, manifest, chunks)
                shared = {key[:2]: known[key] for key in _keys(manifest, chunks) if key in known}
                bare = msgspec.structs.replace(manifest, packs=(), refs=(), bytes_new=0)
                made = stack.enter_context(
                    core.tiers.durable.stage(Payload(bare, chunks, is_on_demand=True), known=shared)
                )
        except OSError as exc:
            raise Unavailable(
                f"state {uid} of the bundle cannot be taken in ({exc}): {next_step(exc)}"
            ) from exc
        known |= {
            key: place
            for key, place in zip(_keys(manifest, chunks), made.places(), strict=False)
            if key not in known
        }
        staged[uid] = made, manifest, chunks.seal
    return staged


def _keys(manifest: Manifest, chunks: SealedChunks) -> list[tuple[bytes, int, bytes]]:
    return [
        (chunk.digest, chunk.length, digest)
        for chunk, digest in zip(manifest.content.chunks, chunks.digests, strict=True)
    ]


def _check_same(core: Core, manifest: Manifest, chunks: SealedChunks) -> None:
    """Raise if the state in memory here has other bytes than the bundle's. (A state on disk is
    compared when it is staged.)"""
    if core.tiers.captured is None:
        return
    uid = manifest.origin.uid
    try:
        reader = core.tiers.captured.open(uid)
    except NotFound:
        return
    with reader:
        are_same = reader.manifest.digest == manifest.digest
        if not are_same or not all(
            are_equal(reader.chunk(index), chunk) for index, chunk in enumerate(chunks)
        ):
            raise Conflict(
                f"state {uid} is in memory here, with other bytes than the bundle's: one of them is"
                " forged"
            )


def _committed(staged: StagedPut, uid: str) -> Placed:
    placed = staged.commit()
    if placed is None:
        raise Unavailable(
            f"a pack that state {uid} shares was removed while the bundle was imported: import it"
            " again"
        )
    return placed


def _commit(
    core: Core,
    staged: dict[str, tuple[StagedPut, Manifest, str]],
    states: dict[str, State],
    made_by: dict[str, Run],
    written: Sequence[Note],
    *,
    source: str,
    folder_uid: str,
) -> dict[str, Placed]:
    """Make lineage and files visible together: files first, and they are removed again if the
    lineage refuses the states."""
    placed: dict[str, Placed] = {}
    done: list[StagedPut] = []
    tier = core.tiers.durable
    try:
        with core.writing() as session:
            # or a collection would delete the files of states that were evicted here, before they
            # are recorded
            take_turns(session)
            clones.import_ancestry(session, list(states.values())[::-1], made_by)
            refs.import_notes(session, written)
            for uid, (each, _, seal) in staged.items():
                placed[uid] = found = _committed(each, uid)
                done.append(each)
                mark(
                    session,
                    uid,
                    tier.gives,
                    tier=tier.name,
                    node=folder_uid,
                    bytes=found.manifest.bytes_new,
                )
                attachments.seal(session, uid, seal)
                if not each.was_here:
                    clones.note(
                        session, uid, node=folder_uid, source=source, bytes_moved=found.bytes_new
                    )
    except BaseException:
        for each in reversed(done):
            each.undo()
        raise
    return placed


def _checked(sound: Sound, state: State, states: dict[str, State]) -> Manifest:
    """The manifest of a state, checked so that it can be relied on; it names the parents as the
    lineage does, because its digest covers theirs.
    """
    manifest = check_manifest(sound).manifest
    parents = {
        uid: digest
        for uid, digest in zip(manifest.origin.parents, manifest.origin.parent_digests, strict=True)
        if uid in states
    }
    if manifest.digest != state.digest or parents != {
        uid: states[uid].digest for uid in state.parents
    }:
        raise Corrupt(
            f"state {state.uid} has another digest, or other parents, in its manifest than in the"
            " lineage of the bundle"
        )
    if (parts := max(manifest.origin.world_size, state.world_size)) > 1:
        raise Corrupt(
            f"the bundle claims the bytes of state {state.uid} of {parts} parts: bundles carry the"
            " bytes of states of one part"
        )
    return manifest
