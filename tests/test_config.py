"""The choices of a repository, and the environment that they come from."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import datastates
from datastates.config import BackPressure, Config, OnFailure, parse_bytes
from datastates.errors import InvalidInput
from datastates.policy.auto import Auto
from datastates.policy.computed import CheckFreq
from datastates.policy.contract import Cadence, Policy

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1K", 1 << 10),
        ("512M", 512 << 20),
        ("8g", 8 << 30),
        ("1.5GiB", 3 << 29),
        (" 2 TB ", 2 << 40),
        ("64KB", 64 << 10),
    ],
)
def test_sizes_are_read_in_powers_of_1024(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "many", "1X", "1e999", "1,5G", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a size"):
        parse_bytes(text)


def test_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()
    assert Config.from_environment({"DATASTATES_MEMORY": "", "HOME": "/"}) == Config()


def test_environment_changes_what_it_names() -> None:
    environ = {
        "DATASTATES_MEMORY": "2G",
        "DATASTATES_DURABLE_EVERY": "10",
        "DATASTATES_DURABLE_INTERVAL": "0.5",
        "DATASTATES_BACK_PRESSURE": "drop-oldest",
        "DATASTATES_ON_FAILURE": "raise",
        "DATASTATES_WRITE_BYTES_PER_S": "50M",
        "DATASTATES_DEVICE_MEMORY": "3G",
    }

    expected = Config(
        memory_bytes=2 << 30,
        durable_every=10,
        durable_interval_s=0.5,
        back_pressure=BackPressure.DROP_OLDEST,
        on_failure=OnFailure.RAISE,
        write_bytes_per_s=50 << 20,
        device_bytes=3 << 30,
    )
    assert Config.from_environment(environ) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEMORY", "lots"),
        ("MEMORY", "0"),
        ("MEMORY", "-1G"),
        ("DURABLE_EVERY", "0"),
        ("DURABLE_EVERY", "1.5"),
        ("DURABLE_INTERVAL", "soon"),
        ("DURABLE_INTERVAL", "-1"),
        ("DURABLE_INTERVAL", "nan"),
        ("BACK_PRESSURE", "panic"),
        ("ON_FAILURE", "panic"),
        ("WRITE_BYTES_PER_S", "fast"),
        ("WRITE_BYTES_PER_S", "5"),
        ("DEVICE_MEMORY", "-1"),
    ],
)
def test_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"DATASTATES_{name}='{re.escape(value)}'"):
        Config.from_environment({f"DATASTATES_{name}": value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0},
        {"device_bytes": -1},
        {"durable_every": 0},
        {"durable_interval_s": -1.0},
        {"durable_interval_s": float("nan")},
    ],
)
def test_wrong_value_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Config(**wrong)


@pytest.mark.parametrize("size", ["64M", " 64 mib", 64 << 20, 64.0 * (1 << 20)])
def test_a_budget_is_bytes_or_a_size(tmp_path: Path, size: Any) -> None:
    assert Config(memory_bytes=size) == Config(memory_bytes=64 << 20)
    with datastates.open(tmp_path, memory_bytes=size) as repo:
        assert repo.config.memory_bytes == 64 << 20


@pytest.mark.parametrize("size", ["2 lots", b"2G", True, [1], 0.5, "0"])
def test_a_budget_that_is_none_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(InvalidInput, match=r"memory_bytes is|is not a size"):
        datastates.open(tmp_path, memory_bytes=size)
    assert not list(tmp_path.iterdir())


def test_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().verify = False  # type: ignore[misc]  # which is what is tested


def test_every_variable_of_the_code_is_documented_and_no_other() -> None:
    code = "".join(
        path.read_text()
        for folder in ("datastates", "lineage", "transport", "api")
        for path in (ROOT / folder).rglob("*.py")
    )
    # prefixes
    mentioned = set(re.findall(r"\bDATASTATES_[A-Z_]+\b", code)) - {
        "DATASTATES_",
        "DATASTATES_UCX",
    }
    documented = set(
        re.findall(
            r"`(DATASTATES_[A-Z_]+)`", (ROOT / "docs" / "guide" / "configuration.md").read_text()
        )
    )

    assert mentioned <= documented
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").iterdir() if path.is_file())
    assert documented - mentioned <= set(re.findall(r"\bDATASTATES_[A-Z_]+\b", scripts)), (
        "which only the gate and the build read"
    )


def test_a_cadence_is_said_by_its_parts_or_as_one_value() -> None:
    parts, whole = (
        Config(durable_every=7, durable_interval_s=None),
        Config(cadence=Cadence(every=7, interval_s=None)),
    )
    assert parts.cadence_with() == whole.cadence_with() == Cadence(7, None)
    assert Config().cadence_with() == Config(cadence="auto").cadence_with() == Auto()
    assert dataclasses.replace(parts, durable_every=9).cadence_with() == Cadence(9, None)


@pytest.mark.parametrize(
    "configured",
    [Config(durable_every=7, durable_interval_s=None), Config(cadence=Cadence(7, None))],
)
def test_a_training_changes_a_part_of_the_configured_cadence_or_brings_its_own(
    configured: Config,
) -> None:
    assert configured.cadence_with(durable_every=2) == Cadence(2, None)
    assert configured.cadence_with(durable_interval_s=5.0) == Cadence(7, 5.0)
    assert configured.cadence_with(Cadence(interval_s=1.0)) == Cadence(None, 1.0)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"durable_every": 5}, Cadence(5, None)),
        ({"durable_interval_s": 60.0}, Cadence(None, 60.0)),
        ({"durable_every": 5, "durable_interval_s": 60.0}, Cadence(5, 60.0)),
        ({"cadence": "checkfreq"}, CheckFreq()),
    ],
)
def test_each_explicit_setting_turns_the_automatic_cadence_off(
    said: dict[str, Any], meant: Policy
) -> None:
    assert Config(**said).cadence_with() == meant
    assert Config().cadence_with(**said) == meant
    assert Config(cadence="auto:2%:100M").cadence_with(**said) == meant
    names = {
        "durable_every": "DATASTATES_DURABLE_EVERY",
        "durable_interval_s": "DATASTATES_DURABLE_INTERVAL",
        "cadence": "DATASTATES_CADENCE",
    }
    assert (
        Config.from_environment(
            {names[name]: str(value) for name, value in said.items()}
        ).cadence_with()
        == meant
    )


def test_no_interval_alone_means_that_nothing_is_written_by_itself() -> None:
    assert str(Config(durable_interval_s=None).cadence_with()) == "never"


def test_a_cadence_that_is_said_twice_or_is_none_is_refused() -> None:
    said: list[dict[str, Any]] = [{"durable_every": 2}, {"durable_interval_s": 1.0}]
    for parts in said:
        with pytest.raises(InvalidInput, match="cadence is given, and durable_every"):
            Config(cadence=Cadence(), **parts)
        with pytest.raises(InvalidInput, match="cadence is given, and durable_every"):
            Config().cadence_with(Cadence(), **parts)
    wrong: Any = "daily"
    for call in (lambda: Config(cadence=wrong), lambda: Config().cadence_with(wrong)):
        with pytest.raises(InvalidInput, match="the cadence 'daily' means nothing: say every:10"):
            call()


@pytest.mark.parametrize(
    ("every", "statuses"), [(None, ["captured"] * 3), (2, ["captured", "durable", "captured"])]
)
def test_a_tracker_follows_the_cadence_that_it_is_given(
    tmp_path: Path, every: int | None, statuses: list[str]
) -> None:
    with datastates.open(tmp_path, memory_bytes="64M") as repo:
        # the configured one writes the first, by time
        cadence = datastates.Cadence(every=every, interval_s=None)
        with repo.track(weight=torch.zeros(3), rng=False, cadence=cadence) as run:
            states = [run.capture().wait() for _ in range(3)]
            repo.core.runner().drain()
            assert [str(repo.state(state).status) for state in states] == statuses


def test_a_class_that_is_given_for_an_object_is_said_to_be_one(tmp_path: Path) -> None:
    class Mine(datastates.Processor):
        name = "mine"

        def process(self, item: datastates.CapturedState) -> None: ...

    given: Any = [Mine]
    with pytest.raises(
        InvalidInput,
        match=r"processors has the class Mine: give an object of it, as processors=\[Mine\(\)\]",
    ):
        Config(processors=given)
    with pytest.raises(
        InvalidInput, match="tiers holds the class Mine: give objects of a class that inherits"
    ):
        datastates.open(tmp_path, config=Config(tiers=given))


def test_every_setting_is_explained() -> None:
    told = Config.__doc__ or ""
    assert [
        each.name for each in dataclasses.fields(Config) if f"``{each.name}``" not in told
    ] == []
