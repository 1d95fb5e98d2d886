"""The facts about a run that are recorded because they may matter later: code, command, versions, host."""

from __future__ import annotations

import functools
import getpass
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata

from datastates.lineage.states import OURS, Run, Value

from .whereabouts import whereabouts

__all__ = ["describe_run", "describe_training", "node_name", "user_name"]

_PACKAGES = ("datastates", "torch", "numpy", "torchdata", "lightning", "transformers", "accelerate")
_COMMIT, _NONE_YET = "# branch.oid ", "(initial)"
"""How ``git status`` begins the line that names the commit, and what it prints there if there is none."""


def node_name() -> str:
    """This host's name, for people to read: several machines may have it, and one machine several."""
    return socket.gethostname()


def describe_run(config: Mapping[str, Value]) -> Run:
    """A record of this process, with a fresh uid."""
    commit, is_dirty = _git()
    return Run(
        uid=secrets.token_hex(12),
        host=node_name(),
        user=user_name(),
        pid=os.getpid(),
        argv=tuple(sys.argv),
        git_commit=commit,
        git_dirty=is_dirty,
        config={**config, **whereabouts()},
        versions={"python": platform.python_version(), **_versions()},
        started_at=datetime.now(UTC),
    )


def describe_training(process: Run, branch: str, config: Mapping[str, Value]) -> Run:
    """A record of a training that this process begins on a branch, with a fresh uid."""
    ours = {key: value for key, value in process.config.items() if key.startswith(OURS)}
    return replace(
        process, uid=secrets.token_hex(12), config={**config, **ours}, started_at=datetime.now(UTC), process=process.uid, branch=branch
    )


def user_name() -> str:
    """The user as whom this process runs, for people to read."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@functools.cache
def _versions() -> dict[str, str]:
    """The installed versions of ``_PACKAGES``, read once in a process because reading takes milliseconds."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git() -> tuple[str | None, bool | None]:
    """The commit of the working directory, and whether it has changes; None outside a checkout or without git."""
    said = _run_git("status", "--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no")
    if said is None:  # no checkout, or one so large that this takes too long
        return _run_git("rev-parse", "HEAD"), None
    lines = said.splitlines()
    commit = next((line.removeprefix(_COMMIT) for line in lines if line.startswith(_COMMIT)), _NONE_YET)
    return (None, None) if commit == _NONE_YET else (commit, not all(line.startswith("# ") for line in lines))


def _run_git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, errors="replace", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
