"""The training behind a tracker: its objects, its branch, and the step of both."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from datastates.collective import SoloGroup
from datastates.engine.fence import Fence, Pending
from datastates.engine.handle import Line
from datastates.engine.periodic import facts_of
from datastates.engine.plan import CopyPlan, compile_plan
from datastates.errors import (
    Closed,
    DatastatesError,
    InvalidInput,
    NotFound,
    Unavailable,
    Unsupported,
)
from datastates.lineage import states
from datastates.lineage.states import OURS, Run, State
from datastates.lineage.views.branch_rows import kept_of
from datastates.lineage.views.text import kept_text
from datastates.lineage.write import refs, runs
from datastates.maintenance.core import Core
from datastates.maintenance.environment import describe_training
from datastates.maintenance.loading import RestorePlan, load, load_values, restore
from datastates.maintenance.retention_pass import bests_at, bests_of
from datastates.policy.contract import CadenceChoice, Policy
from datastates.policy.retention import Best
from datastates.state.adapters import (
    FILES,
    GRADIENTS,
    Adapted,
    add_groups,
    divided,
    parts,
    put_back,
)
from datastates.state.data_position import LOOPS, Loops
from datastates.state.generators import RngState
from datastates.state.geometry import is_spread
from datastates.state.hyperparameters import (
    SCHEDULED,
    Difference,
    ScriptOptions,
    is_alike,
    seed,
    shown,
)
from datastates.state.model import MODES, ModelState
from datastates.state.optimizer import bare, is_plain
from datastates.state.per_rank import mark_per_rank
from datastates.state.report import RestoreReport, Selection
from datastates.state.tree import Flat, flatten, join
from datastates.system.at_exit import end_later, note_interrupted
from datastates.system.interrupts import undisturbed
from datastates.system.logs import event, say
from datastates.values import Value

from .collective import Ranks
from .configuration import with_used
from .halt import HaltWatch
from .script_checks import ScriptChecks

if TYPE_CHECKING:
    import torch

    from datastates.engine.runner import Runner
    from datastates.lineage.database import Database
    from datastates.lineage.session import Session


_logger = logging.getLogger(__name__)

_end_states = WeakIdKeyDictionary()
"""The state at which the last training of a parameter ended in this process, by the parameter."""


def add_missing_groups(core: Core, state: State, adapted: Adapted) -> list[tuple[Optimizer, int]]:
    """Give optimizers the parameter groups that they had in the state and lack here; returns these
    optimizers and how many each has got.

    ``remove_groups`` undoes it.
    """
    found = [
        (path, bare(each)) for path, each in parts(adapted.objects) if isinstance(each, Optimizer)
    ]
    # all are read before any is changed
    stored = [(each, groups_in(core, state, path)) for path, each in found if is_plain(each)]
    return [
        (each, count) for each, groups in stored if (count := add_groups(each, groups, adapted))
    ]


def remove_groups(gained: Sequence[tuple[Optimizer, int]]) -> None:
    """Take the last groups away from these optimizers."""
    for optimizer, count in gained:
        del optimizer.param_groups[-count:]


def log_added_groups(branch: str, gained: Sequence[tuple[Optimizer, int]]) -> None:
    for optimizer, count in gained:
        sizes = " and ".join(str(len(group["params"])) for group in optimizer.param_groups[-count:])
        gained_group = (
            f"{type(optimizer).__name__} has {sizes} parameters in a group of their own again"
        )
        say(f"branch {branch}: {gained_group}, as in the state that was restored")


def note_end_state(uid: str, adapted: Adapted) -> None:
    """Note the state at which a training of this process ends. While its parameters exist, the
    script that made them is still running."""
    for module in adapted.modules:
        for found in (*module.modules(), *module.parameters()):
            _end_states[found] = uid


_DIFFERENCES = (
    ("in_eval", "module", "in eval mode", "in training mode", "the mode"),
    ("in_train", "module", "in training mode", "in eval mode", "the mode"),
    ("frozen", "parameter", "frozen", "trained", "requires_grad"),
    ("unfrozen", "parameter", "trained", "frozen", "requires_grad"),
)


def restore_trained(
    branch: str, adapted: Adapted, report: RestoreReport, *, is_logged: bool, at: str | None = None
) -> None:
    """Freeze and unfreeze parameters, and set the modes of modules, as the state had them, because
    the script may not come by there again.

    Parameters of a training of this process that ended ``at`` that state stay unchanged: the same
    script set them since then. The mode of a whole model that only an evaluation changed stays,
    too.
    """
    kept_back, report = divided(
        report,
        adapted,
        lambda found: at is not None and _end_states.get(found) == at,
        is_running=at is None,
    )
    if is_logged:
        log_differences(branch, kept_back, "goes on")
    left = set(put_back(report, adapted))
    for name, kind, done, _, _ in _DIFFERENCES:
        changed, kept = (
            [path for path in getattr(report, name) if (path in left) is is_left]
            for is_left in (False, True)
        )
        if changed and is_logged:
            say(
                f"branch {branch}: {_counted(changed, kind)} {done} again, as in the state that was"
                " restored"
            )
        if kept:
            _logger.warning(
                "branch %s: %s %s in the state that was restored, and not here. The call"
                " DistributedDataParallel(model) fixes which gradients are exchanged, so"
                " set requires_grad before DistributedDataParallel wraps the model",
                branch,
                _counted(kept, kind),
                done,
            )


def log_differences(branch: str, report: RestoreReport, does: str = "begins") -> None:
    """Log what the script freezes, trains or evaluates differently from the state where its branch
    begins or resumes. This may be intended, or a mistake.
    """
    for name, kind, was, now, option in _DIFFERENCES:
        if paths := getattr(report, name):
            say(
                f"branch {branch}: {_counted(paths, kind)} {was} where it {does}, and {now} here;"
                f" {option} stays as the script set it"
            )


def warn_of_misfits(branch: str, report: RestoreReport, step: int, *, is_beginning: bool) -> None:
    """Log what a restore with ``strict=False`` left as it was."""
    left = [*report.missing, *(misfit.path for misfit in report.mismatched), *report.unexpected]
    made, advice = "has", "run.report lists all"
    if is_beginning:
        made, advice = (
            "initialized",
            f"to train everything from step 0, write branch={branch + '-anew'!r} and no start=",
        )
    if left:
        _logger.warning(
            "branch %s: %s did not fit and are not restored (strict=False): what is here stays as"
            " the script %s it, while the step counts on from %s (%s)",
            branch,
            ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else ""),
            made,
            step,
            advice,
        )


def groups_in(core: Core, state: State, path: str) -> object:
    """The parameter groups that the state has of the optimizer at a path; None if there are
    none."""
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


class Training:
    """One training, from ``Repository.track`` to ``close``. Everything belongs to the training
    thread.

    ``run`` is its record in the lineage. ``newest`` is the uid of the newest capture, recorded or
    not, or of the state that was restored last. ``is_driven``: ``Tracker.steps`` counts the steps.
    ``completes``: if another library accumulates, it returns whether the current batch completes a
    step. ``is_resumed``: the branch existed before. ``held_s``: for how long the newest capture
    held the training up. ``ranks`` track it together. ``own`` names the objects that are
    separate on each rank, in addition to those that always are. ``takes_script``: a restore keeps
    the script's hyperparameters where they differ from the state's.
    """

    def __init__(
        self,
        core: Core,
        *,
        line: Line,
        objects: Mapping[str, object],
        values: dict[str, object],
        cadence: Policy,
        gradients: bool,
        frozen: bool,
        config: Mapping[str, Value],
    ) -> None:
        self.core, self.line = core, line
        self.objects, self.values = dict(objects), values
        self.adapted = Adapted(self.objects, gradients=gradients, frozen=frozen)
        outlook = self.adapted.outlook()
        flatten({**outlook, **values}, is_checking=True)  # refuses what no state can hold
        self.runner = core.runner()
        self.given, self.seed, self.takes_script = {**config}, seed(), True
        self.script_options, self.used = ScriptOptions(self.objects), dict[str, Value]()
        self._hyperparameters = self._script = self.script_options.values
        self.run = line.run = describe_training(core.engage().run, line.branch, config)
        self.pending = Pending(self.runner.stager.fence)
        self.newest: str | None = None
        self.is_driven = self.is_resumed = False
        # it must not refer to this training, or it would keep it alive
        self.loops = Loops(partial(_found, self.objects))
        self.step = self.micro_step = 0
        self.completes: Callable[[], bool] | None = None
        self.bests: tuple[Best, ...] = ()
        self.held_s: float | None = None
        self._told = line.choice = cadence.told()
        self.resumed_from: State | None = None
        self.attributes: dict[str, Value] = {}
        self._on_end: list[Callable[[BaseException | None], None]] = []
        self.report: RestoreReport | None = None
        self.ranks = Ranks(SoloGroup())
        self.own: frozenset[str] = frozenset()
        self.halt = HaltWatch(self)
        self._loader_size: int | None = None
        self._is_begun = self._has_loader = False
        self._captures = 0
        self._logged_lines: set[str] = set()
        self._plan: CopyPlan | None = None
        self.restore_plans: dict[frozenset[str], RestorePlan] = {}
        self._is_closed = self._is_ended = self._is_superseded = False
        self._pid = os.getpid()
        self._fence = Fence(self.pending.wait)
        self._fence.install(self.adapted.optimizers, self.adapted.modules)
        self.script_checks = ScriptChecks(
            self.adapted.objects, outlook, self._fence.steps_of, has_gradients=gradients
        )
        self._fence.on_step = self.script_checks.gradients.stepped
        # the last call here that may fail
        self.runner.open_line(line, cadence, self.adapted.tensors_here())
        self._finalizer = weakref.finalize(
            self,
            _end_dropped,
            self.runner,
            line,
            self._fence,
            core.database,
            self.run.uid,
            self._pid,
        )
        self._finalizer.atexit = False  # at exit the repository is closed anyway

    @property
    def branch(self) -> str:
        return self.line.branch

    def head(self) -> State | None:
        self.runner.settle(self.line)
        self.apply_edits()
        if self.line.tip is None:
            return None
        for rev in (
            self.line.tip[0],
            self.branch,
        ):
            # the tip is not recorded while the lineage cannot be written
            with suppress(NotFound):
                return self.core.state(rev)
        return None

    @property
    def cadence(self) -> CadenceChoice:
        return self.line.choice or self._told

    def fence(self) -> None:
        self.pending.wait()

    def add_listener(
        self,
        on_recorded: Callable[[State], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Call ``on_recorded`` for each state from now on, and ``on_end`` at the end.

        A function that refers to the tracker or its objects would keep them alive.

        :param on_recorded: called once for each recorded state, in order, on any thread. It returns
            at once and raises nothing.
        :param on_end: called on the closing thread, after every ``on_recorded``, with the error
            that ended the training, if any. An error that it raises is logged.
        """
        self.check_usable()
        self._on_end.append(on_end)
        self.line.listeners.append(on_recorded)

    def begin_run(self, session: Session) -> None:
        """Record the training as a run of its process."""
        runs.start(session, self.run)
        self.runner.outbox.begin(self.run)

    def _begin_another_run(self, before: Run) -> None:
        """Record what follows as another run, because other hyperparameters are in use now.

        The states of ``before`` keep theirs."""
        self.run = self.line.run = replace(
            self.run, uid=secrets.token_hex(12), started_at=datetime.now(UTC)
        )
        with self.core.database.write() as session:
            self.begin_run(session)
            runs.finish(session, before.uid)

    def count_batch(self, accumulate: int) -> None:
        """Count a batch that is about to be handed out."""
        self.micro_step += 1
        if self.micro_step % accumulate == 0 if self.completes is None else self.completes():
            self.step, self.micro_step = self.step + 1, 0
        elif self.completes is None:
            self.micro_step %= accumulate

    # --- for a capture ----------------------------------------------------------------------------

    def tree(self, files: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Everything that a capture holds, as it is now, with its files.

        With several ranks, the objects that are each rank's own are marked as such."""
        own = None if self.line.part is None else self.own
        tree = {**self.adapted.tree(is_shared=own is not None, is_waiting=False), **self.values}
        if self.loops.is_used:
            tree[LOOPS] = self.loops.state_dict()
        in_eval = "\n".join(filter(None, (model.in_eval() for _, model in self.adapted.models())))
        if in_eval or own is not None:
            tree[MODES] = in_eval
        if files or own is not None:
            tree[FILES] = dict(files)
        return tree if own is None else mark_per_rank(tree, {*own, LOOPS, FILES})

    def known(self) -> Flat | None:
        """The leaves of the last capture, if the next one can be expected to have the same; else
        None."""
        return None if self._plan is None else self._plan.flat

    def kept(self) -> list[object]:
        """What the last capture keeps, which refers to tracked tensors and modules."""
        return [
            self._plan,
            *self.adapted.lasting,
            *(model.references for _, model in self.adapted.models()),
        ]

    def plan_for(self, flat: Flat, *, has_files: bool = False) -> CopyPlan:
        """The plan by which these leaves are copied; the last plan again if their layout is
        unchanged. A plan with files is for one capture: the next one uses the last plan again."""
        if self._plan is not None and self._plan.refresh(flat):
            return self._plan
        self.fence()
        self._fence.install(self.adapted.optimizers, self.adapted.modules)
        part = self.line.part
        if part is not None:
            _refuse_gradients(flat)
        plan = compile_plan(
            flat,
            rank=0 if part is None else part.rank,
            size=1 if part is None else part.size,
            apart=() if part is None else {id(tensor) for tensor in self.adapted.buffers()},
            fenced={id(tensor) for tensor in self.adapted.fenced()},
            frozen={id(tensor) for tensor in self.adapted.frozen()},
            eager_paths=self.line.edits.paths,
            members=self.ranks.group.members,
        )
        if not has_files:
            self._plan = plan
        return plan

    def updates(self) -> int:
        """The most steps that a tracked optimizer has taken since ``track`` or ``go_back``, of
        those that are equal on all ranks."""
        shared = {
            name: found for name, found in self.adapted.objects.items() if name not in self.own
        }
        return max(
            (
                self._fence.steps_of(found)
                for _, found in parts(shared)
                if isinstance(found, Optimizer)
            ),
            default=0,
        )

    def forget_layout(self) -> None:
        """Drop the plan of the last capture: the next capture makes a new one."""
        self._plan = None

    def raise_background_error(self) -> None:
        """Raise, once, the error of an earlier capture, if there is one."""
        error, self.line.error = self.line.error, None
        if error is not None:
            raise error

    def apply_edits(self) -> None:
        """From now on, copy at once those tensors that were edited by hand during a copy."""
        with undisturbed():
            if self.line.edits.learn(self.branch):
                self._plan = None

    def check_usable(self) -> None:
        """Raise unless captures may be taken here and now.

        :raises Closed: the training was closed, gave way to another, or belongs to the parent
            process.
        :raises InvalidInput: this is a thread of the engine.
        """
        if self._pid != os.getpid():
            raise Closed(
                "this tracker belongs to the parent process: open the repository and track again in"
                " the child"
            )
        if self._is_superseded:
            raise Closed(
                f"this tracker gave way to another that was made for branch {self.branch} in this"
                " process: capture with that one, or track a branch of another name"
            )
        if self._is_closed:
            raise Closed(
                f"the tracker of branch {self.branch} was closed: call repo.track(...) again"
            )
        if threading.current_thread().name.startswith("datastates-"):
            raise InvalidInput(
                "captures are taken on the training thread, not from callbacks of the engine"
            )

    # --- going back -------------------------------------------------------------------------------

    def go_back(
        self,
        state: State,
        *,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        without: Collection[str] = (),
        reason: str = "move",
    ) -> RestoreReport:
        """Restore a state, except for the objects ``without``, and move the branch to it;
        ``reason`` goes into the reflog. No capture may be in flight.

        The script continues where the loops are. If the loops stay, the trained parameters stay,
        too.
        """
        with undisturbed():
            before = self.run
            with self.ranks.synchronized("restore its part"):
                report = self.restore(state, only=only, strict=strict, without=without)
                if self.run.config != before.config:
                    self._begin_another_run(before)
            if LOOPS not in without:
                restore_trained(self.branch, self.adapted, report, is_logged=self.ranks.is_first)
            self.ranks.first("move the branch", partial(self._move, state, reason), type(None))
            self.line.stand((state.uid, state.digest))
            self._fence.restart_count()
            self.newest = state.uid
            self.know_best()
        return report

    def _move(self, state: State, reason: str) -> None:
        tip = self.line.tip
        if tip is None or tip[0] != state.uid:
            with self.core.writing() as session:
                if tip is None:
                    refs.branch(session, self.branch, state.uid)
                else:
                    refs.move(session, self.branch, state.uid, expected=tip[0], reason=reason)

    def know_best(self) -> None:
        """Pass to the engine which states up to the branch's head are the best, by the metrics
        whose best is kept. For metrics that the user did not name, only the branch's own states
        count."""
        tip = self.line.tip and self.line.tip[0]
        bests = bests_at(self.core, tip, self.bests)
        if self.line.keeps_bests and tip is not None:
            asked = {rule.key for rule in self.bests}
            bests |= {
                rule: best
                for rule, best in bests_of(self.core, self.branch).items()
                if rule.key not in asked
            }
        if bests or tip is not None:
            self.runner.know_best(self.line, bests)

    def restore(
        self,
        state: State,
        *,
        only: str | Sequence[str] | None,
        strict: bool,
        without: Collection[str] = (),
    ) -> RestoreReport:
        """Restore a state into the objects, and set ``step`` to its step; the branch stays."""
        everything = {LOOPS: self.loops, **self.objects, **self.values}
        lines, whole = self._choose(state, only, without)
        into = {
            name: found
            for name, found in everything.items()
            if name not in without and name not in whole
        }
        version = self.loops.version
        self.report = restore(
            self.core, state, into, only=only, strict=strict, group=self.ranks.group
        )
        self.warn_once(lines)
        if self.takes_script:
            self.script_options.put()
        restored = set(self.report.restored)
        for optimizer in self.adapted.optimizers_with_inner:
            if optimizer.state:
                # else schedulers warn that it never stepped
                optimizer._opt_called = True  # type: ignore[attr-defined]
        if LOOPS in into and only is None and self.loops.version == version:
            self.loops.load_state_dict({})
        for path, model in self.adapted.models():
            found = {name for name in model.keys if join(path, name) in restored}
            if only is None:
                self._warn_of_trained(path, model, found)
            model.keep(found)
        for line in self.report.anew if self.ranks.is_first else ():
            say(f"branch {self.branch}: {line}")
        if self.ranks.is_first:
            warn_of_misfits(self.branch, self.report, state.step, is_beginning=self.newest is None)
        self.values.update(
            {key: value for key, value in self.report.values.items() if key in self.values}
        )
        self.step, self.micro_step = state.step, state.micro_step
        self._plan, self._hyperparameters = None, self.script_options.now()
        return self.report

    def _choose(
        self, state: State, only: str | Sequence[str] | None, without: Collection[str]
    ) -> tuple[list[str], set[str]]:
        """Compare the script's hyperparameters with a state's. Returns a line for each
        difference, and the objects that get the script's values whole.

        :raises InvalidInput: a scheduler is of another class than the state's, or its schedule ends
            before the state.
        """
        wants = Selection(only).wants
        tree = (
            load_values(self.core, state, self.ranks.group, wants=self.script_options.reads)
            if self.script_options
            else None
        )
        found = self.script_options.compare(
            tree, state.config, lambda path: path.split("/")[0] not in without and wants(path)
        )
        if not self.takes_script:
            self.script_options.check_classes()
        lines = [self._line(each, state) for each in found]
        lines += self.script_options.choose() if self.takes_script else []
        is_continued = wants("rng") and any(
            isinstance(each, RngState) for name, each in self.objects.items() if name not in without
        )
        before, used = (
            state.config.get("seed"),
            self.script_options.in_use(is_chosen=self.takes_script),
        )
        if self.seed not in (None, before) and "world_size" in state.config:
            mine, theirs = (
                f"the script (seed {shown(self.seed)})",
                f"state {state.uid[:10]} (seed {shown(before)})",
            )
            lines.append(
                f'random numbers come from {theirs}, and not from {mine}: pass rng="script" to a'
                " fork to use the script's"
                if is_continued
                else (
                    f'random numbers come from {mine}, and not from {theirs}: pass rng="state" to'
                    " use the state's"
                )
            )
        if is_continued and (before is not None or "world_size" in state.config):
            used["seed"] = before
        elif self.seed is not None:
            used["seed"] = self.seed
        return [*lines, *self.configure(used)], {
            path for path in self.script_options.replayed if "/" not in path
        }

    def _line(self, difference: Difference, state: State) -> str:
        key, script, stored = difference.key, shown(difference.script), shown(difference.state)
        if key.endswith(".lr_lambdas") and isinstance(difference.script, str):
            until = (
                ""
                if self.takes_script
                else (
                    ' from the next step of the schedule on: pass hyperparameters="script" to use'
                    " it now"
                )
            )
            return (
                f"{key} gives {script} in the script, and gave {stored} in state {state.uid[:10]}:"
                f" the script's function is used{until}"
            )
        if self.takes_script:
            return (
                f"{key} is {script}, as in the script; state {state.uid[:10]} has {stored}: pass"
                ' hyperparameters="state" to use that'
            )
        end = (
            ", since torch raises an error after that step" if key.endswith(".total_steps") else ""
        )
        return (
            f"{key} is {stored}, as in state {state.uid[:10]}; the script has {script}: pass"
            f' hyperparameters="script" to use that{end}'
        )

    def configure(self, used: Mapping[str, Value]) -> list[str]:
        """Make the configuration of the run of what the user gave and of the values in use.

        Returns a line for each that is not in use."""
        self.used = (
            {**used, "world_size": self.ranks.size}
            if self.script_options or self.adapted.modules
            else {}
        )
        sizes = {
            f"{path.replace('/', '.')}.batch_size": found.batch_size
            for path, found in parts(self.objects)
            if isinstance(found, DataLoader)
        }
        if self._loader_size is not None and not sizes:
            sizes = {"loader.batch_size": self._loader_size}
        recorded, lines = with_used(self.given, {**self.used, **sizes})
        ours = {key: value for key, value in self.run.config.items() if key.startswith(OURS)}
        self.run = self.line.run = replace(self.run, config={**recorded, **ours})
        return lines

    def settle(self, loader: object = None) -> None:
        """Called before the first batch: record its size, and the hyperparameters that the
        script has set since ``track``."""
        if self._is_begun and (loader is None or self._has_loader):
            return
        size = getattr(loader, "batch_size", None)
        self._loader_size = size if isinstance(size, int) else None
        now = {} if self._is_begun else self.script_options.now()
        self._is_begun, self._has_loader = True, loader is not None
        self._record_changes(now)

    def note_capture(self) -> None:
        """Called at each capture: record the options that the script has set since ``track``.

        A rate that it sets may follow its own schedule. The rate in use is then the one with which
        the script built the optimizer, or the one that its configuration names.
        """
        self._captures += 1
        if self._captures == 2:
            now = self.script_options.now()
            rates = {
                key: value
                for key, value in now.items()
                if key.endswith(".lr") and not is_alike(value, self._hyperparameters.get(key))
            }
            named = {
                key
                for key, value in rates.items()
                if any(is_alike(value, given) for given in self.given.values())
            }
            lasting = {
                key: value
                for key, value in now.items()
                if key in named or not {*key.split(".")} & {*SCHEDULED}
            }
            self._record_changes(
                lasting
                | {
                    key: self._script.get(key, value)
                    for key, value in rates.items()
                    if key not in named
                }
            )

    def _record_changes(self, now: Mapping[str, Value]) -> None:
        """Record the hyperparameters that differ from the ones after ``track``."""
        before, changed = (
            self.run,
            {
                key: now[key]
                for key in now
                if not is_alike(now[key], self._hyperparameters.get(key))
            },
        )
        lines = self.configure(self.used | changed)
        self._hyperparameters, self._script = (
            {**self._hyperparameters, **changed},
            {
                **self._script,
                **changed,
            },
        )
        if self.run.config != before.config:
            self.runner.outbox.begin(self.run)
            with suppress(Unavailable), self.core.database.write() as session:
                runs.configure(session, self.run)
        self.warn_once(lines)

    def warn_once(self, lines: Sequence[str]) -> None:
        """Log lines that were not logged for this training."""
        for line in dict.fromkeys(lines) if self.ranks.is_first else ():
            if line not in self._logged_lines:
                self._logged_lines.add(line)
                _logger.warning("branch %s: %s", self.branch, line)

    def _warn_of_trained(self, path: str, model: ModelState, restored: set[str]) -> None:
        """Log a warning if the restored state leaves out parameters that are trained here: they
        keep the values that they have."""
        assert self.report is not None
        known = {id(model.whole[name]) for name in restored}  # of a tied tensor one name is enough
        others = {*self.report.missing, *(each.path for each in self.report.mismatched)}
        lost = [
            join(path, name)
            for name in sorted(model.trained or ())
            if name in model.whole and id(model.whole[name]) not in known
        ]
        lost = [name for name in lost if name not in others]
        if restored and lost and self.ranks.is_first:
            _logger.warning(
                "branch %s: %s parameters, such as %s, are trained here and keep their values. They"
                " are frozen in the state that was restored, which leaves them out. Make the model"
                " again, frozen as it was then",
                self.branch,
                len(lost),
                lost[0],
            )

    # --- the end ----------------------------------------------------------------------------------

    @property
    def is_living(self) -> bool:
        """Whether it belongs to this process and has not ended."""
        return not self._is_ended and self._pid == os.getpid()

    def close(self, error: BaseException | None = None) -> None:
        """Remove the hooks and make the branch's head durable; idempotent. ``error`` is the one
        that ended the training, if any. After an error, also one that is being handled, parts of
        other ranks are waited for at most 3 s.

        :raises DatastatesError: (or another error of the background) the last captures could not be
            recorded.
        """
        if not self.is_living:
            return
        self._is_closed = True
        self.runner.close_line(
            self.line, is_failing=error is not None or sys.exc_info()[1] is not None
        )
        self._fence.remove()
        self.script_checks.gradients.unhook()
        # the repository may outlive the models, and must not keep them alive
        self.core.trainings.discard(self)
        if self.core.engaged is not None:
            self.core.engaged.unwatch(self.branch, self.halt.look)
        self.core.drain()
        self.forget_layout()  # it keeps captured tensors and places in memory alive
        if self.line.tip is not None:
            note_end_state(self.line.tip[0], self.adapted)
        if not self.core.database.is_closed:
            # the repository may have been closed after an interrupt of this
            with (
                suppress(Unavailable, NotFound),
                self.core.database.write() as session,
            ):
                # its process finishes the run at the latest
                runs.note(
                    session,
                    self.run.uid,
                    {**facts_of(self.line), **states.facts_of(error, self.step)},
                )
                runs.finish(session, self.run.uid)
            self._log_kept_states()
        self._is_ended = True  # after an interrupt before this, the next call finishes
        self._finalizer.detach()
        self._call_listeners(error)
        self.apply_edits()
        self.raise_background_error()
        if isinstance(error, KeyboardInterrupt):
            saved = "has no state" if self.line.tip is None else "is saved and can be resumed"
            note_interrupted(f"interrupted: branch {self.branch} {saved}, at step {self.step}")

    def _log_kept_states(self) -> None:
        """Log how many of the captured states can be restored."""
        with suppress(Unavailable), self.core.database.read() as session:
            captured, restorable, size = kept_of(session, self.run.uid)
            if captured:
                ended = event(
                    "training.ended",
                    branch=self.branch,
                    captured=captured,
                    restorable=restorable,
                    bytes=size,
                )
                _logger.info(
                    "branch %s: %s", self.branch, kept_text(captured, restorable, size), extra=ended
                )

    def _call_listeners(self, error: BaseException | None) -> None:
        while self._on_end:
            on_end = self._on_end.pop()
            try:
                on_end(error)
            except Exception:  # the other system may be away; the states are safe
                _logger.warning(
                    "branch %s: %s could not be ended", self.branch, on_end, exc_info=True
                )

    def end_for_successor(self) -> None:
        """End, because another training is about to begin on this branch: the head becomes
        durable, and this one captures no more."""
        self._is_superseded = True
        try:
            self.close()
        except Exception as exc:  # the new tracker begins, whatever happened to the earlier one
            _logger.warning(
                "branch %s: the last captures of its earlier tracker failed (%s)", self.branch, exc
            )
        with undisturbed():
            _logger.warning(
                "branch %s is tracked anew in this process: the earlier tracker ends here and takes"
                " no more captures",
                self.branch,
            )

    def undo(self) -> None:
        """Undo a training that never began: nothing was captured."""
        self._fence.remove()
        self.script_checks.gradients.unhook()
        self.runner.close_line(self.line)


def _refuse_gradients(flat: Flat) -> None:
    """Raise if there are gradients that are not sharded. Between two steps each replica may have
    different gradients. Pieces from several replicas would then be gradients that no replica has.

    :raises Unsupported: there are some.
    """
    for leaf in flat.tensors:
        if leaf.path.startswith(f"{GRADIENTS}/") and not is_spread(leaf.tensor):
            raise Unsupported(
                f"{leaf.path} is tracked by several ranks, each of which may have different"
                " gradients: track without gradients=True, and capture after optimizer.step()"
            )


def _found(objects: Mapping[str, object]) -> list[object]:
    return [found for _, found in parts(objects)]


def _end_dropped(
    runner: Runner, line: Line, fence: Fence, database: Database, run: str, pid: int
) -> None:
    """End a training that was dropped without a close; runs on whichever thread collected it."""
    fence.is_over = True
    end_later(partial(_release, runner, line, database, run), pid)


def _release(runner: Runner, line: Line, database: Database, run: str) -> None:
    """Release the branch of a training that was dropped.

    If that cannot be recorded, the end of its process will be."""
    runner.close_line(line)
    with suppress(DatastatesError), database.write() as session:
        runs.finish(session, run)


@contextmanager
def without_later_groups(
    training: Training, state: State, *, without: Collection[str], are_kept: bool
) -> Iterator[bool]:
    """Take the groups that optimizers got after the state away for the block, which restores it;
    yields whether there were any.

    If they ``are_kept``, they come back as ``add_param_group`` had made them: the optimizer has no
    state for their parameters. If the block raises, everything is as it was. Objects that are
    restored ``without`` are left alone.
    """
    later = [
        (each, count)
        for each, count in _known(training, state, without)
        if count < len(each.param_groups)
    ]
    taken = [(each, each.param_groups[count:], _taken(each, count)) for each, count in later]
    try:
        yield bool(taken)
    except BaseException:
        for optimizer, groups, entries in taken:
            optimizer.param_groups += groups
            optimizer.state.update(entries)
        raise
    for optimizer, groups, _ in taken if are_kept else ():
        optimizer.param_groups += groups


def _known(
    training: Training, state: State, without: Collection[str]
) -> Iterator[tuple[Optimizer, int]]:
    """The optimizers whose first groups are the state's groups, and the number of these."""
    adapted = training.adapted
    for path, found in parts(adapted.objects):
        if (
            isinstance(found, Optimizer)
            and is_plain(optimizer := bare(found))
            and path.partition("/")[0] not in without
        ):
            stored = groups_in(training.core, state, path)
            rows = [set(group["params"]) for group in stored] if isinstance(stored, list) else []
            if rows and rows == [set(row) for row in adapted.names_of(found)[: len(rows)]]:
                yield optimizer, len(rows)


def _taken(optimizer: Optimizer, count: int) -> dict[Any, Any]:
    """The state of the parameters that are not in the first groups, which is taken from the
    optimizer together with their groups."""
    parameters = [
        parameter for group in optimizer.param_groups[count:] for parameter in group["params"]
    ]
    del optimizer.param_groups[count:]
    return {
        parameter: optimizer.state.pop(parameter)
        for parameter in parameters
        if parameter in optimizer.state
    }
