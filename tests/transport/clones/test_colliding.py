"""Bytes that were made to have the digest of others: the reason for which no digest of chunks is
trusted beyond one party."""

from __future__ import annotations

import secrets
from random import Random

import pytest

from datastates.state.digest import chunk_digest
from datastates.state.manifest import CHUNK_BYTES
from tests.support.colliding import BLOCK, collide, collide_somewhere


def test_most_of_a_chunk_may_be_chosen_under_the_digest_of_another() -> None:
    zeros, wanted = bytes(CHUNK_BYTES), secrets.token_bytes(CHUNK_BYTES - BLOCK) + bytes(BLOCK)
    forged = collide(zeros, wanted)
    assert chunk_digest(forged) == chunk_digest(zeros)
    assert sum(one == other for one, other in zip(forged, wanted, strict=True)) / CHUNK_BYTES > 0.87


def test_corrections_may_stand_anywhere() -> None:
    random = Random(1)
    original = random.randbytes(70_001)
    forged = {collide_somewhere(original, random) for _ in range(1000)}
    assert len(forged) == 1000
    assert original not in forged
    assert {chunk_digest(each) for each in forged} == {chunk_digest(original)}


def test_what_lies_behind_the_last_block_is_not_free() -> None:
    with pytest.raises(ValueError, match="may differ"):
        collide(bytes(3000), bytes(2999) + b"1")
