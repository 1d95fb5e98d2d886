"""The methods of a repository that read the lineage alone, and no payload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastates import values
from datastates.lineage.search import pages as search
from datastates.lineage.search import walk
from datastates.lineage.search.names import check_names
from datastates.lineage.states import Run, State
from datastates.show.frames import States

if TYPE_CHECKING:
    import networkx as nx
    from opentelemetry.metrics import Meter

    from datastates.lineage.search.incomplete import Incomplete
    from datastates.lineage.show.branches import Branches
    from datastates.show.stats import RepositoryStats


from .opened import Opened

__all__ = ["History"]


class History(Opened):
    """The lineage: logs, searches, walks, branches and runs."""

    @values.takes(rev=values.revision, limit=values.optional(values.count))
    def log(self, rev: str | State | None = "main", *, limit: int | None = None) -> States:
        """A state and its ancestors along all parents, newest first: a list, whose ``frame`` makes a pandas frame of it.

            for state in repo.log("main", limit=5):
                print(state.step, state.metrics["loss"])

        :raises NotFound: the revision names no state.
        """
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.log(session, uid, limit=limit))

    def stats(self) -> RepositoryStats:
        """How much there is, by status, name and tier; what this process has captured, copied and written so far; and how long each
        stage of that took.

            stats = repo.stats()
            print(stats, stats.activity.bytes_written, stats.activity.timing("capture").mean_s)
        """
        from datastates.show.stats import stats  # few ask for it

        return stats(self.core)

    def instrument(self, meter: Meter | None = None) -> None:
        """Let OpenTelemetry read what ``stats`` says of this process whenever it collects: counters, and the time of each stage.

        :param meter: the meter that makes the instruments; None: the one of the global provider called ``datastates``.
        :raises Unsupported: OpenTelemetry is not installed.
        """
        from datastates.show.telemetry import instrument  # few ask for it

        instrument(self.core, meter)

    @values.takes(query=values.string)
    def find(self, query: str) -> States:
        """All states that match a query, in the query's order and up to its ``limit``. ``lineage.search.query`` has the grammar.

            best = repo.find("branch = main and metrics.loss < 100 order by metrics.loss limit 5")

        :raises SyntaxProblem: it does not parse, or compares a metric or an attribute that no state has; points at the column.
        """
        with self.core.reading() as session:
            check_names(session, query)
            return States(search.find_all(session, query))

    @values.takes(rev=values.revision, limit=values.optional(values.count))
    def ancestors(self, rev: str | State, *, limit: int | None = None) -> States:
        """All ancestors along all parents, newest generation first."""
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.ancestors(session, uid, limit=limit))

    @values.takes(rev=values.revision, limit=values.optional(values.count))
    def descendants(self, rev: str | State, *, limit: int | None = None) -> States:
        """All states that descend from this one."""
        uid = self._uid(rev)
        with self.core.reading() as session:
            return States(walk.descendants(session, uid, limit=limit))

    @values.takes(rev=values.optional(values.revision), ancestors=values.optional(values.count), descendants=values.optional(values.count))
    def graph(self, rev: str | State | None = None, *, ancestors: int | None = None, descendants: int | None = 0) -> nx.DiGraph[str]:
        """The lineage as a networkx graph, edges from parent to child; see ``lineage.view.graph``."""
        of = None if rev is None else [self._uid(rev)]
        from datastates.lineage.show import view  # networkx takes a while to import, and few ask for it

        with self.core.reading() as session:
            return view.graph(session, of=of, ancestors=ancestors, descendants=descendants)

    @values.takes(query=values.string, metric=values.optional(values.key), sort=values.string, group=values.optional(values.text))
    def overview(self, query: str = "", *, metric: str | None = None, sort: str = "changed", group: str | None = None) -> Branches:
        """The branches at a glance: where each forked, how it went, its best state, the best that can be restored, and its configuration.

            for branch in repo.overview(sort="best"):
                print(branch.name, branch.states, branch.best)

        :param query: a condition, as in ``find``, that must hold for a branch's newest state.
        :param metric: the metric that ``last``, ``best`` and ``line`` show; None: the most relevant one.
        :param sort: ``changed``, ``name``, ``began``, ``best``, ``last``, ``step``, ``states``, ``restorable``, ``durable``, ``bytes`` or
            ``took``. The best, newest and longest come first; a ``-`` in front reverses the order.
        :param group: ``study``, ``config.KEY`` or ``attr.KEY``: branches with the same value stand together.
        :raises SyntaxProblem: the query does not parse; points at the column.
        """
        from datastates.show.overview import overview  # few ask for it, and it imports modules of its own

        return overview(self.core, query, metric=metric, sort=sort, group=group)

    @values.takes(limit=values.optional(values.count))
    def runs(self, *, limit: int | None = None) -> list[Run]:
        """The trainings, the last begun first; ``finished_at`` is None for those whose end was never recorded.

            print(repo.runs(limit=3))

        :param limit: the most to return; None: all of them.
        """
        from datastates.show.overview import runs

        return runs(self.core, limit)

    @values.takes(limit=values.count)
    def incomplete(self, *, limit: int = 50) -> Incomplete:
        """The states of several ranks that are incomplete: those that wait for parts of some ranks, and those that were given up, and why.

            for state in repo.incomplete().waiting:
                print(state.branch, state.step, state.missing, state.since, state.has_ended)

        :param limit: the most to return of those that were given up, the last first.
        """
        from datastates.show.overview import incomplete

        return incomplete(self.core, limit)
