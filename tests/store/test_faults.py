"""The public faults do what they say, so that a test which uses them tests something."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from datastates.content.digest import chunk_digest
from datastates.errors import Unavailable
from datastates.store.local import LocalTier
from datastates.testing import FullDiskTier, SlowTier, TornTier, fail_at
from datastates.testing.states import small


def test_a_step_fails_once_after_as_many_as_were_let_pass(tmp_path: Path) -> None:
    on_step = fail_at("pack-written", after=2)
    for step in ("pack-written", "pack-renamed", "pack-written"):
        on_step(step)
    with pytest.raises(OSError, match="no space left, as asked for at pack-written"):
        on_step("pack-written")
    on_step("pack-written")


def test_a_slow_tier_waits_until_it_is_let_go_on(tmp_path: Path) -> None:
    tier = SlowTier(LocalTier(tmp_path))
    thread = threading.Thread(target=tier.put, args=(small("s", 1),))
    thread.start()
    assert tier.is_waiting.wait(60)
    assert list(tier.uids()) == []
    tier.go_on.set()
    thread.join()
    assert list(tier.uids()) == ["s"]


def test_a_torn_tier_hands_on_chunks_that_fail_their_digest(tmp_path: Path) -> None:
    tier = TornTier(LocalTier(tmp_path))
    tier.put(small("s", 1, 2))
    with tier.open("s") as reader:
        for index, chunk in enumerate(reader.manifest.content.chunks):
            assert chunk_digest(reader.chunk(index)) != chunk.digest
        assert reader.span(0, 8) is None
    tier.inner.open("s").verify()


def test_a_full_disk_takes_what_fits(tmp_path: Path) -> None:
    tier = FullDiskTier(LocalTier(tmp_path), 250)
    tier.put(small("s", 1, 2))
    with pytest.raises(Unavailable, match="needs 100 bytes, 50 are free"):
        tier.put(small("t", 3))
    assert list(tier.uids()) == ["s"]
    assert tier.remove("s") == 200
    tier.close()
