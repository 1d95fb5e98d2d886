"""Memory registered with a device: each stretch once, slot by slot, let go before it is
unmapped; and what is refused is done without."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import datastates
from datastates.config import Config
from datastates.errors import Unavailable
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from datastates.storage.memory import MemoryTier
from datastates.testing.states import numbers, payload

if TYPE_CHECKING:
    import pytest


@dataclass
class Driver:
    """Registers in a list, as strictly as CUDA: what is not mapped, or overlaps, is an error."""

    most: int = 1 << 30
    stretches: dict[int, int] = field(default_factory=dict)
    log: list[tuple[str, int]] = field(default_factory=list)

    def register(self, address: int, length: int) -> None:
        if len(self.stretches) >= self.most:
            raise Unavailable("no more memory may be locked")
        assert is_mapped(address, length)
        assert all(
            address + length <= start or start + size <= address
            for start, size in self.stretches.items()
        )
        self.stretches[address] = length
        self.log.append(("register", length // CHUNK_BYTES))

    def unregister(self, address: int) -> None:
        assert is_mapped(address, self.stretches[address]), (
            "it was unmapped before it was unregistered"
        )
        self.log.append(("unregister", self.stretches.pop(address) // CHUNK_BYTES))


def is_mapped(address: int, length: int) -> bool:
    """Whether all of it is mapped; the kernel lists a stretch in pieces where only some of it
    has huge pages."""
    reached = address
    for line in Path("/proc/self/maps").read_text().splitlines():  # by rising address
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= reached < last:
            reached = last
    return address + length <= reached


def take(arena: Arena, count: int) -> list[int]:
    """Slots, registered if the arena is pinned."""
    slots = arena.acquire([CHUNK_BYTES] * count)
    assert slots is not None
    arena.register()
    return slots


def test_what_became_warm_is_registered_at_once_when_it_is_asked_for() -> None:
    driver, arena = Driver(), Arena(20 * CHUNK_BYTES)
    take(arena, 3)
    assert driver.log == []
    arena.pin(driver)
    arena.acquire([CHUNK_BYTES] * 2)
    arena.warm_up(4)
    assert driver.log == [("register", 3)], "whoever takes memory does not wait for the driver"
    arena.pin(Driver(most=0))
    take(arena, 4)
    assert driver.log == [("register", 3), ("register", 6)]
    take(arena, 1)
    assert driver.log[2:] == [("register", 1)]
    arena.close()


def test_memory_that_is_not_registered_yet_is_joined_only_with_its_like() -> None:
    arena = Arena(20 * CHUNK_BYTES)
    take(arena, 2)
    arena.pin(Driver())
    arena.warm_up(3)
    for _ in range(2):
        assert not arena.is_joint(CHUNK_BYTES, 2 * CHUNK_BYTES)
        assert arena.is_joint(2 * CHUNK_BYTES, 4 * CHUNK_BYTES)
        arena.register()
    arena.close()


def test_memory_is_unregistered_before_it_is_unmapped_when_the_arena_is_closed() -> None:
    driver, arena = Driver(), Arena(20 * CHUNK_BYTES)
    arena.pin(driver)
    take(arena, 2)
    take(arena, 2)
    arena.close()
    arena.close()
    assert driver.stretches == {}
    assert driver.log[2:] == [("unregister", 2), ("unregister", 2)]


def test_memory_is_unregistered_before_it_is_unmapped_when_the_arena_is_collected() -> None:
    driver, arena = Driver(), Arena(20 * CHUNK_BYTES)
    arena.pin(driver)
    take(arena, 2)
    gone = weakref.ref(arena)
    del arena
    gc.collect()
    assert gone() is None
    assert driver.log == [("register", 2), ("unregister", 2)]


def test_a_refused_registration_is_said_once_and_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver, arena = Driver(most=1), Arena(20 * CHUNK_BYTES)
    arena.pin(driver)
    with caplog.at_level(logging.WARNING, logger="datastates"):
        for _ in range(4):
            (slot,) = take(arena, 1)
            arena.tensor(slot).fill_(1)
    assert driver.log == [("register", 1)]
    (said,) = caplog.messages
    assert "no more memory may be locked" in said
    assert not arena.is_joint(0, CHUNK_BYTES)
    assert arena.is_joint(CHUNK_BYTES, 3 * CHUNK_BYTES)
    arena.close()
    assert driver.stretches == {}


def test_no_copy_goes_from_one_registration_into_another() -> None:
    arena = Arena(20 * CHUNK_BYTES)
    tier, state = MemoryTier(arena), payload("a", {"weight": numbers(CHUNK_BYTES)})
    arena.pin(Driver())
    slots = [*take(arena, 2), *take(arena, 2)]
    assert slots == [number * CHUNK_BYTES for number in range(4)]
    for slot, chunk in zip(slots, state.chunks, strict=True):
        arena.memory(slot)[:] = chunk
    tier.adopt(state.manifest, slots)
    with tier.open("a") as reader:
        assert reader.span(0, 2 * CHUNK_BYTES) is not None
        assert reader.span(2 * CHUNK_BYTES, 2 * CHUNK_BYTES) is not None
        assert reader.span(CHUNK_BYTES, 2 * CHUNK_BYTES) is None
    tier.close()
    arena.close()


def test_a_forked_child_unregisters_nothing_of_its_parents() -> None:
    driver, arena = Driver(), Arena(20 * CHUNK_BYTES)
    arena.pin(driver)
    take(arena, 2)
    child = os.fork()
    if child == 0:
        arena.close()
        del arena
        gc.collect()
        os._exit(len(driver.log) - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arena.close()
    assert driver.stretches == {}


def test_a_training_on_the_cpu_of_a_host_with_a_gpu_touches_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wake() -> None:
        raise AssertionError("a context was made")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cudart", "_lazy_init", "init"):
        monkeypatch.setattr(torch.cuda, name, wake)
    with datastates.open(tmp_path / "runs", config=Config(memory_bytes=4 * CHUNK_BYTES)) as repo:
        with repo.track(weight=torch.ones(1000, 1000), rng=False) as run:
            run.capture().wait("durable")
        assert torch.equal(repo.load("main")["weight"], torch.ones(1000, 1000))
