"""An application behind a real server, for what a ``TestClient`` cannot do: streams, and connections that break."""

from __future__ import annotations

import inspect
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from datastates import Repository
from datastates.api.app import create_app
from datastates.errors import DatastatesError
from tests.api.conftest import TOKENS, _granting


@contextmanager
def live(repositories: Mapping[str, Repository], **options: Any) -> Iterator[str]:
    """The address of a server on a thread of this process; it ends as ``datastates serve`` does."""
    if "tokens" in inspect.signature(create_app).parameters:
        app: Any = create_app(repositories, **{"tokens": TOKENS, **options})
        asgi = app
    else:
        app = create_app(repositories)
        asgi = _granting(app)
    if not any(issubclass(known, DatastatesError) for known in app.exception_handlers if isinstance(known, type)):
        app.add_exception_handler(DatastatesError, _stopgap)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(asgi, log_level="warning", lifespan="off", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield url
    finally:
        for served in app.state.served.values():
            served.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def _stopgap(request: Any, error: Any) -> Any:
    """Stands in for ``problems``."""
    from fastapi.responses import JSONResponse

    status = {"not-found": 404, "unavailable": 503, "corrupt": 500, "syntax": 400, "invalid-input": 400, "conflict": 409}.get(
        error.kind, 500
    )
    more = {name: getattr(error, name) for name in ("column", "expected", "nearest") if hasattr(error, name)}
    return JSONResponse({"kind": error.kind, "detail": str(error), **more}, status_code=status, media_type="application/problem+json")
