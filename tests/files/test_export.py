"""Exported files are plain safetensors, whole or not there."""

from __future__ import annotations

import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from datastates.errors import Corrupt, InvalidInput
from datastates.files import checkpoints
from datastates.files.checkpoints import export, plan_export
from datastates.lineage import State, Status

STATE = State(
    "a" * 24, "d" * 64, 7, 0, {}, {}, None, datetime.now(UTC), Status.DURABLE, (), (), None, 0, 0, 0
)


def tree() -> dict[str, object]:
    shared = torch.arange(6.0).reshape(2, 3)
    return {
        "model": {
            "weight": shared,
            "tied": shared,
            "turned": shared.t(),
            "flag": torch.tensor([True, False]),
            "half": torch.ones(3).bfloat16(),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 0)}},
            "lr": 0.1,
        },
        "alone": torch.tensor(5),
        "nothing": None,
    }


def test_file_holds_every_tensor_under_its_path(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    export(plan_export(tree(), STATE, path))
    loaded = load_file(path)

    assert set(loaded) == {
        *(f"model/{name}" for name in ("weight", "tied", "turned", "flag", "half")),
        *("optimizer/state/0/step", "optimizer/state/0/exp_avg", "alone"),
    }
    assert torch.equal(loaded["model/turned"], torch.arange(6.0).reshape(2, 3).t())
    assert loaded["model/half"].dtype == torch.bfloat16
    assert loaded["optimizer/state/0/exp_avg"].shape == (2, 0)
    assert loaded["alone"].shape == ()
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {
            "format": "pt",
            "datastates.state": "a" * 24,
            "datastates.digest": "d" * 64,
            "datastates.step": "7",
        }


def test_folder_has_a_file_for_each_object_with_its_own_names(tmp_path: Path) -> None:
    export(plan_export(tree(), STATE, tmp_path / "out"))

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "alone.safetensors",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {
        "weight",
        "tied",
        "turned",
        "flag",
        "half",
    }
    assert load_file(tmp_path / "out" / "alone.safetensors")["alone"] == 5


def test_names_never_lead_out_of_the_folder(tmp_path: Path) -> None:
    plan = plan_export(
        {
            "..": {"x": torch.ones(1)},
            "../up": torch.ones(1),
            ".hidden": torch.ones(1),
            "_.hidden": torch.ones(1),
        },
        STATE,
        tmp_path / "out",
    )

    assert {path.parent for path in plan} == {tmp_path / "out"}
    assert not any(path.name.startswith(".") for path in plan)
    assert len(plan) == 4


def test_dtypes_that_readers_do_not_know_are_bytes_with_a_note(tmp_path: Path) -> None:
    value = torch.complex(torch.arange(3.0).double(), torch.ones(3).double())
    export(plan_export({"z": value}, STATE, tmp_path / "z.safetensors"))
    loaded = load_file(tmp_path / "z.safetensors")["z"]

    assert torch.equal(loaded.view(torch.complex128).reshape(3), value)
    with safe_open(tmp_path / "z.safetensors", "pt") as opened:
        assert json.loads(opened.metadata()["datastates.dtypes"]) == {"z": "complex128"}


def test_tensors_longer_than_a_piece_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 1000)
    value = torch.randn(1234)
    told: list[int] = []
    export(plan_export({"x": value}, STATE, tmp_path / "x.safetensors"), on_progress=told.append)

    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], value)
    assert sum(told) == 2 * value.nbytes


def test_each_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    export(
        plan_export(
            {
                "a": torch.ones(3, dtype=torch.int8),
                "b": torch.ones(3, dtype=torch.float64),
                "c": torch.ones(1).half(),
            },
            STATE,
            path,
        )
    )
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])

    sizes = {"a": 1, "b": 8, "c": 2}
    assert {
        name: (start + header[name]["data_offsets"][0]) % size for name, size in sizes.items()
    } == {"a": 0, "b": 0, "c": 0}


def test_tree_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--only"):
        plan_export({"model": {"weight": None}, "lr": 0.1}, STATE, tmp_path / "x.safetensors")


def test_damage_between_writing_and_reading_back_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoints._write_tensors

    def write_and_damage(path: Path, *arguments: object) -> object:
        digests = write(path, *arguments)  # type: ignore[arg-type]  # passed through as they are
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return digests

    monkeypatch.setattr(checkpoints, "_write_tensors", write_and_damage)
    with pytest.raises(Corrupt, match=r"x\.safetensors.*'x'"):
        export(plan_export({"x": torch.ones(9)}, STATE, tmp_path / "x.safetensors"))
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        export(plan_export({"x": torch.ones(9)}, STATE, path))
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    assert path.read_text() == "old"
