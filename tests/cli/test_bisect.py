"""``bisect``: by a metric, a command and a function; broken off and gone on with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import datastates
from tests.cli.conftest import Invoke

CHECK = f"""{sys.executable} -c "
import sys, safetensors.numpy
sys.exit(int(safetensors.numpy.load_file(sys.argv[1] + '/model.safetensors')['weight'].max() > 9))
" {{path}}"""


@pytest.fixture
def uids(tmp_path: Path) -> list[str]:
    """Nine states, whose model is bad from step 6 on."""
    model = torch.nn.Linear(2, 2)
    with (
        datastates.open(tmp_path / "runs", memory_bytes=64 << 20) as repo,
        repo.track(rng=False, model=model) as run,
    ):
        made = []
        for step in range(1, 10):
            with torch.no_grad():
                model.weight.fill_(10.0 if step >= 6 else 0.1)
            made.append(run.capture(metrics={"loss": float(step)}).wait("durable").uid)
    return made


def test_by_a_metric(uids: list[str], invoke: Invoke) -> None:
    done = invoke("bisect", uids[0], "main", "--metric", "loss >= 4", "--json")
    assert (done.json["first"], done.json["restores"], done.json["good"]) == (uids[3], 0, uids[2])


def test_by_a_command_that_gets_the_tensors_as_files(uids: list[str], invoke: Invoke) -> None:
    done = invoke("bisect", "main~8", "main", "--run", CHECK, "--only", "model")
    assert done.code == 0, done.err
    assert uids[5][:10] in done.out
    assert "is the first bad one" in done.out
    again = invoke("bisect", "main~8", "main", "--run", CHECK, "--only", "model", "--json")
    assert (again.json["first"], again.json["restores"]) == (uids[5], 0), "what was found is kept"
    anew = invoke(
        "bisect", "main~8", "main", "--run", CHECK, "--only", "model", "--json", "--reset"
    )
    assert (anew.json["first"], anew.json["restores"]) == (uids[5], 3)


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "is not bad"), (1, "is not good"), (127, "could not be run"), (130, "ended by")],
)
def test_a_command_that_says_nothing_is_found_out(
    uids: list[str], invoke: Invoke, code: int, said: str
) -> None:
    done = invoke("bisect", "main~8", "main", "--run", f"exit {code}")
    assert (done.code, said in done.err) == (5, True), done


def test_a_command_may_skip(uids: list[str], invoke: Invoke) -> None:
    skipping = (
        "case {uid} in "
        + "".join(f"{uid}) exit 0;; " for uid in uids[:3])
        + "".join(f"{uid}) exit 1;; " for uid in uids[7:])
    )
    done = invoke("bisect", "main~8", "main", "--run", f"{skipping} *) exit 125;; esac", "--json")
    assert (done.json["first"], done.json["candidates"]) == (None, uids[3:8])


def test_by_a_function_that_is_interrupted_and_goes_on(uids: list[str], invoke: Invoke) -> None:
    Path("judging.py").write_text(
        "import pathlib\ndef bad(tree):\n    with open('asked', 'a') as asked: asked.write('x')\n  "
        "  if pathlib.Path('stop').exists() and len(pathlib.Path('asked').read_text()) == 3: raise"
        " KeyboardInterrupt\n    return bool(tree['model']['weight'].max() > 9)\n"
    )
    Path("stop").touch()
    broken = invoke("bisect", "main~8", "main", "--python", "judging:bad")
    assert broken.code == 130
    assert "the same command resumes" in broken.err
    Path("stop").unlink()
    done = invoke("bisect", "main~8", "main", "--python", "judging:bad", "--json")
    assert (done.json["first"], done.json["restores"]) == (uids[5], 1)


def test_one_question_is_asked(uids: list[str], invoke: Invoke) -> None:
    assert invoke("bisect", "main~8", "main").code == 5
    assert invoke("bisect", "main~8", "main", "--metric", "loss > 1", "--run", "true").code == 5
