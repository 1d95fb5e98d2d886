"""``NodeReports``: the ranks of a node report their parts through one process, in one transaction.

Ranks of one branch record in sequence, so a transaction for each rank of a large job takes long.
The process takes the reports that wait while it is in a transaction, and records them with the next
one. If that fails, it records each of them alone. It ends when no rank is connected.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from datastates.agent.client import start
from datastates.agent.messages import connect, error_of, listen, named_address, who
from datastates.errors import DatastatesError, Unavailable
from datastates.lineage.database import Database, retry_conflicts
from datastates.lineage.write.parts import record_parts
from datastates.system.interrupts import Mutex

from .rank_reports import Reply, Report, report, tell

PATIENCE_S = 30.0
"""How long a rank waits for the process, in seconds, before it reports directly."""

IDLE_S = 10.0
"""How long the process waits for a rank, in seconds."""

_URL = "DATASTATES_REPORTS_URL"
"""The environment variable with the URL of the database. Other users cannot read it."""


class _Replied(msgspec.Struct, frozen=True, array_like=True, tag="replied"):
    reply: Reply


class _Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    kind: str
    text: str
    trouble: str | None


_encode = msgspec.msgpack.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(Report).decode
_answers_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Replied | _Failed)


class NodeReports:
    """``report`` for the ranks of a node. Safe from any thread. While the process is not there,
    this process reports directly. The first report starts it."""

    def __init__(self, database: Database) -> None:
        self._database, self._url = database, database.url
        self._connection: Connection | None = None
        self._started_at = -math.inf
        self._lock = Mutex()

    def report(self, said: Report) -> Reply:
        """See ``rank_reports.report``."""
        if said.is_question:
            return report(self._database, said)
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                self._connection.send_bytes(_encode(said))
                has_answered = self._connection.poll(PATIENCE_S)
                answer = (
                    _answers_decoder.decode(self._connection.recv_bytes()) if has_answered else None
                )
            except (EOFError, OSError, OverflowError, Unavailable, msgspec.MsgspecError):
                answer = None
            if answer is None:
                # a report that was recorded changes nothing when it comes again
                self._close()
                return report(self._database, said)
        if isinstance(answer, _Failed):
            raise error_of(answer.kind, answer.text, answer.trouble)
        reply: Reply = answer.reply
        return reply

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._close()

    def _connect(self) -> Connection:
        """
        :raises Unavailable: no process listens yet. It is started.
        """
        try:
            made = connect(_address(self._url))
        except Unavailable:
            if time.monotonic() - self._started_at > IDLE_S:
                self._started_at = time.monotonic()
                start(__name__, {_URL: self._url})
            raise
        made.settimeout(None)
        return Connection(made.detach())

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
            self._connection = None


def _address(url: str) -> str:
    said = f"{metadata.version('datastates')} {url}".encode()
    lineage = hashlib.blake2b(said, digest_size=8).hexdigest()
    return named_address(f"reports-{os.geteuid()}-{lineage}")


# --- the process ---


@retry_conflicts
def _report_all(database: Database, said: Sequence[Report]) -> list[Reply]:
    with database.write(durable=any(each.is_durable for each in said)) as session:
        record_parts(session, [part for each in said for part in each.parts])
        return [tell(session, replace(each, parts=())) for each in said]


def _answers(database: Database, said: Sequence[Report]) -> list[msgspec.Struct]:
    if len(said) > 1:
        with suppress(DatastatesError):  # one of them is refused
            return [_Replied(each) for each in _report_all(database, said)]
    answers: list[msgspec.Struct] = []
    for each in said:
        try:
            answers.append(_Replied(report(database, each)))
        except Exception as exc:  # the rank raises it, whatever it is
            trouble = exc.trouble if isinstance(exc, DatastatesError) else None
            answers.append(_Failed(type(exc).__name__, str(exc) or repr(exc), trouble))
    return answers


def main(url: str) -> None:
    """Record the reports of the ranks of this user and node, until none is connected."""
    try:
        listener = listen(_address(url))
    except OSError:
        return  # another process was first
    database, ranks = Database(url), list[Connection]()
    idle_at = time.monotonic()
    while ranks or time.monotonic() - idle_at < IDLE_S:
        ready = wait([listener, *ranks], 1.0)
        said: list[tuple[Connection, Report]] = []
        for one in ready:
            if one is listener:
                accepted, _ = listener.accept()
                if who(accepted)[1] == os.geteuid():
                    ranks.append(Connection(accepted.detach()))
                else:
                    accepted.close()
                continue
            assert isinstance(one, Connection), "nothing else is waited for"
            try:
                said.append((one, _decode_report(one.recv_bytes())))
            except (EOFError, OSError, msgspec.MsgspecError):
                ranks.remove(one)
                one.close()
        for (one, _), answer in zip(
            said, _answers(database, [each for _, each in said]), strict=True
        ):
            with suppress(OSError):  # the rank has ended
                one.send_bytes(_encode(answer))
        if ranks:
            idle_at = time.monotonic()


if __name__ == "__main__":
    main(os.environ[_URL])
