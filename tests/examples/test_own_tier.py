"""The example of a user's own tier: it passes the suite that ships, is short, and does what it
says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import own_tier
import pytest

from datastates.errors import Corrupt
from datastates.storage import Tier
from datastates.testing import TierSuite
from datastates.testing.states import small
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

    def test_a_chunk_that_is_gone_is_damage_and_not_a_state_that_never_was(
        self, tier: Tier
    ) -> None:
        tier.put(small("half", 1, 2))
        del self.objects[next(key for key in self.objects if key.startswith("chunk/"))]
        with (
            tier.open("half") as reader,
            pytest.raises(Corrupt, match="state half is damaged on the bucket tier"),
        ):
            reader.verify()
        self.objects["state/torn"] = b"\x93"
        with pytest.raises(Corrupt, match="state torn is damaged"):
            tier.open("torn")


@pytest.mark.parametrize("name", ["own_tier.py", "own_processor.py"])
def test_a_tier_or_a_processor_of_ones_own_takes_less_than_fifty_lines(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 50


def test_example_restores_from_its_bucket_what_the_disk_has_lost(tmp_path: Path) -> None:
    said = run("own_tier.py", cwd=tmp_path)
    came = "of which ('model/weight', 'model/bias') came back"
    assert said == f"step 1 is external: 3 objects, {came}\n", "one is the repository's name"
