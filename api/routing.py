"""Routes that declare which scope they need.

Every route of the API is made here, so that none can omit it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount

from datastates.errors import Corrupt, DatastatesError, SyntaxProblem, Unauthorized, Unavailable
from datastates.system import logs

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Scope as AsgiScope

API = "/api/v1"

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Scope(IntEnum):
    """What a token allows; each scope includes those below it."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


class Routes:
    """The routes of one noun.

    ``tag`` groups them in the OpenAPI document; ``prefix`` is put before their paths."""

    def __init__(self, tag: str, *, prefix: str = f"{API}/repositories/{{repository}}") -> None:
        self.router = APIRouter(prefix=prefix, tags=[tag])

    def add(
        self,
        method: str,
        path: str,
        *,
        scope: Scope,
        returns: Any,
        status: int = 200,
        has_head: bool = True,
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        """A decorator that makes a function answer ``method`` at ``path`` for clients that have
        ``scope``.

        ``returns`` is the type of the body, for the document; the function itself returns a
        ``Response`` (see ``replies``). The first line of its docstring is the summary, its name the
        operation's id. Functions that use the database are plain ``def``. HEAD is answered like
        GET; ``has_head=False`` turns that off, for streams and for routes with a separate HEAD.
        """

        def register(handler: Handler) -> Handler:
            self.router.add_api_route(
                path,
                handler,
                methods=[method],
                response_model=returns,
                status_code=status,
                summary=(handler.__doc__ or handler.__name__).strip().splitlines()[0].rstrip("."),
                operation_id=handler.__name__,
                dependencies=[Depends(_needs(scope))],
                openapi_extra={"x-scope": scope.name.lower()},
                **options,
            )
            if method == "GET" and has_head:
                self.router.add_api_route(
                    path,
                    handler,
                    methods=["HEAD"],
                    include_in_schema=False,
                    dependencies=[Depends(_needs(scope))],
                )
            return handler

        return register


def _needs(scope: Scope) -> Callable[[Request], None]:
    """A check that the token allows ``scope``.

    ``security`` put the granted scope into the request; without it nothing is allowed."""

    def check(request: Request) -> None:
        granted = request.scope.get("state", {}).get("granted", Scope.NONE)
        if granted < scope:
            raise Unauthorized(
                f"this needs a token that may {scope.name.lower()}: send it as 'Authorization:"
                " Bearer TOKEN'"
            )

    return check


# Errors as ``application/problem+json`` (RFC 9457): one table gives each kind its HTTP status.


MEDIA_TYPE = "application/problem+json"
_SHOWN = 100

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_logger = logging.getLogger(__name__)

STATUSES = {
    "ambiguous": 404,
    "cancelled": 503,
    "closed": 503,
    "conflict": 409,
    "corrupt": 500,
    "dirty": 500,
    "disconnected": 503,
    "error": 500,
    "invalid-input": 400,
    "processor-failed": 500,
    "not-found": 404,
    "over-budget": 503,
    "peer-fault": 502,
    "syntax": 400,
    "torn": 500,
    "unauthorized": 401,
    "unavailable": 503,
    "unsupported": 400,
}
"""The status for each kind of error. ``unauthorized`` is 403 for a token whose scope is too
narrow; ``unavailable`` is 410 as said above."""


_UNEXPECTED = "this failed unexpectedly: the server's log says why"
_UNTOLD = {"corrupt": "stored bytes are damaged: the server's log says which"}
"""The text of a 500; the error's own message names files and what is in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a request failed. ``kind`` is stable. ``column`` (from 1) and ``expected`` point into a
    text that does not parse. ``nearest`` is the uid of the nearest state that can be restored.
    ``parameter`` is the one that the request gets wrong.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    kind: str
    text: str | None = None
    column: int | None = None
    expected: tuple[str, ...] | None = None
    nearest: str | None = None
    parameter: str | None = None


class Refusal(Exception):
    """A refusal that only the web makes, with its own status. ``kind`` is the kind of one of our
    errors."""

    def __init__(
        self, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(title=_title(status), status=status, detail=detail, kind=kind)
        self.headers = dict(headers or {})


def install(app: FastAPI) -> None:
    """Turn the framework's own errors into problems too: unknown paths, wrong methods, invalid
    parameters."""
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)


def respond(error: Exception, scope: AsgiScope) -> Response:
    """The answer to a request that ended in ``error``.

    An unexpected error is logged, and not disclosed."""
    if isinstance(error, Refusal):
        return _response(error.problem, error.headers)
    problem = problem_of(error)
    problem = replace(problem, detail=placeless(problem.detail, scope))
    if problem.kind == "unauthorized":
        is_known = scope.get("state", {}).get("is_known", False)
        problem = _with(problem, 403) if is_known else problem
    if problem.status >= 500:
        trace = error if problem.status == 500 else None
        _logger.error(
            "%s %s: %s", scope["method"], scope["path"], logs.text(str(error)), exc_info=trace
        )
    return _response(problem)


def problem_of(error: Exception) -> Problem:
    """The problem that describes an error to the client."""
    if not isinstance(error, DatastatesError):
        return Problem(title=_title(500), status=500, detail=_UNEXPECTED, kind="error")
    status = STATUSES.get(error.kind, 500)
    if isinstance(error, Unavailable) and (error.is_gone or error.nearest is not None):
        status = 410
    detail = _UNTOLD.get(error.kind, _UNEXPECTED) if status == 500 else logs.text(str(error))
    problem = Problem(title=_title(status), status=status, detail=detail, kind=error.kind)
    if isinstance(error, SyntaxProblem):
        return _with(problem, status, text=error.text, column=error.column, expected=error.expected)
    return (
        _with(problem, status, nearest=error.nearest)
        if isinstance(error, Unavailable | Corrupt)
        else problem
    )


def placeless(text: str, scope: AsgiScope) -> str:
    """The text without secrets, and without the place of a repository or its database on the
    server: clients have no need to know it."""
    served = scope["app"].state.served if "app" in scope else {}
    for name, each in served.items():
        location = each.core.location
        for place in (location.packs, location.root, location):
            text = text.replace(str(place), name) if place is not None else text
    return logs.text(text)


def _with(problem: Problem, status: int, **more: Any) -> Problem:
    return replace(problem, status=status, title=_title(status), **more)


def _response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    said = {
        field.name: value
        for field in fields(problem)
        if (value := getattr(problem, field.name)) is not None
    }
    sent = {
        **({"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}),
        "Cache-Control": "no-store",
        **(headers or {}),
    }
    return Response(
        msgspec.json.encode(said), status_code=problem.status, headers=sent, media_type=MEDIA_TYPE
    )


def _title(status: int) -> str:
    return HTTPStatus(status).phrase


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is installed for no other"
    path = request.url.path[:_SHOWN]
    kind, detail = {
        404: ("not-found", f"there is nothing at {path}: /api/v1/openapi.json lists what there is"),
        405: (
            "unsupported",
            f"{path} does not answer {request.method}: the header Allow says what it does",
        ),
    }.get(error.status_code, ("invalid-input", str(error.detail)))
    headers = {
        **(error.headers or {}),
        **({"Allow": _allowed(request)} if error.status_code == 405 else {}),
    }
    return respond(Refusal(error.status_code, kind, detail, headers), request.scope)


def _allowed(request: Request) -> str:
    """The methods of a path over all its routes. The framework gives only the methods of the
    first."""
    routes = request.app.router.routes
    plain = [route for route in routes if not isinstance(route, Mount)]
    found = [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL for route in plain
        )
    ]
    return ", ".join(found) or "GET, HEAD"  # for the page's files


def name_in_path(description: str) -> Any:
    """The parameter of a route for a name without spaces and control characters."""
    return Path(
        min_length=1, max_length=200, pattern=r"^[^\x00-\x20\x7f]+$", description=description
    )


async def _on_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "it is installed for no other"
    first = error.errors()[0]
    where, *names = first["loc"]
    name = ".".join(map(str, names))
    found = "" if first["type"] == "missing" else f", not {str(first.get('input'))[:_SHOWN]!r}"
    detail = f"{where} {name!r}: {first['msg']}{found}" if name else f"{where}: {first['msg']}"
    problem = Problem(
        title=_title(400),
        status=400,
        detail=detail,
        kind="invalid-input",
        parameter=name or str(where),
    )
    return _response(problem)
