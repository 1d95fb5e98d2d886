"""Wherever a revision is taken, a state is taken too, and means the same: every public function
and method is asked with both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import datastates
import datastates.api
import datastates.files.bundle
import datastates.files.importing
import datastates.ranks
import datastates.studies
from datastates import Config, Peer, Repository, State
from datastates.errors import InvalidInput
from datastates.ranks import SoloGroup
from datastates.studies import Plan, SerialExecutor, Variant

REVISIONS = {"rev", "revs", "start", "old", "new", "expected", "branches", "base", "good", "bad"}
"""What our functions call a revision, or several."""

OTHERS = {
    "Plan.config(base)": "the configuration that variants change",
    "Plan.digest(base)": "the same",
    "Processor.process(captured)": "a captured state, which we give",
    "Repository.rename(new)": "a name",
}
"""Parameters of such a name that are none, and what they are."""


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and method, by its qualified name."""
    packages = (
        datastates,
        datastates.studies,
        datastates.api,
        datastates.files.bundle,
        datastates.files.importing,
        datastates.ranks,
    )
    for package in packages:
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isfunction(found):
                yield name, found
            elif inspect.isclass(found):
                members = (
                    (member, vars(kind)) for kind in found.__mro__[::-1] for member in vars(kind)
                )
                yield from (
                    (f"{name}.{each}", of[each])
                    for each, of in members
                    if not each.startswith("_") and inspect.isfunction(of[each])
                )


def entries() -> Iterator[tuple[str, str]]:
    """Every public parameter that is a revision, ``Repository.log(rev)``, and its annotation."""
    for name, function in public():
        for each in inspect.signature(function).parameters.values():
            said = str(each.annotation).replace("StateFacts", "")
            if each.name in REVISIONS or "State" in said or "Revision" in said:
                yield f"{name}({each.name})", str(each.annotation)


ENTRIES = dict(entries())


TOKEN = "t" * 24


class Weight(nn.Module):
    """One number to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))


def train(job: Any) -> None:
    """A variant that learns nothing."""
    job.track(model=Weight())
    for _ in job.epochs():
        job.report(loss=1.0)


@dataclass
class World:
    """A repository that ``peer`` reaches, and another one that ``far`` reaches; ``fresh`` gives
    names that are free."""

    repo: Repository
    other: Repository
    peer: Peer
    far: Peer
    folder: Path
    names: Iterator[int] = field(default_factory=count)

    def fresh(self) -> str:
        return f"name-{next(self.names)}"

    def track(self, rev: Any) -> str:
        with self.repo.track(branch=self.fresh(), start=rev, model=Weight()) as run:
            assert run.resumed_from is not None
            return run.resumed_from.uid

    def restore(self, rev: Any) -> str:
        with self.repo.track(branch=self.fresh(), start="main", model=Weight()) as run:
            run.restore(rev)
            assert run.head is not None
            return run.head.uid

    def move(self, rev: Any, expected: Any) -> str:
        name = self.fresh()
        self.repo.branch(name, "main~2" if expected is None else expected)
        return self.repo.move(
            name,
            "main" if rev is None else rev,
            expected="main~2" if expected is None else expected,
        ).state

    def saved(self, rev: Any) -> list[str]:
        uid = datastates.save({"weight": torch.ones(4)}, self.fresh(), repo=self.repo, start=rev)
        return list(self.repo.state(uid).parents)

    def explored(self, rev: Any) -> str:
        plan = Plan((Variant("only", None, 1),), {}, ())
        return datastates.studies.explore(
            self.repo, rev, plan, train, SerialExecutor(), study=self.fresh(), progress=False
        ).start.uid

    def outliers(self, branches: Any) -> list[str]:
        found = datastates.studies.outliers(
            self.repo, branches, model=Weight(), loss=lambda model, indices: torch.arange(len(indices)), count=4, noise_rate=0.25,
            steps_per_epoch=1,
        )  # fmt: skip
        return [state.uid for source in found.sources for state in source.states]

    def ensemble(self, revs: Any) -> list[str]:
        class Called(Weight):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return inputs * self.weight

        return [state.uid for state in self.repo.ensemble(revs, Called()).members]


CALLS: dict[str, Callable[[World, Any], object]] = {
    "MPIGroup.broadcast(rev)": (
        lambda world, rev: SoloGroup().broadcast(world.repo, rev)
    ),  # it inherits that
    "Peer.begin_clone(rev)": (
        lambda world, rev: world.peer.begin_clone(rev, repo=world.other).wait().state.uid
    ),
    "Peer.begin_push(rev)": (
        lambda world, rev: world.far.begin_push(rev, repo=world.repo).wait().state.uid
    ),
    "Peer.clone(rev)": lambda world, rev: world.peer.clone(rev, model=Weight()).state.uid,
    "Peer.log(rev)": lambda world, rev: [state.uid for state in world.peer.log(rev)],
    "Peer.push(rev)": lambda world, rev: world.far.push(rev, repo=world.repo).state.uid,
    "Peer.state(rev)": lambda world, rev: world.peer.state(rev).uid,
    "Repository.ancestors(rev)": lambda world, rev: [
        state.uid for state in world.repo.ancestors(rev)
    ],
    "Repository.blame(rev)": lambda world, rev: [each.state.uid for each in world.repo.blame(rev)],
    "Repository.bisect(bad)": (
        lambda world, rev: world.repo.bisect("main~2", rev, lambda tree: None).bad.uid
    ),
    "Repository.bisect(good)": (
        lambda world, rev: world.repo.bisect(rev, "main", lambda tree: None).good.uid
    ),
    "Repository.annotate(rev)": (
        lambda world, rev: world.repo.annotate(rev, attributes={"seen": True}).uid
    ),
    "Repository.branch(rev)": lambda world, rev: world.repo.branch(world.fresh(), rev).state,
    "Repository.descendants(rev)": lambda world, rev: {
        state.uid for state in world.repo.descendants(rev) if state.step <= 3
    },
    "Repository.compare(revs)": lambda world, rev: [
        each.state.uid for each in world.repo.compare([rev, "main"])
    ],
    "Repository.copy(revs)": lambda world, rev: world.repo.copy(rev, to="folder").left,
    "Repository.diff(new)": lambda world, rev: world.repo.diff("main", rev).new.uid,
    "Repository.diff(old)": lambda world, rev: world.repo.diff(rev, "main").old.uid,
    "Repository.ensemble(revs)": lambda world, rev: world.ensemble([rev, "main"]),
    "Repository.graph(rev)": lambda world, rev: sorted(world.repo.graph(rev)),
    "Repository.load(rev)": lambda world, rev: world.repo.load(rev)["model"]["weight"].tolist(),
    "Repository.log(rev)": lambda world, rev: [state.uid for state in world.repo.log(rev)],
    "Repository.merge(revs)": lambda world, rev: world.repo.merge([rev, "main"]).parents,
    "Repository.move(expected)": lambda world, rev: world.move(None, rev),
    "Repository.move(rev)": lambda world, rev: world.move(rev, None),
    "Repository.restore(rev)": (
        lambda world, rev: world.repo.restore(rev, model=Weight()).restored
    ),
    "Repository.state(rev)": lambda world, rev: world.repo.state(rev).uid,
    "Repository.tag(rev)": lambda world, rev: world.repo.tag(world.fresh(), rev).state,
    "Repository.track(start)": World.track,
    "Repository.verify(rev)": lambda world, rev: world.repo.verify(rev).uid,
    "Repository.verify_merge(rev)": lambda world, rev: world.repo.verify_merge(rev).uid,
    "TorchGroup.broadcast(rev)": (
        lambda world, rev: SoloGroup().broadcast(world.repo, rev)
    ),  # it too
    "SoloGroup.broadcast(rev)": lambda world, rev: SoloGroup().broadcast(world.repo, rev),
    "Tracker.restore(rev)": World.restore,
    "explore(start)": World.explored,
    "export_bundle(revs)": lambda world, rev: (
        datastates.files.bundle.export_bundle(world.repo, [rev], world.folder / world.fresh())
        .states[0]
        .uid
    ),
    "export_files(revs)": lambda world, rev: (
        datastates.files.importing.export_files(world.repo, [rev], world.folder / world.fresh())[
            0
        ].state.uid
    ),
    "load(rev)": (
        lambda world, rev: datastates.load(rev, repo=world.repo)["model"]["weight"].tolist()
    ),
    "outliers(branches)": lambda world, rev: (world.outliers([rev]), world.outliers(rev)),
    "save(start)": World.saved,
    "prefix_epochs(rev)": lambda world, rev: datastates.studies.prefix_epochs(world.repo, rev),
}
"""One call for each of them, and what tells by the answer which state it was."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A branch ``main`` of three states, its mean with what it began from (``soup``), and
    everything that asks about them."""
    folder = tmp_path_factory.mktemp("revisions")
    torch.set_num_threads(1)
    with ExitStack() as stack:
        config = Config(memory_bytes=256 << 20, durable_every=1)
        shelf = replace(config, tiers=[f"file://{folder}/shelf"])
        repo, other = (
            stack.enter_context(datastates.open(folder / name, config=each))
            for name, each in (("repo", shelf), ("other", config))
        )
        model = Weight()
        with repo.track(branch="main", model=model) as run:
            for step in range(1, 4):
                model.weight.data.fill_(step)
                run.capture(metrics={"loss": 1 / step}, attributes={"epoch": step}).wait("durable")
        repo.merge(["main", "main~2"], into="soup")
        servers = [
            stack.enter_context(each.serve("tcp://127.0.0.1:0", token=TOKEN, is_writable=True))
            for each in (repo, other)
        ]
        near, far = (
            stack.enter_context(datastates.connect(server.url, token=TOKEN)) for server in servers
        )
        yield World(repo, other, near, far, folder)


def test_every_public_entry_that_takes_a_revision_is_asked_here() -> None:
    assert set(ENTRIES) - set(OTHERS) == set(CALLS), (
        "give each a call; one that means something else has a reason in OTHERS"
    )
    assert set(OTHERS) <= set(ENTRIES)


def test_every_public_entry_that_takes_a_revision_says_that_it_takes_states() -> None:
    assert [
        entry
        for entry, annotation in ENTRIES.items()
        if "str | State" not in annotation and "Revision" not in annotation and entry not in OTHERS
    ] == []


@pytest.mark.parametrize("entry", CALLS)
def test_a_state_means_what_its_revision_means(entry: str, world: World) -> None:
    rev = "soup" if "verify_merge" in entry else "main~1"
    state = world.repo.state(rev)
    assert isinstance(state, State)

    assert CALLS[entry](world, rev) == CALLS[entry](world, state) == CALLS[entry](world, state.uid)


def test_what_is_neither_is_refused_by_name(world: World) -> None:
    wrong: Any = 3
    broadcast = partial(SoloGroup().broadcast, world.repo)
    for call in (world.repo.log, world.peer.state, broadcast):
        with pytest.raises(InvalidInput, match="is 3: give a text such as 'main~3', or a state"):
            call(wrong)
