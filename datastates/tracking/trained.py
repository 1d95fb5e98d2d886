"""What becomes of the parameters that a restored state trained and that are not trained here, or the reverse."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from datastates.errors import InvalidInput
from datastates.lineage.states import State
from datastates.objects.adapters import Adapted, parts
from datastates.objects.optimizer_state import is_plain
from datastates.objects.optimizers import bare
from datastates.objects.report import RestoreReport
from datastates.objects.trained import add_groups, divided, put_back
from datastates.opening.core import Core
from datastates.system.notices import say
from datastates.upkeep.loading import load

__all__ = ["go_on_training", "groups_in", "lose_groups", "part_at", "regain_groups", "say_gained", "say_what_differs", "warn_of_misfits"]

_logger = logging.getLogger(__name__)

_parted = WeakIdKeyDictionary()
"""The state at which the last training of a parameter ended in this process, by the parameter."""


def regain_groups(core: Core, state: State, adapted: Adapted) -> list[tuple[Optimizer, int]]:
    """Give optimizers the parameter groups that they had in the state and lack here; returns these optimizers and how many each has got.

    ``lose_groups`` undoes it.
    """
    found = [(path, bare(each)) for path, each in parts(adapted.objects) if isinstance(each, Optimizer)]
    stored = [(each, groups_in(core, state, path)) for path, each in found if is_plain(each)]  # all are read before any is changed
    return [(each, count) for each, groups in stored if (count := add_groups(each, groups, adapted))]


def lose_groups(gained: Sequence[tuple[Optimizer, int]]) -> None:
    """Take the last groups away from these optimizers."""
    for optimizer, count in gained:
        del optimizer.param_groups[-count:]


def say_gained(branch: str, gained: Sequence[tuple[Optimizer, int]]) -> None:
    """Say which groups were added."""
    for optimizer, count in gained:
        sizes = " and ".join(str(len(group["params"])) for group in optimizer.param_groups[-count:])
        gained_group = f"{type(optimizer).__name__} has {sizes} parameters in a group of their own again"
        say(f"branch {branch}: {gained_group}, as in the state that was restored")


def part_at(uid: str, adapted: Adapted) -> None:
    """Note that a training of this process ends at a state: as long as its parameters live, the script that made them is running on."""
    for module in adapted.modules:
        for found in (*module.modules(), *module.parameters()):
            _parted[found] = uid


_DIFFERENCES = (
    ("in_eval", "module", "in eval mode", "in training mode", "the mode"),
    ("in_train", "module", "in training mode", "in eval mode", "the mode"),
    ("frozen", "parameter", "frozen", "trained", "requires_grad"),
    ("unfrozen", "parameter", "trained", "frozen", "requires_grad"),
)


def go_on_training(branch: str, adapted: Adapted, report: RestoreReport, *, is_told: bool, at: str | None = None) -> None:
    """Freeze and unfreeze parameters, and set the modes of modules, as the state had them, because the script may not come by there again.

    What a training of this process left ``at`` that state stays: what was done to it since then is the script's next line. The mode of a
    whole model that only an evaluation changed stays, too.
    """
    kept_back, report = divided(report, adapted, lambda found: at is not None and _parted.get(found) == at, is_running=at is None)
    if is_told:
        say_what_differs(branch, kept_back, "goes on")
    left = set(put_back(report, adapted))
    for name, kind, done, _, _ in _DIFFERENCES:
        changed, kept = ([path for path in getattr(report, name) if (path in left) is is_left] for is_left in (False, True))
        if changed and is_told:
            say(f"branch {branch}: {_counted(changed, kind)} {done} again, as in the state that was restored")
        if kept:
            _logger.warning(
                "branch %s: %s %s in the state that was restored, and not here: set requires_grad before DistributedDataParallel wraps the"
                " model, because it exchanges the gradients of the parameters that are trained then",
                branch, _counted(kept, kind), done,
            )  # fmt: skip


def say_what_differs(branch: str, report: RestoreReport, does: str = "begins") -> None:
    """Say what the script freezes, trains or evaluates otherwise than the state where its branch begins or goes on: it may be meant, or
    forgotten.
    """
    for name, kind, was, now, option in _DIFFERENCES:
        if paths := getattr(report, name):
            say(f"branch {branch}: {_counted(paths, kind)} {was} where it {does}, and {now} here; {option} stays as the script set it")


def warn_of_misfits(branch: str, report: RestoreReport, step: int, *, is_beginning: bool) -> None:
    """Log what a restore with ``strict=False`` left as it was."""
    left = [*report.missing, *(misfit.path for misfit in report.mismatched), *report.unexpected]
    made, advice = "has", "run.report lists all"
    if is_beginning:
        made, advice = "initialized", f"to train everything from step 0, write branch={branch + '-anew'!r} and no start="
    if left:
        _logger.warning(
            "branch %s: %s did not fit and are not restored (strict=False): what is here stays as the script %s it, while the step"
            " counts on from %s; %s",
            branch, ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else ""), made, step, advice,
        )  # fmt: skip


def groups_in(core: Core, state: State, path: str) -> object:
    """The parameter groups that the state has of the optimizer at a path; None if there are none."""
    try:
        found = load(core, state, only=f"{path}/param_groups")
        for key in path.split("/"):
            found = found[int(key)] if isinstance(found, list | tuple) else found[key]
        return found["param_groups"]
    except (InvalidInput, LookupError, TypeError, ValueError):  # it is no optimizer there
        return None


def _counted(paths: Sequence[str], kind: str) -> str:
    if len(paths) == 1:
        return f"{kind} {paths[0]} is"
    return f"{len(paths)} {kind}s ({', '.join(paths[:2])}{', …' if len(paths) > 2 else ''}) are"
