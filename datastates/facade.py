"""The methods of ``Repository`` for states that were captured: comparisons, searches, names, notes
and maintenance."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, overload

from datastates.lineage.query import names, pages, revision, walk
from datastates.lineage.query.fields import check_names
from datastates.lineage.query.incomplete import Incomplete, incomplete
from datastates.lineage.states import Note, Ref, RefEvent, Revision, Run, State
from datastates.lineage.views.branches import branches
from datastates.lineage.views.comparison import Comparison, check_count, compare
from datastates.lineage.write import refs, runs
from datastates.maintenance.core import Core
from datastates.maintenance.environment import user_name
from datastates.maintenance.lease import check_idle, life_of
from datastates.maintenance.loading import verify
from datastates.maintenance.location import Location
from datastates.policy.retention import Retention, retention_of

from . import values
from .config import Config
from .errors import InvalidInput
from .notebook import RepositoryStats, States, stats
from .values import Attributes, Count, FilePath, Key, Message, Metrics, Patterns, Seconds, Text

if TYPE_CHECKING:
    import networkx as nx
    import torch
    from opentelemetry.metrics import Meter

    from datastates.compare.blame import Bisection, Blame
    from datastates.compare.diff import Diff
    from datastates.compare.ensemble import Ensemble
    from datastates.lineage.session import Session
    from datastates.lineage.views.branch_rows import Branches
    from datastates.maintenance.further import CopyReport
    from datastates.maintenance.gc import GcReport
    from datastates.maintenance.repair import RepairReport
    from datastates.maintenance.retention_pass import Pruned
    from datastates.maintenance.verify import VerifyReport
    from datastates.transport.peer import Peer


class Notes:
    """The notes of a repository, ``repo.notes``.

        note = repo.notes.write("Diverges *after* the warm-up.", state="main")
        repo.notes.edit(note, "Diverges after step 400.")
        print([note.text for note in repo.notes])

    Iterating yields all of them, newest first.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    @values.checked
    def write(
        self,
        text: Text,
        *,
        state: Revision | None = None,
        branch: Text | None = None,
        author: Text | None = None,
    ) -> Note:
        """Write a note about a state or a branch, in Markdown.

        :param text: at most 16,384 characters.
        :param state: a revision. The note stays with that state when a branch moves.
        :param branch: a branch; its notes are kept under its name.
        :param author: who wrote it; None: the user that this process runs as.
        :raises NotFound: there is no such state, or no such branch.
        """
        uid = None if state is None else self._core.state(state).uid
        with self._core.writing() as session:
            return refs.write(
                session,
                text,
                state=uid,
                branch=branch,
                author=user_name() if author is None else author,
            )

    @values.checked
    def of(self, state: Revision | None = None, *, branch: Text | None = None) -> list[Note]:
        """The notes on a state or on a branch, newest first."""
        if (state is None) == (branch is None):
            raise InvalidInput("notes are of a state or of a branch: name one of the two")
        uid = None if state is None else self._core.state(state).uid
        with self._core.reading() as session:
            return names.notes(session, state=uid, branch=branch)

    @values.checked
    def edit(self, note: Note | str, text: Text) -> Note:
        """Change the text of a note. A note that is named by its uid is changed whatever it reads.

        :raises NotFound: there is no such note.
        :raises Conflict: somebody edited the note since it was read.
        """
        uid, seen = _named(note)
        with self._core.writing() as session:
            return refs.edit(session, uid, text, seen=seen)

    def delete(self, note: Note | str) -> Note:
        """Delete a note permanently; returns the note. A note that is named by its uid is deleted
        whatever it reads.

        :raises NotFound: there is no such note.
        :raises Conflict: somebody edited the note since it was read.
        """
        uid, seen = _named(note)
        with self._core.writing() as session:
            return refs.remove(session, uid, seen=seen)

    def __iter__(self) -> Iterator[Note]:
        with self._core.reading() as session:
            return iter(names.notes(session))

    def __repr__(self) -> str:
        return f"<Notes of {self._core.location}>"


def _named(note: Note | str) -> tuple[str, Note | None]:
    return (note.uid, note) if isinstance(note, Note) else (values.text(note, "the note"), None)


def _peer(value: object, what: str) -> object:
    """A connected peer.

    :raises InvalidInput: it is none.
    """
    from datastates.transport.peer import Peer

    if not isinstance(value, Peer):
        raise InvalidInput(
            f"{what} is {values.shown(value)}: give peers, as peers=[datastates.connect(url)]"
        )
    return value


Peers = Annotated["Sequence[Peer]", values.several(_peer)]


class Facade:
    """An open repository. ``core`` is for this package, and no part of the public interface."""

    def __init__(self, location: Location, config: Config) -> None:
        self.core = core = Core(location, config)
        self.location, self.config, self.node, self.recovered = (
            core.location,
            core.config,
            core.node,
            core.recovered,
        )

    @values.checked
    def state(self, rev: Revision) -> State:
        """The state that a revision names.

            print(repo.state("main@best:loss").step)

        :raises NotFound: it names none; lists close names.
        :raises SyntaxProblem: it does not parse; points at the column.
        """
        return self.core.state(rev)

    @contextmanager
    def _changing(self, rev: Revision | None) -> Iterator[tuple[Session, str]]:
        uid = self._uid(rev)
        with self.core.writing() as session:
            yield session, uid

    def _uid(self, rev: Revision | None) -> str:
        return self.core.state(values.revision(rev)).uid

    # --- several states ---------------------------------------------------------------------------

    @values.checked
    def compare(self, revs: Sequence[Revision]) -> Comparison:
        """Several states in columns: configuration, metrics, attributes and code, with differences
        first, and where each state can be restored.

        No payload is read, so states whose bytes are gone can be compared as well.

            for row in repo.compare(["main~3", "main"]).metrics:
                print(row.key, row.values)

        :param revs: 2 to 32 states.
        """
        chosen = values.revisions(revs)
        check_count(len(chosen))
        with self.core.reading() as session:
            return compare(session, chosen, [revision.resolve(session, rev) for rev in chosen])

    @values.checked
    def diff(
        self,
        old: Revision,
        new: Revision,
        *,
        only: Patterns | None = None,
        stat: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Diff:
        """The changes between two states in tensors, metrics, configuration and code. Each tensor
        has its norms, distance, cosine, largest change and changed fraction.

        It needs memory for a few tensors only, and does not read what both states hold in the same
        chunks. If the bytes of one of them are gone, everything but the tensors is compared, and
        ``lacking`` has the reason and a state that can be restored instead.

            for change in repo.diff("main~3", "main").tensors:
                print(change.path, change.relative)

        :param old: the state before the changes.
        :param new: the state after them.
        :param only: which tensors are compared, as in ``load``.
        :param stat: read no payload: tensors are ``same`` by their digests, or ``unread``.
        :param on_progress: called with the bytes of ``new`` that have been compared, and their
            total.
        """
        from datastates.compare.diff import diff

        return diff(self.core, old, new, only=only, stat=stat, on_progress=on_progress)

    @values.checked
    def blame(
        self,
        rev: Revision,
        *,
        only: Patterns | None = None,
        size: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Blame]:
        """For each tensor, in the order of the tree, the state that last changed any bit of it,
        along first parents.

        It reads manifests, and the changed chunks that several tensors share.

            for found in repo.blame("main", only="model"):
                print(found.path, found.state.step, found.change)

        :param rev: the state that has the tensors.
        :param only: which tensors, as in ``load``.
        :param size: also compute by how much each tensor changed there, which reads both versions
            of it.
        :param on_progress: called with the number of states looked at so far, and the most that
            there can be.
        :raises Unavailable: the bytes of the state itself are gone; names the nearest ancestor that
            has them.
        """
        from datastates.compare.blame import blame

        return blame(self.core, rev, only=only, size=size, on_progress=on_progress)

    @values.checked
    def bisect(
        self,
        good: Revision,
        bad: Revision,
        predicate: Callable[[Any], object] | str,
        *,
        only: Patterns | None = None,
        verdicts: FilePath | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Bisection:
        """The first state on the path from ``good`` to ``bad`` for which a predicate holds; at most
        ceil(log2(n)) + 1 of n are restored.

        States whose bytes are gone are not tried. If one of them may be the first, ``candidates``
        lists all that may. ``repo.bisect("warm", "main", lambda tree:
        tree["model"]["weight"].abs().max() > 100, only="model").bad`` is such a state.

        :param good: a state for which the predicate does not hold yet.
        :param bad: a descendant of ``good`` for which it holds.
        :param predicate: a function that takes a state's containers, as ``load`` returns them, and
            returns True if the state is bad, False if it is good, None if it cannot tell. Or a
            condition on a metric, ``"loss > 5"``: then nothing is restored, and NaN is bad.
        :param only: what is loaded for the predicate, as in ``load``.
        :param verdicts: a file that keeps the results so far, so that an interrupted bisection can
            go on. Use one file for each question.
        :param on_progress: called with the number of states tried so far, and the most that will be
            tried.
        :raises InvalidInput: ``bad`` does not descend from ``good``, or the predicate gives the
            same result for both.
        """
        from datastates.compare.blame import bisect

        if not isinstance(predicate, str):
            values.callback(predicate, "predicate")
        return bisect(
            self.core, good, bad, predicate, only=only, verdicts=verdicts, on_progress=on_progress
        )

    @values.checked
    def merge(
        self,
        revs: Sequence[Revision],
        *,
        method: str = "mean",
        weights: Sequence[float] | None = None,
        only: Patterns | None = "model",
        rest: str = "keep",
        decay: float | None = None,
        into: str | None = None,
        tag: str | None = None,
        message: Message | None = None,
    ) -> State:
        """Make a state whose parents are ``revs``, and whose floating-point tensors are combined
        from theirs.

            soup = repo.merge(["main~2", "main"], method="mean", into="soup")

        - ``mean``: weighted by ``weights``.
        - ``ema``: an exponential moving average by ``decay``, from the oldest of ``revs`` to the
          newest, which is the first parent.

        Statistics of BatchNorm are averaged like weights.

        :param revs: the parents.
        :param method: one of the above.
        :param weights: the members' shares, which sum to 1; None: equal shares.
        :param only: which tensors are combined. Integers, counters and everything else are the
            first parent's.
        :param rest: ``"drop"`` leaves out objects of which ``only`` selects nothing.
        :param decay: for ``ema``: how much of the average each newer state leaves, from 0 to below
            1.
        :param into: a branch: a new one, or one whose head is the first parent. It makes the state
            durable.
        :param tag: a tag, which makes the state durable too. With neither, the state stays in
            memory.
        :param message: a text for the state.
        :raises InvalidInput: the states do not fit together (lists what does not), or an argument
            makes no sense.
        :raises Unavailable: the bytes of a parent are gone; names the nearest ancestor that has
            them.
        :raises Conflict: a name is taken, or the branch's head is not the first parent.
        """
        from datastates.compare.merge import Names, merge

        return merge(
            self.core,
            revs,
            method=method,
            weights=weights,
            only=only,
            rest=rest,
            decay=decay,
            names=Names(into, tag, message),
        )

    @values.checked
    def verify_merge(self, rev: Revision) -> State:
        """The merged state, once it has been merged again from its parents and each tensor is the
        same. The parents' bytes must be here.

        :raises Corrupt: a tensor is not what merging the parents gives; names it.
        """
        from datastates.compare.merge import verify_merge

        return verify_merge(self.core, rev)

    @values.checked
    def ensemble(
        self,
        revs: Sequence[Revision],
        model: torch.nn.Module,
        *,
        only: str = "model",
        pick: Callable[[Any], torch.Tensor] | None = None,
    ) -> Ensemble:
        """Predictions from several states, each loaded once.

            prediction = repo.ensemble(["main~2", "main"], model)(inputs)
            print(prediction.mean.shape, prediction.spread.max())

        :param revs: the members.
        :param model: the module that computes, with the weights and buffers of each state in turn.
            Its own are not touched.
        :param only: the name under which the module was tracked.
        :param pick: chooses the tensor from an output that is not a tensor.
        :raises InvalidInput: a state does not fit the module; lists what does not.
        """
        from datastates.compare.ensemble import load_ensemble

        return load_ensemble(self.core, revs, model, only=only, pick=pick)

    # --- the lineage ------------------------------------------------------------------------------

    @values.checked
    def log(self, rev: Revision | None = "main", *, limit: Count | None = None) -> States:
        """A state and its ancestors along all parents, newest first: a list, whose ``frame`` makes
        a pandas frame of it.

            for state in repo.log("main", limit=5):
                print(state.step, state.metrics["loss"])

        :raises NotFound: the revision names no state.
        """
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.log(session, uid, limit=limit))

    def stats(self) -> RepositoryStats:
        """The number of states by status, name and tier. Also what this process has captured,
        copied and written so far, and how long each stage took.

            stats = repo.stats()
            print(stats, stats.activity.bytes_written, stats.activity.timing("capture").mean_s)
        """
        return stats(self.core)

    def instrument(self, meter: Meter | None = None) -> None:
        """Let OpenTelemetry read the ``stats`` of this process whenever it collects: counters, and
        the time of each stage.

        :param meter: the meter that makes the instruments; None: the one of the global provider
            called ``datastates``.
        :raises Unsupported: OpenTelemetry is not installed.
        """
        from .telemetry import instrument  # few ask for it

        instrument(self.core, meter)

    @values.checked
    def find(self, query: str) -> States:
        """All states that match a query, in the query's order and up to its ``limit``.
        ``lineage.search.query`` has the grammar.

            best = repo.find("branch = main and metrics.loss < 100 order by metrics.loss limit 5")

        :raises SyntaxProblem: it does not parse, or compares a metric or an attribute that no state
            has; points at the column.
        """
        with self.core.reading() as session:
            check_names(session, query)
            return States(pages.find_all(session, query))

    @values.checked
    def ancestors(self, rev: Revision, *, limit: Count | None = None) -> States:
        """All ancestors along all parents, newest generation first."""
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.ancestors(session, uid, limit=limit))

    @values.checked
    def descendants(self, rev: Revision, *, limit: Count | None = None) -> States:
        """All states that descend from this one."""
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.descendants(session, uid, limit=limit))

    @values.checked
    def graph(
        self,
        rev: Revision | None = None,
        *,
        ancestors: Count | None = None,
        descendants: Count | None = 0,
    ) -> nx.DiGraph[str]:
        """The lineage as a networkx graph, edges from parent to child; see
        ``lineage.view.graph``."""
        of = None if rev is None else [self._uid(rev)]
        # networkx takes a while to import, and few ask for it
        from datastates.lineage.views import (
            detail,
        )

        with self.core.reading() as session:
            return detail.graph(session, of=of, ancestors=ancestors, descendants=descendants)

    @values.checked
    def overview(
        self,
        query: str = "",
        *,
        metric: Key | None = None,
        sort: str = "changed",
        group: Text | None = None,
    ) -> Branches:
        """The branches at a glance: where each forked, how it went, its best state, the best that
        can be restored, and its configuration.

            for branch in repo.overview(sort="best"):
                print(branch.name, branch.states, branch.best)

        :param query: a search, as in ``find``, that must find a branch's newest state. If it has an
            order, that is used instead of ``sort``.
        :param metric: the metric that ``last``, ``best`` and ``line`` show; None: a validation
            metric if there is one, else the most relevant one.
        :param sort: ``changed``, ``name``, ``began``, ``best``, ``last``, ``step``, ``states``,
            ``restorable``, ``durable``, ``bytes`` or ``took``. The best, newest and longest come
            first; a ``-`` in front reverses the order.
        :param group: ``study``, ``config.KEY`` or ``attr.KEY``: branches with the same value stand
            together.
        :raises SyntaxProblem: the query does not parse; points at the column.
        """
        with self.core.reading() as session:
            return branches(
                session,
                query,
                metric=metric,
                sort=sort,
                group=group,
                living=partial(life_of, home=self.core.home),
                folder=self.core.home.uid,
            )

    @values.checked
    def runs(self, *, limit: Count | None = None) -> list[Run]:
        """The trainings, the last begun first; ``finished_at`` is None for those whose end was
        never recorded.

            print(repo.runs(limit=3))

        :param limit: the most to return; None: all of them.
        """
        most = sys.maxsize >> 1 if limit is None else limit
        with self.core.reading() as session:
            return runs.listing(session, limit=most)[0]

    @values.checked
    def incomplete(self, *, limit: Count = 50) -> Incomplete:
        """The states of several ranks that are incomplete: those that wait for parts of some ranks,
        and those that were given up, and why.

            for state in repo.incomplete().waiting:
                print(state.branch, state.step, state.missing, state.since, state.has_ended)

        :param limit: the most to return of those that were given up, the last first.
        """
        with self.core.reading() as session:
            return incomplete(session, limit=limit)

    # --- tags, branches and notes -----------------------------------------------------------------

    @values.checked
    def tag(self, name: str, rev: Revision | None, *, message: Message | None = None) -> Ref:
        """Name a state permanently, which makes it durable. A tag that names it already stays as it
        is, so that a script may be started again.

            repo.tag("baseline", "main", message="before the learning rate was changed")

        If the bytes of the state are gone, the tag is made, and a warning names the nearest state
        that has its bytes.

        :raises Conflict: the name is taken by another state.
        """
        with self._changing(rev) as (session, uid):
            made = refs.keep_tag(session, name, uid, message=message)
            refs.warn(session, made)
        return made

    @values.checked
    def branch(self, name: str, rev: Revision | None) -> Ref:
        """Make a branch at a state. This only creates a name: no training starts, and no bytes are
        copied.

            repo.branch("second-try", "main~2")
            print(repo.state("second-try").step)

        ``repo.track(branch="second-try", ...)`` continues it. A training that forks needs no such
        call: ``repo.track(branch="second-try", start="main~2", ...)`` makes the branch.

        :raises Conflict: the name is taken.
        """
        with self._changing(rev) as (session, uid):
            return refs.branch(session, name, uid)

    @values.checked
    def move(self, name: str, rev: Revision | None, *, expected: Revision) -> Ref:
        """Move a ref by compare-and-swap.

            repo.branch("best-so-far", "main~2")
            repo.move("best-so-far", "main", expected="main~2")

        :raises Conflict: the ref no longer points to ``expected``.
        """
        old = self._uid(expected)
        with self._changing(rev) as (session, uid):
            moved = refs.move(session, name, uid, expected=old)
            refs.warn(session, moved)
        return moved

    @values.checked
    def rename(self, name: Text, new: Text) -> Ref:
        """Give a branch or a tag another name. A branch keeps its history: its states, its notes
        and the retention of its trainings.

            repo.branch("third-try", "main")
            repo.rename("third-try", "final")

        The reflog of each name has a line about it.

        :raises Conflict: the new name is taken, or a training of the branch may be running.
        :raises NotFound: there is no such ref.
        """
        self.core.settle()
        with self.core.writing() as session:
            check_idle(session, name, self.core.home)
            return refs.rename(session, name, new)

    @values.checked
    def delete_ref(self, name: str, *, bytes: bool = False, dry_run: bool = False) -> Pruned | None:
        """Delete a name; its reflog stays, and so do the states.

            repo.branch("dead-end", "main")
            print(repo.delete_ref("dead-end", bytes=True).bytes_freed)

        :param bytes: also drop the bytes of the states that no other branch or tag leads to; they
            stay in the lineage as ``evicted``. Returns what was dropped, and why the others stay.
        :param dry_run: delete nothing, and report what ``bytes`` would drop.
        :raises NotFound: there is no such ref.
        :raises Conflict: with ``bytes``, a training of the branch may be running.
        """
        if bytes or dry_run:
            from datastates.maintenance.retention_pass import drop_ref  # few ask for it

            return drop_ref(self.core, name, dry_run=dry_run)
        self.core.settle()
        with self.core.writing() as session:
            refs.delete_ref(session, name)
        return None

    @values.checked
    def annotate(
        self,
        rev: Revision,
        *,
        metrics: Metrics | None = None,
        attributes: Attributes | None = None,
        replace: bool = False,
        author: Text | None = None,
    ) -> State:
        """Add metrics and attributes to a state that was captured before; returns the state as it
        is then. Its bytes and digest stay.

            state = repo.annotate("main", metrics={"test_loss": 0.31})
            print(state.metrics["test_loss"], repo.reflog(state.uid)[0].reason)

        The log of metrics, with author, time and replaced values, is the reflog under the state's
        uid.

        :param rev: the state.
        :param metrics: numbers, by name, as for ``capture``.
        :param attributes: values, by name; None removes one.
        :param replace: change metrics that the state has already.
        :param author: who adds the metrics; None: the user and the host of this process.
        :raises Conflict: the state has another value of a metric, and ``replace`` is false.
        :raises NotFound: the revision names no state.
        """
        with self._changing(rev) as (session, uid):
            refs.annotate(session, uid, attributes or {})
            return refs.measure(
                session,
                uid,
                {} if metrics is None else metrics,
                author=author or f"{user_name()}@{self.node}",
                is_replacing=replace,
            )

    def refs(self) -> list[Ref]:
        """Every branch and tag, by name."""
        with self.core.reading() as session:
            return names.refs(session)

    @property
    def notes(self) -> Notes:
        """What people wrote about states and branches.

        repo.notes.write("Diverges *after* the warm-up.", state="main")
        """
        return Notes(self.core)

    def reflog(self, name: str) -> list[RefEvent]:
        """The moves of a ref, newest first. A ref that was deleted still has them."""
        with self.core.reading() as session:
            return names.reflog(session, name)

    # --- maintenance ------------------------------------------------------------------------------

    @overload
    def verify(self, rev: Revision) -> State: ...

    @overload
    def verify(
        self,
        rev: None = None,
        *,
        tier: str | None = None,
        since: str | None = None,
        limit_s: Seconds | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport: ...

    @values.checked
    def verify(
        self,
        rev: Revision | None = None,
        *,
        tier: str | None = None,
        since: str | None = None,
        limit_s: Seconds | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> State | VerifyReport:
        """Read every byte of a state, and check that none has rotted and that all are as they were
        when the state was first exported, imported or verified. Without a state: read every byte of
        the packs once, in the folder and in the bucket if there is one, and name every damaged
        state, tensor and chunk.

            for damage in repo.verify().damage:
                print(damage.state, damage.tensors, damage.problem)

        :param rev: the state; None: all of them.
        :param tier: the name of a further tier, which is read instead of the packs.
        :param since: resume after this uid, the ``mark`` of an earlier report.
        :param limit_s: stop after this many seconds; the report then has a ``mark``.
        :param on_progress: called with the bytes read so far, and their total.
        :raises Corrupt: a byte of the state ``rev`` is wrong; names the first.
        """
        if rev is None:
            from datastates.maintenance.verify import Limits, check_all  # few ask for it

            limits = Limits(since, limit_s, tier=tier)
            return check_all(self.core, limits, on_progress=on_progress)
        if since is not None or limit_s is not None or tier is not None:
            raise InvalidInput(
                "since, limit_s and tier belong to a check of everything: leave out the state, or"
                " leave out these arguments"
            )
        state = self.state(rev)
        verify(self.core, state)
        return state

    @values.checked
    def gc(
        self,
        *,
        dry_run: bool = False,
        unknown: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> GcReport:
        """Free space on disk. Delete what crashes left, files of evicted states, and packs that no
        state needs. Rewrite packs most of whose bytes no state needs. Captures, restores and clones
        continue meanwhile, in any process. If it is interrupted, the next call finishes.

            print(repo.gc(dry_run=True).bytes_freed)

        :param dry_run: only report what would be done.
        :param unknown: also delete states that are neither in the lineage nor in its backup,
            because their process died before it recorded them. ``reindex`` adds them to the lineage
            instead.
        :param on_progress: called with the bytes of packs freed so far, and the total to be freed.
        :raises Conflict: another process collects in this folder; with ``unknown``, also if another
            process uses it at all.
        """
        from datastates.maintenance.gc import gc  # few ask for it

        return gc(self.core, is_dry_run=dry_run, takes_unknown=unknown, on_progress=on_progress)

    @values.checked
    def prune(
        self,
        policy: Retention | str | None = None,
        *,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Pruned:
        """Drop the bytes of durable states that a policy does not keep, on every branch; the states
        stay in the lineage as ``evicted``.

            report = repo.prune("latest:5 best:3:loss", dry_run=True)
            print(report, report.bytes_freed)

        Under any policy these keep their bytes: states that refs name, the newest durable state of
        each branch, states where branches forked, the best by a metric of ``keep_best``, and states
        in the memory of another process.

        :param policy: a ``Retention`` or its text; None: the policy that the training of each
            branch was given, else the configured one.
        :param dry_run: only report what would be dropped.
        :param on_progress: called with the number of states that were read so far, and about how
            many there are; then with the number of states that were dropped so far, and how many
            will be.
        :raises Unavailable: the repository can only be read, or another process is pruning it.
        """
        from datastates.maintenance.retention_pass import (  # few ask for it by hand
            no_progress,
            prune,
        )

        return prune(
            self.core,
            None if policy is None else retention_of(policy, "policy"),
            dry_run=dry_run,
            tell=on_progress or no_progress,
        )

    @values.checked
    def copy(
        self,
        *revs: Revision,
        to: Text,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CopyReport:
        """Copy durable states to a further tier, and wait until it has them, as in
        ``repo.copy("main~1", "baseline", to="s3")``.

        :param revs: the states. Without any, all states in the folder of packs that the tier lacks
            are copied, except those that a policy keeps near.
        :param to: the name of the tier.
        :param on_progress: called with the number of states that were copied, and their total.
        :raises NotFound: there is no such tier or state.
        :raises Unavailable: a state is not durable here.
        """
        from datastates.maintenance.further import copy  # few ask for it

        uids = [self._uid(rev) for rev in revs]
        return copy(self.core, uids, to, on_progress)

    @values.checked
    def repair(
        self,
        *,
        source: FilePath | None = None,
        peers: Peers = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RepairReport:
        """Check everything as ``verify`` does, and bring back what is damaged from another place
        that has it: this process's memory, a further tier, ``source``, or a peer. For each state
        that stays damaged the report has the reason, and the nearest ancestor to restore.

            print(repo.repair().hurt)

        :param source: another repository's folder, a folder of packs, or the URL of a tier, that
            may have the same states.
        :param peers: other processes that may have them, in memory or on disk, as
            ``datastates.connect`` returns them. Only damaged chunks are moved. A state that was
            never sealed is then only as good as these peers are, and is noted as cloned from them.
        :param on_progress: as in ``verify``.
        """
        from datastates.maintenance.repair import repair  # few ask for it
        from datastates.transport.peer import PeerTier

        return repair(
            self.core,
            source=None if source is None else str(source),
            peers=[PeerTier(peer) for peer in peers],
            on_progress=on_progress,
        )
