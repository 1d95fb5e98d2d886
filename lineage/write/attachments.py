"""The plan of a study, and the cost and the error of each variant. The results are in states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import bindparam, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from datastates import values
from datastates.errors import Corrupt
from datastates.lineage.lookup import id_of, rows_in_batches
from datastates.lineage.schema import (
    FOLDER,
    REPLICA,
    REPORT,
    REPORT_SAMPLE,
    SEAL,
    STATE,
    VARIANT,
    to_us,
)
from datastates.system import logs
from datastates.values import Value

if TYPE_CHECKING:
    from datastates.lineage.session import Session


ERROR_CHARACTERS = 20_000
"""How many characters of an error are kept: its first line, and its end, which says where it was
raised."""


@dataclass(frozen=True, slots=True)
class PlannedVariant:
    """One variant of a plan. It continues from ``parent``, or from the start if that is None."""

    name: str
    parent: str | None
    epochs: int
    config: Mapping[str, Value]


def plan(session: Session, study: str, variants: Sequence[PlannedVariant]) -> None:
    """Note what a study is to train, in the order of its plan.

    What is known of variants planned before stays."""
    known = {row["name"]: dict(row) for row in session.execute(_KNOWN, {"of": study}).mappings()}
    rows = [_row(study, place, variant) for place, variant in enumerate(variants)]
    new = [
        row | {"planned_at": to_us(None), "attempts": 0, "took_s": 0.0}
        for row in rows
        if row["name"] not in known
    ]
    if new:
        session.execute(_PLAN, new)
    changed = [row for row in rows if row["name"] in known and row != known[row["name"]]]
    if changed:
        session.execute(
            _PLAN_AGAIN, [{f"new_{key}": value for key, value in row.items()} for row in changed]
        )


def planned(session: Session, study: str) -> dict[str, str | None]:
    """The variants that a study plans to train, with the errors of their last attempts."""
    return {row.name: row.error for row in session.execute(_PLANNED, {"of": study})}


def begin(session: Session, study: str, variant: str) -> None:
    """Note that a worker begins to train a variant; this clears the error of an earlier attempt."""
    session.execute(_BEGIN, {"of": study, "variant": variant, "now": to_us(None)})


def end(session: Session, study: str, variant: str, took_s: float) -> None:
    """Note that the worker ended normally, after ``took_s`` of training."""
    session.execute(_END, {"of": study, "variant": variant, "now": to_us(None), "more_s": took_s})


def fail(session: Session, study: str, variant: str, error: str) -> None:
    """Note that an attempt failed, and why."""
    session.execute(
        _FAIL, {"of": study, "variant": variant, "now": to_us(None), "why": _shortened(error)}
    )


def failures(session: Session, study: str, since: int) -> dict[str, str]:
    """Why the last attempts at variants failed, for attempts that ended after ``since``, in
    microseconds."""
    return {
        row.name: row.error for row in session.execute(_FAILURES, {"of": study, "since": since})
    }


def _shortened(error: str) -> str:
    """The error without secrets, in a form that every database accepts."""
    said = logs.text(error.replace("\0", "?").encode("utf-8", "replace").decode())
    if len(said) <= ERROR_CHARACTERS:
        return said
    first = said.partition("\n")[0][: ERROR_CHARACTERS // 4]
    return f"{first}\n…\n{said[len(first) + 3 - ERROR_CHARACTERS :]}"


def _row(study: str, place: int, variant: PlannedVariant) -> dict[str, object]:
    config = msgspec.json.encode(logs.named(dict(variant.config))).decode()
    return {
        "study": study,
        "name": variant.name,
        "place": place,
        "parent": variant.parent,
        "epochs": variant.epochs,
        "config": config,
    }


_is_it = (VARIANT.c.study == bindparam("of")) & (VARIANT.c.name == bindparam("variant"))
_planned = [VARIANT.c[name] for name in ("study", "name", "place", "parent", "epochs", "config")]
_KNOWN = select(*_planned).where(VARIANT.c.study == bindparam("of"))
_PLANNED = select(VARIANT.c.name, VARIANT.c.error).where(VARIANT.c.study == bindparam("of"))
_PLAN = insert(VARIANT)
_PLAN_AGAIN = (
    update(VARIANT)
    .where(VARIANT.c.study == bindparam("new_study"), VARIANT.c.name == bindparam("new_name"))
    .values({name: bindparam(f"new_{name}") for name in ("place", "parent", "epochs", "config")})
)
_BEGIN = (
    update(VARIANT)
    .where(_is_it)
    .values(began_at=bindparam("now"), ended_at=None, error=None, attempts=VARIANT.c.attempts + 1)
)
_END = (
    update(VARIANT)
    .where(_is_it)
    .values(ended_at=bindparam("now"), took_s=VARIANT.c.took_s + bindparam("more_s"))
)
_FAIL = update(VARIANT).where(_is_it).values(ended_at=bindparam("now"), error=bindparam("why"))
_FAILURES = select(VARIANT.c.name, VARIANT.c.error).where(
    VARIANT.c.study == bindparam("of"),
    VARIANT.c.error.is_not(None),
    VARIANT.c.ended_at >= bindparam("since"),
)


# Reports on outliers, stored for people to look at; a report replaces an earlier one of the same
# name.


@dataclass(frozen=True, slots=True)
class NewSample:
    """One sample of a report: its place, its index in the data, what is known of it, and a
    picture of it as an encoded image."""

    rank: int
    sample: int
    facts: Mapping[str, Any]
    picture: bytes | None = None


def keep(
    session: Session, name: str, facts: Mapping[str, Any], samples: Iterable[NewSample]
) -> int:
    """Store a report, and return its id. A report replaces an earlier one of its name, and keeps
    its id. ``facts`` are the facts about all samples.

    :raises InvalidInput: the name is not valid.
    """
    columns = {
        "name": values.key(name, "the name of a report"),
        "created_at": to_us(None),
        "body": _json(facts),
    }
    id_ = session.execute(_FIND, {"of": name}).scalar()
    if id_ is None:
        made: Any = session.execute(_KEEP, columns)
        id_ = int(made.inserted_primary_key[0])
    else:
        session.execute(_DROP_SAMPLES, {"id": id_})
        session.execute(REPORT.update().where(REPORT.c.id == id_).values(columns))
    rows = [
        {
            "report_id": id_,
            "rank": each.rank,
            "sample": each.sample,
            "body": _json(each.facts),
            "picture": each.picture,
        }
        for each in samples
    ]
    if rows:
        session.execute(_KEEP_SAMPLES, rows)
    return id_


def _json(facts: Mapping[str, Any]) -> str:
    return msgspec.json.encode(facts).decode()


_FIND = select(REPORT.c.id).where(REPORT.c.name == bindparam("of"))
_KEEP = insert(REPORT)
_KEEP_SAMPLES = insert(REPORT_SAMPLE)
_DROP_SAMPLES = delete(REPORT_SAMPLE).where(REPORT_SAMPLE.c.report_id == bindparam("id"))


# The folders of packs in a lineage, each by the uid stored in it, with the place where it was last
# seen.


@dataclass(frozen=True, slots=True)
class Folder:
    """One folder of packs: the path and the host name where it was last seen, so that people can
    find it."""

    uid: str
    path: str
    host: str


def note(session: Session, uid: str, *, path: str, host: str) -> None:
    """Note where a folder was seen."""
    row = {"uid": uid, "path": path, "host": host, "seen_at": to_us(None)}
    session.execute(_UPSERT[session.dialect.name], row)


def get(session: Session, uid: str) -> Folder | None:
    """The folder of this uid; None when it was never seen."""
    row = session.execute(_GET, {"wanted": uid}).first()
    return None if row is None else Folder(row.uid, row.path, row.host)


def at(session: Session, path: object) -> list[str]:
    """The uids of all folders that were last seen at a path."""
    return list(session.execute(_AT, {"seen": str(path)}).scalars())


def urls(session: Session) -> dict[str, str]:
    """The URLs of the tiers with which the repository was opened, oldest first, and the uid of each
    place."""
    return {row.path: row.uid for row in session.execute(_URLS)}


def forget(session: Session, uid: str) -> None:
    """Forget where a folder was seen."""
    session.execute(_FORGET, {"wanted": uid})


def seen_at(session: Session, uids: Iterable[str]) -> dict[str, int]:
    """When each of these folders was last seen, in microseconds since the epoch of its host."""
    rows = session.execute(_SEEN_AT, {"uids": list(uids)})
    return {row.uid: row.seen_at for row in rows}


def of_state(session: Session, uid: str) -> list[Folder]:
    """The folders that hold a state's bytes, as they were reported. Tiers with URLs are left out.

    :raises NotFound: there is no such state.
    """
    rows = session.execute(_OF_STATE, {"state": id_of(session, uid)})
    return [Folder(row.uid, row.path, row.host) for row in rows]


_GET = select(FOLDER).where(FOLDER.c.uid == bindparam("wanted"))
_is_url = FOLDER.c.path.like("%://%")
_URLS = select(FOLDER.c.path, FOLDER.c.uid).where(_is_url).order_by(FOLDER.c.seen_at, FOLDER.c.uid)
_FORGET = delete(FOLDER).where(FOLDER.c.uid == bindparam("wanted"))
_SEEN_AT = select(FOLDER.c.uid, FOLDER.c.seen_at).where(
    FOLDER.c.uid.in_(bindparam("uids", expanding=True))
)
_AT = select(FOLDER.c.uid).where(FOLDER.c.path == bindparam("seen"))
_OF_STATE = (
    select(FOLDER)
    .join_from(FOLDER, REPLICA, REPLICA.c.node == FOLDER.c.uid)
    .where(REPLICA.c.state_id == bindparam("state"), ~_is_url)
    .order_by(FOLDER.c.uid)
)
_sqlite = sqlite.insert(FOLDER)
_postgresql = postgresql.insert(FOLDER)
_SEEN = ("path", "host", "seen_at")
_UPSERT = {
    "sqlite": _sqlite.on_conflict_do_update(
        index_elements=["uid"], set_={name: _sqlite.excluded[name] for name in _SEEN}
    ),
    "postgresql": _postgresql.on_conflict_do_update(
        index_elements=["uid"], set_={name: _postgresql.excluded[name] for name in _SEEN}
    ),
}


# Seals: a digest of what the chunks of a state held when it was first exported, imported or
# verified.


def seals(session: Session, uids: Iterable[str]) -> dict[str, str]:
    """The seal of each of these states that has one."""
    return {row.uid: row.digest for row in rows_in_batches(session, _SEALS, uids, "uids")}


def check(known: str | None, found: str, uid: str) -> None:
    """Raise unless a state's seal equals the known one, or none is known.

    :raises Corrupt: it differs.
    """
    if known is not None and known != found:
        raise Corrupt(
            f"state {uid} holds other bytes than when it was sealed ({found[:16]} now, {known[:16]}"
            " then), though their digests against rot agree. They were forged on purpose: restore"
            " another state, or copy this one again from an intact source"
        )


def seal(session: Session, uid: str, digest: str) -> None:
    """Seal a state permanently.

    :raises Corrupt: it has another seal.
    """
    session.execute(_INSERT[session.dialect.name], {"held": uid, "digest": digest})
    check(seals(session, [uid]).get(uid), digest, uid)


_SEALS = (
    select(STATE.c.uid, SEAL.c.digest)
    .join_from(SEAL, STATE, STATE.c.id == SEAL.c.state_id)
    .where(STATE.c.uid.in_(bindparam("uids", expanding=True)))
)
_HELD = select(STATE.c.id, bindparam("digest", type_=SEAL.c.digest.type)).where(
    STATE.c.uid == bindparam("held")
)
_INSERT = {
    name: make(SEAL).from_select(["state_id", "digest"], _HELD).on_conflict_do_nothing()
    for name, make in (("sqlite", sqlite.insert), ("postgresql", postgresql.insert))
}
