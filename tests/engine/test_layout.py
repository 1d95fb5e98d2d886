"""Where a plan puts tensors, so that a device can digest their chunks where they lie; and what
lies between them."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import datastates
from datastates.config import Config
from datastates.engine.copy import CopyJob, Stager
from datastates.engine.plan import CopyPlan, compile_plan
from datastates.repository import Repository
from datastates.state.device_digest import Digester
from datastates.state.digest import chunk_digest, tensors_of
from datastates.state.geometry import gaps
from datastates.state.manifest import ALIGNED_BYTES, CHUNK_BYTES, LARGE_BYTES
from datastates.state.tree import flatten
from datastates.state.xxh3 import SHORTEST, Part, can_digest, digests_of
from datastates.storage.arena import Arena
from tests.support.effort import examples
from tests.support.strategies import random_tensor

ODD = 100_001
SIZES = st.sampled_from(
    [1, 1000, LARGE_BYTES - 1, LARGE_BYTES, ODD, 2 * ODD, CHUNK_BYTES - ODD, CHUNK_BYTES]
)
DTYPES = st.sampled_from([torch.uint8, torch.int16, torch.float32])


@given(st.lists(st.tuples(SIZES, DTYPES, st.booleans()), min_size=1, max_size=6))
@settings(max_examples=examples(25), deadline=None)
def test_chunks_of_large_tensors_can_be_digested_where_they_lie(
    arena: Arena, stager: Stager, found: list[tuple[int, torch.dtype, bool]]
) -> None:
    sources = [
        random_tensor(dtype, [size // dtype.itemsize], seed=size) for size, dtype, _ in found
    ]
    frozen = {
        id(source) for source, (_, _, is_frozen) in zip(sources, found, strict=True) if is_frozen
    }
    plan = compile_plan(flatten(sources), frozen=frozen)
    lengths = plan.layout.chunk_lengths
    assert [*gaps(plan.specs, lengths)] == plan.gaps
    assert all(last - first < ALIGNED_BYTES for _, first, last in plan.gaps)
    slots = arena.acquire(plan.layout.chunk_lengths)
    assert slots is not None
    arena.flat.fill_(0xA5)  # as if other states had lain there
    job = CopyJob(plan, slots, on_done=lambda _: None)
    stager.begin(job, is_deferring=False)
    arena.release(slots)
    large = parts_of(plan)
    assert all(can_digest(lengths[chunk], parts) for chunk, parts in large.items())
    if large:
        digester = Digester([(lengths[chunk], parts) for chunk, parts in large.items()])
        copied = [chunk_digest(arena.memory(slots[chunk], lengths[chunk])) for chunk in large]
        assert digests_of(digester.lanes().numpy(), digester.lengths) == copied


def parts_of(plan: CopyPlan) -> dict[int, list[Part]]:
    """The chunks of large tensors that a device could digest, and where these lie."""
    found: dict[int, list[Part]] = {}
    for source in sorted(plan.sources, key=lambda each: each.start):
        if source.flat.numel() >= LARGE_BYTES:
            for chunk, _ in source.pieces:
                begin = max(0, chunk * CHUNK_BYTES - source.start)
                data = source.flat[begin : (chunk + 1) * CHUNK_BYTES - source.start]
                found.setdefault(chunk, []).append(
                    (source.start + begin - chunk * CHUNK_BYTES, data)
                )
    return {
        chunk: parts
        for chunk, parts in found.items()
        if plan.layout.chunk_lengths[chunk] >= SHORTEST
    }


def test_states_of_one_content_have_one_digest_whatever_lay_in_their_slots(tmp_path: Path) -> None:
    """Captures of one training, and merges of its states."""
    config = Config(memory_bytes=32 * CHUNK_BYTES, durable_interval_s=None)
    odd = {str(index): torch.full((ODD,), float(index)) for index in range(3)}
    with (
        datastates.open(tmp_path / "runs", config=config) as repo,
        repo.track(model=odd, rng=False) as run,
    ):
        for byte in (0xA5, 0x5A):
            dirty(repo, byte)
            run.capture().wait()
        for byte in (0xC3, 0x3C):
            dirty(repo, byte)
            repo.merge(["main~1", "main"], tag=f"merged-{byte}")
        assert (
            len({digests(repo, rev) for rev in ("main~1", "main", "merged-195", "merged-60")}) == 1
        )


def dirty(repo: Repository, byte: int) -> None:
    """Fill the slots that no state has."""
    arena = repo.core.engage().arena
    free = list(iter(lambda: arena.acquire([CHUNK_BYTES]), None))
    for slots in free:
        arena.tensor(slots[0]).fill_(byte)
    for start, end in arena._extents.items():
        arena.flat[start:end].fill_(byte)
    for slots in free:
        arena.release(slots)


def digests(repo: Repository, rev: str) -> tuple[bytes, ...]:
    with repo.core.tiers.open(repo.state(rev)) as reader:
        content = reader.manifest.content
        lengths = [chunk.length for chunk in content.chunks]
        between = [*gaps(tensors_of(content), lengths)]
        assert len(between) == 2
        assert not any(
            bytes(reader.chunk(chunk)[first:last]).strip(b"\0") for chunk, first, last in between
        )
        return tuple(chunk.digest for chunk in content.chunks)
