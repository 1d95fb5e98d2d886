"""The API does what its OpenAPI document says, whatever it is asked: no 5xx, no answer that the
document does not know."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import positive_data_acceptance
from schemathesis.config import SchemathesisConfig

import datastates
from datastates import Repository
from datastates.api.app import create_app
from datastates.api.cache import etag_of_ref
from datastates.api.routing import API
from tests.api.conftest import ADMIN, NAME, TOKENS
from tests.support.effort import examples

# Revisions and searches have grammars of their own, which no JSON schema can say: what fits the
# schema may well be refused.
EXCLUDED = [positive_data_acceptance]
REFUSALS = [400, 401, 403, 404, 405, 413, 414, 416, 428]
AUTHORIZED = {"Authorization": f"Bearer {ADMIN}"}
HOST = "testserver"  # as schemathesis calls it
DOCUMENT = create_app({}).openapi()
OPERATIONS = sorted(
    (path, method) for path, methods in DOCUMENT["paths"].items() for method in methods
)
STREAMS = f"{API}/repositories/{{repository}}/events"  # never ends: see test_events
QUERIES = (
    "step > 3",
    "metrics.loss < 1 order by metrics.loss limit 3",
    "tag = warm or not branch = main",
    "metrics.",
    "(",
    "attr.rate in (0.1, 1)",
)
REVISIONS = (
    "main",
    "warm",
    "main~2",
    "main@best:loss",
    "soup^2",
    "main@{1}",
    "main~",
    "nobody",
    "main..fork",
    "\x00",
)


@pytest.fixture(scope="module")
def throwaway(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """A repository that the requests may change as they like."""
    folder = tmp_path_factory.mktemp("throwaway") / "runs"
    shutil.copytree(built, folder)
    with datastates.open(folder, memory_bytes=64 << 20) as repo:
        yield repo


@pytest.fixture(scope="module")
def schema(throwaway: Repository) -> Any:
    app = create_app({NAME: throwaway}, tokens=TOKENS, allowed_hosts=[HOST])
    config = SchemathesisConfig.from_dict(
        {"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}}
    )
    return schemathesis.openapi.from_asgi(
        f"{API}/openapi.json", app, config=config, headers=AUTHORIZED
    )


@pytest.fixture(scope="module")
def known(throwaway: Repository) -> dict[str, list[Any]]:
    """What there is: asked for by chance alone, hardly anything would be found."""
    states = throwaway.find("limit 100")
    uids = (
        [state.uid for state in states] + [state.run for state in states if state.run] + ["0" * 24]
    )
    names = [ref.name for ref in throwaway.refs()] + ["made", "made/too"]
    return {
        "repository": [NAME],
        "uid": uids,
        "name": names,
        "rev": [*REVISIONS, *uids],
        "head": [*REVISIONS],
        "old": [*REVISIONS],
        "new": [*REVISIONS],
        "q": [*QUERIES],
        "key": ["loss", "val/loss", "none"],
        "only": ["model", "model/*", "nothing"],
        "after": uids,
        "around": uids,
        "If-Match": [*map(etag_of_ref, throwaway.refs()), "*"],
    }


def _cases() -> Iterator[tuple[str, str, GenerationMode]]:
    """Each operation with what fits the document, and with what does not where there is anything
    that can be wrong."""
    for path, method in OPERATIONS:
        operation = DOCUMENT["paths"][path][method]
        can_be_wrong = "requestBody" in operation or any(
            given["name"] != "repository" for given in operation.get("parameters", ())
        )
        if path != STREAMS:
            yield path, method, GenerationMode.POSITIVE
            if can_be_wrong:
                yield path, method, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    list(_cases()),
    ids=lambda value: str(getattr(value, "value", value)),
)
def test_an_operation_is_as_the_document_says(
    path: str, method: str, mode: GenerationMode, schema: Any, known: dict[str, list[Any]]
) -> None:
    operation = schema[path][method.upper()]

    @settings(
        max_examples=examples(25),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 2**32))
    def check(case: Case[Any], number: int) -> None:
        if mode is GenerationMode.POSITIVE:
            _make_findable(case, known, random.Random(number))
        if case.query:
            # what is left out then is required by the schema, which cannot say so
            case.query.pop("fields", None)
        response = case.call(headers=AUTHORIZED)
        case.validate_response(response, headers=AUTHORIZED, excluded_checks=EXCLUDED)

    check()


def _make_findable(case: Case[Any], known: dict[str, list[Any]], choose: random.Random) -> None:
    """Put in names of what there is, mostly."""
    for parameters in (case.path_parameters, case.query, case.headers):
        for name in list(parameters or ()):
            if name in known and choose.random() < 0.8:
                one = choose.choice(known[name])
                parameters[name] = [one] if isinstance(parameters[name], list) else one
    if isinstance(case.body, dict) and "rev" in case.body and choose.random() < 0.8:
        case.body["rev"] = choose.choice(known["rev"])
