"""The main job in its short form, in real processes."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import datastates
from datastates import Repository, Status
from datastates.demo.main_job import (
    CONFIG,
    MAIN,
    MARKER,
    VARIANTS,
    Resumption,
    Variant,
    begin,
    choose_resumption,
    resume,
    resume_afresh,
    run_demo,
    train,
)
from datastates.demo.model import FULL, GPT, SHORT, Shape, Size, read_text
from datastates.demo.report import Cost, Outcome, Proof, Step, show
from datastates.errors import InvalidInput, Unsupported
from tests.support import warm
from tests.support.effort import part

COMMAND = [sys.executable, "-W", "error", "-m", "datastates.demo"]
EXAMPLE = [sys.executable, "-W", "error", str(Path(__file__).parents[2] / "examples" / "demo.py")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder where the demo ran, and how that went: as a module or as an example, by turns; in
    a thorough run twice."""
    root = tmp_path_factory.mktemp("demo") / "runs"
    for command in part([COMMAND, EXAMPLE]):
        done = warm.run(
            [*command, str(root), "--short"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return root, done


def test_demo_leaves_a_state_for_every_step_of_every_branch(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    with datastates.open(demo[0]) as repo:
        assert [state.step for state in repo.log("main")] == list(range(SHORT.main, 0, -1))
        for branch in ("low-lr", "no-dropout", "other-order"):
            states = repo.log(branch)
            assert [state.step for state in states] == list(range(SHORT.variants, 0, -1))
            assert states[-SHORT.warm].uid == repo.state("warm").uid


def test_variants_differ_from_main_and_from_each_other(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    with datastates.open(demo[0]) as repo:
        losses = {
            name: repo.log(name)[0].metrics["loss"]
            for name in ("low-lr", "no-dropout", "other-order")
        }
        losses["main"] = repo.state(f"main~{SHORT.main - SHORT.variants}").metrics["loss"]

    assert len(set(losses.values())) == len(losses)


def test_fresh_process_repeats_the_losses_and_the_digest_of_the_run_that_never_stopped(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    with datastates.open(demo[0]) as repo:
        never, again = (
            repo.log("main")[: SHORT.main - SHORT.warm],
            repo.log("resumed")[: SHORT.resumed - SHORT.warm],
        )

    assert [state.metrics["loss"] for state in again] == [state.metrics["loss"] for state in never]
    assert [state.digest for state in again] == [state.digest for state in never]
    assert never[0].run != again[0].run


def test_every_state_of_every_branch_is_on_disk_and_the_demo_says_so(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    root, done = demo
    with datastates.open(root) as repo:
        states = repo.find("step > 0")
        assert {state.status for state in states} == {Status.DURABLE}
        assert not repo.verify().damage
        again = choose_resumption(SHORT)
        captured = (
            SHORT.main
            + 3 * (SHORT.variants - SHORT.warm)
            + SHORT.resumed
            - SHORT.warm
            + again.until
            - again.start
        )
        assert len(states) == captured
    taken = sum(path.stat().st_size for path in (root / "packs").glob("*.safetensors"))

    assert "durable_every=1" in done.stdout
    said = re.search(
        r"(\d+) of (\d+) states can be restored; they take ([\d,]+) MB on disk", done.stdout
    )
    assert said is not None
    assert said.groups() == (str(captured), str(captured), f"{taken / 1e6:,.0f}")


def test_a_fresh_process_repeats_a_branch_from_a_random_step(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    root, done = demo
    again = choose_resumption(SHORT)
    with datastates.open(root) as repo:
        found = {state.step: state for state in repo.log("random") if state.step > again.start}
        whole = {state.step: state for state in repo.log(again.of)}

    assert list(found) == list(range(again.until, again.start, -1))
    assert [found[step].metrics["loss"] for step in found] == [
        whole[step].metrics["loss"] for step in found
    ]
    assert [found[step].digest for step in found] == [whole[step].digest for step in found]
    assert not {state.uid for state in found.values()} & {state.uid for state in whole.values()}
    assert f"from step {again.start} of {again.of}, {SHORT.repeated} steps" in done.stdout
    assert done.stdout.count("equal bit for bit") == 2


@pytest.mark.parametrize("size", [FULL, SHORT])
def test_a_random_step_lies_on_its_branch_alone_and_any_branch_is_chosen(size: Size) -> None:
    drawn = [choose_resumption(size, seed) for seed in range(200)]

    assert {each.of for each in drawn} == {"main", *(variant.branch for variant in VARIANTS)}
    assert all(each.until == each.start + size.repeated for each in drawn)
    assert all(each.start >= 1 and each.until <= size.main for each in drawn if each.of == "main")
    assert all(
        size.warm < each.start and each.until <= size.variants
        for each in drawn
        if each.of != "main"
    )
    assert choose_resumption(size) == choose_resumption(size)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.branch)
def test_a_variant_is_repeated_with_its_own_settings(tmp_path: Path, variant: Variant) -> None:
    with datastates.open(tmp_path, config=CONFIG) as repo:
        train(repo, SHORT, MAIN, SHORT.warm, lambda: None)
        train(repo, SHORT, variant, SHORT.variants, lambda: None, start="warm")
    resume(tmp_path, SHORT, Resumption("random", variant.branch, SHORT.warm + 1, SHORT.variants))

    with datastates.open(tmp_path) as repo:
        assert [state.digest for state in repo.log("random")] == [
            state.digest for state in repo.log(variant.branch)
        ]
        assert repo.log("random")[0].run != repo.log(variant.branch)[0].run


def test_demo_prints_the_graph_the_proof_the_best_state_the_cost_and_the_picture(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    root, done = demo
    output = done.stdout

    assert "equal bit for bit" in output
    assert "best state" in output
    assert "captures blocked training" in output
    assert "losses.png" in output
    for name in ("main", "warm", "low-lr", "no-dropout", "other-order", "resumed"):
        assert name in output
    assert (root / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_demo_ends_with_the_labels_that_were_made_wrong(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    root, done = demo
    last = re.search(
        r"(\d+) of (\d+) suspects are among the (\d+) that were made wrong", done.stdout
    )

    assert last is not None
    found, suspects, wrong = map(int, last.groups())
    assert wrong == SHORT.pictures // 10
    assert found / suspects > 0.7
    assert found / wrong > 0.4
    assert "1/3 epoch each" in done.stdout
    assert (root / "outliers.html").read_text().count("data:image/png") == 100
    with datastates.open(root / "pictures") as repo:
        assert [len(repo.log(f"seed-{seed}")) for seed in (0, 1)] == [SHORT.epochs, SHORT.epochs]


def test_lanes_are_cut_and_not_folded_on_a_narrow_terminal(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    with datastates.open(demo[0]) as repo:
        outcome = Outcome((), repo.state("warm"), Cost(1, 1.0, 1.0), 0, 0, 0, Path("none.png"))
        cut, whole = (
            _shown(outcome, repo, is_terminal=is_terminal) for is_terminal in (True, False)
        )

    assert sum("*" in line for line in cut) == 8
    assert all(line[0] in "*│├" and len(line) <= 40 for line in cut)
    assert any(line.endswith("…") for line in cut)
    assert len(whole) == len(cut)
    assert any(len(line) > 40 for line in whole)


def _shown(outcome: Outcome, repo: Repository, *, is_terminal: bool) -> list[str]:
    """The lines of the graph, 40 columns wide."""
    file = io.StringIO()
    show(outcome, repo, Console(file=file, width=40, force_terminal=is_terminal, color_system=None))
    return file.getvalue().split("best state")[0].splitlines()


def test_the_fresh_process_tells_of_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the demo itself starts one from nothing
    monkeypatch.setattr("datastates.demo.main_job.subprocess.Popen", warm.Popen)
    ticks: list[None] = []
    with datastates.open(tmp_path) as repo:
        train(repo, SHORT, MAIN, SHORT.warm, lambda: None)
    what = Resumption("resumed", "main", SHORT.warm, SHORT.resumed)
    resume_afresh(tmp_path, what, lambda: ticks.append(None), short=True)

    assert len(ticks) == SHORT.resumed - SHORT.warm
    shutil.rmtree(tmp_path / "packs")
    with pytest.raises(subprocess.CalledProcessError):
        resume_afresh(tmp_path, what, lambda: None, short=True)


def test_outcome_is_not_bit_exact_when_one_loss_or_the_digest_differs(
    demo: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    with datastates.open(demo[0]) as repo:
        best = repo.state("warm")
    steps = (Step(1, 0.5, 0.5), Step(2, 0.25, 0.25))

    def outcome(steps: tuple[Step, ...], digests: tuple[str, str]) -> Outcome:
        proofs = (
            Proof("resumed", "main", (Step(1, 0.5, 0.5),), ("a", "a")),
            Proof("random", "low-lr", steps, digests),
        )
        return Outcome(proofs, best, Cost(), 0, 0, 0, Path("none.png"))

    assert outcome(steps, ("a", "a")).is_bit_exact
    assert not outcome(steps, ("a", "b")).is_bit_exact
    assert not outcome((*steps, Step(3, 0.1, 0.1 + 1e-12)), ("a", "a")).is_bit_exact
    assert not outcome((), ("a", "a")).is_bit_exact


def test_interrupted_demo_says_where_its_states_are_and_keeps_them(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    process = warm.Popen(
        [*COMMAND, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_for_a_state(root, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()

    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    with datastates.open(root) as repo:
        assert repo.verify("main").step >= 1


def _wait_for_a_state(root: Path, process: subprocess.Popen[str]) -> None:
    while not list(root.glob("packs/*.manifest")):
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(timeout=0.05) is None, (
                "the demo ended before its first state was durable"
            )


@pytest.mark.parametrize(
    ("module", "package"), [("matplotlib", "matplotlib"), ("sklearn", "scikit-learn")]
)
def test_demo_without_its_extra_says_so_before_it_changes_or_trains_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    begin(tmp_path)
    (tmp_path / "losses.png").touch()
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(
        Unsupported, match=rf"the demo needs {package}: pip install 'datastates\[demo\]'"
    ):
        run_demo(tmp_path, short=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.png", MARKER]


def test_folder_with_something_else_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(InvalidInput, match="not of an earlier demo"):
        begin(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_error_of_the_module_is_one_line_as_in_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    run = subprocess.run(
        [sys.executable, "-m", "datastates.demo", str(tmp_path), "--short"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr.count("\n")) == (5, 1)
    assert run.stderr.startswith("error: ")


def test_folder_of_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    begin(tmp_path / "runs")
    (tmp_path / "runs" / "old.png").touch()

    begin(tmp_path / "runs")

    assert [path.name for path in (tmp_path / "runs").iterdir()] == [MARKER]


def test_held_out_text_is_not_trained_on() -> None:
    text = read_text(128)

    assert len(text.held_out) == 32
    assert 3_900_000 < text.train.numel() <= 4_000_000 + 129
    assert text.train.shape[1] == text.held_out.shape[1] == 129
    assert int(text.train.max()) < 256


def test_head_of_the_model_is_its_embedding() -> None:
    model = GPT(Shape(layers=1, heads=2, width=16, context=8))

    assert model.head.weight is model.embed.weight
    assert sum(
        parameter.numel() for parameter in GPT(Shape(layers=5)).parameters()
    ) == pytest.approx(1e6, rel=0.1)
