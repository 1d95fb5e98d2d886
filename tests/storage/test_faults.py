"""The public faults do what they say, so that a test which uses them tests something."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import datastates
from datastates.errors import Unavailable
from datastates.storage.local import LocalTier
from datastates.storage.tier import Tier
from datastates.testing import (
    Fault,
    FaultyDatabase,
    FaultyDisk,
    FaultyTier,
    TierSuite,
    fail_at,
)
from datastates.testing.states import numbers, payload, small


class TestFaultyTier(TierSuite):
    """As long as nothing is in the way it is the tier that it wraps."""

    keeps_whole_packs = True

    @pytest.fixture
    def tier(self, tmp_path: Path) -> FaultyTier:
        return FaultyTier(LocalTier(tmp_path))

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        assert isinstance(tier, FaultyTier)
        assert isinstance(tier.inner, LocalTier)
        manifest = tier.inner.manifest(uid)
        ref = manifest.refs[chunk]
        path = tier.inner.root / manifest.packs[ref.pack].name
        data = bytearray(path.read_bytes())
        data[ref.offset + byte] ^= 1
        path.write_bytes(data)


def test_a_step_fails_once_after_as_many_as_were_let_pass(tmp_path: Path) -> None:
    on_step = fail_at("pack-written", after=2)
    for step in ("pack-written", "pack-renamed", "pack-written"):
        on_step(step)
    with pytest.raises(OSError, match="no space left, as asked for at pack-written"):
        on_step("pack-written")
    on_step("pack-written")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_faulty_disk_refuses_with_what_was_said_until_it_is_mended(
    tmp_path: Path, number: int
) -> None:
    tier, beside = LocalTier(tmp_path / "packs"), LocalTier(tmp_path / "beside")
    with FaultyDisk(tmp_path / "packs") as disk:
        tier.put(small("before", 1))
        disk.fail(number)
        with pytest.raises(Unavailable, match="state s was not written") as refused:
            tier.put(small("s", 2))
        assert isinstance(refused.value.__cause__, OSError)
        assert refused.value.__cause__.errno == number
        assert disk.is_met.is_set()
        beside.put(small("s", 2))
        tier.open("before").verify()
        disk.mend()
        tier.put(small("s", 2))
        disk.fail(number)
    tier.put(small("after", 3))
    assert sorted(tier.uids()) == ["after", "before", "s"]
    assert not list((tmp_path / "packs").glob(".tmp-*"))


def test_a_stalled_disk_goes_on_where_it_was_when_it_is_mended(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    with FaultyDisk(tmp_path) as disk:
        disk.stall()
        thread = threading.Thread(target=tier.put, args=(small("s", 1),))
        thread.start()
        assert disk.is_met.wait(60)
        assert list(tier.uids()) == []
        disk.mend()
        thread.join(60)
    tier.open("s").verify()


def test_a_slow_disk_takes_as_long_as_its_speed_says(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    with FaultyDisk(tmp_path) as disk:
        disk.slow(20e6)
        began = time.monotonic()
        tier.put(payload("s", {"model/w": numbers(1_000_000)}))
        assert time.monotonic() - began >= 0.2


def test_what_waits_at_a_fault_goes_on_when_another_takes_its_place() -> None:
    fault = Fault()
    fault.stall()
    thread = threading.Thread(target=fault.strike)
    thread.start()
    assert fault.is_met.wait(60)
    fault.fail(errno.EIO)
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(OSError, match="as the test wants it"):
        fault.strike()


def test_a_faulty_tier_fails_to_put_and_can_be_read(tmp_path: Path) -> None:
    tier = FaultyTier(LocalTier(tmp_path))
    tier.put(small("s", 1))
    tier.fail(errno.EIO)
    with pytest.raises(Unavailable, match="state t was not put"):
        tier.put(small("t", 2))
    tier.open("s").verify()
    tier.mend()
    tier.put(small("t", 2))


def test_a_faulty_database_does_not_answer_until_it_is_mended(tmp_path: Path) -> None:
    with datastates.open(tmp_path) as repo, FaultyDatabase(repo) as database:
        database.fail()
        with pytest.raises(Unavailable, match=r"does not answer .*refused"):
            repo.refs()
        assert database.is_met.is_set()
        database.mend()
        with repo.track(weight=torch.zeros(3), rng=False) as run:
            run.capture()
        assert [ref.name for ref in repo.refs()] == ["main"]


def test_whoever_waits_for_a_faulty_database_is_answered_once_the_fault_is_over(
    tmp_path: Path,
) -> None:
    with datastates.open(tmp_path) as repo, ThreadPoolExecutor(1) as pool:
        with FaultyDatabase(repo) as database:
            database.stall()
            asked = pool.submit(repo.refs)
            assert database.is_met.wait(60)
        assert asked.result(60) == []
