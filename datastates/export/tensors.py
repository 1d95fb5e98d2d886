"""A state's tensors as plain safetensors files, which any reader opens without this package."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from datastates.content.digest import chunk_digest
from datastates.content.tree import flatten
from datastates.errors import Corrupt, InvalidInput
from datastates.lineage.states import State
from datastates.store.files import sync_folder
from datastates.system.regular import make_regular, open_regular

__all__ = ["DTYPES", "Entry", "ExportFile", "check_archive", "export", "header_of", "in_order", "is_plain", "plan_export", "words_about"]

DTYPES = "datastates.dtypes"
"""The text in a file's header with the dtype, in JSON by name, of each tensor that stands there as bytes."""

_PIECE_BYTES = 16 << 20
_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The dtypes that readers have long known; tensors of other dtypes are written as bytes, and ``DTYPES`` names theirs."""


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
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def plan_export(tree: object, state: State, into: Path) -> dict[Path, ExportFile]:
    """Decide which tensor of ``tree`` goes into which file.

    A path that ends in ``.safetensors`` is one file, with the tensors under their whole paths (``model/layers.0.weight``).
    Any other is a folder with a file for each object, with the names that the object knows (``layers.0.weight``).

    :raises InvalidInput: the tree has no tensor.
    """
    groups: dict[Path, dict[str, torch.Tensor]] = {}
    for leaf in flatten(tree).tensors:
        top, _, rest = leaf.path.partition("/")
        path, name = (into, leaf.path) if into.suffix == ".safetensors" else (into / f"{_file_name(top)}.safetensors", rest or top)
        groups.setdefault(path, {})[name] = leaf.tensor
    if not groups:
        raise InvalidInput(f"state {state.uid} has no such tensors: name others with --only, or leave it out")
    return {path: ExportFile(tensors, words_about(state)) for path, tensors in groups.items()}


def words_about(state: State) -> dict[str, str]:
    """The text in a file about the state from which its tensors come."""
    return {"format": "pt", "datastates.state": state.uid, "datastates.digest": state.digest, "datastates.step": str(state.step)}


def export(plan: Mapping[Path, ExportFile], *, on_progress: Callable[[int], object] = lambda count: None) -> None:
    """Write the files, each complete or not at all, and read each back before it gets its name.

    ``on_progress`` is called with bytes as they are written and as they are read back: twice the bytes of the plan in all.

    :raises Corrupt: what was read back is not what was written; names the file and the tensor.
    """
    for path, file in plan.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        try:
            digests = _write(part, file, on_progress)
            _read_back(part, file, digests, on_progress)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(path.parent)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its elements: neither sparse nor quantized."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def check_archive(file: Path | BinaryIO, size: int) -> None:
    """Raise if a file of ``torch.save`` has more bytes than its ``size`` once it is unpacked; torch would unpack it first.

    :raises InvalidInput: it is compressed, or uses the same bytes again and again.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > size:
            raise InvalidInput(f"it unpacks to {unpacked} bytes from {size}: write it with torch.save, which does not compress")


def _file_name(top: str) -> str:
    """The name of an object as a file name: never hidden, never a path out of the folder, and no two alike."""
    return f"_{top}" if top.startswith((".", "_")) else top


def _write(path: Path, file: ExportFile, on_progress: Callable[[int], object]) -> dict[str, list[bytes]]:
    digests: dict[str, list[bytes]] = {}
    with os.fdopen(make_regular(path), "wb") as out:
        out.write(header_of(in_order(_entries(file.tensors)), file.metadata))
        for name, tensor in _in_order(file.tensors):
            digests[name] = []
            for piece in _pieces(tensor):
                digests[name].append(chunk_digest(piece))
                out.write(piece)
                on_progress(piece.nbytes)
        out.flush()
        os.fsync(out.fileno())
    return digests


def _read_back(path: Path, file: ExportFile, digests: Mapping[str, list[bytes]], on_progress: Callable[[int], object]) -> None:
    with os.fdopen(open_regular(path), "rb") as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from what was just written
        source.seek(8 + int.from_bytes(source.read(8), "little"))
        for name, tensor in _in_order(file.tensors):
            left = tensor.nbytes
            for wanted in digests[name]:
                piece = source.read(min(left, _PIECE_BYTES))
                left -= len(piece)
                if chunk_digest(piece) != wanted:
                    raise Corrupt(f"{path}: what was read back of {name!r} is not what was written: check the disk, then try again")
                on_progress(len(piece))


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort by falling item size, so that each tensor is aligned without holes, which the format does not allow."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file whose tensors follow each other in this order, including the length of its header."""
    described: dict[str, object] = {}
    others: dict[str, str] = {}
    end = 0
    for entry in entries:
        code, shape = _CODES.get(entry.dtype), list(entry.shape)
        if code is None:
            code, shape = "U8", [*shape, entry.dtype.itemsize]
            others[entry.name] = str(entry.dtype).removeprefix("torch.")
        described[entry.name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + entry.bytes]}
        end += entry.bytes
    about = dict(metadata)
    if others:
        about[DTYPES] = msgspec.json.encode(others).decode()
    body = msgspec.json.encode({"__metadata__": about, **described})
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _in_order(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(entry.name, tensors[entry.name]) for entry in in_order(_entries(tensors))]


def _entries(tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    return [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    for start in range(0, data.nbytes, _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
