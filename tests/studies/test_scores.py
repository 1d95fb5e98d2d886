"""The arithmetic of scores, against NumPy's and against what can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datastates.errors import InvalidInput
from datastates.studies.outlier_data import Floats
from datastates.studies.outlier_scores import (
    Features,
    Scores,
    Spread,
    Tally,
    put_together,
)
from datastates.studies.outlier_suspects import (
    Selection,
    by_another_class,
    by_distance,
    by_mixture,
    check_rate,
    estimate,
    percentiles,
    ranked,
    standardise,
)

NAN = float("nan")
values = st.lists(
    st.one_of(st.just(NAN), st.integers(-3, 3).map(float), st.floats(-100, 100)),
    min_size=1,
    max_size=30,
)


@given(values)
def test_percentile_is_the_share_of_the_others_that_a_value_stands_above(
    plain: list[float],
) -> None:
    found = percentiles(np.array(plain))
    known = [value for value in plain if value == value]
    for value, share in zip(plain, found, strict=True):
        if value != value:
            assert np.isnan(share)
        elif len(known) == 1:
            assert share == 50
        else:
            below, equal = (
                sum(other < value for other in known),
                sum(other == value for other in known) - 1,
            )
            assert share == pytest.approx(100 * (below + equal / 2) / (len(known) - 1))


def test_standardised_values_have_mean_0_and_deviation_1_over_what_is_known() -> None:
    found = standardise(np.array([1.0, NAN, 3.0, 8.0]))

    assert np.isnan(found[1])
    assert np.nanmean(found) == pytest.approx(0)
    assert np.nanstd(found) == pytest.approx(1)
    assert standardise(np.array([2.0, 2.0])).tolist() == [0, 0]
    assert np.isnan(standardise(np.array([NAN, NAN]))).all()


def test_tally_is_the_mean_of_what_was_added() -> None:
    tally = Tally(4)
    tally.add(np.array([0, 2]), np.array([1.0, 2.0]))
    tally.add(np.array([2, 3]), np.array([4.0, 5.0]))

    np.testing.assert_array_equal(tally.mean(), [1, NAN, 3, 5])


@given(
    st.lists(
        values.filter(lambda plain: len(plain) >= 5).map(lambda plain: plain[:5]),
        min_size=1,
        max_size=5,
    )
)
def test_spread_is_the_deviation_of_the_percentiles_over_those_that_know_a_sample(
    sources: list[list[float]],
) -> None:
    spread = Spread(5)
    for source in sources:
        spread.add(np.array(source))
    shares = np.array([percentiles(np.array(source)) for source in sources])

    for sample, found in enumerate(spread.deviation()):
        known = shares[~np.isnan(shares[:, sample]), sample]
        assert spread.sources[sample] == len(known)
        assert (
            np.isnan(found)
            if len(known) < 2
            else found == pytest.approx(np.std(known, ddof=1), abs=1e-5)
        )


def test_score_is_the_mean_of_both_percentiles_or_the_one_there_is() -> None:
    scores = put_together(
        np.array([1.0, 2.0, 3.0, NAN, NAN]), np.array([30.0, NAN, 20.0, 10.0, NAN]), Spread(5)
    )

    np.testing.assert_array_equal(scores.score, [50, 50, 75, 0, NAN])
    assert scores.order().tolist()[0] == 2
    assert scores.order().tolist()[-1] == 4, "what nothing is known of comes last"


def test_equal_scores_are_told_apart_by_how_far_they_stand_out() -> None:
    scores = put_together(np.array([0.0, 9.0, 1.0]), np.array([1.0, 0.0, 2.0]), Spread(3))

    assert scores.score.tolist() == [25, 50, 75]
    tied = put_together(np.array([0.0, 9.0]), np.array([1.0, 0.0]), Spread(2))
    assert tied.score.tolist() == [50, 50]
    far = put_together(np.array([0.0, 1.0, 9.0, 0.5]), np.array([9.0, 8.9, 0.0, 0.1]), Spread(4))
    assert far.score[0] == far.score[2] == 50
    assert far.order().tolist() == [1, *sorted([0, 2], key=lambda at: -far.strength[at]), 3]


def bare(strength: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Scores:
    nothing = np.full(len(strength), NAN)
    return Scores(
        percentiles(strength),
        strength,
        nothing,
        nothing,
        nothing,
        np.zeros(len(strength), dtype=np.int64),
        {"loss": strength},
    )


def select(scores: Scores, rate: float | None = None) -> Selection:
    return by_mixture(scores.strength, rate, scores.order())


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_noise_rate_is_the_weight_of_the_higher_group(share: float) -> None:
    rng = np.random.default_rng(0)
    strength = np.concatenate(
        [rng.normal(0, 1, round(4000 * (1 - share))), rng.normal(6, 1, round(4000 * share))]
    )

    assert estimate(strength) == pytest.approx(share, abs=0.01)
    selection = select(bare(strength))
    assert selection.suspects.sum() == round(selection.noise_rate * 4000)
    assert selection.suspects[-round(4000 * share) :].mean() > 0.95


def test_nothing_is_a_suspect_where_all_are_alike() -> None:
    assert estimate(np.zeros(100)) == 0
    assert estimate(np.zeros(0)) == 0
    assert estimate(np.array([1.0, 2.0])) == 0
    assert not select(bare(np.zeros(100))).suspects.any()


def test_most_samples_are_never_suspects() -> None:
    assert estimate(np.concatenate([np.zeros(5), np.linspace(100, 101, 95)])) == 0.5


def test_given_rate_takes_that_share_of_what_is_known() -> None:
    scores = bare(np.array([5.0, NAN, 1.0, 4.0, 2.0]))

    assert select(scores, 0.5).suspects.tolist() == [True, False, False, True, False]
    assert select(scores, 1.0).suspects.tolist() == [True, False, True, True, True]
    assert not select(scores, 0.0).suspects.any()
    with pytest.raises(InvalidInput, match="from 0 to 1"):
        check_rate(-0.1)


@pytest.mark.parametrize("gross", [[], [1e3], [1e6], [1e12, 1e9, 1e6], [np.inf], [np.inf, 1e9]])
def test_the_noise_rate_of_a_regression_is_estimated_in_spite_of_gross_errors(
    gross: list[float],
) -> None:
    random = np.random.default_rng(0)
    wrong = np.concatenate([gross, random.normal(0, 10, 51 - len(gross)) ** 2 + 30])
    squares = np.concatenate([random.normal(0, 1, 949) ** 2, wrong])
    scores = put_together(squares, np.full(1000, np.nan), Spread(1000))
    selection = select(scores)
    assert 0.04 < selection.noise_rate < 0.08
    assert selection.suspects[949:].mean() > 0.85
    assert set(scores.order()[: len(gross)]) == set(range(949, 949 + len(gross)))
    assert not np.isnan(scores.strength).any()


def test_a_few_gross_errors_do_not_decide_how_far_the_others_stand_out() -> None:
    losses = np.random.default_rng(0).exponential(size=1000)
    losses[:3] = 1e9
    found = standardise(losses)
    assert found[3:].std() > 0.3
    assert (found[:3] > found[3:].max()).all()


def classified(wrong: int, hard: float) -> tuple[Floats, Floats]:
    """Margins of 1000 samples under the given class and under another. ``wrong`` have the margin
    of another class, and some others are hard."""
    random = np.random.default_rng(0)
    given, another = random.normal(-5, 1, 1000), random.normal(5, 1, 1000)
    given[:wrong] = random.normal(5, 1, wrong)
    given[wrong:] += random.exponential(hard, 1000 - wrong)
    return given, another


@pytest.mark.parametrize("wrong", [50, 100, 300])
def test_share_of_wrong_classes_is_that_of_samples_that_look_like_another_class(wrong: int) -> None:
    given, another = classified(wrong, hard=0.5)
    selection = by_another_class(given, another, None, ranked(given))

    assert selection.noise_rate == pytest.approx(wrong / 1000, rel=0.1, abs=0.005)
    assert selection.suspects[:wrong].mean() > 0.8
    assert selection.false_suspects is not None
    assert selection.false_suspects < 0.4 * selection.suspects.sum()


def test_share_is_measured_above_the_lower_quartile_of_another_class() -> None:
    given = np.concatenate([np.full(90, -5.0), np.full(10, 30.0)])
    selection = by_another_class(given, np.arange(100.0), None, ranked(given))

    assert selection.noise_rate == pytest.approx(0.1 / 0.75)


def test_distance_is_that_of_mahalanobis_without_the_farthest_tenth() -> None:
    random = np.random.default_rng(0)
    plain = random.normal(size=(200, 3)) * [1, 2, 5]
    plain[:15] += 40
    rows, labels = np.arange(200), np.zeros(200, dtype=np.int64)
    features = Features(torch.from_numpy(plain), rows, labels)

    kept = plain[15:]
    expected = np.einsum(
        "nd,de,ne->n", c := plain - kept.mean(axis=0), np.linalg.inv(np.cov(kept.T)), c
    )
    found = features.distance(torch.from_numpy(plain))
    assert np.corrcoef(found[15:] ** 2, expected[15:])[0, 1] > 0.9
    assert found[:15].min() > 2 * found[15:].max()


def test_neighbours_are_others_by_the_angle_of_standardised_features() -> None:
    plain = np.random.default_rng(0).normal(size=(60, 4))
    rows = np.arange(60)
    features = Features(torch.from_numpy(plain), rows, np.zeros(60, dtype=np.int64))

    scaled = (plain - plain.mean(axis=0)) / plain.std(axis=0)
    scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
    alike = scaled @ scaled.T
    np.fill_diagonal(alike, -1)
    expected = 1 - np.sort(alike)[:, -10:].mean(axis=1)
    found = features.neighbours(torch.from_numpy(plain), rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_clean_classes_give_few_suspects_or_none() -> None:
    given, another = classified(0, hard=2.0)
    assert 0 < by_another_class(given, another, None, ranked(given)).suspects.sum() < 20
    given, another = classified(0, hard=0.1)
    assert not by_another_class(given, another, None, ranked(given)).suspects.any()


def test_more_suspects_than_wrong_classes_are_told_to_be_false() -> None:
    given, another = classified(100, hard=0.5)
    selection = by_another_class(given, another, 0.3, ranked(given))

    assert selection.suspects.sum() == 300
    assert selection.false_suspects == pytest.approx(200, rel=0.2)


def test_distances_far_from_all_others_are_suspects_and_normal_ones_are_not() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    assert not by_distance(values).suspects.any()
    values[:20], values[20], values[21] = 8, np.inf, NAN
    found = by_distance(values)
    assert np.flatnonzero(found.suspects).tolist() == list(range(21))
    assert found.false_suspects is None
