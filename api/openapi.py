"""The OpenAPI document of FastAPI, with additions: problems, tokens, null for NaN."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from .routing import MEDIA_TYPE, Problem

if TYPE_CHECKING:
    from fastapi import FastAPI

_DESCRIPTION = """A lineage of the states of a training: browse, search, compare, download, name.

A state is addressed by its whole uid (24 hex digits); `/resolve` finds it for a revision. Lists are
`{"items": […], "next": cursor or null}`: pass `next` as `after`. Numbers that JSON cannot say (NaN, infinities) are null.
Errors are `application/problem+json` with a stable `kind`. Without tokens configured reads are open and writes are refused;
else send `Authorization: Bearer TOKEN`. `x-scope` of an operation says what the token must allow: read, write or admin."""

_TAGS = {
    "branches": "Branches at a glance: where each forked, how it went, what can be restored of it.",
    "states": "States: one, many, and what is known of them.",
    "graph": "The graph of states, with lanes for drawing, a window at a time.",
    "series": "Curves of metrics.",
    "diff": "What changed between two states.",
    "comparison": (
        "States beside each other, branches by settings and metrics, tensors by their values."
    ),
    "payload": "The tensors themselves, and how to drop them.",
    "refs": "Branches and tags.",
    "notes": "What people wrote of states and branches, in Markdown.",
    "runs": "The processes that captured.",
    "studies": "Studies, merged states, and reports on outliers.",
    "now": "What goes on just now, and what lies where.",
    "stats": "The whole, in numbers.",
    "events": "What happens to refs, live.",
    "service": "The server itself.",
}

_PROBLEMS = {
    400: "The request is wrong: `parameter`, or `column` and `expected`, say where",
    401: "There is no token, or an unknown one",
    403: "The token is good for less",
    404: "There is no such thing",
    409: "Somebody else was first, or a name is taken",
    410: "The bytes are gone; `nearest` names the nearest state that has them",
    412: "The ref has another version by now",
    413: "The body is too large",
    414: "The address is too long",
    421: "The server does not go by this name",
    428: "`If-Match` is missing",
    500: "Stored bytes are damaged, or the server failed",
    503: "The server, its database or what holds the bytes does not answer: try again",
}
_ALWAYS = (400, 401, 403, 404, 414, 421, 500, 503)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application; made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title="datastates",
            version=version("datastates"),
            summary="The web API of a lineage of training states",
            description=_DESCRIPTION,
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
            routes=app.routes,
            servers=[{"url": app.root_path or "/"}],
        )
        _finish(made)
        app.openapi_schema = made
    return app.openapi_schema


def _finish(made: dict[str, Any]) -> None:
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Problem"] = _problem()
    for name in ("State", "StateDetail"):
        if name in schemas:
            metrics = schemas[name]["properties"]["metrics"]
            numbers = metrics["additionalProperties"]
            metrics["additionalProperties"] = {"anyOf": [numbers, {"type": "null"}]}
    for name in ("NewRef", "RefMove"):
        if name in schemas:
            schemas[name]["properties"]["rev"]["minLength"] = 1
    made["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "A token of the server: read, write or admin",
        }
    }
    used = set()
    for path in made["paths"].values():
        for operation in path.values():
            if "responses" in operation:
                used.update(operation.get("tags", ()))
                _finish_operation(operation)
    made["tags"] = [
        {"name": name, "description": said} for name, said in _TAGS.items() if name in used
    ]


def _finish_operation(operation: dict[str, Any]) -> None:
    """Add each operation's problems: those that every operation may have, and those that it
    declares by their number alone."""
    responses = operation["responses"]
    responses.pop("422", None)
    scope = operation.get("x-scope", "read")
    if scope == "none":
        operation["security"] = []
        _say_problems(responses, (414, 421, 500))
        return
    operation["security"] = [{"token": []}, *([{}] if scope == "read" else [])]
    if scope in ("write", "admin"):
        responses.setdefault("413", {})
    _say_problems(responses, _ALWAYS)
    operation["responses"] = dict(sorted(responses.items()))


def _say_problems(responses: dict[str, Any], statuses: tuple[int, ...]) -> None:
    for status in statuses:
        responses.setdefault(str(status), {})
    for said, response in responses.items():
        if int(said) >= 400:
            response["description"] = _PROBLEMS.get(
                int(said), response.get("description", "The request failed")
            )
            response["content"] = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}


def _problem() -> dict[str, Any]:
    """The schema of a problem: unknown fields are left out, never null."""
    made = TypeAdapter(Problem).json_schema()
    for said in made["properties"].values():
        if "anyOf" in said:
            (known,) = [choice for choice in said.pop("anyOf") if choice != {"type": "null"}]
            said.update(known)
            said.pop("default", None)
    made["required"] = ["type", "title", "status", "detail", "kind"]
    return made
