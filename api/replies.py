"""Answers: values as JSON, with only the fields that were asked for; a client that already has the answer gets 304."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from datastates.errors import InvalidInput

__all__ = ["etag_of", "is_known", "reply"]

_encoder = msgspec.json.Encoder(enc_hook=str)


def reply(
    value: object,
    *,
    request: Request | None = None,
    fields: str | None = None,
    etag: str | bool | None = None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """``value`` as JSON. ``fields`` are names separated by commas, of the value or of each item of a page: ``uid,step,metrics.loss``.

    With ``etag`` and ``request``, a client that already has the answer gets 304 and no body. True computes the tag from the body.

    :raises InvalidInput: there is no such field; the error lists those that exist.
    """
    sent = dict(headers or {})
    if isinstance(etag, str) and request is not None and is_known(request, etag):
        return Response(status_code=304, headers={**sent, "ETag": etag})
    chosen = value if not fields else _project(msgspec.to_builtins(value, enc_hook=str), fields.split(","))
    body = _encoder.encode(chosen)
    if etag is True:
        etag = _tag(body)
        if request is not None and is_known(request, etag):
            return Response(status_code=304, headers={**sent, "ETag": etag})
    if etag:
        sent["ETag"] = etag
    return Response(body, status_code=status, headers=sent, media_type="application/json")


def is_known(request: Request, etag: str) -> bool:
    """Whether the client sent this tag in ``If-None-Match``. A proxy may have made the tag a weak one."""
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    return etag in tags or "*" in tags


def etag_of(*parts: object) -> str:
    """A strong tag made of what an answer depends on."""
    return _tag(_encoder.encode(parts))


def _tag(data: bytes) -> str:
    import blake3

    return f'"{blake3.blake3(data).hexdigest(16)}"'


def _project(value: Any, fields: Sequence[str]) -> Any:
    if isinstance(value, dict) and {"items", "next"} <= set(value):
        return value | {"items": [_pick(item, fields) for item in value["items"]]}
    return _pick(value, fields)


def _pick(item: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    picked: dict[str, Any] = {}
    for field in fields:
        name, _, key = field.strip().partition(".")
        if name not in item:
            raise InvalidInput(f"there is no field {name!r}: choose among {', '.join(item)}")
        if not key:
            picked[name] = item[name]
        elif isinstance(item[name], dict):
            picked.setdefault(name, {}).update({key: item[name][key]} if key in item[name] else {})
        else:
            raise InvalidInput(f"the field {name!r} has no parts: write {name}, not {field}")
    return picked
