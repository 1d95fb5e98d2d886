"""A manifest that comes from elsewhere is checked once on its way in, and whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from datastates.files.bundle import export_bundle, import_bundle
from datastates.state import digest
from datastates.state.manifest import Manifest, TensorSpec
from tests.transport.clones.peers.pairs import Made, Training, train


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the tensors of a manifest were checked, by the uid of its state."""
    found, checked = Counter[str](), digest._checked

    def counted(manifest: Manifest, source: str) -> tuple[TensorSpec, ...]:
        found[manifest.origin.uid] += 1
        return checked(manifest, source)

    monkeypatch.setattr(digest, "_checked", counted)
    return found


@pytest.mark.parametrize("where", ["objects", "repository", "push"])
def test_a_manifest_that_comes_from_a_peer_is_checked_once(
    made: Made, checks: Counter[str], where: str
) -> None:
    ours, theirs, training = made.repo(), made.repo(), Training(0)
    train(theirs, training, 1)  # whose head is written, and checked again, once nobody holds it
    uid = theirs.state("main").uid
    checks.clear()
    if where == "push":
        made.peer(ours.serve("memory://", is_writable=True)).push("main", repo=theirs)
    else:
        into: dict[str, Any] = (
            {"repo": ours} if where == "repository" else {"objects": Training(1).objects}
        )
        made.peer(theirs.serve("memory://")).clone("main", **into)

    assert checks == {uid: 1}


def test_a_manifest_of_a_bundle_is_checked_once_and_what_is_written_of_it_once(
    made: Made, checks: Counter[str], tmp_path: Path
) -> None:
    ours, theirs, training = made.repo(), made.repo(), Training(0)
    train(theirs, training, 1)  # whose head is written, and checked again, once nobody holds it
    uid = theirs.state("main").uid
    export_bundle(theirs, ["main"], tmp_path / "bundle")
    checks.clear()

    import_bundle(ours, tmp_path / "bundle")

    assert checks == {uid: 2}
