"""How the values of a tensor are spread, against plain NumPy on what is restored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import datastates
from datastates import Repository
from datastates.compare.diff import Histogram, Scale, Spread, histogram
from datastates.errors import InvalidInput, NotFound, Unavailable, Unsupported


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with datastates.open(tmp_path, memory_bytes=256 << 20) as opened:
        yield opened


def captured(repo: Repository, *trees: dict[str, Any]) -> list[str]:
    """A state of each tree, on a branch of its own."""
    for number, tree in enumerate(trees):
        with repo.track(branch=f"b{number}", rng=False, tree=tree) as run:
            run.capture()
    return [f"b{number}" for number in range(len(trees))]


def restored(repo: Repository, branch: str, name: str = "w") -> Any:
    """The tensor's values as plain numbers."""
    tensor = repo.load(branch)["tree"][name]
    return (
        (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
        .to(torch.float64)
        .numpy()
        .reshape(-1)
    )


def check(found: Spread, values: Any, edges: Any, scaled: Any) -> None:
    """All numbers of one state; ``scaled`` are those that lie in bins, on the scale of
    ``edges``."""
    finite = values[np.isfinite(values)]
    assert found.counts == tuple(
        np.histogram(scaled, bins=len(edges) - 1, range=(edges[0], edges[-1]))[0]
    )
    assert (found.elements, found.nan, found.infinite) == (
        values.size,
        np.isnan(values).sum(),
        np.isinf(values).sum(),
    )
    assert (found.least, found.most) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12)
    assert found.deviation == pytest.approx(finite.std(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("bins", [1, 7, 64])
def test_counts_are_those_of_numpy_over_the_values_of_all_states(
    repo: Repository, bins: int
) -> None:
    torch.manual_seed(4)
    old = torch.randn(1300, 1001)  # more than one chunk, and no whole number of them
    new = old * 1.5 + 0.1
    new[3, 5], new[4, 6], new[5, 7] = math.nan, math.inf, -math.inf
    revs = captured(repo, {"w": old}, {"w": new})
    found = histogram(repo.core, revs, "tree/w", bins=bins)
    values = [restored(repo, rev) for rev in revs]
    finite = [each[np.isfinite(each)] for each in values]
    edges = np.linspace(
        min(each.min() for each in finite), max(each.max() for each in finite), bins + 1
    )
    assert found.edges == tuple(edges)
    for spread, whole, kept in zip(found.states, values, finite, strict=True):
        check(spread, whole, edges, kept)
        assert sum(spread.counts) + spread.nan + spread.infinite == spread.elements
    assert [spread.state for spread in found.states] == [repo.state(rev).uid for rev in revs]


def test_on_the_other_scale_bins_hold_magnitudes_and_zeros_are_told_apart(repo: Repository) -> None:
    torch.manual_seed(5)
    values = torch.randn(5000) ** 6
    values[::10] = 0
    values[1::10] *= -1
    (rev,) = captured(repo, {"w": values})
    found = histogram(repo.core, [rev], "tree/w", bins=30, scale=Scale.LOG)
    plain = restored(repo, rev)
    powers = np.log10(np.abs(plain[plain != 0]))
    edges = np.linspace(powers.min(), powers.max(), 31)
    assert found.edges == pytest.approx(tuple(10.0**edges))
    check(found.states[0], plain, edges, powers)
    assert found.states[0].zeros == 500


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_every_dtype_is_counted_by_its_numbers(repo: Repository, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    (rev,) = captured(repo, {"w": (torch.rand(100, 30) * 3).to(dtype)})
    found = histogram(repo.core, [rev], "tree/w", bins=16)
    values = restored(repo, rev)
    check(found.states[0], values, np.linspace(values.min(), values.max(), 17), values)


def test_ties_expansions_and_other_orders_of_storing_count_each_element_once(
    repo: Repository,
) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    (rev,) = captured(
        repo,
        {
            "w": base,
            "tied": base,
            "turned": base.t(),
            "wide": torch.arange(3.0).reshape(3, 1).expand(3, 5),
        },
    )
    for name in ("w", "tied", "turned", "wide"):
        values = restored(repo, rev, name)
        found = histogram(repo.core, [rev], f"tree/{name}", bins=4)
        check(found.states[0], values, np.linspace(values.min(), values.max(), 5), values)


@pytest.mark.parametrize("value", [0.0, 3.5, -1e20, 1e300, 5e-324])
def test_equal_values_lie_in_one_bin_that_holds_them(repo: Repository, value: float) -> None:
    (rev,) = captured(repo, {"w": torch.full((9,), value, dtype=torch.float64)})
    found = histogram(repo.core, [rev], "tree/w", bins=5)
    assert sorted(found.states[0].counts) == [0, 0, 0, 0, 9]
    assert found.edges[0] < value < found.edges[-1]


def test_nothing_to_count_is_no_error(repo: Repository) -> None:
    revs = captured(
        repo, {"w": torch.empty(0, 3)}, {"w": torch.full((2,), math.nan)}, {"w": torch.zeros(4)}
    )
    for rev, scale, elements in (
        (revs[0], Scale.LINEAR, 0),
        (revs[1], Scale.LINEAR, 2),
        (revs[2], Scale.LOG, 4),
    ):
        (spread,) = histogram(repo.core, [rev], "tree/w", bins=3, scale=scale).states
        assert (spread.counts, spread.elements) == ((0, 0, 0), elements)
    assert spread.zeros == 4


def test_values_too_far_apart_for_bins_of_one_width_are_refused_and_counted_by_magnitude(
    repo: Repository,
) -> None:
    (rev,) = captured(repo, {"w": torch.tensor([-1.7e308, 1.0, 1.7e308], dtype=torch.float64)})
    with pytest.raises(InvalidInput, match="log"):
        histogram(repo.core, [rev], "tree/w")
    assert sum(histogram(repo.core, [rev], "tree/w", scale=Scale.LOG).states[0].counts) == 3


def test_what_cannot_be_counted_is_named(repo: Repository) -> None:
    (rev,) = captured(repo, {"weight": torch.ones(2)})
    with pytest.raises(NotFound, match="did you mean tree/weight"):
        histogram(repo.core, [rev], "tree/wieght")
    for wrong in ({"bins": 0}, {"bins": 513}):
        with pytest.raises(InvalidInput, match="bins"):
            # of one type each
            histogram(repo.core, [rev], "tree/weight", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="from 1 to 4"):
        histogram(repo.core, [rev] * 5, "tree/weight")


def test_a_dtype_with_which_torch_does_not_compute_is_refused(repo: Repository) -> None:
    (rev,) = captured(repo, {"w": torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    with pytest.raises(
        Unsupported, match=r"tree/w is float4_e2m1fn_x2, .*: its values cannot be counted"
    ):
        histogram(repo.core, [rev], "tree/w")


def test_a_large_tensor_is_read_in_pieces_and_ends_when_told_to(repo: Repository) -> None:
    class Enough(Exception):
        pass

    (rev,) = captured(repo, {"w": torch.zeros(6 << 20)})
    seen: list[tuple[int, int]] = []
    histogram(repo.core, [rev], "tree/w", on_progress=lambda *at: seen.append(at))
    total = 2 * 4 * (6 << 20)
    assert seen == [(done, total) for done in range(4 << 20, total + 1, 4 << 20)]

    def stop(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        histogram(repo.core, [rev], "tree/w", on_progress=stop)


def test_a_state_without_bytes_names_the_nearest(repo: Repository) -> None:
    tree = {"w": torch.zeros(3)}
    with repo.track(branch="main", rng=False, tree=tree, durable_every=1) as run:
        for _ in range(2):
            tree["w"] += 1
            run.capture().wait("durable")
    repo.flush()
    gone = repo.state("main")
    found: Histogram = histogram(repo.core, ["main", "main~1"], "tree/w", bins=2)
    assert [spread.mean for spread in found.states] == [2.0, 1.0]
    repo.close()
    for file in repo.location.packs.glob(f"{gone.uid}*"):
        file.unlink()
    # a folder
    with datastates.open(repo.location.root) as again, pytest.raises(Unavailable, match="nearest"):  # type: ignore[arg-type]
        histogram(again.core, [gone], "tree/w")
