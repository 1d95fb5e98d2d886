"""Folders of torch.distributed.checkpoint. They are read without free unpickling, although torch
executes code in their metadata. They are written with the empty mappings that torch leaves out.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as of_metadata
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader

from datastates.errors import InvalidInput, Unsupported
from datastates.state.geometry import is_plain
from datastates.system.files import check_archive

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.planner import ReadItem

_ALLOWED = {
    *((of_metadata.__name__, name) for name in of_metadata.__all__),
    *(
        (of_metadata.__name__, name)
        for name in ("_MEM_FORMAT_ENCODING", "TensorProperties", "StorageMeta")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
}
"""The classes that the metadata of a checkpoint may consist of."""
_MOVED = {"pathlib._local": "pathlib"}
"""Modules whose classes Python 3.13 pickles under another name."""


class _Unpickler(pickle.Unpickler):
    """Makes the classes of metadata, and no other classes."""

    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) in _ALLOWED:
            return _stand_in(super().find_class(module, name))
        raise Unsupported(
            f"its metadata name {module}.{name}, which no checkpoint needs: reading them would"
            " execute code from the file"
        )


def _stand_in(found: Any) -> type:
    """A new class that makes what another one makes, since a pickle may also set attributes of
    the classes themselves."""
    gets_fields_later = is_dataclass(found)

    def make(_: type, *args: Any) -> Any:
        return found.__new__(found) if gets_fields_later and not args else found(*args)

    return type("StandIn", (), {"__new__": make})


class SafeReader(FileSystemReader):
    """Reads a folder whose metadata contain only classes of metadata, and name only files of
    that folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> of_metadata.Metadata:
        """The metadata, unpickled with a list of the classes that may be in them."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            found = _Unpickler(stream).load()
        if not isinstance(found, of_metadata.Metadata):
            raise Unsupported("its metadata are none")
        for name in {str(info.relative_path) for info in found.storage_data.values()}:
            if Path(name).name != name:
                raise Unsupported(
                    f"its metadata name {name!r}, a file of another folder, which no checkpoint"
                    " needs"
                )
        found.storage_meta = getattr(found, "storage_meta", None) or of_metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class SafePlanner(_EmptyStateDictLoadPlanner):
    """Rebuilds the whole tree; values other than tensors are read with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        check_archive(value, len(value.getbuffer()))
        value.seek(0)
        plain = io.BytesIO()
        # what torch then reads again, freely, is what was read safely
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def numbered(tree: Any) -> Any:
    """The tree, with the parameters in the ``state`` of optimizers under their numbers in
    ``param_groups``: torch makes all keys text."""
    if isinstance(tree, list):
        return [numbered(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    found = {key: numbered(each) for key, each in tree.items()}
    state, groups = found.get("state"), found.get("param_groups")
    if isinstance(state, dict) and isinstance(groups, list):
        listed = [
            group["params"]
            for group in groups
            if isinstance(group, dict) and isinstance(group.get("params"), list)
        ]
        numbers = {
            str(number): number for params in listed for number in params if type(number) is int
        }
        found["state"] = {numbers.get(key, key): each for key, each in state.items()}
    return found


class WholePlanner(DefaultSavePlanner):
    """Plans as torch does, under the same names, but keeps empty mappings: each is a value,
    which torch puts back like any other."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: object = None, is_coordinator: bool = False
    ) -> None:
        """Name everything that is to be saved by its path.

        :raises InvalidInput: two paths have the same name, or a tensor is sparse or quantized.
        """
        self.state_dict, self.mappings, self.is_coordinator = {}, {}, is_coordinator
        for path, value in _leaves(state_dict, ()):
            name = ".".join(map(str, path))
            if name in self.state_dict:
                raise InvalidInput(
                    "torch.distributed.checkpoint joins names with dots, and two would be"
                    f" {name!r}: try torch"
                )
            if isinstance(value, torch.Tensor) and not is_plain(value):
                raise InvalidInput(
                    "torch.distributed.checkpoint writes no sparse or quantized tensors, and"
                    f" {name!r} is one: try torch"
                )
            self.state_dict[name], self.mappings[name] = value, path


def _leaves(
    value: object, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """The values that torch saves separately, with their paths: everything but mappings and lists
    that are taken apart, and empty mappings."""
    if isinstance(value, Mapping) and (value or not path):
        for key, each in value.items():
            yield from _leaves(each, (*path, str(key)))
    elif isinstance(value, list) and _is_taken_apart(value):
        for index, each in enumerate(value):
            yield from _leaves(each, (*path, index))
    else:
        yield path, value


def _is_taken_apart(value: object) -> bool:
    """Whether torch looks for tensors in it, when it saves and also when it loads, with anything
    else in their place."""
    if isinstance(value, list):
        return any(map(_is_taken_apart, value))
    return isinstance(value, torch.Tensor) or (isinstance(value, Mapping) and bool(value))


def cause_of(exc: CheckpointException) -> BaseException:
    """The error within torch, which wraps even an interrupt in its own exception."""
    return next(iter(exc.failures.values()))[0]
