"""Studies whose workers run on other hosts, with private folders: no disk is shared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import datastates
from datastates.errors import NotFound
from datastates.studies import SerialExecutor, explore
from tests.drivers.studies_apart import Study, wait_for
from tests.studies.studies import EVERY_STATE, counts, essence, faults, prefix, results, train, tree
from tests.support.hosts import Host, hosts, need_hosts
from tests.support.jobs import mpiexec, need_mpi

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
PLAN = tree()
T = TypeVar("T")


@pytest.fixture(scope="module")
def made() -> Iterator[list[Host]]:
    """Three hosts."""
    need_hosts()
    with hosts(3) as made:
        yield made


@pytest.fixture
def three(made: list[Host]) -> Iterator[list[Host]]:
    """A host for the explorer, and two for workers; what runs there ends with the test."""
    yield made
    for host in made:
        host.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of the plan in one process."""
    folder = tmp_path_factory.mktemp("expected") / "runs"
    with prefix(folder, config=EVERY_STATE) as repo, SerialExecutor() as executor:
        assert explore(repo, "main", PLAN, train, executor, study="s", progress=False)
    return folder


@pytest.fixture(scope="module")
def expected(reference: Path) -> dict[str, Any]:
    """What the plan gives in one process."""
    with datastates.open(reference) as repo:
        return essence(repo, "s", PLAN)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_workers_on_other_hosts_need_no_shared_disk(
    tmp_path: Path,
    three: list[Host],
    expected: dict[str, Any],
    request: pytest.FixtureRequest,
    kind: str,
) -> None:
    packs = tmp_path / "runs"
    url = str(packs) if kind == "sqlite" else request.getfixturevalue("postgresql_url")
    prefix(url, packs=None if kind == "sqlite" else packs, config=EVERY_STATE).close()
    study = Study(tmp_path, three, url, "" if kind == "sqlite" else str(packs))
    study.workers += [study.work(1), study.work(2)]
    assert study.explore().wait(300) == 0, study.log("explore-0")
    assert "began from peer" in study.log("explore-0")
    with datastates.open(url, packs=None if kind == "sqlite" else packs) as repo:
        assert essence(repo, "s", PLAN) == expected
        for variant in PLAN.variants:
            repo.verify(f"done/s/{variant.name}")


def test_a_dead_worker_and_a_dead_explorer_cost_only_what_was_not_pushed(
    tmp_path: Path, three: list[Host], expected: dict[str, Any]
) -> None:
    """The second worker outlives the explorer."""
    folder = tmp_path / "runs"
    prefix(folder, config=EVERY_STATE).close()
    study = Study(tmp_path, three, str(folder), **faults(tmp_path / "faults", low_a="1:hang"))
    study.workers += [study.work(1), study.work(2)]
    exploring = study.explore()
    with datastates.open(folder) as repo:
        wait_for(lambda: repo.state("done/s/high-a"), NotFound)
        while (pushed := wait_for(lambda: repo.state("s/low-a"), NotFound)).status != "durable":
            time.sleep(0.05)
        before = counts(repo)
    hanging = int((tmp_path / "faults" / "hangs-low-a").read_text())
    exploring.kill()
    exploring.wait(10)
    index = next(index for index, each in enumerate(study.workers, 1) if each.pid == hanging)
    os.kill(hanging, signal.SIGKILL)
    study.workers[index - 1].wait(10)
    shutil.rmtree(tmp_path / f"host-{index}")
    study.work(index)
    assert study.explore().wait(300) == 0, study.log("explore-0")
    with datastates.open(folder) as repo:
        assert essence(repo, "s", PLAN) == expected
        assert repo.state("done/s/low-a~1").uid == pushed.uid
        after = counts(repo)
    assert {name: after[name] for name in before if name.startswith("done/")} == {
        name: before[name] for name in before if name.startswith("done/")
    }


@pytest.mark.parametrize("engine", ["dask", "parsl", pytest.param("mpi", marks=need_mpi), "pool"])
def test_engines_need_no_shared_disk(
    tmp_path: Path, three: list[Host], reference: Path, engine: str
) -> None:
    pytest.importorskip({"dask": "distributed", "parsl": "parsl"}.get(engine, "datastates"))
    with datastates.open(reference) as repo:
        outcome = results(repo, "s", PLAN)
    folder, address = tmp_path / "runs", three[0].address
    prefix(folder, config=EVERY_STATE).close()
    study = Study(tmp_path, three, str(folder), DATASTATES_TEST_ADDRESS=address)
    where = json.dumps(study.places)
    if engine == "dask":
        where = study.start_dask()
    if engine == "mpi":
        where = json.dumps([(three[0].namespace, ""), *study.places])
        words = ("-m", "tests.studies.apart", "explore", "mpi", str(folder), "", where)
        mpiexec(3, *words, timeout_s=300)
    else:
        assert study.explore(engine, where).wait(300) == 0, study.log("explore-0")
    with datastates.open(folder) as repo:
        assert results(repo, "s", PLAN) == outcome
