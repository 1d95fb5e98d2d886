"""The samples that ``outliers`` scores, and the outputs of a model for each.

``Indexed`` calls the user's loss by index. ``Batches`` reads a loader once for each state. Both
keep only numbers for each sample, so memory does not depend on the size of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from datastates import values
from datastates.errors import InvalidInput

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

LossOf = Callable[[nn.Module, Tensor], Tensor]
"""A function that takes the model and int64 indices ``[n]`` on the CPU, and returns the loss of
each sample, ``[n]``."""


ANOTHER = " of another class"
_CHANGED = (
    "data changed between two passes: {}; give a loader without shuffle, whose length and order"
    " stay the same"
)


class Task(StrEnum):
    """The task of the model. Samples that are checked for ``unknown inputs`` need no targets."""

    CLASSIFICATION = "classification"
    REGRESSION = "regression"
    UNKNOWN_INPUTS = "unknown inputs"


class Part(NamedTuple):
    """Some samples under one state.

    ``numbers`` has one number for each sample: ``loss``, and for classes ``margin``,
    ``normalized margin`` and ``predicted``. Margins are negated: a higher one is more suspicious.
    The keys that end in ``ANOTHER`` are the same if the sample had one other class. ``features`` is
    the input of the last linear layer, ``[n, d]``.
    """

    rows: Rows
    numbers: dict[str, Floats]
    features: Tensor


class Indexed:
    """Samples that the user's own loss finds by index."""

    task: Task | None = None
    targets: Floats | None = None

    def __init__(self, loss: LossOf, count: int, batch: int) -> None:
        self._loss, self.count, self._batch = loss, count, batch

    def parts(self, model: nn.Module, rows: Rows) -> Iterator[Part]:
        """``rows`` (ascending) in batches.

        :raises InvalidInput: the loss is not one number for each sample.
        """
        for indices in torch.from_numpy(rows).split(self._batch):
            with _watching(model) as seen:
                # what the user's function actually returned
                found: object = self._loss(model, indices)
            if not isinstance(found, Tensor) or tuple(found.shape) != (len(indices),):
                what = (
                    f"a tensor of shape {tuple(found.shape)}"
                    if isinstance(found, Tensor)
                    else f"a {type(found).__name__}"
                )
                raise InvalidInput(
                    f"loss(model, indices) gave {what} for {len(indices)} indices: give one loss a"
                    " sample, with reduction='none'"
                )
            yield Part(indices.numpy(), {"loss": _plain(found)}, _features(seen, found))


class Batches:
    """Samples of a loader, by their place in it. A batch is ``(inputs, targets)``, or ``inputs``
    alone for unknown inputs.

    One pass at the start reads the targets; each later pass must give the same ones.

    :raises InvalidInput: the loader cannot be read again, or its batches cannot be used.
    """

    def __init__(
        self, data: Iterable[Any], task: Task | None, classes: Sequence[str] | None
    ) -> None:
        if iter(data) is data:
            raise InvalidInput(
                "data is an iterator, which is read only once: give a DataLoader without shuffle,"
                " or a list of batches"
            )
        self._data, self._classes, self.task = data, classes, task
        parts = [self._divide(batch)[1] for batch in data]
        self.count = sum(map(len, parts))
        if not self.count:
            raise InvalidInput("data has no samples: give a loader that has at least one batch")
        self.targets = np.concatenate(parts)
        is_class = self.targets.ndim == 1 and not (self.targets % 1).any()
        if task is None:
            self.task = Task.CLASSIFICATION if is_class else Task.REGRESSION
        if task is Task.CLASSIFICATION and not is_class:
            raise InvalidInput(
                "the targets are not whole numbers, so they are no classes: pass task='regression'"
            )

    def parts(self, model: nn.Module, rows: Rows) -> Iterator[Part]:
        """``rows`` (ascending) in batches of the loader.

        :raises InvalidInput: the loader gave other samples than before, or the model's outputs do
            not fit the targets.
        """
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        wanted, begin = np.zeros(self.count, dtype=np.bool_), 0
        wanted[rows] = True
        for batch in self._data:
            inputs, targets = self._divide(batch)
            place = slice(begin, begin := begin + len(targets))
            if not np.array_equal(self.targets[place], targets, equal_nan=True):
                raise InvalidInput(_CHANGED.format(f"samples {place.start} to {place.stop - 1}"))
            at = np.flatnonzero(wanted[place])
            if at.size:
                with _watching(model) as seen:
                    taken = _part(inputs, torch.from_numpy(at), device)
                    found = model(**taken) if isinstance(taken, Mapping) else model(taken)
                outputs: object = getattr(found, "logits", found)
                if not isinstance(outputs, Tensor) or outputs.shape[:1] != at.shape:
                    raise InvalidInput(
                        f"the model gave {values.shown(outputs)} for {at.size} samples: it must"
                        " give one row of outputs a sample"
                    )
                outputs = outputs.detach().to("cpu", torch.float64).reshape(len(at), -1)
                numbers = self._numbers(outputs, targets[at], at + place.start)
                yield Part(at + place.start, numbers, _features(seen, outputs))
        if begin != self.count:
            raise InvalidInput(_CHANGED.format(f"{begin} samples instead of {self.count}"))

    def _divide(self, batch: Any) -> tuple[Any, Floats]:
        """The inputs of a batch, and its targets as numbers, ``[n]`` or ``[n, k]``."""
        if self.task is Task.UNKNOWN_INPUTS:
            # the targets are not used, and a sum shows whether the samples come in the same order
            inputs = batch[0] if isinstance(batch, list | tuple) and len(batch) == 2 else batch
            return inputs, _sums(inputs)
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise InvalidInput(
                f"data gave {values.shown(batch)}: a batch is (inputs, targets), or inputs alone"
                f" with task='{Task.UNKNOWN_INPUTS}'"
            )
        inputs, targets = batch[0], self._targets(batch[1])
        if len(targets) != _length(inputs):
            raise InvalidInput(
                f"a batch has {_length(inputs)} inputs and {len(targets)} targets: give one target"
                " a sample"
            )
        return inputs, targets

    def _targets(self, given: Any) -> Floats:
        found = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
        if found.dtype.kind not in "biuf":
            places = {str(name): place for place, name in enumerate(self._classes or ())}
            texts = [str(each) for each in found.ravel()]
            if unknown := next((each for each in texts if each not in places), None):
                raise InvalidInput(
                    f"target {values.shown(unknown)} is no class: pass classes=, the classes in the"
                    " order of the model's outputs"
                )
            found = np.array([places[each] for each in texts])
        found = found.astype(np.float64)
        if found.ndim == 2 and found.shape[1] == 1:
            return found[:, 0]
        is_one_hot = (found.ndim == 2 and np.isin(found, (0, 1)).all()) and (
            found.sum(axis=1) == 1
        ).all()
        return found.argmax(axis=1).astype(np.float64) if is_one_hot else found

    def _numbers(self, outputs: Tensor, targets: Floats, rows: Rows) -> dict[str, Floats]:
        if self.task is Task.UNKNOWN_INPUTS:
            return {"loss": np.zeros(len(rows))}
        if self.task is Task.REGRESSION:
            wanted = torch.from_numpy(targets).reshape(len(rows), -1)
            if wanted.shape != outputs.shape:
                raise InvalidInput(
                    f"the model gives {outputs.shape[1]} outputs a sample for {wanted.shape[1]}"
                    " targets: give as many, or pass loss= and count="
                )
            return {"loss": _plain((outputs - wanted).square().mean(dim=1))}
        if outputs.shape[1] == 1:  # the logit of the second of two classes
            outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
        classes = outputs.shape[1]
        given = torch.from_numpy(targets.astype(np.int64))
        if not 0 <= int(given.min()) <= int(given.max()) < classes:
            raise InvalidInput(
                f"the targets go from {int(given.min())} to {int(given.max())}, but the model has"
                f" {classes} outputs: number the classes from 0, or pass task='regression'"
            )
        # each sample has the same other class in all passes
        shift = torch.from_numpy(rows * 2654435761 // 65536) % (classes - 1)
        other = (given + 1 + shift) % classes
        chances = outputs.softmax(dim=1)
        found = {"predicted": outputs.argmax(dim=1).numpy().astype(np.float64)}
        for ending, label in (("", given), (ANOTHER, other)):
            found["loss" + ending] = _plain(cross_entropy(outputs, label, reduction="none"))
            found["margin" + ending] = _margins(outputs, label)
            found["normalized margin" + ending] = _margins(chances, label)
        return found


def _margins(outputs: Tensor, label: Tensor) -> Floats:
    """How far the largest other output exceeds the output of the label, ``[n]``."""
    column = label[:, None]
    return _plain(
        outputs.scatter(1, column, -torch.inf).amax(dim=1) - outputs.gather(1, column)[:, 0]
    )


def _plain(found: Tensor) -> Floats:
    plain: Floats = found.detach().to("cpu", torch.float64).numpy()
    return plain


def _length(inputs: Any) -> int:
    return len(next(iter(inputs.values()))) if isinstance(inputs, Mapping) else len(inputs)


def _part(inputs: Any, at: Tensor, device: torch.device) -> Any:
    """Some samples of a batch, on the model's device. A list has one element for each sample."""
    if isinstance(inputs, Mapping):
        return {name: _part(each, at, device) for name, each in inputs.items()}
    if isinstance(inputs, Tensor):
        return inputs[at.to(inputs.device)].to(device)
    return [inputs[place] for place in at.tolist()]


def _sums(inputs: Any) -> Floats:
    """A number for each sample that shows whether the samples come in the same order."""
    if isinstance(inputs, Mapping):
        inputs = next(iter(inputs.values()))
    if not isinstance(inputs, Tensor):
        return np.zeros(len(inputs))
    return _plain(inputs.double().reshape(len(inputs), -1).sum(dim=1))


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[Tensor]]:
    """A list whose last tensor is the input of the last linear layer that ran."""
    seen: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen[:] = [each for each in given[:1] if isinstance(each, Tensor)]

    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    hooks = [each.register_forward_pre_hook(note) for each in linear]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _features(seen: list[Tensor], outputs: Tensor) -> Tensor:
    """``[n, d]``: the mean over all dimensions but the first and the last. The outputs replace
    a model without a linear layer."""
    found = seen[-1] if seen and len(seen[-1]) == len(outputs) else outputs
    found = found.detach().to("cpu", torch.float64)
    return found.reshape(len(found), -1, found.shape[-1] if found.ndim > 1 else 1).mean(dim=1)
