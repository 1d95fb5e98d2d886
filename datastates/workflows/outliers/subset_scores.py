"""Which subset matters: the scores of its samples, combined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from datastates.errors import InvalidInput

from .scores import Scores
from .suspects import Selection

__all__ = ["SubsetScore", "check_subsets", "score_subsets"]


@dataclass(frozen=True, slots=True)
class SubsetScore:
    """The score of one subset. ``score`` is the mean of the samples' percentiles (50: like all the data), ``error`` its standard error."""

    name: str
    samples: int
    score: float
    error: float
    suspects: int


def check_subsets(subsets: Mapping[str, Sequence[int]], count: int) -> None:
    """Raise unless every sample of the subsets is one of ``count``.

    :raises InvalidInput: a sample is not.
    """
    for name, indices in subsets.items():
        wrong = next((index for index in indices if not 0 <= index < count), None)
        if wrong is not None:
            raise InvalidInput(f"subset {name!r} has sample {wrong}, but count is {count}: pass the count of all samples")


def score_subsets(scores: Scores, selection: Selection, subsets: Mapping[str, Sequence[int]]) -> tuple[SubsetScore, ...]:
    """The subsets, the most suspicious first; a subset without a scored sample is left out.

    :raises InvalidInput: a subset has a sample that does not exist.
    """
    check_subsets(subsets, len(scores.score))
    found = []
    for name, indices in subsets.items():
        rows = np.unique(np.asarray(indices, dtype=np.int64))
        values = scores.score[rows]
        values = values[~np.isnan(values)]
        if values.size:
            error = float(values.std(ddof=1)) / math.sqrt(values.size) if values.size > 1 else math.nan
            found.append(SubsetScore(name, int(values.size), float(values.mean()), error, int(selection.suspects[rows].sum())))
    return tuple(sorted(found, key=lambda subset: -subset.score))
