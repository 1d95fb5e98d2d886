"""Bringing a state back: as a tree, into live objects, or only to check every byte of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
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
from datastates.state.adapters import Adapted, parts, with_trained
from datastates.state.data_position import Redivision
from datastates.state.geometry import Placements, bytes_of, dtype_of, is_spread, is_whole
from datastates.state.in_place import LiveTensor, live_tensors_for, wait_for_copies
from datastates.state.manifest import CHUNK_BYTES, Content, TensorSpec
from datastates.state.model import MODES
from datastates.state.per_rank import boxes_here, is_laid_out_as, put_together
from datastates.state.report import Findings, RestoreReport, Selection, Target, leaf_paths
from datastates.state.restore import check_into, reads, write
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

from .core import Core, Training
from .verify import suggest_sound_state

_WINDOW_CHUNKS = 32
"""The chunks that reach a device in one copy, at most: 128 MiB."""

_WORDS = (torch.int64, torch.int32, torch.uint8)
"""What is copied within a device at once, the widest that its place allows."""


@dataclass(slots=True, eq=False)
class _Window:
    """Chunks that are copied to ``device`` together, as one stretch of memory, and the live bytes
    that are then copied out of it, by the words in which they are copied.

    ``used`` are the bytes of each chunk up to the last that is wanted."""

    device: torch.device
    chunks: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    live: dict[torch.dtype, list[torch.Tensor]] = field(default_factory=dict)
    places: dict[torch.dtype, list[slice]] = field(default_factory=dict)

    def add(self, start: int, flat: torch.Tensor) -> None:
        """Add live bytes that begin ``start`` bytes from the first chunk on."""
        word = next(
            each for each in _WORDS if not (start | flat.numel() | flat.data_ptr()) % each.itemsize
        )
        size = word.itemsize
        self.live.setdefault(word, []).append(flat.view(word))
        self.places.setdefault(word, []).append(
            slice(start // size, (start + flat.numel()) // size)
        )

    def scatter(self, stage: torch.Tensor) -> None:
        """Begin to copy the live bytes from where the chunks are, on the device or the host."""
        for word, live in self.live.items():
            whole = stage[: stage.numel() // word.itemsize * word.itemsize].view(word)
            copy((live, [whole[place] for place in self.places[word]]), non_blocking=True)


class DeviceFill:
    """Fills ``homes``, all of which are on devices. Whole stretches of the stream are copied to a
    device, and from there into the tensors, many in one launch.

    Belongs to one thread; what it does follows what the current streams have to do."""

    def __init__(self, specs: Sequence[TensorSpec], homes: Mapping[int, LiveTensor]) -> None:
        self._stretches: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for index, home in homes.items():
            start = specs[index].shards[0].start
            self._stretches.setdefault(devices().of(home.flat), []).append((start, home.flat))
        for stretches in self._stretches.values():
            stretches.sort(key=itemgetter(0))
        self._windows = self._divided(_WINDOW_CHUNKS)
        self._chunks = sorted({chunk for window in self._windows for chunk in window.chunks})

    def _divided(self, most: int) -> list[_Window]:
        """The windows, of at most so many chunks."""
        windows: list[_Window] = []
        for device, stretches in self._stretches.items():
            window = _Window(device)
            windows.append(window)
            for start, flat in stretches:
                done = 0
                while done < flat.numel():
                    chunk, offset = divmod(start + done, CHUNK_BYTES)
                    if not window.chunks or window.chunks[-1] != chunk:
                        if len(window.chunks) == most:
                            window = _Window(device)
                            windows.append(window)
                        window.chunks.append(chunk)
                        window.used.append(0)
                    # up to the end of the window, which ends with chunk ``most`` in a row
                    first = len(window.chunks) - 1
                    room = (most - first) * CHUNK_BYTES - offset
                    length = min(flat.numel() - done, room)
                    window.add(first * CHUNK_BYTES + offset, flat[done : done + length])
                    end, last = offset + length, chunk
                    while end > CHUNK_BYTES:
                        window.used[-1] = CHUNK_BYTES
                        end, last = end - CHUNK_BYTES, last + 1
                        window.chunks.append(last)
                        window.used.append(0)
                    window.used[-1] = max(window.used[-1], end)
                    done += length
        return windows

    def check(self, reader: Reader) -> None:
        """Check all chunks.

        :raises Corrupt: one fails its digest.
        """
        assert isinstance(reader, SupportsParallelRead), "the caller looked"
        reader.check(self._chunks)

    def fill(self, reader: Reader) -> None:
        """Copy all of it, and wait until it is there.

        :raises Corrupt: a chunk fails its digest now; others are in live tensors already.
        """
        windows, stages = self._staged()
        buffers = _PinnedBuffers(max(len(window.chunks) for window in windows))
        try:
            for window in windows:
                stage, at = stages.get(window.device), 0
                runs = reader.pinned(window.chunks)
                for run in buffers.read(reader, window) if runs is None else runs:
                    if stage is None:
                        window.scatter(run)
                        continue
                    stage[at : at + run.numel()].copy_(run, non_blocking=True)
                    at += -(-run.numel() // CHUNK_BYTES) * CHUNK_BYTES
                if stage is not None:
                    window.scatter(stage)
                if runs is None:
                    buffers.mark(window.device)
        finally:  # the sources are given away after this, also when something failed half-way
            for device in self._stretches:
                devices().mark(devices().current(device)).synchronize()

    def _staged(self) -> tuple[list[_Window], dict[torch.device, torch.Tensor]]:
        """The windows, and memory for one of them on each device.

        If a device has little memory left, a window is one chunk. If it has none, chunks are copied
        from the host into the tensors."""
        try:
            return self._windows, self._stages(self._windows)
        except torch.OutOfMemoryError:
            windows = self._divided(1)
        try:
            return windows, self._stages(windows)
        except torch.OutOfMemoryError:
            return windows, {}

    def _stages(self, windows: Sequence[_Window]) -> dict[torch.device, torch.Tensor]:
        chunks = dict[torch.device, int]()
        for window in windows:
            chunks[window.device] = max(chunks.get(window.device, 0), len(window.chunks))
        return {
            device: self._stretches[device][0][1].new_empty(count * CHUNK_BYTES)
            for device, count in chunks.items()
        }


class _PinnedBuffers:
    """Two pieces of pinned memory for chunks from files: while one is copied to a device, the
    other one is filled."""

    def __init__(self, chunks: int) -> None:
        self._chunks, self._turn = chunks, 0
        self._buffers: list[torch.Tensor] = []
        self._left: list[Mark | None] = [None, None]

    def read(self, reader: Reader, window: _Window) -> list[torch.Tensor]:
        """The chunks of a window, each from its first byte to the last that is wanted."""
        assert isinstance(reader, SupportsParallelRead), "the caller looked"
        if len(self._buffers) < 2:
            self._buffers.append(devices().pinned((self._chunks, CHUNK_BYTES), torch.uint8))
        self._turn = (self._turn + 1) % len(self._buffers)
        if (left := self._left[self._turn]) is not None:
            left.synchronize()
        buffer = self._buffers[self._turn]
        reader.read_pieces(
            {
                chunk: [Piece(0, memoryview(part[:used].numpy().data))]
                for chunk, used, part in zip(window.chunks, window.used, buffer, strict=False)
            }
        )
        return [buffer.view(-1)[: (len(window.chunks) - 1) * CHUNK_BYTES + window.used[-1]]]

    def mark(self, device: torch.device) -> None:
        """Note that everything queued so far on the device may read the buffer that was filled
        last."""
        self._left[self._turn] = devices().mark(devices().current(device))


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


_NOTHING = Adapted({})

_Homes = dict[int, LiveTensor]

_WORTH_BYTES = 8 << 20
"""Fewer bytes are read quickly enough to be copied."""


class _Fill:
    """The copies from a state into the live tensors that receive parts of it in place."""

    def __init__(self, specs: Sequence[TensorSpec], homes: Mapping[int, LiveTensor]) -> None:
        there = {index: home for index, home in homes.items() if devices().is_on(home.live)}
        here = [(specs[index], home) for index, home in homes.items() if index not in there]
        self._homes = [*homes.values()]
        self._on_host = [home.live for _, home in here if not home.live.is_inference()]
        self._on_devices = DeviceFill(specs, there) if there else None
        self._pieces = pieces_by_chunk(
            (spec.shards[0].start, memoryview(home.flat.numpy().data)) for spec, home in here
        )

    def check(self, reader: Reader) -> None:
        """Check the chunks that are read.

        :raises Corrupt: one fails its digest.
        """
        if self._pieces and isinstance(reader, SupportsParallelRead):
            reader.check(list(self._pieces))
        if self._on_devices is not None:
            self._on_devices.check(reader)

    def write(self, reader: Reader, into: Mapping[str, object]) -> None:
        """Copy all of it, once no capture reads the objects ``into`` any more.

        :raises Corrupt: a chunk fails its digest now; the tensors are dirty.
        """
        wait_for_copies(into)
        try:
            if self._on_devices is not None:
                self._on_devices.fill(reader)
            if self._pieces and isinstance(reader, SupportsParallelRead):
                reader.read_pieces(self._pieces)
                torch.autograd.graph.increment_version(self._on_host)
        except Corrupt as exc:
            raise Corrupt(
                f"{exc}. The state passed the check before the restore, so what is restored is"
                " half old, half new: restore a state before you use it"
            ) from exc


@dataclass(slots=True, eq=False)
class RestorePlan:
    """A plan that restores into the same objects share, for states of one ``layout``. Only the
    first restore inspects each tensor.

    ``wanted`` are the paths of the tensors that the objects need, and ``homes`` the live tensors
    that receive them, by index. ``placements`` shows whether these are still as they were. Belongs
    to a training, and to its thread.
    """

    adapted: Adapted
    layout: tuple[bytes, bytes] = (b"", b"")
    wanted: frozenset[str] = frozenset()
    homes: dict[int, LiveTensor] = field(default_factory=dict)
    placements: Placements | None = None
    fill: _Fill | None = None

    def is_for(self, content: Content) -> bool:
        """Whether it holds for this state, and for the live tensors as they are now."""
        return (
            self.placements is not None
            and self.layout == (bytes(content.skeleton), bytes(content.tensors))
            and self.placements.are_same()
        )

    def learn(self, content: Content, wanted: frozenset[str], fill: _Fill, homes: _Homes) -> None:
        """Take what a restore found out."""
        self.layout = bytes(content.skeleton), bytes(content.tensors)
        self.wanted, self.homes, self.fill = wanted, homes, fill
        self.placements = Placements([home.live for home in homes.values()], are_whole=True)


def restore_from(
    reader: Reader,
    into: Mapping[str, object],
    *,
    only: str | Sequence[str] | None = None,
    strict: bool = True,
    own: Redivision | None = None,
    meeting: CollectiveCall | None = None,
    near: Sequence[Snapshot] = (),
    plan: RestorePlan | None = None,
) -> RestoreReport:
    """``restore_into`` with the state that is open. ``own``: the ranks' own things have to be
    divided among other ranks.

    ``near`` are the state's snapshots: data on their devices is copied from there, in the order of
    the current streams. ``plan`` is of earlier restores into these objects.

    ``meeting``: all its ranks do this at once, each with its own objects, and the reader is a
      ``SharedReader``. No rank writes before all ranks can.

    :raises InvalidInput: as ``restore_into``.
    :raises Corrupt: a chunk fails its digest. Live objects are unchanged, unless a file changed
        while it was read: then the message says so, and the tensors are dirty.
    """
    own = Redivision(1, 0, 1) if own is None else own
    plan = RestorePlan(Adapted(into)) if plan is None else plan
    specs, adapted, content = specs_of(reader), plan.adapted, reader.manifest.content
    check = partial(check_into, into, only=only, strict=strict, adapted=adapted)
    spread = dict[int, torch.Tensor]()
    is_parallel = isinstance(reader, SupportsParallelRead)
    is_known = only is None and is_parallel and meeting is None and plan.is_for(content)
    if is_known:
        wanted, found = plan.wanted, plan.homes
    else:
        is_wanted = own.reads(reads(into, only))
        wanted = frozenset([spec.path for spec in specs if is_wanted(spec.path)])
        is_parallel &= (
            sum([bytes_of(each) for each in specs if each.path in wanted]) >= _WORTH_BYTES
        )
        found = _Homes()
    wants = wanted.__contains__
    if not is_known and (is_parallel or has_spread(adapted) or meeting is not None or near):
        with torch.inference_mode(False):
            sketch, tensors = sketch_tree(reader, specs, wants=wants)
            findings = check(own(sketch, into, is_wanted), has_values=False)
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
    copies = dict[int, tuple[LiveTensor, torch.Tensor]]()
    for index, home in found.items() if near else ():
        if devices().is_on(home.live):
            piece = piece_of(near, specs[index])
            if piece is not None and devices().of(piece) == devices().of(home.live):
                copies[index] = home, piece
    homes = {index: home for index, home in found.items() if is_parallel and index not in copies}
    fill = plan.fill if is_known and not copies else _Fill(specs, homes)
    given = {index: home.live for index, home in found.items() if index in homes or index in copies}
    tree = read_tree(reader, wants=wants, is_borrowing=True, given=given | spread, specs=specs)
    findings = check(own(tree, into, reads(into, only)))
    if is_known and not findings.are_in_place(given.values()):
        plan.placements = None  # the objects have other tensors now
        return restore_from(reader, into, strict=strict, own=own, near=near, plan=plan)
    if homes and fill is not None:
        fill.check(reader)
        findings.writes.insert(0, partial(fill.write, reader, into))
        if not is_known and only is None and meeting is None and not copies:
            plan.learn(content, wanted, fill, homes)
    if copies:
        findings.writes.insert(0, partial(_copy, into, [*copies.values()]))
    if meeting is not None:
        meeting.meet()
    report = replace(write(findings), notes=tuple(own.notes))
    return with_trained(
        report, adapted, {spec.path: spec.requires_grad for spec in specs}, tree.get(MODES)
    )


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
    copy(([home.flat for home, _ in copies], [piece for _, piece in copies]))


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
    plan = None
    for training in list(core.trainings):
        training.fence()
        plan = plan or _plan_of(training, into)
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
        report = restore_from(reader, into, only=only, strict=strict, own=own, near=near, plan=plan)
    return replace(report, state=state.uid, step=state.step)


def _plan_of(training: Training, into: Mapping[str, object]) -> RestorePlan | None:
    """The plan of earlier restores into these objects, if the training tracks the modules and
    optimizers among them. The other objects may be new ones."""
    lasting = {
        name: found for name, found in into.items() if isinstance(found, nn.Module | Optimizer)
    }
    if not lasting or any(training.objects.get(name) is not lasting[name] for name in lasting):
        return None
    plan = training.restore_plans.setdefault(frozenset(into), RestorePlan(_NOTHING))
    if any(plan.adapted.objects.get(name) is not found for name, found in into.items()):
        plan.adapted = Adapted(into)
    return plan


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
