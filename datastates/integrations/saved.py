"""``save`` and ``load``, shaped like ``torch.save`` and ``torch.load``: a file becomes a state of a branch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from datastates import values
from datastates.errors import InvalidInput, Unsupported
from datastates.export.wrapping import WRAPPED, unwrapped, wrapped
from datastates.lineage.states import State, Value
from datastates.objects.adapters import parts
from datastates.opening.core import core_of
from datastates.tracking.saving import About, save_tree
from datastates.upkeep.loading import device_of
from datastates.upkeep.loading import load as load_tree

from .address import address_of
from .kept import opened

if TYPE_CHECKING:
    import torch

    from datastates.repository import Repository

__all__ = ["load", "save", "step_in"]

_STEPS = ("step", "global_step")


def save(
    obj: object,
    to: str | os.PathLike[str],
    *,
    repo: Repository | None = None,
    start: str | State | None = None,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    message: str | None = None,
    attributes: Mapping[str, Value] | None = None,
) -> str:
    """Make an object the next state of a branch, as ``torch.save`` writes it to a file; returns its uid once the state is on disk.

        uid = datastates.save({"model": model.state_dict(), "epoch": 3}, "runs/main")

    The object is of the kind that ``torch.save`` usually gets: containers, tensors, arrays, numbers, texts. Nothing is pickled. The
    repository is opened (and made if it does not exist), and closed some seconds after the last call.

    :param obj: the object; pass a module, an optimizer or the like as its ``state_dict()``.
    :param to: the repository's folder and the branch, such as ``"runs/main"``; with ``repo`` the branch alone.
    :param repo: a repository that is open.
    :param start: the state that the branch forks from, if it is new.
    :param step: None: the number under ``"step"`` or ``"global_step"`` in the object; without one, the branch's step plus one.
    :param metrics: numbers to find the state by.
    :param message: a text for people.
    :param attributes: plain values to find the state by.
    :raises InvalidInput: a part of the object cannot be stored; names its path. Nothing was saved.
    :raises Conflict: the name is that of a tag, or the branch does not descend from ``start``.
    """
    _refuse_live(obj)
    tree, name = wrapped(obj)
    with _at(to, repo) as (found, branch):
        about = About(
            step=step_in(obj) if step is None else step,
            metrics=values.metrics(metrics),
            message=message,
            attributes={**values.attributes(attributes), **({} if name is None else {WRAPPED: name})},
        )
        begin = None if start is None else values.revision(start)
        state = save_tree(core_of(found), tree, about, branch=values.text(branch, "the branch"), start=begin)
    return state.uid


def load(
    rev: str | State | os.PathLike[str],
    *,
    map_location: torch.device | str | None = None,
    repo: Repository | None = None,
) -> Any:
    """The object that was saved, or the tree of any other state, as ``torch.load`` reads it from a file. Each byte is checked.

        datastates.save({"model": model.state_dict()}, "saved/main")
        model.load_state_dict(datastates.load("saved/main")["model"])

    Nothing is unpickled, whatever the repository holds. Containers have the types that they had. Tensors are plain ones that require no
    gradient, on the CPU unless ``map_location`` says otherwise, with the dtype and the strides that they had; two names that shared one
    memory are one tensor again.

    :raises NotFound: there is no such repository, or no such revision in it.
    :raises Corrupt: a stored byte is wrong; names the tensor or value that it belongs to, and the nearest state that verifies.
    :raises Unavailable: the state's bytes are gone; names the nearest ancestor that has its bytes.
    """
    device = values.optional(device_of)(map_location, "map_location")
    with _at(rev, repo, must_exist=True) as (found, revision):
        core = core_of(found)
        state = core.state(revision)
        return unwrapped(load_tree(core, state, device=device), state.attributes)


def step_in(obj: object) -> int | None:
    """The step that an object records: a whole number under a usual name, which may be NumPy's or a tensor."""
    if not isinstance(obj, dict):
        return None
    for name in _STEPS:
        with suppress(InvalidInput):
            return values.step(obj.get(name))
    return None


@contextmanager
def _at(where: object, repo: object, *, must_exist: bool = False) -> Iterator[tuple[object, Any]]:
    """The repository and the name in it, given together or separately."""
    if repo is not None:
        core_of(repo)
        yield repo, where if isinstance(where, State) else values.text(where, "the name in the repository")
    elif isinstance(where, State):
        raise InvalidInput(f"state {where.uid[:10]} is of a repository that is not named: give repo= too")
    else:
        address = address_of(where)
        with opened(address.folder, must_exist=must_exist) as found:
            yield found, address.revision


def _refuse_live(obj: object) -> None:
    """Refuse an object that has a state of its own: it would be refused later, with advice that does not fit here."""
    for path, found in parts({"": obj}) if isinstance(obj, dict | list | tuple | deque) else [("the object", obj)]:
        if callable(values.attribute(found, "state_dict")):
            where = path.removeprefix("%/").removeprefix("%") or "the object"
            raise Unsupported(f"{where} is a {type(found).__name__}: save its state_dict(), and load that into another one")
