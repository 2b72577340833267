"""avg@k, pass@k and maj@k against independent computations."""

import itertools
from collections import Counter

import numpy as np
import pytest

from beam_rl.evals.statistics import avg_at_k, maj_at_k, pass_at_k


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
