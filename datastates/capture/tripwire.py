"""The tripwire: was a tensor changed between the call of ``capture`` and the end of its deferred copy?

Two signs are looked at. ``Tensor._version`` counts ordinary in-place changes. Edits through ``.data``, and fused kernels,
leave it alone; so a spread sample of each tensor's elements is taken when ``capture`` is called and compared with the same
elements of the copy. What was copied is compared, not the source as it stands afterwards: a swap there and back is seen.

What neither sign shows: an edit through ``.data`` (or by foreign code) of so few elements that the sample misses them, after
``capture`` and before the copy of that tensor. ``run.fence()`` before such edits, or ``repo.track(..., defer=False)``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from datastates.content.manifest import CHUNK_BYTES
from datastates.system.devices import devices

__all__ = ["SAMPLES", "STATE_SAMPLES", "Armed", "Tripwire", "Watched"]

SAMPLES = 32
"""Elements of each deferred parameter that are looked at."""

STATE_SAMPLES = 8
"""The same for other deferred tensors: the state of an optimizer, which hardly anybody edits by hand."""

_WORDS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class Watched:
    """A deferred tensor: its path, the tensor, its bytes as a flat view, where they go in the stream, and of how many a sample is taken."""

    path: str
    tensor: torch.Tensor
    flat: torch.Tensor
    start: int
    samples: int


@dataclass(frozen=True, slots=True)
class Armed:
    """The signs as they were when ``capture`` was called."""

    versions: list[int]
    samples: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Group:
    """The watched tensors of one item size on one device: sampled with one call, looked up in the arena with one ``take``.

    ``members`` says for each sampled element which tensor it is of. NumPy joins strided pieces of host memory in half the time that
    ``torch.cat`` takes. Its ``arrays`` hold as long as the ``tensors`` lie at the same ``pointers``; ``views`` follow a storage that was
    resized.
    """

    members: npt.NDArray[np.int64]
    tensors: list[torch.Tensor]
    pointers: list[int]
    arrays: list[npt.NDArray[Any]]
    views: list[torch.Tensor]
    word: torch.dtype
    chunks: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]

    def sample(self) -> torch.Tensor:
        if self.arrays and [*map(torch.Tensor.data_ptr, self.tensors)] == self.pointers:
            return torch.from_numpy(np.concatenate(self.arrays))
        return torch.cat(self.views)


class Tripwire:
    """Compiled with a plan. ``arm`` runs on the training thread, ``tripped`` on the stage thread."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._paths = [item.path for item in watched]
        self._tensors = [item.tensor for item in watched]
        kinds = dict.fromkeys((_word_size(item), devices().of(item.flat)) for item in watched)
        self._groups = [_group(watched, size, device) for size, device in kinds]

    def arm(self) -> Armed:
        """Take the versions and the samples; about 0.3 ms for 150 tensors that no cache holds."""
        return Armed(self.versions(), [group.sample() for group in self._groups])

    def versions(self) -> list[int]:
        """The versions of the watched tensors as they are; to be read before a fence lets the next change happen."""
        return [*map(_VERSION, self._tensors)]

    def tripped(self, armed: Armed, versions: Sequence[int], slots: Sequence[int], arena: torch.Tensor) -> list[str]:
        """The paths of tensors that changed before they were copied into ``slots`` of ``arena`` (all of it, uint8).

        ``versions`` are those at the first fence after ``capture``, or at the end of the copy.
        """
        hit = {i for i, (old, new) in enumerate(zip(armed.versions, versions, strict=True)) if new != old}
        places = np.asarray(slots, dtype=np.int64)
        for group, sample in zip(self._groups, armed.samples, strict=True):
            before = (sample.cpu() if sample.device.type != "cpu" else sample).numpy()
            copied = arena.numpy().view(before.dtype).take(places[group.chunks] * (CHUNK_BYTES // before.itemsize) + group.words)
            if copied.tobytes() != before.tobytes():
                hit.update(group.members[np.nonzero(copied != before)[0]].tolist())
        return [*dict.fromkeys(self._paths[i] for i in sorted(hit))]


def _group(watched: Sequence[Watched], size: int, device: torch.device) -> _Group:
    members = [i for i, item in enumerate(watched) if (_word_size(item), devices().of(item.flat)) == (size, device)]
    tensors = [watched[i].tensor for i in members]
    counts = [watched[i].samples for i in members]
    views, positions = [], []
    for i, count in zip(members, counts, strict=True):
        words = watched[i].flat.view(_WORDS[size])
        step = (words.numel() - 1) // (count - 1)
        views.append(words[: (count - 1) * step + 1 : step])
        positions.append(watched[i].start + size * step * np.arange(count, dtype=np.int64))
    chunks, offsets = np.divmod(np.concatenate(positions), CHUNK_BYTES)
    # Through DLPack: ``Tensor.numpy`` would forbid the owner to resize the storage.
    arrays = [np.from_dlpack(view) for view in views] if device.type == "cpu" else []
    pointers = [*map(torch.Tensor.data_ptr, tensors)]
    return _Group(np.repeat(members, counts), tensors, pointers, arrays, views, _WORDS[size], chunks, offsets // size)


_VERSION = operator.attrgetter("_version")


def _word_size(item: Watched) -> int:
    return min(8, item.tensor.element_size())
