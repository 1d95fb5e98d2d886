"""States carried in a folder from one repository to another."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

import datastates
from datastates import Conflict, NotFound, Repository, State, Status, Unavailable
from datastates.errors import Corrupt, InvalidInput
from datastates.files import bundle
from datastates.files.bundle import export_bundle, import_bundle
from datastates.storage.durable_files import write_file
from tests.cli.conftest import Invoke
from tests.cli.conftest import invoke as invoke
from tests.files.conftest import opened, rewrite

MIB = 1 << 20


def member(repo: Repository, branch: str, value: float, **options: Any) -> State:
    """Three states; the last is returned."""
    weights = {"w": torch.linspace(0, value, 3000), "n": torch.tensor(3)}
    with repo.track(branch=branch, rng=False, model=weights, **options) as run:
        for number in range(3):
            weights["w"] += 1.0
            metrics = {"loss": value, "worst": math.nan, "best": -math.inf}
            state = run.capture(
                metrics=metrics,
                attributes={"kind": "toy", "odd": math.inf, "n": 2**60, "no": None},
                message=f"{number}",
            ).wait()
    return state


def soup(repo: Repository) -> State:
    members = [member(repo, name, value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    repo.tag("second", "a~1", message="the one before")
    return repo.merge(members, weights=[0.5, 0.3, 0.2], tag="soup", message="three")


def facts(state: State) -> str:
    """What a state is in every lineage; as text, in which a NaN equals itself."""
    return repr(
        (
            *(
                state.uid,
                state.digest,
                state.parents,
                state.edges,
                sorted(state.metrics.items()),
                sorted(state.attributes.items(), key=repr),
            ),
            *(state.message, state.created_at, state.step, state.micro_step, state.bytes_total),
        )
    )


def content(repo: Repository, rev: str) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in repo.load(rev)["model"].values()]


def test_a_merge_is_verified_from_its_parents_after_export_and_import(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    merged = soup(repo)

    written = export_bundle(repo, ["soup"], tmp_path / "bundle", with_parents=True)
    brought = import_bundle(other, tmp_path / "bundle")

    assert other.verify_merge("soup").uid == merged.uid
    assert (
        [state.uid for state in brought.states]
        == [merged.uid, *merged.parents]
        == [state.uid for state in written.states]
    )
    assert (brought.ancestors, written.ancestors) == (6, 6)
    assert list(map(facts, other.log("soup"))) == list(map(facts, repo.log("soup")))
    assert {state.uid: state.status for state in other.log("soup")} == {
        state.uid: Status.DURABLE if state.uid in (merged.uid, *merged.parents) else Status.EVICTED
        for state in repo.log("soup")
    }
    assert [(ref.name, ref.state, ref.message) for ref in other.refs()] == [
        (name, repo.state(name).uid, message)
        for name, message in (("second", "the one before"), ("soup", None))
    ]
    assert content(other, "soup") == content(repo, "soup")


def test_without_parents_a_merge_comes_alone_and_says_what_it_lacks(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    soup(repo)
    export_bundle(repo, ["soup"], tmp_path / "bundle")
    assert len(import_bundle(other, tmp_path / "bundle").states) == 1
    assert content(other, "soup") == content(repo, "soup")
    with pytest.raises(Unavailable, match="cannot be restored"):
        other.verify_merge("soup")


def test_what_is_imported_outlives_the_bundle_and_the_process(
    repo: Repository, tmp_path: Path
) -> None:
    soup(repo)
    export_bundle(repo, ["soup", "a"], tmp_path / "bundle")
    with opened(tmp_path / "new") as new:
        import_bundle(new, tmp_path / "bundle")
    (tmp_path / "bundle").rename(tmp_path / "gone")
    with opened(tmp_path / "new") as new:
        assert new.recovered == []
        assert content(new, "soup") == content(repo, "soup")
        weights = {"w": torch.zeros(3000), "n": torch.tensor(0)}
        with new.track(branch="on", start="soup", rng=False, model=weights) as run:
            assert [tensor.numpy().tobytes() for tensor in weights.values()] == content(
                repo, "soup"
            )
            assert run.capture().wait("durable").parents == (repo.state("soup").uid,)


def test_a_second_import_changes_nothing(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    soup(repo)
    export_bundle(repo, ["soup"], tmp_path / "bundle", with_parents=True)
    import_bundle(other, tmp_path / "bundle")
    before = (
        list(map(repr, other.log("soup"))),
        other.refs(),
        sorted(path.name for path in (tmp_path / "theirs" / "packs").iterdir()),
    )

    again = import_bundle(other, tmp_path / "bundle")

    assert again.bytes_new == 0
    assert before == (
        list(map(repr, other.log("soup"))),
        other.refs(),
        sorted(path.name for path in (tmp_path / "theirs" / "packs").iterdir()),
    )


def test_states_known_without_bytes_get_them_and_taken_tags_stay(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    soup(repo)
    export_bundle(repo, ["soup"], tmp_path / "one")
    export_bundle(repo, ["a"], tmp_path / "two")
    import_bundle(other, tmp_path / "one")
    other.delete_ref("second")
    other.tag("second", "soup")
    uid = repo.state("a").uid
    assert other.state(uid).status is Status.EVICTED

    import_bundle(other, tmp_path / "two")

    assert other.state(uid).status is Status.DURABLE
    assert other.state("second").uid == other.state("soup").uid
    assert content(other, uid) == content(repo, "a")


# --- what is wrong with a bundle ------------------------------------------------------------------


def test_any_changed_byte_is_found_and_nothing_is_taken(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    soup(repo)
    export_bundle(repo, ["soup"], tmp_path / "bundle")
    for path in sorted(
        each for each in (tmp_path / "bundle").rglob("*") if each.is_file() and each.stat().st_size
    ):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises(Corrupt):
                import_bundle(other, tmp_path / "bundle")
        path.write_bytes(whole)
    assert other.find("step >= 0") == []
    assert other.refs() == []
    import_bundle(other, tmp_path / "bundle")


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain["states"][-1].update(digest="0" * 64),
        lambda plain: plain["states"][-1].update(uid="../../../etc/passwd"),
        lambda plain: plain["states"][0].update(uid="0" * 24),
        lambda plain: (
            plain["states"][-1].update(parents=plain["states"][-1]["parents"][::-1])
            or plain["states"][0].update(digest="1" * 64)
        ),
        lambda plain: plain["states"][-1].update(status="best"),
        lambda plain: plain["states"][0].update(world_size=2**20 + 1),
        lambda plain: plain.update(held=["f" * 24]),
        lambda plain: plain.update(states=3),
        lambda plain: plain.pop("tags"),
    ],
)
def test_a_forged_lineage_is_refused(
    repo: Repository, other: Repository, tmp_path: Path, change: Any
) -> None:
    """The members are the direct parents of the soup here, so that each of their digests is in
    its manifest."""
    members = [
        repo.track(branch=name, rng=False, model={"w": torch.full((3,), value)})
        for name, value in (("a", 1.0), ("b", 2.0))
    ]
    repo.merge([run.capture().wait() for run in members], tag="soup")
    export_bundle(repo, ["soup"], tmp_path / "bundle")
    rewrite(tmp_path / "bundle", change)
    with pytest.raises((Corrupt, InvalidInput, Conflict)):
        import_bundle(other, tmp_path / "bundle")
    assert other.find("step >= 0") == []


def test_an_unfinished_bundle_or_one_of_another_version_is_refused(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    soup(repo)
    export_bundle(repo, ["soup"], tmp_path / "bundle")
    for version in (2, 4):
        rewrite(tmp_path / "bundle", lambda plain, version=version: plain.update(version=version))
        with pytest.raises(Unavailable, match="upgrade"):
            import_bundle(other, tmp_path / "bundle")
    (tmp_path / "bundle" / "lineage.blake3").unlink()
    with pytest.raises(NotFound, match="not written to its end"):
        import_bundle(other, tmp_path / "bundle")
    with pytest.raises(NotFound):
        import_bundle(other, tmp_path / "nowhere")


def test_a_folder_with_something_in_it_is_left_alone_and_a_failed_export_leaves_nothing(
    repo: Repository, tmp_path: Path
) -> None:
    soup(repo)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear", encoding="ascii")
    with pytest.raises(Conflict, match="not empty"):
        export_bundle(repo, ["soup"], tmp_path / "mine")
    with pytest.raises(InvalidInput, match="a list of states"):
        export_bundle(repo, [], tmp_path / "new")
    repo.close()
    with opened(tmp_path / "ours") as again:
        with pytest.raises(Unavailable):
            export_bundle(again, ["soup", "a~2"], tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_an_import_without_descriptors_says_so_and_takes_nothing(
    repo: Repository, other: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_bundle(repo, [member(repo, "a", 1.0).uid], tmp_path / "bundle")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(bundle, "MappedReader", full)
    with pytest.raises(Unavailable, match=r"cannot be taken in .*: raise the limit of open files"):
        import_bundle(other, tmp_path / "bundle")
    assert other.find("step >= 0") == []


def test_a_lineage_that_no_import_would_read_is_refused_by_the_export(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member(repo, "a", 1.0)
    export_bundle(repo, ["a"], tmp_path / "fits")
    body = (tmp_path / "fits" / "lineage.json").read_bytes()
    monkeypatch.setattr(bundle, "_MOST_BYTES", len(body) - 1)
    with pytest.raises(
        InvalidInput,
        match=r"have 2 ancestors, whose lineage takes \d+ bytes.*name states with fewer ancestors",
    ):
        export_bundle(repo, ["a"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_lineage_is_read_with_and_without_white_space(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    member(repo, "a", 1.0)
    export_bundle(repo, ["a"], tmp_path / "bundle")
    path = tmp_path / "bundle" / "lineage.json"
    assert b"\n" not in path.read_bytes()
    body = json.dumps(json.loads(path.read_bytes()), indent=1).encode()
    path.write_bytes(body)
    (tmp_path / "bundle" / "lineage.blake3").write_text(blake3(body).hexdigest(), encoding="ascii")
    import_bundle(other, tmp_path / "bundle")
    assert list(map(facts, other.log(repo.state("a").uid))) == list(map(facts, repo.log("a")))


def test_a_failed_export_leaves_an_empty_folder_empty(
    repo: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member(repo, "a", 1.0)
    root = tmp_path / "empty"
    root.mkdir()

    def fails_at_the_last(fd: int, path: Path, data: bytes) -> None:
        if path.suffix == ".blake3":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(fd, path, data)

    monkeypatch.setattr("datastates.files.bundle.write_file", fails_at_the_last)
    with pytest.raises(OSError, match="No space"):
        export_bundle(repo, ["a"], root)
    assert list(root.iterdir()) == []


# --- in the terminal ------------------------------------------------------------------------------


def test_the_terminal_exports_and_imports(
    repo: Repository, other: Repository, tmp_path: Path, invoke: Invoke
) -> None:
    merged = soup(repo)
    repo.close()
    other.close()

    written = invoke(
        "--repo",
        tmp_path / "ours",
        "export",
        "soup",
        "b",
        "--bundle",
        tmp_path / "bundle",
        "--parents",
        "--json",
    )
    brought = invoke("--repo", tmp_path / "theirs", "import", tmp_path / "bundle")

    assert written.code == 0, written.err
    assert written.json["states"][0] == merged.uid
    assert len(written.json["states"]) == 4
    assert (brought.code, brought.out.startswith("4 states from ")) == (0, True), brought.err
    with opened(tmp_path / "theirs") as theirs:
        assert theirs.verify_merge("soup").uid == merged.uid
        names = {ref.name for ref in theirs.refs()}
        assert names == {"soup", "second", *(f"import/{uid[:10]}" for uid in merged.parents)}
    taken = invoke("--repo", tmp_path / "ours", "export", "soup", "--bundle", tmp_path / "bundle")
    assert taken.code == 4
    assert invoke("--repo", tmp_path / "theirs", "import", tmp_path / "nothing").code == 3


def test_bundles_on_postgresql(repo: Repository, postgresql_url: str, tmp_path: Path) -> None:
    merged = soup(repo)
    export_bundle(repo, ["soup"], tmp_path / "bundle", with_parents=True)
    with datastates.open(postgresql_url, packs=tmp_path / "packs", memory_bytes=64 * MIB) as new:
        import_bundle(new, tmp_path / "bundle")
        assert facts(new.verify_merge("soup")) == facts(merged)


def test_a_bundle_carries_the_notes_on_its_states_once(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    member(repo, "main", 1.0)
    note = repo.notes.write("Diverges *here*", state="main~1", author="ada")
    repo.notes.edit(note.uid, "It did not")
    repo.notes.write("stays", branch="main")
    export_bundle(repo, ["main"], tmp_path / "bundle")

    for _ in range(2):
        import_bundle(other, tmp_path / "bundle")

    assert [each for each in repo.notes if each.branch is None] == list(other.notes)
    assert [each.text for each in other.notes] == ["It did not"]


def test_a_bundle_with_notes_on_strangers_is_refused(
    repo: Repository, other: Repository, tmp_path: Path
) -> None:
    member(repo, "main", 1.0)
    repo.notes.write("x", state="main")
    export_bundle(repo, ["main"], tmp_path / "bundle")
    for change in ({"state": "0" * 24}, {"state": None, "branch": "main"}, {"uid": "../x"}):
        rewrite(tmp_path / "bundle", lambda plain, change=change: plain["notes"][0].update(change))
        with pytest.raises(Corrupt):
            import_bundle(other, tmp_path / "bundle")
    assert list(other.notes) == []
