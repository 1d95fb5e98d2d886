"""Live objects as one part of what torch.distributed.checkpoint saves and loads: named, and restored, as by a tracker."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from datastates.errors import InvalidInput
from datastates.objects.adapters import Adapted
from datastates.objects.report import RestoreReport
from datastates.objects.restore import restore_into
from datastates.objects.rng import RngState

__all__ = ["EMPTY", "Stateful", "Tree", "leave_to"]

EMPTY = "datastates: an empty dict"
"""Stands for an empty dict, which torch would drop."""


class Plans(Protocol):
    """A reader, which may be having a load planned."""

    is_planning: bool


class Tree(dict[str, Any]):
    """The tree of a ``Stateful``. ``found`` is what ``Reader`` read in its place: the whole tree, including what the objects do not have
    yet.

    While ``Reader`` has a load planned, the tree shows no items: torch would ask for the names and sizes that are there now.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self.found: dict[str, Any] | None = None
        self._reader: weakref.ref[Plans] | None = None
        self._thread = threading.get_ident()
        _made.add(self)

    def items(self) -> Any:
        """The items of the tree, unless they are left to the reader."""
        reader = None if self._reader is None else self._reader()
        return {}.items() if reader is not None and reader.is_planning else super().items()

    def __hash__(self) -> int:  # type: ignore[override]  # it is one of a set of objects, and never a key
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """A copy is a plain dict."""
        return dict, (), None, None, iter(super().items())


_made: weakref.WeakSet[Tree] = weakref.WeakSet()


def leave_to(reader: Plans) -> None:
    """Leave the trees that torch has asked for, on this thread, to this reader for as long as it has a load planned."""
    for tree in list(_made):
        if tree._thread == threading.get_ident():  # another thread may be saving
            tree._reader = weakref.ref(reader)


class Stateful:
    """Objects that ``dcp.save`` and ``dcp.load`` take as one, instead of your own class with ``get_state_dict`` and the like.

        from datastates.integrations.dcp import Reader, Stateful, Writer

        app = Stateful(model=model, optimizer=optimizer)
        dcp.save({"app": app}, storage_writer=Writer(repo, branch="saved"))
        dcp.load({"app": app}, storage_reader=Reader(repo, "saved"))

    Parameters of optimizers are keyed by their names, and the global random number generators are saved too, unless ``rng=False``. Loading
    by ``Reader`` makes the state of an optimizer that has not stepped yet, and changes nothing unless everything fits. ``report`` says what
    was restored. Torch's own readers load tensor by tensor into what is there already, and refuse an optimizer that has not stepped.

    :param rng: whether the global random number generators are included.
    :param objects: anything that ``Repository.track`` takes.
    :raises InvalidInput: an object cannot be tracked.
    """

    def __init__(self, *, rng: bool = True, **objects: object) -> None:
        if not isinstance(rng, bool):
            raise InvalidInput("the name 'rng' is taken by the random number generators, True or False: rename that object")
        self._objects = {**objects, **({"rng": RngState()} if rng else {})}
        self._adapted = Adapted(self._objects)
        self.report: RestoreReport | None = None

    def state_dict(self) -> dict[str, Any]:
        """The tree of the objects: live tensors, not copies."""
        return Tree(_marked(self._adapted.tree()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a tree into the objects.

        :raises InvalidInput: the tree does not fit; if ``Reader`` read it, nothing was changed.
        """
        found = state_dict.found if isinstance(state_dict, Tree) else None
        self.report = restore_into(self._objects, _unmarked(state_dict if found is None else found))


def _marked(tree: Any) -> Any:
    if type(tree) in (dict, OrderedDict):
        return {key: _marked(value) for key, value in tree.items()} or EMPTY
    return tree


def _unmarked(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _unmarked(value) for key, value in tree.items()}
    return {} if isinstance(tree, str) and tree == EMPTY else tree
