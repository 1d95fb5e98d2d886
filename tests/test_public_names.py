"""The names that a training script may use, and what importing them costs."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import datastates
from datastates import testing
from tests.test_house import MODULES

PUBLIC = {
    "Auto",
    "BackPressure",
    "Cadence",
    "CadenceChoice",
    "Capture",
    "CapturedState",
    "CheckFreq",
    "Cloned",
    "Config",
    "Conflict",
    "Daly",
    "DatastatesError",
    "Ensemble",
    "Guard",
    "JsonLines",
    "NotFound",
    "OnFailure",
    "OnImprovement",
    "Peer",
    "PermutationSampler",
    "Prediction",
    "Processor",
    "Ref",
    "RefEvent",
    "Repository",
    "RestoreReport",
    "Retention",
    "Rewind",
    "RngState",
    "Run",
    "Server",
    "State",
    "Status",
    "Tls",
    "Tracker",
    "Transfer",
    "TwoLevel",
    "Unavailable",
    "Young",
    "__version__",
    "connect",
    "load",
    "open",
    "register_encoder",
    "reindex",
    "save",
}


def modules_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after running ``code``."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print('\\n'.join(sys.modules))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


PUBLIC_MODULES = {
    "datastates",
    "datastates.api",
    "datastates.config",
    "datastates.errors",
    "datastates.files.bundle",
    "datastates.files.importing",
    "datastates.integrations.accelerate",
    "datastates.integrations.lightning",
    "datastates.integrations.mlflow",
    "datastates.integrations.ray",
    "datastates.integrations.tensorboard",
    "datastates.integrations.wandb",
    "datastates.lineage",
    "datastates.ranks",
    "datastates.storage",
    "datastates.studies",
    "datastates.testing",
}


def test_only_public_modules_list_their_names_and_do_so_in_order() -> None:
    listed = {name: found for name, (_, tree) in MODULES.items() if (found := names_of(tree))}
    assert set(listed) == PUBLIC_MODULES
    assert {name for name, found in listed.items() if found != sorted(found)} == set()


def names_of(tree: ast.Module) -> list[str]:
    """The names in ``__all__``."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
    return []


def test_public_names_are_exactly_these_and_sorted() -> None:
    assert set(datastates.__all__) == PUBLIC
    assert datastates.__all__ == sorted(datastates.__all__)


def test_every_public_name_resolves_and_is_listed_by_dir() -> None:
    assert set(dir(datastates)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(datastates, name) is not None
        assert name in vars(datastates), "kept after its first use"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        datastates.nothing  # noqa: B018  # the access is what is tested


@pytest.mark.parametrize(
    "code",
    [
        "import datastates",
        "import datastates; dir(datastates)",
        "import datastates.lineage",
        "from datastates import Config, NotFound, State, Status",
        "import datastates.maintenance.location",
        "import datastates.cli",
    ],
)
def test_importing_does_without_torch(code: str) -> None:
    assert not modules_after(code) & {"torch", "numpy"}


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_collections_rest_while_a_name_is_imported_and_go_on_as_before(before: str) -> None:
    code = (
        f"import datastates, gc, importlib; gc.{before}(); was = gc.isenabled(); seen = []; load ="
        " importlib.import_module\ndef watched(*given): seen.append(gc.isenabled()); return"
        " load(*given)\ndatastates.import_module = watched; datastates.open\ntry:"
        " datastates.nothing\nexcept AttributeError: pass\nassert seen == [False] and"
        " gc.isenabled() is was, (seen, was)"
    )
    modules_after(code)


def test_importing_the_package_alone_is_cheap() -> None:
    assert not modules_after("import datastates; datastates.NotFound") & {
        "sqlalchemy",
        "msgspec",
        "typer",
        "rich",
    }


def test_faults_do_without_pytest_and_suites_are_imported_when_they_are_used() -> None:
    assert "pytest" not in modules_after(
        "from datastates.testing import fail_at, WrappedTier; import datastates.testing;"
        " dir(datastates.testing)"
    )
    assert "pytest" in modules_after("from datastates.testing import TierSuite")


def test_names_for_tests_resolve_are_sorted_and_are_listed_by_dir() -> None:
    assert (
        set(dir(testing))
        >= set(testing.__all__)
        >= {"TierSuite", "WrappedTier", "crash_at", "fail_at"}
    )
    assert testing.__all__ == sorted(testing.__all__)
    assert all(getattr(testing, name) is not None for name in testing.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        testing.nothing  # noqa: B018  # the access is what is tested
