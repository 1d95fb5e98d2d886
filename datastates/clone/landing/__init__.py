"""The places where the chunks of a clone land: live objects, or the memory tier of a repository."""

from __future__ import annotations

from .objects import ObjectsSink
from .shadow import Shadows
from .states import StateSink
from .untrusted import CheckedManifest, join_parts, read_manifest, read_part

__all__ = ["CheckedManifest", "ObjectsSink", "Shadows", "StateSink", "join_parts", "read_manifest", "read_part"]
