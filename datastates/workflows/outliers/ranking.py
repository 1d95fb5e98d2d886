"""Every sample ranked by how far it stands out, with the sources of the ranking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .cost import OutlierCost
from .scores import Scores
from .sources import Skipped, Source
from .subset_scores import SubsetScore
from .suspects import Selection

__all__ = ["Ranking", "SampleScore", "known"]


@dataclass(frozen=True, slots=True)
class SampleScore:
    """One sample; ``rank`` 1 is the most suspicious. None means not known. The other fields are as in ``Scores``."""

    index: int
    rank: int
    score: float | None
    strength: float | None
    lineage_loss: float | None
    held_out_loss: float | None
    spread: float | None
    sources: int
    is_suspect: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ranking:
    """All samples, ranked. ``sources`` are the branches that were read, ``skipped`` those that could not be."""

    scores: Scores
    selection: Selection
    subsets: tuple[SubsetScore, ...]
    sources: tuple[Source, ...]
    skipped: tuple[Skipped, ...]
    cost: OutlierCost

    def __len__(self) -> int:
        return len(self.scores.score)

    def samples(self) -> Iterator[SampleScore]:
        """Every sample, the most suspicious first."""
        scores, suspects = self.scores, self.selection.suspects
        for rank, index in enumerate(scores.order().tolist(), 1):
            yield SampleScore(
                index=index,
                rank=rank,
                score=known(scores.score[index]),
                strength=known(scores.strength[index]),
                lineage_loss=known(scores.lineage[index]),
                held_out_loss=known(scores.held_out[index]),
                spread=known(scores.spread[index]),
                sources=int(scores.sources[index]),
                is_suspect=bool(suspects[index]),
            )

    def suspects(self) -> list[SampleScore]:
        """The samples that the noise rate selects, the most suspicious first."""
        count = int(self.selection.suspects.sum())
        return [sample for sample, _ in zip(self.samples(), range(count), strict=False)]

    def top(self, most: int) -> list[SampleScore]:
        """The ``most`` highest ranked samples, suspects or not."""
        return [sample for sample, _ in zip(self.samples(), range(most), strict=False)]


def known(value: Any) -> Any:
    """None for what is not finite; a plain number for a NumPy number."""
    if not isinstance(value, float):
        return value
    return float(value) if math.isfinite(value) else None
