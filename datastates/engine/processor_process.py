"""``AgentProcessor``: a user's processor with ``where = "agent"``, which runs in a separate
process on the shared memory of the training.

The process makes another object of the processor's class. It gets the manifest and the slots of
each state, so no tensor is copied. The thread of the processors waits for it, so the order of
processors and states is the same as without it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from functools import reduce

import msgspec

from datastates import config
from datastates.agent.memory_process import Ended, MemoryProcess, Server
from datastates.errors import Unavailable
from datastates.lineage.states import State
from datastates.state.manifest import Manifest
from datastates.storage.arena import Arena
from datastates.storage.reading import HeldReader
from datastates.system.logs import reason_of

from .processors import CapturedState, HeldState, Processor

_START_S = 60.0


class _Process(msgspec.Struct, frozen=True, array_like=True):
    """A state to process. Without a manifest, the state has left memory. Without a state, the
    processor is closed."""

    state: State | None
    branch: str | None
    manifest: Manifest | None
    slots: tuple[int, ...]


class _Processed(msgspec.Struct, frozen=True, array_like=True):
    """What the processor raised, or nothing."""

    error: str


class AgentProcessor:
    """Calls a processor in another process; it satisfies ``Processor``. An error that the processor
    raises comes as a ``RuntimeError`` with its text."""

    def __init__(self, processor: config.Processor, arena: Arena) -> None:
        self.name, self.priority = processor.name, processor.priority
        self._arena, kind = arena, type(processor)
        words = (f"{kind.__module__}:{kind.__qualname__}", json.dumps(sys.path))
        self._process = MemoryProcess(__name__, words, arena, _Processed)

    def process(self, captured: CapturedState, /) -> None:
        """Wait until the other process has processed a state.

        :raises Unavailable: that process ended meanwhile, or cannot be started.
        """
        assert isinstance(captured, HeldState), "the engine made it"
        manifest, slots = None, tuple[int, ...]()
        if (reader := captured.reader) is not None:
            manifest = reader.manifest
            count = len(manifest.content.chunks)
            slots = tuple(self._arena.slot_of(reader.chunk(index)) for index in range(count))
        self._ask(_Process(captured.state, captured.branch, manifest, slots))

    def close(self) -> None:
        """Let the processor close, and end its process."""
        try:
            if self._process.is_ready(_START_S):
                self._ask(_Process(None, None, None, ()))
        finally:
            self._process.close()

    def _ask(self, request: _Process) -> None:
        if not self._process.is_ready(_START_S):
            raise Unavailable(
                f"the process of processor {self.name!r} does not start: see what it wrote to the"
                " terminal"
            )
        try:
            answer = self._process.ask(request, lambda answer: False)
        except Ended as exc:
            raise Unavailable(f"the process of processor {self.name!r} has ended") from exc
        if answer.error:
            raise RuntimeError(answer.error)


# --- the process ---


def main(arguments: Sequence[str]) -> None:
    """Process the states that the training sends. The further arguments are the class of the
    processor, and the path of imports."""
    server = Server(arguments)
    sys.path[:] = json.loads(server.words[1])
    module, name = server.words[0].split(":")
    processor: Processor = reduce(getattr, name.split("."), importlib.import_module(module))()  # type: ignore[operator]

    def process(request: _Process) -> _Processed:
        try:
            if request.state is None:
                processor.close()
            else:
                _call(processor, request.state, request, server.view)
        except BaseException as exc:  # a processor may raise anything
            return _Processed(reason_of(exc, repr))
        return _Processed("")

    server.run(_Process, process)


def _call(processor: Processor, state: State, request: _Process, view: memoryview) -> None:
    reader = None
    if (manifest := request.manifest) is not None:
        chunks = [
            view[slot : slot + chunk.length]
            for slot, chunk in zip(request.slots, manifest.content.chunks, strict=True)
        ]
        reader = HeldReader(manifest, chunks, source="the shared memory", verify=False)
    captured = HeldState(reader, lambda: state, request.branch)
    try:
        processor.process(captured)
    finally:
        captured.release()


if __name__ == "__main__":
    main(sys.argv[1:])
