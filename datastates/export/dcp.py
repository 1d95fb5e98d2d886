"""Reading folders of torch.distributed.checkpoint without free unpickling: torch itself executes what their metadata say."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as of_metadata
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from datastates.errors import Unsupported

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import ReadItem

__all__ = ["SafePlanner", "SafeReader"]

_ALLOWED = {
    *((of_metadata.__name__, name) for name in of_metadata.__all__),
    *((of_metadata.__name__, name) for name in ("_MEM_FORMAT_ENCODING", "TensorProperties", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
}
"""The classes that the metadata of a checkpoint may consist of."""


class _Unpickler(pickle.Unpickler):
    """Makes the classes of metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise Unsupported(f"its metadata name {module}.{name}, which no checkpoint needs: to read them would execute what they say")


class SafeReader(FileSystemReader):
    """Reads a folder whose metadata contain only classes of metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> of_metadata.Metadata:
        """The metadata, unpickled with a list of the classes that may be in them."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            found = _Unpickler(stream).load()
        if not isinstance(found, of_metadata.Metadata):
            raise Unsupported("its metadata are none")
        found.storage_meta = getattr(found, "storage_meta", None) or of_metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class SafePlanner(_EmptyStateDictLoadPlanner):
    """Rebuilds the whole tree; values other than tensors are read with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value where it belongs."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # what torch then reads again, freely, is what was read safely
        plain.seek(0)
        super().load_bytes(read_item, plain)
