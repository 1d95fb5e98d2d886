"""The web application: assembles middleware, routes and the page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from datastates.errors import InvalidInput
from datastates.opening.core import Opened, core_of

from . import page, problems
from .meter import Meter, Metered
from .openapi import document
from .routes import (
    branches,
    comparison,
    diff,
    events,
    graph,
    notes,
    now,
    payload,
    refs,
    runs,
    series,
    service,
    states,
    stats,
    studies,
    writes,
)
from .routing import API
from .security import Gatekeeper, Hosts, Origins, Shield, Tokens
from .served import Served

if TYPE_CHECKING:
    from .routing import Scope

__all__ = ["API", "create_app"]


def create_app(
    repositories: Mapping[str, Opened],
    *,
    tokens: Mapping[str, Scope] | None = None,
    allowed_hosts: Sequence[str] = (),
    prefix: str = "",
    cors: Sequence[str] = (),
) -> FastAPI:
    """The application that serves repositories by name. It does not close them.

    :param repositories: what is served, by name.
    :param tokens: each token and its scope; without any, everybody may read and nobody may write.
    :param allowed_hosts: host names that the server answers to, beside those of the loopback.
    :param prefix: the path under which a proxy serves it.
    :param cors: origins whose pages may send requests.
    :raises InvalidInput: every page of the web might send requests (``*``) and no token is needed; or a token cannot be sent, or can be
        guessed.
    """
    if "*" in cors and not tokens:
        raise InvalidInput("--cors '*' lets every page that anybody here has open read everything: name the origins, or give tokens")
    hosts = Hosts(allowed_hosts)
    app = FastAPI(
        title="datastates", openapi_url=f"{API}/openapi.json", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=_lifespan
    )
    app.state.meter = Meter()
    app.state.served = {name: Served(name, core_of(repository, name)) for name, repository in repositories.items()}
    for noun in (
        service,
        branches,
        states,
        writes,
        graph,
        series,
        diff,
        comparison,
        payload,
        refs,
        notes,
        runs,
        studies,
        now,
        stats,
        events,
    ):
        app.router.routes.extend(noun.routes.router.routes)  # include_router makes each anew at the first request: 0.2 s
    app.router.routes.extend(service.root.router.routes)
    page.install(app)
    problems.install(app)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]  # as FastAPI's manual does it
    app.add_middleware(Gatekeeper, tokens=Tokens(tokens or {}), hosts=hosts, origins=Origins(hosts, cors), prefix=prefix.rstrip("/"))
    app.add_middleware(Shield)
    app.add_middleware(Metered, meter=app.state.meter)
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"], expose_headers=["ETag"])
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    for served in app.state.served.values():
        served.warm()
    yield
    for served in app.state.served.values():
        served.close()
