"""A server of the page in a process of its own, so that it can be killed: ``python -m
tests.page.server FOLDER PORT [SCOPE:TOKEN]...``."""

from __future__ import annotations

import sys

import uvicorn

import datastates
from datastates.api.app import create_app
from datastates.api.routing import Scope


class Announcing(uvicorn.Server):
    """Says ``ready`` once it listens."""

    async def startup(self, *args: object, **options: object) -> None:
        """As uvicorn's."""
        await super().startup(*args, **options)  # type: ignore[arg-type]  # handed on as they are
        sys.stdout.write("ready\n")
        sys.stdout.flush()


def main(folder: str, port: str, *tokens: str) -> None:
    """Serve until killed. With tokens, reading needs one as well."""
    with datastates.open(folder) as repo:
        app = create_app(
            {"runs": repo},
            tokens={
                token: Scope[scope.upper()]
                for scope, _, token in (pair.partition(":") for pair in tokens)
            },
        )
        Announcing(
            uvicorn.Config(
                app,
                host="127.0.0.1",
                port=int(port),
                log_level="warning",
                timeout_graceful_shutdown=1,
            )
        ).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
