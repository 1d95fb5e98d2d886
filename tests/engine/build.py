"""What the capture tests share: a state copied by its plan and built again, a gate that holds
copies back, live states by path."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from datastates.engine.copy import CopyJob, Stager
from datastates.engine.plan import CopyPlan
from datastates.state.geometry import rebuild
from datastates.state.manifest import CHUNK_BYTES
from datastates.storage.arena import Arena
from tests.support.strategies import bits

if TYPE_CHECKING:
    import pytest


def copied(
    plan: CopyPlan, arena: Arena, stager: Stager, *, is_deferring: bool = False
) -> list[torch.Tensor]:
    """The tensors that come back from a copy of the plan's sources as they are now; nothing is
    shared with them."""
    slots = arena.acquire(plan.layout.chunk_lengths)
    assert slots is not None
    job = CopyJob(plan, slots, on_done=lambda _: None)
    stager.begin(job, is_deferring=is_deferring)
    stager.fence(job)
    if job.error is not None:
        raise job.error
    chunks = [
        arena.tensor(slot)[:length]
        for slot, length in zip(slots, plan.layout.chunk_lengths, strict=True)
    ]
    stream = torch.zeros(max(1, len(chunks)) * CHUNK_BYTES, dtype=torch.uint8)
    for index, chunk in enumerate(chunks):
        stream[index * CHUNK_BYTES : index * CHUNK_BYTES + chunk.numel()] = chunk
    arena.release(slots)
    built = []
    for spec in plan.specs:
        holder = spec if spec.alias is None else plan.specs[spec.alias]
        (shard,) = holder.shards
        built.append(rebuild(stream[shard.start : shard.start + shard.length], holder))
    return built


class Gate:
    """Holds the stage thread before each copy until somebody waits on a fence, or the test opens
    it."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def hold(self) -> None:
        """Copies begun from now on wait."""
        self._open.clear()

    def open(self) -> None:
        """Copies go on."""
        self._open.set()

    @property
    def is_open(self) -> bool:
        """Whether copies go on."""
        return self._open.is_set()

    def pass_through(self) -> None:
        """Runs on the stage thread."""
        assert self._open.wait(60)


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate before every deferred copy: what is changed without a fence is then changed before
    it was copied, for certain."""
    gate = Gate()
    finish, fence = Stager._finish, Stager.fence

    def gated_finish(self: Stager, job: CopyJob) -> None:
        gate.pass_through()
        finish(self, job)

    def opening_fence(self: Stager, job: CopyJob) -> None:
        gate.open()
        fence(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(Stager, "_finish", gated_finish)
        patch.setattr(Stager, "fence", opening_fence)
        try:
            yield gate
        finally:
            gate.open()


def leaves_of(tree: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of nested containers with its path."""
    if isinstance(tree, Mapping):
        for key, child in tree.items():
            yield from leaves_of(child, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from leaves_of(child, f"{path}/{index}")
    else:
        yield path, tree


def tensors_in(tree: object) -> dict[str, torch.Tensor]:
    """Every tensor of nested containers by its path."""
    return {
        path.removeprefix("/"): leaf
        for path, leaf in leaves_of(tree)
        if isinstance(leaf, torch.Tensor)
    }


def live(
    model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], **others: object
) -> dict[str, object]:
    """Copies of everything that is live now by the path under which a state has it, read without
    any code of ours."""
    tree: dict[str, Any] = {"model": model.state_dict(), **others}
    for key, optimizer in optimizers.items():
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        tree[key] = {
            "state": {names[id(p)]: entry for p, entry in optimizer.state.items()},
            "param_groups": groups,
        }
    return {
        path: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves_of(tree)
    }


def differing(expected: Mapping[str, object], tree: object) -> list[str]:
    """Paths of what a loaded tree has otherwise than ``expected``, or not at all."""
    loaded = dict(leaves_of(tree))
    return [
        path
        for path, leaf in expected.items()
        if path not in loaded or not _is_same(leaf, loaded[path])
    ]


def _is_same(left: object, right: object) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and left == right
    if left.layout is not torch.strided:
        return right.layout is left.layout and torch.equal(left.to_dense(), right.to_dense())
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
