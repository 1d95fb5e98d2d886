"""What becomes of the parameters that a restored state trained and that are frozen here, or the reverse."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from datastates.objects.adapters import Adapted
from datastates.objects.report import RestoreReport
from datastates.objects.trained import put_back
from datastates.system.notices import say

__all__ = ["go_on_training", "say_what_differs"]

_logger = logging.getLogger(__name__)


def go_on_training(branch: str, adapted: Adapted, report: RestoreReport, *, is_told: bool) -> None:
    """Freeze and unfreeze parameters as the state had them, because the script may not come by there again."""
    left = set(put_back(report, adapted))
    for paths, done in ((report.frozen, "frozen"), (report.unfrozen, "trained")):
        changed, kept = ([path for path in paths if (path in left) is is_left] for is_left in (False, True))
        if changed and is_told:
            say(f"branch {branch}: {_counted(changed)} {done} again, as in the state that was restored")
        if kept:
            _logger.warning(
                "branch %s: %s %s in the state that was restored, and not here: set requires_grad before DistributedDataParallel wraps the"
                " model, because it exchanges the gradients of the parameters that are trained then",
                branch, _counted(kept), done,
            )  # fmt: skip


def say_what_differs(branch: str, report: RestoreReport) -> None:
    """Say what a fork freezes, or trains, otherwise than the state where it begins: it may be meant, or forgotten."""
    for paths, was, now in ((report.frozen, "frozen", "trained"), (report.unfrozen, "trained", "frozen")):
        if paths:
            say(f"branch {branch}: {_counted(paths)} {was} where it begins, and {now} here; requires_grad stays as the script set it")


def _counted(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return f"parameter {paths[0]} is"
    return f"{len(paths)} parameters ({', '.join(paths[:2])}{', …' if len(paths) > 2 else ''}) are"
