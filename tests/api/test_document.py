"""The OpenAPI document: valid, whole, and made without a repository."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from openapi_spec_validator import validate

from datastates.api.app import create_app
from datastates.api.routing import API, MEDIA_TYPE
from tests.api.test_security import ROUTES, walk

DOCUMENT: dict[str, Any] = create_app({}).openapi()


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_document_is_valid() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"].startswith("3.1")


def test_every_route_of_the_api_stands_in_it() -> None:
    listed = {(method.upper(), path) for method, path, _ in operations()}
    routed = {
        (method, path.replace(":path}", "}"))
        for method, path in walk(create_app({}).routes)
        if path.startswith(API)
    }
    hidden = {(method, path) for method, path in routed if method == "HEAD"} | {
        ("GET", f"{API}/openapi.json")
    }

    assert routed - hidden <= listed
    assert {("GET", "/healthz"), ("GET", "/metrics")} <= listed
    assert len(ROUTES) > len(listed)


def test_operations_have_names_of_their_own_and_say_what_they_do() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]

    assert len(set(ids)) == len(ids)
    for _, path, operation in operations():
        assert operation["summary"], path
        assert operation["tags"], path
        assert {tag["name"] for tag in DOCUMENT["tags"]} >= set(operation["tags"]), path
        assert operation["x-scope"] in ("none", "read", "write", "admin"), path


def test_problems_and_tokens_are_said_of_every_operation() -> None:
    for method, path, operation in operations():
        if operation["x-scope"] == "none":
            assert operation["security"] == []
            assert {"414", "421"} <= set(operation["responses"])
            continue
        assert {"token": []} in operation["security"]
        assert ({} in operation["security"]) == (operation["x-scope"] == "read"), path
        assert (operation["x-scope"] == "read") == (method in ("get", "head")), path
        assert "422" not in operation["responses"]
        problems = {
            status: said
            for status, said in operation["responses"].items()
            if int(status) >= 400 and status != "416"
        }
        assert {"400", "401", "403", "404", "503"} <= set(problems), path
        for said in problems.values():
            assert said["description"]
            assert list(said["content"]) == [MEDIA_TYPE]


def test_numbers_that_json_cannot_say_may_be_null() -> None:
    for name in ("State", "StateDetail"):
        kinds = DOCUMENT["components"]["schemas"][name]["properties"]["metrics"][
            "additionalProperties"
        ]["anyOf"]
        assert {"type": "null"} in kinds


def test_changes_of_refs_say_when_they_are_refused() -> None:
    path = DOCUMENT["paths"][f"{API}/repositories/{{repository}}/refs/{{name}}"]

    assert {"412", "428"} <= set(path["patch"]["responses"])
    assert {"412", "428"} <= set(path["delete"]["responses"])
    assert {"201", "409", "412", "413"} <= set(path["put"]["responses"])


def test_document_is_printed_without_a_repository() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "datastates.api.document"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert json.loads(done.stdout) == json.loads(json.dumps(DOCUMENT))
    assert done.stderr == ""


def test_revision_has_a_character() -> None:
    for _, path, operation in operations():
        for given in operation.get("parameters", ()):
            if given["name"] in ("rev", "old", "new"):
                schema = given["schema"]
                assert schema.get("items", schema)["minLength"] == 1, path
    for name in ("NewRef", "RefMove"):
        assert DOCUMENT["components"]["schemas"][name]["properties"]["rev"]["minLength"] == 1
