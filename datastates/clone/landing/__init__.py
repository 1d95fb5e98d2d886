"""Where the chunks of a clone land: in live objects, or in the memory tier of a repository."""

from __future__ import annotations

from .objects import ObjectsSink
from .shadow import Shadows
from .states import StateSink
from .untrusted import CheckedManifest, read_manifest

__all__ = ["CheckedManifest", "ObjectsSink", "Shadows", "StateSink", "read_manifest"]
