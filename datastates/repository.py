"""The repository that a script opens: a lineage database, and the tiers that hold the bytes.

``facade`` has the methods for states that were captured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from datastates.lineage.states import Revision
from datastates.lineage.write.record import FIRST, Reduce, check_reduce
from datastates.maintenance.loading import Device, load, restore
from datastates.maintenance.location import locate
from datastates.policy.retention import Retention, asked_for, retention_of
from datastates.state.adapters import given_objects, split_values
from datastates.state.report import RestoreReport
from datastates.system.at_exit import settle
from datastates.system.devices import check_torch
from datastates.system.interrupts import undisturbed
from datastates.training.collective import Ranks, find
from datastates.training.configuration import configuration
from datastates.training.start import RngSource, Terms, begin_tracking, tracked_objects
from datastates.training.tracker import Tracker

from . import values
from .collective import AnyGroup, SoloGroup
from .config import BackPressure, Config, Data, OnFailure
from .errors import DatastatesError, InvalidInput
from .facade import Facade
from .values import Count, FilePath, Patterns, Seconds, Text, Token

if TYPE_CHECKING:
    from datastates.engine.processors import ProcessorSwitch
    from datastates.policy.contract import Policy
    from datastates.transport.contract import Tls
    from datastates.transport.serving import Server

_logger = logging.getLogger(__name__)


@values.checked
def open(
    url: FilePath = "runs",
    *,
    packs: FilePath | None = None,
    scratch: FilePath | None = None,
    memory_bytes: int | str | None = None,
    config: Config | None = None,
) -> Repository:
    """Open a repository; create it if it does not exist.

    Opening marks the states that only a dead process held in memory as ``lost``, and moves each
    branch back to its newest restorable state. A repository that may not be written can still be
    read.

        with datastates.open("runs") as repo:
            print(repo.refs())

    :param url: a folder (SQLite and packs inside), or ``postgresql+psycopg://…`` with ``packs``.
    :param packs: the folder of the packs, when the lineage is on a server; or the URL of a bucket
        (``s3://bucket/run``), where every durable state is copied.
    :param scratch: with packs in a bucket, the folder of this node for packs that are not there yet
        and for the newest ones. Each node has its own.
    :param memory_bytes: the budget for staging and kept states, in bytes or as ``"2G"``; instead of
        the one in ``config``.
    :param config: all other settings. None takes the defaults, as changed by the environment.
    :raises Unavailable: the database does not answer.
    :raises NotFound: the packs are there, but their lineage is gone.
    :raises InvalidInput: the url has another form, or the folder holds something else.
    :raises Unsupported: torch is too old.
    """
    check_torch()
    config = Config.from_environment() if config is None else config
    if memory_bytes is not None:
        config = replace(config, memory_bytes=values.size(memory_bytes, "memory_bytes"))
    location = locate(url, packs, scratch=scratch)
    settle()  # first finish writing what this process has just dropped
    with undisturbed():
        return Repository(location, config)


def _tls(value: object, what: str) -> Tls:
    # the transport takes a while to import, and few serve
    from datastates.transport.contract import (
        tls_of,
    )

    return tls_of(value, what)


AnyTls = Annotated["Tls", _tls]


def _own(own: frozenset[str], names: set[str]) -> frozenset[str]:
    if unknown := sorted(own - names):
        raise InvalidInput(
            f"own names {', '.join(unknown)}, and nothing of that name is tracked: there are"
            f" {', '.join(sorted(names))}"
        )
    return own


class Repository(Facade):
    """A lineage and the tiers that hold its states.

    Reading is safe from any thread; tracking belongs to the training thread."""

    # --- tracking ---------------------------------------------------------------------------------

    @values.checked
    def track(
        self,
        *,
        branch: Text = "main",
        start: Revision | None = None,
        resume: bool = True,
        takeover: bool = False,
        nearest: bool = False,
        hyperparameters: Literal["script", "state"] | None = None,
        rng: RngSource = "state",
        gradients: bool = False,
        frozen: bool = True,
        only: Patterns | None = None,
        strict: bool = True,
        durable_every: int | None = None,
        durable_interval_s: float | None = None,
        cadence: Policy | str | None = None,
        retention: Retention | str | None = None,
        keep_best: str | Sequence[str] | None = None,
        back_pressure: BackPressure | str | None = None,
        on_failure: OnFailure | str | None = None,
        defer: bool = True,
        objects: Mapping[str, object] | None = None,
        config: object = None,
        group: AnyGroup | None = None,
        own: Patterns = (),
        reduce: Reduce = FIRST,
        check: Literal["start"] | None = "start",
        **more: object,
    ) -> Tracker:
        """Track a training on a branch, and restore its objects to the head of that branch.

        A branch that exists is resumed at its newest restorable state. A branch that does not exist
        begins a new root, or forks from ``start``.

            with repo.track(branch="main", model=model, optimizer=optimizer) as run:
                for batch in run.steps(loader):
                    run.capture(metrics={"loss": train_step(batch)})

        :param branch: the branch that captures move forward.
        :param start: the state from which a new branch forks.
        :param resume: False raises Conflict if the branch exists.
        :param takeover: True takes the branch from another living process that tracks it. The
            branch goes back to the newest state whose bytes are here; the next capture of the other
            process raises Conflict. False raises Conflict instead.
        :param nearest: True forks from the state nearest to ``start``, by steps, if the bytes of
            ``start`` are gone. The log names it.
        :param hyperparameters: which options of optimizers and constants of schedulers are used
            where the script and the restored state differ: ``"script"`` or ``"state"``. None takes
            the script's for a fork, and the state's for a branch that is resumed. Each difference
            is logged. With ``"script"``, counters and moments still come from the state, and
            learning rates are recomputed: they are those of a training that had the script's
            schedule from the start.
        :param rng: where the random numbers of a fork come from: ``"state"``, or ``"script"``,
            which leaves the generators as the script seeded them. A branch that is resumed
            continues with its own, unless ``"script"`` finds another seed than before. With False
            the global generators are not captured.
        :param gradients: whether gradients are captured.
        :param frozen: False leaves out parameters of modules that have never required a gradient,
            such as the base model of an adapter. A restore then needs a module that has them. Their
            names, shapes and dtypes are checked, their values are not.
        :param only: as in ``restore``. With ``start`` it selects what a fork takes from that state.
            When the branch is resumed later, it gets back everything that it captured.
        :param strict: as in ``restore``.
        :param durable_every: make every n-th capture durable: 5 picks captures 5, 10, 15 and so on;
            None: as configured.
        :param durable_interval_s: make the newest state durable at most this often; None: as
            configured.
        :param cadence: both of these as one value, or another policy (``CheckFreq()``, or several
            joined by ``|``), or a policy as text. If none of the three is given or configured,
            every state becomes durable while that costs little (``Auto``).
        :param retention: which durable states of this branch keep their bytes, such as ``"latest:5
            every:1000"``; None: as configured.
        :param keep_best: one or more metrics. The best state so far by each becomes durable and
            keeps its bytes, so that ``@best:METRIC`` can be restored. ``"reward:max"`` says that
            larger is better; without it the metric's name decides.
        :param back_pressure: what a capture does when memory is full: ``wait``, ``skip`` or
            ``drop-oldest``; None: as configured.
        :param on_failure: what a training does while nothing can be written: ``continue``, or
            ``raise`` at its next capture; None: as configured.
        :param defer: False copies everything before ``capture`` returns.
        :param objects: further objects to track, by name. Here a name may equal that of an
            argument, such as ``start``.
        :param config: the configuration of this training, by which people find and compare it: a
            mapping, an argparse namespace or a dataclass, nested as you like. It is recorded as
            plain values under flat names such as ``optimizer.lr``; none of it is restored.
        :param group: the processes that track this training together, each as one rank:
            ``datastates.ranks.TorchGroup()``, ``MPIGroup()``, or ``SoloGroup()`` where each process
            trains by itself. None takes the group of ``datastates.ranks.using``, else all ranks of
            torch.distributed or MPI where one of them is initialised, else this process alone. With
            several ranks ``track`` is collective: all ranks call it.
        :param own: names of the objects that each rank keeps for itself and gets back as its own,
            besides random numbers, loaders and samplers. Everything else must be equal on all
            ranks, and each rank stores its share of it.
        :param reduce: how the metrics that the ranks give become those of the state: ``"first"``
            (rank 0's), ``"mean"``, ``"max"``, ``"min"``, ``"sum"``, ``"each"`` (rank 0's, and all
            as ``loss@3``), or a dict of these by the name of a metric.
        :param check: ``"start"`` checks now, by digests, that what should be equal on all ranks is
            equal; None does not check. See ``run.check_replicas``.
        :param more: the objects to track, by name: anything with ``state_dict`` and
            ``load_state_dict``, random number generators (torch's, Python's, NumPy's), and nested
            containers of those, of tensors and of plain values. All are restored in place, except
            values that cannot be (numbers, text, tuples): the tracker's ``values`` has those.
        :raises Conflict: the branch exists and ``resume`` is False, or it does not descend from
            ``start``. Or another living process tracks the branch: names its host and its process
            id, and since when it has held the branch.
        :raises NotFound: ``start`` names no state.
        :raises Corrupt: the branch's head is damaged; names the nearest state that verifies, and
            how to go on from it.
        :raises Unavailable: the repository can only be read, or another process or folder holds the
            branch's bytes. Or the bytes of ``start`` are gone, and ``nearest`` is False: names the
            nearest states that have them.
        :raises InvalidInput: an object cannot be tracked, or does not fit the state (with
            ``strict``).
        """
        ranks = Ranks(find() if group is None else group)
        with ranks.synchronized("begin to track"):
            self.core.check_open()
            self.core.home.check_writable()
            settings = configuration(config)
            tracked = tracked_objects(given_objects(more, objects, Repository.track), rng=rng)
            plain, live = split_values(tracked)
            terms = Terms(
                branch=branch,
                start=None if start is None else values.revision(start),
                resume=resume,
                only=only,
                strict=strict,
                gradients=gradients,
                frozen=frozen,
                defer=defer,
                cadence=self.config.cadence_with(
                    cadence, durable_every=durable_every, durable_interval_s=durable_interval_s
                ),
                back_pressure=(
                    self.config.back_pressure
                    if back_pressure is None
                    else BackPressure(back_pressure)
                ),
                on_failure=(
                    self.config.on_failure if on_failure is None else OnFailure(on_failure)
                ),
                config=settings,
                hyperparameters=hyperparameters,
                rng=rng,
                retention=asked_for(retention_of(self.config.retention), retention, keep_best),
                ranks=ranks,
                own=_own(frozenset(own), {*plain, *live}),
                reduce=check_reduce(reduce),
                is_checking=check == "start",
                takeover=takeover,
                nearest=nearest,
            )
        return begin_tracking(self.core, live, plain, terms)

    # --- states -----------------------------------------------------------------------------------

    @values.checked
    def load(
        self,
        rev: Revision,
        *,
        only: Patterns | None = None,
        device: Device | None = None,
        rank: Count = 0,
        nearest: bool = False,
    ) -> Any:
        """A state's tree: nested containers of tensors, with every byte checked. The caller owns
        the tensors. ``datastates.load`` takes a path such as ``runs/main~3`` instead, and needs no
        open repository.

        Tensors from disk are memory-mapped privately: writing to them never changes the pack.

            weights = repo.load("main~3", only="model")["model"]

        :param rev: the state.
        :param only: names, or patterns of paths (``"model"``, ``"optimizer/state/*"``). Everything
            else is ``None`` in the tree, and is not read.
        :param device: the device on which the tensors are placed.
        :param rank: for a state that several ranks captured together: the rank whose own values
            (random numbers, place in the data) the tree contains.
        :param nearest: True loads the nearest state by steps, if the bytes of this one are gone.
            The log names it.
        :raises InvalidInput: a name or a pattern in ``only`` selects nothing.
        :raises Corrupt: a stored byte is wrong; names the file and the tensor, and the nearest
            state that verifies.
        :raises Unavailable: its bytes are gone; names the nearest states before and after it that
            have them.
        """
        return load(
            self.core, self.core.state(rev, nearest=nearest), only=only, device=device, rank=rank
        )

    @values.checked
    def restore(
        self,
        rev: Revision,
        *,
        only: Patterns | None = None,
        strict: bool = True,
        nearest: bool = False,
        group: AnyGroup | None = None,
        objects: Mapping[str, object] | None = None,
        **more: object,
    ) -> RestoreReport:
        """Restore a state into live objects, in place; with ``strict`` nothing is changed unless
        everything fits and is verified.

            repo.restore("main~2", model=model, optimizer=optimizer)

        :param rev: the state.
        :param only: names, or patterns of paths, of what is restored. Everything else is left alone
            and not read.
        :param strict: False restores what fits, and the report lists what does not.
        :param nearest: True restores the nearest state by steps, if the bytes of this one are gone.
            The report has its uid and its step.
        :param group: the ranks of a job that restore the state together; each of them calls this,
            and all get the state that ``rev`` names for rank 0. Bytes that several ranks need are
            read once and passed on, and each rank gets back what was its own. None: this process
            restores alone, and gets what was rank 0's own.
        :param objects: further objects, by name. Here a name may equal that of an argument, such as
            ``only``.
        :param more: the objects, by the names under which they were tracked.
        :raises InvalidInput: names, shapes or types do not fit; lists them. Or the ranks give
            different states.
        :raises Unavailable: its bytes are gone; names the nearest states before and after it that
            have them.
        """
        into = given_objects(more, objects, Repository.restore)
        if not into:
            raise InvalidInput(
                "there is nothing to restore into: name the objects, as in restore(rev,"
                " model=model, optimizer=optimizer)"
            )
        ranks = Ranks(SoloGroup() if group is None else group)
        return restore(
            self.core,
            ranks.state(self.core, rev, nearest=nearest),
            into,
            only=only,
            strict=strict,
            group=ranks.group,
        )

    # --- other processes --------------------------------------------------------------------------

    @values.checked
    def serve(
        self,
        url: str = "tcp://127.0.0.1:0",
        *,
        group: AnyGroup | None = None,
        token: Token | None = None,
        token_file: FilePath | None = None,
        tls: AnyTls | None = None,
        is_writable: bool = False,
        timeout_s: Seconds = 10.0,
        data: Data | str | None = None,
        pictures: Callable[[int], object] | None = None,
    ) -> Server:
        """Let other processes browse this lineage and clone its states, from memory where possible,
        during the training.

            with repo.serve("tcp://127.0.0.1:0") as server:
                print(server.url)

        Closing the repository closes the server too.

        :param url: ``tcp://HOST:PORT``, or ``ucx://…`` to allow UCX; port 0 takes any free port.
            ``http://127.0.0.1:0`` serves the page and the web API instead.
        :param token: the secret that peers must know. A server that other machines can reach needs
            one: here, in ``token_file`` or in ``DATASTATES_TOKEN``.
        :param token_file: a file that holds the token.
        :param tls: certificates for TLS 1.3.
        :param is_writable: whether peers may push states, or make and move names on the page; needs
            a token.
        :param timeout_s: a peer that is silent for this long is treated as dead.
        :param data: what carries the bytes: ``tcp`` (our own connections), ``ucx`` (needs a
            ``ucx://`` url, and asserts that the network is private), ``auto`` (UCX where both sides
            found RDMA, else ``tcp``), or ``ipc`` (straight into the memory of a GPU that both
            processes of this host use; both sides must choose it). None: as configured
            (``DATASTATES_DATA``).
        :param pictures: with ``http://``: a function that takes the index of a sample and returns
            its picture, which the page shows among outliers. A picture is an array, or the bytes of
            a PNG, JPEG, GIF or WebP of at most 1 MiB.
        :param group: the ranks of a job. All of them call this and serve with one token, each at
            its own address. A peer that clones a state from one of them finds the others, which
            have its other parts.
        :raises InvalidInput: the server can be reached from other machines, or is writable, and
            there is no token.
        :raises Unavailable: the address is taken.
        :raises Unsupported: ``data="ucx"``, and UCXX is not installed.
        """
        from datastates.transport.serving import (
            PeerServer,  # the transport takes a while to import, and few serve
            serve_together,
        )

        if group is not None and group.size > 1:
            alone = partial(
                self.serve,
                url,
                token=token,
                token_file=token_file,
                tls=tls,
                is_writable=is_writable,
                timeout_s=timeout_s,
                data=data,
                pictures=pictures,
            )
            return serve_together(group, alone)
        from datastates.transport.handshake import check_writers, read_token

        self.core.check_open()
        secret = read_token(token, token_file)
        if is_writable:
            check_writers(url, secret)
        if url.startswith("http:"):
            # FastAPI is imported only when it is needed
            from datastates.api.serve import (
                serve_repository,
            )

            server: Server = serve_repository(
                self, url, token=secret, tls=tls, is_writable=is_writable, pictures=pictures
            )
        elif pictures is not None:
            raise InvalidInput(
                f"{url} shows no pictures: give pictures= with an http:// address, or leave it out"
            )
        else:
            server = PeerServer(
                self.core,
                url,
                token=secret,
                tls=tls,
                is_writable=is_writable,
                timeout_s=timeout_s,
                data=self.config.data if data is None else data,
            )
        self.core.servers.append(server)
        return server

    # --- the end ----------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why this process cannot write its states, since when, and what that has cost so far; None
        while writing works.

        While there is trouble, new states stay in memory only.
        """
        return None if self.core.running is None else self.core.running.trouble

    @property
    def processors(self) -> Mapping[str, ProcessorSwitch]:
        """The processors of ``Config`` by name, in their order. Each can be switched off and on,
        and has its last result.

            repo.processors["lines"].is_on = False
        """
        return MappingProxyType(self.core.processors)

    def flush(self) -> None:
        """Wait until every capture so far is recorded (which is not yet durable) or has failed."""
        if self.core.running is not None:
            self.core.running.flush()

    def close(self) -> None:
        """Make tagged states and branch heads durable, end the threads and release everything;
        idempotent.

        :raises DatastatesError: (or another error) something failed in the background, and no
            handle or later capture has raised it yet.
        """
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.core.close(error)
        except Exception as exc:  # it must not hide the error that ended the block
            if error is None:
                raise
            if not (isinstance(exc, DatastatesError) and exc.repeats(error)):
                _logger.exception("closing the repository failed")

    def __repr__(self) -> str:
        return f"<Repository {self.location}>"

    def _repr_html_(self) -> str:
        from .notebook import repository_html  # only notebooks need it

        return repository_html(self.core)
