"""Checkpoint files of other tools, in and out: ``torch.save``, safetensors, folders of Hugging
Face, folders of torch.distributed.checkpoint.

Files that are read are never executed: ``torch.load`` is called with ``weights_only``, and tensors
are plain. A file becomes a tree of the same containers and tensors, bit for bit, and is written
back as such. A file that is only tensors by name is put under one name (``model``), as a training
would track it. An attribute of the state records that, and an export leaves out the name.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import torch

from datastates.errors import Conflict, Corrupt, InvalidInput, Unsupported
from datastates.lineage.states import State
from datastates.state.adapters import FILES
from datastates.state.data_position import LOOPS
from datastates.state.digest import chunk_digest
from datastates.state.geometry import dtype_of, is_plain
from datastates.state.model import MODES
from datastates.state.tree import MOST_OBJECTS, expanded, flatten
from datastates.storage.pack import DTYPE_CODES
from datastates.system.files import check_archive, make_regular, open_regular, sync_folder

DTYPES = "datastates.dtypes"
"""The text in a file's header with the dtype, in JSON by name, of each tensor that stands there
as bytes."""

_PIECE_BYTES = 16 << 20
_CODES = {dtype_of(name): code for name, code in DTYPE_CODES.items()}
"""The dtypes that readers have long known; tensors of other dtypes are written as bytes, and
``DTYPES`` names theirs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file, by its description."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes that it takes in the file, with each element written out."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ExportFile:
    """The content of one file: tensors by name, and text about them."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]

    @property
    def bytes_total(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plan_export(tree: object, state: State, into: Path) -> dict[Path, ExportFile]:
    """Decide which tensor of ``tree`` goes into which file.

    A path that ends in ``.safetensors`` is one file, with the tensors under their whole paths
    (``model/layers.0.weight``). Any other path is a folder with a file for each object, with names
    relative to the object (``layers.0.weight``).

    :raises InvalidInput: the tree has no tensor.
    """
    groups: dict[Path, dict[str, torch.Tensor]] = {}
    for leaf in flatten(tree).tensors:
        top, _, rest = leaf.path.partition("/")
        if into.suffix == ".safetensors":
            path, name = into, leaf.path
        else:
            # never hidden, never out of the folder, and no two alike
            stem = f"_{top}" if top.startswith((".", "_")) else top
            path, name = into / f"{stem}.safetensors", rest or top
        groups.setdefault(path, {})[name] = leaf.tensor
    if not groups:
        raise InvalidInput(
            f"state {state.uid} has no such tensors: name others with --only, or leave it out"
        )
    return {path: ExportFile(tensors, words_about(state)) for path, tensors in groups.items()}


def words_about(state: State) -> dict[str, str]:
    """The text in a file about the state from which its tensors come."""
    return {
        "format": "pt",
        "datastates.state": state.uid,
        "datastates.digest": state.digest,
        "datastates.step": str(state.step),
    }


def export(
    plan: Mapping[Path, ExportFile], *, on_progress: Callable[[int], object] = lambda count: None
) -> None:
    """Write the files, each complete or not at all, and read each back before it gets its name.

    ``on_progress`` is called with bytes as they are written and as they are read back: twice the
    bytes of the plan in all.

    :raises Corrupt: what was read back is not what was written; names the file and the tensor.
    """
    for path, file in plan.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        try:
            digests = _write_tensors(part, file, on_progress)
            _read_back(part, file, digests, on_progress)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(path.parent)


def _write_tensors(
    path: Path, file: ExportFile, on_progress: Callable[[int], object]
) -> dict[str, list[bytes]]:
    digests: dict[str, list[bytes]] = {}
    entries = in_order(
        Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in file.tensors.items()
    )
    with os.fdopen(make_regular(path), "wb") as out:
        out.write(header_of(entries, file.metadata))
        for entry in entries:
            digests[entry.name] = []
            for piece in _pieces(file.tensors[entry.name]):
                digests[entry.name].append(chunk_digest(piece))
                out.write(piece)
                on_progress(piece.nbytes)
        out.flush()
        os.fsync(out.fileno())
    return digests


def _read_back(
    path: Path,
    file: ExportFile,
    digests: Mapping[str, list[bytes]],
    on_progress: Callable[[int], object],
) -> None:
    with os.fdopen(open_regular(path), "rb") as source:
        # read from the disk, not from what was just written
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        source.seek(8 + int.from_bytes(source.read(8), "little"))
        for name, pieces in digests.items():
            left = file.tensors[name].nbytes
            for wanted in pieces:
                piece = source.read(min(left, _PIECE_BYTES))
                left -= len(piece)
                if chunk_digest(piece) != wanted:
                    raise Corrupt(
                        f"{path}: what was read back of {name!r} is not what was written: check the"
                        " disk, then try again"
                    )
                on_progress(len(piece))


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort by falling item size, so that each tensor is aligned without holes, which the format
    does not allow."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file whose tensors follow each other in this order,
    including the length of its header."""
    described: dict[str, object] = {}
    others: dict[str, str] = {}
    end = 0
    for entry in entries:
        code, shape = _CODES.get(entry.dtype), list(entry.shape)
        if code is None:
            code, shape = "U8", [*shape, entry.dtype.itemsize]
            others[entry.name] = str(entry.dtype).removeprefix("torch.")
        described[entry.name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [end, end + entry.bytes],
        }
        end += entry.bytes
    about = dict(metadata)
    if others:
        about[DTYPES] = msgspec.json.encode(others).decode()
    body = msgspec.json.encode({"__metadata__": about, **described})
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    for start in range(0, data.nbytes, _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


# Trees that have no names by which to track them: they are put under one name, which the state
# remembers and which is left out again later.


WRAPPED = "import.wrapped"
"""The attribute of a state with the name under which all of it stands."""

TAKEN = ("rng", FILES, LOOPS, MODES)
"""The names under which a training's own parts stand, which are therefore none to track anything
else by."""

_MODEL = "model"
_CHECKPOINT = "checkpoint"
_LONGEST = 255
_NOT_READ = torch.empty(0, device="meta")


def is_flat(tree: object) -> TypeGuard[dict[str, torch.Tensor]]:
    """Whether a tree is only tensors by name."""
    return (
        isinstance(tree, dict)
        and bool(tree)
        and all(type(key) is str and isinstance(leaf, torch.Tensor) for key, leaf in tree.items())
    )


def wrapped(found: object, taken: Collection[str] = ()) -> tuple[dict[str, object], str | None]:
    """The tree to capture. Further, the name under which it is put if it has no names, or one of
    ``taken``.

    Tensors by name become a ``model``, anything else becomes a ``checkpoint``.
    """
    if is_flat(found):
        return {_MODEL: found}, _MODEL
    if not _has_names(found) or any(name in found for name in taken):
        return {_CHECKPOINT: found}, _CHECKPOINT
    return dict(found), None


def unwrapped(tree: object, attributes: Mapping[str, object]) -> object:
    """The object that ``wrapped`` was given, from a state's tree and its attributes; tensors that
    were not read are None in it.

    The attribute alone is not believed, because there are imported states whose attribute names a
    part of a tree that has names.
    """
    name = attributes.get(WRAPPED)
    if not isinstance(tree, dict) or list(tree) != [name]:
        return tree
    found = tree[name]
    if name == _MODEL:
        is_wrapped = isinstance(found, dict) and is_flat(
            {key: _NOT_READ if leaf is None else leaf for key, leaf in found.items()}
        )
    else:
        is_wrapped = name == _CHECKPOINT and (
            not _has_names(found) or any(each in found for each in TAKEN)
        )
    return found if is_wrapped else tree


def _has_names(found: object) -> TypeGuard[dict[str, object]]:
    """Whether a tree has names by which its parts can be tracked."""
    return (
        isinstance(found, dict)
        and bool(found)
        and all(type(key) is str and 0 < len(key) <= _LONGEST for key in found)
    )


_TEXT_BYTES = 256 << 20
_OBJECT_BYTES = 64
# how many times the bytes of a file its tensors may have: views of one storage are stored apart
_SPARE_TIMES = 64

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
METADATA = ".metadata"


class Format(StrEnum):
    """The formats in which files hold tensors."""

    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HUGGING_FACE = "hf"
    DCP = "dcp"


def format_of(path: Path, root: Path | None = None) -> Format:
    """The format of a file or a folder, by its name and contents.

    :param root: a folder in which it must be, after links are followed.
    :raises InvalidInput: it is none of those, or is outside of ``root``.
    """
    if root is not None and not path.resolve().is_relative_to(root.resolve()):
        raise InvalidInput(
            f"{path} is a link to {path.resolve()}, outside of {root}: put a copy in its place, or"
            " leave it out"
        )
    if path.is_dir():
        try:
            names = set(os.listdir(path))
        except OSError as exc:
            raise InvalidInput(
                f"{path} cannot be read ({exc.strerror}): mend it, or leave it out"
            ) from exc
        if METADATA in names:
            return Format.DCP
        if INDEX in names or WEIGHTS in names:
            return Format.HUGGING_FACE
        if any(name.endswith(".safetensors") for name in names):
            return Format.SAFETENSORS
        raise InvalidInput(
            f"{path} is a folder without safetensors files, and none of"
            " torch.distributed.checkpoint: name another one"
        )
    if path.suffix == ".safetensors":
        return Format.SAFETENSORS
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".tar"):
        return Format.TORCH
    raise InvalidInput(
        f"{path} has no ending of a checkpoint: name a folder, or a file that ends in .pt, .pth,"
        " .bin, .ckpt or .safetensors"
    )


def read(path: Path) -> object:
    """The contents of a file or a folder, on the CPU.

    :raises Unsupported: only unpickling, which executes the file, could read it.
    :raises InvalidInput: it is damaged, or something else.
    """
    kind = format_of(path)
    _check_files(path, kind)
    try:
        found = _LOADERS[kind](path)
        size = sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else [path]))
        is_trap = (
            expanded(
                found,
                lambda leaf: (
                    1
                    + (
                        leaf.nbytes // _OBJECT_BYTES
                        if isinstance(leaf, torch.Tensor) and is_plain(leaf)
                        else 0
                    )
                ),
                {},
            )
            > MOST_OBJECTS + size // _OBJECT_BYTES * _SPARE_TIMES
        )
    except (Unsupported, InvalidInput):
        raise
    except Exception as exc:
        # readers of other tools raise anything: RuntimeError, SafetensorError, KeyError, EOFError
        raise InvalidInput(
            f"{path} cannot be read ({type(exc).__name__}: {str(exc)[:200]}): mend it, or leave"
            " it out"
        ) from exc
    if is_trap:
        raise InvalidInput(
            f"{path} makes far more parts or bytes than it has, by using some again and again:"
            " leave it out"
        )
    return found


def _check_files(path: Path, kind: Format) -> None:
    """Raise if a file to read is not regular, or is outside of the folder, or if a text is too
    long."""
    for each in path.iterdir() if path.is_dir() else [path]:
        if each != path and (
            each.is_dir()
            or (kind is not Format.DCP and each.suffix not in (".json", ".safetensors"))
        ):
            continue  # it is not read
        if not each.is_file() or (each != path and each.resolve().parent != path.resolve()):
            raise InvalidInput(
                f"{each} is no regular file of its folder: put a copy in its place, or leave it out"
            )
        if (each.suffix == ".json" or each.name == METADATA) and each.stat().st_size > _TEXT_BYTES:
            raise InvalidInput(
                f"{each} has {each.stat().st_size} bytes, and at most {_TEXT_BYTES} of such a file"
                " are read: leave it out"
            )


def _load_torch(path: Path) -> object:
    check_archive(path, path.stat().st_size)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        why = str(exc).strip().splitlines()
        said = next(
            (line for line in why if "GLOBAL" in line or "Unsupported" in line),
            why[0] if why else "",
        )
        raise Unsupported(
            f"{path} holds objects that torch.load(weights_only=True) refuses, because reading"
            f" them would execute code from the file ({said.strip()[:200]}). If you trust it, load"
            " it yourself, and save its state_dicts as plain containers and tensors in another file"
        ) from exc


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(path, "pt") as opened:
        about = opened.metadata() or {}
    tensors = dict(load_file(path, device="cpu"))
    for name, said in msgspec.json.decode(about.get(DTYPES, "{}"), type=dict[str, str]).items():
        data, dtype = tensors[name], dtype_of(said)
        if data.dtype != torch.uint8 or data.shape[-1:] != (dtype.itemsize,):
            raise InvalidInput(
                f"{path} says that {name!r} is {said}, and holds {data.dtype} of shape"
                f" {tuple(data.shape)}: leave it out"
            )
        tensors[name] = data.clone().view(dtype).squeeze(-1)  # a clone is aligned
    return tensors


def _load_folder(path: Path) -> dict[str, object]:
    """The objects of a folder with a file for each, as ``restore`` writes them."""
    return {each.stem: _load_safetensors(each) for each in sorted(path.glob("*.safetensors"))}


def _load_hugging_face(path: Path) -> dict[str, object]:
    """The weights, whole; everything else in their folder is text."""
    if (path / INDEX).exists():
        index = msgspec.json.decode((path / INDEX).read_bytes())
        names = sorted(set(index["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise InvalidInput(
                f"{path / INDEX} names files of other folders: it is no folder of Hugging Face"
            )
        parts = [_load_safetensors(path / name) for name in names]
        weights = {name: tensor for part in parts for name, tensor in part.items()}
        weights = {name: weights[name] for name in index["weight_map"]}
    else:
        weights = _load_safetensors(path / WEIGHTS)
    texts = {
        each.name: each.read_text(encoding="utf-8")
        for each in sorted(path.glob("*.json"))
        if each.name != INDEX
    }
    return {"model": weights, **({"files": texts} if texts else {})}


def _load_dcp(path: Path) -> object:
    """A folder of torch.distributed.checkpoint, whole; neither its metadata nor its values are
    unpickled freely."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    from .dcp import SafePlanner, SafeReader, cause_of, numbered

    tree: dict[str, Any] = {}
    try:
        # torch has no types there
        _load_state_dict(tree, storage_reader=SafeReader(path), planner=SafePlanner(), no_dist=True)  # type: ignore[no-untyped-call]
    except CheckpointException as exc:  # not an Exception; it holds what was raised
        if not isinstance(why := cause_of(exc), Exception):
            raise why from exc
        said = (str(why).strip().splitlines() or [type(why).__name__])[0][:300]
        raise Unsupported(
            f"{path} is damaged, or cannot be read without executing code from it: {said}"
        ) from exc
    return numbered(tree)


_LOADERS: dict[Format, Callable[[Path], object]] = {
    Format.TORCH: _load_torch,
    Format.SAFETENSORS: lambda path: (
        _load_safetensors(path) if path.is_file() else _load_folder(path)
    ),
    Format.HUGGING_FACE: _load_hugging_face,
    Format.DCP: _load_dcp,
}


# Out


def write(
    tree: object,
    kind: Format,
    into: Path,
    words: Mapping[str, str],
    *,
    is_replacing: bool = False,
) -> None:
    """Write a tree to a new file or folder, whole or not at all; ``words`` go into the header of
    safetensors. With ``is_replacing``, a file may be there already.

    :raises InvalidInput: the tree holds what this format cannot.
    """
    if into.exists() and not (is_replacing and into.is_file()):
        raise Conflict(f"{into} is there already: name another place, or remove it")
    into.parent.mkdir(parents=True, exist_ok=True)
    part = into.with_name(f".part-{into.name}")
    _remove(part)  # an export that was killed left it
    try:
        _write_files(tree, kind, part, words)
        part.rename(into)
    finally:
        _remove(part)
    sync_folder(into.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_files(tree: object, kind: Format, part: Path, words: Mapping[str, str]) -> None:
    if kind is Format.TORCH:
        with part.open("wb") as out:
            torch.save(tree, out)
            out.flush()
            os.fsync(out.fileno())
    elif kind is Format.SAFETENSORS:
        export({part: ExportFile(tensors_in(tree), words)})
    elif kind is Format.HUGGING_FACE:
        _write_hugging_face(tree, part, words)
    else:
        _write_dcp(tree, part)


def _write_hugging_face(tree: object, part: Path, words: Mapping[str, str]) -> None:
    if not isinstance(tree, dict) or not is_flat(weights := tree.get("model", tree)):
        raise InvalidInput(
            "a folder of Hugging Face holds one model, and this state has no tensors named 'model':"
            " try torch"
        )
    part.mkdir()
    files = tree.get("files", {})
    for name, text in files.items() if isinstance(files, dict) else ():
        if (
            isinstance(name, str)
            and isinstance(text, str)
            and Path(name).name == name
            and name.endswith(".json")
        ):
            (part / name).write_text(text, encoding="utf-8")
    export({part / WEIGHTS: ExportFile(tensors_in(weights), words)})


def _write_dcp(tree: object, part: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from .dcp import WholePlanner, cause_of

    if not isinstance(tree, dict):
        raise InvalidInput(
            "torch.distributed.checkpoint writes values by name, and this state is one value"
            " without a name: try torch"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it saves from one process
        try:
            save(tree, storage_writer=FileSystemWriter(part), planner=WholePlanner(), no_dist=True)
        except CheckpointException as exc:  # not an Exception; it holds what was raised
            raise cause_of(exc) from exc


def tensors_in(tree: object) -> Mapping[str, torch.Tensor]:
    """Tensors by their names in a file: the names in the tree, or the paths if it is nested.

    :raises InvalidInput: there is no tensor, or one of those in the tree is sparse or quantized.
    """
    if is_flat(tree):
        if odd := [name for name, tensor in tree.items() if not is_plain(tensor)]:
            raise InvalidInput(
                f"a safetensors file holds no sparse or quantized tensors, and {odd[0]!r} is one:"
                " try torch"
            )
        return dict(tree)
    found = {leaf.path: leaf.tensor for leaf in flatten(tree).tensors}
    if not found:
        raise InvalidInput("a safetensors file holds tensors, and this state has none: try torch")
    return found
