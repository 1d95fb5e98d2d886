"""The web application: middleware, routes and the page, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI

from .routes import diff, events, graph, payload, states
from .served import Served

if TYPE_CHECKING:
    from datastates.repository import Repository

__all__ = ["create_app"]

API = "/api/v1"


def create_app(repositories: Mapping[str, Repository]) -> FastAPI:
    """The application that serves repositories by name. It closes none of them."""
    app = FastAPI(title="datastates", openapi_url=f"{API}/openapi.json")
    app.state.served = {name: Served(name, repository) for name, repository in repositories.items()}
    for routes in (states.routes, graph.routes, diff.routes, events.routes, payload.routes):
        app.include_router(routes.router, prefix=API)
    return app
