"""What the ranks of a job put onto a tier of the user's that they share, and what comes back
from it alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

import datastates
from datastates import Config, State, Status, Unavailable
from datastates.engine.copies import Copies, CopyContext
from datastates.engine.handle import Progress
from datastates.errors import DatastatesError
from datastates.lineage import Database
from datastates.lineage.query.names import replicas_of
from datastates.ranks import SoloGroup
from datastates.storage import KeyedTier, Tier
from datastates.storage.local import LocalTier
from tests.storage.test_tiers import Archive
from tests.support.jobs import Say, run
from tests.support.sharding import deposit, sharded, shares_of

HERE = "tests.ranks.test_further_tiers"


class Shelf(KeyedTier):
    """Objects in a folder, which processes share."""

    name = "shelf"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def read(self, key: str) -> bytes:
        try:
            return (self.folder / key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def write(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        new.write_bytes(data)
        new.rename(path)

    def keys(self, prefix: str) -> list[str]:
        found = (
            path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".new"
        )
        return [
            key
            for path in found
            if (key := path.relative_to(self.folder).as_posix()).startswith(prefix)
        ]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(70_000, generator=made) for name in ("model/a", "model/b", "model/c")}


def own(rank: int) -> torch.Tensor:
    return torch.full((5,), float(rank + 1))


def capture(folder: str, say: Say) -> None:
    """Capture once, and wait until all of it is on the shelf."""
    import torch.distributed as dist

    rank = dist.get_rank()
    with datastates.open(folder, config=Config(tiers=[Shelf(Path(folder) / "shelf")])) as repo:
        with repo.track(objects={**tensors(7), "mine": own(rank)}, own=("mine",)) as training:
            state = training.capture().wait("external", 30)
        with repo.core.reading() as session:
            held = sorted((one.tier, one.rank) for one in replicas_of(session, state.uid))
        say(state.status, *(f"{tier}:{of}" for tier, of in held if tier == "shelf"))


def restore(folder: str, say: Say) -> None:
    """Go on from the shelf: there is nothing else."""
    import torch.distributed as dist

    rank = dist.get_rank()
    live, mine = (
        {name: torch.zeros_like(tensor) for name, tensor in tensors(7).items()},
        torch.zeros(5),
    )
    with datastates.open(folder, config=Config(tiers=[Shelf(Path(folder) / "shelf")])) as repo:
        repo.track(objects={**live, "mine": mine}, own=("mine",)).close()
    say(
        all(torch.equal(live[name], tensor) for name, tensor in tensors(7).items()),
        torch.equal(mine, own(rank)),
    )


def track(folder: str, say: Say) -> None:
    """Track with a tier that holds no parts."""
    with datastates.open(folder, config=Config(tiers=[Archive()])) as repo:
        try:
            repo.track(objects=tensors(7)).close()
        except DatastatesError as exc:
            say(type(exc).__name__, exc)


def test_a_shared_tier_gets_the_parts_of_all_ranks_and_gives_them_back_alone(
    tmp_path: Path,
) -> None:
    said = run(2, f"{HERE}:capture", folder=str(tmp_path))
    assert [lines[0].split()[0] for lines in said] == ["external"] * 2, (
        "each waited until the parts of both were there"
    )
    assert any(lines[0].endswith("shelf:0 shelf:1") for lines in said)
    shutil.rmtree(tmp_path / "packs")
    assert run(2, f"{HERE}:restore", folder=str(tmp_path)) == [["True True"]] * 2
    with datastates.open(tmp_path, config=Config(tiers=[Shelf(tmp_path / "shelf")])) as repo:
        assert repo.state("main").status is Status.EXTERNAL
        found = repo.load("main")
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors(7).items())
        live = {name: torch.zeros_like(tensor) for name, tensor in tensors(7).items()}
        repo.track(
            objects={**live, "mine": torch.zeros(5)}, own=("mine",), group=SoloGroup()
        ).close()
        assert all(torch.equal(live[name], tensor) for name, tensor in tensors(7).items())


def test_a_tier_that_holds_no_parts_is_refused_where_there_are_ranks(tmp_path: Path) -> None:
    for lines in run(2, f"{HERE}:track", folder=str(tmp_path)):
        assert lines[0].startswith("Unsupported")
        assert (
            "the archive tier holds states of one process, and this training has 2 ranks: open the"
            " repository without" in lines[0]
        )


class Waiting(Progress):
    """The progress of a state that is still to reach a further tier."""

    def __init__(self, state: State) -> None:
        super().__init__(state.uid)
        self.state = state

    def hold_up(self, why: Unavailable) -> None:
        raise AssertionError("the tier is never away") from why

    @property
    def status(self) -> Status | None:
        return None if self.state is None else self.state.status


class Deposited:
    """A durable state of two parts, and copies of it that each rank makes."""

    def __init__(self, folder: Path) -> None:
        tree = {"a": torch.randn(40, 30), "b": torch.arange(90)}
        self.parts = sharded("5" * 24, tree, shares_of(tree, 2), count=2)
        self.state = deposit(folder, self.parts, branch="main")
        self.local, self.database = (
            LocalTier(folder / "packs"),
            Database(f"sqlite:///{folder / 'lineage.db'}"),
        )

    def copies(self, tier: Tier, patience_s: float = 60) -> Copies:
        context = CopyContext(self.local, self.database, lambda: None, patience_s)
        return Copies(context, [tier])

    @property
    def held(self) -> list[tuple[str, int]]:
        with self.database.read() as session:
            return sorted(
                (one.tier, one.rank)
                for one in replicas_of(session, self.state.uid)
                if one.tier != "local"
            )


@pytest.fixture
def deposited(tmp_path: Path) -> Iterator[Deposited]:
    made = Deposited(tmp_path)
    with closing(made.local), closing(made.database):
        yield made


def test_a_rank_hears_of_the_last_part(deposited: Deposited, tmp_path: Path) -> None:
    each = [deposited.copies(Shelf(tmp_path / "shelf")) for _ in range(2)]
    waiting = [Waiting(deposited.state) for _ in range(2)]
    for rank, (copies, one) in enumerate(zip(each, waiting, strict=True)):
        assert (waiting[0].status, deposited.held) == (Status.DURABLE, [("shelf", 0)][:rank])
        copies.put(deposited.state.uid, (rank,), one)
        # bound now
        assert one.changed.wait_for(lambda rank=rank: len(deposited.held) > rank, 30)  # type: ignore[misc]
    for one in waiting:
        # bound now
        assert one.changed.wait_for(lambda one=one: one.status is Status.EXTERNAL, 30)  # type: ignore[misc]
    assert deposited.held == [("shelf", 0), ("shelf", 1)]
    for copies in each:
        copies.close()
        copies.join()
        assert copies.awaited_by(deposited.state.uid) is None


def test_a_rank_waits_for_the_others_as_long_as_the_group_is_patient(
    deposited: Deposited, tmp_path: Path
) -> None:
    copies, waiting = (
        deposited.copies(Shelf(tmp_path / "shelf"), patience_s=0.1),
        Waiting(deposited.state),
    )
    copies.put(deposited.state.uid, (0,), waiting)
    assert waiting.changed.wait_for(lambda: bool(waiting.given_up), 30)
    assert "parts of other ranks are not on the shelf tier after" in (waiting.given_up or "")
    copies.close()
    copies.join()
    assert (copies.awaited_by(deposited.state.uid), deposited.held) == (None, [("shelf", 0)])


def test_a_rank_that_closes_before_the_others_have_put_their_parts_says_so(
    deposited: Deposited, tmp_path: Path
) -> None:
    copies, waiting = deposited.copies(Shelf(tmp_path / "shelf")), Waiting(deposited.state)
    copies.put(deposited.state.uid, (1,), waiting)
    copies.close()
    copies.join()
    assert "not all of its parts were on the shelf tier" in (waiting.given_up or "")
    assert deposited.held == [("shelf", 1)]


def test_a_state_that_came_with_all_its_parts_is_put_whole_or_refused(
    deposited: Deposited, tmp_path: Path
) -> None:
    shelf, archive = Shelf(tmp_path / "shelf"), Archive()
    for tier, status in ((archive, Status.DURABLE), (shelf, Status.EXTERNAL)):
        copies, waiting = deposited.copies(tier), Waiting(deposited.state)
        copies.put(deposited.state.uid, (0, 1), waiting)
        copies.close()
        copies.join()
        assert waiting.status is status
        assert (
            "it has 2 parts, and that tier holds states of one" in (waiting.given_up or "")
        ) == (tier is archive)
    assert deposited.held == [("shelf", 0), ("shelf", 1)]
    assert list(archive.uids()) == []
    for rank, part in enumerate(deposited.parts):
        with shelf.open_part(deposited.state.uid, rank) as reader:
            assert reader.manifest.digest == part.manifest.digest
            reader.verify()
