"""What the landing tests share: a state of live objects as a peer would send it, and the loop
that feeds a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import nn

from datastates.engine.copy import CopyJob, Stager
from datastates.engine.plan import compile_plan
from datastates.state.adapters import Adapted
from datastates.state.digest import chunk_digest, encode, state_digest
from datastates.state.encoding import encode_values
from datastates.state.manifest import CHUNK_BYTES, VERSION, Chunk, Content, Manifest, Origin
from datastates.state.tree import flatten
from datastates.storage.arena import Arena
from datastates.transport.contract import Sink
from datastates.transport.receive_objects import ObjectsSink
from datastates.transport.untrusted import CheckedManifest, read_manifest
from tests.support.late import LateDevices, Lateness


@dataclass(frozen=True, slots=True)
class Sent:
    """A state on the sending side."""

    checked: CheckedManifest
    chunks: list[bytes]

    @property
    def manifest(self) -> Manifest:
        return self.checked.manifest


def sent(
    objects: Mapping[str, object],
    uid: str = "sent",
    *,
    gradients: bool = False,
    parents: Sequence[str] = (),
) -> Sent:
    """A state as it is captured, and its manifest as it comes over the wire."""
    flat = flatten(Adapted(objects, gradients=gradients).tree())
    plan = compile_plan(flat)
    arena = Arena(max(1, len(plan.sizes)) * CHUNK_BYTES)
    slots = arena.acquire(plan.layout.chunk_lengths)
    assert slots is not None
    job, stager = CopyJob(plan, slots, on_done=lambda _: None), Stager(arena)
    stager.begin(job, is_deferring=False)
    stager.fence(job)
    stager.close()
    assert job.error is None
    chunks = [
        bytes(arena.memory(slot, length))
        for slot, length in zip(slots, plan.layout.chunk_lengths, strict=True)
    ]
    arena.close()
    listed = tuple(Chunk(chunk_digest(chunk), len(chunk)) for chunk in chunks)
    content = Content(
        plan.layout.skeleton, msgspec.Raw(encode_values(flat.values)), plan.layout.tensors, listed
    )
    digests = ("0" * 64,) * len(parents)
    origin = Origin(uid, tuple(parents), digests, None, None, 1, 0, 0, None, {}, {})
    manifest = Manifest(VERSION, state_digest(content, digests), origin, content)
    return Sent(read_manifest(encode(manifest), source="the test"), chunks)


def feed(sink: Sink, chunks: Sequence[bytes], indices: Iterable[int] | None = None) -> list[int]:
    """Send what is missing (or these of it), one chunk after the other; what was sent."""
    asked = list(sink.missing()) if indices is None else list(indices)
    for index in asked:
        buffers = sink.buffers(index)
        assert buffers is not None
        assert sum(map(len, buffers)) == sink.lengths[index] == len(chunks[index])
        fill(buffers, chunks[index])
        assert sink.accept(index)
    return asked


def fill(buffers: Sequence[memoryview], data: bytes) -> None:
    """Put a chunk into the buffers for it."""
    done = 0
    for buffer in buffers:
        buffer[:] = data[done : done + len(buffer)]
        done += len(buffer)


def check_landing(
    state: Sent,
    make: Callable[[int], nn.Module],
    lateness: Lateness,
    *,
    atomic: bool = False,
    scratch: int = 1,
) -> None:
    """A clone of ``make(1)`` lands in ``make(2)`` on a late device: what the owner queued before
    does not change what has landed, and what is queued after the clone sees it."""
    late, here = LateDevices(lateness), make(2)
    late.put(here)
    with late.running(), torch.no_grad():
        for parameter in here.parameters():
            parameter.add_(1)
        sink = ObjectsSink(state.checked, {"model": here}, atomic=atomic, scratch=scratch)
        feed(sink, state.chunks)
        sink.commit()
        doubled = [parameter * 2 for parameter in here.parameters()]
        sink.close()
        late.schedule.catch_up()
    expected = make(1)
    assert all(map(torch.equal, here.state_dict().values(), expected.state_dict().values()))
    assert all(
        torch.equal(found, parameter * 2)
        for found, parameter in zip(doubled, expected.parameters(), strict=True)
    )
