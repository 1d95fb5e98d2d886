"""An application behind a real server, for what a ``TestClient`` cannot do: streams, and
connections that break."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from datastates import Repository
from datastates.api.app import create_app
from tests.api.conftest import TOKENS

GRACE_S = 60
"""So long a server waits for its streams to end."""


@contextmanager
def live(repositories: Mapping[str, Repository], **options: Any) -> Iterator[str]:
    """The address of a server on a thread of this process; it ends as ``datastates serve`` does."""
    app = create_app(repositories, **{"tokens": TOKENS, **options})
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE_S)
    )
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield url
    finally:
        for served in app.state.served.values():
            served.close()
        server.should_exit = True
        thread.join(2 * GRACE_S)
        assert not thread.is_alive()
