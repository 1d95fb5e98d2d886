"""The tripwire finds tensors that were changed between the call of ``capture`` and the end of their
deferred copy.

It checks two signs. ``Tensor._version`` counts ordinary in-place changes. Edits through ``.data``,
and fused kernels, do not change it. Therefore a spread sample of each tensor's elements is taken
when ``capture`` is called, and compared with the same elements of the copy. This also finds a swap
there and back, because the copy is compared instead of the source.

Edits through ``.data`` (or by foreign code) are missed if the sample has none of the edited
elements, and they come after ``capture`` and before the copy of that tensor. Call ``run.fence()``
before such edits, or ``repo.track(..., defer=False)``.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from datastates.errors import Torn
from datastates.state.manifest import CHUNK_BYTES
from datastates.system.devices import devices
from datastates.system.logs import event

SAMPLES = 32
"""The number of elements of each deferred parameter that are sampled."""

STATE_SAMPLES = 8
"""The same for other deferred tensors: the state of an optimizer, which is hardly ever edited by
hand."""

_WORDS: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.int64,
}


@dataclass(frozen=True, slots=True)
class Watched:
    """A deferred tensor: its path, the tensor, its bytes as a flat view, their start in the
    stream, and the number of elements sampled."""

    path: str
    tensor: torch.Tensor
    flat: torch.Tensor
    start: int
    samples: int


@dataclass(frozen=True, slots=True)
class Armed:
    """The signs as they were when ``capture`` was called. ``samples`` is empty if the device had no
    memory for them."""

    versions: list[int]
    samples: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Group:
    """The watched tensors of one item size on one device: one call samples them, and one more looks
    the samples up in the arena.

    ``members`` has for each sampled element the tensor to which it belongs. NumPy joins strided
    pieces of host memory in half the time that ``torch.cat`` takes. It also keeps the interpreter's
    lock for short pieces, whereas torch releases it to the training and then waits to get it back.
    ``arrays`` are valid as long as the ``tensors`` are at the same ``pointers``. ``views`` follow a
    storage that was resized. ``copies`` has the places of the samples once they are copied: the
    chunk, and the words in it.
    """

    members: npt.NDArray[np.int64]
    tensors: list[torch.Tensor]
    pointers: list[int]
    arrays: list[npt.NDArray[Any]]
    views: list[torch.Tensor]
    word: torch.dtype
    copies: list[tuple[int, slice]]

    def sample(self) -> torch.Tensor:
        if self.arrays and [*map(torch.Tensor.data_ptr, self.tensors)] == self.pointers:
            return torch.from_numpy(np.concatenate(self.arrays))
        return torch.cat(self.views)


class Tripwire:
    """Compiled with a plan.

    ``arm`` runs on the training thread, ``tripped`` on the stage thread."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._paths = [item.path for item in watched]
        self._tensors = [item.tensor for item in watched]
        kinds = dict.fromkeys((_word_size(item), devices().of(item.flat)) for item in watched)
        self._groups = [_group(watched, size, device) for size, device in kinds]

    def arm(self) -> Armed:
        """Take the versions and the samples; about 0.3 ms for 150 tensors that no cache holds."""
        return Armed(self.versions(), [group.sample() for group in self._groups])

    def versions(self) -> list[int]:
        """The current versions of the watched tensors; read them before a fence lets the next
        change happen."""
        return [*map(_VERSION, self._tensors)]

    def tripped(
        self, armed: Armed, versions: Sequence[int], slots: Sequence[int], arena: torch.Tensor
    ) -> list[str]:
        """The paths of tensors that changed before they were copied into ``slots`` of ``arena``
        (all of it, uint8).

        ``versions`` are those at the first fence after ``capture``, or at the end of the copy,
        whichever is earlier.
        """
        hit = {
            i
            for i, (old, new) in enumerate(zip(armed.versions, versions, strict=True))
            if new != old
        }
        for group, sample in zip(self._groups, armed.samples, strict=False):
            before = (sample.cpu() if sample.device.type != "cpu" else sample).numpy()
            words = arena.numpy().view(before.dtype)
            chunks = [words[slot // before.itemsize :] for slot in slots]
            copied = np.concatenate([chunks[chunk][part] for chunk, part in group.copies])
            if copied.tobytes() != before.tobytes():
                hit.update(group.members[np.nonzero(copied != before)[0]].tolist())
        return [*dict.fromkeys(self._paths[i] for i in sorted(hit))]


def _group(watched: Sequence[Watched], size: int, device: torch.device) -> _Group:
    members = [
        i
        for i, item in enumerate(watched)
        if (_word_size(item), devices().of(item.flat)) == (size, device)
    ]
    tensors = [watched[i].tensor for i in members]
    counts = [watched[i].samples for i in members]
    views, copies = [], []
    for i, count in zip(members, counts, strict=True):
        words = watched[i].flat.view(_WORDS[size])
        step = (words.numel() - 1) // (count - 1)
        views.append(words[: (count - 1) * step + 1 : step])
        copies += _parts(watched[i].start // size, step, count, CHUNK_BYTES // size)
    # Through DLPack: ``Tensor.numpy`` would forbid the owner to resize the storage.
    arrays = [np.from_dlpack(view) for view in views] if device.type == "cpu" else []
    pointers = [*map(torch.Tensor.data_ptr, tensors)]
    return _Group(
        np.repeat(members, counts), tensors, pointers, arrays, views, _WORDS[size], copies
    )


def _parts(start: int, step: int, count: int, length: int) -> list[tuple[int, slice]]:
    """Every ``step``-th word of a stream from ``start`` on, ``count`` of them, in chunks of
    ``length`` words."""
    parts = []
    while count:
        chunk, first = divmod(start, length)
        here = min(count, -(-(length - first) // step))
        parts.append((chunk, slice(first, first + (here - 1) * step + 1, step)))
        start, count = start + here * step, count - here
    return parts


_VERSION = operator.attrgetter("_version")


def _word_size(item: Watched) -> int:
    return min(8, item.tensor.element_size())


# --- Tensors that a training edits by hand, learnt from torn captures ---


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tear:
    step: int
    error: Torn
    is_taught: bool


class TornTensors:
    """The torn captures of one tracker. The stage thread notes them, and the training thread learns
    from them.

    ``paths`` are the tensors that tore. From then on they are copied before ``capture`` returns. If
    other tensors tear after that, everything is copied then (``are_anywhere``). At most two states
    are therefore lost to edits by hand.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.are_anywhere = False
        self._noted: deque[_Tear] = deque()

    def note(self, step: int, error: Torn, *, is_taught: bool) -> None:
        """Note that the capture of ``step`` tore.

        ``is_taught``: it tore although what had torn before was copied at once."""
        self._noted.append(_Tear(step, error, is_taught))

    def learn(self, branch: str) -> bool:
        """Whether anything must be copied differently from now on.

        Logs which steps have no state, and the first time why."""
        if not self._noted:
            return False
        tears = [self._noted.popleft() for _ in range(len(self._noted))]
        torn = {path for tear in tears for path in tear.error.paths}
        steps = f"step{'s' * (len(tears) > 1)} {', '.join(str(tear.step) for tear in tears)}"
        if self.are_anywhere or torn <= self.paths:
            # begun before it was known
            _logger.warning(
                "branch %s has no state of %s either, for the same reason", branch, steps
            )
            return False
        self.paths |= torn
        self.are_anywhere = any(tear.is_taught for tear in tears)
        _logger.warning(
            "branch %s has no state of %s: %s changed between capture() and the end of its copy,"
            " outside a tracked optimizer's step. From now on %s copied before capture() returns,"
            " so that no further state is lost; run.fence() before the edit, or track(defer=False),"
            " would have kept this one",
            *(
                branch,
                steps,
                named(sorted(torn)),
                "everything is" if self.are_anywhere else "these tensors are",
            ),
            extra=event(
                "capture.torn",
                branch=branch,
                steps=[tear.step for tear in tears],
                tensors=sorted(torn),
            ),
        )
        return True


def named(paths: Sequence[str]) -> str:
    """A text of the first few paths, and how many more there are."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
