"""What a folder can do to whoever imports it: nothing, and of what is refused nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from datastates import Conflict, DatastatesError, Repository
from datastates.errors import Corrupt, InvalidInput
from datastates.files import bundle
from datastates.files.bundle import export_bundle, import_bundle, write_chunks
from datastates.lineage.schema import SEAL
from datastates.lineage.write import attachments
from datastates.state.digest import decode, encode
from datastates.storage.local import LocalTier
from datastates.storage.parallel_read import SealedChunks
from tests.files.conftest import opened, rewrite
from tests.support.colliding import collide, collide_somewhere

SIZE = 40_000  # numbers: a state is shared when it is large enough


@pytest.fixture
def exported(repo: Repository, tmp_path: Path) -> Path:
    """A bundle of two states that share a chunk, and the tag ``it``."""
    weights = {"zeros": torch.zeros(SIZE), "w": torch.arange(5.0)}
    with repo.track(branch="main", rng=False, box=weights) as run:
        run.capture().wait()
        weights["w"] += 1
        run.capture().wait()
    repo.tag("it", "main")
    export_bundle(repo, ["main", "main~1"], tmp_path / "bundle")
    return tmp_path / "bundle"


def files(repository: Repository) -> dict[str, bytes]:
    """What lies in a repository's folder of packs, but for hints and leases."""
    root = repository.location.packs
    return {
        path.name: path.read_bytes()
        for path in sorted(root.iterdir())
        if path.is_file() and path.name not in (".chunks", ".lock")
    }


def packs(folder: Path) -> list[Path]:
    return sorted((folder / "packs").glob("*.safetensors"))


def zeros_of(folder: Path) -> tuple[Path, int]:
    """The pack with the chunk of zeros, and where it begins."""
    for path in packs(folder):
        at = path.read_bytes().find(bytes(4 * SIZE))
        if at >= 0:
            return path, -(-at // 4096) * 4096
    raise AssertionError("there is no such chunk")


def put(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def chunk_length(folder: Path) -> int:
    """Of the chunk with the zeros."""
    for path in (folder / "packs").glob("*.manifest"):
        return max(chunk.length for chunk in decode(path.read_bytes(), source="it").content.chunks)
    raise AssertionError("there is no manifest")


def original_of(folder: Path) -> tuple[Path, int, bytes]:
    path, at = zeros_of(folder)
    length = chunk_length(folder)
    return path, at, path.read_bytes()[at : at + length]


# --- bytes of the right xxh3 ----------------------------------------------------------------------


def test_a_colliding_bundle_is_refused_wherever_it_differs(
    other: Repository, exported: Path
) -> None:
    before, random = files(other), Random(0)
    path, at, original = original_of(exported)
    for _ in range(1000):
        put(path, at, collide_somewhere(original, random))
        with pytest.raises(Corrupt, match="forged"):
            import_bundle(other, exported)
    assert files(other) == before
    assert other.find("step >= 0") == []
    put(path, at, original)
    assert len(import_bundle(other, exported).states) == 2


def reseal(folder: Path) -> str:
    """Have all digests of a bundle agree with its bytes, as somebody would who means to; the new
    digest."""
    tier, found = LocalTier(folder / "packs"), {}
    for uid in list(tier.uids()):
        with tier.open(uid) as reader:
            chunks = SealedChunks(reader)
            chunks.check()
            write_chunks(folder, uid, chunks.digests)
            found[uid] = chunks.seal
    rewrite(folder, lambda plain: plain.update(seals=found))
    return (folder / "lineage.blake3").read_text()


def test_a_bundle_that_was_sealed_anew_is_refused_by_its_digest_and_by_whoever_knew_it(
    repo: Repository, other: Repository, exported: Path
) -> None:
    said = (exported / "lineage.blake3").read_text()
    assert import_bundle(other, exported, digest=said).digest == said
    path, at, original = original_of(exported)
    put(path, at, collide_somewhere(original, Random(1)))
    assert reseal(exported) != said
    with opened(exported.parent / "new") as new:
        with pytest.raises(Corrupt, match="another one, or was changed"):
            import_bundle(new, exported, digest=said)
        assert new.find("step >= 0") == []
    for knows in (repo, other):
        with pytest.raises(Corrupt, match="forged on purpose"):
            import_bundle(knows, exported)


def test_a_state_that_is_only_in_memory_is_not_what_a_bundle_says_that_it_is(
    repo: Repository, tmp_path: Path, exported: Path
) -> None:
    with opened(tmp_path / "mine") as mine:
        weights = {"zeros": torch.zeros(SIZE)}
        run = mine.track(branch="main", rng=False, box=weights)
        state = run.capture().wait()
        export_bundle(mine, ["main"], tmp_path / "forged")
        path, at, original = original_of(tmp_path / "forged")
        put(path, at, collide_somewhere(original, Random(1)))
        reseal(tmp_path / "forged")
        with mine.core.database.write() as session:
            session.execute(SEAL.delete())  # it never was exported
        with pytest.raises(Conflict, match="in memory here"):
            import_bundle(mine, tmp_path / "forged")
        assert mine.state(state.uid).status == "captured"
        assert not mine.load("main")["box"]["zeros"].any()


def test_verify_finds_what_was_forged_in_the_folder_of_packs(
    other: Repository, exported: Path
) -> None:
    state = import_bundle(other, exported).states[0]
    other.verify(state)
    path, at, original = original_of(other.location.packs.parent)
    put(path, at, collide(original, bytes(1024) + os.urandom(4096) + original[5120:]))
    other.load(state, only="box/w")
    with pytest.raises(Corrupt, match="forged on purpose"):
        other.verify(state)


def test_the_first_verification_seals_a_state(repo: Repository) -> None:
    repo.track(branch="main", rng=False, box={"zeros": torch.zeros(SIZE)}).capture().wait("durable")
    uid = repo.verify("main").uid
    with repo.core.database.read() as session:
        assert list(attachments.seals(session, [uid])) == [uid]
    repo.close()
    with opened(repo.location.packs.parent) as again:
        path, at, original = original_of(repo.location.packs.parent)
        put(path, at, collide_somewhere(original, Random(3)))
        with pytest.raises(Corrupt, match="forged on purpose"):
            again.verify("main")


def test_a_bundle_that_changes_between_check_and_write_is_refused(
    other: Repository, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(other)
    path, at, original = original_of(exported)
    check = SealedChunks.check

    def check_then_change(chunks: SealedChunks) -> None:
        check(chunks)
        put(path, at, collide_somewhere(original, Random(5)))

    monkeypatch.setattr(SealedChunks, "check", check_then_change)
    with pytest.raises(Corrupt, match="writes to it now"):
        import_bundle(other, exported)
    assert files(other) == before
    assert other.refs() == []


# --- what is refused leaves nothing ---------------------------------------------------------------


REFUSED: dict[str, Callable[[Any], object]] = {
    "a step of 70 bits": lambda plain: plain["states"][-1].update(step=1 << 70),
    "a micro-step of 40 bits": lambda plain: plain["states"][-1].update(micro_step=1 << 40),
    "a world of 40 bits": lambda plain: plain["states"][-1].update(world_size=1 << 40),
    "bytes of 62 bits": lambda plain: plain["states"][-1].update(bytes_total=1 << 64),
    "a time of 80 bits": lambda plain: plain["states"][-1].update(created_at_us=1 << 80),
    "a weight that is no number": (
        lambda plain: plain["states"][-1].update(
            edges=[{"parent": plain["states"][0]["uid"], "kind": "merge", "weight": float("nan")}],
            parents=[*plain["states"][-1]["parents"], plain["states"][0]["uid"]],
        )
    ),
    "a uid in capitals": lambda plain: [
        state.update(uid=state["uid"].upper()) for state in plain["states"]
    ],
    "a digest of another state": lambda plain: plain["states"][-1].update(digest="0" * 64),
    "a digest that is none": lambda plain: plain["states"][0].update(digest="short"),
    "a state twice": lambda plain: plain["states"].append(plain["states"][0]),
    "the seal of another": lambda plain: plain.update(seals=dict.fromkeys(plain["held"], "0" * 64)),
    "bytes twice": lambda plain: plain.update(held=plain["held"] * 2),
    "no seal": lambda plain: plain.update(seals={}),
    "a name of a metric": lambda plain: plain["states"][-1].update(metrics={"": 1.0}),
    "a text with a zero": lambda plain: plain["states"][-1].update(message="a\0b"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_import_leaves_nothing_and_an_honest_one_goes_on(
    kind: str, other: Repository, exported: Path, tmp_path: Path
) -> None:
    before = files(other)
    honest = {path: path.read_bytes() for path in exported.glob("lineage.*")}
    rewrite(exported, REFUSED[kind])
    with pytest.raises((Corrupt, InvalidInput, Conflict)):
        import_bundle(other, exported)
    assert files(other) == before
    assert other.find("step >= 0") == []
    for path, data in honest.items():
        path.write_bytes(data)
    import_bundle(other, exported)
    assert other.verify("it").step == 2


def test_what_was_committed_is_taken_back_when_the_lineage_does_not_take_it(
    other: Repository, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(other)
    marked: list[str] = []

    def mark(session: Any, uid: str, *args: Any, **options: Any) -> None:
        marked.append(uid)
        if len(marked) == 2:
            raise OSError("the database is gone")

    monkeypatch.setattr(bundle, "mark", mark)
    with pytest.raises(OSError, match="database is gone"):
        import_bundle(other, exported)
    assert files(other) == before
    monkeypatch.undo()
    assert len(import_bundle(other, exported).states) == 2


def test_a_manifest_that_lies_there_already_is_not_taken_for_the_state(
    other: Repository, exported: Path
) -> None:
    """It has no chunks here, and the import would overwrite it."""
    manifest = next((exported / "packs").glob("*.manifest"))
    planted = other.location.packs / manifest.name
    found = decode(manifest.read_bytes(), source="it")
    planted.write_bytes(encode(found))
    with pytest.raises(Conflict, match=found.origin.uid):
        import_bundle(other, exported)
    planted.unlink()
    import_bundle(other, exported)
    assert other.verify("it").step == 2


def test_a_manifest_that_is_not_the_lineage_s_is_not_opened(
    other: Repository, exported: Path
) -> None:
    newest, older = import_bundle(other, exported).states
    root = other.location.packs
    found = decode((root / f"{older.uid}.0.manifest").read_bytes(), source="it")
    forged = encode(
        msgspec.structs.replace(found, origin=msgspec.structs.replace(found.origin, uid=newest.uid))
    )
    (root / f"{newest.uid}.0.manifest").write_bytes(forged)
    with pytest.raises(Corrupt, match="in the lineage"):
        other.load(newest)


# --- files that are none --------------------------------------------------------------------------


def test_a_planted_lock_is_not_followed_and_a_pipe_hangs_nobody(
    other: Repository, exported: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("dear")
    (exported / "packs" / ".lock").unlink(missing_ok=True)
    (exported / "packs" / ".lock").symlink_to(precious)
    import_bundle(other, exported)
    assert precious.read_text() == "dear"
    victims = [
        exported / "lineage.json",
        *(exported / "packs").glob("*.manifest"),
        *packs(exported),
        *(exported / "chunks").iterdir(),
    ]
    for path in victims:
        data = path.read_bytes()
        for plant in (os.mkfifo, lambda path: path.symlink_to(precious), os.mkdir):
            path.unlink()
            plant(path)
            with opened(tmp_path / "fresh") as fresh, pytest.raises(DatastatesError):
                import_bundle(fresh, exported)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            path.write_bytes(data)


def test_chunks_that_lie_over_each_other_are_refused(other: Repository, exported: Path) -> None:
    """A small file must not become any number of chunks to read."""
    for path in (exported / "packs").glob("*.manifest"):
        found = decode(path.read_bytes(), source="it")
        refs = tuple(msgspec.structs.replace(ref, offset=ref.offset + 1) for ref in found.refs)
        path.write_bytes(encode(msgspec.structs.replace(found, refs=refs)))
    with pytest.raises(Corrupt):
        import_bundle(other, exported)


def test_states_of_a_bundle_share_what_they_have_in_common(
    other: Repository, exported: Path
) -> None:
    assert import_bundle(other, exported).bytes_new < 5 * SIZE
    assert import_bundle(other, exported).bytes_new == 0
