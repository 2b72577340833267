"""avg@k, pass@k and maj@k against independent computations."""

import itertools
from collections import Counter

import mpmath
import numpy as np
import pytest

from beam_rl.evals.statistics import avg_at_k, maj_at_k, paired_difference, pass_at_k, t_quantile


@pytest.fixture(params=range(5))
def correct(request: pytest.FixtureRequest) -> np.ndarray:
    rng = np.random.default_rng(request.param)
    problems, samples = int(rng.integers(2, 80)), int(rng.integers(1, 9))
    return rng.random((problems, samples)) < rng.random((problems, 1))


def test_error_is_clustered_by_problem(correct: np.ndarray) -> None:
    estimate = avg_at_k(correct)
    assert estimate.mean == pytest.approx(np.count_nonzero(correct) / correct.size)
    # the sandwich estimate of a regression on a constant, clusters = problems, corrected for their number
    residuals = (correct - correct.mean()).sum(axis=1)
    clusters = len(correct)
    assert estimate.se == pytest.approx(np.sqrt(clusters / (clusters - 1) * (residuals**2).sum()) / correct.size)


def test_repeating_each_sample_does_not_shrink_the_error(correct: np.ndarray) -> None:
    assert avg_at_k(np.repeat(correct, 4, axis=1)) == pytest.approx(avg_at_k(correct))


def test_pass_at_k_is_the_mean_over_all_subsets(correct: np.ndarray) -> None:
    samples = correct.shape[1]
    for k in range(1, samples + 1):
        subsets = [correct[:, list(chosen)].any(axis=1).mean() for chosen in itertools.combinations(range(samples), k)]
        assert pass_at_k(correct, k) == pytest.approx(np.mean(subsets))
    assert pass_at_k(correct) == pytest.approx(correct.any(axis=1).mean())
    assert pass_at_k(correct, 1) == pytest.approx(avg_at_k(correct).mean)


def test_majority_with_ties_is_the_expectation_of_a_random_choice() -> None:
    rng = np.random.default_rng(0)
    answers = [[str(value) for value in rng.integers(0, 3, 8)] for _ in range(40)]
    correct = [[answer == "0" for answer in row] for row in answers]
    expected = []
    for row in answers:
        ranked = Counter(row).most_common()
        tied = [answer for answer, count in ranked if count == ranked[0][1]]
        expected.append(tied.count("0") / len(tied))
    assert maj_at_k(answers, correct) == pytest.approx(np.mean(expected))


def test_missing_answers_do_not_vote() -> None:
    assert maj_at_k([[None, None, "5"], [None, None, None]], [[False, False, True], [False] * 3]) == 0.5


@pytest.mark.parametrize("bad", [[], [[]], [1, 0], [[[1]]]])
def test_wrong_shape_is_refused_instead_of_averaged(bad: list) -> None:
    with pytest.raises(ValueError, match="shape"):
        avg_at_k(bad)


def test_pass_at_more_than_was_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@9"):
        pass_at_k(np.ones((2, 8)), 9)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 29, 30, 255, 1000])
@pytest.mark.parametrize("probability", [0.75, 0.95, 0.975, 0.9995])
def test_quantiles_of_students_t_agree_with_the_incomplete_beta_function(degrees: int, probability: float) -> None:
    t = t_quantile(probability, degrees)
    tail = mpmath.betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True) / 2
    assert float(1 - tail) == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_paired_interval_is_that_of_the_problems_differences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problems = int(rng.integers(2, 60))
    before, after = rng.binomial(8, rng.random(problems)) / 8, rng.binomial(8, rng.random(problems)) / 8
    found = paired_difference(before, after)
    # a regression of the differences on a constant, by least squares
    differences = after - before
    (mean,), (residuals,), *_ = np.linalg.lstsq(np.ones((problems, 1)), differences, rcond=None)
    se = np.sqrt(residuals / (problems - 1) / problems)
    assert (found.mean, found.se) == (pytest.approx(mean), pytest.approx(se))
    t = mpmath.findroot(
        lambda x: (
            mpmath.betainc((problems - 1) / 2, 0.5, 0, (problems - 1) / (problems - 1 + x * x), regularized=True) - 0.05
        ),
        2.1 if problems > 2 else 12.7,
    )
    assert (found.low, found.high) == (pytest.approx(mean - float(t) * se), pytest.approx(mean + float(t) * se))


def test_paired_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        difficulty = rng.normal(size=30)  # in both runs, so that it must not widen the interval
        before, after = (difficulty + rng.normal(scale=0.1, size=30) + shift for shift in (0.0, 0.02))
        found = paired_difference(before, after)
        covered += found.low <= 0.02 <= found.high
        assert found.high - found.low < 0.2, "unpaired it would be about 1"
    assert 0.935 < covered / 2000 < 0.965


def test_one_problem_has_no_error_and_runs_of_other_lengths_no_difference() -> None:
    assert np.isnan(paired_difference([0.5], [0.75])[1:]).all()
    with pytest.raises(ValueError, match="equal vectors"):
        paired_difference([0.5, 0.5], [0.5])


def test_missing_samples_are_left_out_and_not_wrong() -> None:
    nan = float("nan")
    assert avg_at_k([[1, nan], [nan, nan], [1, 0]]).mean == pytest.approx(0.75)
    assert avg_at_k([[1, nan], [0, 1]]) == avg_at_k([[1, 1], [0, 1]])
    assert pass_at_k([[1, nan, 0], [0, 0, 0]], 2) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k([[1, nan, 0], [0, 0, 0]], 3)
    assert maj_at_k([["5", None], ["5", "6"]], [[1, nan], [0, 1]]) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="no problem has a sample"):
        avg_at_k([[nan]])
