"""Studies with the trees of their variants, merged states, and reports on outliers."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Path, Query, Request, Response

from datastates.api.live import TYPES, shown
from datastates.api.models import Page
from datastates.api.payload import etag_of, is_known, reply
from datastates.api.routing import Routes, Scope, name_in_path
from datastates.api.served import Chosen
from datastates.errors import NotFound
from datastates.lineage.views import study_trees
from datastates.lineage.views.study_trees import Merges, Report, ReportDetail, Studies, StudyDetail
from datastates.lineage.views.text import Direction
from datastates.maintenance.lease import life_of
from datastates.thumbnails import media_type

routes = Routes("studies")

_Metric = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=255,
        description="What they are ranked by; left out: the most relevant one",
    ),
]
_Id = Annotated[int, Path(ge=1, lt=2**31, description="A report's `id`")]
_PICTURE = {type_: {"schema": {"type": "string", "format": "binary"}} for type_ in TYPES}
_ANSWERS: dict[int | str, dict[str, object]] = {
    200: {"description": "The picture", "content": _PICTURE},
    304: {"description": "Who asks has it: `If-None-Match`"},
}


class Picture(Response):
    """The type of the picture, for the document."""

    media_type = TYPES[0]


@routes.add("GET", "/studies", scope=Scope.READ, returns=Studies)
def list_studies(
    served: Chosen,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many")] = 100,
) -> Response:
    """The studies, the last changed first."""
    with served.reading() as session:
        found = study_trees.studies(session, limit=limit, folder=served.core.home.uid)
    return reply(found, request=request, etag=True)


@routes.add("GET", "/studies/{name:path}", scope=Scope.READ, returns=StudyDetail)
def get_study(
    served: Chosen,
    request: Request,
    name: Annotated[
        str,
        name_in_path("A study; may have slashes"),
    ],
    metric: _Metric = None,
    direction: Annotated[
        Direction | None,
        Query(description="Which values are better; left out: by the metric's name"),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=2000, description="At most so many variants")] = 500,
) -> Response:
    """One study: its variants as a tree, with the cost and the result of each, and which failed
    and why."""
    with served.reading() as session:
        living = partial(life_of, home=served.core.home)
        found = study_trees.study(
            session,
            name,
            metric=metric,
            direction=direction,
            limit=limit,
            living=living,
            folder=served.core.home.uid,
        )
    return reply(found, request=request, etag=True)


@routes.add("GET", "/merges", scope=Scope.READ, returns=Merges)
def list_merges(
    served: Chosen,
    request: Request,
    metric: _Metric = None,
    after: Annotated[
        str | None, Query(pattern="^[0-9a-f]{24}$", description="The `next` of the page before")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="At most so many")] = 50,
) -> Response:
    """Soups and other merged states, the newest first, with their parents and the weight of
    each."""
    with served.reading() as session:
        found = study_trees.merges(session, metric=metric, after=after, limit=limit)
    return reply(found, request=request, etag=True)


@routes.add("GET", "/outliers", scope=Scope.READ, returns=Page[Report])
def list_reports(
    served: Chosen,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many")] = 100,
) -> Response:
    """The reports on outliers that are stored, the newest first."""
    with served.reading() as session:
        page = Page(study_trees.reports(session, limit=limit), None)
    return reply(page, request=request, etag=True)


@routes.add("GET", "/outliers/{report}", scope=Scope.READ, returns=ReportDetail)
def get_report(
    served: Chosen,
    request: Request,
    report: _Id,
    after: Annotated[
        int, Query(ge=0, lt=2**31, description="The `next` of the page before: a rank")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=500, description="At most so many samples")] = 60,
) -> Response:
    """One report, with the samples that it ranks highest."""
    with served.reading() as session:
        found = study_trees.report(session, report, after=after, limit=limit)
    return reply(found if served.pictures is None else shown(found), request=request, etag=True)


@routes.add(
    "GET",
    "/outliers/{report}/pictures/{index}",
    scope=Scope.READ,
    returns=None,
    response_class=Picture,
    responses=_ANSWERS,
)
def sample_picture(
    served: Chosen,
    request: Request,
    report: _Id,
    index: Annotated[
        int, Path(ge=0, lt=2**63, description="The `index` of a sample that the report kept")
    ],
) -> Response:
    """A picture of a sample, as the server's own function draws it or as the report stores it."""
    with served.reading() as session:
        kept = study_trees.picture(session, report, index)
    image = kept if served.pictures is None else served.pictures.of(index)
    type_ = None if image is None else media_type(image)
    if image is None or type_ is None:
        raise NotFound(
            f"there is no picture of sample {index}: keep the report with show=, or serve with"
            " --pictures MODULE:FUNCTION"
        )
    etag = etag_of(image)
    if is_known(request, etag):
        return Response(status_code=304, headers={"ETag": etag})
    return Response(image, media_type=type_, headers={"ETag": etag})
