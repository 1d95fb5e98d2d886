"""``serve`` and ``clone``, as processes and as a program reads them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

import datastates
from datastates.cli import doctor
from datastates.cli.doctor import Verdict
from datastates.cli.move import _made, split_source
from datastates.errors import InvalidInput
from datastates.maintenance.core import Core
from datastates.maintenance.location import locate
from datastates.transport import loop
from datastates.transport import server as transport_server
from datastates.transport.contract import Source
from datastates.transport.serving import RepositoryStore
from tests.cli.conftest import Invoke
from tests.cli.serving import TERMINAL, environment, serving
from tests.support import warm
from tests.support.jobs import job
from tests.support.secrets_kept import keep
from tests.transport.clones import test_groups as groups
from tests.transport.clones.processes import make, same

pytest.importorskip("ucxx", reason="UCXX is not installed: pip install 'datastates[cu13]'")

UCX = "ucx://127.0.0.1:0"
TOKEN = "correct horse battery staple"
VALUES = 2_500_000  # three chunks


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASTATES_TOKEN", raising=False)
    monkeypatch.setenv("DATASTATES_MEMORY", "128M")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of three durable states: ``main``, tagged ``warm`` at step 2, and the branch
    ``exp/fork`` at step 1."""
    root = tmp_path_factory.mktemp("served") / "runs"
    with datastates.open(root, memory_bytes=128 << 20) as repo:
        weight = torch.zeros(VALUES)
        run = repo.track(weight=weight, rng=False)
        for step in range(1, 4):
            weight.copy_(torch.linspace(step, step + 0.5, VALUES))  # no two chunks are equal
            run.capture().wait("durable")
        repo.tag("warm", "main~1", message="prefix")
        repo.branch("exp/fork", "main~2")
    return root


def value(root: Path, rev: str) -> float:
    with datastates.open(root) as repo:
        assert repo.verify(rev).status is datastates.Status.DURABLE
        return float(repo.load(rev)["weight"][0])


@pytest.fixture
def url(store: Path) -> Iterator[str]:
    """The store, served by this process."""
    with datastates.open(store) as repo, repo.serve() as server:
        yield server.url


def test_state_that_was_cloned_is_durable_and_named_with_its_ancestry(
    invoke: Invoke, url: str, tmp_path: Path
) -> None:
    into = tmp_path / "new" / "place"
    done = invoke("clone", f"{url}/main", "--into", into, "--json").json

    assert done["bytes_moved"] >= 4 * VALUES
    assert list(done["sources"].values()) == [done["bytes_moved"]]
    assert done["tag"] == f"clone/{done['state'][:10]}"
    assert value(into, done["tag"]) == 3
    assert [line["step"] for line in invoke("log", done["tag"], "-r", into, "--json").lines] == [
        3,
        2,
        1,
    ]
    assert [ref["name"] for ref in invoke("refs", "-r", into, "--json").lines] == [done["tag"]]


def test_the_repository_may_be_named_before_the_command_as_for_others(
    invoke: Invoke, url: str, tmp_path: Path
) -> None:
    done = invoke("--repo", tmp_path / "to", "clone", f"{url}/main", "--json").json

    assert done["repository"] == str(tmp_path / "to")
    assert value(tmp_path / "to", done["tag"]) == 3


def test_output_says_what_names_the_state_and_how_to_restore_it(
    invoke: Invoke, url: str, tmp_path: Path
) -> None:
    done = invoke("clone", f"{url}/warm", "--repo", tmp_path / "to", "--branch", "mine", "--tags")

    assert "branch mine" in done.out
    command = (
        done.out.splitlines()[1].partition("datastates ")[2].replace("FILE", str(tmp_path / "out"))
    )
    assert invoke(*command.split()).code == 0
    assert (tmp_path / "out.safetensors").is_file()
    assert [
        (ref["kind"], ref["name"]) for ref in invoke("refs", "-r", tmp_path / "to", "--json").lines
    ] == [
        ("branch", "mine"),
        ("tag", "warm"),
    ]
    assert done.err == "", "no bar when no terminal is there"


def test_state_that_is_here_already_is_named_and_nothing_moves(
    invoke: Invoke, url: str, tmp_path: Path
) -> None:
    first = invoke("clone", f"{url}/main", "--repo", tmp_path / "to", "--json").json
    again = invoke("clone", f"{url}/main", "--repo", tmp_path / "to", "--json").json
    named = invoke(
        "clone", f"{url}/main", "--repo", tmp_path / "to", "--branch", "mine", "--json"
    ).json

    assert first["bytes_moved"] > 0
    assert (again["bytes_moved"], again["sources"], again["tag"]) == (0, {}, first["tag"])
    assert (named["bytes_moved"], named["branch"]) == (0, "mine")


@pytest.mark.parametrize(
    ("rev", "step"),
    [("exp/fork", 1), ("main~2", 1), ("main@{0}", 3), ('"exp/fork"', 1), ("main@step:2", 2)],
)
def test_all_behind_the_port_is_the_revision(
    invoke: Invoke, url: str, tmp_path: Path, rev: str, step: int
) -> None:
    assert invoke("clone", f"{url}/{rev}", "--repo", tmp_path / "to", "--json").json["step"] == step


def test_source_is_split_at_the_first_slash_behind_the_port() -> None:
    assert split_source("ucx://[::1]:7/a/b@{2h}") == ("ucx://[::1]:7", "a/b@{2h}")
    for wrong in ("ucx://h:1", "ucx://h:1/", "h:1/main", "ucx:///main", ""):
        with pytest.raises(InvalidInput, match="names no"):
            split_source(wrong)


@pytest.mark.parametrize(
    ("source", "options", "code", "said"),
    [
        ("ucx://127.0.0.1:1/main", (), 7, "cannot be reached"),
        ("{url}/nothing", (), 3, "nothing"),
        ("{url}/main~~~9", (), 3, "root"),
        ("{url}/main~x", (), 5, "column"),
        ("{url}", (), 5, "names no revision"),
        ("smtp://127.0.0.1:1/main", (), 5, "ucx://"),
        ("{url}/main", ("--branch", "a b"), 5, "a-b"),
        ("{url}/main", ("--token-file", "nowhere"), 5, "nowhere"),
        ("{url}/main", ("--token-file", "token"), 8, "token"),
    ],
)
def test_clone_that_fails_says_why_and_leaves_nothing(
    invoke: Invoke,
    url: str,
    tmp_path: Path,
    source: str,
    options: Sequence[str],
    code: int,
    said: str,
) -> None:
    keep(tmp_path / "token", TOKEN)
    failed = invoke("clone", source.format(url=url), "--repo", tmp_path / "to" / "here", *options)

    assert (failed.code, failed.out) == (code, "")
    assert failed.err.startswith("error: ")
    assert said in failed.err
    assert not (tmp_path / "to").exists()


TRAINING = """
import sys
import torch
import datastates
with datastates.open(sys.argv[1], memory_bytes=64 << 20) as repo:
    run = repo.track(weight=torch.zeros(3), rng=False) if sys.argv[2] == "tracks" else None
    print("here", flush=True)
    sys.stdin.readline()
    if run is None:
        run = repo.track(weight=torch.zeros(3), rng=False)
    run.capture().wait("durable")
"""


@pytest.mark.parametrize("does", ["opens", "tracks"])
def test_clone_that_fails_leaves_what_another_process_has_begun_meanwhile(
    tmp_path: Path, does: str
) -> None:
    location = locate(tmp_path / "to", None, must_exist=False)
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "to"), does]
    # what happens until it fails
    with pytest.raises(ConnectionError), _made(location):  # noqa: PT012
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        raise ConnectionError
    other.communicate("go on\n", timeout=120)
    assert other.returncode == 0
    with pytest.raises(ConnectionError), _made(location):
        raise ConnectionError
    with datastates.open(tmp_path / "to") as repo:
        assert [state.step for state in repo.log("main")] == [1]


def test_state_that_does_not_fit_leaves_nothing(
    invoke: Invoke, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASTATES_MEMORY", "4M")
    failed = invoke("clone", f"{url}/main", "--repo", tmp_path / "to")

    assert failed.code == 7
    assert "DATASTATES_MEMORY" in failed.err
    assert not (tmp_path / "to").exists()


def test_name_that_is_taken_is_told_before_anything_moves(
    invoke: Invoke, url: str, tmp_path: Path
) -> None:
    into = tmp_path / "to"
    assert invoke("clone", f"{url}/warm", "--into", into, "--branch", "mine").code == 0
    failed = invoke("clone", f"{url}/main", "--into", into, "--branch", "mine")

    assert failed.code == 4
    assert "--branch" in failed.err
    assert len(list((into / "packs").glob("*.manifest"))) == 1
    assert value(into, "mine") == 2


def test_server_for_other_machines_wants_a_token_and_refuses_who_has_none(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    assert (
        "DATASTATES_TOKEN" in (refused := invoke("serve", "ucx://0.0.0.0:0", "--repo", store)).err
    )
    assert refused.code == 5
    keep(tmp_path / "token", TOKEN)
    with serving("ucx://0.0.0.0:0", "--repo", store, DATASTATES_TOKEN=TOKEN) as (process, said):
        source = said["url"].replace("0.0.0.0", "127.0.0.1") + "/main"
        without = invoke("clone", source, "--repo", tmp_path / "to")
        assert (without.code, (tmp_path / "to").exists()) == (8, False)
        assert "DATASTATES_TOKEN" in without.err
        assert (
            invoke(
                "clone", source, "--repo", tmp_path / "to", "--token-file", tmp_path / "token"
            ).code
            == 0
        )
        process.terminate()
        assert process.wait(30) == 0


def test_server_serves_several_at_once_and_ends_in_order(store: Path, tmp_path: Path) -> None:
    with serving(UCX, "--repo", store) as (process, said):
        assert said == {
            "url": said["url"],
            "repository": str(store),
            "writable": False,
            "tls": False,
        }
        command = [*TERMINAL, "clone", f"{said['url']}/main", "--into"]
        peers = [
            warm.Popen(
                [*command, str(tmp_path / name)], env=environment(), stdout=subprocess.DEVNULL
            )
            for name in "ab"
        ]
        assert [peer.wait(60) for peer in peers] == [0, 0]
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")
    assert [value(tmp_path / name, tag_of(tmp_path / name)) for name in "ab"] == [3, 3]


def test_interrupted_server_ends_with_130(store: Path) -> None:
    with serving(UCX, "--repo", store) as (process, _):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


def tag_of(root: Path) -> str:
    with datastates.open(root) as repo:
        (ref,) = repo.refs()
    return ref.name


def test_what_is_pushed_to_a_writable_server_outlives_it(
    invoke: Invoke, store: Path, tmp_path: Path
) -> None:
    assert invoke("init", tmp_path / "taker").code == 0
    assert invoke("serve", UCX, "--repo", tmp_path / "taker", "--writable").code == 5, (
        "without a token"
    )
    assert invoke("token", tmp_path / "token").code == 0
    arguments = (
        UCX,
        "--repo",
        tmp_path / "taker",
        "--writable",
        "--token-file",
        tmp_path / "token",
    )
    with serving(*arguments) as (process, said), datastates.open(store) as repo:
        with closing(datastates.connect(said["url"], token_file=tmp_path / "token")) as peer:
            uid = peer.push("warm", repo=repo).state.uid
        process.terminate()
        assert process.wait(30) == 0
    assert value(tmp_path / "taker", uid) == 2


def test_url_and_host_exclude_each_other(invoke: Invoke, store: Path) -> None:
    assert invoke("serve", "ucx://127.0.0.1:0", "--port", "1", "--repo", store).code == 5
    assert invoke("serve", "ucx://127.0.0.1:0", "--tls-key", "key", "--repo", store).code == 5


class Stuck(RepositoryStore):
    """A store whose states never come; ``is_asked`` once somebody waits for one."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.is_asked = threading.Event()

    def open(self, uid: str) -> Source:
        source, is_asked = super().open(uid), self.is_asked

        class Waiting(Source):
            manifest, lengths = source.manifest, source.lengths

            def close(self) -> None:
                source.close()

            async def chunk(self, index: int) -> Sequence[memoryview]:
                if index == 0:
                    return await source.chunk(index)
                is_asked.set()
                await asyncio.sleep(3600)
                raise AssertionError("somebody waited for an hour")

        return Waiting()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_in_the_middle_leaves_nothing(
    store: Path, tmp_path: Path, number: int, code: int
) -> None:
    with datastates.open(store) as repo:
        stuck = Stuck(repo.core)
        server = transport_server.Server(stuck, "ucx://127.0.0.1:0", timeout_s=30)
        loop.run(server.start())
        try:
            command = [
                *TERMINAL,
                "clone",
                f"{server.url}/main",
                "--into",
                str(tmp_path / "to"),
                "--timeout",
                "30",
            ]
            with warm.Popen(
                command, stderr=subprocess.PIPE, text=True, env=environment()
            ) as process:
                assert stuck.is_asked.wait(60)
                assert (tmp_path / "to").is_dir()
                process.send_signal(number)
                _, err = process.communicate(timeout=30)
        finally:
            loop.run(server.close())
    assert process.returncode == code
    assert "Traceback" not in err
    assert not (tmp_path / "to").exists()


def test_doctor_tries_ucx_and_finds_adapters_that_it_does_not_use(tmp_path: Path) -> None:
    (check,) = doctor._ucx()
    (tmp_path / "mlx5_0").mkdir()

    assert check.status in (Verdict.OK, Verdict.WARN)
    assert "tcp/lo" in check.detail
    assert "64.0 MiB over loopback at" in check.detail
    assert doctor._unused_adapters(["tcp/eth0"], tmp_path) == ["mlx5_0"]
    assert doctor._unused_adapters(["tcp/eth0", "rc_mlx5/mlx5_0:1"], tmp_path) == []


def test_doctor_says_why_ucx_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "nonsense")
    (check,) = doctor._ucx()

    assert check.status is Verdict.WARN
    assert "does not start" in check.detail
    assert check.next is not None
    assert "UCX_TLS" in check.next


def test_clone_of_a_state_that_ranks_hold_takes_all_its_parts_and_makes_them_durable(
    tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASTATES_TOKEN", groups.TOKEN)
    with job(2, f"{groups.HERE}:serve", folder=str(tmp_path / "job"), environ=groups.WIRE) as ranks:
        urls, uid = groups.served(ranks)
        said = invoke("clone", f"{urls[1]}/main", "--into", tmp_path / "mine", "--json").json
        assert (said["state"], said["bytes_moved"]) == (uid, said["bytes"])
        assert set(said["sources"]) == {url.removeprefix("tcp://") for url in urls}
        again = invoke(
            "clone", f"{urls[0]}/main", "--into", tmp_path / "mine", "--branch", "kept", "--json"
        ).json
        assert again["bytes_moved"] == 0
    with datastates.open(tmp_path / "mine") as repo:
        assert repo.verify("kept").status is datastates.Status.DURABLE
        assert same(repo.load("kept")["weights"], make(1, groups.CHUNKS))
