"""Accuracy of repeated samples, with its error.

`correct` is [problems, samples]: whether each sample of each problem was right. A truncated response, one without an
answer and one whose grading timed out are not right. NaN stands for a sample that does not exist (its request failed):
it is left out, never counted as wrong, and a problem without any sample is left out whole.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Estimate(NamedTuple):
    """A mean and its standard error, both as shares (0.79, not 79)."""

    mean: float
    se: float


class Difference(NamedTuple):
    """A mean difference, its standard error, and the ends of its confidence interval, as shares."""

    mean: float
    se: float
    low: float
    high: float


def avg_at_k(correct: ArrayLike) -> Estimate:
    """Mean correctness over problems × samples, with the standard error clustered by problem.

    Samples of one problem are not independent, so the error is that of the mean of the problems' means: their
    standard deviation (n - 1) over the square root of their number. NaN with one problem.
    """
    return _mean(problem_means(correct))


def problem_means(correct: ArrayLike) -> NDArray[np.float64]:
    """Mean correctness of every problem that has a sample."""
    matrix = _matrix(correct)
    kept = matrix[~np.isnan(matrix).all(axis=1)]
    if not len(kept):
        raise ValueError("no problem has a sample")
    return np.nanmean(kept, axis=1)


def paired_difference(before: ArrayLike, after: ArrayLike, confidence: float = 0.95) -> Difference:
    """Mean of `after - before` over problems, with Student's t interval for the mean of paired differences.

    Args:
        before: [problems], mean correctness of each problem in one run.
        after: [problems], the same problems in the other run, in the same order.
        confidence: coverage of the interval.

    Pairing takes the problems' own difficulty out of the error. Error and interval are NaN with one problem.
    """
    first, second = (np.asarray(values, dtype=np.float64) for values in (before, after))
    if first.shape != second.shape or first.ndim != 1 or not len(first):
        raise ValueError(f"expected two equal vectors [problems], not shapes {first.shape} and {second.shape}")
    mean, se = _mean(second - first)
    half = se * t_quantile(0.5 + confidence / 2, len(first) - 1) if len(first) > 1 else math.nan
    return Difference(mean, se, mean - half, mean + half)


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution: 2.045 for 0.975 and 29 degrees of freedom."""
    if not 0.5 <= probability < 1.0 or degrees < 1:
        raise ValueError(f"no quantile for probability {probability} and {degrees} degrees of freedom")
    low, high = 0.0, math.pi / 2  # of atan(t / sqrt(degrees)), which is bounded
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _t_within(angle: float, degrees: int) -> float:
    """P(|T| <= t) at angle = atan(t / sqrt(degrees)): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    odd = degrees % 2
    steps = np.arange(2 if odd else 1, degrees - 1, 2, dtype=np.float64)
    factors = np.cumprod(np.concatenate([[1.0], steps / (steps + 1) * math.cos(angle) ** 2]))
    if not odd:
        return math.sin(angle) * float(factors.sum())
    series = math.sin(angle) * math.cos(angle) * float(factors.sum()) if degrees > 1 else 0.0
    return 2 / math.pi * (angle + series)


def pass_at_k(correct: ArrayLike, k: int | None = None) -> float:
    """Share of problems that at least one of `k` samples solves (default: all samples).

    The unbiased estimate 1 - C(n - c, k) / C(n, k) of Chen et al. (arXiv 2107.03374, eq. 1). Raises ValueError where
    a problem has fewer than `k` samples.
    """
    matrix = _matrix(correct)
    k = matrix.shape[1] if k is None else k
    samples = (~np.isnan(matrix)).sum(axis=1)  # [problems]
    if not 1 <= k <= samples.min():
        raise ValueError(f"pass@{k} needs between 1 and {samples.min()} samples")
    wrong = samples - np.nansum(matrix, axis=1)  # [problems]
    # C(n - c, k) / C(n, k) = prod_{i<k} (n - c - i) / (n - i); a zero factor where fewer than k samples are wrong
    drawn = np.arange(k)
    all_wrong = np.prod(np.clip(wrong[:, None] - drawn, 0, None) / (samples[:, None] - drawn), axis=1)
    return float(np.mean(1.0 - all_wrong))


def maj_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> float:
    """Share of problems whose most frequent answer is right.

    Args:
        answers: [problems][samples], each answer in a canonical spelling; None (no answer) does not vote.
        correct: [problems, samples] for the same samples.

    Among tied answers each counts by its share, which is the expectation of breaking the tie at random.
    """
    matrix = _matrix(correct)
    shares = []
    for given, right in zip(answers, matrix, strict=True):
        leaders = majority(given)
        solved = {answer for answer, is_right in zip(given, right, strict=True) if is_right == 1.0}
        shares.append(sum(answer in solved for answer in leaders) / len(leaders) if leaders else 0.0)
    return float(np.mean(shares))


def majority(answers: Sequence[str | None]) -> list[str]:
    """The most frequent answers: one, several where they tie, none where nobody answered."""
    votes = Counter(answer for answer in answers if answer is not None)
    return [answer for answer, count in votes.items() if count == max(votes.values())]


def _mean(values: NDArray[np.float64]) -> Estimate:
    count = len(values)
    se = float(values.std(ddof=1) / np.sqrt(count)) if count > 1 else math.nan
    return Estimate(float(values.mean()), se)


def _matrix(correct: ArrayLike) -> NDArray[np.float64]:
    matrix = np.asarray(correct, dtype=np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"expected a matrix [problems, samples] with at least one entry, not shape {matrix.shape}")
    return matrix
