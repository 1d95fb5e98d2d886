"""A summary of the branches, which people ask for first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Path, Query, Request, Response  # read at run time

from datastates.api.cache import tensors_of
from datastates.api.curves import Shape
from datastates.api.graph_windows import Look
from datastates.api.models import (
    GraphPage,
    Overview,
    Page,
    RunInfo,
    Series,
    StateDetail,
    Stats,
    TensorInfo,
    detail_of,
    run_infos,
    stats_of,
)
from datastates.api.payload import etag_of, is_known, reply, stop_after, stop_when_gone
from datastates.api.routing import Routes, Scope, name_in_path, placeless
from datastates.api.served import Chosen, Uid
from datastates.compare.diff import BINS, MOST_BINS, Diff, Histogram, Scale
from datastates.compare.diff import diff as compare
from datastates.compare.diff import histogram as count
from datastates.errors import InvalidInput, NotFound
from datastates.lineage import lookup
from datastates.lineage.query import pages, revision
from datastates.lineage.query.curves import Axis, lost_parts, metrics_version
from datastates.lineage.query.fields import check_names
from datastates.lineage.states import State
from datastates.lineage.views import branch_rows, branches, comparison
from datastates.lineage.views.branch_rows import Branch, Branches
from datastates.lineage.views.branches import groups_of, runs_of
from datastates.lineage.views.comparison import Comparison, Parallels, Taken
from datastates.lineage.views.detail import first_parents
from datastates.lineage.views.text import Direction
from datastates.lineage.write import runs
from datastates.maintenance.lease import life_of
from datastates.storage.pack import packs_of

branch_routes = Routes("branches")


@branch_routes.add("GET", "/branches", scope=Scope.READ, returns=Branches)
def list_branches(
    served: Chosen,
    request: Request,
    q: Annotated[
        str,
        Query(
            max_length=4000,
            description="A search; it must find a branch's newest state",
        ),
    ] = "",
    name: Annotated[
        str, Query(max_length=200, description="A part of the names that are wanted")
    ] = "",
    metric: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=255,
            description="Of what last, best and line are; left out: the most relevant one",
        ),
    ] = None,
    direction: Annotated[
        Direction | None,
        Query(description="Which values are better; left out: by the metric's name"),
    ] = None,
    sort: Annotated[
        str,
        Query(
            max_length=20,
            description=(
                f"One of {', '.join(branch_rows.SORTS)}, the best and newest first; `-` before it"
                " turns that"
            ),
        ),
    ] = "changed",
    group: Annotated[
        str | None,
        Query(min_length=1, max_length=300, description="`study`, `config.KEY` or `attr.KEY`"),
    ] = None,
    after: Annotated[
        str | None,
        Query(max_length=8000, description="`next` of the page before, with all else unchanged"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many")] = 50,
    fields: Annotated[
        str | None,
        Query(max_length=1000, description="Only these fields of each, separated by commas"),
    ] = None,
) -> Response:
    """The branches: where each forked, its curve, its best state, what can be restored, what was
    configured, and whether it runs."""
    living = partial(life_of, home=served.core.home)
    with served.reading() as session:
        found = branches.branches(
            session,
            q,
            name=name,
            metric=metric,
            direction=direction,
            sort=sort,
            group=group,
            after=after,
            limit=limit,
            living=living,
            drawn=served.lines,
            counts=served.branch_counts.of,
            folder=served.core.home.uid,
        )
    return reply(found, request=request, fields=fields, etag=True)


@branch_routes.add("GET", "/branches/{name:path}", scope=Scope.READ, returns=Branch)
def branch_detail(
    served: Chosen,
    request: Request,
    name: Annotated[
        str,
        name_in_path("A branch; may have slashes"),
    ],
    metric: Annotated[
        str | None, Query(min_length=1, max_length=255, description="As for all branches")
    ] = None,
    direction: Annotated[Direction | None, Query(description="As for all branches")] = None,
) -> Response:
    """One branch, as in the list of all."""
    living = partial(life_of, home=served.core.home)
    with served.reading() as session:
        found = branches.branches(
            session,
            names=[name],
            metric=metric,
            direction=direction,
            living=living,
            drawn=served.lines,
            folder=served.core.home.uid,
        )
    if not found:
        raise NotFound(f"there is no branch {name!r}: /branches lists those that exist")
    return reply(found[0], request=request, etag=True)


# Comparisons: states side by side, branches by their settings and metrics, and the
# distribution of a tensor's values.


COUNTING_S = 10.0
"""The time that counting a tensor's values may take."""

comparison_routes = Routes("comparison")

Revisions = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=500)]],
    Query(description="Revisions, such as names of branches"),
]


@comparison_routes.add("GET", "/comparison", scope=Scope.READ, returns=Comparison)
def compare_states(served: Chosen, request: Request, rev: Revisions) -> Response:
    """States side by side: configuration, metrics, attributes, code, and where each can be
    restored; reads no payload."""
    comparison.check_count(len(rev))
    with served.reading() as session:
        found = comparison.compare(session, rev, [revision.resolve(session, each) for each in rev])
    return reply(found, request=request, etag=True)


@comparison_routes.add("GET", "/parallels", scope=Scope.READ, returns=Parallels)
def list_parallels(
    served: Chosen,
    request: Request,
    q: Annotated[
        str,
        Query(
            max_length=4000,
            description="A search; it must find a branch's newest state",
        ),
    ] = "",
    name: Annotated[
        str, Query(max_length=200, description="A part of the names that are wanted")
    ] = "",
    taken: Annotated[
        Taken, Query(description="Which value of a metric stands for a branch")
    ] = Taken.BEST,
    limit: Annotated[
        int, Query(ge=1, le=comparison.MOST_LINES, description="At most so many branches")
    ] = comparison.MOST_LINES,
) -> Response:
    """Branches by settings and metrics, one axis for each: for parallel coordinates and scatter
    plots."""
    with served.reading() as session:
        found = comparison.parallels(session, q, name=name, taken=taken, limit=limit)
    return reply(found, request=request, etag=True)


@comparison_routes.add(
    "GET", "/histogram", scope=Scope.READ, returns=Histogram, responses={410: {}}
)
def tensor_histogram(
    served: Chosen,
    request: Request,
    rev: Revisions,
    path: Annotated[
        str,
        Query(
            min_length=1,
            max_length=1000,
            description="The tensor's path, as `/diff` and `/tensors` say it",
        ),
    ],
    bins: Annotated[int, Query(ge=1, le=MOST_BINS)] = BINS,
    scale: Annotated[
        Scale,
        Query(description="What the bins are equally wide in: values, or logarithms of magnitudes"),
    ] = Scale.LINEAR,
) -> Response:
    """How the values of one tensor are distributed in some states, over the same bins; it is
    read in pieces, for at most 10 s."""
    with served.reading() as session:
        states = [revision.resolve(session, each) for each in rev]
    etag = etag_of(
        "histogram-1", [(state.uid, state.digest) for state in states], path, bins, scale
    )
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    gone = stop_when_gone(request)
    late = stop_after(
        COUNTING_S,
        f"counting the values of {path!r}",
        f"download the tensor (payload?only={path}) and count there",
    )

    def look(done: int, total: int) -> None:
        gone()
        late()

    with served.payload_reads.one():
        found = count(served.core, states, path, bins=bins, scale=scale, on_progress=look)
    return reply(found, etag=etag)


# What changed from one state to another.


diff_routes = Routes("diff")

DiffRevision = Annotated[str, Query(min_length=1, max_length=500, description="A revision")]


@diff_routes.add("GET", "/diff", scope=Scope.READ, returns=Diff)
def diff(
    served: Chosen,
    request: Request,
    old: DiffRevision,
    new: DiffRevision,
    only: Annotated[
        list[Annotated[str, Query(max_length=500)]] | None,
        Query(max_length=64, description="Names or patterns of paths: `model`, `model/*.weight`"),
    ] = None,
    tensors: Annotated[
        bool, Query(description="False: the lineage only, no payload is read")
    ] = True,
    stat: Annotated[
        bool,
        Query(
            description=(
                "Tensors by their manifests alone, no payload is read: `unread` are those that may"
                " differ"
            )
        ),
    ] = False,
) -> Response:
    """Compare two states: each tensor, metrics, values, configuration and code, as `datastates diff
    --json` does.

    If the bytes of one of them are not available, `lacking` has the reason and the state that can
    be restored instead. Everything that can be read is compared.
    """
    with served.reading() as session:
        one, other = revision.resolve(session, old), revision.resolve(session, new)
    etag = etag_of("diff-1", one, other, only, tensors, stat)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    if not tensors or stat:
        found = compare(served.core, one.uid, other.uid, only=only, with_tensors=tensors, stat=True)
    else:
        look = stop_when_gone(request)
        with served.payload_reads.one():
            found = compare(
                served.core, one.uid, other.uid, only=only, on_progress=lambda done, total: look()
            )
    if found.lacking:  # bytes that are not here now may come
        told = tuple(
            replace(each, why=placeless(each.why, request.scope)) for each in found.lacking
        )
        return reply(replace(found, lacking=told), request=request)
    return reply(found, request=request, etag=etag)


# The graph of states, a window at a time.


graph_routes = Routes("graph")

GraphUid = Annotated[str, Query(pattern="^[0-9a-f]{24}$")]
GraphRevision = Annotated[str, Query(min_length=1, max_length=500)]


@graph_routes.add("GET", "/graph", scope=Scope.READ, returns=GraphPage)
def graph(
    served: Chosen,
    request: Request,
    head: Annotated[
        list[GraphRevision] | None,
        Query(max_length=64, description="Revisions; none: every branch and tag"),
    ] = None,
    first: Annotated[int, Query(ge=0, le=2**53)] = 0,
    count: Annotated[int, Query(ge=1, le=1000)] = 200,
    fold: Annotated[
        bool, Query(description="States that only follow one another share a row")
    ] = False,
    open_: Annotated[
        list[GraphUid] | None,
        Query(
            alias="open",
            max_length=64,
            description="Folded stretches with these states are shown whole",
        ),
    ] = None,
    alone: Annotated[
        list[GraphUid] | None,
        Query(
            max_length=64, description="Of folded stretches these states have a row of their own"
        ),
    ] = None,
    around: Annotated[
        str | None,
        Query(pattern="^[0-9a-f]{24}$", description="A state that is to be in the middle"),
    ] = None,
) -> Response:
    """Rows of the history of some heads, newest first, with their lanes."""
    with served.reading() as session:
        look = Look(tuple(open_ or ()), tuple(alone or ())) if fold else None
        page = served.windows.page(
            session, head or [], first=first, count=count, around=around, look=look
        )
    return reply(page, request=request, etag=True)


@graph_routes.add("GET", "/graph/overview", scope=Scope.READ, returns=Overview)
def overview(
    served: Chosen,
    request: Request,
    head: Annotated[
        list[GraphRevision] | None,
        Query(max_length=64, description="Revisions; none: every branch and tag"),
    ] = None,
    fold: Annotated[
        bool, Query(description="States that only follow one another share a row")
    ] = False,
    open_: Annotated[
        list[GraphUid] | None, Query(alias="open", max_length=64, description="As for the graph")
    ] = None,
    alone: Annotated[
        list[GraphUid] | None, Query(max_length=64, description="As for the graph")
    ] = None,
) -> Response:
    """An overview of the whole graph: the place of each branch."""
    with served.reading() as session:
        look = Look(tuple(open_ or ()), tuple(alone or ())) if fold else None
        found = served.windows.overview(session, head or [], look)
    return reply(found, request=request, etag=True)


# Curves: metrics along branches.


series_routes = Routes("series")

POINTS_MAX = 200_000
"""The most points that all lines of an answer have together."""


@series_routes.add("GET", "/series", scope=Scope.READ, returns=Series)
def series(
    served: Chosen,
    request: Request,
    head: Annotated[
        list[Annotated[str, Query(min_length=1, max_length=500)]],
        Query(
            min_length=1,
            max_length=128,
            description="Revisions: a line follows the first parents of each",
        ),
    ],
    key: Annotated[
        list[Annotated[str, Query(min_length=1, max_length=255)]],
        Query(
            default_factory=list,
            max_length=32,
            description="Metrics; none: only where the paths part",
        ),
    ],
    points: Annotated[int, Query(ge=10, le=10_000, description="At most so many a line")] = 1000,
    shape: Annotated[
        Shape,
        Query(
            description=(
                "What is kept of more points: the extremes (M4), or means, which curves are"
                " averaged by"
            )
        ),
    ] = Shape.EXTREMES,
    x: Annotated[
        Axis,
        Query(
            description=(
                "What `xs` says of each point: nothing beside its step, its time, or its epoch"
            )
        ),
    ] = Axis.STEP,
    group: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=300,
            description="`study`, `config.KEY` or `attr.KEY`: what `group` says of each line",
        ),
    ] = None,
) -> Response:
    """Metrics along the first parents of some heads, and where these paths fork."""
    heads, keys = list(dict.fromkeys(head)), list(dict.fromkeys(key))
    if len(heads) * len(keys) * points > POINTS_MAX:
        least = POINTS_MAX // (len(heads) * len(keys))
        raise InvalidInput(
            f"{len(heads)} heads and {len(keys)} metrics with {points} points each are too many: at"
            f" most {least} points fit"
        )
    with served.reading() as session:
        ids = [revision.resolve_id(session, one) for one in heads]
        groups = None if group is None else groups_of(session, group, runs_of(session, ids))
        # a lineage that is made again has the same row ids
        uids = lookup.uids_of(session, ids)
        is_fixed = x is not Axis.EPOCH  # which comes from attributes, and these change
        lost = lost_parts(session, dict(zip(heads, ids, strict=True)))
        known = uids, heads, keys, points, shape, x, groups, metrics_version(session), repr(lost)
        etag: str | bool = etag_of("series-2", *known) if is_fixed else True
        if isinstance(etag, str) and is_known(request, etag):
            return Response(status_code=304, headers={"ETag": etag})
        found = served.curves.series(
            session, heads, ids, keys, points, axis=x, shape=shape, groups=groups
        )
    return reply(found, request=request, etag=etag)


# States: one, many, and what is known of them.


state_routes = Routes("states")

Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many")]
Fields = Annotated[
    str | None,
    Query(
        max_length=1000,
        description="Only these fields, separated by commas: `uid,step,metrics.loss`",
    ),
]


@state_routes.add("GET", "/resolve", scope=Scope.READ, returns=State)
def resolve(
    served: Chosen,
    request: Request,
    rev: Annotated[str, Query(min_length=1, max_length=500)],
    fields: Fields = None,
) -> Response:
    """The state that a revision names."""
    with served.reading() as session:
        state = revision.resolve(session, rev)
    return reply(state, request=request, fields=fields, etag=True)


@state_routes.add("GET", "/states", scope=Scope.READ, returns=Page[State])
def find_states(
    served: Chosen,
    request: Request,
    q: Annotated[
        str, Query(max_length=4000, description="A search; empty: all, newest first")
    ] = "",
    after: Annotated[
        str | None,
        Query(max_length=8000, description="`next` of the page before, of the same search"),
    ] = None,
    limit: Limit = 100,
    fields: Fields = None,
) -> Response:
    """The states that a search finds, in its order."""
    with served.reading() as session:
        check_names(session, q)
        found = pages.find(session, q, after=after, limit=limit)
    page = Page(tuple(found.states), found.next)
    return reply(page, request=request, fields=fields, etag=True)


@state_routes.add("GET", "/states/{uid}", scope=Scope.READ, returns=StateDetail)
def state_detail(served: Chosen, request: Request, uid: Uid, fields: Fields = None) -> Response:
    """Everything that is known of one state."""
    with served.reading() as session:
        detail = detail_of(session, uid, packs_of(served.core.location.packs, uid))
    return reply(detail, request=request, fields=fields, etag=True)


@state_routes.add("GET", "/states/{uid}/log", scope=Scope.READ, returns=Page[State])
def state_log(
    served: Chosen,
    request: Request,
    uid: Uid,
    after: Annotated[
        str | None,
        Query(pattern="^[0-9a-f]{24}$", description="The uid of the last state that came"),
    ] = None,
    limit: Limit = 100,
    fields: Fields = None,
) -> Response:
    """A state and its first parents, newest first."""
    with served.reading() as session:
        found, following = first_parents(session, uid, limit=limit, after=after)
    page = Page(tuple(found), following)
    return reply(page, request=request, fields=fields, etag=True)


@state_routes.add(
    "GET", "/states/{uid}/tensors", scope=Scope.READ, returns=Page[TensorInfo], responses={410: {}}
)
def state_tensors(
    served: Chosen,
    request: Request,
    uid: Uid,
    norms: Annotated[
        bool, Query(description="With the norm of each: reads every byte once")
    ] = False,
    fields: Fields = None,
) -> Response:
    """The tensors of a state, all on one page, in the order of its tree."""
    with served.reading() as session:
        state = lookup.state(session, uid)
    etag = etag_of("tensors-1", state.uid, state.digest, norms, fields)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    with served.core.open_payload(state) as reader:
        known = served.norms.get(uid) if norms else None
        if norms and known is None:
            with served.payload_reads.one():
                known = served.norms.read(uid, reader, stop_when_gone(request))
        page = Page(tuple(tensors_of(reader, known)), None)
    return reply(page, fields=fields, etag=etag)


# Numbers about a whole repository.


stats_routes = Routes("stats")


@stats_routes.add("GET", "/stats", scope=Scope.READ, returns=Stats)
def stats(served: Chosen, request: Request) -> Response:
    """What the repository holds: states by status, the keys of metrics, attributes and
    configurations."""
    with served.reading() as session:
        found = stats_of(session, *served.counts.of(session))
    return reply(found, request=request, etag=True)


# Runs: each training of a process, with its configuration.


run_routes = Routes("runs")


@run_routes.add("GET", "/runs", scope=Scope.READ, returns=Page[RunInfo])
def list_runs(
    served: Chosen,
    request: Request,
    after: Annotated[
        str | None, Query(pattern="^[0-9a-f]{24}$", description="The uid of the last run that came")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many")] = 100,
    fields: Annotated[
        str | None, Query(max_length=1000, description="Only these fields, separated by commas")
    ] = None,
) -> Response:
    """The trainings, the last begun first; a process that captured states without a training
    counts as one."""
    with served.reading() as session:
        found, following = runs.listing(session, limit=limit, after=after)
        page = Page(tuple(run_infos(session, found, served.core.home)), following)
    return reply(page, request=request, fields=fields, etag=True)


@run_routes.add("GET", "/runs/{uid}", scope=Scope.READ, returns=RunInfo)
def run_detail(
    served: Chosen,
    request: Request,
    uid: Annotated[str, Path(pattern="^[0-9a-f]{24}$", description="A run's uid, whole")],
) -> Response:
    """One training: its process, host and user, its code and configuration."""
    with served.reading() as session:
        (run,) = run_infos(session, [runs.get(session, uid)], served.core.home)
    return reply(run, request=request, etag=True)
