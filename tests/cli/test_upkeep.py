"""``verify`` of everything, ``repair``, ``repair --lineage`` and ``gc`` in the terminal: what they say,
and how they end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import datastates
from datastates.state.digest import wrap
from tests.cli.conftest import Invoke


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained") / "runs"
    with (
        datastates.open(root, memory_bytes=64 << 20) as repo,
        repo.track(weight=(weight := torch.zeros(300)), rng=False) as run,
    ):
        for _ in range(3):
            weight += 1
            run.capture(metrics={"loss": 1.0}).wait("durable")
    return root


@pytest.fixture
def repo(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


def damage(repo: Path) -> str:
    """Flip a byte of the head's only chunk; its uid."""
    with datastates.open(repo) as opened:
        uid = opened.state("main").uid
    path = repo / "packs" / f"{uid}.0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return uid


def test_verify_of_everything_names_state_chunk_and_tensor_and_ends_as_corrupt(
    repo: Path, invoke: Invoke
) -> None:
    done = invoke("--repo", repo, "verify")
    assert (done.code, done.out) == (0, "3 states, 3.5 KiB read: every byte as it was written\n")
    uid = damage(repo)
    done = invoke("--repo", repo, "verify")
    assert done.code == 6
    assert f"state {uid}: chunk 0 (weight): " in done.out
    assert "1 damaged" in done.out
    told = invoke("--repo", repo, "verify", "--json").json
    assert (told["ok"], told["damage"][0]["state"], told["damage"][0]["tensors"]) == (
        False,
        uid,
        ["weight"],
    )


def test_verify_ends_in_time_and_goes_on_from_there(repo: Path, invoke: Invoke) -> None:
    done = invoke("--repo", repo, "verify", "--for", "0.000001")
    assert done.code == 0
    mark = done.err.split("--since ")[1].strip()
    done = invoke("--repo", repo, "verify", "--since", mark, "--json")
    assert (done.json["states"], done.json["mark"]) == (2, None)
    assert invoke("--repo", repo, "verify", "main", "--since", mark).code == 5


def test_a_manifest_of_a_newer_version_is_said_and_is_no_damage(repo: Path, invoke: Invoke) -> None:
    (repo / "packs" / f"{'f' * 24}.0.manifest").write_bytes(wrap(9, b"?"))
    done = invoke("--repo", repo, "verify")
    assert (done.code, "not read: " in done.out, "upgrade datastates" in done.out) == (
        7,
        True,
        True,
    )
    done = invoke("--repo", repo, "gc")
    assert done.code == 0
    assert "left: every pack, because" in done.out


def test_repair_brings_back_what_another_repository_has(
    repo: Path, trained: Path, invoke: Invoke
) -> None:
    uid = damage(repo)
    done = invoke("--repo", repo, "repair")
    assert done.code == 6
    assert "0 states repaired, 1 still damaged" in done.out
    assert "the nearest ancestor that can be restored is " in done.out
    done = invoke("--repo", repo, "repair", "--from", trained)
    assert (done.code, done.out) == (
        0,
        f"1 state repaired, 0 still damaged\nstate {uid}: every byte as it was\n",
    )
    assert invoke("--repo", repo, "repair", "--from", repo / "nothing").code == 3
    assert invoke("--repo", repo, "gc", "--dry-run", "--json").json["packs"] == 1


def test_repair_brings_back_what_a_server_has(
    repo: Path, trained: Path, tmp_path: Path, invoke: Invoke
) -> None:
    uid = damage(repo)
    token = tmp_path / "token"
    token.write_text("a token of at least sixteen characters\n")
    token.chmod(0o600)
    with (
        datastates.open(trained) as theirs,
        theirs.serve("tcp://127.0.0.1:0", token=token.read_text().strip()) as server,
    ):
        done = invoke("--repo", repo, "repair", "--peer", server.url, "--token-file", token)
        assert (done.code, done.out) == (
            0,
            f"1 state repaired, 0 still damaged\nstate {uid}: every byte as it was\n",
        )
        url = server.url
    assert invoke("--repo", repo, "verify").code == 0
    done = invoke("--repo", repo, "repair", "--peer", url, "--token-file", token)
    assert done.code != 0
    assert url.split("//")[1] in done.err


def test_gc_says_how_much_before_and_after(repo: Path, invoke: Invoke) -> None:
    (repo / "packs" / "stray.0.safetensors").write_bytes(bytes(2048))
    (repo / "packs" / ".tmp-dead").write_bytes(bytes(1024))
    done = invoke("--repo", repo, "gc", "--dry-run")
    assert done.out.splitlines()[0] == "3.0 KiB can be freed"
    done = invoke("--repo", repo, "gc")
    assert done.out.splitlines() == [
        "3.0 KiB freed",
        "  1: packs that no state needs, 2.0 KiB",
        "  1: files that a dead process left half written, 1.0 KiB",
    ]
    assert invoke("--repo", repo, "gc", "--json").json["bytes_freed"] == 0


def test_reindex_says_what_came_back_and_what_is_lacking(repo: Path, invoke: Invoke) -> None:
    assert invoke("--repo", repo, "repair", "--lineage").code == 4
    done = invoke("--repo", repo, "repair", "--lineage", "--replace")
    assert done.code == 0
    assert "3 states, 3 restorable here\n1 branch, 0 tags, 0 notes, 3 ref events\n" in done.out
    assert "lineage.db.replaced-1" in done.out
    (repo / "lineage.db").unlink()
    done = invoke("--repo", repo, "log")
    assert done.code == 3
    (repo / "packs" / "lineage.backup").unlink()
    told = invoke("--repo", repo, "repair", "--lineage", "--json").json
    assert (told["states"], "no backup" in told["lacking"][0]) == (3, True)
    assert invoke("--repo", repo, "log").code == 0
    assert invoke("--repo", repo / "nowhere", "repair", "--lineage").code == 3
