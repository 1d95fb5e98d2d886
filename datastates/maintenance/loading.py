"""Bringing a state back: as a tree, into live objects, or only to check every byte of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer

from datastates import values
from datastates.collective import CollectiveCall, Group
from datastates.engine.copy import copy
from datastates.engine.device_copies import Snapshot, piece_of
from datastates.errors import Corrupt, InvalidInput
from datastates.lineage.states import State
from datastates.state import in_place as dirty
from datastates.state.adapters import Adapted, parts, with_trained
from datastates.state.data_position import Redivision
from datastates.state.geometry import bytes_of, dtype_of, is_spread, is_whole
from datastates.state.in_place import LiveTensor, live_tensors_for, wait_for_copies
from datastates.state.manifest import CHUNK_BYTES, TensorSpec
from datastates.state.model import MODES
from datastates.state.per_rank import boxes_here, is_laid_out_as, put_together
from datastates.state.report import Findings, RestoreReport, Selection, Target, leaf_paths
from datastates.state.restore import check_into, reads, write
from datastates.state.xxh3 import Part, split_by_chunk
from datastates.storage.copying import Piece, SupportsParallelRead, pieces_by_chunk
from datastates.storage.parallel_read import SealedChunks, SharedReader, open_shared
from datastates.storage.reading import (
    Region,
    chunks_of,
    of_state,
    read_regions,
    read_tree,
    sketch_tree,
    specs_of,
    whole,
)
from datastates.storage.tier import Reader
from datastates.system.devices import Mark, devices
from datastates.system.interrupts import undisturbed

from .core import Core
from .verify import suggest_sound_state

_ROOM_CHUNKS = 16
"""The number of chunks that one of the rooms holds."""


class DeviceFill:
    """Fills ``homes``, all of which are on devices.

    Belongs to one thread; what it does follows what the current streams have to do."""

    def __init__(
        self, reader: Reader, specs: Sequence[TensorSpec], homes: Mapping[int, LiveTensor]
    ) -> None:
        assert isinstance(reader, SupportsParallelRead), "the caller looked"
        self._reader = reader
        self._parts: dict[int, list[Part]] = {}  # by chunk, the live bytes that belong there
        for index, home in homes.items():
            for chunk, offset, part in split_by_chunk(specs[index].shards[0].start, home.flat):
                self._parts.setdefault(chunk, []).append((offset, part))
        self._devices = dict.fromkeys(devices().of(home.flat) for home in homes.values())

    def check(self) -> None:
        """Check all chunks.

        :raises Corrupt: one fails its digest.
        """
        self._reader.check(list(self._parts))

    def fill(self) -> None:
        """Copy all of it, and wait until it is there.

        :raises Corrupt: a chunk fails its digest now; others are in live tensors already.
        """
        try:
            pinned = {
                chunk: found
                for chunk in self._parts
                if (found := self._reader.pinned(chunk)) is not None
            }
            self._copy(pinned)
            self._fill_by_rooms([chunk for chunk in self._parts if chunk not in pinned])
        finally:  # the sources are given away after this, also when something failed half-way
            for mark in self._marks():
                mark.synchronize()

    def _fill_by_rooms(self, chunks: Sequence[int]) -> None:
        if not chunks:
            return
        rooms = [
            devices().pinned((min(_ROOM_CHUNKS, len(chunks)), CHUNK_BYTES), torch.uint8)
            for _ in range(2)
        ]
        left: list[list[Mark]] = [[], []]
        for turn, at in enumerate(range(0, len(chunks), _ROOM_CHUNKS)):
            some, room = chunks[at : at + _ROOM_CHUNKS], rooms[turn % 2]
            for mark in left[turn % 2]:
                mark.synchronize()
            here = dict(zip(some, room, strict=False))
            pieces = {}
            for chunk in some:
                end = max(offset + part.numel() for offset, part in self._parts[chunk])
                pieces[chunk] = [Piece(0, memoryview(here[chunk][:end].numpy().data))]
            self._reader.read_pieces(pieces)
            self._copy(here)
            left[turn % 2] = self._marks()

    def _copy(self, here: Mapping[int, torch.Tensor]) -> None:
        """Begin to copy chunks from host memory."""
        targets = [part for chunk in here for _, part in self._parts[chunk]]
        sources = [
            data[offset : offset + part.numel()]
            for chunk, data in here.items()
            for offset, part in self._parts[chunk]
        ]
        copy((targets, sources), non_blocking=True)

    def _marks(self) -> list[Mark]:
        return [devices().mark(devices().current(device)) for device in self._devices]


# Restoring into live tensors that are spread over several ranks: each rank reads from the state
# only the boxes that are its own.


def has_spread(adapted: Adapted) -> bool:
    """Whether one of the objects is a DTensor, or has one as a parameter or buffer."""
    for _, found in parts(adapted.objects):
        if isinstance(found, nn.Module):
            tensors = [*found.parameters(), *found.buffers()]
        elif isinstance(found, Optimizer):
            tensors = [parameter for group in found.param_groups for parameter in group["params"]]
        else:
            tensors = [found]
        if any(map(is_spread, tensors)):
            return True
    return False


class Boxes:
    """The boxes of the stored tensors that go only into DTensors.

    ``tensors`` are the sketch that ``findings`` refers to."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        tensors: Sequence[torch.Tensor | None],
        findings: Findings,
    ) -> None:
        self._specs, self._likes = specs, _likes(specs, tensors, findings)
        self.regions = {
            index: [Region(specs[index], box.offset, box.local_shape) for box in boxes_here(like)]
            for index, like in self._likes.items()
        }

    def read(self, reader: Reader) -> dict[int, torch.Tensor]:
        """The stored tensors by index, laid out as the tensors into which they go. Their memory is
        lent, and valid while the reader is open.

        :raises Corrupt: a chunk fails its digest.
        """
        found = iter(
            read_regions(
                reader,
                [region for regions in self.regions.values() for region in regions],
                is_borrowing=True,
            )
        )
        return {
            index: put_together(
                like,
                [next(found) for _ in self.regions[index]],
                dtype_of(self._specs[index].dtype),
            )
            for index, like in self._likes.items()
        }


def _likes(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], findings: Findings
) -> dict[int, torch.Tensor]:
    """The layout for each stored tensor, by index. It is the same for every path of the tensor."""
    index_of = {
        id(tensor): index
        for index, tensor in enumerate(tensors)
        if tensor is not None and specs[index].alias is None
    }
    stands = Counter(id(tensor) for tensor in tensors if tensor is not None)
    found: dict[int, list[torch.Tensor]] = {}
    for stored, live in (
        *((target.stored, target.live) for target in findings.targets),
        *findings.likes,
    ):
        if id(stored) in index_of and is_spread(live):
            found.setdefault(id(stored), []).append(live)
    return {
        index_of[key]: lives[0]
        for key, lives in found.items()
        if len(lives) >= stands[key] and all(is_laid_out_as(live, lives[0]) for live in lives)
    }


# Restores a state into live objects without extra memory for it: large tensors go straight from
# the tier to their places.


_WORTH_BYTES = 8 << 20
"""Fewer bytes are read quickly enough to be copied."""


def restore_from(
    reader: Reader,
    into: Mapping[str, object],
    *,
    only: str | Sequence[str] | None = None,
    strict: bool = True,
    own: Redivision | None = None,
    meeting: CollectiveCall | None = None,
    near: Sequence[Snapshot] = (),
) -> RestoreReport:
    """``restore_into`` with the state that is open. ``own``: the ranks' own things have to be
    divided among other ranks.

    ``near`` are the state's snapshots: data on their devices is copied from there, in the order of
    the current streams.

    ``meeting``: all its ranks do this at once, each with its own objects, and the reader is a
      ``SharedReader``. No rank writes before all ranks can.

    :raises InvalidInput: as ``restore_into``.
    :raises Corrupt: a chunk fails its digest. Live objects are unchanged, unless a file changed
        while it was read: then the message says so, and the tensors are dirty.
    """
    own = Redivision(1, 0, 1) if own is None else own
    wants, specs, adapted = own.reads(reads(into, only)), specs_of(reader), Adapted(into)
    check = partial(check_into, into, only=only, strict=strict, adapted=adapted)
    homes, spread = dict[int, LiveTensor](), dict[int, torch.Tensor]()
    is_parallel = (
        isinstance(reader, SupportsParallelRead)
        and sum(bytes_of(spec) for spec in specs if wants(spec.path)) >= _WORTH_BYTES
    )
    copies = dict[int, tuple[LiveTensor, torch.Tensor]]()
    if is_parallel or has_spread(adapted) or meeting is not None or near:
        with torch.inference_mode(False):
            sketch, tensors = sketch_tree(reader, specs, wants=wants)
            findings = check(own(sketch, into, wants), has_values=False)
            boxes = Boxes(specs, tensors, findings)
            if isinstance(reader, SharedReader):
                sources = {
                    index if spec.alias is None else spec.alias
                    for index, spec in enumerate(specs)
                    if wants(spec.path)
                }
                reader.fetch(
                    chunks_of(
                        region
                        for index in sorted(sources)
                        for region in boxes.regions.get(index, [whole(specs[index])])
                    )
                )
            spread = boxes.read(reader)
        found = _homes(specs, tensors, findings.targets) if is_parallel or near else {}
        for index, home in found.items() if near else ():
            if devices().is_on(home.live):
                piece = piece_of(near, specs[index])
                if piece is not None and devices().of(piece) == devices().of(home.live):
                    copies[index] = home, piece
        homes = {
            index: home for index, home in found.items() if is_parallel and index not in copies
        }
    in_place = {**homes, **{index: home for index, (home, _) in copies.items()}}
    given = {index: home.live for index, home in in_place.items()} | spread
    tree = read_tree(reader, wants=wants, is_borrowing=True, given=given, specs=specs)
    findings = check(own(tree, into, wants))
    lifted = {index: home for index, home in homes.items() if devices().is_on(home.live)}
    poured = {index: home for index, home in homes.items() if index not in lifted}
    if poured and isinstance(reader, SupportsParallelRead):
        pieces = pieces_by_chunk(
            (specs[index].shards[0].start, memoryview(home.flat.numpy().data))
            for index, home in poured.items()
        )
        reader.check(list(pieces))
        findings.writes.insert(
            0, partial(_fill, partial(reader.read_pieces, pieces), into, [*poured.values()])
        )
    if lifted:
        lift = DeviceFill(reader, specs, lifted)
        lift.check()
        findings.writes.insert(0, partial(_fill, lift.fill, into, [*lifted.values()]))
    if copies:
        findings.writes.insert(0, partial(_copy, into, [*copies.values()]))
    if meeting is not None:
        meeting.meet()
    report = replace(write(findings), notes=tuple(own.notes))
    return with_trained(
        report, adapted, {spec.path: spec.requires_grad for spec in specs}, tree.get(MODES)
    )


def _fill(
    fill: Callable[[], None], into: Mapping[str, object], homes: Sequence[LiveTensor]
) -> None:
    wait_for_copies(into)
    try:
        fill()
    except BaseException as exc:
        dirty.mark(((home.path, home.live) for home in homes), fill)
        if isinstance(exc, Corrupt):
            raise Corrupt(
                f"{exc}. The state passed the check before the restore, so what is restored is half"
                " old, half new: restore a state before you use it"
            ) from exc
        raise


def _homes(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor | None], targets: Sequence[Target]
) -> dict[int, LiveTensor]:
    """The live tensors that receive stored ones, by index.

    Stored tensors that are not written into live ones are handed over, or loaded, before these are
    filled. The result leaves out a stored tensor that is also wanted in that way.
    """
    pairs = enumerate(zip(tensors, specs, strict=True))
    index_of = {
        id(tensor): i
        for i, (tensor, spec) in pairs
        if tensor is not None and spec.alias is None and is_whole(spec)
    }
    homes = live_tensors_for(targets, index_of, specs)
    written = Counter(id(target.stored) for target in targets)
    wanted = Counter(id(tensor) for tensor in tensors if tensor is not None)
    is_written_only = {
        index for index in homes if written[id(tensors[index])] >= wanted[id(tensors[index])]
    }
    return {index: home for index, home in homes.items() if index in is_written_only}


def _copy(into: Mapping[str, object], copies: Sequence[tuple[LiveTensor, torch.Tensor]]) -> None:
    wait_for_copies(into)
    try:
        copy(([home.flat for home, _ in copies], [piece for _, piece in copies]))
    except BaseException:
        dirty.mark(((home.path, home.live) for home, _ in copies), copies)
        raise


def device_of(value: object, what: str) -> torch.device:
    """A device of this machine.

    :raises InvalidInput: the value is not one.
    """
    import torch  # code that only looks at a lineage does without torch

    try:
        # whatever is none raises
        return torch.empty(0, device=torch.device(value)).device  # type: ignore[call-overload]
    except Exception as exc:
        raise InvalidInput(
            f"{what} is {values.shown(value)}: give a device that is here, such as 'cpu' ({exc})"
        ) from exc


Device = Annotated["torch.device | str", device_of]


def load(
    core: Core,
    state: State,
    *,
    only: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
    rank: int = 0,
) -> Any:
    """A state's tree; see ``Repository.load``."""
    if rank >= state.world_size:
        raise InvalidInput(
            f"state {state.uid} has {state.world_size} parts, and rank is {rank}: give one below"
            " that"
        )
    with (
        undisturbed(),
        suggest_sound_state(core, state),
        core.open_payload(state, rank=rank) as reader,
    ):
        selection = Selection(only)
        tree = read_tree(reader, wants=selection.wants, device=device)
    if only is not None:
        selection.check(leaf_paths(tree, ""))  # values are always read, so a pattern may select one
    return tree


def restore(
    core: Core,
    state: State,
    into: Mapping[str, object],
    *,
    only: str | Sequence[str] | None,
    strict: bool,
    group: Group | None = None,
) -> RestoreReport:
    """Put a state into live objects, once no copy for a capture here reads them any more; see
    ``Repository.restore``.

    With ``group``, all its ranks restore their objects at once, which is collective.
    """
    for training in list(core.trainings):
        training.fence()
    if group is not None and group.size > 1:
        with _open_together(core, state, group, "restore") as (reader, own, meeting):
            of_state(reader, state)
            report = restore_from(reader, into, only=only, strict=strict, own=own, meeting=meeting)
        return replace(report, state=state.uid, step=state.step)
    own, host = Redivision(state.world_size, 0, 1), core.running
    snapshots = nullcontext(()) if host is None else host.snapshots.reading(state.uid, state.digest)
    with (
        undisturbed(),
        suggest_sound_state(core, state),
        core.open_payload(state, rank=own.source) as reader,
        snapshots as near,
    ):
        report = restore_from(reader, into, only=only, strict=strict, own=own, near=near)
    return replace(report, state=state.uid, step=state.step)


@contextmanager
def _open_together(
    core: Core, state: State, group: Group, what: str
) -> Iterator[tuple[SharedReader, Redivision, CollectiveCall]]:
    """A reader of a state for all ranks of a group; collective. If one rank fails, all fail.

    :raises InvalidInput: the ranks name other states; those that opened another repository may have
        another state of this uid.
    """
    own = Redivision(state.world_size, group.rank, group.size)
    meeting = CollectiveCall(group, f"{what} state {state.uid}")
    opened = partial(core.tiers.open_part, state, verify=core.config.verify)
    with (
        meeting.synchronized(),
        undisturbed(),
        suggest_sound_state(core, state),
        ExitStack() as stack,
    ):
        mine = f"{state.uid} with the digest {state.digest[:16]}"
        everyone = [said.decode() for said in meeting.meet(mine.encode())]
        for rank, said in enumerate(everyone):
            if said != everyone[0]:
                raise InvalidInput(
                    f"rank 0 restores state {everyone[0]}, and rank {rank} state {said}: let all"
                    " ranks open the same repository, and restore the same state"
                )
        reader = open_shared(meeting, state.uid, state.world_size, opened, rank=own.source)
        yield stack.enter_context(reader), own, meeting


def load_values(core: Core, state: State, group: Group, *, wants: Callable[[str], bool]) -> Any:
    """The state's tree with its plain values, and with the tensors at the paths that are wanted
    if this process is alone. Collective."""
    if group.size == 1:
        with undisturbed(), suggest_sound_state(core, state), core.open_payload(state) as reader:
            return read_tree(reader, wants=wants)
    with _open_together(core, state, group, "read") as (reader, _, _):
        return read_tree(reader, wants=lambda path: False)


def verify(core: Core, state: State) -> None:
    """Read and check every byte of a state, and bind the state to its contents by a seal; see
    ``Repository.verify``."""
    with undisturbed(), core.open_payload(state, verify=True) as reader:
        chunks = SealedChunks(reader)
        chunks.check()
        reader.verify_headers()
    core.seal(state.uid, chunks.seal)
