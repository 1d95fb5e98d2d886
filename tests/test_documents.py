"""The documents are true: what they show runs, what they name exists, and the site has every
public name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import warm

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOT_HERE = {"api/static", "docs/design/NNN-title.md"}
"""Paths that documents name, and that a build or a reader makes."""


def blocks(path: Path) -> list[str]:
    """The Python that a document shows, one text a fenced block."""
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def environment() -> dict[str, str]:
    """What a new user's shell has."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DATASTATES_")}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_example_of_the_readme_runs_in_an_empty_folder_and_goes_on_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    (code,) = blocks(ROOT / "README.md")
    script = tmp_path / "train.py"
    script.write_text(code)
    said, steps = [], []
    for run in (
        subprocess.run,
        warm.run,
    ):
        # as somebody does who has just installed it; then quickly
        done: subprocess.CompletedProcess[str] = run(
            [sys.executable, "-W", "error", script.name],
            cwd=tmp_path,
            env=environment() | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
        steps.append(re.findall(r"goes on from .*?step (\d+)", done.stderr))
    assert "tensors: ['0.weight', '0.bias', '2.weight', '2.bias']" in said[0]
    assert said[0] == said[1], "the second time there was nothing left to train"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_guide_runs_as_it_stands(guide: Path, tmp_path: Path) -> None:
    first = (
        []
        if guide.stem in ("first-steps", "configuration")
        else blocks(ROOT / "docs" / "guide" / "first-steps.md")
    )
    code = [*first, *blocks(guide)]
    if not blocks(guide):
        return
    script = tmp_path / "guide.py"
    script.write_text("\n\n".join(code))
    done = warm.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_guides_without_python_are_known() -> None:
    assert {path.stem for path in GUIDES if not blocks(path)} == {"terminal", "web"}


def is_there(name: str) -> bool:
    """Whether a path of the tree, a module of it, or a name in a module, exists."""
    path = name.rstrip("/.")
    for base in (ROOT, ROOT / "datastates"):
        stem = path
        while True:
            if any((base / f"{stem}{suffix}").exists() for suffix in ("", ".py")):
                return True
            stem, dot, _ = stem.rpartition(".")
            if not dot or "/" not in stem:
                break
    return path in NOT_HERE


def rooms() -> list[str]:
    """The folders whose names begin a path in a document; what `make demo` and the like leave is
    none of them."""
    made = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    found = {
        path.name
        for base in (ROOT, ROOT / "datastates")
        for path in base.iterdir()
        if path.is_dir() and path.name.isidentifier()
    }
    return sorted(found - made)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_that_a_document_names_exist(document: Path) -> None:
    text = re.sub(r"https?://\S+", "", document.read_text())
    named = set(re.findall(rf"(?<![\w/.<>{{}}$-])(?:{'|'.join(rooms())})/[\w./-]*\w", text))

    assert sorted(name for name in named if not is_there(name)) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_a_document_names_exist(document: Path) -> None:
    missing, last = [], Path()
    for file, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", document.read_text()):
        last = ROOT / file if file else last
        if name and (not last.is_file() or f"def {name}(" not in last.read_text()):
            missing.append(f"{last.name}::{name}")

    assert missing == []


def hook() -> ModuleType:
    """``scripts/pages.py``, which makes the pages of the site that do not lie in docs/."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_reference() -> None:
    site = hook()
    made = dict(site.pages())
    for package, place in (
        ("datastates", "reference/datastates.md"),
        ("datastates.errors", "reference/errors.md"),
        ("datastates.studies", "reference/workflows.md"),
        ("datastates.api", "reference/api.md"),
        ("datastates.storage", "reference/store.md"),
        ("datastates.ranks", "reference/ranks.md"),
        ("datastates.testing", "reference/testing.md"),
    ):
        for name in importlib.import_module(package).__all__:
            known = site.identifier(package, name)
            assert f"::: {known}\n" in made[place], f"{package}.{name}"
            assert f"[`{name}`]({Path(place).name}#{known})" in made["reference/index.md"]
            assert known in (f"{package}.{name}", f"{package}.{name}.{name}")


def test_every_command_has_an_example() -> None:
    """``tests/cli/test_examples.py`` runs them."""
    from datastates.cli.app import COMMANDS, EXAMPLES

    assert EXAMPLES.keys() == COMMANDS.keys()
    assert [
        name for name, line in EXAMPLES.items() if not line.startswith(f"datastates {name}")
    ] == []


def test_every_command_is_in_the_reference() -> None:
    from datastates.cli.app import COMMANDS

    made = dict(hook().pages())["reference/terminal.md"]
    assert [name for name in COMMANDS if f"## `datastates {name}`" not in made] == []
