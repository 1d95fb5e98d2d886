"""torch.distributed.checkpoint on a repository: ``dcp.save`` makes the next state of a branch,
``dcp.load`` reads any state.

    dcp.save(state, storage_writer=Writer(repo, branch="main"))
    dcp.load(state, storage_reader=Reader(repo, "main~2"))

A state holds what the plan of the save names, under the names of the state dict: nested as it was,
tensors as tensors, everything else as plain values. A save pickles nothing. For a load, DCP takes
values as pickles. These are made from values that were decoded here, and are never bytes of the
repository.

One process saves at a time. A save by several ranks is refused. Any number of processes may load,
each according to its own plan.
"""

from __future__ import annotations

import io
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from datastates import values
from datastates.errors import Conflict, InvalidInput, NotFound, Unsupported
from datastates.files.checkpoints import WRAPPED, unwrapped, wrapped
from datastates.lineage.query import names
from datastates.lineage.states import RefKind, State
from datastates.lineage.write import refs
from datastates.maintenance.core import Core, core_of
from datastates.maintenance.verify import suggest_sound_state
from datastates.state.adapters import Adapted
from datastates.state.encoding import decode_values
from datastates.state.generators import RngState
from datastates.state.geometry import dtype_of
from datastates.state.report import RestoreReport
from datastates.state.restore import restore_into
from datastates.state.skeleton import decode_skeleton
from datastates.state.tree import join, unflatten
from datastates.storage.reading import read_tree, specs_of
from datastates.system.interrupts import undisturbed
from datastates.training.saving import About, save_tree
from datastates.values import Value

from .saved import Address, address_of, is_address, opened, step_in

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

    from datastates.repository import Repository

EMPTY = "datastates: an empty dict"
"""Stands for an empty dict, which torch would drop."""


class Tree(dict[str, Any]):
    """The tree of a ``Stateful``. ``found`` is what ``Reader`` read in its place: the whole tree,
    including what the objects do not have yet.

    From ``Reader.read_metadata`` until the plan of the load is made, the tree shows no items.
    Otherwise torch would plan to load the names and sizes that the objects have now.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self.found: dict[str, Any] | None = None
        self._reader: weakref.ref[Reader] | None = None
        self._thread = threading.get_ident()
        _made.add(self)

    def items(self) -> Any:
        """The items of the tree, or none while a reader plans a load."""
        reader = None if self._reader is None else self._reader()
        return {}.items() if reader is not None and reader.is_planning else super().items()

    # it is one of a set of objects, and never a key
    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """A copy is a plain dict."""
        return dict, (), None, None, iter(super().items())


_made: weakref.WeakSet[Tree] = weakref.WeakSet()


class Stateful:
    """Objects that ``dcp.save`` and ``dcp.load`` take as one. They replace a class that calls
    ``get_state_dict``.

        from datastates.integrations.dcp import Reader, Stateful, Writer

        app = Stateful(model=model, optimizer=optimizer)
        dcp.save({"app": app}, storage_writer=Writer(repo, branch="saved"))
        dcp.load({"app": app}, storage_reader=Reader(repo, "saved"))

    Parameters of optimizers are keyed by their names, and the global random number generators are
    saved too, unless ``rng=False``. Loading by ``Reader`` makes the state of an optimizer that has
    not stepped yet, and changes nothing unless everything fits. ``report`` lists what was restored.
    Torch's own readers load tensor by tensor into what is there already, and refuse an optimizer
    that has not stepped.

    :param rng: whether the global random number generators are included.
    :param objects: anything that ``Repository.track`` takes.
    :raises InvalidInput: an object cannot be tracked.
    """

    def __init__(self, *, rng: bool = True, **objects: object) -> None:
        if not isinstance(rng, bool):
            raise InvalidInput(
                "the name 'rng' is taken by the random number generators, True or False: rename"
                " that object"
            )
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


# torch.distributed.checkpoint on a repository: ``dcp.save`` makes the next state of a branch,
# ``dcp.load`` reads any state.


Path = tuple[str | int, ...]

FLAT = "dcp.flat"
"""The attribute of a state whose plan did not look into containers: each name of the state dict
is one value."""

STREAMS = "dcp.streams"
"""The attribute that lists, one a line, the names of values that were streams of bytes
(``io.BytesIO``)."""


class _Place:
    """The repository of a reader or a writer, open or as a folder, and a branch or a revision in
    it."""

    def __init__(self, repo: Repository | str | os.PathLike[str] | None, name: str | State) -> None:
        self._core: Core | None = None
        self._folder: str | None = None
        self.name = name
        if isinstance(repo, str | os.PathLike):
            self._folder = values.path(repo, "repo")
            if is_address(repo):
                self.move(address_of(repo, "repo"))
        elif repo is not None:
            self._core = core_of(repo)

    @property
    def is_open(self) -> bool:
        """Whether it is a repository that the caller opened."""
        return self._core is not None

    def move(self, address: Address) -> None:
        """Move to another address."""
        if self._core is not None:
            raise InvalidInput(
                f"{address} names another repository than the one that was given: give one of them"
            )
        self._folder, self.name = address.folder, address.revision

    @contextmanager
    def core(self, *, must_exist: bool = False) -> Iterator[Core]:
        if self._core is not None:
            yield self._core
        elif self._folder is None:
            raise InvalidInput(
                "no repository was named: pass one, or a checkpoint_id such as"
                " 'datastates://runs/main'"
            )
        else:
            with opened(self._folder, must_exist=must_exist) as repo:
                yield repo.core

    def __getstate__(self) -> dict[str, object]:
        if self._core is not None:
            raise Unsupported(
                "an open repository does not go to another process: name its folder, as in"
                " Writer('runs', 'main')"
            )
        return self.__dict__


class Writer(StorageWriter):
    """A storage writer for ``dcp.save`` and ``dcp.async_save`` that makes the next state of a
    branch.

        from datastates.integrations.dcp import Writer

        dcp.save({"model": model}, storage_writer=Writer(repo, branch="saved", metrics={"loss":
        0.5}))

    ``dcp.save`` returns once the state has reached ``until``. Its uid is then in ``state``, and in
    what ``dcp.save`` returns (also as the result of ``dcp.async_save``):
    ``metadata.storage_meta.save_id``. With a ``checkpoint_id`` the state gets a tag of that name.
    A tag that exists moves. A ``checkpoint_id`` that begins with ``datastates://`` names repository
    and branch instead.

    :param repo: a repository that is open, or its folder, or an address such as
        ``datastates://runs/main``.
    :param branch: the branch that gets the next state.
    :param start: the state that the branch forks from, if it is new.
    :param step: None takes the number under ``"step"`` or ``"global_step"`` in the state dict.
        Without such a number it is the branch's step plus one.
    :param metrics: numbers to find the state by.
    :param message: a text for people.
    :param attributes: plain values to find the state by.
    :param until: the status to wait for: ``durable``, or ``captured``, after which the repository's
        policy decides when the state is written.
    """

    def __init__(
        self,
        repo: Repository | str | os.PathLike[str] | None = None,
        branch: str = "main",
        *,
        start: str | State | None = None,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        message: str | None = None,
        attributes: Mapping[str, Value] | None = None,
        until: str = "durable",
    ) -> None:
        self._place = _Place(repo, values.text(branch, "branch"))
        self._start = None if start is None else values.revision(start)
        self._step = None if step is None else values.step(step)
        self._metrics, self._attributes = values.metrics(metrics), values.attributes(attributes)
        self._message = None if message is None else values.message(message)
        self._until = values.text(until, "until")
        if self._until not in ("captured", "durable"):
            raise InvalidInput(f"until is {until!r}: give 'durable' or 'captured'")
        self._tag: str | None = None
        self._tree: dict[str, Any] = {}
        self._about: dict[str, Value] = {}
        self.state: State | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The tag of the next state, if it has one."""
        return self._tag

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the name of the next state; called before each save."""
        self._tag = None
        if checkpoint_id is not None and is_address(checkpoint_id):
            self._place.move(address_of(checkpoint_id, "checkpoint_id"))
        elif checkpoint_id is not None:
            self._tag = values.text(os.fspath(checkpoint_id), "checkpoint_id")
            refs.check_name(self._tag)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse ranks that do not communicate; there is nothing to set up."""
        if (
            not kwargs.get("use_collectives", True)
            and dist.is_initialized()
            and dist.get_world_size() > 1
        ):
            raise Unsupported(_SEVERAL.format(count=dist.get_world_size()))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, unchanged.

        :raises Unsupported: there are several.
        """
        if len(plans) > 1:
            raise Unsupported(_SEVERAL.format(count=len(plans)))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Look up what is to be saved; ``finish`` copies it."""
        mappings = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        self._tree, streams, results = {}, [], []
        for item in plan.items:
            name = item.index.fqn
            found = _resolved(item, planner)
            if isinstance(found, io.BytesIO):
                streams.append(name)
                found = found.getvalue()
            elif isinstance(found, str) and found == EMPTY:
                found = {}
            _put(self._tree, mappings.get(name, (name,)), found)
            results.append(
                WriteResult(
                    item.index, found.nbytes if isinstance(found, torch.Tensor) else 0, None
                )
            )
        self._about = ({} if mappings else {FLAT: True}) | (
            {STREAMS: "\n".join(streams)} if streams else {}
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make it a state, and wait until the state has reached ``until``."""
        found, self._tree = self._tree, {}
        tree, name = wrapped(found)
        about = About(
            step=step_in(found) if self._step is None else self._step,
            metrics=self._metrics,
            message=self._message,
            attributes={
                **self._attributes,
                **self._about,
                **({} if name is None else {WRAPPED: name}),
            },
        )
        with self._place.core() as core:
            branch = values.text(self._place.name, "branch")
            self.state = save_tree(
                core, tree, about, branch=branch, start=self._start, until=self._until
            )
            if self._tag is not None:
                _tag(core, self._tag, self.state)
        metadata.storage_data = self.state.uid
        metadata.storage_meta = StorageMeta(checkpoint_id=self._tag, save_id=self.state.uid)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_address(checkpoint_id)


class Reader(StorageReader):
    """A storage reader for ``dcp.load`` that reads any state, whether ``dcp.save``, a tracker or an
    import made it.

        from datastates.integrations.dcp import Reader

        found = {"model": model.state_dict()}
        dcp.load(found, storage_reader=Reader(repo, "main~2"))

    Everything that the plan requests is read and checked before the first write. A damaged state
    therefore changes nothing. A ``checkpoint_id`` selects another revision. One that begins
    with ``datastates://`` names the repository too. ``state`` is the last one read.

    :param repo: a repository that is open, or its folder, or an address such as
        ``datastates://runs/main~2``.
    :param rev: the state to read.
    """

    def __init__(
        self, repo: Repository | str | os.PathLike[str] | None = None, rev: str | State = "main"
    ) -> None:
        self._place = _Place(repo, rev if isinstance(rev, State) else values.revision(rev))
        self._revision: str | State | None = None
        self.is_planning = False
        self.state: State | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The revision that ``checkpoint_id`` selected, if any."""
        return None if self._revision is None else str(self._revision)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Set the state to read; called before each load."""
        self._revision, self.is_planning = None, False
        if checkpoint_id is not None and is_address(checkpoint_id):
            self._place.move(address_of(checkpoint_id, "checkpoint_id"))
        elif checkpoint_id is not None:
            self._revision = values.revision(os.fspath(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """The contents of the state, as a save of it would plan them; no tensor is read."""
        # Takes no keywords: otherwise torch would ask again for a rank's own metadata, and report
        # that error instead.
        with self._place.core(must_exist=True) as core:
            self.state = core.state(self._place.name if self._revision is None else self._revision)
            sketch = unwrapped(_sketch(core, self.state), self.state.attributes)
        metadata = _planned(sketch, is_flat=FLAT in self.state.attributes)[1]
        self.is_planning = True
        for tree in list(_made):
            if tree._thread == threading.get_ident():  # another thread may be saving
                tree._reader = weakref.ref(self)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id, save_id=self.state.uid
        )
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged; it is only made now."""
        self.is_planning = False
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged: each rank reads according to its own."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and check everything in the plan, then give it to the planner."""
        if self.state is None:
            self.read_metadata()
        state = self.state
        assert state is not None
        with self._place.core(must_exist=True) as core:
            for training in list(core.trainings):
                training.fence()
            self._read(core, state, plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, core: Core, state: State, plan: LoadPlan, planner: LoadPlanner) -> None:
        is_flat, streams = (
            FLAT in state.attributes,
            str(state.attributes.get(STREAMS, "")).split("\n"),
        )
        whole = _whole(planner)
        items = [item for item in plan.items if not _is_of(item.dest_index.fqn, whole, planner)]
        wanted = {item.storage_index.fqn for item in items}
        sketch = _sketch(core, state)
        plain = unwrapped(sketch, state.attributes)
        # a value alone gets its name back
        under = (
            state.attributes[WRAPPED] if plain is not sketch and isinstance(plain, dict) else None
        )
        paths = _paths(plain, wanted, is_flat=is_flat, under=under)
        paths |= {join("", name) for name in whole}
        with undisturbed(), suggest_sound_state(core, state), core.open_payload(state) as reader:
            tree: Any = unwrapped(
                read_tree(
                    reader, wants=lambda path: _is_under(path, paths), is_borrowing=not whole
                ),
                state.attributes,
            )
            found = _planned(tree, is_flat=is_flat)[0].state_dict
            for item in items:
                name = item.storage_index.fqn
                _hand_over(
                    item, io.BytesIO(found[name]) if name in streams else found[name], planner
                )
            for name, part in whole.items():
                part.found = _of(tree, name, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_address(checkpoint_id)


_SEVERAL = (
    "{count} ranks save together, and states of several ranks cannot be written this way yet:"
    " gather the state dict on one rank (get_model_state_dict(model,"
    " options=StateDictOptions(full_state_dict=True))), and save it there with no_dist=True"
)


# Saving


def _resolved(item: WriteItem, planner: SavePlanner) -> Any:
    """The tensor or the value to save under one name."""
    name = item.index.fqn
    if item.type is WriteItemType.BYTE_IO:
        return _value(item, planner)
    data = item.tensor_data
    if item.type is WriteItemType.SHARD and (data is None or data.chunk.sizes != data.size):
        raise Unsupported(
            f"{name} is a shard of a tensor, and shards cannot be written this way yet: save full"
            " tensors (get_model_state_dict(model,"
            " options=StateDictOptions(full_state_dict=True)))"
        )
    return planner.resolve_data(item).detach()


def _value(item: WriteItem, planner: SavePlanner) -> object:
    """A value that is not a tensor, as it is. A planner that looks up as torch's does returns it;
    what any other planner wrote is read safely.
    """
    kind = type(planner)
    if isinstance(planner, DefaultSavePlanner) and all(
        getattr(kind, name) is getattr(DefaultSavePlanner, name) for name in _LOOKING_UP
    ):
        return planner.lookup_object(item.index)
    written = planner.resolve_data(item)
    try:
        # a tensor is refused as well
        return torch.load(io.BytesIO(written.getvalue()), weights_only=True)  # type: ignore[union-attr]
    except Exception as exc:  # whatever it is, a user's planner wrote it
        raise Unsupported(
            f"{item.index.fqn}: {kind.__name__} writes it in a form that can be read only by"
            f" unpickling ({type(exc).__name__}): save it as plain containers, numbers and tensors"
        ) from exc


_LOOKING_UP = ("resolve_data", "lookup_object", "transform_object")


def _put(tree: dict[str, Any], path: Path, value: object) -> None:
    """Put a value where it stood before the plan flattened it; numbers are places in lists."""
    here: Any = tree
    for part, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(part, int):
            here.extend([None] * (part + 1 - len(here)))
        if following is None:
            here[part] = value
        elif (here[part] if isinstance(part, int) else here.get(part)) is None:
            here[part] = [] if isinstance(following, int) else {}
        here = here[part]


def _tag(core: Core, name: str, state: State) -> None:
    """Tag the state; a tag of that name is of an earlier save under it, and moves."""
    with core.writing() as session:
        try:
            found = names.get(session, name)
        except NotFound:
            refs.keep_tag(session, name, state.uid, message=None)
            return
        if found.kind is not RefKind.TAG:
            raise Conflict(
                f"checkpoint_id is {name!r}, which is a branch: the state was saved as"
                f" {state.uid[:10]}, and has no tag"
            )
        refs.move(session, name, state.uid, expected=found.state)


# Loading


def _sketch(core: Core, state: State) -> Any:
    """A state's tree with tensors that have no bytes: which tensor is where, and its shape and
    type."""
    with core.open_payload(state) as reader:
        content = reader.manifest.content
        tensors = [
            torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device="meta")
            for spec in specs_of(reader)
        ]
        return unflatten(
            decode_skeleton(content.skeleton),
            decode_values(content.values),
            tensors,
            is_sketch=True,
        )


def _planned(tree: Any, *, is_flat: bool) -> tuple[DefaultSavePlanner, Metadata]:
    """The planner that has looked at a tree as a save of it would, and its plan."""
    planner = DefaultSavePlanner(flatten_state_dict=not is_flat)
    planner.set_up_planner(
        tree if isinstance(tree, dict) else {"checkpoint": tree}, is_coordinator=True
    )
    metadata = planner.create_global_plan([planner.create_local_plan()])[1]
    return planner, metadata


def _paths(tree: Any, wanted: set[str], *, is_flat: bool, under: object) -> set[str]:
    """The paths in the state of the names of a plan."""
    mappings = (
        {name: (name,) for name in wanted} if is_flat else _planned(tree, is_flat=False)[0].mappings
    )
    top = join("", under) if under is not None else ""
    found = set()
    for name in wanted:
        path = top
        for part in mappings[name]:
            path = join(path, part)
        found.add(path)
    return found


def _is_under(path: str, wanted: set[str]) -> bool:
    while path not in wanted:
        path, slash, _ = path.rpartition("/")
        if not slash:
            return False
    return True


def _whole(planner: LoadPlanner) -> dict[str, Tree]:
    """The parts that a ``Stateful`` loads as a whole, by their names in the state dict."""
    given = getattr(planner, "original_state_dict", None)
    return (
        {name: part for name, part in given.items() if isinstance(part, Tree)}
        if isinstance(given, dict)
        else {}
    )


def _of(tree: Any, name: str, planner: LoadPlanner) -> Any:
    if isinstance(tree, dict) and name in tree:
        return tree[name]
    if getattr(planner, "allow_partial_load", False):
        return None
    raise InvalidInput(
        f"the state has no {name!r}: it has"
        f" {', '.join(map(str, tree)) if isinstance(tree, dict) else 'no names'}"
    )


def _is_of(fqn: str, whole: Mapping[str, Tree], planner: LoadPlanner) -> bool:
    """Whether a name of a plan belongs to such a part."""
    return bool(whole) and getattr(planner, "mappings", {}).get(fqn, (fqn,))[0] in whole


def _hand_over(item: ReadItem, found: Any, planner: LoadPlanner) -> None:
    if item.type is LoadItemType.BYTE_IO:
        data = io.BytesIO()
        torch.save(found, data)
        data.seek(0)
        planner.load_bytes(item, data)
        return
    target = planner.resolve_tensor(item).detach()
    source = _narrowed(found, item.storage_offsets, item.lengths)
    if target.shape != source.shape:
        raise InvalidInput(
            f"{item.dest_index.fqn} is {tuple(source.shape)} in the state and {tuple(target.shape)}"
            " here: give one that fits"
        )
    target.copy_(source)
    planner.commit_tensor(item, target)


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if tensor.shape[dim] != length:
            tensor = tensor.narrow(dim, offset, length)
    return tensor
