"""The example of a user's own tier: it passes the suite that ships, is short, and does what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import own_tier
import pytest

from datastates.store import Tier
from datastates.testing import TierSuite
from tests.examples.test_examples import EXAMPLES, run


class TestBucketTier(TierSuite):
    @pytest.fixture
    def tier(self) -> Tier:
        self.objects: dict[str, bytes] = {}
        return own_tier.BucketTier(self.objects)

    def flip(self, tier: Tier, uid: str, chunk: int, byte: int) -> None:
        _, keys = msgspec.msgpack.decode(self.objects[f"state/{uid}"], type=tuple[bytes, list[str]])
        data = bytearray(self.objects[keys[chunk]])
        data[byte] ^= 1
        self.objects[keys[chunk]] = bytes(data)


def test_a_tier_of_ones_own_takes_less_than_forty_lines() -> None:
    (tier,) = (node for node in ast.parse((EXAMPLES / "own_tier.py").read_text()).body if isinstance(node, ast.ClassDef))
    assert tier.end_lineno is not None
    assert tier.end_lineno - tier.lineno < 40


def test_example_restores_from_its_bucket_what_the_disk_has_lost(tmp_path: Path) -> None:
    said = run("own_tier.py", cwd=tmp_path)
    assert said == "step 1 is external: 2 objects in the bucket\nrestored from the bucket: True\n"
