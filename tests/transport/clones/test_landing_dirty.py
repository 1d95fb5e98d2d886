"""A clone in place that did not end: objects that are half old, half new."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.errors import Conflict, Dirty
from datastates.state import in_place
from datastates.state.restore import restore_into
from datastates.transport.receive_objects import ObjectsSink
from tests.engine.build import held_back
from tests.state.test_optimizer_state import stored
from tests.support.cloning import Sent, feed, sent
from tests.transport.clones.test_landing_objects import digest, mlp

torch.set_num_threads(1)

Objects = dict[str, Any]


def begun(here: Objects, state: Sent) -> ObjectsSink:
    sink = ObjectsSink(state.checked, here, atomic=False)
    feed(sink, state.chunks, list(sink.missing())[:1])
    return sink


def test_a_clone_in_place_that_does_not_end_leaves_dirty_objects_that_no_tracker_captures(
    tmp_path: Path,
) -> None:
    state, here = sent(mlp(1)), mlp(2)
    with datastates.open(tmp_path, memory_bytes=256 << 20) as repo:
        run = repo.track(**here)
        run.capture().wait()
        sink = begun(here, state)
        sink.close()
        assert sink.is_dirty
        with pytest.raises(Dirty, match=r"^model, optimizer: half old.*resume the clone"):
            run.capture()
        run.restore("main")
        assert not in_place.is_any()
        run.capture().wait()


def test_a_clone_that_ends_before_the_first_buffer_leaves_nothing_dirty() -> None:
    state, here = sent(mlp(1)), mlp(2)
    before = digest(here)
    sink = ObjectsSink(state.checked, here, atomic=False)
    assert in_place.is_any()
    sink.close()
    assert not in_place.is_any()
    assert digest(here) == before


def test_a_clone_in_place_waits_for_captures_that_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, here = sent(mlp(1)), mlp(2)
    with datastates.open(tmp_path, memory_bytes=256 << 20) as repo, held_back(monkeypatch) as gate:
        run = repo.track(**here)
        before = sent({**here}).manifest.content.chunks
        gate.hold()
        capture = run.capture()
        sink = ObjectsSink(state.checked, here, atomic=False)  # opens the gate
        feed(sink, state.chunks)
        sink.commit()
        tree = repo.load(capture.wait().uid)
        assert torch.equal(tree["model"]["3.weight"], mlp(2)["model"][3].weight)
        assert sent({**here}).manifest.content.chunks != before


@pytest.mark.parametrize("names", [["optimizer"], ["optimizer", "model"], ["model", "optimizer"]])
def test_an_atomic_clone_waits_for_captures_that_still_read(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, here = sent(mlp(1)), mlp(2)
    before = digest(mlp(2))
    with datastates.open(tmp_path, memory_bytes=256 << 20) as repo, held_back(monkeypatch) as gate:
        run = repo.track(**here)
        sink = ObjectsSink(state.checked, {name: here[name] for name in names}, strict=False)
        feed(sink, state.chunks)
        gate.hold()
        capture = run.capture()
        sink.commit()  # opens the gate, if it waits
        gate.open()
        found = mlp(3)
        repo.restore(capture.wait().uid, objects=found)
        assert digest(found) == before


def test_another_clone_makes_dirty_objects_whole() -> None:
    state, here = sent(mlp(1)), mlp(2)
    first = begun(here, state)
    second = ObjectsSink(state.checked, here)
    feed(second, state.chunks)
    assert first.is_dirty
    assert second.commit()
    assert not first.is_dirty
    assert not in_place.is_any()
    assert digest(here) == state.manifest.digest


@pytest.mark.parametrize("atomic", [True, False])
def test_a_clone_does_not_go_on_over_what_was_written_meanwhile(atomic: bool) -> None:
    state, here = sent(mlp(1)), mlp(2)
    first = begun(here, state)
    if atomic:
        restore_into(here, stored(mlp(3)))
    else:
        begun(here, state)
    with pytest.raises(Conflict, match="begin the clone again"):
        first.buffers(first.missing()[0])
    with pytest.raises(Conflict):
        first.commit()
    assert not first.is_dirty


def test_dirty_objects_that_are_gone_are_forgotten() -> None:
    here = mlp(2)
    sink = begun(here, sent(mlp(1)))
    assert in_place.is_any()
    del here, sink
    gc.collect()
    assert not in_place.is_any()
