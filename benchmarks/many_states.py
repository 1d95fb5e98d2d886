"""A lineage of very many states, written directly into the tables, for the benchmarks of lineage
and web."""

from __future__ import annotations

import hashlib
import math
import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import create_engine

from datastates.lineage import Database

BRANCHES = 50
METRICS = ("loss", "val_loss", "acc", "grad_norm")
RARE = 10
"""The number of states with a metric ``rare`` above 0.5, which a rare filter finds."""

RUNS = 200
FURTHER = tuple(f"layer{number}/grad_norm" for number in range(25))
EVERY = 50
COLUMNS = (
    "count",
    "gaps",
    "total",
    "least",
    "least_id",
    "most",
    "most_id",
    "first",
    "first_id",
    "last",
    "last_id",
    "gap_id",
)
STATES = 64
"""The number of states that a summary covers (``lineage.tally``)."""

BATCH = 500


def make(path: Path, count: int, branches: int = BRANCHES, *, is_furnished: bool = False) -> None:
    """A lineage in a new file: ``fill``, optionally ``furnish``, and the summaries that ``record``
    would have written.

    There are no ``ANALYZE`` statistics, as in a normal repository.
    """
    database = Database(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        fill(connection, count, branches)
        if is_furnished:
            furnish(connection, count, branches)
    connection.close()
    with database.write() as session:
        summarise(session)
    database.close()


def make_at(url: str, count: int, branches: int = BRANCHES) -> None:
    """The same as ``make`` without ``furnish``, in an empty database of PostgreSQL."""
    database, length = Database(url), count // branches
    engine = create_engine(url)
    with engine.begin() as connection:
        raw: Any = connection.connection.driver_connection  # psycopg's, for COPY
        cursor = raw.cursor()
        # the generated rows need no checks
        cursor.execute("set session_replication_role = replica")
        for sql, rows in (
            (
                (
                    f"copy state ({_STATE}, micro_step, status, bytes_total, bytes_new, world_size)"
                    " from stdin"
                ),
                _whole(states(count, branches)),
            ),
            ("copy metric (state_id, key, value) from stdin", metrics(count, branches)),
            ("copy ref (name, kind, state_id, version) from stdin", _heads(length, branches)),
        ):
            with cursor.copy(sql) as copy:
                for row in rows:
                    copy.write_row(row)
        cursor.execute(
            "select setval(pg_get_serial_sequence('state', 'id'), (select max(id) from state))"
        )
    with database.write() as session:
        summarise(session)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("vacuum analyze")
    engine.dispose()
    database.close()


_STATE = "id, uid, digest, parent_id, generation, jump_id, jump_step, step, created_at"


def _whole(rows: Iterator[tuple[object, ...]]) -> Iterator[tuple[object, ...]]:
    return ((*row, 0, "evicted", 0, 0, 1) for row in rows)


def _heads(length: int, branches: int) -> list[tuple[str, str, int, int]]:
    return [
        ("main" if branch == 0 else f"branch-{branch}", "branch", (branch + 1) * length, 1)
        for branch in range(branches)
    ]


def fill(connection: sqlite3.Connection, count: int, branches: int = BRANCHES) -> None:
    """Chains of equal length: ``main``, and branches that fork from random states. Every state has
    five metrics."""
    connection.execute("pragma synchronous=off")
    connection.executemany(
        "insert into state (id, uid, digest, parent_id, generation, jump_id, jump_step, step,"
        " micro_step, created_at, status, bytes_total, bytes_new, world_size) values (?, ?, ?, ?,"
        " ?, ?, ?, ?, 0, ?, 'evicted', 0, 0, 1)",
        states(count, branches),
    )
    connection.executemany(
        "insert into metric (state_id, key, value) values (?, ?, ?)", metrics(count, branches)
    )
    connection.executemany(
        "insert into ref (name, kind, state_id, version) values (?, ?, ?, ?)",
        _heads(count // branches, branches),
    )
    connection.commit()


def furnish(connection: sqlite3.Connection, count: int, branches: int) -> None:
    """Further data of a normal repository: ``RUNS`` runs with a configuration each, bytes, states
    that can be restored, and 25 further metrics.

    Each branch belongs to one run. Every ``EVERY``-th of its states has the further metrics, and is
    durable.
    """
    length, rng = count // branches, random.Random(3)
    runs = [
        (
            number,
            f"{number:024x}",
            f"node{number % 8}",
            "ann",
            1,
            "[]",
            "{}",
            "{}",
            number,
            number + 1,
        )
        for number in range(1, RUNS + 1)
    ]
    columns = "id, uid, host, user, pid, argv, config, versions, started_at, finished_at"
    connection.executemany(f"insert into run ({columns}) values ({', '.join('?' * 10)})", runs)
    for number in range(1, RUNS + 1):
        chosen: list[tuple[int, str, str, float | None, str | None]] = [
            (number, "optimizer", "str", None, rng.choice(("adamw", "sgd", "lion")))
        ]
        chosen += [
            (number, key, "float", 10 ** rng.uniform(-4, 0), None)
            for key in ("lr", "wd", "dropout")
        ]
        connection.executemany(
            "insert into setting (run_id, key, type, number, text) values (?, ?, ?, ?, ?)", chosen
        )
    connection.execute(
        f"update state set run_id = 1 + (id - 1) / {length} % {RUNS}, bytes_total = 41943040,"
        " bytes_new = 1048576"
    )
    connection.execute(f"update state set status = 'durable' where id % {EVERY} = 0")
    connection.execute(
        "insert into replica (state_id, rank, tier, node, status, bytes) select id, 0, 'local', '',"
        " 'ok', 1048576 from state where status = 'durable'"
    )
    values = (
        (id_, key, rng.random())
        for id_ in range(EVERY, length * branches + 1, EVERY)
        for key in FURTHER
    )
    connection.executemany("insert into metric (state_id, key, value) values (?, ?, ?)", values)
    connection.commit()


def states(count: int, branches: int, *, main: int | None = None) -> Iterator[tuple[object, ...]]:
    """Rows in order of id, with the jump pointers that ``record`` would make: over two equal jumps,
    otherwise to the parent.

    ``main`` is how many of the states the first chain has; the other chains are of equal length.
    """
    rng, length = (
        random.Random(0),
        (count // branches if main is None else (count - main) // branches),
    )
    main = main or length
    generation, jump = [0] * (count + 1), [0] * (count + 1)
    for id_ in range(1, main + length * (branches - 1) + 1):
        place = id_ - 1 if id_ <= main else (id_ - 1 - main) % length
        parent = id_ - 1 if place else (rng.randrange(main // 2, main) if id_ > main else 0)
        if parent:
            generation[id_] = generation[parent] + 1
            one = jump[parent] or parent
            far = jump[one] or one
            is_even = generation[parent] - generation[one] == generation[one] - generation[far]
            jump[id_] = far if is_even else parent
        uid = hashlib.blake2b(id_.to_bytes(8), digest_size=12).hexdigest()
        # steps are generations here: the lowest state up to there is at the target of the jump
        lowest = generation[jump[id_]] if parent else None
        yield (
            id_,
            uid,
            "0" * 40 + uid,
            parent or None,
            generation[id_],
            jump[id_] or None,
            lowest,
            generation[id_],
            id_,
        )


def metrics(count: int, branches: int) -> Iterator[tuple[int, str, float]]:
    """Rows in the order of their key."""
    rng = random.Random(1)
    every = max(1, count // RARE)
    for id_ in range(1, count // branches * branches + 1):
        for key in METRICS:
            yield id_, key, rng.random()
        yield id_, "rare", 0.9 if id_ % every == 0 else 0.1


# Segments and summaries, which captures would have written


def summarise(connection: sa.Connection) -> None:
    """Give each branch the states that no earlier branch has, and summarize them."""
    branches = sorted(
        connection.execute(_BRANCHES),
        key=lambda row: (row.made or math.inf, row.name != "main", row.state_id),
    )
    for segment, row in enumerate(branches, 1):
        path = sorted(connection.execute(_FREE, {"head": row.state_id}).all())
        fork = path[0][1] if path else row.state_id
        values = {
            "id": segment,
            "name": row.name,
            "fork": fork,
            "first": path[0][0] if path else None,
        }
        connection.execute(_MAKE, values)
        for start in range(0, len(path), BATCH):
            ids = [id_ for id_, _, _ in path[start : start + BATCH]]
            connection.execute(_TAKE, {"segment": segment, "ids": ids})
        for rows in batches(stretches(connection, segment, path)):
            connection.execute(_INSERT, rows)
    if connection.dialect.name == "postgresql" and branches:
        connection.execute(
            sa.text("SELECT setval(pg_get_serial_sequence('segment', 'id'), :last)"),
            {"last": len(branches)},
        )


def stretches(
    connection: sa.Connection, segment: int, path: list[Any]
) -> Iterator[dict[str, object]]:
    """A row for each metric and complete stretch, and one for each metric of the whole segment.

    ``path`` has id, parent and generation."""
    if not path:
        return
    wholes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    end = (path[-1][2] + 1) // STATES
    for place, states in groupby(path, key=lambda state: state[2] // STATES):
        parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for id_, key, value in connection.execute(_VALUES, {"ids": [state[0] for state in states]}):
            add(parts[key], id_, value)
            add(wholes[key], id_, value)
        if place < end:
            yield from (
                {"segment_id": segment, "key": key, "place": place, **part}
                for key, part in parts.items()
            )
    yield from (
        {"segment_id": segment, "key": key, "place": -1, **whole} for key, whole in wholes.items()
    )


def add(found: dict[str, Any], id_: int, value: float | None) -> None:
    """Add a later state's value. A value that is not finite is a gap."""
    if not found:
        found.update(
            dict.fromkeys(COLUMNS)
            | {
                "count": 0,
                "gaps": 0,
                "total": 0.0,
                "first": value,
                "first_id": id_,
            }
        )
    found["count"] += 1
    found["last"], found["last_id"] = value, id_
    if value is None or not math.isfinite(value):
        found["gaps"] += 1
        found["gap_id"] = found["gap_id"] or id_
        return
    found["total"] += value
    if found["least"] is None or value < found["least"]:
        found["least"], found["least_id"] = value, id_
    if found["most"] is None or value > found["most"]:
        found["most"], found["most_id"] = value, id_


def batches(rows: Iterable[dict[str, object]]) -> Iterator[list[dict[str, object]]]:
    batch: list[dict[str, object]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


_BRANCHES = sa.text(
    "SELECT ref.name, ref.state_id, (SELECT min(id) FROM ref_event WHERE ref_event.name = ref.name)"
    " AS made FROM ref WHERE kind = 'branch'"
)
# The conditions that end the walk are on the path: for a condition on the joined table SQLite would
# first read all of that table.
_FREE = sa.text(
    "WITH RECURSIVE path (id, parent_id, generation, segment_id) AS ("
    " SELECT id, parent_id, generation, segment_id FROM state WHERE id = :head"
    " UNION ALL SELECT state.id, state.parent_id, state.generation, state.segment_id FROM path"
    " JOIN state ON state.id = path.parent_id WHERE path.segment_id IS NULL"
    ") SELECT id, parent_id, generation FROM path WHERE segment_id IS NULL"
)
_MAKE = sa.text(
    "INSERT INTO segment (id, name, branch, fork_id, first_id) VALUES (:id, :name, :name, :fork,"
    " :first)"
)
_TAKE = sa.text("UPDATE state SET segment_id = :segment WHERE id IN :ids").bindparams(
    sa.bindparam("ids", expanding=True)
)
_VALUES = sa.text(
    "SELECT state_id, key, value FROM metric WHERE state_id IN :ids ORDER BY state_id"
).bindparams(sa.bindparam("ids", expanding=True))
_INSERT = sa.table(
    "stretch", *(sa.column(name) for name in ("segment_id", "key", "place", *COLUMNS))
).insert()
