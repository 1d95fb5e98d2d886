"""Which processes are said to reach each other on 127.0.0.1."""

from __future__ import annotations

import subprocess
import sys

import pytest

from datastates.maintenance.environment import network_id, node_id

SAY = "from datastates.maintenance.environment import network_id; print(network_id())"
APART = ("unshare", "--user", "--map-root-user", "--net")


def said(*how: str) -> str:
    return subprocess.run(
        [*how, sys.executable, "-c", SAY], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def test_another_process_has_the_same_network() -> None:
    assert said() == network_id()


def test_a_process_in_a_network_namespace_of_its_own_has_another_network_on_the_same_node() -> None:
    if subprocess.run([*APART, "true"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("this kernel lets no user make a network namespace")
    found = said(*APART)
    assert found != network_id()
    assert found.startswith(f"{node_id()} ")
