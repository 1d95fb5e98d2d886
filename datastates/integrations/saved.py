"""``save`` and ``load``, shaped like ``torch.save`` and ``torch.load``: a file becomes a state
of a branch."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datastates import values
from datastates.errors import InvalidInput, NotFound, Unsupported
from datastates.files.checkpoints import WRAPPED, unwrapped, wrapped
from datastates.lineage.states import State
from datastates.maintenance.core import core_of
from datastates.maintenance.loading import device_of
from datastates.maintenance.loading import load as load_tree
from datastates.maintenance.location import DATABASE, locate
from datastates.repository import Repository
from datastates.repository import open as open_repository
from datastates.state.adapters import parts
from datastates.system.interrupts import Mutex
from datastates.training.saving import About, save_tree
from datastates.values import Value

if TYPE_CHECKING:
    import torch

SCHEME = "datastates://"
_BRANCH = "main"


@dataclass(frozen=True, slots=True)
class Address:
    """The folder of a repository, and a revision in it."""

    folder: str
    revision: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.folder}/{self.revision}"


def is_address(value: object) -> bool:
    """Whether a value is a text or a path that begins with ``datastates://``."""
    return isinstance(value, str | os.PathLike) and os.fsdecode(value).startswith(SCHEME)


def address_of(value: object, what: str = "the address") -> Address:
    """The address that a text or a path means, with or without ``datastates://``.

    The folder is the first part of the path that has a repository. If there is none yet, it ends
    before the last slash. A path that is a repository means its branch ``main``.

    :raises InvalidInput: the value is not an address.
    """
    text = values.path(value, what).removeprefix(SCHEME)
    if "://" in text:
        raise InvalidInput(
            f"{what} is {text!r}: name a folder and a revision, such as 'runs/main', or open the"
            " repository by datastates.open"
        )
    parts = text.split("/")
    for end in range(1, len(parts)):
        folder, revision = "/".join(parts[:end]), "/".join(parts[end:])
        if revision and _is_repository(folder):
            return Address(folder, revision)
    if _is_repository(text):
        return Address(text.rstrip("/"), _BRANCH)
    folder, _, revision = text.rpartition("/")
    if not folder or not revision:
        raise InvalidInput(
            f"{what} is {text!r}: name the folder of a repository and a revision in it, such as"
            " 'runs/main'"
        )
    return Address(folder, revision)


def _is_repository(folder: str) -> bool:
    return bool(folder) and (Path(folder).expanduser() / DATABASE).is_file()


# Repositories that are opened by their folder for one call, and stay open for the next calls of a
# loop.


IDLE_S = 10.0
"""How long after its last use, in seconds, a repository is closed and gives its memory back."""

_Key = tuple[str, int, int]


@dataclass(eq=False)
class _OpenRepository:
    """An open repository and its users."""

    repository: Repository
    users: int = 0
    timer: threading.Timer | None = field(default=None, repr=False)


_lock = Mutex()
_kept: dict[_Key, _OpenRepository] = {}
_owner = os.getpid()


@contextmanager
def opened(folder: str, *, must_exist: bool = False) -> Iterator[Repository]:
    """The repository of a folder, open for as long as the block lasts; made if it does not exist.

    :raises NotFound: it does not exist, with ``must_exist``.
    """
    location = locate(folder, must_exist=must_exist)
    root = location.root
    assert root is not None, "an address names a folder"
    with _lock:
        kept = _take(root)
    try:
        yield kept.repository
    finally:
        with _lock:
            kept.users -= 1
            if not kept.users:
                kept.timer = threading.Timer(IDLE_S, close_unused, [kept])
                kept.timer.name = "idle-repository"
                kept.timer.daemon = True
                kept.timer.start()


def close_unused(only: _OpenRepository | None = None) -> None:
    """Close every repository that is not in use, or ``only`` this one."""
    with _lock:
        for key, kept in list(_kept.items()):
            if not kept.users and only in (None, kept):
                del _kept[key]
                if kept.timer is not None:
                    kept.timer.cancel()
                kept.repository.close()


def _take(root: Path) -> _OpenRepository:
    global _owner
    if _owner != os.getpid():  # the parent owns what it opened
        _owner = os.getpid()
        _kept.clear()
    kept = None if (key := _key(root)) is None else _kept.get(key)
    if kept is None:
        repository = open_repository(root)
        key = _key(root)
        if key is None:
            raise NotFound(f"{root} is gone: it was removed while it was opened")
        kept = _kept[key] = _OpenRepository(repository)
    kept.users += 1
    if kept.timer is not None:
        kept.timer.cancel()
        kept.timer = None
    return kept


def _key(root: Path) -> _Key | None:
    """The identity of a repository, so that another one that took its place is not mistaken for
    it."""
    try:
        found = (root / DATABASE).stat()
    except OSError:
        return None
    return str(root), found.st_dev, found.st_ino


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
    """Make an object the next state of a branch, as ``torch.save`` writes it to a file; returns its
    uid once the state is on disk.

        uid = datastates.save({"model": model.state_dict(), "epoch": 3}, "runs/main")

    The object is of the kind that ``torch.save`` usually gets: containers, tensors, arrays,
    numbers, texts. It is not pickled. The repository is opened (and made if it does not exist),
    and closed some seconds after the last call.

    :param obj: the object; pass a module, an optimizer or the like as its ``state_dict()``.
    :param to: the repository's folder and the branch, such as ``"runs/main"``; with ``repo`` the
        branch alone.
    :param repo: a repository that is open.
    :param start: the state that the branch forks from, if it is new.
    :param step: None takes the number under ``"step"`` or ``"global_step"`` in the object. Without
        such a number it is the branch's step plus one.
    :param metrics: numbers to find the state by.
    :param message: a text for people.
    :param attributes: plain values to find the state by.
    :raises InvalidInput: a part of the object cannot be stored; names its path. No state was saved.
    :raises Conflict: the name belongs to a tag, or the branch does not descend from ``start``.
    """
    _refuse_live(obj)
    tree, name = wrapped(obj)
    with _at(to, repo) as (found, branch):
        about = About(
            step=step_in(obj) if step is None else step,
            metrics=values.metrics(metrics),
            message=message,
            attributes={
                **values.attributes(attributes),
                **({} if name is None else {WRAPPED: name}),
            },
        )
        begin = None if start is None else values.revision(start)
        state = save_tree(
            core_of(found), tree, about, branch=values.text(branch, "the branch"), start=begin
        )
    return state.uid


def load(
    rev: str | State | os.PathLike[str],
    *,
    map_location: torch.device | str | None = None,
    repo: Repository | None = None,
) -> Any:
    """The object that was saved, or the tree of any other state, as ``torch.load`` reads it from a
    file. Each byte is checked.

    ``rev`` is a path or a URL, which ends with the revision: ``runs/main~1`` is ``main~1`` of the
    repository in ``runs``. The repository is opened and closed. ``Repository.load`` takes only the
    revision, because its repository is open. It maps tensors from disk and can read parts.

        datastates.save({"model": model.state_dict()}, "saved/main")
        model.load_state_dict(datastates.load("saved/main")["model"])

    Data of the repository is never unpickled. Containers have their original types. Tensors are
    plain, require no gradient, and have their original dtype and strides. They are on the CPU,
    unless ``map_location`` is given. Two names that shared one memory are one tensor again.

    :raises NotFound: there is no such repository, or no such revision in it.
    :raises Corrupt: a stored byte is wrong; names the tensor or value that it belongs to, and the
        nearest state that verifies.
    :raises Unavailable: the state's bytes are gone; names the nearest ancestor that has its bytes.
    """
    device = values.optional(device_of)(map_location, "map_location")
    with _at(rev, repo, must_exist=True) as (found, revision):
        core = core_of(found)
        state = core.state(revision)
        return unwrapped(load_tree(core, state, device=device), state.attributes)


def step_in(obj: object) -> int | None:
    """The step that an object records: a whole number under a usual name, which may be NumPy's
    or a tensor."""
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
        yield (
            repo,
            (
                where
                if isinstance(where, State)
                else values.text(where, "the name in the repository")
            ),
        )
    elif isinstance(where, State):
        raise InvalidInput(
            f"state {where.uid[:10]} is of a repository that is not named: give repo= too"
        )
    else:
        address = address_of(where)
        with opened(address.folder, must_exist=must_exist) as found:
            yield found, address.revision


def _refuse_live(obj: object) -> None:
    """Refuse an object that has a ``state_dict``. ``track`` would refuse it too, with advice that
    does not fit here."""
    for path, found in (
        parts({"": obj}) if isinstance(obj, dict | list | tuple | deque) else [("the object", obj)]
    ):
        if callable(values.attribute(found, "state_dict")):
            where = path.removeprefix("%/").removeprefix("%") or "the object"
            raise Unsupported(
                f"{where} is a {type(found).__name__}: save its state_dict(), and load that into"
                " another one"
            )
