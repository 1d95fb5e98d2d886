"""Which metrics people look at first: those that were asked for, the loss, validation metrics, then the rest by prefix. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["by_relevance", "relevant_keys"]

_WORD = re.compile(r"[^\W_]+")
_CHECKED = {"val": 0, "valid": 0, "validation": 0, "eval": 0, "dev": 0, "test": 1}
"""The first words of metrics that are measured on data that is not trained on."""


def by_relevance(keys: Iterable[str], first: Sequence[str] = ()) -> list[str]:
    """Keys in the order in which they are shown; ``first`` are those that a request named, in its order."""
    asked = {key: place for place, key in reversed(list(enumerate(first)))}
    return sorted(set(keys), key=lambda key: (asked.get(key, len(first)), *_rank(key)))


def relevant_keys(values: Iterable[Mapping[str, object]], most: int, first: Sequence[str] = ()) -> list[str]:
    """The ``most`` keys that get columns in a table, by relevance; among equally relevant keys, those that most values have.

    All keys of ``first`` get one.
    """
    counts = Counter(key for each in values for key in each)
    rest = sorted(counts.keys() - set(first), key=lambda key: (_rank(key)[0], -counts[key], _rank(key)))
    return by_relevance([*first, *rest[: max(0, most - len(set(first)))]], first)


def _rank(key: str) -> tuple[int, int, str, int, str]:
    """The rank of a key: ``loss``; ``val_loss`` and the rest of ``val``; other losses; then the rest, each group by its prefix."""
    words = [word.lower() for word in _WORD.findall(key)] or [""]
    is_loss = int(words[-1] != "loss")
    group = 0 if words == ["loss"] else 1 if words[0] in _CHECKED and len(words) > 1 else 2 if words[-1] == "loss" else 3
    return group, _CHECKED.get(words[0], 0) if group == 1 else 0, words[0], is_loss, key
