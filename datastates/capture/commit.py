"""The one place where a state becomes part of memory and lineage: captures, merges and clones all come here."""

from __future__ import annotations

from datastates.modules.digest import manifest_of

__all__ = ["manifest_of"]
