"""torch.distributed.checkpoint on a repository: what its own storage gives ours gives, and each
save is an ordinary state besides."""

from __future__ import annotations

import io
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import datastates
from datastates import Conflict, NotFound, Repository
from datastates.errors import Corrupt, InvalidInput, Unsupported
from datastates.integrations import saved as kept
from datastates.integrations.dcp import Reader, Writer
from tests.integrations.checkpoints import assert_same, build, saved

dcp: Any = torch.distributed.checkpoint  # type checkers are told that it exports nothing
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where repositories are opened by their addresses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATASTATES_MEMORY", "64M")
    yield tmp_path
    kept.close_unused()


def cause(error: CheckpointException) -> BaseException:
    """What torch wrapped."""
    return error.failures[0][0]


VALUES: dict[str, Any] = {
    "tensors": {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    },
    "types": {
        name: torch.ones(3).to(getattr(torch, name))
        for name in ("bfloat16", "float16", "float64", "int8", "complex64", "uint8")
    },
    "views": {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "strided": torch.arange(10.0)[::2],
        "spread": torch.ones(1).expand(4),
    },
    "numbers": {
        "i": 3,
        "f": 0.1,
        "none": None,
        "yes": True,
        "text": "é",
        "bytes": b"\0x",
        "big": 2**80,
        "c": 1j,
    },
    "containers": {
        "t": (1, (2, None)),
        "l": [1, 2, [3]],
        "set": {1, 2},
        "with tensors": (torch.ones(2), 1),
        "empty": [],
        "od": OrderedDict(a=1),
    },
    "lists": {"l": [torch.ones(2), {"k": torch.zeros(1), "v": 2}, [torch.ones(1), 5]]},
    "arrays": {
        "small": np.arange(3),
        "large": np.arange(20_000.0).reshape(2, -1),
        "scalar": np.float32(0.5),
    },
    "streams": {"s": io.BytesIO(b"some bytes"), "t": {"u": io.BytesIO(b"")}},
    "numbered": {0: {"x": torch.ones(1)}, 1: {"x": torch.zeros(1)}},
    "named oddly": {"a.b/c%": torch.ones(1), "": torch.zeros(1), "x\n": 1},
}


@pytest.mark.parametrize("is_flattened", [True, False])
def test_loads_what_torchs_own_storage_loads(
    is_flattened: bool, repo: Repository, tmp_path: Path
) -> None:
    state = {**VALUES, "stream": VALUES["streams"]["s"]}
    if not is_flattened:
        del state["streams"]  # in a container of which the plan sees nothing
    expected, found = _emptied(state), _emptied(state)
    dcp.save(
        state,
        checkpoint_id=tmp_path / "folder",
        planner=DefaultSavePlanner(flatten_state_dict=is_flattened),
    )
    dcp.save(
        state,
        storage_writer=Writer(repo),
        planner=DefaultSavePlanner(flatten_state_dict=is_flattened),
    )

    dcp.load(
        expected,
        checkpoint_id=tmp_path / "folder",
        planner=DefaultLoadPlanner(flatten_state_dict=is_flattened),
    )
    dcp.load(
        found,
        storage_reader=Reader(repo),
        planner=DefaultLoadPlanner(flatten_state_dict=is_flattened),
    )

    assert_same(found, expected)


def _emptied(tree: Any) -> Any:
    """The same names, and nothing of what stands there."""
    if isinstance(tree, dict):
        return {key: _emptied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_emptied(value) for value in tree]
    return torch.full_like(tree, 0).contiguous() if isinstance(tree, torch.Tensor) else None


def test_save_is_the_next_state_of_its_branch_under_the_models_names(
    repo: Repository, tmp_path: Path
) -> None:
    model, optimizer = build()
    weights, moments = get_state_dict(model, optimizer)
    for step in (5, 6):
        writer = Writer(repo, metrics={"loss": 1 / step}, message="saved", attributes={"seed": 0})
        metadata = dcp.save(
            {"model": weights, "optimizer": moments, "step": step}, storage_writer=writer
        )
        assert writer.state is not None
        assert metadata.storage_meta.save_id == writer.state.uid == repo.state("main").uid

    newest, first = repo.log("main")

    assert (newest.step, first.step, newest.status) == (6, 5, "durable")
    assert newest.parents == (first.uid,)
    assert newest.metrics == {"loss": 1 / 6}
    assert (newest.message, newest.attributes["seed"]) == ("saved", 0)
    assert repo.find("metrics.loss < 0.18")[0].uid == newest.uid
    tree = repo.load("main", only="model")
    assert list(tree["model"]) == list(model.state_dict())
    assert all(
        torch.equal(tensor, tree["model"][name]) for name, tensor in model.state_dict().items()
    )
    other, fresh = build(1, is_stepped=False)
    repo.restore("main", model=other, optimizer=fresh)
    assert_same(get_optimizer_state_dict(other, fresh), moments)
    assert {each.change for each in repo.diff("main~1", "main").tensors} == {"same"}
    assert newest.bytes_new == 0, "nothing changed but a number"


def test_state_of_a_tracker_is_loaded_like_any_other(repo: Repository) -> None:
    model, optimizer = build()
    with repo.track(model=model, optimizer=optimizer) as run:
        run.capture().wait("durable")
    other, fresh = build(1)
    weights, moments = get_state_dict(other, fresh)
    dcp.load({"model": weights, "optimizer": moments}, storage_reader=Reader(repo))
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=moments)

    assert_same(get_state_dict(other, fresh), get_state_dict(model, optimizer))


def test_weights_by_themselves_are_the_model(repo: Repository) -> None:
    model, _ = build()
    dcp.save(model.state_dict(), storage_writer=Writer(repo))
    other, _ = build(1)
    found = other.state_dict()
    dcp.load(found, storage_reader=Reader(repo))

    assert_same(dict(found), dict(model.state_dict()))
    assert list(repo.load("main")) == ["model"]
    assert repo.restore("main", model=build(2)[0]).restored


def test_tied_weights_are_stored_once_and_stay_tied(repo: Repository) -> None:
    table = torch.randn(64, 32)
    dcp.save({"model": {"embed": table, "head": table}}, storage_writer=Writer(repo))

    found = repo.load("main")["model"]

    assert repo.state("main").bytes_total < 2 * table.nbytes
    assert found["embed"] is found["head"]


def test_only_what_is_asked_for_is_loaded(repo: Repository) -> None:
    state = {"model": {"w": torch.ones(2), "b": torch.ones(1)}, "extra": 1}
    dcp.save(state, storage_writer=Writer(repo))
    found = {"model": {"w": torch.zeros(2)}}
    dcp.load(found, storage_reader=Reader(repo))

    assert_same(found, {"model": {"w": torch.ones(2)}})


def test_name_that_the_state_lacks_is_refused_unless_partial_loads_are_allowed(
    repo: Repository,
) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(repo))
    found = {"w": torch.zeros(2), "new": torch.zeros(3)}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: new"):
        dcp.load(found, storage_reader=Reader(repo))
    assert not found["w"].any()

    dcp.load(
        found, storage_reader=Reader(repo), planner=DefaultLoadPlanner(allow_partial_load=True)
    )

    assert_same(found, {"w": torch.ones(2), "new": torch.zeros(3)})


def test_tensor_of_another_size_is_refused(repo: Repository) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(repo))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=Reader(repo))


def test_tensor_of_another_type_is_converted_as_torchs_own_storage_does(
    repo: Repository, tmp_path: Path
) -> None:
    dcp.save({"w": torch.tensor([1.7, -2.2])}, storage_writer=Writer(repo))
    dcp.save({"w": torch.tensor([1.7, -2.2])}, checkpoint_id=tmp_path / "folder")
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        found, expected = {"w": torch.zeros(2, dtype=dtype)}, {"w": torch.zeros(2, dtype=dtype)}
        dcp.load(found, storage_reader=Reader(repo))
        dcp.load(expected, checkpoint_id=tmp_path / "folder")
        assert_same(found, expected)


class Counter:
    """An object that torch asks for its state, and gives it back."""

    def __init__(self, count: int) -> None:
        self.count, self.is_loaded = count, False

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.is_loaded = state["count"], True


def test_objects_with_a_state_are_loaded_in_place_and_all_else_is_replaced(
    repo: Repository,
) -> None:
    dcp.save({"counter": Counter(3), "list": [1, 2, 3], "none": {}}, storage_writer=Writer(repo))
    counter = Counter(0)
    found: dict[str, Any] = {"counter": counter, "list": None, "none": {}}
    dcp.load(found, storage_reader=Reader(repo))

    assert found["counter"] is counter
    assert (counter.count, counter.is_loaded, found["list"]) == (3, True, [1, 2, 3])


def test_nothing_at_all_is_saved_and_loaded(repo: Repository) -> None:
    dcp.save({}, storage_writer=Writer(repo))
    dcp.load({}, storage_reader=Reader(repo))

    assert repo.state("main").bytes_total == 0


def test_value_without_an_encoding_is_refused_by_its_name_and_nothing_is_saved(
    repo: Repository,
) -> None:
    with pytest.raises(CheckpointException, match=r"model\.thing|model/thing") as caught:
        dcp.save({"model": {"w": torch.ones(1), "thing": object()}}, storage_writer=Writer(repo))

    assert isinstance(cause(caught.value), Unsupported)
    assert repo.refs() == []
    dcp.save({"model": {"w": torch.ones(1)}}, storage_writer=Writer(repo))
    assert repo.state("main").step == 1


def test_unknown_revision_and_unknown_repository_are_said(repo: Repository, folder: Path) -> None:
    for reader in (Reader(repo, "nosuch"), Reader("elsewhere", "main"), Reader()):
        with pytest.raises(
            CheckpointException,
            match=r"no branch, tag or uid 'nosuch'|no repository in|no repository was named",
        ):
            dcp.load({"w": torch.ones(1)}, storage_reader=reader)
    assert not (folder / "elsewhere").exists()
    with pytest.raises(NotFound, match="nosuch"):
        Reader(repo, "nosuch").read_metadata()


def test_flipped_byte_is_found_and_nothing_is_written_to(repo: Repository, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4096)}, storage_writer=Writer(repo))
    dcp.save({"w": torch.full((4096,), 2.0)}, storage_writer=Writer(repo))
    uid, first = repo.state("main").uid, repo.state("main~1").uid
    repo.close()
    (pack,) = (tmp_path / "runs" / "packs").glob(f"{uid}*.safetensors")
    data = bytearray(pack.read_bytes())
    data[-100] ^= 1
    pack.write_bytes(data)

    with datastates.open(tmp_path / "runs") as again:
        found = {"w": torch.zeros(4096)}
        with pytest.raises(CheckpointException, match="damaged") as caught:
            dcp.load(found, storage_reader=Reader(again))

    found_out = cause(caught.value)
    assert isinstance(found_out, Corrupt)
    assert found_out.nearest == first
    assert not found["w"].any()


def test_torchs_own_storage_loads_a_flipped_byte_without_a_word(tmp_path: Path) -> None:
    """What the page says of it."""
    dcp.save({"w": torch.ones(4096)}, checkpoint_id=tmp_path / "folder")
    (file,) = (tmp_path / "folder").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.find(torch.ones(64).numpy().tobytes()) + 2] ^= 1
    file.write_bytes(data)
    found = {"w": torch.zeros(4096)}
    dcp.load(found, checkpoint_id=tmp_path / "folder")

    assert not torch.equal(found["w"], torch.ones(4096))
    assert (found["w"] == 1).sum() > 4000


def test_memory_is_the_callers_again_when_an_asynchronous_save_returns(repo: Repository) -> None:
    weights = torch.ones(1000)
    first = dcp.async_save({"w": weights, "step": 1}, storage_writer=Writer(repo))
    weights.fill_(2)
    assert isinstance(first, Future)
    uid = first.result().storage_meta.save_id
    second = dcp.async_save({"w": weights, "step": 2}, storage_writer=Writer(repo))
    weights.fill_(3)
    assert isinstance(second, Future)
    second.result()

    assert [state.step for state in repo.log("main")] == [2, 1]
    assert repo.state("main~1").uid == uid
    assert [int(saved(repo, rev)["w"][0]) for rev in ("main~1", "main")] == [1, 2]


def test_saves_of_several_threads_are_one_line(repo: Repository) -> None:
    futures = [
        dcp.async_save({"w": torch.full((10,), float(number))}, storage_writer=Writer(repo))
        for number in range(6)
    ]
    uids = {
        future.result().storage_meta.save_id for future in futures if isinstance(future, Future)
    }

    log = repo.log("main")
    assert {state.uid for state in log} == uids
    assert [state.step for state in log] == [6, 5, 4, 3, 2, 1]
    assert sorted(int(saved(repo, state)["w"][0]) for state in log) == list(range(6))


def test_checkpoint_id_is_a_tag_that_moves_to_the_newest_save_under_it(repo: Repository) -> None:
    for value in (1.0, 2.0):
        dcp.save(
            {"w": torch.full((2,), value)}, storage_writer=Writer(repo), checkpoint_id="step-7"
        )
    dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=Writer(repo))

    found = {"w": torch.zeros(2)}
    dcp.load(found, storage_reader=Reader(repo), checkpoint_id="step-7")
    assert found["w"][0] == 2
    dcp.load(found, storage_reader=Reader(repo), checkpoint_id="main~2")
    assert found["w"][0] == 1
    assert {ref.name: ref.kind for ref in repo.refs()} == {"main": "branch", "step-7": "tag"}
    assert [event.new for event in repo.reflog("step-7")] == [
        repo.state("main~1").uid,
        repo.state("main~2").uid,
    ]
    with pytest.raises(InvalidInput, match="cannot name"):
        dcp.save({"w": torch.ones(1)}, storage_writer=Writer(repo), checkpoint_id="two words")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.full((2,), 4.0)}, storage_writer=Writer(repo), checkpoint_id="main")
    assert isinstance(cause(caught.value), Conflict)
    assert (
        f"'main', which is a branch: the state was saved as {repo.state('main').uid[:10]}"
        in str(cause(caught.value))
    )
    assert saved(repo, repo.state("main"))["w"][0] == 4


def test_address_names_repository_and_branch_or_revision(folder: Path) -> None:
    dcp.save({"w": torch.full((2,), 1.0)}, storage_writer=Writer("runs", "study/a"))
    dcp.save(
        {"w": torch.full((2,), 2.0)},
        storage_writer=Writer(),
        checkpoint_id="datastates://runs/study/a",
    )
    dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=Writer("datastates://runs/study/a"))
    dcp.save({"w": torch.full((2,), 4.0)}, storage_writer=Writer("runs", "study/a"))

    found = {"w": torch.zeros(2)}
    for reader, checkpoint_id, expected in [
        (Reader(), "datastates://runs/study/a~2", 2),
        (Reader("datastates://runs/study/a~1"), None, 3),
        (Reader("runs", "study/a"), None, 4),
    ]:
        dcp.load(found, storage_reader=reader, checkpoint_id=checkpoint_id)
        assert found["w"][0] == expected
    assert Writer.validate_checkpoint_id("datastates://runs/main")
    assert not Reader.validate_checkpoint_id("/some/folder")


def test_address_beside_an_open_repository_is_refused(repo: Repository) -> None:
    with pytest.raises(InvalidInput, match="another repository"):
        dcp.save(
            {"w": torch.ones(1)},
            storage_writer=Writer(repo),
            checkpoint_id="datastates://runs/main",
        )


def test_new_branch_forks_from_where_it_is_said_to_start(repo: Repository) -> None:
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((2,), value)}, storage_writer=Writer(repo))
    dcp.save({"w": torch.full((2,), 5.0)}, storage_writer=Writer(repo, "fork", start="main~1"))

    assert repo.state("fork").parents == (repo.state("main~1").uid,)
    assert repo.state("fork").step == 2


def test_save_hangs_on_where_the_branch_stands_whoever_moved_it(
    repo: Repository, tmp_path: Path
) -> None:
    dcp.save({"w": torch.full((2,), 1.0)}, storage_writer=Writer(repo))
    with datastates.open(tmp_path / "runs") as other:
        dcp.save({"w": torch.full((2,), 2.0)}, storage_writer=Writer(other))
    dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=Writer(repo))
    repo.move("main", "main~2", expected="main")
    dcp.save({"w": torch.full((2,), 4.0)}, storage_writer=Writer(repo))
    repo.delete_ref("main")
    dcp.save({"w": torch.full((2,), 5.0)}, storage_writer=Writer(repo, "side"))

    assert [int(saved(repo, state)["w"][0]) for state in repo.log("side")] == [5]
    assert sorted(
        (state.step, int(saved(repo, state)["w"][0])) for state in repo.find("step >= 0")
    ) == [
        (1, 1),
        (1, 5),
        (2, 2),
        (2, 4),
        (3, 3),
    ]


def test_what_was_saved_is_kept_nowhere_but_in_the_repository(repo: Repository) -> None:
    weights = torch.ones(1000)
    gone = weakref.ref(weights)
    dcp.save({"w": weights}, storage_writer=Writer(repo))
    del weights

    assert gone() is None


def test_captured_is_enough_if_it_is_said(repo: Repository) -> None:
    writer = Writer(repo, until="captured")
    dcp.save({"w": torch.ones(2)}, storage_writer=writer)

    assert writer.state is not None
    assert repo.state("main").status in ("captured", "durable")
    with pytest.raises(InvalidInput, match="until"):
        Writer(repo, until="soon")


class HalfPlanner(DefaultSavePlanner):
    """Saves tensors as halves."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found = super().resolve_data(write_item)
        return found.half() if isinstance(found, torch.Tensor) else found


class OddPlanner(DefaultSavePlanner):
    """Writes values in its own way."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return (
            io.BytesIO(pickle.dumps(object)) if write_item.type is WriteItemType.BYTE_IO else object
        )


class RenamingPlanner(DefaultLoadPlanner):
    """Loads what was called otherwise."""

    def create_local_plan(self) -> LoadPlan:
        self.state_dict = {f"old.{name}": value for name, value in self.state_dict.items()}
        self.mappings = {f"old.{name}": path for name, path in self.mappings.items()}
        return super().create_local_plan()


def test_what_a_planner_makes_of_tensors_is_what_is_saved(repo: Repository) -> None:
    dcp.save(
        {"w": torch.full((2,), 0.1), "n": (1, "x")},
        storage_writer=Writer(repo),
        planner=HalfPlanner(),
    )

    assert_same(saved(repo), {"w": torch.full((2,), 0.1).half(), "n": (1, "x")})


def test_values_that_a_planner_writes_in_its_own_way_are_refused(repo: Repository) -> None:
    with pytest.raises(CheckpointException, match="n: OddPlanner writes it"):
        dcp.save({"w": torch.ones(2), "n": {1}}, storage_writer=Writer(repo), planner=OddPlanner())
    assert repo.refs() == []


def test_planner_that_renames_loads_what_was_called_otherwise(repo: Repository) -> None:
    dcp.save({"old": {"w": torch.ones(2), "n": 3}}, storage_writer=Writer(repo))
    found: dict[str, Any] = {"w": torch.zeros(2), "n": 0}
    dcp.load(found, storage_reader=Reader(repo), planner=RenamingPlanner())

    assert_same(found, {"w": torch.ones(2), "n": 3})


class SlicingPlanner(DefaultLoadPlanner):
    """Loads the middle of a tensor, as a rank that has only a part of it does."""

    def create_local_plan(self) -> LoadPlan:
        here = MetadataIndex("w", [0, 0])
        return LoadPlan(
            [
                ReadItem(
                    LoadItemType.TENSOR,
                    here,
                    torch.Size([1, 0]),
                    here,
                    torch.Size([2, 3]),
                    torch.Size([2, 4]),
                )
            ]
        )


def test_part_of_a_tensor_is_loaded_into_a_part_of_another(repo: Repository) -> None:
    saved = torch.arange(64.0).view(8, 8)
    dcp.save({"w": saved}, storage_writer=Writer(repo))
    found = {"w": torch.zeros(3, 4)}
    dcp.load(found, storage_reader=Reader(repo), planner=SlicingPlanner())

    assert torch.equal(found["w"], torch.cat([torch.zeros(1, 4), saved[2:4, 3:7]]))


def test_plans_that_are_cached_are_saved_like_others(repo: Repository) -> None:
    weights = torch.ones(3)
    for value in (1.0, 2.0, 3.0):
        weights.fill_(value)
        dcp.save(
            {"w": weights, "n": value},
            storage_writer=Writer(repo),
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )

    assert [
        (int(saved(repo, state)["w"][0]), saved(repo, state)["n"]) for state in repo.log("main")
    ] == [(3, 3.0), (2, 2.0), (1, 1.0)]


def test_states_of_several_ranks_and_shards_are_refused(repo: Repository) -> None:
    writer = Writer(repo)
    with pytest.raises(Unsupported, match="2 ranks save together"):
        writer.prepare_global_plan([SavePlan([]), SavePlan([])])
    half: Any = TensorWriteData(
        ChunkStorageMetadata(torch.Size([0]), torch.Size([2])), TensorProperties(), torch.Size([4])
    )
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=True)
    with pytest.raises(Unsupported, match="w is a shard"):
        writer.write_data(
            SavePlan([WriteItem(MetadataIndex("w"), WriteItemType.SHARD, half)]), planner
        )


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    group: Any = dist
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_group_of_one_process_saves_and_loads_whole_tensors_that_are_distributed(
    alone: None, repo: Repository
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    whole = torch.arange(12.0).view(4, 3)
    dcp.save(
        {"w": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole, "n": 1},
        storage_writer=Writer(repo),
    )
    found: dict[str, Any] = {
        "w": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]),
        "plain": torch.zeros(4, 3),
        "n": 0,
    }
    dcp.load(found, storage_reader=Reader(repo))

    assert torch.equal(found["w"].full_tensor(), whole)
    assert torch.equal(found["plain"], whole)
    assert torch.equal(repo.load("main")["w"], whole)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"thing": object()}, storage_writer=Writer(repo))
    assert isinstance(cause(caught.value), Unsupported)


def test_open_repository_does_not_go_to_another_process_and_an_address_does(
    repo: Repository,
) -> None:
    with pytest.raises(Unsupported, match="name its folder"):
        pickle.dumps(Writer(repo))
    again = pickle.loads(pickle.dumps(Writer("runs", "side", step=3)))
    assert isinstance(again, Writer)


def test_loading_waits_for_the_copy_of_a_capture(repo: Repository) -> None:
    """A tracker's copy reads what a load writes to."""
    model, optimizer = build()
    with repo.track(model=model, optimizer=optimizer) as run:
        run.capture().wait()
        torch.manual_seed(9)
        changed = {
            name: torch.randn_like(value) if value.is_floating_point() else value
            for name, value in model.state_dict().items()
        }
        dcp.save({"model": changed}, storage_writer=Writer(repo, "other"))
        taken = run.capture()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        dcp.load({"model": model.state_dict()}, storage_reader=Reader(repo, "other"))
        assert_same(dict(repo.load(taken.wait("durable"), only="model")["model"]), before)
    assert threading.current_thread() is threading.main_thread()
