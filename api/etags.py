"""The ETags of refs and notes, which the server sends, and which clients return in ``If-Match``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .models import Note, Ref

__all__ = ["etag_of_note", "etag_of_ref"]


def etag_of_ref(ref: Ref) -> str:
    """The ETag of a ref. Its version alone would not do: a name that is deleted and made again begins with 1 again."""
    return f'"{ref.kind}-{ref.version}-{ref.state}"'


def etag_of_note(note: Note) -> str:
    """The ETag of a note: the time of its last edit, or else of its creation, as a JSON string."""
    return msgspec.json.encode(note.edited_at or note.created_at).decode()
