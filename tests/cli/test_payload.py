"""``restore``, ``verify`` and ``tag`` on states that have bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import datastates
from datastates.maintenance.retention_pass import evict
from tests.cli.conftest import Invoke


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A repository whose branch ``main`` was trained for three steps, and the model's tensors at
    its head."""
    root = tmp_path_factory.mktemp("trained") / "runs"
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        datastates.open(root, memory_bytes=64 << 20) as repo,
        repo.track(model=model, optimizer=optimizer) as run,
    ):
        for _ in range(3):
            model(torch.ones(300)).sum().backward()
            optimizer.step()
            handle = run.capture(metrics={"loss": 1.0})
            handle.wait("durable")
    return root, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture
def repo(trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained[0], tmp_path / "runs"))


def test_restore_takes_the_nearest_state_that_was_kept(
    repo: Path, invoke: Invoke, tmp_path: Path
) -> None:
    into = ("--into", tmp_path / "out.safetensors", "--json")
    with datastates.open(repo) as opened:
        gone, kept = opened.state("main~1").uid, opened.state("main~2").uid
        evict(opened.core, gone)
    refused = invoke("--repo", repo, "restore", "main~1", *into)
    assert (refused.code, "take step 1 with nearest=True" in refused.out + refused.err) == (7, True)
    assert not (tmp_path / "out.safetensors").exists()
    done = invoke("--repo", repo, "restore", "main~1", "--nearest", *into)
    assert (done.code, done.json["state"], done.json["step"]) == (0, kept, 1)
    assert (
        invoke("--repo", repo, "restore", "main", "--nearest", "--force", *into).json["step"] == 3
    )


def test_show_lists_the_files_that_were_captured_with_a_state(
    repo: Path, invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_bytes(b"a" * 2048)
    with (
        datastates.open(repo, memory_bytes=64 << 20) as opened,
        opened.track(branch="drawn", value=1) as run,
    ):
        files = {"notes": tmp_path / "notes.txt", "raw": b"\x89PNG\r\n\x1a\n"}
        run.capture(files=files).wait("durable")
        gone = run.capture(files=files).wait("durable").uid
        run.capture().wait("durable")
        evict(opened.core, gone)
    assert invoke("--repo", repo, "show", "drawn~2", "--json").json["files"] == [
        {"name": "notes.txt", "bytes": 2048, "type": "application/octet-stream"},
        {"name": "raw", "bytes": 8, "type": "image/png"},
    ]
    lines = invoke("--repo", repo, "show", "drawn~2").out.splitlines()
    assert [line for line in lines if line.startswith("file ")] == [
        "file        notes.txt, 2.0 KiB",
        "file        raw, 8 B",
    ]
    for rev in ("drawn~1", "drawn", "main"):
        assert invoke("--repo", repo, "show", rev, "--json").json["files"] == []


def test_restore_writes_one_file(
    repo: Path, trained: tuple[Path, dict[str, torch.Tensor]], invoke: Invoke, tmp_path: Path
) -> None:
    done = invoke(
        "--repo", repo, "restore", "main", "--into", tmp_path / "out.safetensors", "--json"
    )

    assert done.code == 0, done.err
    loaded = load_file(tmp_path / "out.safetensors")
    assert done.json["step"] == 3
    assert done.json["files"] == [
        {
            "path": str(tmp_path / "out.safetensors"),
            "tensors": len(loaded),
            "bytes": sum(each.nbytes for each in loaded.values()),
        }
    ]
    for name, value in trained[1].items():
        assert torch.equal(loaded[f"model/{name}"], value)
    assert any(name.startswith("optimizer/") for name in loaded)


def test_restore_into_a_folder_suits_load_state_dict(
    repo: Path, trained: tuple[Path, dict[str, torch.Tensor]], invoke: Invoke, tmp_path: Path
) -> None:
    done = invoke("--repo", repo, "restore", "main", "--into", tmp_path / "out", "--only", "model")

    assert done.code == 0, done.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    model = torch.nn.Linear(300, 40)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert torch.equal(model.weight, trained[1]["weight"])
    assert done.out.startswith(f"{tmp_path}/out/model.safetensors: 2 tensors, 47.0 KiB")


def test_restore_into_a_torch_file_writes_everything(
    repo: Path, trained: tuple[Path, dict[str, torch.Tensor]], invoke: Invoke, tmp_path: Path
) -> None:
    path = tmp_path / "out.pt"
    done = invoke("--repo", repo, "restore", "main", "--into", path, "--json")

    assert done.code == 0, done.err
    found = torch.load(path, weights_only=True)
    assert all(torch.equal(found["model"][name], value) for name, value in trained[1].items())
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.001
    assert [file["path"] for file in done.json["files"]] == [str(path)]
    assert invoke("--repo", repo, "restore", "main", "--into", path).code == 4
    again = invoke("--repo", repo, "restore", "main", "--into", path, "--force", "--only", "model")
    assert again.code == 0
    assert list(torch.load(path, weights_only=True)) == ["model"]
    some = ("--force", "--only", "model/weight")
    assert invoke("--repo", repo, "restore", "main", "--into", path, *some).code == 5


def test_restore_replaces_only_when_told(repo: Path, invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    path.write_text("mine")

    assert invoke("--repo", repo, "restore", "main", "--into", path).code == 5
    assert path.read_text() == "mine"
    assert (
        invoke(
            "--repo", repo, "restore", "main", "--into", path, "--force", "--only", "model/*"
        ).code
        == 0
    )
    assert set(load_file(path)) == {"model/weight", "model/bias"}


@pytest.mark.parametrize(
    ("only", "into"),
    [
        ("nothing", "out"),
        ("model", "runs/lineage.db"),
        ("model", "is.safetensors"),
        ("model", "new.onnx"),
    ],
)
def test_restore_refuses_what_cannot_be(
    repo: Path, invoke: Invoke, tmp_path: Path, only: str, into: str
) -> None:
    (tmp_path / "is.safetensors").mkdir()
    before = sorted(tmp_path.rglob("*"))
    failed = invoke("--repo", repo, "restore", "main", "--into", tmp_path / into, "--only", only)

    assert failed.code == 5
    assert sorted(path for path in tmp_path.rglob("*") if "lineage.db-" not in path.name) == before


def test_verify_reads_every_byte(repo: Path, invoke: Invoke) -> None:
    done = invoke("--repo", repo, "verify", "main")

    assert done.code == 0, done.err
    assert "every byte as it was captured" in done.out
    assert invoke("--repo", repo, "verify", "main", "--json").json["ok"] is True


def test_damage_ends_with_6(repo: Path, invoke: Invoke, tmp_path: Path) -> None:
    uid = invoke("--repo", repo, "show", "main", "--json").json["uid"]
    (pack,) = (repo / "packs").glob(f"{uid}*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-2000] ^= 1
    pack.write_bytes(data)

    assert invoke("--repo", repo, "verify", "main").code == 6
    failed = invoke("--repo", repo, "restore", "main", "--into", tmp_path / "out.safetensors")
    assert failed.code == 6
    assert pack.name in failed.err
    assert not (tmp_path / "out.safetensors").exists()
    assert invoke("--repo", repo, "verify", "main~1").code == 0


def test_state_without_bytes_ends_with_7(root: Path, invoke: Invoke, tmp_path: Path) -> None:
    failed = invoke(
        "--repo", root, "restore", "main~6", "--into", tmp_path / "out.safetensors", "--json"
    )

    assert failed.code == 7
    assert '"kind":"unavailable"' in failed.err
