"""Certificates that sign themselves, made by ``openssl``; whoever asks for one is skipped
without it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from datastates.transport.contract import Tls


def certificate(folder: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> Tls:
    """One for these names, and its key, in the folder; it is the one that is trusted, too."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    made, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-keyout",
        str(key),
        "-out",
        str(made),
        "-subj",
        "/CN=test",
        "-addext",
        f"subjectAltName={names}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return Tls(certificate=made, key=key, trusted=made)
