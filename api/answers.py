"""Turns a server's answers into our values and our errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from datastates import errors
from datastates.errors import DatastatesError, Disconnected, NotFound, PeerFault, SyntaxProblem, Unauthorized, Unavailable

if TYPE_CHECKING:
    import httpx

__all__ = ["checked", "disconnected", "error_of", "parsed"]

T = TypeVar("T")
_BY_STATUS: dict[int, type[DatastatesError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def parsed(response: httpx.Response, type_: type[T]) -> T:
    """The body of an answer.

    :raises PeerFault: it is something else: another program or another version answers there.
    """
    try:
        return msgspec.convert(_with_nan(msgspec.json.decode(response.content)), type_, str_keys=True)  # JSON has no other keys
    except msgspec.MsgspecError as error:
        raise PeerFault(
            f"{response.url} answered something else than {type_.__name__} ({error}): is it datastates, of this version?"
        ) from error


def checked(response: httpx.Response) -> httpx.Response:
    """The answer itself, unless it is a refusal.

    :raises DatastatesError: it is one; the error that the server had, by its kind.
    """
    if response.is_success or response.status_code == 304:
        return response
    response.read()
    raise error_of(response)


def error_of(response: httpx.Response) -> DatastatesError:
    """The error that a refusal describes. Its body has been read."""
    problem: Any = None
    if "json" in response.headers.get("content-type", ""):
        try:
            problem = msgspec.json.decode(response.content)
        except msgspec.MsgspecError:
            problem = None
    problem = problem if isinstance(problem, dict) else {}
    said = str(problem.get("detail") or f"{response.url} answered {response.status_code} {response.reason_phrase}")
    type_ = _KINDS.get(str(problem.get("kind"))) or _BY_STATUS.get(response.status_code, DatastatesError)
    error = type_.__new__(type_, said)
    Exception.__init__(error, said)  # the message is complete: the server has already composed it
    if isinstance(error, SyntaxProblem):
        error.text, error.column, error.expected = (
            str(problem.get("text", "")),
            int(problem.get("column", 1)),
            tuple(problem.get("expected", ())),
        )
    if isinstance(error, Unavailable):
        error.nearest, error.is_gone = problem.get("nearest"), response.status_code == 410
    return error


def disconnected(where: str, error: Exception) -> Disconnected:
    """The error for getting no answer at all."""
    return Disconnected(
        f"{where} does not answer ({str(error) or type(error).__name__}): start it with 'datastates serve', or check the address"
    )


def _with_nan(value: Any) -> Any:
    """Restore NaN, which JSON lacks: such metrics were sent as null."""
    if isinstance(value, list):
        for item in value:
            _with_nan(item)
    elif isinstance(value, dict):
        metrics = value.get("metrics")
        if isinstance(metrics, dict) and "uid" in value:
            value["metrics"] = {key: math.nan if number is None else number for key, number in metrics.items()}
        for item in value.values():
            if isinstance(item, dict | list):
                _with_nan(item)
    return value


def _kinds(root: type[DatastatesError]) -> Iterator[tuple[str, type[DatastatesError]]]:
    for type_ in root.__subclasses__():
        if type_.__module__ == errors.__name__:
            yield type_.kind, type_
            yield from _kinds(type_)


_KINDS = dict(_kinds(DatastatesError))
