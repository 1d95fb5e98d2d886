"""The web application: assembles middleware, routes and the page."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from datastates.api.routes import payload, reading, refs, service, studies
from datastates.errors import InvalidInput
from datastates.maintenance.core import Opened, core_of

from . import routing
from .metrics import Meter, Metered
from .openapi import document
from .routing import API, Refusal
from .security import OPEN, Gatekeeper, Hosts, Origins, Shield, Tokens
from .served import Served

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope as AsgiScope

    from .routing import Scope

STATIC = Path(__file__).with_name("static")

_UNBUILT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>datastates</title>
<h1>The page is not built</h1>
<p>Run <code>make ui</code> in the source tree, then load this again.</p>
<p>The API works without it: <a href="api/v1/openapi.json">what it answers</a>.</p>
</html>
"""


class _Assets(StaticFiles):
    """Files whose names change with their content: clients may keep them for a year.

    Until the page is built there are none."""

    async def check_config(self) -> None:
        """Do nothing: a folder that is not there has no files."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: AsgiScope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def install(app: FastAPI, folder: Path = STATIC) -> None:
    """Serve the page from ``folder``.

    Apart from ``assets/``, only the names that are listed here lead to files."""

    def index(request: Request) -> Response:
        if not (folder / "index.html").is_file():
            return Response(_UNBUILT, media_type="text/html", headers={"Cache-Control": "no-store"})
        return FileResponse(folder / "index.html", headers={"Cache-Control": "no-cache"})

    def icon(request: Request) -> Response:
        path = folder / request.url.path.rpartition("/")[2]
        if not path.is_file():
            raise Refusal(404, "not-found", "the page has no such file")
        return FileResponse(path, headers={"Cache-Control": "no-cache"})

    app.router.routes.append(Route("/", index))
    app.router.routes.extend(Route(path, icon) for path in OPEN if path not in ("/", "/healthz"))
    app.mount(
        "/assets",
        _Assets(directory=folder / "assets", check_dir=False, follow_symlink=False),
        name="assets",
    )


# The web application: assembles middleware, routes and the page.


def create_app(
    repositories: Mapping[str, Opened],
    *,
    tokens: Mapping[str, Scope] | None = None,
    allowed_hosts: Sequence[str] = (),
    prefix: str = "",
    cors: Sequence[str] = (),
) -> FastAPI:
    """The application that serves repositories by name. It does not close them.

    :param repositories: the served repositories, by name.
    :param tokens: each token and its scope. Without tokens, every client may read, and none may
        write.
    :param allowed_hosts: host names that the server accepts in addition to those of the loopback.
    :param prefix: the path under which a proxy serves it.
    :param cors: origins whose pages may send requests.
    :raises InvalidInput: every page of the web might send requests (``*``) and no token is needed;
        or a token cannot be sent, or can be guessed.
    """
    if "*" in cors and not tokens:
        raise InvalidInput(
            "--cors '*' lets every page that anybody here has open read everything: name the"
            " origins, or give tokens"
        )
    hosts = Hosts(allowed_hosts)
    app = FastAPI(
        title="datastates",
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    app.state.meter = Meter()
    app.state.served = {
        name: Served(name, core_of(repository, name)) for name, repository in repositories.items()
    }
    for routes in (
        service.service_routes,
        reading.branch_routes,
        reading.state_routes,
        refs.write_routes,
        reading.graph_routes,
        reading.series_routes,
        reading.diff_routes,
        reading.comparison_routes,
        payload.routes,
        refs.ref_routes,
        refs.note_routes,
        reading.run_routes,
        studies.routes,
        service.now_routes,
        reading.stats_routes,
        service.event_routes,
    ):
        # include_router would copy each route at the first request: 0.2 s
        app.router.routes.extend(routes.router.routes)
    app.router.routes.extend(service.root.router.routes)
    install(app)
    routing.install(app)
    # as FastAPI's manual does it
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    app.add_middleware(
        Gatekeeper,
        tokens=Tokens(tokens or {}),
        hosts=hosts,
        origins=Origins(hosts, cors),
        prefix=prefix.rstrip("/"),
    )
    app.add_middleware(Shield)
    app.add_middleware(Metered, meter=app.state.meter)
    if cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["ETag"],
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    for served in app.state.served.values():
        served.warm()
    yield
    for served in app.state.served.values():
        served.close()
