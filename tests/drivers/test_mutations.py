"""Manifests and bundles that were changed at random, and those that were found once: answered or
refused, in a second and 64 MiB."""

from __future__ import annotations

import io
import lzma
import sys
import tarfile
from pathlib import Path

import pytest

from tests.drivers.mutations import (
    Tally,
    kept_bundles,
    kept_manifests,
    opened,
    take_bundle,
    take_manifest,
    try_bundles,
    try_manifests,
)
from tests.support.effort import seeds
from tests.support.warm import run


@pytest.mark.parametrize("path", kept_manifests(), ids=lambda path: path.stem)
def test_a_manifest_that_was_found_is_answered_or_refused(path: Path) -> None:
    tally, data = Tally(), lzma.decompress(path.read_bytes())
    tally.judge(lambda: take_manifest(data), lambda: path.name)
    assert tally.found == []


@pytest.mark.parametrize("path", kept_bundles(), ids=lambda path: path.stem)
def test_a_bundle_that_was_found_is_answered_or_refused(path: Path, tmp_path: Path) -> None:
    tally = Tally()
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(path.read_bytes()))) as tar:
        tar.extractall(tmp_path, filter="data")
    with opened(tmp_path / "into") as into:
        tally.judge(lambda: take_bundle(tmp_path / "bundle", into), lambda: path.name)
    assert tally.found == []


@pytest.mark.parametrize("seed", seeds(5))
def test_changed_manifests_are_answered_or_refused(seed: int) -> None:
    tally = try_manifests(300, seed)
    assert tally.found == []
    assert tally.answered > 20
    assert sum(tally.refused.values()) > 100


@pytest.mark.parametrize("seed", seeds(5))
def test_changed_bundles_are_answered_or_refused(seed: int) -> None:
    tally = try_bundles(12, seed)
    assert tally.found == []
    assert sum(tally.refused.values()) > 4


def test_what_takes_too_long_or_too_much_or_fails_is_found() -> None:
    # where nobody else gives memory back meanwhile
    ended = run([sys.executable, "-c", _BAD_CASES], capture_output=True, timeout=120)
    assert ended.stdout.split() == ["large", "slow", "bare"], ended.stderr


_BAD_CASES = """
import time
from tests.drivers.mutations import MOST_S, Tally

def grow(): held.append(bytearray(b"1") * (160 << 20))
def wait():
    began = time.process_time()
    while time.process_time() - began < 1.1 * MOST_S: pass
def fail(): raise OverflowError

tally, held = Tally(), []
for name, act in {"large": grow, "slow": wait, "bare": fail, "good": int}.items():
    tally.judge(act, lambda: name)
print(*(each.split(":")[0] for each in tally.found))
"""
