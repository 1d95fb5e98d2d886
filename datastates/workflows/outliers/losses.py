"""The loss of each sample under states of the lineage: states are restored one after another into one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from datastates.errors import Corrupt, InvalidInput, Unavailable
from datastates.lineage.states import State
from datastates.repository import Repository

from .scores import Floats, Rows, Spread, Tally
from .sources import Skipped, Source

__all__ = ["LossOf", "Losses", "Meter", "measure"]

LossOf = Callable[[nn.Module, Tensor], Tensor]
"""A function that takes the model and int64 indices ``[n]`` on the CPU, and returns the loss of each sample, ``[n]``."""


@dataclass(slots=True)
class Losses:
    """The measured losses, as sums only, so that memory does not grow with the number of states. ``sources`` are those that were read."""

    count: int
    lineage: Tally = field(init=False)
    held_out: Tally = field(init=False)
    spread: Spread = field(init=False)
    sources: list[Source] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    passes: float = 0.0

    def __post_init__(self) -> None:
        self.lineage, self.held_out, self.spread = Tally(self.count), Tally(self.count), Spread(self.count)


class Meter:
    """Measures losses under states. ``name`` is the name under which the model was tracked; ``batch`` samples go through it at a time."""

    def __init__(self, repo: Repository, model: nn.Module, loss: LossOf, *, name: str = "model", batch: int = 1024) -> None:
        if batch < 1:
            raise InvalidInput(f"batch is {batch}: it counts the samples that go through the model at a time, from 1")
        self._repo, self._model, self._loss, self._name, self._batch = repo, model, loss, name, batch

    def restore(self, state: State) -> None:
        """Restore the state into the model.

        :raises Unavailable: the state's bytes are gone.
        :raises Corrupt: the bytes are damaged.
        :raises InvalidInput: the model does not fit the state.
        """
        self._repo.restore(state.uid, {self._name: self._model}, only=self._name)

    def losses(self, rows: Rows) -> Floats:
        """One loss for each sample, in evaluation mode and without gradients.

        :raises InvalidInput: the loss is not one number for each sample.
        """
        indices = torch.from_numpy(rows)
        with _evaluating(self._model):
            return np.concatenate([self._part(part) for part in indices.split(self._batch)])

    def _part(self, indices: Tensor) -> Floats:
        found: object = self._loss(self._model, indices)  # what the user's function actually returned
        if not isinstance(found, Tensor) or tuple(found.shape) != (len(indices),):
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise InvalidInput(
                f"loss(model, indices) gave {what} for {len(indices)} indices: give one loss a sample, with reduction='none'"
            )
        plain: Floats = found.detach().to("cpu", torch.float64).numpy()
        return plain


def measure(meter: Meter, sources: Sequence[Source], count: int, on_progress: Callable[[int, int], None]) -> Losses:
    """Read every source. Skips a state that cannot be restored, or under which most losses are not finite. Any other loss that is not
    finite counts as infinite.

    :raises Unavailable: not one state could be read.
    """
    found, done, total = Losses(count), 0, sum(len(source.states) for source in sources)
    for source in sources:
        rows = np.arange(count, dtype=np.int64) if source.held_out is None else source.held_out
        tally, read = Tally(count), []
        for state in source.states:
            losses = _read(meter, source, state, rows, found)
            if losses is not None:
                (found.lineage if source.held_out is None else found.held_out).add(rows, losses)
                tally.add(rows, losses)
                read.append(state)
            done += 1
            on_progress(done, total)
        if read:
            found.spread.add(tally.mean())
            found.sources.append(replace(source, states=tuple(read)))
    if not found.sources:
        raise Unavailable(
            f"none of {total} states could be read: {'; '.join(skipped.reason for skipped in found.skipped[:3]) or 'there are none'}"
        )
    return found


def _read(meter: Meter, source: Source, state: State, rows: Rows, found: Losses) -> Floats | None:
    try:
        meter.restore(state)
    except (Corrupt, InvalidInput, Unavailable) as exc:
        found.skipped.append(Skipped(source.name, str(exc), state.uid, state.step))
        return None
    losses = meter.losses(rows)
    found.passes += len(rows) / found.count
    wrong = ~np.isfinite(losses)
    if 2 * wrong.sum() > len(rows):
        found.skipped.append(Skipped(source.name, f"{wrong.sum()} of its {len(rows)} losses are not finite", state.uid, state.step))
        return None
    return np.where(wrong, np.inf, losses)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every part of the model into evaluation mode, and afterwards back into the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
