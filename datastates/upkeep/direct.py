"""Restores a state into live objects without extra memory for it: large tensors go straight from the tier to their places.

Everything is read and checked before the first byte of a live tensor changes. Data in a file is read twice for that, which takes less
time than one copy into memory that was never touched. The file may change between the two reads, so each chunk is checked again on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from datastates.capture.crossing import copy
from datastates.capture.snapshots import Snapshot, piece_of
from datastates.content.manifest import TensorSpec
from datastates.content.shards import bytes_of, is_whole
from datastates.errors import Corrupt
from datastates.objects import dirty
from datastates.objects.adapters import Adapted
from datastates.objects.homes import Home, live_homes, wait_for_copies
from datastates.objects.model_state import MODES
from datastates.objects.redivision import Redivision
from datastates.objects.report import RestoreReport, Target
from datastates.objects.restore import check_into, reads, write
from datastates.objects.trained import with_trained
from datastates.store.passing import SharedReader
from datastates.store.pouring import SupportsPouring, cut
from datastates.store.reading import read_tree, sketch_tree, specs_of
from datastates.store.regions import chunks_of
from datastates.store.tier import Reader
from datastates.system.devices import devices
from datastates.transport.clone.meeting import Meeting

from .lifting import Lift
from .spreading import Boxes, has_spread

__all__ = ["restore_from"]

_WORTH_BYTES = 8 << 20
"""Fewer bytes are read quickly enough to be copied."""


def restore_from(
    reader: Reader,
    into: Mapping[str, object],
    *,
    only: str | Sequence[str] | None = None,
    strict: bool = True,
    own: Redivision | None = None,
    meeting: Meeting | None = None,
    near: Sequence[Snapshot] = (),
) -> RestoreReport:
    """``restore_into`` with the state that is open. ``own``: the ranks' own things have to be divided among other ranks.

    ``near`` are the state's snapshots: data on their devices is copied from there, in the order of the current streams.

    ``meeting``: all its ranks do this at once, each with its own objects, and the reader is a ``SharedReader``. None writes before all can.

    :raises InvalidInput: as ``restore_into``.
    :raises Corrupt: a chunk fails its digest. Nothing was changed, unless a file changed while it was read: then the message says so, and
        the tensors are dirty.
    """
    own = Redivision(1, 0, 1) if own is None else own
    wants, specs, adapted = own.reads(reads(into, only)), specs_of(reader), Adapted(into)
    check = partial(check_into, into, only=only, strict=strict, adapted=adapted)
    homes, spread = dict[int, Home](), dict[int, torch.Tensor]()
    is_pouring = isinstance(reader, SupportsPouring) and sum(bytes_of(spec) for spec in specs if wants(spec.path)) >= _WORTH_BYTES
    copies = dict[int, tuple[Home, torch.Tensor]]()
    if is_pouring or has_spread(adapted) or meeting is not None or near:
        with torch.inference_mode(False):
            sketch, tensors = sketch_tree(reader, specs, wants=wants)
            findings = check(own(sketch, into, wants), has_values=False)
            boxes = Boxes(specs, tensors, findings)
            if isinstance(reader, SharedReader):
                reader.fetch(chunks_of(boxes.with_whole(wants)))
            spread = boxes.read(reader)
        found = _homes(specs, tensors, findings.targets) if is_pouring or near else {}
        copies = {index: (home, piece) for index, home in found.items() if (piece := _beside(home.live, near, specs[index])) is not None}
        homes = {index: home for index, home in found.items() if is_pouring and index not in copies}
    in_place = {**homes, **{index: home for index, (home, _) in copies.items()}}
    given = {index: home.live for index, home in in_place.items()} | spread
    tree = read_tree(reader, wants=wants, is_borrowing=True, given=given, specs=specs)
    findings = check(own(tree, into, wants))
    lifted = {index: home for index, home in homes.items() if devices().is_on(home.live)}
    poured = {index: home for index, home in homes.items() if index not in lifted}
    if poured and isinstance(reader, SupportsPouring):
        pieces = cut((specs[index].shards[0].start, memoryview(home.flat.numpy().data)) for index, home in poured.items())
        reader.check(list(pieces))
        findings.writes.insert(0, partial(_fill, partial(reader.pour, pieces), into, [*poured.values()]))
    if lifted:
        lift = Lift(reader, specs, lifted)
        lift.check()
        findings.writes.insert(0, partial(_fill, lift.fill, into, [*lifted.values()]))
    if copies:
        findings.writes.insert(0, partial(_copy, into, [*copies.values()]))
    if meeting is not None:
        meeting.meet()
    report = replace(write(findings), notes=tuple(own.notes))
    return with_trained(report, adapted, {spec.path: spec.requires_grad for spec in specs}, tree.get(MODES))


def _fill(fill: Callable[[], None], into: Mapping[str, object], homes: Sequence[Home]) -> None:
    """The write that fills these homes."""
    wait_for_copies(into)
    try:
        fill()
    except BaseException as exc:
        dirty.mark(((home.path, home.live) for home in homes), fill)
        if isinstance(exc, Corrupt):
            raise Corrupt(
                f"{exc}; it was right a moment ago: what is restored is half old, half new; restore a state before you use it"
            ) from exc
        raise


def _homes(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], targets: Sequence[Target]) -> dict[int, Home]:
    """The live tensors that receive stored ones, by index.

    Stored tensors that are not written into live ones are handed over, or loaded, before these are filled. So a stored tensor that is also
    wanted in that way has no home.
    """
    pairs = enumerate(zip(tensors, specs, strict=True))
    index_of = {id(tensor): i for i, (tensor, spec) in pairs if tensor is not None and spec.alias is None and is_whole(spec)}
    homes = live_homes(targets, index_of, specs)
    written = Counter(id(target.stored) for target in targets)
    wanted = Counter(id(tensor) for tensor in tensors if tensor is not None)
    is_written_only = {index for index in homes if written[id(tensors[index])] >= wanted[id(tensors[index])]}
    return {index: home for index, home in homes.items() if index in is_written_only}


def _copy(into: Mapping[str, object], copies: Sequence[tuple[Home, torch.Tensor]]) -> None:
    """Copy from the snapshots to the live tensors."""
    wait_for_copies(into)
    try:
        copy(([home.flat for home, _ in copies], [piece for _, piece in copies]))
    except BaseException:
        dirty.mark(((home.path, home.live) for home, _ in copies), copies)
        raise


def _beside(live: torch.Tensor, near: Sequence[Snapshot], spec: TensorSpec) -> torch.Tensor | None:
    """The contents for a live tensor, if they lie on the same device."""
    piece = piece_of(near, spec) if near and devices().is_on(live) else None
    return piece if piece is not None and devices().of(piece) == devices().of(live) else None
