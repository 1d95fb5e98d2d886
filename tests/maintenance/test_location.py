"""What a repository's URL means."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from datastates.errors import InvalidInput, NotFound, Unavailable
from datastates.maintenance.location import discover, locate

SERVER = "postgresql+psycopg://ann:secret@db:5433/lineage"


def test_location_shows_no_password(tmp_path: Path) -> None:
    for url in (
        SERVER,
        f"{SERVER}?sslpassword=secret",
        "postgresql://db/x?user=ann&password=secret",
    ):
        location = locate(url, tmp_path)
        assert "secret" not in f"{location} {location!r}"
        assert "secret" in location.database_url


@pytest.mark.parametrize("name", ["runs", "with space", "per%20cent", "ünï", "a+b@c", "what?#1"])
def test_folder_holds_database_and_packs(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    location = locate(root)

    assert location.packs == root / "packs"
    assert location.root == root
    assert str(location) == str(root)
    assert not location.is_present
    root.mkdir()
    engine = create_engine(location.database_url)
    with engine.connect() as connection:
        connection.execute(text("create table made (id integer)"))
    engine.dispose()
    assert (root / "lineage.db").is_file()
    assert location.is_present


def test_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = locate("runs/")
    monkeypatch.chdir("/")

    assert location.packs == tmp_path / "runs" / "packs"
    assert location.root == tmp_path / "runs"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/runs").root == tmp_path / "runs"


def test_packs_of_a_folder_may_lie_elsewhere(tmp_path: Path) -> None:
    location = locate(
        tmp_path / "runs", tmp_path / "elsewhere", environ={"DATASTATES_PACKS": "/not/for/folders"}
    )

    assert location.packs == tmp_path / "elsewhere"
    assert (
        locate(tmp_path / "runs", environ={"DATASTATES_PACKS": "/not/for/folders"}).packs
        == tmp_path / "runs" / "packs"
    )


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_server_takes_packs_from_argument_or_environment(tmp_path: Path, scheme: str) -> None:
    url = SERVER.replace("postgresql+psycopg", scheme)

    assert locate(url, tmp_path).database_url == SERVER
    assert locate(url, environ={"DATASTATES_PACKS": str(tmp_path)}).packs == tmp_path
    assert (
        locate(url, tmp_path, environ={"DATASTATES_PACKS": "/other"}, must_exist=True).packs
        == tmp_path
    )


def test_password_is_not_shown(tmp_path: Path) -> None:
    assert str(locate(SERVER, tmp_path)) == SERVER.replace("secret", "***")
    with pytest.raises(InvalidInput) as caught:
        locate(SERVER, environ={})
    assert "secret" not in str(caught.value)
    assert "DATASTATES_PACKS" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        ("sqlite:///runs/lineage.db", "name a folder"),
        ("mysql://host/db", "mysql:// is no repository"),
        ("postgresql://host:port/db", "does not parse"),
    ],
)
def test_other_urls_are_refused(url: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        locate(url, "packs")


def test_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lineage.db").touch()
    with pytest.raises(InvalidInput, match="name its folder"):
        locate(tmp_path / "lineage.db")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InvalidInput, match="is a file"):
        locate(tmp_path / "notes.txt")


def test_packs_in_a_bucket_have_a_folder_of_this_node(tmp_path: Path) -> None:
    url, server = "s3://bucket/packs", "postgresql://host/lineage"
    assert locate(tmp_path, url).packs == tmp_path / "packs"
    assert locate(tmp_path, url, scratch=tmp_path / "fast").packs == tmp_path / "fast"
    environ = {"DATASTATES_PACKS": url, "DATASTATES_SCRATCH": str(tmp_path / "set")}
    assert locate(server, environ=environ).packs == tmp_path / "set"
    own = locate(server, url).packs
    assert own.is_absolute()
    assert own == locate(server, url).packs != locate(server, f"{url}-2").packs
    assert {locate(tmp_path, url).bucket, locate(server, environ=environ).bucket} == {url}


def test_missing_repository_names_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"datastates init .*/runs`"):
        locate(tmp_path / "runs", must_exist=True)


def test_a_lineage_of_no_bytes_is_missing(tmp_path: Path) -> None:
    (tmp_path / "lineage.db").touch()
    assert not locate(tmp_path).is_present
    with pytest.raises(NotFound, match="no repository in"):
        locate(tmp_path, must_exist=True)


def test_nearest_repository_is_discovered(tmp_path: Path) -> None:
    inner = tmp_path / "runs" / "packs" / "leases"
    inner.mkdir(parents=True)

    assert discover(tmp_path, {}) == str(tmp_path / "runs")
    (tmp_path / "runs" / "lineage.db").touch()
    assert discover(inner, {}) == str(tmp_path / "runs")
    assert discover(inner, {"DATASTATES_REPO": "elsewhere"}) == "elsewhere"


def test_a_relative_path_in_a_working_directory_that_was_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(NotFound, match="the working directory of this process was deleted"):
        locate("runs")
    with pytest.raises(NotFound, match="the working directory of this process was deleted"):
        discover(environ={})
    assert discover(environ={"DATASTATES_REPO": "elsewhere"}) == "elsewhere"
    assert locate(tmp_path / "runs").root == tmp_path / "runs"


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(InvalidInput, match="that user has no home directory here"):
        locate("~nobody-of-this-name/runs")


def test_a_folder_whose_name_is_no_utf8_is_refused_and_a_link_to_it_is_not(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xe9")
    os.mkdir(folder)
    for url, packs in ((folder, None), ("runs", folder)):
        with pytest.raises(InvalidInput, match=r"udce9' is no UTF-8"):
            locate(url, packs)
    (tmp_path / "link").symlink_to(folder)
    assert locate(tmp_path / "link").root == tmp_path / "link"


def test_a_path_that_is_too_long_for_the_system_is_refused_in_a_short_line() -> None:
    with pytest.raises(InvalidInput, match=r"too long for this system") as refused:
        locate("a/" * 3000)
    assert len(str(refused.value)) < 200


def test_a_folder_that_this_user_may_not_look_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(Unavailable, match=r"closed cannot be looked at \(Permission denied\)"):
        locate(tmp_path / "closed")
