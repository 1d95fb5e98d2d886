"""Addresses: where the folder ends and the revision begins."""

from __future__ import annotations

from pathlib import Path

import pytest

import datastates
from datastates.errors import InvalidInput
from datastates.integrations.saved import Address, address_of, is_address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository in ``deep/runs``."""
    made = tmp_path_factory.mktemp("addresses")
    datastates.open(made / "deep" / "runs").close()
    return made


@pytest.fixture(autouse=True)
def runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository; tests run beside it."""
    monkeypatch.chdir(folder)
    return folder / "deep" / "runs"


@pytest.mark.parametrize(
    ("text", "where", "revision"),
    [
        ("deep/runs/main", "deep/runs", "main"),
        ("datastates://deep/runs/main~3", "deep/runs", "main~3"),
        ("deep/runs/study/a~2", "deep/runs", "study/a~2"),
        ("deep/runs/main@best:val_loss", "deep/runs", "main@best:val_loss"),
        ("deep/runs", "deep/runs", "main"),
        ("deep/runs/", "deep/runs", "main"),
        ("datastates://deep/runs", "deep/runs", "main"),
        ("new/main", "new", "main"),
        ("a/b/new/main", "a/b/new", "main"),
        ("./new/main", "./new", "main"),
    ],
)
def test_folder_ends_where_a_repository_lies_or_before_the_last_slash(
    text: str, where: str, revision: str
) -> None:
    assert address_of(text) == Address(where, revision)


def test_absolute_paths_and_paths_of_pathlib_are_addresses(runs: Path) -> None:
    for given in (f"datastates://{runs}/side", runs / "side", f"{runs}/side"):
        assert address_of(given) == Address(str(runs), "side")
    assert str(address_of(runs / "side")) == f"datastates://{runs}/side"


@pytest.mark.parametrize(
    "text",
    [
        "main",
        "",
        "/main",
        "new/",
        "s3://bucket/main",
        "datastates://",
        "datastates://main",
        3,
        None,
        "a\0/b",
    ],
)
def test_what_names_no_folder_or_no_revision_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput):
        address_of(text)


def test_only_what_has_the_scheme_can_only_be_an_address() -> None:
    assert is_address("datastates://x/y")
    assert not any(map(is_address, ("x/y", Path("x/y"), None, 3, b"x")))
