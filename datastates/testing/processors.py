"""The suite that every processor must pass, whatever it is for.

A test class inherits the suite and gives it a ``processor``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import UTC, datetime

import msgspec
import pytest
import torch

from datastates.config import Config
from datastates.engine.processors import Processor, Processors, ProcessorSwitch
from datastates.errors import ProcessorFailed
from datastates.lineage.states import State, Status
from datastates.state.digest import chunk_digest, state_digest
from datastates.state.encoding import encode_values
from datastates.state.tree import flatten
from datastates.storage.arena import Arena
from datastates.storage.memory import MemoryTier
from datastates.storage.tier import Payload

from .states import payload

_ARENA_BYTES = 64 << 20


def of(uid: str, tree: dict[str, object]) -> Payload:
    """A state of this tree, laid out as by a capture: each tensor begins a chunk."""
    flat = flatten(tree)
    made = payload(uid, *({leaf.path: leaf.tensor} for leaf in flat.tensors))
    content = msgspec.structs.replace(
        made.manifest.content,
        skeleton=msgspec.Raw(flat.skeleton.encoded),
        values=msgspec.Raw(encode_values(flat.values)),
    )
    manifest = msgspec.structs.replace(
        made.manifest, digest=state_digest(content, ()), content=content
    )
    return Payload(manifest, made.chunks)


class ProcessorSuite(ABC):
    """The suite for processors. Inherit it as ``class TestMyProcessor(ProcessorSuite)`` with a
    fixture ``processor``: a new one that has seen no state.
    """

    @pytest.fixture
    @abstractmethod
    def processor(self) -> Processor:
        """A new processor."""

    @pytest.fixture
    def memory(self) -> MemoryTier:
        """The memory that holds the states."""
        return MemoryTier(Arena(_ARENA_BYTES))

    def test_a_configuration_takes_it(self, processor: Processor) -> None:
        assert Config(processors=[processor]).processors == (processor,)
        processor.close()  # there is no repository to close it

    def test_it_may_be_closed_before_it_has_seen_anything(
        self, processor: Processor, memory: MemoryTier
    ) -> None:
        assert _run(processor, memory, []) == []

    @pytest.mark.parametrize(
        "state",
        [
            of("empty", {}),
            of("values", {"epoch": 3, "name": "a", "nested": [{"x": None}]}),
            of("half", {"model": {"w": torch.ones(3, 5, dtype=torch.bfloat16)}}),
            of(
                "whole",
                {
                    "model": {
                        "count": torch.tensor(7),
                        "mask": torch.ones(4, dtype=torch.bool),
                        "none": torch.empty(0),
                    }
                },
            ),
            of(
                "plain",
                {
                    "model": {"w": torch.arange(12.0).reshape(3, 4)},
                    "optimizer": {"lr": 0.1, "state": {"w": torch.zeros(3, 4)}},
                },
            ),
        ],
        ids=lambda state: state.manifest.origin.uid,
    )
    def test_it_takes_states_of_any_content(
        self, processor: Processor, memory: MemoryTier, state: Payload
    ) -> None:
        assert _run(processor, memory, [state]) == []

    def test_it_takes_a_state_of_no_branch_without_metrics_and_one_with_both(
        self, processor: Processor, memory: MemoryTier
    ) -> None:
        states = [
            of("one", {"model": {"w": torch.zeros(2)}}),
            of("two", {"model": {"w": torch.ones(2)}}),
        ]
        assert (
            _run(
                processor,
                memory,
                states,
                branches=[None, "main"],
                metrics=[{}, {"loss": 0.5, "é": 1.0}],
            )
            == []
        )

    def test_it_changes_no_byte_of_a_state(self, processor: Processor, memory: MemoryTier) -> None:
        state = of("kept", {"model": {"w": torch.arange(1000.0)}})
        _run(processor, memory, [state])
        with memory.open("kept") as reader:
            assert [chunk_digest(reader.chunk(0))] == [
                chunk.digest for chunk in state.manifest.content.chunks
            ]

    def test_it_keeps_no_state_in_memory(self, processor: Processor, memory: MemoryTier) -> None:
        _run(
            processor,
            memory,
            [
                of(f"state{index}", {"model": {"w": torch.full((100,), float(index))}})
                for index in range(4)
            ],
        )
        for uid in list(memory.uids()):
            memory.remove(uid)
        assert memory.slots_held == 0

    def test_a_state_whose_bytes_are_gone_does_not_end_it(
        self, processor: Processor, memory: MemoryTier
    ) -> None:
        gone, here = (
            of("gone", {"model": {"w": torch.zeros(3)}}),
            of("here", {"model": {"w": torch.ones(3)}}),
        )
        failed = _run(processor, memory, [gone, here], without=("gone",))
        assert [error for error in failed if "on state here " in str(error)] == []


def _run(
    processor: Processor,
    memory: MemoryTier,
    states: list[Payload],
    *,
    branches: list[str | None] | None = None,
    metrics: list[dict[str, float]] | None = None,
    without: tuple[str, ...] = (),
) -> list[ProcessorFailed]:
    """Hand states to the processor as the engine does, then close it; returns the errors that it
    raised. States in ``without`` are not in memory.
    """
    failed: list[ProcessorFailed] = []
    own = Processors([ProcessorSwitch(processor)], memory, lambda: None)
    for index, state in enumerate(states):
        if state.manifest.origin.uid not in without:
            memory.put(state)
        known = _state(state, metrics[index] if metrics is not None else {"loss": 1.0})
        # mypy takes the default for a parameter
        own.put(
            lambda known=known: known,  # type: ignore[misc]
            "main" if branches is None else branches[index],
            failed.append,
        )
    own.close()
    own.join()
    return failed


def _state(state: Payload, metrics: dict[str, float]) -> State:
    origin = state.manifest.origin
    return State(
        uid=origin.uid,
        digest=state.manifest.digest,
        step=1,
        micro_step=0,
        metrics=metrics,
        attributes={},
        message=None,
        created_at=datetime.now(UTC),
        status=Status.CAPTURED,
        parents=(),
        edges=(),
        run=None,
        generation=0,
        bytes_total=sum(view.nbytes for view in state.chunks),
        bytes_new=0,
    )
