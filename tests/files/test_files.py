"""Files and folders of other tools hold what was written to them, and say so if they cannot."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from datastates.errors import InvalidInput
from datastates.files.checkpoints import DTYPES, Format, format_of, read, write

ENDINGS = {
    Format.TORCH: ".pt",
    Format.SAFETENSORS: ".safetensors",
    Format.HUGGING_FACE: "",
    Format.DCP: "",
}


def again(tree: object, kind: Format, folder: Path) -> Any:
    """What is read of what was written."""
    path = folder / f"again-{kind}{ENDINGS[kind]}"
    write(tree, kind, path, {})
    found = read(path)
    return found["model"] if kind is Format.HUGGING_FACE and isinstance(found, dict) else found


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Format.SAFETENSORS, Format.HUGGING_FACE])
def test_dtypes_that_safetensors_lacks_come_back(kind: Format, tmp_path: Path) -> None:
    tensors = {
        "first": torch.ones(3, dtype=torch.int8),
        "complex": torch.complex(torch.arange(3.0), torch.ones(3)),
        "double": torch.complex(torch.arange(3.0).double(), torch.ones(3).double()).reshape(3, 1),
        "scalar": torch.tensor(1j),
        "none": torch.empty(0, 3, dtype=torch.complex64),
        "small": torch.ones(2, 3).to(torch.float8_e4m3fnuz),
    }
    found = again(tensors, kind, tmp_path)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tolist() == tensor.tolist(), name


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('{"w": "complex7"}', "no dtype 'complex7'"),
        ('{"w": "complex128"}', "says that 'w' is complex128, and holds torch.uint8 of shape"),
        ('{"f": "complex64"}', "says that 'f' is complex64, and holds torch.float32"),
        ('{"x": "complex64"}', "cannot be read"),
        ('{"w": 3}', "cannot be read"),
        ("[", "cannot be read"),
    ],
)
def test_a_dtype_that_does_not_fit_its_tensor_is_refused(
    said: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"w": torch.zeros(3, 8, dtype=torch.uint8), "f": torch.zeros(3, 8)}
    save_file(tensors, path, metadata={DTYPES: said})
    with pytest.raises(InvalidInput, match=why):
        read(path)


# --- what a format holds --------------------------------------------------------------------------


def test_empty_containers_come_back_from_dcp_and_torch_reads_them_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    tree = {
        "optimizer": plain,
        "nothing": {"m": {}, "l": [], "t": ()},
        "lists": [{}, torch.ones(1)],
        "deep": [[{}], 2],
        "inner": [{"a": {}}],
        "last": torch.ones(2),
    }
    found = again(tree, Format.DCP, tmp_path)
    assert plain["state"] == {}
    assert repr(found) == repr(tree), "in the same order"
    dcp_to_torch_save(tmp_path / "again-dcp", tmp_path / "torch.pt")
    assert repr(torch.load(tmp_path / "torch.pt", weights_only=True)) == repr(tree)
    assert again({}, Format.DCP, tmp_path / "empty") == {}


def optimizer_after(scale: float, momentum: float) -> torch.optim.Optimizer:
    """An optimizer that has made one step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.full((1, 2), scale)).sum().backward()
    made.step()
    return made


def test_an_optimizer_comes_back_from_dcp_with_the_numbers_of_its_parameters(
    tmp_path: Path,
) -> None:
    state = optimizer_after(1.0, 0.9).state_dict()
    tree = {
        "optimizer": state,
        "several": [state, {"state": {"0": 1, "7": 2}, "param_groups": [{"params": [0, "7"]}, 3]}],
    }
    found = again(tree, Format.DCP, tmp_path)
    assert repr(found["optimizer"]) == repr(found["several"][0]) == repr(state)
    assert list(found["several"][1]["state"]) == [0, "7"]
    fresh = optimizer_after(3.0, 0.9)
    fresh.load_state_dict(found["optimizer"])
    assert repr(fresh.state_dict()) == repr(state)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_in_dcp_is_loaded_by_torch_into_that_of_another_training(
    momentum: float, tmp_path: Path
) -> None:
    trained, other = optimizer_after(1.0, momentum), optimizer_after(3.0, momentum)
    write({"optimizer": trained.state_dict()}, Format.DCP, tmp_path / "out", {})
    found = {"optimizer": other.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load_dcp(found, checkpoint_id=tmp_path / "out", no_dist=True)
    other.load_state_dict(found["optimizer"])
    assert repr(other.state_dict()) == repr(trained.state_dict())


@pytest.mark.parametrize(
    ("tree", "kinds"),
    [
        ({"a.b": 1, "a": {"b": 2}}, [Format.DCP]),
        ({"a": {0: 1, "0": 2}}, [Format.DCP]),
        ({"s": torch.eye(3).to_sparse()}, [Format.DCP, Format.SAFETENSORS, Format.HUGGING_FACE]),
        ([1, 2], [Format.DCP, Format.SAFETENSORS, Format.HUGGING_FACE]),
    ],
)
def test_what_a_format_cannot_hold_is_refused_and_leaves_nothing(
    tree: object, kinds: list[Format], tmp_path: Path
) -> None:
    for kind in kinds:
        with pytest.raises(InvalidInput, match="try torch"):
            write(tree, kind, tmp_path / "out", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_what_stops_torch_while_it_writes_a_folder_is_raised_as_itself(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise error

    monkeypatch.setattr(FileSystemWriter, "write_data", stop)
    with pytest.raises(type(error)):
        write({"w": torch.ones(2)}, Format.DCP, tmp_path / "out", {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_hugging_face_gets_only_texts_that_are_read_again(tmp_path: Path) -> None:
    files = {
        "config.json": "{}",
        "..": "x",
        "": "x",
        "../up.json": "x",
        "model.safetensors": "x",
        "n.json": 3,
    }
    write(
        {"model": {"w": torch.ones(2)}, "files": files}, Format.HUGGING_FACE, tmp_path / "out", {}
    )
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.ones(2))


# --- leftovers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(Format))
@pytest.mark.parametrize("left", ["folder", "file", "link"])
def test_what_a_killed_export_left_is_replaced(kind: Format, left: str, tmp_path: Path) -> None:
    part, elsewhere = tmp_path / "to" / ".part-out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "old.json").write_text("{}")
    part.parent.mkdir()
    if left == "link":
        part.symlink_to(elsewhere)
    elif left == "file":
        part.write_text("old")
    else:
        shutil.copytree(elsewhere, part)
    write({"w": torch.ones(2)}, kind, part.parent / "out", {})
    assert os.listdir(part.parent) == ["out"]
    assert not (part.parent / "out" / "old.json").exists()
    assert os.listdir(elsewhere) == ["old.json"]


# --- folders of others ----------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_dcp_metadata_that_another_python_wrote_are_read(module: str, tmp_path: Path) -> None:
    write({"w": torch.ones(3)}, Format.DCP, tmp_path / "theirs", {})
    path = tmp_path / "theirs" / ".metadata"
    own, theirs = (f"c{name}\nPosixPath\n".encode() for name in (type(path).__module__, module))
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()), protocol=2).replace(own, theirs))
    assert theirs in path.read_bytes()
    assert repr(read(tmp_path / "theirs")) == repr({"w": torch.ones(3)})


@pytest.mark.parametrize(
    "name",
    [lambda root: str(root / "secret" / "__0_0.distcp"), lambda root: "../secret/__0_0.distcp"],
)
def test_dcp_metadata_that_name_a_file_of_another_folder_are_refused(
    name: Callable[[Path], str], tmp_path: Path
) -> None:
    write({"w": torch.full((3,), 42.0)}, Format.DCP, tmp_path / "secret", {})
    shutil.copytree(tmp_path / "secret", tmp_path / "theirs")
    (tmp_path / "theirs" / "__0_0.distcp").unlink()
    path = tmp_path / "theirs" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name(tmp_path)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(InvalidInput, match="a file of another folder"):
        read(tmp_path / "theirs")


@pytest.mark.parametrize(
    "name",
    [
        "pathlib\nPath",
        "collections\nOrderedDict",
        "torch.distributed.checkpoint.metadata\nMetadata",
    ],
)
def test_dcp_metadata_that_set_an_attribute_of_a_class_set_none(name: str, tmp_path: Path) -> None:
    write({"w": torch.ones(2)}, Format.DCP, tmp_path / "theirs", {})
    with_attribute = f"c{name}\nN}}Vset_by_a_stranger\nI1\ns\x86b."
    (tmp_path / "theirs" / ".metadata").write_bytes(with_attribute.encode("latin-1"))
    with pytest.raises(InvalidInput, match="its metadata are none"):
        read(tmp_path / "theirs")
    assert not any(hasattr(each, "set_by_a_stranger") for each in (Path, OrderedDict, Metadata))


def test_a_folder_that_cannot_be_listed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(InvalidInput, match="Permission denied"):
        format_of(tmp_path)
