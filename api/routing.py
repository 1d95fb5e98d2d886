"""Routes that declare which scope they need. Every route of the API is made here, so that none can omit it."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request

from datastates.errors import Unauthorized

__all__ = ["API", "Routes", "Scope"]

API = "/api/v1"

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Scope(IntEnum):
    """What a token allows; each scope includes those below it."""

    NONE = 0
    READ = 1
    WRITE = 2
    ADMIN = 3


class Routes:
    """The routes of one noun. ``tag`` groups them in the OpenAPI document; ``prefix`` is put before their paths."""

    def __init__(self, tag: str, *, prefix: str = f"{API}/repositories/{{repository}}") -> None:
        self.router = APIRouter(prefix=prefix, tags=[tag])

    def add(
        self, method: str, path: str, *, scope: Scope, returns: Any, status: int = 200, has_head: bool = True, **options: Any
    ) -> Callable[[Handler], Handler]:
        """A decorator that makes a function answer ``method`` at ``path`` for clients that have ``scope``.

        ``returns`` is the type of the body, for the document; the function itself returns a ``Response`` (see ``replies``). The first line
        of its docstring is the summary, its name the operation's id. Functions that use the database are plain ``def``. HEAD is answered
        like GET; ``has_head=False`` turns that off, for streams and for routes with a HEAD of their own.
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
                self.router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, dependencies=[Depends(_needs(scope))])
            return handler

        return register


def _needs(scope: Scope) -> Callable[[Request], None]:
    """A check that the token allows ``scope``. ``security`` put the granted scope into the request; without it nothing is allowed."""

    def check(request: Request) -> None:
        granted = request.scope.get("state", {}).get("granted", Scope.NONE)
        if granted < scope:
            raise Unauthorized(f"this needs a token that may {scope.name.lower()}: send it as 'Authorization: Bearer TOKEN'")

    return check
