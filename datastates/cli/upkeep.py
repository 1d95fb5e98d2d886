"""``verify``, ``repair``, ``gc`` and ``reindex``: the commands that keep a repository sound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import InvalidInput
from datastates.lineage.show.texts import plural

from .complete import ref_names
from .exits import EXIT_CODES
from .interrupt import orderly
from .peers import TlsCa, TokenFile, trusting
from .shell import AsJson, Repo, Shell

if TYPE_CHECKING:
    from datastates.clone.peer import Peer
    from datastates.upkeep.checking import VerifyReport
    from datastates.upkeep.gc import GcReport

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(verify)
    app.command()(gc)
    app.command()(reindex)
    app.command()(repair)


def gc(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be done.")] = False,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also delete states that no lineage knows; `reindex` takes them in instead.")
    ] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Make room: delete what crashes and evictions left, rewrite packs most of whose bytes no state needs. Trainings may go on."""
    from .payload import progress_of

    shell = Shell(context, repo, as_json)
    with shell.repository() as repository, progress_of(shell) as progress:
        bar = progress.add_task("making room", total=None)
        done = repository.gc(
            dry_run=dry_run, unknown=unknown, on_progress=lambda freed, total: progress.update(bar, completed=freed, total=total)
        )
    if shell.as_json:
        import msgspec

        shell.write_json({**msgspec.to_builtins(done), "bytes_freed": done.bytes_freed})
        return
    _say(shell, done)


def verify(
    context: typer.Context,
    rev: Annotated[
        str | None,
        typer.Argument(metavar="REV", help="A state; without one, everything in the folder of packs.", autocompletion=ref_names),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="UID", help="Go on where an earlier check of everything ended.", show_default=False)
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", help="Stop after this time, and say how to go on.", show_default=False)
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a state, or of all states in the folder of packs, and check it against its digests."""
    shell = Shell(context, repo, as_json)
    if rev is None:
        return _verify_all(shell, since, limit)
    if since is not None or limit is not None:
        raise InvalidInput("--since and --for belong to a check of everything: leave out the state, or leave out these options")
    with shell.repository() as repository:
        state = repository.verify(rev)
    if shell.as_json:
        shell.write_json({"state": state.uid, "digest": state.digest, "bytes": state.bytes_total, "ok": True})
        return None
    from .render import size_text

    shell.write(f"state {state.uid} (step {state.step}): {size_text(state.bytes_total)}, every byte as it was captured")
    return None


def _verify_all(shell: Shell, since: str | None, limit: float | None) -> None:
    """Read everything, and end with the exit code of damage if there is any. If Ctrl-C ends it, it says how to continue."""
    from datastates import values
    from datastates.upkeep.checking import Limits, check_all

    from .payload import progress_of

    marks: list[str] = []
    limits = Limits(since, None if limit is None else values.seconds(limit, "--for"))
    with shell.repository() as repository, progress_of(shell) as progress:
        bar = progress.add_task("verifying", total=None)
        try:
            found = check_all(
                repository.core,
                limits,
                on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
                on_mark=lambda uid: marks.__setitem__(slice(None), [uid]),
            )
        except KeyboardInterrupt:
            if marks:
                shell.hint(f"to go on: datastates verify --since {marks[0]}")
            raise
    _say_checked(shell, found)
    if found.damage or found.unread:
        raise typer.Exit(EXIT_CODES["corrupt" if found.damage else "unavailable"])


def _say_checked(shell: Shell, found: VerifyReport) -> None:
    if shell.as_json:
        import msgspec

        return shell.write_json({**msgspec.to_builtins(found), "ok": not found.damage and not found.unread})
    from .render import size_text

    for each in found.damage:
        what = "manifest" if each.chunk is None else f"chunk {each.chunk} ({', '.join(each.tensors[:5]) or 'no tensor'})"
        whose = f", rank {each.rank}" if each.rank else ""
        shell.write(f"state {each.state}{whose}: {what}: {each.problem}")
    for text in found.unread:
        shell.write(f"not read: {text}")
    for text in found.partial:
        shell.write(text)
    said = f"{len(found.hurt)} damaged" if found.damage else "every byte as it was written"
    shell.write(f"{plural(found.states, 'state')}, {size_text(found.bytes)} read: {said}")
    if found.mark is not None:
        shell.hint(f"to go on: datastates verify --since {found.mark}")
    return None


def _say(shell: Shell, done: GcReport) -> None:
    from .render import size_text

    shell.write(f"{size_text(done.bytes_freed)} {'can be freed' if done.is_dry_run else 'freed'}")
    for count, what, size in (
        (len(done.states), "evicted, lost or unknown states whose manifests were still there", None),
        (done.packs, "packs that no state needs", done.bytes_packs),
        (done.rewritten, "packs most of whose bytes no state needs, rewritten", done.bytes_rewritten),
        (done.temporaries, "files that a dead process left half written", done.bytes_temporaries),
    ):
        if count:
            shell.write(f"  {count}: {what}" + ("" if size is None else f", {size_text(size)}"))
    for text in done.left:
        shell.write(f"left: {text}")


def reindex(
    context: typer.Context,
    replace: Annotated[
        bool, typer.Option("--replace", help="Rebuild a lineage that is there; its file is kept beside the new one.")
    ] = False,
    lineage: Annotated[
        str | None, typer.Option("--lineage", metavar="UID", help="Which lineage, if the folder serves several.", show_default=False)
    ] = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the lineage from the folder of packs, where the database is lost, damaged, or older than the packs."""
    from datastates.upkeep.reindex import reindex as rebuild

    shell = Shell(context, repo, as_json)
    orderly()
    location = shell.location(must_exist=False)
    url = location.database_url if location.root is None else location.root
    done = rebuild(url, packs=location.packs, lineage=lineage, replace=replace)
    if shell.as_json:
        import msgspec

        shell.write_json(msgspec.to_builtins(done))
        return
    shell.write(f"lineage {done.lineage}: {plural(done.states, 'state')}, {done.restorable} restorable here")
    shell.write(
        ", ".join([plural(done.branches, "branch"), plural(done.tags, "tag"), plural(done.notes, "note"), plural(done.events, "ref event")])
    )
    shell.write(", ".join([plural(done.clones, "clone"), plural(done.seals, "seal"), plural(done.variants, "variant")]))
    for text in done.lacking:
        shell.write(f"lacking: {text}")
    if done.replaced is not None:
        shell.write(f"the database that was there is {done.replaced}")


def _connected(urls: list[str], token_file: Path | None, tls_ca: Path | None) -> Iterator[Peer]:
    """Connect to each peer separately: what one of them cannot give, the next one may have."""
    from datastates.clone.peer import connect

    for url in urls:
        yield connect(url, token_file=token_file, tls=trusting(tls_ca))


def repair(
    context: typer.Context,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FOLDER", help="Another repository, or folder of packs, that may have the same states.", show_default=False
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="URL", help="A process that serves them (tcp://HOST:PORT); may be repeated.", show_default=False),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """Check everything, and bring back what is damaged from other places; for the rest, name what can be restored instead."""
    from .payload import progress_of

    shell = Shell(context, repo, as_json)
    with ExitStack() as stack:
        repository = stack.enter_context(shell.repository())
        peers = [stack.enter_context(each) for each in _connected(peer or [], token_file, tls_ca)]
        progress = stack.enter_context(progress_of(shell))
        bar = progress.add_task("verifying", total=None)
        done = repository.repair(
            source=source, peers=peers, on_progress=lambda read, total: progress.update(bar, completed=read, total=total)
        )
    if shell.as_json:
        import msgspec

        shell.write_json(msgspec.to_builtins(done))
    else:
        shell.write(f"{plural(len(done.repaired), 'state')} repaired, {len(done.hurt)} still damaged")
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
