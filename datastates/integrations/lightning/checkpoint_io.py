"""A CheckpointIO: Lightning's checkpoints become states of a branch, and ``ckpt_path`` may name any
state.

The checkpoint file is a pointer to the state, one line of text. Lightning finds, links, lists and
removes these files as usual.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from datastates import values
from datastates.errors import Conflict, InvalidInput, NotFound
from datastates.integrations.saved import SCHEME, address_of, is_address, opened
from datastates.lineage.states import State
from datastates.maintenance.core import core_of
from datastates.maintenance.location import locate
from datastates.repository import Repository
from datastates.repository import open as open_repository
from datastates.training.saving import About, save_tree


def _name() -> str:
    """The package whose Trainer this process uses, as far as its imports show;
    ``lightning.pytorch`` if they do not."""
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        return "pytorch_lightning"
    if find_spec("lightning") is not None:
        return "lightning.pytorch"
    if find_spec("pytorch_lightning") is not None:
        return "pytorch_lightning"
    raise ModuleNotFoundError(
        "datastates.integrations.lightning needs Lightning: pip install 'datastates[lightning]'"
    )


NAME = _name()

_pytorch: Any = import_module(NAME)
_callbacks: Any = import_module(f"{NAME}.callbacks")
_io: Any = import_module(f"{NAME}.plugins.io")

Callback: Any = _pytorch.Callback
LightningModule: Any = _pytorch.LightningModule
EarlyStopping: Any = _callbacks.EarlyStopping
StochasticWeightAveraging: Any = _callbacks.StochasticWeightAveraging
Timer: Any = _callbacks.Timer
WeightAveraging: Any = _callbacks.WeightAveraging
DDPStrategy: Any = import_module(f"{NAME}.strategies").DDPStrategy
CheckpointIO: Any = _io.CheckpointIO
TorchCheckpointIO: Any = _io.TorchCheckpointIO
version: str = _pytorch.__version__


_logger = logging.getLogger(__name__)

_OWN = "datastates:"
"""The prefix of ``datastates:main~3``: a revision in the repository that the CheckpointIO has."""

_LONGEST = 8192
_PATH = "lightning.path"


# Lightning is not looked at by mypy
class DatastatesCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Checkpoints as states: ``model`` is the state dict, ``lightning`` all other entries. A
    checkpoint is not pickled.

        trainer = L.Trainer(plugins=[DatastatesCheckpointIO("runs")],
        callbacks=[ModelCheckpoint(monitor="val_loss")]) trainer.fit(model,
        ckpt_path="datastates://runs/main~3")

    A checkpoint is durable when ``save_checkpoint`` returns, and has a tag, so that nothing drops
    its bytes; removing it removes the tag.
    """

    def __init__(self, repo: Repository | str | os.PathLike[str], *, branch: str = "main") -> None:
        """Make a CheckpointIO for one Trainer.

        :param repo: the repository, or its folder.
        :param branch: the branch that gets the checkpoints as states.
        """
        check_repository(repo)
        self._given, self.branch = repo, values.text(branch, "branch")
        self._opened: Repository | None = None
        self._loaded: str | None = None

    def is_of(self, repo: Repository | str | os.PathLike[str]) -> bool:
        """Whether ``repo`` is the repository of this CheckpointIO."""
        return _folder(self._given) == _folder(repo)

    @property
    def repo(self) -> Repository:
        """The repository; it is opened when it is first needed."""
        if isinstance(self._given, Repository):
            return self._given
        if self._opened is None:
            self._opened = open_repository(self._given)
        return self._opened

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: object = None,
    ) -> None:
        """Make a checkpoint the next state of the branch, and write a pointer to it at ``path``.

        :raises Unsupported: the checkpoint holds a value that no state can, such as an object among
            the hyper-parameters; names its path.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options mean nothing to a DatastatesCheckpointIO: leave them out"
            )
        self._go_back()
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        state = save_tree(
            core_of(self.repo),
            {"model": checkpoint["state_dict"], "lightning": rest},
            About(
                step=checkpoint.get("global_step"),
                metrics=_metrics(checkpoint),
                attributes={"epoch": checkpoint.get("epoch", 0), _PATH: os.fspath(path)},
            ),
            branch=self.branch,
            start=self._loaded,
        )
        self._loaded = None
        name = _tag_of(path)
        if any(ref.name == name for ref in self.repo.refs()):
            self.repo.delete_ref(name)
        self.repo.tag(name, state, message=os.fspath(path))
        _write_pointer(path, f"{SCHEME}{self.repo.core.location}/{state.uid}")

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: object = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """A state as a checkpoint, whether it was saved here or captured by a callback. Lightning's
        own files are read as usual.

        :raises NotFound: there is no such repository, or no such revision in it; names both, and
            what is there.
        """
        with _found(path, self.repo) as found:
            if found is None:
                options = {} if map_location is None else {"map_location": map_location}
                plain: dict[str, Any] = TorchCheckpointIO().load_checkpoint(
                    path, weights_only=weights_only, **options
                )
                return plain
            repo, state = found
            if repo is self.repo:
                self._loaded = state.uid
            tree = repo.load(
                state, device=map_location if isinstance(map_location, str | torch.device) else None
            )
            return checkpoint_of(tree, state)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the pointer and the tag.

        The state stays in the lineage, and its bytes stay as long as retention keeps them."""
        for ref in self.repo.refs():
            if ref.name == _tag_of(path):
                self.repo.delete_ref(ref.name)
        TorchCheckpointIO().remove_checkpoint(path)

    def teardown(self) -> None:
        """Close the repository if it was opened here."""
        self._loaded = None
        found, self._opened = self._opened, None
        if found is not None:
            found.close()

    def _go_back(self) -> None:
        """Move the branch back to where the training was resumed from."""
        head = head_of(self.repo, self.branch)
        if head is None or self._loaded is None:
            return
        state, self._loaded = self._loaded, None
        if state == head:
            return
        if all(each.uid != state for each in self.repo.ancestors(head)):
            raise Conflict(
                f"branch {self.branch!r} exists and does not descend from {state[:10]}, from which"
                " the training resumes: pass another branch= to DatastatesCheckpointIO"
            )
        _logger.warning(
            "branch %s goes back to %s, from which the training resumes; its reflog has %s",
            self.branch,
            state[:10],
            head[:10],
        )
        self.repo.move(self.branch, state, expected=head)


def check_repository(repo: object) -> None:
    """Raise unless ``repo`` is a repository or a path."""
    if not isinstance(repo, Repository | str | os.PathLike):
        raise InvalidInput(
            f"repo is {values.shown(repo)}: give what datastates.open returned, or the folder of a"
            " repository"
        )


def head_of(repo: Repository, branch: str) -> str | None:
    """The uid of the head of a branch; None if there is no such branch."""
    return next((ref.state for ref in repo.refs() if ref.name == branch), None)


def _folder(repo: Repository | str | os.PathLike[str]) -> str:
    return str(repo.core.location if isinstance(repo, Repository) else locate(repo))


def state_at(path: object, repo: Repository) -> State | None:
    """The state of ``repo`` that a ``ckpt_path`` means; None if that is a file, or a state of
    another repository.

    :raises NotFound: there is no such state.
    """
    with _found(path, repo) as found:
        return found[1] if found is not None and found[0] is repo else None


def is_checkpoint(state: State) -> bool:
    """Whether the state was a checkpoint of Lightning's, rather than a loop's own objects."""
    return _PATH in state.attributes


def checkpoint_of(tree: Mapping[str, Any], state: State) -> dict[str, Any]:
    """The tree of a state as a checkpoint in Lightning's form."""
    if "model" not in tree:
        raise InvalidInput(
            f"state {state.uid[:10]} has no model, but {', '.join(tree)}: Lightning resumes from"
            " what is tracked as model"
        )
    checkpoint = {
        "epoch": 0,
        "global_step": state.step,
        "pytorch-lightning_version": version,
        "state_dict": tree["model"],
    }
    if "lightning" in tree:
        return {**checkpoint, **tree["lightning"]}
    if "trainer" not in tree:
        return checkpoint  # Lightning takes it as weights only
    fit = tree["trainer"]
    own = {"rng": tree["rng"], "data": tree["data"]} if "rng" in tree and "data" in tree else {}
    return {
        **checkpoint,
        "epoch": fit["loops"]["epoch_progress"]["current"]["completed"],
        "loops": {
            "fit_loop": fit["loops"],
            "validate_loop": {},
            "test_loop": {},
            "predict_loop": {},
        },
        "callbacks": {**fit["callbacks"], "DatastatesCallback": own},
        "optimizer_states": [_numbered(each) for each in _several(tree.get("optimizer", []))],
        "lr_schedulers": _several(tree.get("scheduler", [])),
        **fit["precision"],
        **fit["datamodule"],
        **fit["added"],
    }


@contextmanager
def _found(path: object, own: Repository) -> Iterator[tuple[Repository, State] | None]:
    """The repository and the state that a path names; None for a file of Lightning's."""
    # an address is a path
    text = _pointed(path) if not is_address(path) else os.fsdecode(path)  # type: ignore[arg-type]
    if text is None and isinstance(path, str) and path.startswith(_OWN):
        yield own, _state(own, path.removeprefix(_OWN))
    elif text is None:
        yield None
    else:
        address = address_of(text, "ckpt_path")
        if locate(address.folder).root == own.core.location.root:
            yield own, _state(own, address.revision)
        else:
            with opened(address.folder, must_exist=True) as other:
                yield other, _state(other, address.revision)


def _state(repo: Repository, revision: str) -> State:
    try:
        return repo.state(revision)
    except NotFound as exc:
        names = ", ".join(ref.name for ref in repo.refs()) or "none yet"
        raise NotFound(
            f"ckpt_path: {repo.core.location} has no {revision!r} ({exc}). Its branches and tags"
            f" are: {names}"
        ) from exc


def _pointed(path: object) -> str | None:
    """The address in a pointer file."""
    try:
        with open(path, "rb") as file:  # type: ignore[call-overload]  # what is no path raises
            head = file.read(_LONGEST)
    except (OSError, TypeError, ValueError):
        return None
    return head.decode().strip() if head.startswith(SCHEME.encode()) else None


def _write_pointer(path: str | os.PathLike[str], text: str) -> None:
    """Write the pointer whole or not at all. The state is durable by now."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(text + "\n")
    os.replace(draft, target)


def _tag_of(path: str | os.PathLike[str]) -> str:
    """The tag of a checkpoint: its name, and a digest of its whole path."""
    target = Path(path).absolute()
    plain = (
        "".join(
            letter if letter.isalnum() or letter in "-_." else "-" for letter in target.stem
        ).strip("-.")
        or "checkpoint"
    )
    return f"lightning/{plain}-{hashlib.blake2b(os.fsencode(target), digest_size=3).hexdigest()}"


def _metrics(checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """The values that callbacks monitor, such as the ``val_loss`` of a ModelCheckpoint, at this
    moment."""
    found = {}
    for state in checkpoint.get("callbacks", {}).values():
        if (
            isinstance(state, dict)
            and isinstance(state.get("monitor"), str)
            and state.get("current_score") is not None
        ):
            found[state["monitor"]] = float(state["current_score"])
    return found


def _several(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _numbered(stored: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters numbered as torch does: by their order in the groups."""
    groups = stored["param_groups"]
    numbers = {
        name: number
        for number, name in enumerate(name for group in groups for name in group["params"])
    }
    return {
        "state": {numbers.get(name, name): entry for name, entry in stored["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }
