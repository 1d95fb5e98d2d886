"""All settings of a repository, as one frozen value. The entry point reads the environment once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from inspect import signature
from typing import Any, Literal, Protocol

from datastates.policy.auto import Auto
from datastates.policy.contract import Cadence, Policy
from datastates.policy.retention import DEFAULT, Retention, retention_of
from datastates.policy.text import parse, policy

from . import values
from .errors import InvalidInput

__all__ = ["AgentMode", "BackPressure", "Config", "Data", "OnFailure", "parse_bytes"]


class BackPressure(StrEnum):
    """The reaction of a capture to a full memory: wait, skip itself, or give up the oldest waiting
    write."""

    WAIT = "wait"
    SKIP = "skip"
    DROP_OLDEST = "drop-oldest"


class OnFailure(StrEnum):
    """The reaction of a training to a disk that is full, failing or gone: continue and write the
    states later, or raise the error at its next capture."""

    CONTINUE = "continue"
    RAISE = "raise"


class AgentMode(StrEnum):
    """Where the memory of captured states lives: in the training process, or with the agent of this
    node, so that they survive the process."""

    INLINE = "inline"
    PROCESS = "process"


class Data(StrEnum):
    """What carries the bytes of clones.

    ``AUTO`` takes UCX where both sides found RDMA, and our own connections otherwise. ``UCX`` needs
    a private network. ``TCP`` is our own connections. ``IPC`` is the driver of the devices; both
    sides must be processes of one host and user, and both must choose it.
    """

    AUTO = "auto"
    UCX = "ucx"
    TCP = "tcp"
    IPC = "ipc"


class Processor(Protocol):
    """A user's processor, as far as a configuration needs it.

    ``engine.processors.Processor`` is the whole contract."""

    name: str
    priority: int

    def process(self, captured: Any, /) -> None:
        """Do something with a recorded state."""

    def close(self) -> None:
        """Called when the repository is closed."""


class FurtherTier(Protocol):
    """A user's tier, as far as a configuration needs to know it; the whole contract is
    ``datastates.storage.Tier``."""

    @property
    def name(self) -> str:
        """The name under which the lineage records it."""

    def close(self) -> None:
        """Called when the repository is closed."""


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a repository; the defaults suit one training process on one machine.

    - ``memory_bytes``: the budget of the arena, for staging and kept states together (plain values
      and manifests count), in bytes or as ``"2G"``. None keeps as many states as ``policy.keeping``
      computes. States that may not leave memory then take at most a quarter of the memory that is
      available when the arena is made.
    - ``memory_latest``: how many of its newest states each training keeps in memory. None keeps as
      many as fit. Older ones leave memory at the next capture, unless a ref names them or they are
      about to be written.
    - ``device_bytes``: how much memory of each device the copies of the newest states may take
      there, in bytes or as ``"2G"``. Updates then do not wait for a copy to the host, and
      ``run.guard`` and restores go back without the host. 0 keeps no copies.
    - ``cadence``: which states are written automatically, as a policy (``datastates.Auto``,
      ``Cadence``, ``CheckFreq``, …, joined by ``|``) or its text. ``"auto"`` writes every state
      while that costs little, and else states at even distances.
    - ``durable_every``: every n-th capture of a tracker is written, so 5 writes captures 5, 10, 15
      and so on. ``durable_interval_s``: the newest state is written at most this often. None
      writes no state automatically, or only those of ``durable_every``. Each of the two turns
      ``"auto"`` off. Give them, or ``cadence``.
    - ``retention``: which durable states keep their bytes (``datastates.Retention``, or its text).
    - ``back_pressure``: what a capture does when memory is full.
    - ``on_failure``: whether a training continues (``continue``) or gets an error (``raise``) when
      nothing can be written.
    - ``write_bytes_per_s``: the fastest rate at which states are written to disk, in bytes or as
      ``"50M"``. The remaining states of a training or repository that is closed are written at
      full speed.
    - ``direct_io``: whether packs are written past the page cache. None tries it and falls back.
    - ``verify``: whether each chunk that is read is compared with its digest, unless the
      call has its own ``verify``. Without it restores are faster, and damage goes unnoticed.
    - ``data``: what carries the bytes of clones.
    - ``agent``: ``process`` keeps captured states in memory that the agent of this node holds too.
      They survive this process: the next one that tracks the branch continues from them. The first
      process starts the agent. ``inline`` keeps them in this process alone. None takes
      ``DATASTATES_AGENT``, which ``datastates agent run`` sets, and else ``inline``.
    - ``processors``: your own steps, called with every state that is captured or merged
      (``datastates.Processor``).
    - ``tiers``: further tiers, nearest first. Each is a ``datastates.storage.Tier`` or a URL such
      as ``s3://bucket/run``. Each state that becomes durable is put there too, and is read from
      there when no nearer tier has it. They are closed with the repository. None takes the URLs
      that this repository was opened with before. An empty list takes none.
    - ``copy_bytes_per_s``: the fastest rate at which states are copied to each further tier.
    - ``group_patience_s``: how long a state of several ranks waits for a part that a rank does not
      report before it is given up.
    - ``on_step``: called with a name after each durable step (see ``storage.local``), on the
      thread that took it, for tests and traces.
    - ``trace``: a file for Perfetto that shows when each thread captured, copied, digested,
      recorded and wrote which state. It is written when the repository is closed; ``{pid}`` in its
      name is replaced by the process id.
    """

    memory_bytes: int | None = None
    durable_interval_s: float | Literal["auto"] | None = "auto"
    durable_every: int | None = None
    back_pressure: BackPressure = BackPressure.WAIT
    direct_io: bool | None = None
    verify: bool = True
    data: Data = Data.AUTO
    on_step: Callable[[str], None] | None = None
    processors: Sequence[Processor] = ()
    tiers: Sequence[FurtherTier | str] | None = None
    cadence: Policy | str = "auto"
    retention: Retention | str = DEFAULT
    on_failure: OnFailure = OnFailure.CONTINUE
    trace: str | os.PathLike[str] | None = None
    write_bytes_per_s: int | None = None
    copy_bytes_per_s: int | None = None
    group_patience_s: float = 60.0
    memory_latest: int | None = None
    device_bytes: int = 0
    agent: AgentMode | None = None

    def __post_init__(self) -> None:
        checks: dict[str, values.Check] = {
            "memory_bytes": values.optional(partial(values.size, least=1)),
            "memory_latest": values.optional(values.positive),
            "device_bytes": values.size,
            "write_bytes_per_s": values.optional(partial(values.size, least=1 << 16)),
            "copy_bytes_per_s": values.optional(partial(values.size, least=1 << 16)),
            "group_patience_s": values.seconds,
            "verify": values.flag,
            "direct_io": values.optional(values.flag),
        }
        checked = {name: check(getattr(self, name), name) for name, check in checks.items()}
        # a text is refused
        parts = Cadence(self.durable_every, None if self._is_unset else self.durable_interval_s)  # type: ignore[arg-type]
        cadence = policy(self.cadence)
        if not (isinstance(cadence, Auto) or (parts.every is None and self._is_unset)):
            raise InvalidInput(_TWICE)
        if self.on_step is not None and not callable(self.on_step):
            raise InvalidInput(
                f"on_step is {values.shown(self.on_step)}: give a function that takes the name of a"
                " step"
            )
        trace = self.trace
        checked |= {
            "durable_every": parts.every,
            "durable_interval_s": "auto" if self._is_unset else parts.interval_s,
            "cadence": cadence,
            "back_pressure": values.choice(self.back_pressure, BackPressure, "back_pressure"),
            "on_failure": values.choice(self.on_failure, OnFailure, "on_failure"),
            "data": values.choice(self.data, Data, "data"),
            "agent": values.optional(lambda value, what: values.choice(value, AgentMode, what))(
                self.agent, "agent"
            ),
            "trace": None if trace is None else os.path.abspath(values.path(trace, "trace")),
            "retention": retention_of(self.retention),
            "processors": _checked(self.processors),
            "tiers": None if self.tiers is None else _listed(self.tiers),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def cadence_with(
        self,
        cadence: Policy | str | None = None,
        *,
        durable_every: int | None = None,
        durable_interval_s: float | None = None,
    ) -> Policy:
        """The cadence of a training that gives these settings; what it leaves out is as configured.
        They replace a configured ``Auto``, and are joined with another policy that is not a
        ``Cadence``.

        :raises InvalidInput: the cadence is given twice, or a setting is impossible.
        """
        whole = None if cadence is None else policy(cadence)
        if whole is not None and (durable_every is not None or durable_interval_s is not None):
            raise InvalidInput(_TWICE)
        configured = policy(self.cadence)
        if self.durable_every is not None or not self._is_unset:
            # seconds
            configured = Cadence(
                self.durable_every,
                None if self._is_unset else self.durable_interval_s,  # type: ignore[arg-type]
            )
        if whole is not None or (durable_every is None and durable_interval_s is None):
            return whole or configured
        if not isinstance(configured, Cadence):
            parts = Cadence(durable_every, durable_interval_s)
            return parts if isinstance(configured, Auto) else configured | parts
        every = configured.every if durable_every is None else durable_every
        return replace(
            configured,
            every=every,
            interval_s=configured.interval_s if durable_interval_s is None else durable_interval_s,
        )

    @property
    def uses_agent(self) -> bool:
        """Whether captured states are to survive the process.

        :raises InvalidInput: ``DATASTATES_AGENT`` does not parse.
        """
        chosen = self.agent or Config.from_environment().agent
        return chosen is AgentMode.PROCESS

    @property
    def _is_unset(self) -> bool:
        return (
            isinstance(self.durable_interval_s, str)
            and str.__str__(self.durable_interval_s) == "auto"
        )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """The defaults, changed by ``DATASTATES_MEMORY``, ``_MEMORY_LATEST``, ``_DEVICE_MEMORY``,
        ``_DURABLE_EVERY``, ``_DURABLE_INTERVAL``, ``_CADENCE``, ``_BACK_PRESSURE``,
        ``_ON_FAILURE``, ``_DATA``, ``_RETENTION``, ``_TRACE``, ``_WRITE_BYTES_PER_S``,
        ``_COPY_BYTES_PER_S``, ``_GROUP_PATIENCE``, ``_AGENT``, and ``_TIERS``
        (URLs with spaces between them).

        :raises InvalidInput: a variable does not parse; names it.
        """
        environ = os.environ if environ is None else environ
        if not isinstance(environ, Mapping):
            raise InvalidInput(f"environ is {values.shown(environ)}: give a dict of variables")
        config = cls()
        for variable, apply in _VARIABLES.items():
            text = environ.get(variable)
            if text is None or text == "":
                continue
            try:
                config = apply(config, values.string(text, variable))
            except ValueError as exc:
                raise InvalidInput(f"{variable}={text!r} does not parse: {exc}") from exc
        return config


_TWICE = (
    "cadence is given, and durable_every or durable_interval_s, too: say it as one value, or by"
    " those"
)


def _listed(tiers: object) -> tuple[FurtherTier | str, ...]:
    """The tiers, checked as far as is possible here; the repository checks each one."""
    if not isinstance(tiers, Sequence) or isinstance(tiers, str):
        raise InvalidInput(
            f"tiers is {values.shown(tiers)}: give a list of tiers, nearest first, as"
            ' tiers=[MyTier()] or tiers=["s3://bucket/run"]'
        )
    return tuple(tiers)


def _check_place(processor: object, name: str) -> None:
    """Raise unless a processor can be called in the process that its ``where`` names."""
    where, kind = getattr(processor, "where", "training"), type(processor)
    if where not in {"training", "agent"}:
        raise InvalidInput(
            f"the processor {name!r} has where={values.shown(where)}: set 'training' or 'agent'"
        )
    if where == "training":
        return
    reason = ""
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        reason = "another process cannot import its class: move it to a module"
    else:
        try:
            signature(kind).bind()
        except TypeError as exc:
            reason = f"its class is made without arguments there: give each a default ({exc})"
    if reason:
        raise InvalidInput(f"the processor {name!r} cannot run with where='agent': {reason}")


def _checked(processors: object) -> tuple[Processor, ...]:
    """The processors, once each is seen to have what a processor needs."""
    if not isinstance(processors, Sequence) or isinstance(processors, str):
        raise InvalidInput(
            f"processors is {values.shown(processors)}: give a list of them, as"
            " processors=[MyProcessor()]"
        )
    names: list[str] = []
    for processor in processors:
        what = values.shown(processor)
        for method in ("process", "close"):
            if isinstance(processor, type):
                raise InvalidInput(
                    f"processors has {what}: give an object of it, as"
                    f" processors=[{processor.__name__}()]"
                )
            if not callable(getattr(processor, method, None)):
                raise InvalidInput(
                    f"processors has {what}: give an object with a method {method}, such as one of"
                    " a subclass of datastates.Processor"
                )
        names.append(
            values.text(getattr(processor, "name", None), f"the name of the processor {what}")
        )
        if not names[-1]:
            raise InvalidInput(
                f"the name of the processor {what} is empty: say one that messages can use"
            )
        values.integer(
            getattr(processor, "priority", None), f"the priority of the processor {names[-1]!r}"
        )
        _check_place(processor, names[-1])
    if len(set(names)) < len(names):
        raise InvalidInput(f"processors are named {', '.join(names)}: give each a name of its own")
    return tuple(processors)


_VARIABLES: dict[str, Callable[[Config, str], Config]] = {
    "DATASTATES_MEMORY": lambda config, text: replace(config, memory_bytes=parse_bytes(text)),
    "DATASTATES_MEMORY_LATEST": lambda config, text: replace(config, memory_latest=int(text)),
    "DATASTATES_DURABLE_EVERY": lambda config, text: replace(config, durable_every=int(text)),
    "DATASTATES_DURABLE_INTERVAL": lambda config, text: replace(
        config, durable_interval_s=float(text)
    ),
    "DATASTATES_CADENCE": lambda config, text: replace(config, cadence=parse(text)),
    "DATASTATES_BACK_PRESSURE": lambda config, text: replace(
        config, back_pressure=BackPressure(text)
    ),
    "DATASTATES_RETENTION": lambda config, text: replace(config, retention=retention_of(text)),
    "DATASTATES_ON_FAILURE": lambda config, text: replace(config, on_failure=OnFailure(text)),
    "DATASTATES_TRACE": lambda config, text: replace(config, trace=text),
    "DATASTATES_WRITE_BYTES_PER_S": lambda config, text: replace(
        config, write_bytes_per_s=parse_bytes(text)
    ),
    "DATASTATES_COPY_BYTES_PER_S": lambda config, text: replace(
        config, copy_bytes_per_s=parse_bytes(text)
    ),
    "DATASTATES_AGENT": lambda config, text: replace(config, agent=AgentMode(text)),
    "DATASTATES_TIERS": lambda config, text: replace(config, tiers=text.split()),
    "DATASTATES_DEVICE_MEMORY": lambda config, text: replace(
        config, device_bytes=parse_bytes(text)
    ),
    "DATASTATES_GROUP_PATIENCE": lambda config, text: replace(config, group_patience_s=float(text)),
    "DATASTATES_DATA": lambda config, text: replace(config, data=values.choice(text, Data, "data")),
}


def parse_bytes(text: str) -> int:
    """``"8G"``, ``"512M"``, ``"1.5GiB"`` or plain bytes, as a number of bytes (powers of 1024).

    :raises InvalidInput: it is not a size.
    """
    return values.size(text, "the size")
