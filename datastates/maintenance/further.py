"""The further tiers of a repository: which it has, whether they can be used, copies on demand, and
what failed uploads left there."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from datastates.config import Config
from datastates.errors import Conflict, DatastatesError, InvalidInput, NotFound, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.query.names import replicas_of
from datastates.lineage.query.retained import outstanding
from datastates.lineage.write import attachments, runs
from datastates.lineage.write.clones import repository_uid
from datastates.storage.remote import ObjectTier, url_name
from datastates.storage.tier import Tier
from datastates.storage.tiers import VOLATILE, Tiers, check_further
from datastates.system.interrupts import checkpoint
from datastates.system.threads import Latch

from .lease import FOLDER, PackFolder
from .location import Location

if TYPE_CHECKING:
    from .core import Core

_logger = logging.getLogger(__name__)

_CHECK_S = 10.0
"""A tier that does not respond for so long is checked again before the first copy, in seconds."""

_LOOK_S = 0.05
_NOTE_S = 3.0
_OBSERVED_S = 10.0
"""How often a process is noted to live, and how long another one waits for that, in seconds."""


def tiers_of(location: Location, config: Config, database: Database) -> list[object]:
    """The further tiers of a repository: its bucket, then those that were configured, or else those
    at the URLs with which it was opened before.

    A stored tier that cannot be used here is left out, with a line in the log.
    """
    found: list[object] = [location.bucket] if location.bucket else []
    if config.tiers is not None:
        return [*found, *(each for each in config.tiers if each not in found)]
    with database.read() as session:
        urls = attachments.urls(session)
    for url in urls:
        try:
            (tier,) = check_further([url])
            if tier.name not in {each.name for each in check_further(found)}:
                found.append(tier)
        except InvalidInput as exc:
            _logger.warning("a tier of this repository is not used here: %s", exc)
    return found


def check_tiers(database: Database, tiers: Tiers, *, raises: bool = True) -> None:
    """Check the further tiers, and record the URLs of those that have one.

    A tier that does not respond is checked again before the first copy. ``raises``: others that
    cannot be used raise; else they only get a line in the log.

    :raises InvalidInput: a tier is not configured correctly.
    :raises Conflict: a tier belongs to another repository.
    """
    if not tiers.further:
        return
    with database.read() as session:
        repository, known = repository_uid(session), attachments.urls(session)
    places: dict[str, str] = {}
    for tier in tiers.further:
        url = getattr(tier, "url", "")
        try:
            _check_in_time(tier, repository)
            if tier.node:
                _check_name(tier, places, known)
        except Unavailable as exc:
            _logger.warning("%s; copies to it are tried again", exc)
            if url and url not in known:
                _note(database, _provisional(url), url)
        except DatastatesError as exc:
            if raises:
                raise
            _logger.warning("%s; copies to it are tried again", exc)
        else:
            places[tier.node] = tier.name
            if url and known.get(url) != tier.node:
                _note(database, tier.node, url)


def _check_name(tier: Tier, places: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise if the place has another name here, or its name is that of another place."""
    if tier.node in places:
        raise Conflict(
            f"the {tier.name} tier is the same place as the {places[tier.node]} tier: give one of"
            " them only"
        )
    for url, node in known.items():
        if node not in (tier.node, _provisional(url)) and url_name(url) == tier.name:
            raise Conflict(
                f"this repository has a tier {tier.name!r} at {url}: give the new one another"
                " name, as in s3://bucket/run?name=far"
            )


def _note(database: Database, uid: str, url: str) -> None:
    """Record the URL of a place, instead of what stood for it before it could be reached."""
    with database.write() as session:
        attachments.forget(session, _provisional(url))
        attachments.note(session, uid, path=url, host=url.partition("?")[0])


def _provisional(url: str) -> str:
    """What stands for the uid of a place that was not reached yet."""
    return sha256(url.encode()).hexdigest()[:24]


def _check_in_time(tier: Tier, repository: str) -> None:
    """Check a tier. One that does not return does not hold up the caller for long."""
    errors: list[BaseException | None] = []

    def check() -> None:
        try:
            tier.check(repository)
            errors.append(None)
        except BaseException as exc:  # raised by the caller
            errors.append(exc)

    thread = threading.Thread(target=check, name="datastates-check", daemon=True)
    thread.start()
    thread.join(_CHECK_S)
    if not errors:
        raise Unavailable(f"the {tier.name} tier has not responded for {_CHECK_S:.0f} s")
    if errors[0] is not None:
        raise errors[0]


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of ``copy``: the uids of the states that are on the tier now, and of those that
    are not, with the reason."""

    tier: str
    copied: tuple[str, ...]
    left: dict[str, str]


def copy(
    core: Core,
    uids: Sequence[str],
    name: str,
    tell: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copy states that are durable here to a further tier; see ``Repository.copy``."""
    tier = named(core, name)
    node, local = core.home.check_writable(), core.tiers.durable.name
    core.settle()
    todo: dict[str, list[int]] = {}
    with core.database.read() as session:
        if not uids:
            for uid, rank in outstanding(session, tier=local, node=node, further=name):
                todo.setdefault(uid, []).append(rank)
        for uid in uids:
            places = replicas_of(session, uid)
            there = {one.rank for one in places if one.tier == name}
            here = {one.rank for one in places if one.tier == local} if core.tiers.has(uid) else ()
            if not here and not there:
                raise Unavailable(
                    f"state {uid} is not in {core.home.path}, so it cannot be copied from here:"
                    " tag it, so that it becomes durable, or copy it where its packs are"
                )
            if missing := sorted(set(here) - there):
                todo[uid] = missing
    copies = core.runner().copies
    for uid, ranks in todo.items():
        copies.put(uid, ranks, None, to=name)
    began = time.monotonic()
    while waiting := [uid for uid in todo if copies.is_waiting(uid, name)]:
        checkpoint()
        if tell is not None:
            tell(len(todo) - len(waiting), len(todo))
        if copies.trouble is not None and time.monotonic() - began > _CHECK_S:
            break
        time.sleep(_LOOK_S)
    copied, left = list[str](), dict[str, str]()
    for uid, ranks in todo.items():
        if all(tier.has_part(uid, rank) for rank in ranks):
            copied.append(uid)
        else:
            left[uid] = copies.trouble or "the log has the reason"
    return CopyReport(name, tuple(copied), left)


def orphans(core: Core, name: str, *, is_dry_run: bool = False) -> dict[str, int]:
    """The packs that failed uploads left on a tier more than a day ago, and their sizes in bytes.
    They are deleted, unless ``is_dry_run``.

    :raises InvalidInput: the tier has no packs.
    """
    tier = named(core, name)
    if not isinstance(tier, ObjectTier):
        raise InvalidInput(
            f"the {name} tier has no packs of failed uploads: only buckets have some"
        )
    found = tier.orphans()
    for key in () if is_dry_run else found:
        checkpoint()
        tier.delete(key)
    return found


def named(core: Core, name: str) -> Tier:
    """The further tier of this name.

    :raises NotFound: there is none.
    """
    for tier in core.tiers.further:
        if tier.name == name:
            return tier
    names = ", ".join(tier.name for tier in core.tiers.further) or "none"
    raise NotFound(
        f"this repository has no tier {name!r} here (it has {names}): give its URL in"
        " DATASTATES_TIERS, or open the repository with Config(tiers=[…])"
    )


class Presence:
    """Notes in the lineage, every few seconds, that a process of a folder of packs lives, for
    processes on other nodes. It has a thread, and does not wait for the database."""

    def __init__(self, database: Database, home: PackFolder) -> None:
        self._database, self._home, self._over = database, home, Latch()
        threading.Thread(target=self._run, name="datastates-presence", daemon=True).start()

    def close(self) -> None:
        """Note nothing any more."""
        self._over.set()

    def _run(self) -> None:
        path, host = str(self._home.path), socket.gethostname()
        while not self._over.is_set():
            with suppress(DatastatesError), self._database.write() as session:
                attachments.note(session, self._home.uid or "", path=path, host=host)
            self._over.wait(_NOTE_S)


def live_folders(core: Core, branch: str) -> frozenset[str]:
    """The other folders with a process that trains a branch and lives. Processes in other folders
    that note nothing for a while count as dead, and are settled.

    Only with packs in a bucket. It waits only if a training of the branch elsewhere did not end.
    """
    with core.database.read() as session:
        others = {
            str(run.config[FOLDER]): run.process or run.uid
            for run in runs.unfinished(session, branch)
            if run.config.get(FOLDER) not in (None, core.home.uid)
        }
    if not others:
        return frozenset()
    first, live = _seen_at(core, others), set[str]()
    _logger.info("looks for %.0f s whether another node trains branch %s", _OBSERVED_S, branch)
    deadline = time.monotonic() + _OBSERVED_S
    while live != others.keys() and time.monotonic() < deadline:
        checkpoint()
        time.sleep(_LOOK_S)
        now = _seen_at(core, others)
        live |= {uid for uid in others if now.get(uid) != first.get(uid)}
    dead = [run for uid, run in others.items() if uid not in live]
    if dead:
        with core.database.write(durable=True) as session:
            moved = runs.recover(session, dead, volatile=VOLATILE)
        for each in moved:
            _logger.warning(
                "branch %s goes back to state %s: its newest states were only in the memory of a"
                " node that is gone",
                each.branch,
                each.new,
            )
    return frozenset(live)


def _seen_at(core: Core, folders: Iterable[str]) -> dict[str, int]:
    with core.database.read() as session:
        return attachments.seen_at(session, folders)
