"""Whether a metric is better when it is smaller or larger, judged by its name, since nobody states it."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

__all__ = ["Direction", "direction_of", "named_direction"]


class Direction(StrEnum):
    """Which of two values is the better one: the smaller or the larger."""

    MIN = "min"
    MAX = "max"


_FALLING = {"loss", "nll", "perplexity", "ppl", "error", "errors", "err", "mse", "rmse", "mae", "wer", "cer", "fid", "cost", "regret"}
_RISING = {"acc", "accuracy", "auc", "auroc", "f1", "bleu", "rouge", "map", "miou", "iou", "dice", "precision", "recall", "reward",
           "return", "score", "r2", "psnr", "ssim", "top1", "top5", "correct"}  # fmt: skip
_BESIDE = {"scale", "weight", "coef", "coefficient", "time", "seconds", "ms", "count", "lr"}  # "loss_scale" is no loss
_PLAIN = re.compile(r"[a-z0-9]+")
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")


def named_direction(key: str) -> Direction | None:
    """The direction that follows from a metric's name: losses and errors fall, accuracies rise. None: the name has no direction."""
    words = _words(key)
    if words & _BESIDE:
        return None
    return Direction.MIN if words & _FALLING else Direction.MAX if words & _RISING else None


def direction_of(key: str) -> Direction:
    """Larger for accuracies and other metrics known to rise; smaller for everything else, such as losses."""
    words = _words(key)
    return Direction.MAX if words & _RISING and not words & _FALLING else Direction.MIN


@lru_cache(maxsize=1024)
def _words(key: str) -> frozenset[str]:
    return frozenset({word.lower() for word in _WORD.findall(key)} | set(_PLAIN.findall(key.lower())))
