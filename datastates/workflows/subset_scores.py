"""Which subset matters: the scores of its samples, put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from datastates.errors import InvalidInput

from .scores import Scores
from .suspects import Selection

__all__ = ["SubsetScore", "score_subsets"]


@dataclass(frozen=True, slots=True)
class SubsetScore:
    """``score`` is the mean of the samples' percentiles (50 says: like all the data), ``error`` its standard error over them."""

    name: str
    samples: int
    score: float
    error: float
    suspects: int


def score_subsets(scores: Scores, selection: Selection, subsets: Mapping[str, Sequence[int]]) -> tuple[SubsetScore, ...]:
    """The subsets, the most suspicious first; one without a sample that is scored is left out.

    :raises InvalidInput: a subset has a sample that is not there.
    """
    found = []
    for name, indices in subsets.items():
        rows = np.unique(np.asarray(indices, dtype=np.int64))
        if rows.size and not (rows[0] >= 0 and rows[-1] < len(scores.score)):
            wrong = rows[0] if rows[0] < 0 else rows[-1]
            raise InvalidInput(f"subset {name!r} has sample {wrong}, but count is {len(scores.score)}: pass the count of all samples")
        values = scores.score[rows]
        values = values[~np.isnan(values)]
        if values.size:
            error = float(values.std(ddof=1)) / math.sqrt(values.size) if values.size > 1 else math.nan
            found.append(SubsetScore(name, int(values.size), float(values.mean()), error, int(selection.suspects[rows].sum())))
    return tuple(sorted(found, key=lambda subset: -subset.score))
