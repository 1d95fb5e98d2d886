"""``serve`` for the page and the web API: as a process, as people start it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
import torch

import datastates
from tests.cli.conftest import Invoke
from tests.cli.serving import TERMINAL, serving
from tests.support import warm
from tests.support.secrets_kept import keep

TOKEN = "a token that is long".replace(" ", "-")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built") / "runs"
    with datastates.open(root, memory_bytes=64 << 20) as repo:
        run = repo.track(weight=torch.arange(10.0), rng=False)
        for _ in range(3):
            run.capture().wait("durable")
        repo.tag("warm", "main~1")
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """A repository of three states: to be changed."""
    return Path(shutil.copytree(built, tmp_path / "runs"))


def test_server_says_where_it_is_and_serves_the_repository_by_its_folders_name(root: Path) -> None:
    with serving("http://127.0.0.1:0", "--repo", root) as (process, said):
        assert said == {"url": said["url"], "repositories": ["runs"]}
        (info,) = httpx.get(f"{said['url']}/api/v1/repositories").json()["items"]
        assert (info["name"], info["scope"]) == ("runs", "read")
        assert (
            httpx.get(f"{said['url']}/api/v1/repositories/runs/resolve?rev=warm").json()["step"]
            == 2
        )
        assert httpx.get(f"{said['url']}/").headers["content-type"].startswith("text/html")
        assert (
            httpx.put(
                f"{said['url']}/api/v1/repositories/runs/refs/x",
                json={"kind": "tag", "rev": "main"},
            ).status_code
            == 401
        )
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_server_ends_at_once_though_a_stream_is_open(root: Path, number: int, code: int) -> None:
    with (
        serving("http://127.0.0.1:0", "--repo", root) as (process, said),
        httpx.stream("GET", f"{said['url']}/api/v1/repositories/runs/events", timeout=30) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith(":")
        process.send_signal(number)
        assert list(lines)[-1] == "", "the stream ended in order"
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", "")


def test_server_that_was_killed_starts_again_at_its_port(root: Path) -> None:
    with (
        serving("http://127.0.0.1:0", "--repo", root) as (process, said),
        httpx.stream("GET", f"{said['url']}/api/v1/repositories/runs/events", timeout=30) as stream,
    ):
        next(stream.iter_lines())
        process.kill()
        process.wait(30)
    with serving(said["url"], "--repo", root) as (_, again):
        assert again == said
        assert httpx.get(f"{said['url']}/healthz").text == "ok\n"


def test_second_server_at_a_port_says_what_to_do(root: Path, invoke: Invoke) -> None:
    with serving("http://127.0.0.1:0", "--repo", root) as (_, said):
        refused = invoke("serve", said["url"], "--repo", root)
        assert (refused.code, refused.out) == (7, "")
        assert "another port" in refused.err
        port = said["url"].rpartition(":")[2]
        assert invoke("serve", "--port", port, "--repo", root).code == 7
        assert httpx.get(f"{said['url']}/healthz").text == "ok\n"


def test_write_makes_a_token_and_says_it_once(root: Path) -> None:
    with serving("http://127.0.0.1:0", "--repo", root, "--write") as (process, said):
        url, headers = (
            f"{said['url']}/api/v1/repositories/runs",
            {"Authorization": f"Bearer {said['token']}"},
        )
        assert len(said["token"]) >= 32
        assert httpx.get(f"{url}/refs").status_code == 401
        assert (
            httpx.put(
                f"{url}/refs/mine", json={"kind": "tag", "rev": "main"}, headers=headers
            ).status_code
            == 201
        )
        process.terminate()
        assert said["token"] not in "".join(process.communicate(timeout=30))
    with datastates.open(root) as repo:
        assert repo.reflog("mine")[0].reason == "tag (web)"


def test_address_with_the_token_is_for_people(root: Path) -> None:
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith("DATASTATES_")
    }
    command = [*TERMINAL, "serve", "http://127.0.0.1:0", "--repo", str(root), "--write"]
    with warm.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=inherited
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.terminate()
    assert str(root) in lines[0]
    assert "/#token=" in lines[1]
    assert "Ctrl-C" in lines[1]


def test_tokens_come_from_a_file_or_the_environment(root: Path, tmp_path: Path) -> None:
    keep(tmp_path / "tokens", f"# ours\nread {TOKEN}\n\nadmin {TOKEN}-admin\n")
    with serving("http://127.0.0.1:0", "--repo", root, "--web-tokens", tmp_path / "tokens") as (
        _,
        said,
    ):
        for token, scope in ((TOKEN, "read"), (f"{TOKEN}-admin", "admin")):
            (info,) = httpx.get(
                f"{said['url']}/api/v1/repositories", headers={"Authorization": f"Bearer {token}"}
            ).json()["items"]
            assert info["scope"] == scope
        assert "token" not in said
    with serving("http://127.0.0.1:0", "--repo", root, DATASTATES_WEB_TOKENS=f"write:{TOKEN}") as (
        _,
        said,
    ):
        assert httpx.get(f"{said['url']}/api/v1/repositories").status_code == 401
        assert (
            httpx.get(
                f"{said['url']}/api/v1/repositories", headers={"Authorization": f"Bearer {TOKEN}"}
            ).status_code
            == 200
        )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("http://0.0.0.0:0",), 5, "--web-tokens"),
        (("http://127.0.0.1:0/path",), 5, "--prefix"),
        (("http://127.0.0.1",), 5, "http://HOST:PORT"),
        (("https://127.0.0.1:0",), 5, "https"),
        (("smtp://127.0.0.1:0",), 5, "ucx://"),
        (("http://192.0.2.1:0", "--web-tokens", "{tokens}"), 7, "address of this machine"),
        (("http://127.0.0.1:0", "--port", "1"), 5, "--port"),
        (("http://127.0.0.1:0", "--repo", "nowhere"), 3, "nowhere"),
        (("http://127.0.0.1:0", "--repo", "{root}", "--repo", "{root}"), 5, "NAME="),
        (("ucx://127.0.0.1:0", "--repo", "a={root}", "--repo", "b={root}"), 5, "one repository"),
        (("http://127.0.0.1:0", "--web-tokens", "nowhere"), 5, "nowhere"),
        (("http://127.0.0.1:0", "--web-tokens", "{bad}"), 5, "line 2"),
        (("http://127.0.0.1:0", "--write", "--web-tokens", "{tokens}"), 5, "--write"),
        (("http://127.0.0.1:0", "--prefix", "/a b"), 5, "prefix"),
        (("http://127.0.0.1:0", "--pictures", "nowhere"), 5, "MODULE:FUNCTION"),
        (("http://127.0.0.1:0", "--pictures", "nowhere:show"), 5, "nowhere"),
        (("http://127.0.0.1:0", "--pictures", "json:nothing"), 5, "nothing"),
    ],
)
def test_server_that_cannot_start_says_why(
    invoke: Invoke, root: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    keep(root / "tokens", f"read {TOKEN}\n")
    keep(root / "bad", f"read {TOKEN}\nwrite short-secret\n")
    given = [each.format(root=root, tokens=root / "tokens", bad=root / "bad") for each in arguments]
    failed = invoke("serve", *given, *(() if "--repo" in given else ("--repo", root)))

    assert (failed.code, failed.out) == (code, "")
    assert said in failed.err
    assert "short-secret" not in failed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("http://127.0.0.1:0", "--tls-certificate", "cert", "--tls-key", "key"),
            "--tls-certificate and --tls-key concern only tcp:// and ucx://",
        ),
        (("http://127.0.0.1:0", "--tls-key", "key"), "proxy before the page (docs/deployment.md"),
        (("--port", "0", "--token-file", "token"), "--web-tokens"),
        (("http://127.0.0.1:0", "--writable"), "--write lets the page write"),
        (("http://127.0.0.1:0", "--data", "auto"), "add a tcp:// address"),
        (("http://127.0.0.1:0", "--timeout", "10"), "--timeout concerns only"),
        (("tcp://127.0.0.1:0", "--write"), "--writable lets peers push"),
        (("tcp://127.0.0.1:0", "--web-tokens", "tokens"), "--token-file"),
        (
            ("ucx://127.0.0.1:0", "--allowed-host", "lab.example"),
            "--allowed-host concerns only http://, not ucx://127.0.0.1:0",
        ),
        (("tcp://127.0.0.1:0", "--prefix", "/lineage"), "add an http:// address"),
        (("tcp://127.0.0.1:0", "--cors", "*"), "add an http:// address"),
        (("tcp://127.0.0.1:0", "--trusted-proxy", "10.0.0.1"), "add an http:// address"),
        (("tcp://127.0.0.1:0", "--access-log"), "add an http:// address"),
        (("tcp://127.0.0.1:0", "--pictures", "json:dumps"), "add an http:// address"),
    ],
)
def test_option_that_no_address_would_obey_is_refused(
    invoke: Invoke, arguments: tuple[str, ...], said: str
) -> None:
    refused = invoke("serve", *arguments, "--repo", "nowhere")

    assert (refused.code, refused.out) == (5, "")
    assert said in refused.err


def test_options_of_page_and_peers_go_together_where_both_are_served(invoke: Invoke) -> None:
    both = (
        "http://127.0.0.1:0",
        "tcp://127.0.0.1:0",
        "--write",
        "--writable",
        "--timeout",
        "5",
        "--prefix",
        "/lineage",
    )

    assert invoke("serve", *both, "--repo", "nowhere").code == 3, "only the repository is missing"


def test_host_that_is_not_ours_is_refused(root: Path) -> None:
    with serving("http://127.0.0.1:0", "--repo", root, "--allowed-host", "lab.example") as (
        _,
        said,
    ):
        for host, status in (("evil.example", 421), ("lab.example", 200), ("localhost", 200)):
            assert httpx.get(f"{said['url']}/healthz", headers={"Host": host}).status_code == status


def test_server_beyond_loopback_wants_its_token_from_all(root: Path) -> None:
    with serving("http://0.0.0.0:0", "--repo", root, DATASTATES_WEB_TOKENS=f"read:{TOKEN}") as (
        _,
        said,
    ):
        url = said["url"].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/api/v1/repositories").status_code == 401
        assert httpx.get(f"{url}/healthz", headers={"Host": "evil.example"}).status_code == 421


def test_several_repositories_and_a_prefix(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "other")
    options = (
        "--repo",
        f"mine={root}",
        "--repo",
        tmp_path / "other",
        "--prefix",
        "lineage/",
        "--access-log",
    )
    with serving("http://127.0.0.1:0", *options) as (process, said):
        assert said["repositories"] == ["mine", "other"]
        assert said["url"].endswith("/lineage/")
        names = [
            item["name"] for item in httpx.get(f"{said['url']}api/v1/repositories").json()["items"]
        ]
        assert names == ["mine", "other"]
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert '"GET /lineage/api/v1/repositories HTTP/1.1" 200' in err


def test_page_and_clones_are_served_by_one_process(root: Path) -> None:
    pytest.importorskip("ucxx", reason="UCXX is not installed: pip install 'datastates[cu13]'")
    with serving("http://127.0.0.1:0", "ucx://127.0.0.1:0", "--repo", root) as (process, said):
        assert process.stdout is not None
        other = json.loads(process.stdout.readline())
        assert (said["url"][:4], other["url"][:3]) == ("http", "ucx")
        with datastates.connect(other["url"]) as peer:
            assert (
                peer.state("warm").step
                == httpx.get(f"{said['url']}/api/v1/repositories/runs/resolve?rev=warm").json()[
                    "step"
                ]
            )
        process.terminate()
        assert process.wait(30) == 0


def test_training_serves_its_page_until_it_closes(tmp_path: Path) -> None:
    with datastates.open(tmp_path / "runs", memory_bytes=64 << 20) as repo:
        run = repo.track(weight=torch.zeros(10), rng=False)
        server = repo.serve("http://127.0.0.1:0")
        run.capture(metrics={"loss": 1.0})
        assert httpx.get(f"{server.url}/api/v1/repositories/runs/resolve?rev=main").json()[
            "metrics"
        ] == {"loss": 1.0}
        assert server.stats().peers_ever == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")
    assert not [thread for thread in threading.enumerate() if thread.name == "datastates-web"]


def test_training_lets_who_has_the_token_write(root: Path) -> None:
    with datastates.open(root) as repo:
        with pytest.raises(datastates.errors.InvalidInput, match="token"):
            repo.serve("http://127.0.0.1:0", is_writable=True)
        with pytest.raises(datastates.errors.InvalidInput, match="other machines"):
            repo.serve("http://0.0.0.0:0")
        with repo.serve("http://127.0.0.1:0", token=TOKEN, is_writable=True) as server:
            url, headers = (
                f"{server.url}/api/v1/repositories/runs/refs/mine",
                {"Authorization": f"Bearer {TOKEN}"},
            )
            assert (
                httpx.put(url, json={"kind": "branch", "rev": "warm"}, headers=headers).status_code
                == 201
            )
        assert "mine" in [ref.name for ref in repo.refs()]
