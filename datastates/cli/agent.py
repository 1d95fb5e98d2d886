"""The command ``agent``: runs jobs and restarts them, halts trainings, and shows what the agent of
this node holds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.lineage.views.text import size_text

from .app import AsJson, Command, Repo, Shell, branch_names
from .tables import table

if TYPE_CHECKING:
    from datastates.agent.messages import AgentStatus, HeldMemory

agent = typer.Typer(
    name="agent",
    no_args_is_help=True,
    add_completion=False,
    help=(
        "Keep captured states when a training dies: run a job and restart it, halt trainings, see"
        " what is held."
    ),
)

_LOOK_S = 0.5
_AGAIN_S = 1.0
_STACKS_S = 10.0
_END_S = 30.0
"""How long processes may take to end after SIGTERM, in seconds."""


# --- what the agent holds ---


@agent.command("status", cls=Command, epilog="Example: datastates agent status")
def status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show which trainings the agent of this node holds, and what a failure of the node would
    lose."""
    shell = Shell(context, None, as_json)
    found = _status()
    if shell.as_json:
        held = () if found is None else found.memories
        shell.write_json(
            {
                "pid": None if found is None else found.pid,
                "version": None if found is None else found.version,
                "memories": [_as_dict(each) for each in held],
            }
        )
        return
    if found is None or not found.memories:
        running = "runs and holds nothing" if found is not None else "does not run"
        shell.write(
            f"the agent of this node {running}: Config(agent='process') or DATASTATES_AGENT=process"
            " has it hold the memory of a training"
        )
        return
    made = table("branch", "process", "state", "bytes", "states", "newest", "pages", "repository")
    for each in found.memories:
        made.add_row(
            ", ".join(tracks.branch for tracks in each.tracks) or "-",
            str(each.pid),
            _life(each),
            size_text(each.size),
            str(each.states),
            _age(each.newest_at) if each.states else "-",
            each.pages,
            each.packs,
        )
    shell.write(made)
    shell.write(
        "if this node failed now, the states that are only in its memory would be lost:"
        " `datastates log` shows them as captured"
    )


def _life(each: HeldMemory) -> str:
    if not each.until:
        return "running"
    left = max(0.0, each.until - time.time())
    return f"died, {left:.0f} s left" if not each.trouble else f"died: {each.trouble}"


def _age(at: float) -> str:
    return f"{max(0.0, time.time() - at):.1f} s ago"


def _as_dict(each: HeldMemory) -> dict[str, object]:
    return {
        "runs": each.runs,
        "pid": each.pid,
        "argv": each.argv,
        "packs": each.packs,
        "branches": [
            {"branch": tracks.branch, "rank": tracks.rank, "ranks": tracks.ranks}
            for tracks in each.tracks
        ],
        "pages": each.pages,
        "memory_bytes": each.size,
        "states": each.states,
        "newest_at": each.newest_at if each.states else None,
        "until": each.until or None,
        "trouble": each.trouble or None,
    }


def _status() -> AgentStatus | None:
    """What the agent and the processes that took memory over hold; None if no agent runs."""
    import msgspec

    from datastates.agent import messages

    def of(address: str) -> AgentStatus | None:
        try:
            return messages.ask(address, messages.AskStatus(), messages.AgentStatus)
        except Unavailable:
            return None

    found = of(messages.agent_address())
    if found is None:
        return None
    others = [each for address in found.takeovers if (each := of(address)) is not None]
    memories = (*found.memories, *(held for each in others for held in each.memories))
    return msgspec.structs.replace(found, memories=memories)


@agent.command("stop", cls=Command, epilog="Example: datastates agent stop")
def stop(context: typer.Context) -> None:
    """End the agent of this node. States of dead trainings become durable; live trainings start
    another agent."""
    from datastates.agent import messages

    shell = Shell(context)
    try:
        with messages.connect(messages.agent_address()) as connection:
            messages.send(connection, messages.Stop())
    except Unavailable:
        shell.write("no agent runs on this node")


@agent.command("serve", cls=Command, epilog="Example: datastates agent serve")
def serve() -> None:
    """Run the agent in the foreground, for a service manager or a container; without this, the
    first training starts it."""
    from datastates.agent import server

    server.main(is_lasting=True)


# --- halt ---


@agent.command("halt", cls=Command, epilog="Example: datastates agent halt main --after 10")
def halt(
    context: typer.Context,
    branch: Annotated[
        str | None, typer.Argument(metavar="BRANCH", autocompletion=branch_names)
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="After the next capture.")] = False,
    after: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="After N more captures.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="At a time: 18:30 or 2026-01-31T18:30.")
    ] = None,
    before: Annotated[
        str | None, typer.Option(metavar="TIME", help="So that it has ended before a time.")
    ] = None,
    is_listing: Annotated[bool, typer.Option("--list", help="Show the requests.")] = False,
    unset: Annotated[bool, typer.Option("--unset", help="Take the request back.")] = False,
    repo: Repo = None,
    as_json: AsJson = False,
) -> None:
    """End a running training after a capture that is durable, with exit status 0."""
    from datastates.lineage.query import names
    from datastates.lineage.write.runs import unfinished
    from datastates.training.halt import Halt, request, requested

    shell = Shell(context, repo, as_json)
    given = [
        *([Halt("now")] if now else []),
        *([Halt("after", after)] if after is not None else []),
        *([Halt("at", _time(at))] if at is not None else []),
        *([Halt("before", _time(before))] if before is not None else []),
    ]
    if len(given) + is_listing + unset != 1:
        raise InvalidInput("give one of --now, --after, --at, --before, --list and --unset")
    with shell.database() as database:
        if is_listing:
            with database.read() as session:
                branches = {run.branch for run in unfinished(session) if run.branch}
                branches |= {ref.name for ref in names.refs(session)}
                found = {
                    name: asked
                    for name in sorted(branches)
                    if (asked := requested(session, name)) is not None
                }
            if shell.as_json:
                for name, asked in found.items():
                    shell.write_json({"branch": name, "kind": asked.kind, "value": asked.value})
            else:
                lines = [f"{name}: {asked.describe()}" for name, asked in found.items()]
                shell.write("\n".join(lines) or "no training is to halt")
            return
        if branch is None:
            raise InvalidInput("name the branch whose training is to halt")
        asked = None if unset else given[0]
        with database.write(durable=True) as session:
            if not request(session, branch, asked):
                raise NotFound(f"no training of branch {branch!r} runs: `datastates runs` has all")
        said = "goes on" if asked is None else f"ends {asked.describe()}"
        shell.write(f"the training of {branch} {said}")


def _time(text: str) -> float:
    """A time of day, today or tomorrow, or a whole time, in seconds since the epoch."""
    try:
        if ":" in text and "-" not in text:
            clock = datetime.strptime(text, "%H:%M")  # the user's own clock
            today = datetime.now().astimezone()
            found = today.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
            return found.timestamp() + (86_400 if found < today else 0)
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError as exc:
        raise InvalidInput(f"{text!r} is no time: write 18:30, or 2026-01-31T18:30") from exc


# --- run ---


@agent.command(
    "run",
    cls=Command,
    epilog="Example: datastates agent run --restarts 10 --hang 600 -- python train.py",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…")],
    restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="Restart it at most this often.")
    ] = 10,
    hang: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Restart it when a process has captured nothing for so long.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a job whose processes survive in the agent, and restart it when it dies.

    A state from which three processes in a row die before their first new state is skipped.
    """
    shell = Shell(context)
    raise typer.Exit(Job(command, restarts, hang, shell).run())


@dataclass
class Job:
    """A command that is restarted when it fails."""

    command: list[str]
    restarts: int
    hang_s: float | None
    shell: Shell
    _asked_to_end: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Run it until it ends well, or has failed too often; returns its exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._asked_to_end.append(number))
        for start in range(self.restarts + 1):
            with tempfile.TemporaryDirectory(prefix="datastates-") as folder:
                code = self._run_once(start, Path(folder))
            if code == 0 or self._asked_to_end:
                return code
            self._say(f"the job ended with status {code}", start)
            time.sleep(_AGAIN_S)
        return code

    def _say(self, what: str, start: int) -> None:
        left = self.restarts - start
        then = f"starting it again, {left} more after this" if left else "it is not started again"
        sys.stderr.write(f"datastates agent: {what}; {then}\n")

    def _run_once(self, start: int, folder: Path) -> int:
        environment = {
            "DATASTATES_AGENT": "process",
            **os.environ,
            "DATASTATES_RESTART": str(start),
            "DATASTATES_STACKS": str(folder),
        }
        try:
            process = subprocess.Popen(self.command, env=environment, process_group=0)
        except OSError as exc:
            raise InvalidInput(f"{self.command[0]} cannot be started: {exc.strerror}") from exc
        told = 0
        while process.poll() is None:
            if len(self._asked_to_end) > told:
                _signal(process.pid, self._asked_to_end[told])
                told += 1
            if self.hang_s is not None and not self._asked_to_end:
                at = time.time() - self.hang_s
                hung = [each for each in _held(folder) if each.newest_at < at]
                if hung:
                    self._end_hung(process, hung, folder)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
        self._kill(process, folder)  # what it left behind
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _end_hung(
        self, process: subprocess.Popen[bytes], hung: list[HeldMemory], folder: Path
    ) -> None:
        """Show the stacks of processes that capture nothing, the longest first, and kill the
        job."""
        for each in sorted(hung, key=lambda each: each.newest_at):
            ranks = {f"rank {tracks.rank} of branch {tracks.branch}" for tracks in each.tracks}
            who = f"process {each.pid} ({', '.join(sorted(ranks)) or 'no branch'})"
            sys.stderr.write(
                f"datastates agent: {who} has captured nothing for {self.hang_s:g} s; its stacks:\n"
                f"{_stacks(each.pid, folder)}\n"
            )
        self._kill(process, folder)

    def _kill(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        """Kill the job, with the ranks that a launcher put into other process groups."""
        _signal(process.pid, signal.SIGKILL)
        for path in folder.iterdir():
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(path.name), signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _stacks(pid: int, folder: Path) -> str:
    """The stack of a process's main thread, which it writes to a file on a signal. Of all its
    threads, if the main thread is not to be found."""
    path = folder / str(pid)
    with contextlib.suppress(ProcessLookupError):
        if path.exists():  # else the signal would kill it
            os.kill(pid, signal.SIGUSR2)
    deadline, before = time.monotonic() + _STACKS_S, ""
    while time.monotonic() < deadline:
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace").strip()
            if text and text == before:  # it has written all of them
                threads = text.split("\n\n")
                return "\n\n".join(
                    [each for each in threads if " in _bootstrap" not in each] or threads
                )
            before = text
    return "(it does not answer)"


def _held(folder: Path) -> Iterator[HeldMemory]:
    """What the agent holds of the processes of a job: each of them has a file for its stacks."""
    found = _status()
    for each in () if found is None else found.memories:
        if not each.until and (folder / str(each.pid)).exists():
            yield each
