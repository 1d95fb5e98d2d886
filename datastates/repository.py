"""The door that a script opens: a lineage database plus payload tiers, and everything that is asked of both."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from . import values
from .capture.shutdown import settle
from .config import BackPressure, Config, OnFailure, data_plane
from .errors import DatastatesError, InvalidInput
from .lineage.change import refs as lineage_refs
from .lineage.search import pages as search
from .lineage.search import walk
from .lineage.search.names import check_names
from .lineage.states import Ref, RefEvent, Run, State
from .objects.handed import split_values
from .objects.oversights import refuse_misspelt
from .objects.report import RestoreReport
from .opening.core import Core
from .opening.location import Location, locate
from .policy.retention import Retention, asked_for, retention_of
from .show.frames import States
from .system.interrupts import undisturbed
from .tracking.configuration import configuration
from .tracking.start import Terms, follow, together
from .tracking.tracker import Tracker
from .upkeep.loading import device_of, load, restore, verify
from .upkeep.notes import Notes

if TYPE_CHECKING:
    import networkx as nx
    import torch
    from sqlalchemy.orm import Session

    from .algebra.bisection import Bisection
    from .algebra.blame import Blame
    from .algebra.diff import Diff
    from .algebra.ensemble import Ensemble
    from .algebra.merge import MergeOptions
    from .clone.serving import Server
    from .lineage.show.branches import Branches
    from .lineage.show.comparison import Comparison
    from .policy.contract import Policy
    from .transport.contract import Tls
    from .upkeep.checking import VerifyReport
    from .upkeep.gc import GcReport
    from .upkeep.repair import RepairReport
    from .upkeep.retention import Pruned

__all__ = ["Repository", "open"]

_logger = logging.getLogger(__name__)


def open(
    url: str | os.PathLike[str] = "runs",
    *,
    packs: str | os.PathLike[str] | None = None,
    memory_bytes: int | str | None = None,
    config: Config | None = None,
) -> Repository:
    """Open a repository, and make it if it is not there.

    States whose process died are marked ``lost`` here, and each branch goes back to its newest restorable state. Where nothing may be
    written, a repository can be read.

        with datastates.open("runs") as repo:
            print(repo.refs())

    :param url: a folder (SQLite and packs inside), or ``postgresql+psycopg://…`` with ``packs``.
    :param packs: the folder of the packs, when the lineage is on a server.
    :param memory_bytes: the budget for staging and kept states, in bytes or as ``"2G"``; instead of the one in ``config``.
    :param config: every other choice; without it the defaults, as the environment changes them.
    :raises Unavailable: the database does not answer.
    :raises NotFound: there are packs, but the lineage beside them is gone.
    :raises InvalidInput: the url is none of these, or the folder is something else.
    """
    if not isinstance(config, Config | None):
        raise InvalidInput(f"config is {values.shown(config)}: give a datastates.Config")
    config = Config.from_environment() if config is None else config
    if memory_bytes is not None:
        config = replace(config, memory_bytes=values.size(memory_bytes, "memory_bytes"))
    location = locate(url, packs)
    settle()  # what this process dropped just now is on disk then
    with undisturbed():
        return Repository(location, config)


def _tls(value: object, what: str) -> Tls:
    from .transport.contract import tls_of  # the transport takes a while to import, and few serve

    return tls_of(value, what)


class Repository:
    """A lineage and the tiers that hold its states. Reading is safe from any thread; tracking belongs to the training thread."""

    def __init__(self, location: Location, config: Config) -> None:
        self._core = core = Core(location, config)
        self.location, self.config, self.node, self.recovered = core.location, core.config, core.node, core.recovered

    @property
    def core(self) -> Core:
        """What the rest of this package works with; nothing of it is promised to users."""
        return self._core

    # --- tracking --------------------------------------------------------------------------------------------------------

    @values.takes(
        branch=values.text,
        resume=values.flag,
        gradients=values.flag,
        only=values.patterns,
        strict=values.flag,
        defer=values.flag,
        objects=values.optional(values.named),
    )
    def track(
        self,
        *,
        branch: str = "main",
        start: str | State | None = None,
        resume: bool = True,
        rng: bool = True,
        gradients: bool = False,
        only: str | Sequence[str] | None = None,
        strict: bool = True,
        durable_every: int | None = None,
        durable_interval_s: float | None = None,
        cadence: Policy | str | None = None,
        retention: Retention | str | None = None,
        keep_best: str | Sequence[str] | None = None,
        back_pressure: BackPressure | str | None = None,
        on_failure: OnFailure | str | None = None,
        defer: bool = True,
        objects: Mapping[str, object] | None = None,
        config: object = None,
        **more: object,
    ) -> Tracker:
        """Track a training on a branch, and restore its objects to where the branch stands.

        A branch that exists is resumed at its newest restorable state. A branch that does not exist begins a root, or forks from ``start``.

            with repo.track(branch="main", model=model, optimizer=optimizer) as run:
                for batch in run.steps(loader):
                    run.capture(metrics={"loss": train_step(batch)})

        :param branch: the branch that captures move.
        :param start: the state from which a new branch forks.
        :param resume: False raises Conflict if the branch exists.
        :param rng: whether the global random number generators are captured.
        :param gradients: whether gradients are captured.
        :param only: as in ``restore``. With ``start`` it says what a fork takes of that state; when the branch is resumed later, it gets
            back everything that it captured.
        :param strict: as in ``restore``.
        :param durable_every: make every so many captures durable; None: as configured.
        :param durable_interval_s: make the newest state durable at most this often; None: as configured.
        :param cadence: both as one value, or another policy (``CheckFreq()``, joined by ``|`` with others), or its text, instead.
        :param retention: which durable states of this branch keep their bytes, such as ``"latest:5 every:1000"``; None: as configured.
        :param keep_best: a metric, or several, whose best state so far becomes durable and keeps its bytes, so that ``@best:METRIC`` can be
            restored. ``"reward:max"`` says that larger is better; else the metric's name does.
        :param back_pressure: what a capture does when memory is full: ``wait``, ``skip`` or ``drop-oldest``; None: as configured.
        :param on_failure: what a training does while nothing can be written: ``continue``, or ``raise`` at its next capture; None: as
            configured.
        :param defer: False copies everything before ``capture`` returns.
        :param objects: what is tracked besides, by name; here a name may be that of an argument, such as ``start``.
        :param config: the configuration of this training, for people to find and compare it by: a mapping, an argparse namespace, a
            dataclass, nested as you like. It is recorded as plain values by flat names such as ``optimizer.lr``; nothing of it is restored.
        :param more: what is tracked, by name: anything with ``state_dict`` and ``load_state_dict``, generators of random numbers
            (torch's, Python's, NumPy's), nested containers of those, of tensors and of plain values. All are restored in place; values that
            cannot be (numbers, text, tuples) are in the tracker's ``values``.
        :raises Conflict: the branch exists and was not to be resumed, or does not descend from ``start``.
        :raises NotFound: ``start`` names no state.
        :raises Corrupt: the branch's head is damaged; names the nearest ancestor that verifies, and how to go on from it.
        :raises Unavailable: the repository can only be read, or another process or folder holds the branch's bytes.
        :raises InvalidInput: an object cannot be tracked, or does not fit the state (with ``strict``).
        """
        self.core.check_open()
        self.core.home.check_writable()
        plain, live = split_values(together(more, objects or {}, rng=rng))
        refuse_misspelt(plain.keys() & more.keys(), signature(Repository.track).parameters)
        terms = Terms(
            branch=branch,
            start=None if start is None else values.revision(start),
            resume=resume,
            only=only,
            strict=strict,
            gradients=gradients,
            defer=defer,
            cadence=self.config.cadence_with(cadence, durable_every=durable_every, durable_interval_s=durable_interval_s),
            back_pressure=self.config.back_pressure
            if back_pressure is None
            else values.choice(back_pressure, BackPressure, "back_pressure"),
            on_failure=self.config.on_failure if on_failure is None else values.choice(on_failure, OnFailure, "on_failure"),
            config=configuration(config),
            retention=asked_for(retention_of(self.config.retention), retention, keep_best),
        )
        return follow(self.core, live, plain, terms)

    # --- states ----------------------------------------------------------------------------------------------------------

    @values.takes(rev=values.revision)
    def state(self, rev: str | State) -> State:
        """The state that a revision names.

            print(repo.state("main@best:loss").step)

        :raises NotFound: it names none; lists close names.
        :raises SyntaxProblem: it does not parse; points at the column.
        """
        return self.core.state(rev)

    @values.takes(rev=values.revision, only=values.patterns, device=values.optional(device_of))
    def load(self, rev: str | State, *, only: str | Sequence[str] | None = None, device: torch.device | str | None = None) -> Any:
        """A state's tree: nested containers of tensors, each byte checked. The caller owns the tensors.

        From disk they are memory-mapped privately: writing to them never reaches the pack.

            weights = repo.load("main~3", only="model")["model"]

        :param rev: the state.
        :param only: names, or patterns of paths (``"model"``, ``"optimizer/state/*"``); everything else is ``None`` in the tree, and is not
            read.
        :param device: where the tensors go.
        :raises Corrupt: a stored byte is wrong; names the file and the tensor, and the nearest ancestor that verifies.
        :raises Unavailable: its bytes are gone; names the nearest ancestor that has them.
        """
        return load(self.core, self.state(rev), only=only, device=device)

    @values.takes(rev=values.revision, into=values.named, only=values.patterns, strict=values.flag)
    def restore(
        self, rev: str | State, into: Mapping[str, object], *, only: str | Sequence[str] | None = None, strict: bool = True
    ) -> RestoreReport:
        """Put a state into live objects, in place; with ``strict`` nothing is changed unless everything fits and is verified.

            repo.restore("main~2", into={"model": model, "optimizer": optimizer})

        :param rev: the state.
        :param into: the objects, by the names under which they were tracked.
        :param only: names, or patterns of paths, of what is restored; all else is left alone and not read.
        :param strict: False restores what fits, and the report says what does not.
        :raises InvalidInput: names, shapes or types do not fit; lists them.
        """
        return restore(self.core, self.state(rev), into, only=only, strict=strict)

    @overload
    def verify(self, rev: str | State) -> State: ...

    @overload
    def verify(
        self,
        rev: None = None,
        *,
        since: str | None = None,
        limit_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport: ...

    @values.takes(
        rev=values.optional(values.revision),
        since=values.optional(values.string),
        limit_s=values.optional(values.seconds),
        on_progress=values.optional(values.callback),
    )
    def verify(
        self,
        rev: str | State | None = None,
        *,
        since: str | None = None,
        limit_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> State | VerifyReport:
        """Read every byte of a state and check that it has not rotted, and that it is what it was when it was first exported, imported or
        verified. Without a state: read every byte of the folder of packs once, and name every state, tensor and chunk that has rotted.

            for damage in repo.verify().damage:
                print(damage.state, damage.tensors, damage.problem)

        :param rev: the state; None: all of them.
        :param since: go on behind this uid: the ``mark`` of an earlier report.
        :param limit_s: end after so many seconds; the report then has a ``mark``.
        :param on_progress: called with the bytes that were read, and those that there are.
        :raises Corrupt: the first wrong byte of a state that was named.
        """
        if rev is None:
            from .upkeep.checking import Limits, check_all  # few ask for it

            return check_all(self.core, Limits(since, limit_s), on_progress=on_progress)
        if since is not None or limit_s is not None:
            raise InvalidInput("since and limit_s are of a check of everything: leave out the state, or leave them out")
        state = self.state(rev)
        verify(self.core, state)
        return state

    @values.takes(dry_run=values.flag, unknown=values.flag, on_progress=values.optional(values.callback))
    def gc(self, *, dry_run: bool = False, unknown: bool = False, on_progress: Callable[[int, int], None] | None = None) -> GcReport:
        """Make room on disk: what crashes left, files of states that were evicted, packs that no state needs; packs most of whose bytes
        nobody needs are rewritten. Captures, restores and clones go on beside it, in any process; interrupted, it goes on next time.

            print(repo.gc(dry_run=True).bytes_freed)

        :param dry_run: only say what there is to be done.
        :param unknown: delete also states of which no lineage was told, because their process died before it could; ``reindex`` takes
            them in instead.
        :param on_progress: called with the bytes of packs set free so far, and those that are to be.
        :raises Conflict: another process does it in this folder; with ``unknown``: or is at work there.
        """
        from .upkeep.gc import gc  # few ask for it

        return gc(self.core, is_dry_run=dry_run, takes_unknown=unknown, on_progress=on_progress)

    @values.takes(policy=values.optional(retention_of), dry_run=values.flag)
    def prune(self, policy: Retention | str | None = None, *, dry_run: bool = False) -> Pruned:
        """Drop the bytes of durable states that a policy does not keep, of every branch; what is known of them stays, as ``evicted``.

            report = repo.prune("latest:5 best:3:loss", dry_run=True)
            print(report, report.bytes_freed)

        Whatever the policy says, these stay: what names lead to, the newest durable state of each branch, where branches forked, the best
        by a metric that a training was told to keep, and what another process has in memory.

        :param policy: a ``Retention`` or its text; None: what the training of each branch asked for, and for others what is configured.
        :param dry_run: only say what would be dropped.
        :raises Unavailable: the repository can only be read, or another process goes on pruning it.
        """
        from .upkeep.retention import prune  # few ask for it by hand

        return prune(self.core, None if policy is None else retention_of(policy), dry_run=dry_run)

    @values.takes(source=values.optional(values.path), on_progress=values.optional(values.callback))
    def repair(
        self, *, source: str | os.PathLike[str] | None = None, on_progress: Callable[[int, int], None] | None = None
    ) -> RepairReport:
        """Check everything as ``verify`` does, and bring back what is damaged where another place has it: this process's memory, a further
        tier, or ``source``. Of the states that stay damaged the report says why, and the nearest ancestor to restore.

            print(repo.repair().hurt)

        :param source: another repository's folder, or a folder of packs, that may have the same states.
        :param on_progress: as of ``verify``.
        """
        from .upkeep.repair import repair  # few ask for it

        return repair(self.core, source=None if source is None else Path(source), on_progress=on_progress)

    # --- refs ------------------------------------------------------------------------------------------------------------

    @values.takes(rev=values.revision, message=values.optional(values.text))
    def tag(self, name: str, rev: str | State | None, *, message: str | None = None) -> Ref:
        """Name a state for good; it becomes durable. A tag that names it already stays as it is, so that a script may be started again.

            repo.tag("baseline", "main", message="before the learning rate was changed")

        :raises Conflict: the name is taken by another state.
        """
        with self._changing(rev) as (session, uid):
            return lineage_refs.keep_tag(session, name, uid, message=message)

    @values.takes(rev=values.revision)
    def branch(self, name: str, rev: str | State | None) -> Ref:
        """Make a branch at a state.

            repo.branch("second-try", "main~2")

        :raises Conflict: the name is taken.
        """
        with self._changing(rev) as (session, uid):
            return lineage_refs.branch(session, name, uid)

    @values.takes(rev=values.revision, expected=values.revision)
    def move(self, name: str, rev: str | State | None, *, expected: str | State) -> Ref:
        """Move a ref by compare-and-swap.

            repo.branch("best-so-far", "main~2")
            repo.move("best-so-far", "main", expected="main~2")

        :raises Conflict: it does not stand at ``expected`` any more.
        """
        old = self._uid(expected)
        with self._changing(rev) as (session, uid):
            return lineage_refs.move(session, name, uid, expected=old)

    def delete_ref(self, name: str) -> None:
        """Take a name away; its reflog stays.

        :raises NotFound: there is no such ref.
        """
        self._core.settle()
        with self._core.writing() as session:
            lineage_refs.delete(session, name)

    def refs(self) -> list[Ref]:
        """Every branch and tag, by name."""
        with self.core.reading() as session:
            return lineage_refs.refs(session)

    @property
    def notes(self) -> Notes:
        """What people wrote of states and branches.

        repo.notes.write("Diverges *after* the warm-up.", state="main")
        """
        return Notes(self.core)

    def reflog(self, name: str) -> list[RefEvent]:
        """The moves of a ref, newest first; also of a ref that was deleted."""
        with self.core.reading() as session:
            return lineage_refs.reflog(session, name)

    # --- lineage ---------------------------------------------------------------------------------------------------------

    @values.takes(rev=values.revision, limit=values.optional(values.count))
    def log(self, rev: str | State | None = "main", *, limit: int | None = None) -> States:
        """A state and its ancestors, all parents followed, newest first: a list, which ``frame`` makes a pandas frame of.

            for state in repo.log("main", limit=5):
                print(state.step, state.metrics["loss"])

        :raises NotFound: the revision names no state.
        """
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.log(session, uid, limit=limit))

    @values.takes(query=values.string)
    def find(self, query: str) -> States:
        """All states that a query asks for, in its order; a ``limit`` in the query bounds them. ``lineage.search.query`` has the grammar.

            best = repo.find("branch = main and metrics.loss < 100 order by metrics.loss limit 5")

        :raises SyntaxProblem: it does not parse, or compares a metric or an attribute that no state has; points at the column.
        """
        with self.core.reading() as session:
            check_names(session, query)
            return States(search.find_all(session, query))

    @values.takes(rev=values.revision, limit=values.optional(values.count))
    def ancestors(self, rev: str | State, *, limit: int | None = None) -> States:
        """All ancestors, further parents' included, newest generation first."""
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.ancestors(session, uid, limit=limit))

    @values.takes(rev=values.revision, limit=values.optional(values.count))
    def descendants(self, rev: str | State, *, limit: int | None = None) -> States:
        """All states that come from this one."""
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.descendants(session, uid, limit=limit))

    @values.takes(rev=values.optional(values.revision), ancestors=values.optional(values.count), descendants=values.optional(values.count))
    def graph(self, rev: str | State | None = None, *, ancestors: int | None = None, descendants: int | None = 0) -> nx.DiGraph[str]:
        """The lineage as a networkx graph, edges from parent to child; see ``lineage.view.graph``."""
        of = None if rev is None else [self._uid(rev)]
        from .lineage.show import view  # networkx takes a while to import, and few ask for it

        with self.core.reading() as session:
            return view.graph(session, of=of, ancestors=ancestors, descendants=descendants)

    @values.takes(query=values.string, metric=values.optional(values.key), sort=values.string, group=values.optional(values.text))
    def overview(self, query: str = "", *, metric: str | None = None, sort: str = "changed", group: str | None = None) -> Branches:
        """The branches at a glance: where each forked, how it went, its best state and the best that can be restored, what was configured.

            for branch in repo.overview(sort="best"):
                print(branch.name, branch.states, branch.best)

        :param query: a condition, as of ``find``; it must hold of a branch's newest state.
        :param metric: what ``last``, ``best`` and ``line`` are of; None: the most relevant one.
        :param sort: ``changed``, ``name``, ``began``, ``best``, ``last``, ``step``, ``states``, ``restorable``, ``durable``, ``bytes`` or
            ``took``; the best, newest and longest come first, unless ``-`` stands before it.
        :param group: ``study``, ``config.KEY`` or ``attr.KEY``: branches with the same value stand together.
        :raises SyntaxProblem: the query does not parse; points at the column.
        """
        from .show.overview import overview  # few ask for it, and it brings its own

        return overview(self.core, query, metric=metric, sort=sort, group=group)

    @values.takes(limit=values.optional(values.count))
    def runs(self, *, limit: int | None = None) -> list[Run]:
        """The trainings, the last begun first; ``finished_at`` is None of those that never said that they ended.

            print(repo.runs(limit=3))

        :param limit: so many at most; None: all of them.
        """
        from .show.overview import runs

        return runs(self.core, limit)

    # --- made of several states --------------------------------------------------------------------------------------------

    @values.takes(revs=values.several(values.revision))
    def compare(self, revs: Sequence[str | State]) -> Comparison:
        """States beside each other: configuration, metrics, attributes and code, what differs first; and where each can be restored.

        It reads no payload, so states whose bytes are gone can be compared as well.

            for row in repo.compare(["main~3", "main"]).metrics:
                print(row.key, row.values)

        :param revs: two to 32 of them.
        """
        from .show.overview import comparison

        return comparison(self.core, values.revisions(revs))

    @values.takes(
        old=values.revision, new=values.revision, only=values.patterns, stat=values.flag, on_progress=values.optional(values.callback)
    )
    def diff(
        self,
        old: str | State,
        new: str | State,
        *,
        only: str | Sequence[str] | None = None,
        stat: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Diff:
        """What changed between two states: each tensor's norms, distance, cosine, largest change, changed fraction; metrics, config, code.

        It needs memory for a few tensors only; what both hold in the same chunks is not read. Where the bytes of one of them are gone,
        all else is told, and ``lacking`` says why no tensors are, and which state can be restored instead.

            for change in repo.diff("main~3", "main").tensors:
                print(change.path, change.relative)

        :param old: the state from which changes count.
        :param new: the state to which they lead.
        :param only: which tensors are compared, as in ``load``.
        :param stat: read no payload: tensors are ``same`` by their digests, or ``unread``.
        :param on_progress: called with the bytes of ``new`` that were compared, and all of them.
        """
        from .algebra.diff import diff

        return diff(self.core, old, new, only=only, stat=stat, on_progress=on_progress)

    @values.takes(rev=values.revision, only=values.patterns, size=values.flag, on_progress=values.optional(values.callback))
    def blame(
        self,
        rev: str | State,
        *,
        only: str | Sequence[str] | None = None,
        size: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Blame]:
        """Which state last changed a bit of each tensor, along first parents; in the order of the tree.

        It reads manifests, and of the payload what lies in chunks that changed and that several tensors share.

            for found in repo.blame("main", only="model"):
                print(found.path, found.state.step, found.change)

        :param rev: the state whose tensors are asked about.
        :param only: which tensors, as in ``load``.
        :param size: also by how much it was changed there, which reads both versions of each tensor.
        :param on_progress: called with the states that were looked at, and the most there are.
        :raises Unavailable: the bytes of the state itself are gone; names the nearest ancestor that has them.
        """
        from .algebra.blame import blame

        return blame(self.core, rev, only=only, size=size, on_progress=on_progress)

    @values.takes(
        good=values.revision,
        bad=values.revision,
        only=values.patterns,
        verdicts=values.optional(values.path),
        on_progress=values.optional(values.callback),
    )
    def bisect(
        self,
        good: str | State,
        bad: str | State,
        predicate: Callable[[Any], object] | str,
        *,
        only: str | Sequence[str] | None = None,
        verdicts: str | os.PathLike[str] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Bisection:
        """The first state on the path from ``good`` to ``bad`` of which a predicate holds; at most ceil(log2(n)) + 1 of n are restored.

        States whose bytes are gone are not tried; where one of them may be the first, ``candidates`` are all that may.
        ``repo.bisect("warm", "main", lambda tree: tree["model"]["weight"].abs().max() > 100, only="model").bad`` is such a state.

        :param good: where it does not hold yet.
        :param bad: a descendant of it, where it holds.
        :param predicate: takes a state's containers, as ``load`` gives them, and says True where it is bad, False where it is good, None
            where that cannot be said. Or a condition on a metric, ``"loss > 5"``: then nothing is restored, and NaN is bad.
        :param only: what is loaded for it, as in ``load``.
        :param verdicts: a file that keeps what was found, so that a bisection that was broken off goes on; it is of one question.
        :param on_progress: called with the states that were tried, and how many these will be at most.
        :raises InvalidInput: ``bad`` does not descend from ``good``, or the predicate does not hold of one and of the other not.
        """
        from .algebra.bisection import bisect

        if not isinstance(predicate, str):
            values.callback(predicate, "predicate")
        return bisect(self.core, good, bad, predicate, only=only, verdicts=verdicts, on_progress=on_progress)

    @values.takes(
        revs=values.several(values.revision),
        method=values.string,
        weights=values.optional(values.several(values.number)),
        only=values.patterns,
        rest=values.string,
        into=values.optional(values.string),
        tag=values.optional(values.string),
        message=values.optional(values.text),
    )
    def merge(
        self,
        revs: Sequence[str | State],
        *,
        method: str = "mean",
        weights: Sequence[float] | None = None,
        only: str | Sequence[str] | None = "model",
        rest: str = "keep",
        into: str | None = None,
        tag: str | None = None,
        message: str | None = None,
        **options: Unpack[MergeOptions],
    ) -> State:
        """Make a state whose floating-point tensors are combined from those of ``revs``, and whose parents they are.

            soup = repo.merge(["main~2", "main"], method="mean", into="soup")

        - ``mean``: weighted by ``weights``.
        - ``greedy``: the mean of the members that help. ``evaluate(tree)`` gives a number for what ``only`` asks for, ``better`` says
          whether a ``"higher"`` or a ``"lower"`` one is better. Beginning with the best member, each next best is added unless the value
          gets worse.
        - ``ema``: an exponential moving average from the oldest of ``revs`` to the newest, which is the first parent, by ``decay``.
        - ``slerp``: between two states on the sphere, at ``t``, tensor by tensor.
        - ``ties``: of each state's changes since ``base`` (None: the nearest common ancestor) the largest ``density`` of every tensor;
          those of the sign that wins are averaged by ``weights``, and added to ``base`` times ``scale``.

        Statistics of BatchNorm are averaged like weights.

        :param revs: the parents.
        :param method: one of the above.
        :param weights: the members' shares, which sum to 1; None: equal ones.
        :param only: which tensors are combined. Integers, counters and all else are the first parent's.
        :param rest: ``"drop"`` leaves out objects of which nothing is asked for.
        :param into: a branch: a new one, or one whose head is the first parent. It makes the state durable.
        :param tag: a tag, which makes the state durable too; with neither it stays in memory.
        :param message: a text for the state.
        :param options: the options of the method.
        :raises InvalidInput: the states do not fit together (lists what does not), or an argument makes no sense.
        :raises Unavailable: the bytes of a parent are gone; names the nearest ancestor that has them.
        :raises Conflict: a name is taken, or the branch is elsewhere.
        """
        from .algebra.merge import Names, merge

        names = Names(into, tag, message)
        return merge(self.core, revs, method=method, weights=weights, only=only, rest=rest, names=names, options=options)

    @values.takes(rev=values.revision)
    def verify_merge(self, rev: str | State) -> State:
        """Make a merged state again from its parents, whose bytes must be here, and compare each tensor.

        :raises Corrupt: a tensor is not what the parents make; names it.
        """
        from .algebra.merge import verify_merge

        return verify_merge(self.core, rev)

    @values.takes(revs=values.several(values.revision), only=values.string, pick=values.optional(values.callback))
    def ensemble(
        self,
        revs: Sequence[str | State],
        model: torch.nn.Module,
        *,
        only: str = "model",
        pick: Callable[[Any], torch.Tensor] | None = None,
    ) -> Ensemble:
        """Predictions from several states, each loaded once.

            prediction = repo.ensemble(["main~2", "main"], model)(inputs)
            print(prediction.mean.shape, prediction.spread.max())

        :param revs: the members.
        :param model: the module that computes, with the weights and buffers of each state in turn; its own are not touched.
        :param only: the name under which the module was tracked.
        :param pick: chooses the tensor from an output that is not a tensor.
        :raises InvalidInput: a state does not fit the module; lists what does not.
        """
        from .algebra.ensemble import load_ensemble

        return load_ensemble(self.core, revs, model, only=only, pick=pick)

    # --- other processes ---------------------------------------------------------------------------------------------------

    @values.takes(
        url=values.string,
        token=values.optional(values.token),
        token_file=values.optional(values.path),
        tls=values.optional(_tls),
        is_writable=values.flag,
        timeout_s=values.seconds,
        data=values.optional(data_plane),
        pictures=values.optional(values.callback),
    )
    def serve(
        self,
        url: str = "tcp://127.0.0.1:0",
        *,
        token: str | bytes | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls: Tls | None = None,
        is_writable: bool = False,
        timeout_s: float = 10.0,
        data: str | None = None,
        pictures: Callable[[int], object] | None = None,
    ) -> Server:
        """Let other processes browse this lineage and clone its states, from memory where they are there, while training goes on.

            with repo.serve("tcp://127.0.0.1:0") as server:
                print(server.url)

        Closing the repository closes the server too.

        :param url: ``tcp://HOST:PORT``, or ``ucx://…`` to allow UCX; port 0 takes any that is free. ``http://127.0.0.1:0`` serves the page
            and the web API instead.
        :param token: what peers must prove that they know. A server that other machines can reach needs one, here, as ``token_file`` or as
            ``DATASTATES_TOKEN``.
        :param token_file: a file that holds the token.
        :param tls: certificates for TLS 1.3.
        :param is_writable: whether peers may push states, or make and move names on the page; needs a token.
        :param timeout_s: a peer that is silent for so long is treated as dead.
        :param data: what carries the bytes: ``tcp`` (ours), ``ucx`` (at a ``ucx://`` url; says that the network is private), or ``auto``:
            UCX where both sides found RDMA, ours otherwise. None: as configured (``DATASTATES_DATA``).
        :param pictures: with ``http://``: gives the picture of a sample for its index, for the page's outliers: an array, or bytes of a
            PNG, JPEG, GIF or WebP of at most 1 MiB.
        :raises InvalidInput: other machines can reach it, or it is writable, and there is no token.
        :raises Unavailable: the address is taken.
        :raises Unsupported: ``data="ucx"``, and UCXX is not installed.
        """
        from .clone.serving import PeerServer  # the transport takes a while to import, and few serve
        from .transport.session.handshake import check_writers, read_token

        self.core.check_open()
        secret = read_token(token, token_file)
        if is_writable:
            check_writers(url, secret)
        if url.startswith("http:"):
            from .api.serve import serve_repository  # FastAPI is imported when it is asked for

            server: Server = serve_repository(self, url, token=secret, tls=tls, is_writable=is_writable, pictures=pictures)
        elif pictures is not None:
            raise InvalidInput(f"{url} shows no pictures: give pictures= with an http:// address, or leave it out")
        else:
            data = self.config.data if data is None else data
            server = PeerServer(self.core, url, token=secret, tls=tls, is_writable=is_writable, timeout_s=timeout_s, data=data)
        self.core.servers.append(server)
        return server

    # --- the end -----------------------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """What keeps this process from writing its states, since when, and what that has cost so far; None while all is well.

        Until then they are in memory only, and not durable.
        """
        return None if self.core.running is None else self.core.running.trouble

    def flush(self) -> None:
        """Wait until every capture so far is recorded (not: durable) or has failed."""
        if self.core.running is not None:
            self.core.running.flush()

    def close(self) -> None:
        """Make durable what is to be (tags, branch heads), end the threads, let go; idempotent.

        :raises DatastatesError: (or another error of the background) that no handle and no later capture has raised.
        """
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as exc:  # it must not hide the error that ended the block
            if error is None:
                raise
            if not (isinstance(exc, DatastatesError) and exc.repeats(error)):
                _logger.exception("closing the repository failed")

    def __repr__(self) -> str:
        return f"<Repository {self.location}>"

    def _repr_html_(self) -> str:
        from .show.notebook import repository_html  # only notebooks ask

        return repository_html(self.core)

    @contextmanager
    def _changing(self, rev: str | State | None) -> Iterator[tuple[Session, str]]:
        uid = self._uid(rev)
        with self.core.writing() as session:
            yield session, uid

    def _uid(self, rev: str | State | None) -> str:
        return self.core.state(values.revision(rev)).uid
