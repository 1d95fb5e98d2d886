"""One of the processes of ``test_many_processes``: records states on a branch of its own, and on
one that all share.

    python recorder.py URL NAME OWN SHARED

It says "ready", waits for a line, and prints the uids that it recorded and how long each ``record``
took, as JSON.
"""

from __future__ import annotations

import json
import secrets
import sys
import time

from datastates.errors import Conflict, NotFound
from datastates.lineage import Database
from datastates.lineage.query import names
from datastates.lineage.write import record
from tests.support.lineages import told

SHARED = "shared"


class Recorder:
    """Records, and keeps what it recorded and how long each took, seconds."""

    def __init__(self, database: Database, name: str) -> None:
        self.database, self.name = database, name
        self.recorded: dict[str, list[str]] = {name: [], SHARED: []}
        self.took: list[float] = []
        self.conflicts = 0

    def record(self, branch: str, parent: str | None, step: int) -> None:
        new = told(
            secrets.token_hex(12),
            secrets.token_hex(32),
            parent,
            branch,
            None,
            step,
            metrics={"loss": 1 / (1 + step)},
        )
        began = time.perf_counter()
        with self.database.write() as session:
            record.record(session, new)
        self.took.append(time.perf_counter() - began)
        self.recorded[branch].append(new.uid)

    def record_shared(self, step: int) -> None:
        """Wherever the branch is; somebody else may be first, then again from there."""
        while True:
            try:
                self.record(SHARED, self._head(), step)
            except Conflict:
                self.conflicts += 1
            else:
                return

    def _head(self) -> str | None:
        with self.database.read() as session:
            try:
                return names.get(session, SHARED).state
            except NotFound:
                return None


def main(url: str, name: str, own: int, shared: int) -> None:
    """Record ``own`` states on the branch ``name`` and, spread among them, ``shared`` on the
    shared one."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    recorder = Recorder(Database(url), name)
    for step in range(own):
        recorder.record(name, recorder.recorded[name][-1] if step else None, step)
        if step % (own // shared) == 0:
            recorder.record_shared(step)
    recorder.database.close()
    json.dump(
        {"recorded": recorder.recorded, "took": recorder.took, "conflicts": recorder.conflicts},
        sys.stdout,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
