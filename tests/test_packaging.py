"""What a user installs: the wheel's exact packages, the sdist, and both at work where the source
is not."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "datastates": "datastates",
    "datastates.api": "api",
    "datastates.lineage": "lineage",
    "datastates.transport": "transport",
}


def read_project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def clean() -> dict[str, str]:
    """This environment without anything that would lead back to the source."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "DATASTATES_", "COVERAGE"))
    }


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    """Run in ``cwd``, in a clean environment."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env=clean() | environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(source: Path, out: Path, *kinds: str) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source, cwd=out)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would clone, so that neither build/ nor egg-info of the working tree decides what
    is packed."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    for name in filter(None, listed.stdout.decode().split("\0")):
        old, new = ROOT / name, folder / name
        if not old.exists():
            continue  # deleted, and the deletion not yet committed
        new.parent.mkdir(parents=True, exist_ok=True)
        if old.is_symlink():
            new.symlink_to(os.readlink(old))
        else:
            new.write_bytes(old.read_bytes())
            new.chmod(old.stat().st_mode)
    if (
        subprocess.run(
            [sys.executable, ROOT / "scripts" / "ui", "is-built"], check=False
        ).returncode
        == 0
    ):
        # the gate has built it, which is often enough
        shutil.copytree(ROOT / "api" / "static", folder / "api" / "static")
    return folder


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    build(source, out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="session")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel, and sees what it depends on but not the source."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        interpreter,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        built[1],
        cwd=folder,
    )
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    # a plain path: the .pth files in it, the editable one too, are not read
    (site / "zz_dependencies.pth").write_text(dependencies + "\n")
    return interpreter


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    listed = read_project()["tool"]["setuptools"]["packages"]
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):  # does not follow the links in datastates/
            if "node_modules" not in path.parts:
                found.add(".".join((package, *path.parent.relative_to(ROOT / folder).parts)))

    assert sorted(found) == listed, (
        "list it in pyproject.toml: packages, and package-dir when it is not under datastates/"
    )


def test_every_package_outside_the_main_folder_says_where_it_lies() -> None:
    setuptools = read_project()["tool"]["setuptools"]
    for package in setuptools["packages"]:
        top = ".".join(package.split(".")[:2])
        if top in FOLDERS and top != "datastates":
            relative = package.removeprefix(top).replace(".", "/")
            assert setuptools["package-dir"][package] == FOLDERS[top] + relative


def test_every_import_is_of_a_declared_dependency() -> None:
    project = read_project()["project"]
    optional = project["optional-dependencies"]
    groups = (optional[name] for name in optional.keys() - {"dev", "docs"})
    declared = {
        re.split(r"[^\w-]", each)[0].removesuffix("-cu13")
        for each in [*project["dependencies"], *(each for group in groups for each in group)]
    }
    declared |= {
        import_name
        for package, import_name in {
            "scikit-learn": "sklearn",
            "opentelemetry-api": "opentelemetry",
            "mlflow-skinny": "mlflow",
        }.items()
        if package in declared
    }
    # the caller's own: who asks for a frame, or passes a RayExecutor, has it
    declared |= {
        "pandas",
        "ray",
    }
    declared |= {"triton"}  # comes with a torch that is built for its devices
    found: dict[str, str] = {}
    for folder in FOLDERS.values():
        for path in (ROOT / folder).rglob("*.py"):
            found.update((name.partition(".")[0], str(path)) for name in imports_of(path))

    undeclared = {
        name: path
        for name, path in found.items()
        if name not in {*declared, *sys.stdlib_module_names, "datastates"}
    }
    assert undeclared == {}, "list it in pyproject.toml and constraints.txt"


def test_what_is_pinned_fits_the_cuda_that_comes_with_torch() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    # of another torch: what its wheel for Linux asks for
    built_for = {"2.13.0": "13"}[pinned["torch"]]

    assert pinned["cuda-bindings"].partition(".")[0] == built_for, (
        "pip refuses to install torch beside another one"
    )
    dev = next(
        each
        for each in read_project()["project"]["optional-dependencies"]["dev"]
        if each.startswith("datastates[")
    )
    assert f"cu{built_for}" in re.split(r"[\[\],]", dev)


def test_the_version_is_the_one_of_the_changelog() -> None:
    heading = next(
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    )
    assert heading.split()[1] == read_project()["project"]["version"]


def test_no_bound_lets_pip_replace_a_torch_that_is_installed() -> None:
    assert "torch" in read_project()["project"]["dependencies"]


def test_every_dependency_is_pinned() -> None:
    project = read_project()["project"]
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    wanted = [
        each
        for group in (project["dependencies"], *project["optional-dependencies"].values())
        for each in group
    ]

    assert {re.split(r"[^\w-]", each)[0].lower() for each in wanted} - {"datastates"} <= pinned


def imports_of(path: Path) -> Iterator[str]:
    """The absolute imports of a file, those inside its functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def test_links_lead_to_the_folders() -> None:
    for name in ("api", "lineage", "transport"):
        assert os.readlink(ROOT / "datastates" / name) == f"../{name}"


@pytest.mark.long
def test_wheel_holds_exactly_the_listed_packages_and_their_data(
    built: tuple[Path, Path], source: Path
) -> None:
    names = files_of(built[1])

    packages = {name.rpartition("/")[0].replace("/", ".") for name in names if name.endswith(".py")}
    assert sorted(packages) == read_project()["tool"]["setuptools"]["packages"]
    assert {name.split("/")[0] for name in names} == {"datastates"}
    expected = set()
    for package, folder in FOLDERS.items():
        for path in (source / folder).rglob("*"):
            is_source = "node_modules" not in path.parts and (
                path.suffix in {".py", ".lark", ".mako", ".sql"} or path.name == "py.typed"
            )
            is_page = (
                path.is_relative_to(source / "api" / "static")
                and path.is_file()
                and path.name != "made-from"
            )
            if is_source or is_page:
                expected.add(
                    "/".join((*package.split("."), *path.relative_to(source / folder).parts))
                )
    assert names == expected
    assert "datastates/py.typed" in names


@pytest.mark.long
def test_wheel_carries_the_page_and_the_page_is_small(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        page = {
            info.filename: info
            for info in archive.infolist()
            if info.filename.startswith("datastates/api/static/")
        }
        index = archive.read("datastates/api/static/index.html").decode()

    named = set(re.findall(r'(?:src|href)="\./([^"]+)"', index))
    assert len(named) == 3, (
        "a script, a style and an icon, each relative to where the page is served"
    )
    assert {f"datastates/api/static/{name}" for name in named} <= set(page)
    assert sum(info.file_size for info in page.values()) <= 1_000_000
    assert "<style" not in index, "the page's content policy lets only files of its own in"
    assert "<script>" not in index


@pytest.mark.long
def test_wheel_from_the_tree_equals_the_one_from_the_sdist(
    built: tuple[Path, Path], source: Path, tmp_path: Path
) -> None:
    build(source, tmp_path, "--wheel")
    (wheel,) = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as direct, zipfile.ZipFile(built[1]) as indirect:
        assert {name: direct.read(name) for name in direct.namelist()} == {
            name: indirect.read(name) for name in indirect.namelist()
        }


@pytest.mark.long
def test_the_page_is_built_where_it_is_not(source: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(source, bare, symlinks=True, ignore=shutil.ignore_patterns("static"))
    build(bare, tmp_path, "--wheel")
    (wheel,) = tmp_path.glob("*.whl")

    assert "datastates/api/static/index.html" in files_of(wheel)


@pytest.mark.long
def test_sdist_holds_what_the_gate_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    needed = {
        "LICENSE",
        "README.md",
        "Makefile",
        "constraints.txt",
        "scripts/gate",
        "tests/test_packaging.py",
        "lineage/schema.py",
    }
    page = {
        "scripts/ui",
        "scripts/backend.py",
        "api/ui/package-lock.json",
        "api/ui/.npmrc",
        "api/ui/src/App.svelte",
        "api/static/index.html",
    }
    assert needed | page <= names
    assert not {name for name in names if "node_modules" in name or "generated" in name.split("/")}
    assert not {
        name
        for name in names
        if name.startswith(("datastates/lineage/", "datastates/transport/", "datastates/api/"))
    }


@pytest.mark.long
def test_license_travels_with_the_wheel(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        metadata = next(
            archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".dist-info/METADATA")
        )
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.long
def test_installed_wheel_imports_from_where_it_is_installed(python: Path, tmp_path: Path) -> None:
    code = (
        "import json, importlib.util as u, datastates, datastates.lineage, datastates.transport,"
        " datastates.api;print(json.dumps([[m.__file__ for m in (datastates, datastates.lineage,"
        " datastates.transport, datastates.api)],[u.find_spec(n) is not None for n in ('api',"
        " 'lineage', 'transport')], datastates.Config().verify]))"
    )
    files, top_level, verify = json.loads(run(python, "-W", "error", "-c", code, cwd=tmp_path))

    assert all(Path(file).is_relative_to(python.parent.parent) for file in files)
    assert top_level == [False, False, False]
    assert verify is True


@pytest.mark.long
def test_installed_terminal_works(python: Path, tmp_path: Path) -> None:
    script = python.parent / "datastates"

    assert "doctor" in run(script, "--help", cwd=tmp_path)
    version = read_project()["project"]["version"]
    assert run(script, "--version", cwd=tmp_path) == f"datastates {version}\n"
    assert json.loads(run(script, "--repo", "runs", "init", "--json", cwd=tmp_path))["root"] == str(
        tmp_path / "runs"
    )
    assert "torch" in {
        check["name"]
        for check in json.loads(run(script, "doctor", "--json", cwd=tmp_path))["checks"]
    }
    assert run(python, "-m", "datastates", "--version", cwd=tmp_path) == f"datastates {version}\n"


@pytest.mark.long
def test_installed_wheel_serves_the_page(python: Path, tmp_path: Path) -> None:
    script = python.parent / "datastates"
    run(script, "--repo", "runs", "init", cwd=tmp_path)
    command = [str(script), "--repo", "runs", "serve", "http://127.0.0.1:0", "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"].rstrip("/")
            page = httpx.get(f"{url}/")
            named = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
            files = [httpx.get(f"{url}/{name}") for name in named]
            (listed,) = httpx.get(f"{url}/api/v1/repositories").json()["items"]
        finally:
            process.terminate()
    assert [reply.status_code for reply in (page, *files)] == [200] * 4
    assert "<title>" in page.text
    assert listed["name"] == "runs"
    assert process.returncode == 0
