"""What the engine needs of a module: a name, a priority, ``process(item)`` and ``close()``.

The engine's own steps and the user's modules have one shape. Each step has an item of its own kind, and a thread that calls it:

    priority  step       item     thread
    100       digest     Work     datastates-engine     the digest of each chunk, of the content, of the state
    200       dedup      Work     datastates-engine     into memory; chunks that an ancestor holds give their slots back
    300       record     Work     datastates-engine     into the lineage, a round of captures in one transaction
    400       write      Writing  datastates-writer     to disk; of the states that are to be durable
    1000      the user's Item     datastates-modules    once the state is recorded

What is durable goes onto the user's tiers besides, on a thread of its own (``copies``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from datastates.content.manifest import Manifest
from datastates.lineage.states import State

__all__ = ["Item", "Module", "Priority", "Step"]

Kind = TypeVar("Kind", contravariant=True)


class Priority(IntEnum):
    """The priorities of the engine's own steps; a smaller number goes first."""

    DIGEST = 100
    DEDUP = 200
    RECORD = 300
    WRITE = 400
    OWN = 1000


class Step(Protocol[Kind]):
    """One step of the pipeline. One thread at a time calls it, in the order of the captures."""

    name: str
    priority: int

    def process(self, item: Kind, /) -> None:
        """Do this step for one state. What it raises ends the way of this state, and of no other."""


class Item(Protocol):
    """One state, as a user's module gets it. Its bytes stay in memory until ``process`` returns, and can not be read after that."""

    @property
    def state(self) -> State:
        """What the lineage knows of the state, with its ``status`` so far. It may be kept."""

    @property
    def branch(self) -> str | None:
        """The branch that the state was captured on; None for a merge into no branch. It may be kept."""

    @property
    def manifest(self) -> Manifest:
        """What the state consists of. It may be kept.

        :raises Unavailable: the state left memory before it was recorded, because the lineage was away for long.
        """

    def tree(self, only: str | Sequence[str] | None = None) -> Any:
        """Nested containers of tensors, as ``Repository.load`` returns them: copies that may be kept and changed.

        ``only`` takes names or patterns of paths (``"model"``); what is not asked for is ``None`` in the tree.

        :raises Unavailable: as ``manifest``.
        """

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the tensors, chunk by chunk in the manifest's order, where they lie: only to be read, and not to be kept.

        :raises Unavailable: as ``manifest``.
        """


class Module(Protocol):
    """A step of your own, which is called with every state that this process captures or merges. Give it to ``Config(modules=[…])``.

    Subclass this for the defaults, or bring the four names. All calls come from one thread, ``datastates-modules``, one at a time: a module
    needs no lock of its own. Each module sees the states in the order in which they were recorded; of one state the module with the
    smaller ``priority`` is called first.
    """

    name: str
    """How messages name it; unique among the modules of a repository."""

    priority: int = Priority.OWN
    """Its place among the modules of a repository. All of them come after the engine's own steps up to ``record``."""

    def process(self, item: Item, /) -> None:
        """Do something with a recorded state.

        Captures go on meanwhile, and what waits for the module stays in memory: a module that is slower than the captures brings
        ``back_pressure`` about in the end. What it raises is kept as ``Capture.error`` (a ``ModuleFailed``), and said once in the log;
        the state, the other modules and the training are not touched by it. Do not capture or close the repository here.
        """

    def close(self) -> None:
        """The repository is closed: the last state was processed. Called once, on the same thread."""
        return  # a subclass may do without it
