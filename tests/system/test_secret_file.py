"""Files of tokens: nobody else's from the first moment, and refused when they are everybody's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from datastates.api.routing import Scope
from datastates.api.security import read_tokens
from datastates.cli.app import app
from datastates.errors import Conflict, InvalidInput
from datastates.system.files import append_secret, make_token, read_secret, write_secret
from datastates.transport.handshake import read_token


@pytest.fixture(autouse=True, params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With which modes files are made from here on: what they are before anything could change
    it."""
    seen: list[int] = []
    opened = os.open

    def noting(path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags, mode)
        if flags & os.O_CREAT:
            seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(os, "open", noting)
    return seen


def test_token_is_its_owners_alone_from_the_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = modes_seen(monkeypatch)
    said = [CliRunner().invoke(app, arguments) for arguments in (
        ["token", str(tmp_path / "token")],
        ["token", str(tmp_path / "tokens"), "--scope", "read"],
        ["token", str(tmp_path / "tokens"), "--scope", "write"],
    )]  # fmt: skip
    assert [done.exit_code for done in said] == [0, 0, 0], said
    assert seen == [0o600] * 3
    token, tokens = (
        read_token(token_file=tmp_path / "token", environ={}),
        read_tokens(tmp_path / "tokens"),
    )
    assert len(token) >= 32
    assert list(tokens.values()) == [Scope.READ, Scope.WRITE]
    assert not [
        secret
        for secret in (token.decode(), *tokens)
        if any(secret in done.output for done in said)
    ]
    assert CliRunner().invoke(app, ["token", str(tmp_path / "token")]).exit_code == 4, (
        "one that is there stays"
    )
    assert read_token(token_file=tmp_path / "token", environ={}) == token


def test_file_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    append_secret(path, f"read {make_token()}")
    before = path.read_text()
    for mode in (0o604, 0o602, 0o644, 0o666):
        path.chmod(mode)
        for read in (
            lambda: read_tokens(path),
            lambda: read_secret(path, "it"),
            lambda: append_secret(path, "write x"),
        ):
            with pytest.raises(InvalidInput, match=f"mode {mode:04o}.*chmod o=") as refused:
                read()
            assert before.split()[1] not in str(refused.value)
    for mode in (0o600, 0o640, 0o400):
        path.chmod(mode)
        assert read_tokens(path)


def test_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", "one")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("token", "link"):
        with pytest.raises(Conflict, match=name):
            write_secret(tmp_path / name, "other")
    assert read_secret(tmp_path / "token", "it") == b"one\n"
