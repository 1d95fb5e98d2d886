"""The page's files, built from ``ui/`` into ``static/``, or else a text that says how to build them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from starlette.responses import FileResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from .problems import Refusal
from .security import OPEN

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Scope as AsgiScope

__all__ = ["STATIC", "install"]

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
    """Files whose names change with their content: clients may keep them for a year. Until the page is built there are none."""

    async def check_config(self) -> None:
        """Do nothing: a folder that is not there has no files."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: AsgiScope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def install(app: FastAPI, folder: Path = STATIC) -> None:
    """Serve the page from ``folder``. Besides ``assets/``, only the names that are written here lead to files."""

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
    app.mount("/assets", _Assets(directory=folder / "assets", check_dir=False, follow_symlink=False), name="assets")
