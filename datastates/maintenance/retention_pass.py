"""Applies a retention policy to a folder of packs, in batches, each of which may be the last.

    survey      read from the lineage and the manifests what the folder holds, and which state
                depends on which
    decide      ``policy.retention``, a pure function
    withdraw    one short transaction a batch: the lineage records that the bytes are gone
    remove      delete the files, in one pass under the folder's lock

A crash between the last two leaves files that no state needs. They were noted in ``.prune`` before,
a file that the pruning process locks. One process at a time prunes a folder. The next process
finishes the work of a dead one.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from datastates.engine.runner import Runner
from datastates.errors import Conflict, InvalidInput, NotFound, Unavailable
from datastates.lineage.database import Database
from datastates.lineage.lookup import id_of, ids_of, states
from datastates.lineage.query import retained, revision
from datastates.lineage.query.names import get, holder, refs
from datastates.lineage.states import RefKind, Status
from datastates.lineage.views.branch_rows import metrics_of
from datastates.lineage.views.text import Direction, named_direction, plural
from datastates.lineage.write import replicas
from datastates.lineage.write.refs import delete_ref
from datastates.lineage.write.replicas import take_turns, withdraw, withdraw_all
from datastates.policy.retention import (
    EACH,
    Best,
    Decision,
    Fact,
    Ledger,
    Policies,
    Retention,
    decide,
    retention_of,
)
from datastates.storage.durable_files import next_step
from datastates.storage.local import LocalTier
from datastates.storage.tiers import CAPTURED, DURABLE, VOLATILE
from datastates.system.files import FileLock, hold
from datastates.system.interrupts import undisturbed
from datastates.system.logs import event

from .core import Core
from .lease import FOLDER, TIERS, PackFolder, check_idle

_logger = logging.getLogger(__name__)

KEY = "datastates.retention"
"""The key under which the record of a training keeps the policy that it asked for, for its
branch."""

_LOCK = ".prune"
_BATCH = 128
_BUDGET_BYTES = 20 << 30
_BUDGET_STATES = 8
_PATIENCE_S = 60.0
_ASK_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class PruneContext:
    """The parts of an open repository for pruning: its lineage, its folder of packs, and the engine
    of this process, if there is one. ``is_full``: the disk is full, so that states may go before
    they are copied to a further tier."""

    database: Database
    durable: LocalTier
    home: PackFolder
    holder: str
    runner: Runner | None
    is_full: bool = False

    @classmethod
    def of(cls, core: Core) -> Self:
        """The context of a repository as it is now."""
        return cls(
            core.database,
            core.tiers.durable,
            core.home,
            holder(core.node, core.run_uid),
            core.running,
        )


@dataclass(frozen=True, slots=True)
class Dropped:
    """A state that lost its bytes, or would: how many bytes were its own, and the reason in
    words."""

    uid: str
    branch: str
    step: int
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of pruning, or with ``is_dry_run`` its plan. Bytes are the sizes of the files in
    the folder of packs that states need.

    ``kept`` has the number of states that stay, by reason. Dropped states stay in the lineage with
    their metrics, as ``evicted``.
    """

    policy: str
    dropped: tuple[Dropped, ...]
    kept: dict[str, int]
    bytes_before: int
    bytes_after: int
    is_dry_run: bool = False

    @property
    def bytes_freed(self) -> int:
        """The bytes that are free now, or would be."""
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        would = "would drop" if self.is_dry_run else "dropped"
        return (
            f"{would} {plural(len(self.dropped), 'state')} and {self.bytes_freed} bytes, kept"
            f" {sum(self.kept.values())} ({self.policy})"
        )


@dataclass(frozen=True, slots=True)
class Survey:
    """What a folder holds: facts, the row id of each by uid, and the bytes of all files that
    they need."""

    facts: tuple[Fact, ...]
    ids: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """The bytes of all files that the states need."""
        return Ledger(self.facts).bytes


def no_progress(done: int, total: int) -> None:
    """Report no progress."""


def prune(
    core: Core,
    policy: Retention | None = None,
    *,
    dry_run: bool = False,
    tell: Callable[[int, int], None] = no_progress,
) -> Pruned:
    """Drop the states of all branches that a policy does not keep; see ``Repository.prune``."""
    core.check_open()
    core.settle()
    context = PruneContext.of(core)

    def policies(told: Mapping[str, Retention]) -> Policies:
        if policy is None:
            return Policies(retention_of(core.config.retention), told)
        bests = {
            branch: policy.bounded(None).keeping_best(*each.bests)
            for branch, each in told.items()
            if each.bests
        }
        return Policies(policy, bests)

    if dry_run:
        return _planned(*_decided(context, policies, tell))
    with _turn(core) as held:
        return carry_out(context, held, *_decided(context, policies, tell), tell=tell)


def drop_ref(core: Core, name: str, *, dry_run: bool = False) -> Pruned:
    """Delete a branch or a tag, and drop the bytes of the states that only it leads to; see
    ``Repository.delete_ref``.

    The name is deleted first. After a crash, no name leads to the states that still have their
    bytes, and ``prune`` may drop them.
    """
    core.check_open()
    core.settle()
    context, policies = PruneContext.of(core), Policies(Retention.all())
    with nullcontext() if dry_run else _turn(core) as held:
        with core.database.read() if dry_run else core.writing() as session:
            get(session, name)  # raises if there is none
            check_idle(session, name, core.home)
            own = retained.only_of(session, name)
            found = survey(context, policies, own=own)
            if not dry_run:
                delete_ref(session, name, reason="delete with its bytes")
        decisions = [
            (
                Decision(fact, fact.held is not None, fact.held or f"only {name} leads to it")
                if found.ids[fact.uid] in own
                else Decision(fact, True, "another name or nothing leads to it")
            )
            for fact in found.facts
        ]
        done = (
            _planned(found, policies, decisions)
            if held is None
            else carry_out(context, held, found, policies, decisions)
        )
    return replace(done, policy=f"delete {name}")


@contextmanager
def _turn(core: Core) -> Iterator[FileLock]:
    """Prune alone.

    :raises Unavailable: another process is still pruning, or the folder is read-only.
    """
    core.home.check_writable()
    with prune_lock(core.home.path, _PATIENCE_S) as held:
        if held is None:
            raise Unavailable(
                f"another process has been pruning {core.home.path} for {_PATIENCE_S:.0f} s: wait"
                " for it, and try again"
            )
        yield held


def _decided(
    context: PruneContext,
    policies: Callable[[Mapping[str, Retention]], Policies],
    tell: Callable[[int, int], None],
) -> tuple[Survey, Policies, list[Decision]]:
    chosen = policies(recorded_policies(context))
    found = survey(context, chosen, tell=tell)
    largest = max((sum(size for _, size in fact.files) for fact in found.facts), default=0)
    chosen = with_budget(chosen, budget(half_of_room(context.home.path, found.bytes), largest))
    return found, chosen, decide(found.facts, chosen, time.time())


# --- looking --------------------------------------------------------------------------------------


def recorded_policies(context: PruneContext) -> dict[str, Retention]:
    """The policies of the newest training of each branch, by branch."""
    found: dict[str, Retention] = {}
    with context.database.read() as session:
        told = retained.newest_settings(session, KEY)
    for branch, text in told.items():
        try:
            found[branch] = Retention.parse(text)
        except InvalidInput as exc:  # of a later version: everything is kept
            _logger.warning(
                "the retention of branch %s is not known to this version: %s", branch, exc
            )
            found[branch] = Retention.all()
    return found


def survey(
    context: PruneContext,
    policies: Policies,
    *,
    own: Collection[int] = (),
    tell: Callable[[int, int], None] = no_progress,
) -> Survey:
    """What the folder holds, with the facts for which the policies ask. No name counts on the
    states ``own``, by row id.

    It is read in many short transactions, so ``withdraw_all`` looks again at what is to go.
    ``tell`` is called with the number of states that were read, and how many the folder has.
    """
    node, tier = context.home.uid or "", context.durable.name
    keys = {
        rule.key
        for policy in (policies.default, *policies.own.values())
        for rule in policy.rules
        if isinstance(rule, Best)
    }
    if EACH in keys:
        with context.database.read() as session:
            keys |= {key for key in metrics_of(session) if named_direction(key) is not None}
    files, found = context.durable.files(), list[retained.DurableState]()
    for page in retained.durable(context.database, tier=tier, node=node, keys=keys):
        found += page
        tell(len(found), max(len(found), len(files)))
    held = retained.needed_states(context.database, {each.id for each in found})
    with context.database.read() as session:
        segments = retained.segments_of(session)
        elsewhere = retained.held_by_others(
            session, [each.id for each in found], volatile=VOLATILE, holder=context.holder
        )
        ids = [each.id for each in found]
        awaiting = retained.awaiting_copy(session, ids, tier=tier, node=node, keys=(FOLDER, TIERS))
    if context.is_full:  # the oldest half may go, each with a line in the log
        awaiting = dict(sorted(awaiting.items())[(len(awaiting) + 1) // 2 :])
    best = _best_before_forks(context.database, segments, policies) if keys else {}
    asked = context.runner.asked() if context.runner is not None else frozenset()
    facts = []
    for each in found:
        why = (
            (None if each.id in own else held.get(each.id))
            or best.get(each.id)
            or (
                "this process waited for it to become durable, and has its handle"
                if each.uid in asked
                else None
            )
            or ("another process has it in memory" if each.id in elsewhere else None)
            or (
                f"it waits for its copy to the {awaiting[each.id]} tier"
                if each.id in awaiting
                else None
            )
            or (f"{each.world_size} ranks hold it together" if each.world_size > 1 else None)
        )
        branch = segments[each.segment][0] if each.segment in segments else ""
        created, where = each.created_us / 1e6, files.get(each.uid, ())
        facts.append(
            Fact(
                each.uid,
                each.segment,
                branch,
                each.generation,
                each.step,
                created,
                where,
                each.metrics,
                why,
            )
        )
    return Survey(tuple(facts), {each.uid: each.id for each in found})


def _best_before_forks(
    database: Database, segments: Mapping[int, tuple[str, int | None]], policies: Policies
) -> dict[int, str]:
    """The states that ``@best`` names on forked branches. They may be on the branch from which
    these forked."""
    forked = {branch for branch, fork in segments.values() if fork is not None}
    heads: defaultdict[Best, dict[int, str]] = defaultdict(dict)
    with database.read() as session:
        branches = [ref for ref in refs(session, RefKind.BRANCH) if ref.name in forked]
        for ref, head in zip(
            branches, ids_of(session, [ref.state for ref in branches]), strict=True
        ):
            for rule in policies.of(ref.name).bests:
                heads[rule][head] = ref.name
    found: dict[int, str] = {}
    for rule, names in heads.items():
        best = retained.best_on_the_way(database, names, rule.key, is_max=rule.is_max)
        found |= {
            best[head]: f"the best {rule.key} on the way to branch {name}"
            for head, name in names.items()
            if head in best
        }
    return found


def bests_at(
    core: Core, uid: str | None, rules: Iterable[Best]
) -> dict[Best, tuple[float, str] | None]:
    """The state that ``@best`` names from the state ``uid``, as value and uid, for each rule. None
    if no ancestor has the rule's metric."""
    found: dict[Best, tuple[float, str] | None] = dict.fromkeys(rules)
    if uid is not None:
        with core.reading() as session:
            for rule in found:
                best = revision.best_id(session, id_of(session, uid), rule.key, is_max=rule.is_max)
                if best is not None:
                    (state,) = states(session, [best])
                    found[rule] = state.metrics[rule.key], state.uid
    return found


def bests_of(core: Core, branch: str) -> dict[Best, tuple[float, str] | None]:
    """The best states of a branch, counted from its fork, by each metric whose name has a
    direction: value and uid."""
    found: dict[Best, tuple[float, str] | None] = {}
    with core.reading() as session:
        for key, least, most in retained.extremes(session, branch):
            direction = named_direction(key)
            best = most if direction is Direction.MAX else least
            if direction is not None and best is not None:
                found[Best(key)] = best
    return found


def half_of_room(folder: Path, taken: int) -> int:
    """Half of the space for states here: the free space and the space that they take already."""
    with suppress(OSError):
        return (shutil.disk_usage(folder).free + taken) // 2
    return taken


def budget(half: int, state_bytes: int) -> int:
    """The bytes that ``at-most:auto`` means, from half of the space and the size of the largest
    state."""
    return max(1, min(half, max(_BUDGET_BYTES, _BUDGET_STATES * state_bytes)))


def with_budget(policies: Policies, size: int) -> Policies:
    """The same policies with numbers for bounds."""

    def exact(policy: Retention) -> Retention:
        return policy.bounded(size) if policy.bound == "auto" else policy

    return replace(
        policies,
        default=exact(policies.default),
        own={branch: exact(each) for branch, each in policies.own.items()},
    )


# --- doing ----------------------------------------------------------------------------------------


def carry_out(
    context: PruneContext,
    held: FileLock,
    found: Survey,
    policies: Policies,
    decisions: Sequence[Decision],
    *,
    is_over: Callable[[], bool] = bool,
    tell: Callable[[int, int], None] = no_progress,
) -> Pruned:
    """Drop the states that the decisions name, batch by batch, until ``is_over``; returns which
    were dropped. An interrupt is raised between two batches.

    ``held`` is the turn, from ``prune_lock``. The oldest states go first: then no batch walks
    through the states of an earlier one.
    """
    _finish(context, held)
    going = sorted(
        (each for each in decisions if not each.is_kept), key=lambda each: found.ids[each.fact.uid]
    )
    gone: set[str] = set()
    for start in range(0, len(going), _BATCH):
        if is_over():
            break
        batch = going[start : start + _BATCH]
        with undisturbed():
            gone.update(_drop(context, held, [found.ids[each.fact.uid] for each in batch], batch))
        tell(start + len(batch), len(going))
    if any("@" in name for each in going if each.fact.uid in gone for name, _ in each.fact.files):
        with suppress(Conflict):  # another process collects
            context.durable.collect()
    done = [
        (
            each
            if each.is_kept or each.fact.uid in gone
            else replace(each, is_kept=True, reason=_STAYED)
        )
        for each in decisions
    ]
    return replace(_planned(found, policies, done), is_dry_run=False)


_STAYED = "somebody counts on it since"


def _drop(
    context: PruneContext, held: FileLock, ids: Sequence[int], batch: Sequence[Decision]
) -> list[str]:
    free = []
    for id_, each in zip(ids, batch, strict=True):
        with suppress(Conflict):  # a training is at the state, or the state is being written
            if context.runner is not None:
                context.runner.check_withdrawal(each.fact.uid, is_forced=context.is_full)
            free.append(id_)
    with suppress(OSError):
        # a full disk is the very reason for this; without the note, gc finds what a kill leaves
        held.write("\n".join(each.fact.uid for each in batch))
    with context.database.write(durable=True) as session:
        tier, node = context.durable.name, context.home.check_writable()
        awaiting = retained.awaiting_copy(session, free, tier=tier, node=node, keys=(FOLDER, TIERS))
        uids = withdraw_all(
            session, free, tier=tier, node=node, volatile=VOLATILE, holder=context.holder
        )
    for id_, each in zip(ids, batch, strict=True):
        uid = each.fact.uid
        # what waits in this process is named where it waits
        if id_ in awaiting and uid in uids and not _is_waiting(context.runner, uid):
            said = f"state {uid} left the disk before it was copied to the {awaiting[id_]} tier"
            _logger.warning("%s", said, extra=event("copy.dropped", tier=awaiting[id_], state=uid))
    if context.runner is not None:
        # before the files go: the lineage has decided, whatever the disk does
        context.runner.withdrawn(uids)
    _remove(context, uids, _packs_of(name for each in batch for name, _ in each.fact.files))
    held.write("")
    return uids


def _is_waiting(runner: Runner | None, uid: str) -> bool:
    return runner is not None and runner.copies.awaited_by(uid) is not None


def _finish(context: PruneContext, held: FileLock) -> None:
    """Remove what a process that died in the middle had withdrawn and not removed yet."""
    begun = held.path.read_text().split()
    if not begun:
        return
    tier, node = context.durable.name, context.home.check_writable()
    files, gone = context.durable.files(), list[str]()
    with suppress(NotFound), context.database.read() as session:
        here = replicas.held(session, begun, tier=tier, node=node)
        gone += [
            state.uid
            for state in states(session, begun)
            if state.uid not in here and state.status is not Status.CAPTURED
        ]
    _remove(context, gone, _packs_of(name for uid in gone for name, _ in files.get(uid, ())))
    held.write("")


def _packs_of(files: Iterable[str]) -> set[str]:
    """The packs among the files of states, which are named with an offset where several states
    need them."""
    return {
        name for name in (each.partition("@")[0] for each in files) if name.endswith(".safetensors")
    }


def _remove(context: PruneContext, uids: Sequence[str], packs: Iterable[str]) -> None:
    """Delete the files of states that were withdrawn. States that were added again stay.

    Manifests are deleted inside a transaction that writes, so that no process adds one between the
    check and its deletion.
    """
    with context.database.write() as session:
        take_turns(session)
        here = replicas.held(
            session, uids, tier=context.durable.name, node=context.home.check_writable()
        )
        context.durable.forget(uid for uid in uids if uid not in here)
    context.durable.discard(packs)


@contextmanager
def prune_lock(folder: Path, patience_s: float) -> Iterator[FileLock | None]:
    """Prune alone; yields None if another process prunes for ``patience_s``."""
    since = time.monotonic()
    try:
        while (held := hold(folder / _LOCK)) is None and time.monotonic() - since < patience_s:
            time.sleep(_ASK_AGAIN_S)
    except OSError as exc:
        raise Unavailable(
            f"{folder / _LOCK} cannot be locked ({exc.strerror}), and nothing is pruned without:"
            f" {next_step(exc)}"
        ) from exc
    try:
        yield held
    finally:
        if held is not None:
            held.close()


def _planned(found: Survey, policies: Policies, decisions: Iterable[Decision]) -> Pruned:
    ledger, kept, dropped = Ledger(found.facts), Counter[str](), list[Dropped]()
    before = ledger.bytes
    for each in decisions:
        if each.is_kept:
            kept[each.reason] += 1
        else:
            fact = each.fact
            dropped.append(
                Dropped(fact.uid, fact.branch, fact.step, ledger.drop(fact), each.reason)
            )
    return Pruned(
        policies.default.text, tuple(dropped), dict(kept), before, ledger.bytes, is_dry_run=True
    )


# How much each branch and each state takes on disk: the bytes that dropping it would free, and the
# bytes that it shares.


@dataclass(frozen=True, slots=True)
class StateUse:
    """A state on disk. Dropping it alone would free ``own_bytes``; it needs ``shared_bytes``, and
    others do too. ``stays`` is the reason why ``prune`` would keep it under every policy; None if
    the policy decides.
    """

    uid: str
    branch: str
    step: int
    own_bytes: int
    shared_bytes: int
    stays: str | None


@dataclass(frozen=True, slots=True)
class BranchUse:
    """The states on disk that only this branch has. Dropping all of them would free ``own_bytes``;
    they need ``shared_bytes``, and states of other branches do too. ``branch`` is empty for states
    that no branch has.
    """

    branch: str
    states: int
    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The content of the folder of packs: all ``bytes`` that states need, the branches that take
    most first, and the states.
    """

    bytes: int
    branches: tuple[BranchUse, ...]
    states: tuple[StateUse, ...]


def usage(core: Core, *, on_progress: Callable[[int, int], None] = no_progress) -> Usage:
    """How much each branch takes of the folder of packs, by the lineage and the manifests.

    ``on_progress`` is called with the number of states that were read, and about how many there
    are.
    """
    core.check_open()
    core.settle()
    facts = survey(PruneContext.of(core), Policies(Retention.all()), tell=on_progress).facts
    everything = Ledger(facts)
    by_branch: defaultdict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        by_branch[fact.branch].append(fact)
    branches, uses = [], []
    for name, theirs in by_branch.items():
        own = sum(everything.drop(fact) for fact in theirs)
        for fact in theirs:
            everything.add(fact)
        branches.append(BranchUse(name, len(theirs), own, Ledger(theirs).bytes - own))
    for fact in facts:
        own, size = everything.own_bytes(fact), sum(size for _, size in fact.files)
        uses.append(StateUse(fact.uid, fact.branch, fact.step, own, size - own, fact.held))
    branches.sort(key=lambda use: -use.own_bytes)
    return Usage(everything.bytes, tuple(branches), tuple(uses))


# Dropping a state's bytes by hand. Its records stay, and also every byte that another state needs.


def evict(core: Core, uid: str, *, is_forced: bool = False) -> int:
    """Drop a state from this folder of packs and from this process's memory; returns the bytes set
    free there, which no other state needed.

    The lineage is updated first. A crash in between leaves files that no state needs, never a state
    without its bytes. A commit that fails drops nothing. Other processes and folders keep their
    bytes. ``is_forced`` also drops a state that a ref names, or the newest durable one behind a
    head that is in memory. It never drops the last state of a branch that can be restored, or could
    be when processes have ended.

    :raises Conflict: a ref or a training of this process depends on it.
    :raises NotFound: there is no such state.
    """
    core.check_open()
    core.settle()
    running = core.running
    with core.database.write(durable=True) as session:
        places = [
            (CAPTURED, holder(core.node, core.run_uid)),
            (DURABLE, core.home.check_writable()),
        ]
        withdraw(session, uid, places, volatile=VOLATILE, is_forced=is_forced)
        if running is not None:
            running.check_withdrawal(uid, is_forced=is_forced)  # the last step that may refuse
    if running is not None:
        running.copies.drop(uid)
    freed = 0 if running is None else running.withdraw(uid)
    return freed + core.tiers.durable.remove(uid)
