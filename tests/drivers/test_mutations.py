"""Manifests and bundles that were changed at random, and those that were found once: answered or refused, in a second and 64 MiB."""

from __future__ import annotations

import gc
import io
import lzma
import tarfile
from pathlib import Path

import pytest

from tests.drivers.mutations import Tally, kept_bundles, kept_manifests, opened, take_bundle, take_manifest, try_bundles, try_manifests
from tests.support.effort import seeds


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
    tally = Tally()
    held: list[bytearray] = []

    def grow() -> None:
        held.append(bytearray(b"1") * (160 << 20))

    def fail() -> None:
        raise OverflowError

    gc.collect()  # what earlier tests left is not to go in the middle
    tally.judge(grow, lambda: "large")
    tally.judge(fail, lambda: "bare")
    assert [each.split(":")[0] for each in tally.found] == ["large", "bare"]
