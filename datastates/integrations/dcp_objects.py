"""Live objects as one part of what torch.distributed.checkpoint saves and loads: named as a tracker names them, put back as it would."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from datastates.errors import InvalidInput
from datastates.objects.adapters import Adapted
from datastates.objects.report import RestoreReport
from datastates.objects.restore import restore_into
from datastates.objects.rng import RngState

__all__ = ["Stateful", "Tree"]

_logger = logging.getLogger(__name__)


class Tree(dict[str, Any]):
    """The tree of a ``Stateful``. ``found`` is what ``Reader`` read in its place: whole, also what the objects do not have yet."""

    found: dict[str, Any] | None = None

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """A copy is a plain dict."""
        return dict, (), None, None, _pairs(self)


class Stateful:
    """Objects that ``dcp.save`` and ``dcp.load`` take as one, in place of a class of your own with ``get_state_dict`` and the like.

        from datastates.integrations.dcp import Reader, Stateful, Writer

        app = Stateful(model=model, optimizer=optimizer)
        dcp.save({"app": app}, storage_writer=Writer(repo, branch="saved"))
        dcp.load({"app": app}, storage_reader=Reader(repo, "saved"))

    Parameters of optimizers go by their names, and the global random number generators are saved too, unless ``rng=False``. Loading by
    ``Reader`` makes the state of an optimizer that has not stepped yet, and changes nothing unless everything fits. ``report`` says what
    was restored. Other readers of torch load the values of what is there already, tensor by tensor.

    :param rng: whether the global random number generators belong to it.
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
        return Tree(self._adapted.tree())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a tree into the objects.

        :raises InvalidInput: it does not fit; with what ``Reader`` read, nothing was changed.
        """
        found = state_dict.found if isinstance(state_dict, Tree) else None
        if found is None:
            self._say_what_is_left_out()
        self.report = restore_into(self._objects, state_dict if found is None else found)

    def _say_what_is_left_out(self) -> None:
        fresh = [name for name, each in self._objects.items() if isinstance(each, Optimizer) and not each.state]
        if fresh:
            _logger.warning(
                "%s has no state yet, and only what is there is loaded by a reader of torch: load with datastates' Reader, or after a step",
                ", ".join(fresh),
            )


def _pairs(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return iter(tree.items())
