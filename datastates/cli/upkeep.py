"""The commands ``verify``, ``repair``, ``gc``, ``copy``, ``du`` and ``prune``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from datastates import values
from datastates.errors import InvalidInput, NotFound
from datastates.lineage.views.text import plural, short, size_text

from .app import EXIT_CODES, AsJson, Limit, Repo, Shell, branch_names, ref_names
from .interrupt import orderly
from .move import TlsCa, TokenFile, progress, trusting
from .tables import Column, TextTable

if TYPE_CHECKING:
    from datastates.maintenance.retention_pass import Pruned, StateUse, Usage
    from datastates.maintenance.verify import VerifyReport


_LISTED = 20


def gc(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Print what would be done, and do nothing.")
    ] = False,
    unknown: Annotated[
        bool,
        typer.Option(
            "--unknown",
            help="Also delete states that the lineage and its backup do not know;"
            " `repair --lineage` takes them in instead.",
        ),
    ] = False,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            metavar="NAME",
            help="Instead, delete what failed uploads left in this tier more than a day ago.",
            show_default=False,
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Free disk space: delete what crashes and evictions left, and rewrite sparse packs.

    A pack is sparse if no state needs most of its bytes. Trainings may continue."""
    shell = Shell(context, repo, as_json)
    if tier is not None:
        from datastates.maintenance.further import orphans

        with shell.repository() as repository:
            found = orphans(repository.core, tier, is_dry_run=dry_run)
        if shell.as_json:
            return shell.write_json({"tier": tier, "is_dry_run": dry_run, "packs": found})
        return shell.write(
            f"{size_text(sum(found.values()))} {'can be freed' if dry_run else 'freed'} on the"
            f" {tier} tier: {plural(len(found), 'pack')} that no state needs"
        )
    with shell.repository() as repository, progress(shell, "making room") as show:
        done = repository.gc(dry_run=dry_run, unknown=unknown, on_progress=show)
    if shell.as_json:
        return shell.write_json(done, bytes_freed=done.bytes_freed)
    shell.write(f"{size_text(done.bytes_freed)} {'can be freed' if done.is_dry_run else 'freed'}")
    unknown_states = "evicted, lost or unknown states whose manifests were still there"
    rewritten = "packs most of whose bytes no state needs, rewritten"
    for count, what, size in (
        (len(done.states), unknown_states, None),
        (done.packs, "packs that no state needs", done.bytes_packs),
        (done.rewritten, rewritten, done.bytes_rewritten),
        (done.temporaries, "files that a dead process left half written", done.bytes_temporaries),
    ):
        if count:
            shell.write(f"  {count}: {what}" + ("" if size is None else f", {size_text(size)}"))
    for text in done.left:
        shell.write(f"left: {text}")
    return None


def verify(
    context: typer.Context,
    rev: Annotated[
        str | None,
        typer.Argument(
            metavar="REV",
            help="A state; without one, all packs, in the folder and in a bucket.",
            autocompletion=ref_names,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="UID",
            help="Continue where an earlier check of everything ended.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--for",
            metavar="SECONDS",
            help="Stop after this time, and print how to continue.",
            show_default=False,
        ),
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            metavar="NAME",
            help="Instead of the packs, read what this tier has.",
            show_default=False,
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a state, or of all states, and check it against its digests."""
    shell = Shell(context, repo, as_json)
    if rev is None:
        return _verify_all(shell, since, limit, tier)
    if since is not None or limit is not None or tier is not None:
        raise InvalidInput(
            "--since, --for and --tier belong to a check of everything: leave out the state, or"
            " leave out these options"
        )
    with shell.repository() as repository:
        state = repository.verify(rev)
    shell.report(
        {"state": state.uid, "digest": state.digest, "bytes": state.bytes_total, "ok": True},
        f"state {state.uid} (step {state.step}): {size_text(state.bytes_total)}, every byte as it"
        " was captured",
    )
    return None


def _verify_all(shell: Shell, since: str | None, limit: float | None, tier: str | None) -> None:
    """Read everything, and end with the exit code of damage if there is any.

    If Ctrl-C ends it, the output explains how to continue.
    """
    from datastates.maintenance.verify import Limits, check_all

    marks: list[str] = []
    limit = None if limit is None else values.seconds(limit, "--for")
    limits = Limits(since, limit, tier=tier)
    with shell.repository() as repository, progress(shell, "verifying") as show:
        try:
            found = check_all(
                repository.core,
                limits,
                on_progress=show,
                on_mark=lambda uid: marks.__setitem__(slice(None), [uid]),
            )
        except KeyboardInterrupt:
            if marks:
                shell.hint(f"`datastates verify --since {marks[0]}` continues")
            raise
    if shell.as_json:
        shell.write_json(found, ok=not found.damage and not found.unread)
    else:
        _say_checked(shell, found)
    if found.damage or found.unread:
        raise typer.Exit(EXIT_CODES["corrupt" if found.damage else "unavailable"])


def _say_checked(shell: Shell, found: VerifyReport) -> None:
    for each in found.damage:
        what = (
            "manifest"
            if each.chunk is None
            else f"chunk {each.chunk} ({', '.join(each.tensors[:5]) or 'no tensor'})"
        )
        whose = f", rank {each.rank}" if each.rank else ""
        shell.write(f"state {each.state}{whose}: {what}: {each.problem}")
    for text in found.unread:
        shell.write(f"not read: {text}")
    for text in found.partial:
        shell.write(text)
    said = f"{len(found.hurt)} damaged" if found.damage else "every byte as it was written"
    shell.write(f"{plural(found.states, 'state')}, {size_text(found.bytes)} read: {said}")
    for tier, count in found.elsewhere.items():
        only = f"{plural(count, 'state')} only on the {tier} tier"
        shell.hint(
            f"{only}: `datastates verify --tier {tier}` reads {'it' if count == 1 else 'them'}"
        )
    if found.mark is not None:
        shell.hint(f"`datastates verify --since {found.mark}` continues")


def repair(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FOLDER|URL",
            help="Another repository, folder of packs, or tier (s3://…) that may have the same"
            " states.",
            show_default=False,
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="URL",
            help="A process that serves them (tcp://HOST:PORT). May be repeated.",
            show_default=False,
        ),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    lineage: Annotated[
        bool,
        typer.Option(
            "--lineage",
            help="Instead, rebuild a lost or damaged database from its backup and the packs.",
        ),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help=(
                "With --lineage: rebuild a database that is there, and keep its file next to the"
                " new one. On a server, add to it."
            ),
        ),
    ] = False,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="URL",
            help="With --lineage: a bucket that holds states (s3://…). May be repeated.",
            show_default=False,
        ),
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Check everything, and restore damaged files from other places, or rebuild the database.

    For damage that stays, it names states that can be restored instead."""
    from datastates.transport.peer import connect

    shell = Shell(context, repo, as_json)
    if lineage:
        return _rebuild(shell, replace=replace, tiers=tier or ())
    with ExitStack() as stack:
        repository = stack.enter_context(shell.repository())
        # each separately: the next peer may have what one of them does not have
        peers = [
            stack.enter_context(connect(url, token_file=token_file, tls=trusting(tls_ca)))
            for url in peer or ()
        ]
        show = stack.enter_context(progress(shell, "verifying"))
        done = repository.repair(source=source, peers=peers, on_progress=show)
    if shell.as_json:
        shell.write_json(done)
    else:
        shell.write(
            f"{plural(len(done.repaired), 'state')} repaired, {len(done.hurt)} still damaged"
        )
        for uid in done.repaired:
            shell.write(f"state {uid}: every byte as it was")
        for each in done.hurt:
            nearest = (
                "no ancestor of it can be restored"
                if each.nearest is None
                else f"the nearest ancestor that can be restored is {each.nearest[:10]}"
            )
            shell.write(f"state {each.state}: {each.problem}; {nearest}")
        for text in done.unread:
            shell.write(f"not read: {text}")
    if done.hurt or done.unread:
        raise typer.Exit(EXIT_CODES["corrupt" if done.hurt else "unavailable"])
    return None


def _rebuild(shell: Shell, *, replace: bool, tiers: Sequence[str]) -> None:
    """Rebuild the lineage from its backup in the folder of packs, and from the packs' manifests."""
    from datastates.maintenance.reindex import reindex

    orderly()
    location = shell.location(must_exist=False)
    url = location.database_url if location.root is None else location.root
    done = reindex(url, packs=location.packs, replace=replace, tiers=tiers)
    replaced = [] if done.replaced is None else [f"the database that was there is {done.replaced}"]
    shell.report(
        done,
        f"lineage {done.lineage}: {plural(done.states, 'state')}, {done.restorable} restorable"
        " here",
        f"{plural(done.branches, 'branch')}, {plural(done.tags, 'tag')},"
        f" {plural(done.notes, 'note')}, {plural(done.events, 'ref event')}",
        f"{plural(done.clones, 'clone')}, {plural(done.seals, 'seal')},"
        f" {plural(done.variants, 'variant')}",
        *(f"lacking: {text}" for text in done.lacking),
        *replaced,
    )


def copy(
    context: typer.Context,
    revs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REV",
            help="States; without one, all in the folder of packs that the tier lacks.",
            autocompletion=ref_names,
        ),
    ] = None,
    to: Annotated[
        str, typer.Option("--to", metavar="TIER", help="The name of a further tier, such as s3.")
    ] = ...,  # type: ignore[assignment] # required
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Copy durable states to a further tier, and wait until it has them."""
    shell = Shell(context, repo, as_json)
    with (
        shell.repository() as repository,
        progress(shell, "copying", is_of_bytes=False) as show,
    ):
        done = repository.copy(*(revs or ()), to=to, on_progress=show)
    if shell.as_json:
        shell.write_json(done)
    else:
        shell.write(f"{plural(len(done.copied), 'state')} copied to the {to} tier")
        for uid, why in done.left.items():
            shell.write(f"not copied: state {uid}: {why}")
    if done.left:
        raise typer.Exit(EXIT_CODES["unavailable"])


# --- ``du`` and ``prune``: disk use of each branch, and dropping bytes ---


def du(
    context: typer.Context,
    branch: Annotated[
        str | None,
        typer.Argument(
            metavar="BRANCH",
            help="Its states, one by one; without it, all branches.",
            autocompletion=branch_names,
        ),
    ] = None,
    limit: Limit = _LISTED,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Show what each branch takes on disk, or each state of one branch.

    It is the bytes that dropping it would free, and those that others need as well."""
    from datastates.maintenance.retention_pass import usage

    shell = Shell(context, repo, as_json)
    with (
        shell.repository() as repository,
        progress(shell, "reading states", is_of_bytes=False) as show,
    ):
        found = usage(repository.core, on_progress=show)
    states = sorted(
        (use for use in found.states if use.branch == branch), key=lambda use: -use.step
    )
    if branch is not None and not states:
        raise NotFound(
            f"branch {branch!r} has no state of its own on disk: `datastates du` lists the branches"
            " that have some"
        )
    if shell.as_json:
        shell.write_lines(found.branches if branch is None else states)
    elif branch is None:
        _show_branches(shell, found, limit)
    else:
        _show_states(shell, states, limit)


def prune(
    context: typer.Context,
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            "-k",
            metavar="POLICY",
            help=(
                "What stays of each branch, such as 'latest:5 best:3:val_loss every:1000"
                " at-most:50G' (default: as its training asked)."
            ),
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Print what would be dropped, and drop nothing.")
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Drop the bytes of states that a policy does not keep. The states stay in the lineage.

    Trainings may continue. Every policy keeps these: states that names lead to, the newest durable
    state of each branch, and where branches forked.
    """
    shell = Shell(context, repo, as_json)
    with (
        shell.repository() as repository,
        progress(shell, "pruning", is_of_bytes=False) as show,
    ):
        report = repository.prune(keep, dry_run=dry_run, on_progress=show)
    show_pruned(shell, report)


def _show_branches(shell: Shell, found: Usage, limit: int) -> None:
    made = _table("branch", "states")
    for use in found.branches[: limit or None]:
        made.add(
            use.branch or "(no branch)",
            f"{use.states:,}",
            size_text(use.own_bytes),
            size_text(use.shared_bytes),
        )
    shell.write(made)
    if len(found.branches) > limit > 0:
        shell.hint(f"these are {limit} of {len(found.branches)}: -n 0 shows all")
    shell.write(f"{plural(len(found.states), 'state')}, {size_text(found.bytes)} on disk")


def _show_states(shell: Shell, states: list[StateUse], limit: int) -> None:
    made = _table("state", "step")
    made.columns.append(Column("stays because of", is_flexible=True, rank=1))
    for use in states[: limit or None]:
        made.add(
            short(use.uid),
            f"{use.step}",
            size_text(use.own_bytes),
            size_text(use.shared_bytes),
            use.stays or "",
        )
    shell.write(made)
    if len(states) > limit > 0:
        shell.hint(f"these are the newest {limit} of {len(states)}: -n 0 shows all")


def _table(name: str, number: str) -> TextTable:
    numbers = (
        Column(each, is_number=True) for each in (number, "dropping it frees", "shared with others")
    )
    return TextTable([Column(name, is_flexible=True), *numbers])


def show_pruned(shell: Shell, report: Pruned) -> None:
    """Write what was dropped, or would be."""
    if shell.as_json:
        return shell.write_json(report, bytes_freed=report.bytes_freed)
    would = "would be dropped" if report.is_dry_run else "dropped"
    for each in report.dropped[:_LISTED] if report.is_dry_run else ():
        shell.write(
            f"{short(each.uid)}  {each.branch or '(no branch)'}  step {each.step} "
            f" {size_text(each.bytes)}  {each.reason}"
        )
    if report.is_dry_run and len(report.dropped) > _LISTED:
        shell.write(f"and {len(report.dropped) - _LISTED} more")
    for reason, count in Counter(report.kept).most_common(_LISTED):
        shell.write(f"{count:>8,} stay: {reason}")
    freed = f"{size_text(report.bytes_freed)} of {size_text(report.bytes_before)} freed"
    shell.write(f"{plural(len(report.dropped), 'state')} {would}, {freed}; kept: {report.policy}")
    return None
