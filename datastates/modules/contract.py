"""What the engine needs of a module: a name, a priority, ``process(item)`` and ``close()``.

The engine's own steps and the user's modules have the same shape. Each step has its own kind of item, and a thread that calls it:

    priority  step       item     thread
    100       digest     Work     datastates-engine     the digest of each chunk, of the content, of the state
    200       dedup      Work     datastates-engine     into memory; chunks that memory holds give their slots back
    300       record     Work     datastates-engine     into the lineage, a round of captures in one transaction
    400       write      Writing  datastates-writer     to disk; only states that become durable
    1000      the user's Item     datastates-modules    once the state is recorded

Durable states are also put onto the user's tiers, on a separate thread (``copies``).
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
    """The priorities of the engine's own steps; smaller numbers go first."""

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
        """Do this step for one state. An error that it raises ends this state's way through the pipeline, and no other's."""


class Item(Protocol):
    """One state, as a user's module gets it. Its bytes stay in memory until ``process`` returns, and cannot be read after that."""

    @property
    def state(self) -> State:
        """What the lineage knows of the state, with its ``status`` so far. You may keep it."""

    @property
    def branch(self) -> str | None:
        """The branch on which the state was captured; None for a merge into no branch. You may keep it."""

    @property
    def manifest(self) -> Manifest:
        """What the state consists of. You may keep it.

        :raises Unavailable: the state left memory before it was recorded, because the lineage was away for long.
        """

    def tree(self, only: str | Sequence[str] | None = None) -> Any:
        """Nested containers of tensors, as ``Repository.load`` returns them: copies that you may keep and change.

        ``only`` takes names or patterns of paths (``"model"``); parts that are not asked for are ``None`` in the tree.

        :raises Unavailable: as ``manifest``.
        """

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the tensors where they lie, chunk by chunk in the manifest's order: read them only, and do not keep them.

        :raises Unavailable: as ``manifest``.
        """


class Module(Protocol):
    """A step of your own that is called with every state that this process captures or merges. Give it to ``Config(modules=[…])``.

    Subclass this for the defaults, or provide the four names. One thread, ``datastates-modules``, makes all calls, one at a time, so a
    module needs no lock of its own. Each module sees the states in the order in which they were recorded. For each state, modules with
    smaller ``priority`` are called first.
    """

    name: str
    """The name of the module in messages; unique among the modules of a repository."""

    priority: int = Priority.OWN
    """Its place among the modules of a repository. All of them come after the engine's own steps up to ``record``."""

    def process(self, item: Item, /) -> None:
        """Do something with a recorded state.

        Captures go on meanwhile, and states that wait for the module stay in memory: a module that is slower than the captures eventually
        causes ``back_pressure``. An error that it raises is kept as ``Capture.error`` (a ``ModuleFailed``), and logged once; it does not
        affect the state, the other modules or the training. Do not capture or close the repository here.
        """

    def close(self) -> None:
        """Called once, on the same thread, when the repository is closed and the last state was processed."""
        return  # a subclass may do without it
