"""Accuracy of repeated samples, with its error.

`correct` is [problems, samples]: whether each sample of each problem was right. A truncated response, one without an
answer and one whose grading timed out are not right.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Estimate(NamedTuple):
    """A mean and its standard error, both as shares (0.79, not 79)."""

    mean: float
    se: float


def avg_at_k(correct: ArrayLike) -> Estimate:
    """Mean correctness over problems × samples, with the standard error clustered by problem.

    Samples of one problem are not independent, so the error is that of the mean of the problems' means: their
    standard deviation (n - 1) over the square root of their number. NaN with one problem.
    """
    per_problem = _matrix(correct).mean(axis=1)  # [problems]
    problems = len(per_problem)
    se = float(per_problem.std(ddof=1) / np.sqrt(problems)) if problems > 1 else float("nan")
    return Estimate(float(per_problem.mean()), se)


def pass_at_k(correct: ArrayLike, k: int | None = None) -> float:
    """Share of problems that at least one of `k` samples solves (default: all samples).

    The unbiased estimate 1 - C(n - c, k) / C(n, k) of Chen et al. (arXiv 2107.03374, eq. 1).
    """
    matrix = _matrix(correct)
    samples = matrix.shape[1]
    k = samples if k is None else k
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs between 1 and {samples} samples")
    wrong = samples - matrix.sum(axis=1)  # [problems]
    # C(n - c, k) / C(n, k) = prod_{i<k} (n - c - i) / (n - i); a zero factor where fewer than k samples are wrong
    drawn = np.arange(k)
    all_wrong = np.prod(np.clip(wrong[:, None] - drawn, 0, None) / (samples - drawn), axis=1)
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
        votes = Counter(answer for answer in given if answer is not None)
        leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
        solved = {answer for answer, is_right in zip(given, right, strict=True) if is_right}
        shares.append(sum(answer in solved for answer in leaders) / len(leaders) if leaders else 0.0)
    return float(np.mean(shares))


def _matrix(correct: ArrayLike) -> NDArray[np.float64]:
    matrix = np.asarray(correct, dtype=np.float64)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"expected a matrix [problems, samples] with at least one entry, not shape {matrix.shape}")
    return matrix
