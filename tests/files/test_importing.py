"""Folders of checkpoint files become branches of states, and come out again as they were."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import datastates
from datastates import Conflict, DatastatesError, NotFound, Repository
from datastates.errors import InvalidInput, Unsupported
from datastates.files.checkpoints import Format, write
from datastates.files.importing import export_files, find_files, import_files

PATTERN = "step_{step}.pt"


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path / "runs", memory_bytes=64 << 20) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoints"
    made.mkdir()
    return made


def are_equal(one: Any, other: Any) -> bool:
    """The same containers, keys in the same order, values and bits of tensors."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


def trained(folder: Path, count: int) -> list[dict[str, Any]]:
    """Files of a training as scripts write them: a model, an optimizer and numbers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    made = []
    for step in range(count):
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
        made.append(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": step // 10,
                "best": 0.5,
            }
        )
        torch.save(made[-1], folder / f"step_{step * 100}.pt")
        made[-1] = torch.load(folder / f"step_{step * 100}.pt", weights_only=True)
    return made


def test_fifty_files_are_imported_browsed_forked_and_exported_again(
    repo: Repository, folder: Path, tmp_path: Path
) -> None:
    made = trained(folder, 50)
    told: list[tuple[int, int]] = []

    done = import_files(
        repo,
        folder,
        PATTERN,
        branch="old",
        on_progress=lambda count, total: told.append((count, total)),
    )

    assert [state.step for state in done.states] == [step * 100 for step in range(50)]
    assert told[-1] == (50, 50)
    line = repo.log("old")
    assert [state.uid for state in line] == [state.uid for state in done.states][::-1], (
        "one after the other"
    )
    assert repo.find("branch = old and step = 4800")[0].attributes["import.file"] == "step_4800.pt"
    model = torch.nn.Linear(6, 4)
    with repo.track(branch="fork", start="old~10", only="model", model=model) as run:
        assert torch.equal(model.weight, made[39]["model"]["weight"])
        run.capture().wait("durable")

    written = export_files(repo, list(line), tmp_path / "again", pattern=PATTERN)

    assert len(written) == 50
    for step, tree in enumerate(made):
        again = torch.load(tmp_path / "again" / f"step_{step * 100}.pt", weights_only=True)
        assert are_equal(again, tree), f"step {step}"
    assert os.path.getsize(tmp_path / "again" / "step_100.pt") < 2 * os.path.getsize(
        folder / "step_100.pt"
    )


def test_an_import_goes_on_where_it_was_broken_off(repo: Repository, folder: Path) -> None:
    trained(folder, 6)
    bad = folder / "step_300.pt"
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match=r"step_300\.pt cannot be read"):
        import_files(repo, folder, PATTERN)
    assert repo.state("imported").step == 200

    bad.write_bytes(whole)
    dry = import_files(repo, folder, PATTERN, dry_run=True)
    assert [source.step for source in dry.waiting] == [300, 400, 500]
    assert [source.step for source in dry.known] == [0, 100, 200]
    done = import_files(repo, folder, PATTERN)
    assert [state.step for state in done.states] == [300, 400, 500]
    assert len(repo.log("imported")) == 6
    assert import_files(repo, folder, PATTERN).states == ()


def test_a_bad_file_is_left_out_only_when_that_is_asked(repo: Repository, folder: Path) -> None:
    trained(folder, 3)
    torch.save({"model": Path("anything")}, folder / "step_100.pt")
    with pytest.raises(
        Unsupported,
        match=(
            r"step_100\.pt holds objects that torch\.load\(weights_only=True\) refuses.*save its"
            r" state_dicts"
        ),
    ):
        import_files(repo, folder, PATTERN)
    done = import_files(repo, folder, PATTERN, skip_bad=True)
    assert [state.step for state in repo.log("imported")] == [200, 0]
    assert list(done.refused) == ["step_100.pt"]


def test_a_folder_that_is_no_checkpoint_is_left_out_like_a_bad_file(
    repo: Repository, folder: Path
) -> None:
    for step in (1, 2, 3):
        (folder / f"checkpoint-{step}").mkdir()
    for step in (1, 3):
        save_file({"w": torch.ones(1)}, folder / f"checkpoint-{step}" / "model.safetensors")
    with pytest.raises(InvalidInput, match="checkpoint-2 is a folder without safetensors files"):
        import_files(repo, folder, "checkpoint-{step}")
    dry = import_files(repo, folder, "checkpoint-{step}", skip_bad=True, dry_run=True)
    done = import_files(repo, folder, "checkpoint-{step}", skip_bad=True)
    assert (
        [source.step for source in dry.waiting] == [state.step for state in done.states] == [1, 3]
    )
    assert list(dry.refused) == list(done.refused) == ["checkpoint-2"]


class Evil:
    """Unpickled, it runs something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("where", ["torch", "dcp-metadata", "dcp-value"])
def test_nothing_that_a_file_says_is_executed(
    repo: Repository, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if where == "torch":
        torch.save({"x": Evil()}, folder / "step_1.pt")
    else:
        save(folder / "step_1.pt", {"w": torch.ones(2), "x": Evil() if where == "dcp-value" else 3})
    if where == "dcp-metadata":
        (folder / "step_1.pt" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InvalidInput):
        import_files(repo, folder, PATTERN)
    assert not Path("executed").exists()
    assert repo.refs() == []


def save(path: Path, tree: dict[str, Any]) -> None:
    """A folder of torch.distributed.checkpoint, from one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save_dcp(tree, checkpoint_id=path, no_dist=True)


def test_tensors_alone_stand_under_one_name_and_come_out_without_it(
    repo: Repository, folder: Path, tmp_path: Path
) -> None:
    weights = {
        "a.weight": torch.randn(3, 2),
        "a/b": torch.arange(4).to(torch.bfloat16),
        "half": torch.randn(2).half(),
    }
    for step in (1, 2):
        save_file(weights | {"half": weights["half"] + step}, folder / f"model-{step}.safetensors")
    import_files(repo, folder, "model-{step}.safetensors")
    assert set(repo.load("imported")["model"]) == set(weights)

    export_files(
        repo,
        ["imported~1", "imported"],
        tmp_path / "st",
        format="safetensors",
        pattern="model-{step}.safetensors",
    )
    export_files(repo, ["imported"], tmp_path / "pt")
    again = load_file(tmp_path / "st" / "model-2.safetensors")
    assert are_equal(
        dict(sorted(again.items())), dict(sorted(load_file(folder / "model-2.safetensors").items()))
    )
    assert set(torch.load(tmp_path / "pt" / "step_2.pt", weights_only=True)) == set(weights)


def test_names_that_a_file_has_itself_are_kept(
    repo: Repository, folder: Path, tmp_path: Path
) -> None:
    trees: list[dict[str, Any]] = [
        {"state_dict": {"w": torch.ones(2)}},
        {"model": {"w": torch.ones(2)}},
        {"checkpoint": [torch.ones(2)]},
        {"model": {"w": torch.ones(2)}, "epoch": 3},
    ]
    for step, tree in enumerate(trees):
        torch.save(tree, folder / f"step_{step}.pt")
    states = import_files(repo, folder, PATTERN).states
    assert all("import.wrapped" not in state.attributes for state in states)
    for written, tree in zip(export_files(repo, states, tmp_path / "again"), trees, strict=True):
        assert are_equal(torch.load(written.path, weights_only=True), tree)


def test_a_folder_of_hugging_face_comes_in_by_its_index_and_goes_out_as_one(
    repo: Repository, folder: Path, tmp_path: Path
) -> None:
    one, other = {"a": torch.randn(2)}, {"b": torch.randn(3)}
    root = folder / "checkpoint-7"
    root.mkdir()
    save_file(one, root / "model-00001-of-00002.safetensors")
    save_file(other, root / "model-00002-of-00002.safetensors")
    names = (
        '{"weight_map": {"b": "model-00002-of-00002.safetensors", "a":'
        ' "model-00001-of-00002.safetensors"}}'
    )
    (root / "model.safetensors.index.json").write_text(names)
    (root / "config.json").write_text('{"hidden": 2}')

    import_files(repo, folder, "checkpoint-{step}")
    (written,) = export_files(
        repo, ["imported"], tmp_path / "hf", format="hf", pattern="checkpoint-{step}"
    )

    assert repo.state("imported").attributes["import.format"] == "hf"
    assert (written.path / "config.json").read_text() == '{"hidden": 2}'
    assert are_equal(
        load_file(written.path / "model.safetensors"), {"a": one["a"], "b": other["b"]}
    )


def test_a_folder_of_dcp_comes_in_and_goes_out(
    repo: Repository, folder: Path, tmp_path: Path
) -> None:
    tree = {"model": {"w": torch.randn(3, 4), "n": torch.arange(3)}, "step": 3, "names": ["a", "b"]}
    save(folder / "step_3", tree)
    import_files(repo, folder, "step_{step}")
    assert are_equal(repo.load("imported"), tree)
    (written,) = export_files(repo, ["imported"], tmp_path / "out", format="dcp")
    import_files(repo, written.path.parent, "step_{step}", branch="again")
    assert are_equal(repo.load("again"), tree)


def test_files_whose_parts_change_are_one_branch(repo: Repository, folder: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, folder / "step_1.pt")
    torch.save(
        {"model": {"w": torch.ones(3)}, "ema": {"w": torch.ones(2)}, "rate": 0.1},
        folder / "step_2.pt",
    )
    torch.save([torch.ones(2), 3], folder / "step_3.pt")
    torch.save({"rng": torch.ones(2), "w": 3}, folder / "step_4.pt")
    done = import_files(repo, folder, PATTERN)
    assert [state.uid for state in repo.log("imported")][::-1] == [
        state.uid for state in done.states
    ]
    assert are_equal(repo.load("imported~2")["ema"], {"w": torch.ones(2)})
    assert are_equal(repo.load("imported~1")["checkpoint"], [torch.ones(2), 3])
    assert are_equal(repo.load("imported")["checkpoint"], {"rng": torch.ones(2), "w": 3})


@pytest.mark.parametrize("pattern", ["*{step}.pt", "ckpt_{step}*", "*/ckpt{step}*.pt"])
def test_a_pattern_that_leaves_open_which_digits_are_the_step_is_refused(
    folder: Path, pattern: str
) -> None:
    torch.save({"w": torch.ones(1)}, folder / "ckpt_1500.pt")
    with pytest.raises(InvalidInput, match="leaves open which digits are the step"):
        find_files(folder, pattern)


def test_only_the_star_and_the_step_of_a_pattern_stand_for_something_else(folder: Path) -> None:
    for name in ("run[1]_5.pt", "run1_6.pt", "run2?_7.pt", "run22_8.pt"):
        torch.save({"w": torch.ones(1)}, folder / name)
    assert [source.step for source in find_files(folder, "run[1]_{step}.pt")] == [5]
    assert [source.step for source in find_files(folder, "run2?_{step}.pt")] == [7]
    for pattern in ("run*_{step}.pt", "r**_{step}.pt", "**_{step}.pt"):
        assert [source.step for source in find_files(folder, pattern)] == [5, 6, 7, 8]


def test_what_makes_no_sense_is_refused(repo: Repository, folder: Path) -> None:
    trained(folder, 2)
    with pytest.raises(InvalidInput, match=r"with \{step\} once"):
        find_files(folder, "*.pt")
    with pytest.raises(NotFound, match="give another pattern"):
        find_files(folder, "epoch_{step}.pt")
    (folder / "step_000.pt").write_bytes(b"")
    with pytest.raises(InvalidInput, match="both of step 0"):
        find_files(folder, PATTERN)
    (folder / "step_000.pt").unlink()
    with repo.track(branch="mine", rng=False, w=torch.ones(1)) as run:
        run.capture().wait()
    with pytest.raises(Conflict, match="was not imported"):
        import_files(repo, folder, PATTERN, branch="mine")
    import_files(repo, folder, PATTERN)
    torch.save({"w": torch.ones(1)}, folder / "step_50.pt")
    with pytest.raises(Conflict, match="is not beyond step 100"):
        import_files(repo, folder, PATTERN)
    with pytest.raises(InvalidInput, match=r"\{uid\}"):
        export_files(repo, ["imported", "imported~1"], folder / "out", pattern="one.pt")
    export_files(repo, ["imported"], folder / "out")
    with pytest.raises(Conflict, match="already"):
        export_files(repo, ["imported"], folder / "out")


@pytest.mark.parametrize(
    "parameter",
    ["repository", "folder", "pattern", "branch", "skip_bad", "dry_run", "revs", "format"],
)
def test_a_wrong_argument_is_refused_by_an_error_of_ours(
    repo: Repository, folder: Path, parameter: str
) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, folder / "step_1.pt")
    import_files(repo, folder, PATTERN)
    importing: dict[str, Any] = {
        "repository": repo,
        "folder": folder,
        "pattern": PATTERN,
        "branch": "imported",
        "skip_bad": False,
    }
    exporting: dict[str, Any] = {
        "repository": repo,
        "revs": ["imported"],
        "folder": folder / "out",
        "format": "torch",
    }
    wrongs: list[Any] = [
        None,
        True,
        3,
        0.5,
        b"x",
        [1],
        {"x": 1},
        object(),
        Path,
        torch.ones(2),
        "nul \0",
        "half \ud800",
    ]
    allowed = {"skip_bad": (True,), "dry_run": (True,), "folder": (b"x",)}.get(parameter, ())
    for call, arguments in (
        (import_files, importing | {"dry_run": True}),
        (export_files, exporting),
    ):
        for wrong in wrongs if parameter in arguments else ():
            if any(type(wrong) is type(each) and wrong == each for each in allowed):
                continue
            with pytest.raises(DatastatesError):
                call(**{**arguments, parameter: wrong})


# --- folders of strangers -------------------------------------------------------------------------


def hugging_face(folder: Path) -> Path:
    """A folder that is a checkpoint of Hugging Face."""
    made = folder / "checkpoint-1"
    made.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, made / "model.safetensors")
    (made / "tokenizer.json").write_text("{}")
    return made


def refused(repo: Repository, folder: Path, pattern: str = "checkpoint-{step}") -> str:
    """Why the only checkpoint of a folder is refused; nothing is made of it."""
    done = import_files(repo, folder, pattern, skip_bad=True)
    assert done.states == ()
    (why,) = done.refused.values()
    return why


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "zeros", "folder"])
def test_only_regular_files_of_the_folder_are_read(
    repo: Repository, folder: Path, name: str, kind: str, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    (hugging_face(folder) / name).rename(private)
    found = folder / "checkpoint-1" / name
    if kind == "pipe":
        os.mkfifo(found)
    elif kind == "folder":
        (folder / "checkpoint-1" / name).mkdir()
    else:
        found.symlink_to(private if kind == "link" else "/dev/zero")
    if kind == "folder":
        assert "cannot be read" in refused(repo, folder)
    else:
        assert f"{name} is no regular file of its folder: put a copy in its place" in refused(
            repo, folder
        )


@pytest.mark.parametrize("kind", ["file", "pipe", "folder", "folder of the pattern"])
def test_a_checkpoint_that_is_a_link_to_elsewhere_is_refused(
    repo: Repository, folder: Path, kind: str, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    pattern = "step_{step}.pt"
    if kind == "pipe":
        os.mkfifo(folder / "step_1.pt")
        assert "is no regular file" in refused(repo, folder, pattern)
        return
    if kind == "file":
        torch.save({"w": torch.ones(1)}, elsewhere)
        (folder / "step_1.pt").symlink_to(elsewhere)
    elif kind == "folder":
        hugging_face(elsewhere)
        (folder / "checkpoint-1").symlink_to(elsewhere / "checkpoint-1")
        pattern = "checkpoint-{step}"
    else:
        elsewhere.mkdir()
        torch.save({"w": torch.ones(1)}, elsewhere / "step_1.pt")
        (folder / "run").symlink_to(elsewhere)
        pattern = "run/step_{step}.pt"
    assert f"outside of {folder}: put a copy in its place" in refused(repo, folder, pattern)


def test_a_link_within_the_folder_is_followed(repo: Repository, folder: Path) -> None:
    made = hugging_face(folder)
    (made / "vocab.json").symlink_to("tokenizer.json")
    (made / "latest.log").symlink_to("/dev/null")
    (state,) = import_files(repo, folder, "checkpoint-{step}").states
    assert repo.load(state)["files"] == {"tokenizer.json": "{}", "vocab.json": "{}"}


def test_a_text_that_is_too_long_is_refused_unread(
    repo: Repository, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (hugging_face(folder) / "tokenizer.json").open("r+b") as out:
        out.truncate(1 << 40)
    assert "tokenizer.json has 1099511627776 bytes, and at most 268435456" in refused(repo, folder)


def bombs() -> dict[str, object]:
    """Objects that a small file holds, and that are many if each is counted as often as it is
    used."""
    found: dict[str, Any] = {
        "dicts": {"w": torch.ones(1)},
        "lists": 1,
        "tuples": (1, "a"),
        "counters": {1: 2},
        "metadata": 1,
    }
    for _ in range(40):
        found["dicts"] = {"a": found["dicts"], "b": found["dicts"]}
        found["lists"] = [found["lists"]] * 2
        found["tuples"] = (found["tuples"],) * 2
        found["counters"] = Counter({"a": found["counters"], "b": found["counters"]})
        ordered = OrderedDict(w=torch.ones(1))
        # as nn.Module sets it
        ordered._metadata = {"a": found["metadata"], "b": found["metadata"]}  # type: ignore[attr-defined]
        found["metadata"] = ordered
    found["views"] = torch.ones(100_000).as_strided((50_000, 50_000), (1, 1))
    return found


@pytest.mark.parametrize("kind", list(bombs()))
def test_a_file_whose_parts_are_used_again_and_again_is_refused(
    repo: Repository, folder: Path, kind: str
) -> None:
    torch.save({"it": bombs()[kind]}, folder / "step_1.pt")
    assert (folder / "step_1.pt").stat().st_size < 1 << 20
    assert "far more parts or bytes than it has" in refused(repo, folder, "step_{step}.pt")


@pytest.mark.parametrize("is_compressed", [True, False])
def test_a_file_that_unpacks_to_more_than_it_has_is_refused_unread(
    repo: Repository, folder: Path, is_compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.zeros(1 << 20)}, folder / "plain")
    with (
        zipfile.ZipFile(folder / "plain") as plain,
        zipfile.ZipFile(folder / "step_1.pt", "w") as packed,
    ):
        for name in plain.namelist():
            packed.writestr(
                name,
                plain.read(name),
                zipfile.ZIP_DEFLATED if is_compressed else zipfile.ZIP_STORED,
            )
    if is_compressed:
        monkeypatch.setattr(torch, "load", None)
        assert "write it with torch.save, which does not compress" in refused(
            repo, folder, "step_{step}.pt"
        )
    else:
        assert len(import_files(repo, folder, "step_{step}.pt").states) == 1


def test_a_value_in_a_folder_of_dcp_that_is_compressed_is_refused_unread(
    repo: Repository, folder: Path
) -> None:
    made = folder / "step-1"
    packed, whole = io.BytesIO(), io.BytesIO()
    torch.save(bytes(1 << 20), whole)
    with zipfile.ZipFile(whole) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for name in plain.namelist():
            out.writestr(name, plain.read(name))
    write({"w": torch.ones(1), "value": "x"}, Format.DCP, made, {})
    metadata = FileSystemReader(made).read_metadata()
    (key,) = (key for key in metadata.storage_data if key.fqn == "value")
    (made / "other.distcp").write_bytes(packed.getvalue())
    metadata.storage_data[key] = _StorageInfo("other.distcp", 0, len(packed.getvalue()))
    (made / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "does not compress" in refused(repo, folder, "step-{step}")
