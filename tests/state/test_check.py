"""Tensors that were found right are not taken for right in another manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import datastates
from datastates.errors import Corrupt
from datastates.state.digest import check
from datastates.state.manifest import Manifest


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    with (
        datastates.open(tmp_path, memory_bytes=32 << 20) as repo,
        repo.track(rng=False, w=torch.ones(8), v=torch.ones(3)) as run,
    ):
        state = run.capture().wait("durable")
        with repo.core.open_payload(state) as reader:
            return reader.manifest


def test_the_same_tensors_over_shorter_chunks_are_refused(manifest: Manifest) -> None:
    specs = check(manifest, "it")
    assert check(msgspec.structs.replace(manifest), "another") == specs
    (chunk,) = manifest.content.chunks
    cut: Any = msgspec.structs.replace(
        manifest.content, chunks=(msgspec.structs.replace(chunk, length=chunk.length - 4),)
    )
    with pytest.raises(Corrupt, match="beyond the stream"):
        check(msgspec.structs.replace(manifest, content=cut), "it")
    assert check(manifest, "it") == specs


def test_other_tensors_over_the_same_chunks_are_refused(manifest: Manifest) -> None:
    first, second = check(manifest, "it")
    twice = msgspec.Raw(
        msgspec.msgpack.encode([first, msgspec.structs.replace(second, path=first.path)])
    )
    with pytest.raises(Corrupt, match="the same path"):
        check(
            msgspec.structs.replace(
                manifest, content=msgspec.structs.replace(manifest.content, tensors=twice)
            ),
            "it",
        )
