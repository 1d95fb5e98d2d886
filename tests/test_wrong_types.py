"""Every public entry point given what it is not made for: refused at the call by our own errors,
and nothing half done.

The entry points are found by looking: a new public method fails here until it is given a case, or a
reason why it has none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import datastates
from datastates import Config, DatastatesError, PermutationSampler, Repository, Retention, Tracker
from tests.support.effort import examples
from tests.support.entries import own_members

QUIET = Config(memory_bytes=128 << 20, durable_interval_s=None)


class Text(str):
    """A text that is another type's."""

    __slots__ = ()


class Number(float):
    """A number that is another type's."""

    __slots__ = ()


class Thing(Enum):
    """What has neither text nor number."""

    PAIR = (1, 2)


class Hostile:
    """Whatever is asked of it fails."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError

    def __iter__(self) -> Iterator[object]:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]  # so is this


WRONG: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        3,
        2**63,
        2**70,
        10**400,
        0.5,
        2.0,
        math.nan,
        math.inf,
        1j,
        Decimal("0.5"),
    ),
    *(
        "",
        "x",
        "no such",
        "main~x(",
        "a/b",
        "nul \0",
        "half \ud800",
        "k" * 300,
        Text("text"),
        b"bytes",
        bytearray(b"x"),
    ),
    *(
        [],
        [1],
        ["x", 2],
        (),
        {},
        {"x": object()},
        {1: 2},
        {"": 1},
        set(),
        {"x"},
        range(3),
        [[[]]],
        object(),
        int,
        len,
        Thing.PAIR,
    ),
    *(np.int64(2), np.float64(0.5), np.bool_(True), np.str_("x"), np.ones(2), np.array(None)),
    *(
        torch.ones(()),
        torch.ones(2),
        torch.tensor(3),
        torch.empty(2, device="meta"),
        nn.Linear(1, 1),
        Number(0.5),
        Hostile(),
    ),
]

MIXED = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters(codec=None)),
        st.binary(),
        st.sampled_from(WRONG[:-1]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=4,
)


class World:
    """A repository with a training in it, that goes on after whatever was tried."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.repo = datastates.open(folder / "runs", config=QUIET)
        self.run = self.repo.track(
            model=self.model, optimizer=self.optimizer, sampler=PermutationSampler(9)
        )
        for _ in range(3):
            self.run.capture().wait("durable")
        self.repo.tag("start", "main")
        self.ensemble = self.repo.ensemble(["main", "start"], self.model)
        self.server = self.repo.serve("memory://", is_writable=True)
        self.peer = datastates.connect(self.server.url)
        self.count = 0

    def close(self) -> None:
        """End it."""
        self.peer.close()
        self.repo.close()

    def name(self) -> str:
        """A name that nothing has."""
        self.count += 1
        return f"new-{self.count}"

    def packs_alone(self) -> Path:
        """A folder without a lineage, and with a folder of packs."""
        folder = self.folder / self.name()
        (folder / "packs").mkdir(parents=True)
        return folder

    def tagged(self) -> str:
        """A tag that was just made."""
        return self.repo.tag(self.name(), "main").name

    def into(self) -> dict[str, Any]:
        """Objects that the state fits."""
        model = nn.Linear(3, 3)
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        }

    def check(self) -> None:
        """The next capture succeeds, becomes durable and comes back; names are what they were."""
        step = self.run.step
        with torch.no_grad():
            self.model.weight.add_(1)
        state = self.run.capture().wait("durable", timeout_s=60)
        assert (state.step, state.status) == (step + 1, "durable")
        assert torch.equal(self.repo.load(state.uid)["model"]["weight"], self.model.weight)
        assert self.repo.find("order by created desc limit 1")[0].uid == state.uid


@dataclass(frozen=True)
class Case:
    """A call that is right; each of its arguments is replaced in turn."""

    call: Callable[..., object]
    arguments: dict[str, Any]

    def close(self, made: object) -> None:
        """Let go of what a call made."""
        if isinstance(
            made, Repository | Tracker | datastates.Server | datastates.Peer | datastates.Transfer
        ):
            made.close()
        if inspect.isgenerator(made):
            for _ in zip(made, range(3), strict=False):
                pass
            made.close()


CASES: dict[str, Callable[[World], Case]] = {
    "open": lambda w: Case(
        datastates.open,
        {"url": w.folder / w.name(), "packs": None, "memory_bytes": "16M", "config": None},
    ),
    "reindex": lambda w: Case(
        datastates.reindex,
        {
            "url": w.packs_alone(),
            "packs": None,
            "replace": False,
            "on_progress": None,
        },
    ),
    "connect": lambda w: Case(
        datastates.connect,
        {
            "url": "memory://nobody",
            "token": None,
            "token_file": None,
            "tls": None,
            "timeout_s": 0.1,
        },
    ),
    "register_encoder": lambda w: Case(
        datastates.register_encoder,
        {"type": type(w.name(), (), {}), "name": w.name(), "encode": repr, "decode": repr},
    ),
    "save": lambda w: Case(
        datastates.save,
        {
            "obj": {"x": 1},
            "to": w.name(),
            "repo": w.repo,
            "start": None,
            "step": None,
            "metrics": {"loss": 0.5},
            "message": "said",
            "attributes": {"seed": 1},
        },
    ),
    "load": lambda w: Case(datastates.load, {"rev": "main", "map_location": "cpu", "repo": w.repo}),
    "Cadence": lambda _: Case(datastates.Cadence, {"every": 3, "interval_s": 2.0, "steps": 4}),
    "Auto": lambda _: Case(datastates.Auto, {"overhead": 0.05, "bytes_per_s": 1 << 20}),
    "CheckFreq": lambda _: Case(datastates.CheckFreq, {"overhead": 0.05}),
    "OnImprovement": lambda _: Case(
        datastates.OnImprovement, {"metric": "loss", "is_rising": None}
    ),
    "Young": lambda _: Case(datastates.Young, {"mtbf_s": 3600.0, "is_observed": False}),
    "Daly": lambda _: Case(
        datastates.Daly, {"mtbf_s": 3600.0, "is_observed": False, "is_first_order": True}
    ),
    "TwoLevel": lambda _: Case(
        datastates.TwoLevel, {"mtbf_s": 3600.0, "is_observed": False, "node_mtbf_s": 1e6}
    ),
    "Config": lambda _: Case(
        Config,
        {
            "memory_bytes": 1 << 24,
            "durable_interval_s": 1.0,
            "durable_every": 2,
            "back_pressure": "skip",
            "direct_io": True,
            "verify": True,
            "on_step": None,
            "trace": None,
            "cadence": None,
            "retention": "latest:3",
            "write_bytes_per_s": 1 << 20,
            "device_bytes": 1 << 20,
        },
    ),
    "Config.cadence_with": lambda _: Case(
        Config().cadence_with, {"cadence": None, "durable_every": 3, "durable_interval_s": 2.0}
    ),
    "Config.from_environment": lambda _: Case(
        Config.from_environment, {"environ": {"DATASTATES_MEMORY": "2G"}}
    ),
    "PermutationSampler": lambda _: Case(
        PermutationSampler, {"length": 9, "seed": 1, "shuffle": True}
    ),
    "PermutationSampler.batches": lambda _: Case(
        PermutationSampler(9).batches, {"batch_size": 2, "drop_last": False, "epochs": 1}
    ),
    "PermutationSampler.set_epoch": lambda _: Case(PermutationSampler(9).set_epoch, {"epoch": 1}),
    "PermutationSampler.reshuffle": lambda _: Case(PermutationSampler(9).reshuffle, {"salt": 1}),
    "PermutationSampler.load_state_dict": lambda _: Case(
        PermutationSampler(9).load_state_dict, {"state": PermutationSampler(9).state_dict()}
    ),
    "RngState.load_state_dict": lambda _: Case(
        datastates.RngState().load_state_dict, {"state": datastates.RngState().state_dict()}
    ),
    "Repository.track": lambda w: Case(
        w.repo.track,
        {
            "branch": w.name(),
            "start": None,
            "resume": True,
            "rng": True,
            "gradients": False,
            "only": None,
            "strict": True,
            "durable_every": 3,
            "durable_interval_s": 2.0,
            "cadence": None,
            "retention": "latest:3",
            "keep_best": "loss",
            "back_pressure": "wait",
            "defer": True,
            "objects": None,
        },
    ),
    "Retention": lambda _: Case(
        datastates.Retention, {"rules": Retention.latest(3).rules, "bound": 1 << 30}
    ),
    "Retention.latest": lambda _: Case(Retention.latest, {"count": 3}),
    "Retention.best": lambda _: Case(Retention.best, {"metric": "loss", "count": 3, "goal": "min"}),
    "Retention.every": lambda _: Case(Retention.every, {"steps": 10}),
    "Retention.interval": lambda _: Case(Retention.interval, {"seconds": "2h"}),
    "Retention.within": lambda _: Case(Retention.within, {"seconds": 3600.0}),
    "Retention.thin": lambda _: Case(Retention.thin, {"count": 8}),
    "Retention.at_most": lambda _: Case(Retention.at_most, {"size": "50G"}),
    "Retention.parse": lambda _: Case(Retention.parse, {"text": "latest:5 at-most:50G"}),
    "Repository.prune": lambda w: Case(w.repo.prune, {"policy": "all", "dry_run": False}),
    "Repository.state": lambda w: Case(w.repo.state, {"rev": "main"}),
    "Repository.load": lambda w: Case(
        w.repo.load, {"rev": "main", "only": "model", "device": "cpu"}
    ),
    "Repository.restore": lambda w: Case(
        w.repo.restore, {"rev": "start", "objects": w.into(), "only": "model", "strict": True}
    ),
    "Repository.verify": lambda w: Case(
        w.repo.verify, {"rev": None, "since": None, "limit_s": 9.0, "on_progress": None}
    ),
    "Repository.repair": lambda w: Case(
        w.repo.repair, {"source": None, "peers": (), "on_progress": None}
    ),
    "Repository.copy": lambda w: Case(w.repo.copy, {"to": "nowhere", "on_progress": None}),
    "Repository.gc": lambda w: Case(
        w.repo.gc, {"dry_run": False, "unknown": False, "on_progress": None}
    ),
    "Repository.tag": lambda w: Case(
        w.repo.tag, {"name": w.name(), "rev": "main", "message": "said"}
    ),
    "Repository.branch": lambda w: Case(w.repo.branch, {"name": w.name(), "rev": "main"}),
    "Repository.move": lambda w: Case(
        w.repo.move, {"name": w.tagged(), "rev": "start", "expected": "main"}
    ),
    "Repository.rename": lambda w: Case(w.repo.rename, {"name": w.tagged(), "new": w.name()}),
    "Repository.annotate": lambda w: Case(
        w.repo.annotate,
        {
            "rev": "main",
            "metrics": {"late": 1.0},
            "attributes": {"a": 1},
            "replace": True,
            "author": "me",
        },
    ),
    "Repository.delete_ref": lambda w: Case(
        w.repo.delete_ref, {"name": w.tagged(), "bytes": False, "dry_run": False}
    ),
    "Repository.reflog": lambda w: Case(w.repo.reflog, {"name": "main"}),
    "Repository.log": lambda w: Case(w.repo.log, {"rev": "main", "limit": 3}),
    "Repository.find": lambda w: Case(w.repo.find, {"query": "step > 1 limit 3"}),
    "Repository.instrument": lambda w: Case(w.repo.instrument, {"meter": None}),
    "Repository.overview": lambda w: Case(
        w.repo.overview, {"query": "step > 1", "metric": "loss", "sort": "name", "group": "study"}
    ),
    "Repository.runs": lambda w: Case(w.repo.runs, {"limit": 3}),
    "Repository.incomplete": lambda w: Case(w.repo.incomplete, {"limit": 3}),
    "Repository.ancestors": lambda w: Case(w.repo.ancestors, {"rev": "main", "limit": 3}),
    "Repository.descendants": lambda w: Case(w.repo.descendants, {"rev": "start", "limit": 3}),
    "Repository.graph": lambda w: Case(w.repo.graph, {"rev": "main"}),
    "Repository.compare": lambda w: Case(w.repo.compare, {"revs": ["start", "main"]}),
    "Repository.diff": lambda w: Case(
        w.repo.diff,
        {"old": "start", "new": "main", "only": "model", "stat": False, "on_progress": None},
    ),
    "Repository.blame": lambda w: Case(
        w.repo.blame, {"rev": "main", "only": "model", "size": False, "on_progress": None}
    ),
    "Repository.bisect": lambda w: Case(
        w.repo.bisect,
        {
            "good": "main~2",
            "bad": "main",
            "predicate": lambda tree: None,
            "only": "model",
            "verdicts": None,
            "on_progress": None,
        },
    ),
    "Repository.merge": lambda w: Case(
        w.repo.merge,
        {
            "revs": ["main", "start"],
            "method": "mean",
            "weights": [0.5, 0.5],
            "only": "model",
            "rest": "keep",
            "decay": None,
            "into": None,
            "tag": None,
            "message": None,
        },
    ),
    "Repository.verify_merge": lambda w: Case(
        w.repo.verify_merge, {"rev": w.repo.merge(["main", "start"]).uid}
    ),
    "Repository.ensemble": lambda w: Case(
        w.repo.ensemble,
        {"revs": ["main", "start"], "model": nn.Linear(3, 3), "only": "model", "pick": None},
    ),
    "Repository.serve": lambda w: Case(
        w.repo.serve,
        {
            "url": "memory://",
            "token": None,
            "token_file": None,
            "tls": None,
            "is_writable": False,
            "timeout_s": 1.0,
        },
    ),
    "PermutationSampler.hand_out": lambda _: Case(PermutationSampler(9).hand_out, {"count": 1}),
    "PermutationSampler.let_go": lambda _: Case(PermutationSampler(9).let_go, {"is_over": True}),
    "Tracker.epochs": lambda w: Case(w.run.epochs, {"count": 2}),
    "Tracker.steps": lambda w: Case(
        w.run.steps, {"loader": [1, 2], "accumulate": 1, "limit": 1, "verify": True}
    ),
    "Tracker.enumerate": lambda w: Case(
        w.run.enumerate, {"loader": [1, 2], "accumulate": 1, "limit": 1, "verify": True}
    ),
    "Tracker.capture": lambda w: Case(
        w.run.capture,
        {"metrics": {"loss": 0.5}, "step": None, "message": "said", "attributes": {"seed": 1}},
    ),
    "Tracker.restore": lambda w: Case(w.run.restore, {"rev": "main", "only": None, "strict": True}),
    "Tracker.guard": lambda w: Case(
        w.run.guard,
        {
            "spike": 6.0,
            "patience": 2,
            "window": 64,
            "back": 1,
            "data": "skip",
            "limit": 5,
            "keep": (),
        },
    ),
    "Guard.rewound": lambda w: Case(w.run.guard().rewound, {"loss": 0.5}),
    "Capture.wait": lambda w: Case(w.run.capture().wait, {"status": "captured", "timeout_s": 10.0}),
    "Peer.state": lambda w: Case(w.peer.state, {"rev": "main"}),
    "Peer.log": lambda w: Case(w.peer.log, {"rev": "main", "limit": 3}),
    "Peer.find": lambda w: Case(w.peer.find, {"query": "step > 1", "limit": 3}),
    "Peer.clone": lambda w: Case(
        w.peer.clone,
        {
            "rev": "start",
            "objects": w.into(),
            "repo": None,
            "only": "model",
            "strict": True,
            "atomic": False,
            "skip_equal": False,
            "tags": False,
            "chain": False,
            "on_progress": None,
        },
    ),
    "Peer.begin_clone": lambda w: Case(
        w.peer.begin_clone, {"rev": "start", "objects": w.into(), "repo": None, "resumable": True}
    ),
    "Peer.push": lambda w: Case(
        w.peer.push, {"rev": "start", "repo": w.repo, "tags": False, "on_progress": None}
    ),
    "Peer.begin_push": lambda w: Case(
        w.peer.begin_push, {"rev": "start", "repo": w.repo, "tags": False, "on_progress": None}
    ),
    "Transfer.wait": lambda w: Case(
        w.peer.begin_clone("start", objects=w.into()).wait, {"timeout_s": 10.0}
    ),
    "Transfer.resume": lambda w: Case(
        w.peer.begin_clone("start", objects=w.into(), resumable=True).resume,
        {"peer": w.peer, "on_progress": None},
    ),
    "Server.close": lambda w: Case(w.repo.serve("memory://").close, {"grace_s": 0.0}),
}
"""A right call for each entry point that takes arguments."""

HANDED_OUT = {
    *(
        "Cloned",
        "Prediction",
        "Ref",
        "RefEvent",
        "RestoreReport",
        "Rewind",
        "Run",
        "State",
        "Status",
        "BackPressure",
        "Tls",
        "CapturedState",
    ),
    *("CadenceChoice", "OnFailure"),
}
"""Plain values that are read and not asked for anything."""

OTHERWISE = {
    "Capture": "made by Tracker.capture",
    **{
        f"{policy}.{method}": "called by us"
        for policy in ("Auto", "Cadence", "CheckFreq", "Daly", "OnImprovement", "TwoLevel", "Young")
        for method in ("bounds", "choose", "informed", "is_due", "next_due", "told")
    },
    "Ensemble": "made by Repository.ensemble",
    "Ensemble.each": "takes what the user's module takes",
    "Guard": "made by Tracker.guard",
    "CapturedState.tree": "takes nothing",
    "JsonLines.format": "called by logging",
    "Processor": "written by users",
    "Processor.process": "called by us",
    "Peer": "made by connect",
    "Repository": "made by open",
    "Retention.bounded": "called by us",
    "Retention.keeping_best": "called by us",
    "RngState": "takes nothing",
    "Server": "made by Repository.serve",
    "Tracker": "made by Repository.track",
    "Transfer": "made by Peer.begin_clone",
}
"""What takes no argument of a user's, or is tried elsewhere."""


def entry_points() -> set[str]:
    """Public functions, classes and methods that can be called with arguments."""
    found = set()
    for name in set(datastates.__all__) - {"__version__"} - HANDED_OUT:
        public: Any = getattr(datastates, name)
        if isinstance(public, type) and issubclass(public, BaseException):
            continue
        if _takes_arguments(public):
            found.add(name)
        for attribute, member in own_members(public).items() if isinstance(public, type) else ():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if (
                not attribute.startswith("_")
                and isinstance(function, FunctionType)
                and _takes_arguments(getattr(public, attribute), 1)
            ):
                found.add(f"{name}.{attribute}")
    return found


def _takes_arguments(function: Any, bound: int = 0) -> bool:
    return (
        len(
            [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
        )
        > 0
    )


def test_every_entry_point_is_tried() -> None:
    known = {*CASES, *OTHERWISE}
    assert {name for name in entry_points() if name not in known} == set()
    assert set(CASES) <= entry_points()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts may be taken for folders."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    torch.set_num_threads(1)
    made = World(tmp_path_factory.mktemp("wrong"))
    yield made
    made.close()


def _is_the_callers_own(name: str, parameter: str, value: object) -> bool:
    """What an argument of the right sort does: callbacks and tracked objects may raise, any text
    may be a folder."""
    if name == "open" and parameter == "url":
        return isinstance(value, str | bytes)
    is_object = parameter in ("objects", "loader") and isinstance(value, Hostile)
    return is_object or (
        parameter in ("on_progress", "encode", "decode", "pick", "predicate") and callable(value)
    )


def attempt(world: World, name: str, changes: Mapping[str, object]) -> None:
    """One call with some arguments replaced: it does what it says, or raises an error of ours."""
    case = CASES[name](world)
    arguments = {**case.arguments, **changes}
    if name == "Repository.track":
        objects = arguments.pop("objects")
        arguments["thing"] = torch.zeros(1) if objects is None else objects
    try:
        case.close(case.call(**arguments))
    except DatastatesError:
        return
    except TimeoutError:
        assert name.endswith(".wait")


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_refused_by_an_error_of_ours(world: World, name: str) -> None:
    failures = []
    for parameter in CASES[name](world).arguments:
        for value in WRONG:
            if _is_the_callers_own(name, parameter, value):
                continue
            try:
                attempt(world, name, {parameter: value})
            except Exception as exc:
                said = "a hostile object" if isinstance(value, Hostile) else repr(value)[:60]
                failures.append(f"{parameter}={said}: {type(exc).__name__}: {str(exc)[:150]}")
        world.check()
    assert not failures, "\n".join([f"{len(failures)} of {name}:", *failures])


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_wrong_arguments_of_any_kind_are_refused_together(
    world: World, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(set(CASES) - {"open"})))
    parameters = sorted(CASES[name](world).arguments)
    attempt(world, name, data.draw(st.dictionaries(st.sampled_from(parameters), MIXED, min_size=1)))


def test_the_training_goes_on_after_all(world: World) -> None:
    world.check()
