"""One folder, two users of one group and one who is of neither: as docs/deployment.md has it."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import datastates
from datastates import Status
from tests.support.forge import Forge, forge
from tests.support.lodgers import become

GROUP, STRANGERS = 54321, 54322
ANN, BEN, EVE = 12345, 12346, 12347


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with forge(tmp_path_factory.mktemp("forge"), ["tests.support.lodgers"]) as ready:
        yield ready


@pytest.fixture(
    params=[(0o2770, 0o022), (0o2770, 0o077), (0o770, 0o007), (0o775, 0o002)],
    ids=lambda made: f"{made[0]:o}-{made[1]:03o}",
)
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Path, int]]:
    """A folder of the group, and the umask of its users: marked as shared, or left to a umask
    that lets the group write."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be several users")
    mode, umask = request.param
    folder = Path(tempfile.mkdtemp(prefix="datastates-group-", dir="/tmp"))
    os.chown(folder, 0, GROUP)
    folder.chmod(mode)
    yield folder, umask
    shutil.rmtree(folder)


def test_users_of_a_group_train_tag_and_drop_in_one_folder(
    smith: Forge, shared: tuple[Path, int]
) -> None:
    place, umask = shared
    folder = place / "runs"
    ann, ben = ([uid, GROUP, umask] for uid in (ANN, BEN))
    job = smith.start("tests.support.lodgers:lodge", folder=str(folder), user=ann)
    try:
        words = job.lines.readline().split()
        assert words[:1] == ["lodges"], smith.errors()
        said = smith.run("tests.support.lodgers:visit", folder=str(folder), user=ben, branch="bens")
        assert said[0] == f"main {words[2]} captured", smith.errors()
    finally:
        job.kill(signal.SIGKILL)
        job.wait()
    assert smith.run(
        "tests.support.lodgers:visit", folder=str(folder), user=ben, branch="bens-again"
    )[0].startswith("main ")
    assert smith.run("tests.support.lodgers:tidy", folder=str(folder), user=ben, rev="main") == [
        "dropped evicted"
    ]
    assert smith.run("tests.support.lodgers:visit", folder=str(folder), user=ann, branch="anns")[
        1
    ].startswith("anns ")

    with datastates.open(folder) as repo:
        assert repo.verify("bens").status is Status.DURABLE
    made = [folder, *folder.rglob("*")]
    assert {path.stat().st_uid for path in made if path.suffix == ".manifest"} == {ANN, BEN}
    for path in made:
        mode = path.stat().st_mode
        assert mode & stat.S_IRGRP, path
        assert (
            path.name in (".identity", "lineage.backup")
            or path.parent.name == "leases"
            or mode & stat.S_IWGRP
        ), path


def test_others_read_nothing(shared: tuple[Path, int], smith: Forge) -> None:
    place, umask = shared
    if place.stat().st_mode & stat.S_IXOTH:
        pytest.skip("this folder is open to all")
    folder = place / "runs"
    assert smith.run(
        "tests.support.lodgers:visit_empty", folder=str(folder), user=[ANN, GROUP, umask]
    ) == ["made"]
    child = os.fork()
    if child == 0:
        become(EVE, STRANGERS)
        os._exit(
            0
            if not os.access(folder, os.R_OK) and not os.access(folder / "lineage.db", os.R_OK)
            else 1
        )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if umask & 0o007 == 0o007:
        assert not [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o007], (
            "the umask is followed in every file"
        )
