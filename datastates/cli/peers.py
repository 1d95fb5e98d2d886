"""What commands that connect to other processes share: how each side proves who it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from datastates.transport.contract import Tls

__all__ = ["TlsCa", "TokenFile", "trusting"]

TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="The file with the server's token (default: DATASTATES_TOKEN).", show_default=False),
]
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", metavar="FILE", help="Use TLS, and trust the certificates in this file.", show_default=False)
]


def trusting(ca: Path | None) -> Tls | None:
    """TLS with servers whose certificates are signed by those in a file; None: without TLS."""
    from datastates.transport.contract import Tls  # the transport takes a while to import

    return None if ca is None else Tls(trusted=ca)
