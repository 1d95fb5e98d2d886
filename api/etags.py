"""The ETag of a branch or a tag, as the server gives it and as its client sends it in ``If-Match``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .models import Ref

__all__ = ["etag_of_ref"]


def etag_of_ref(ref: Ref) -> str:
    """What a ref must still be to be changed. Its version alone would not do: a name that is deleted and made again begins with 1 again."""
    return f'"{ref.kind}-{ref.version}-{ref.state}"'
