"""The further tiers of a repository: which it has, whether they can be used, copies on demand, and
what failed uploads left there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastates.errors import DatastatesError, InvalidInput, NotFound, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.query.names import replicas_of
from datastates.lineage.query.retained import outstanding
from datastates.lineage.write import attachments
from datastates.lineage.write.clones import repository_uid
from datastates.storage.remote import ObjectTier
from datastates.storage.tier import Tier
from datastates.storage.tiers import Tiers, check_further
from datastates.system.interrupts import checkpoint

if TYPE_CHECKING:
    from .core import Core

_logger = logging.getLogger(__name__)

_CHECK_S = 10.0
"""A tier that does not respond for so long is checked again before the first copy, in seconds."""

_LOOK_S = 0.05


def stored_tiers(database: Database) -> list[Tier]:
    """The tiers at the URLs with which the repository was opened before. A tier that cannot be used
    here is left out, with a line in the log."""
    found = list[Tier]()
    with database.read() as session:
        urls = attachments.urls(session)
    for url in urls:
        try:
            found += check_further([url])
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
        repository, known = repository_uid(session), set(attachments.urls(session))
    for tier in tiers.further:
        try:
            _check_in_time(tier, repository)
        except DatastatesError as exc:
            if raises and not isinstance(exc, Unavailable):
                raise
            _logger.warning("%s; copies to it are tried again", exc)
            continue
        url = getattr(tier, "url", "")
        if url and url not in known:
            with database.write() as session:
                attachments.note(session, tier.node, path=url, host=url.partition("?")[0])


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
