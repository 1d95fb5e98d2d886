"""Processes that die at every step, and processes that share a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from datastates.storage.local import LocalTier
from datastates.testing.states import chunks_of, small, stream
from tests.support import warm

STEPS = ["pack-written", "pack-renamed", "manifest-written", "manifest-renamed"]


def run(script: str, *arguments: object) -> None:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = warm.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_CRASHES = """
import os, sys
from pathlib import Path
from datastates.storage.local import LocalTier
from datastates.testing import crash_at
from datastates.testing.states import small

def dies(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137

for step in sys.argv[2:]:
    root = Path(sys.argv[1], step)
    base = LocalTier(root).put(small("base", 1, 2)).manifest
    tier = LocalTier(root, on_step=crash_at(step))
    if step == "manifest-removed":
        LocalTier(root).put(small("s", 2, 3), base=base)
        dies(lambda: tier.remove("s"))
    else:
        dies(lambda: tier.put(small("s", 2, 3), base=base))
"""


@pytest.fixture(scope="module")
def wrecks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each step, in which a process died right after it."""
    folder = tmp_path_factory.mktemp("wrecks")
    run(_CRASHES, folder, *STEPS, "manifest-removed")
    return folder


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_while_putting_leaves_the_whole_state_or_nothing(wrecks: Path, step: str) -> None:
    tier = LocalTier(wrecks / step)
    is_visible = step == "manifest-renamed"
    assert sorted(tier.uids()) == (["base", "s"] if is_visible else ["base"])
    left = {
        "pack-written": {".tmp-s.0.manifest", ".tmp-s.0.safetensors"},
        "pack-renamed": {".tmp-s.0.manifest", "s.0.safetensors"},
        "manifest-written": {".tmp-s.0.manifest", "s.0.safetensors"},
        "manifest-renamed": set(),
    }
    assert {path.name for path in tier.sweep()} == left[step]
    assert tier.sweep() == []
    assert tier.put(small("s", 2, 3), base=tier.manifest("base")).bytes_new == (
        0 if is_visible else 100
    )
    for state in (small("base", 1, 2), small("s", 2, 3)):
        with tier.open(state.manifest.origin.uid) as reader:
            assert stream(reader) == chunks_of(state)


def test_a_crash_while_removing_leaves_only_what_a_sweep_finds(wrecks: Path) -> None:
    tier = LocalTier(wrecks / "manifest-removed")
    assert list(tier.uids()) == ["base"]
    assert [path.name for path in tier.sweep()] == ["s.0.safetensors"]
    with tier.open("base") as reader:
        assert stream(reader) == chunks_of(small("base", 1, 2))


_WORKERS = """
import os, sys
from pathlib import Path
from datastates.storage.local import LocalTier
from datastates.testing.states import chunks_of, small, stream

def work(name):
    tier, base, kept = LocalTier(Path(sys.argv[1])), None, []
    for number in range(40):
        state = small(f"{name}{number}", 1, ord(name), 1000 * ord(name) + number // 2, 7 * number)
        base = tier.put(state, base=base).manifest
        kept.append(state)
        shared = small(f"shared{number}", number, 3)
        tier.put(shared)
        if number % 3 == 0:
            tier.remove(kept.pop(0).manifest.origin.uid)
        if number % 10 == 0:
            assert not [path for path in tier.sweep() if path.name.startswith(name)]
        for state in kept[-3:]:
            with tier.open(state.manifest.origin.uid) as reader:
                assert stream(reader) == chunks_of(state)

children = []
for name in "abc":
    child = os.fork()
    if not child:
        work(name)
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""


def test_processes_share_a_folder_without_losing_anything(tmp_path: Path) -> None:
    run(_WORKERS, tmp_path)
    tier = LocalTier(tmp_path)
    uids = list(tier.uids())
    assert len([uid for uid in uids if uid.startswith("shared")]) == 40
    assert len(uids) == 40 + 3 * (40 - 14)
    for uid in uids:
        tier.open(uid).verify()
    assert tier.sweep() == []
    for uid in uids:
        tier.remove(uid)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock", ".chunks"}
