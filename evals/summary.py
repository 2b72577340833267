"""From graded samples to the numbers of a report: one computation for `beam-rl eval` and for evaluation in training."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from beam_rl.evals.grader import Verdict
from beam_rl.evals.results import ProblemResult, Sample, Summary
from beam_rl.evals.statistics import avg_at_k, maj_at_k, majority, pass_at_k
from beam_rl.evals.task import Task

TRUNCATED = "length"
"""The finish reason of a response that ran into its limit."""


def grid(task: Task, samples: Sequence[Sample], k: int) -> list[list[Sample | None]]:
    """Samples as [problems][k]; None where one is missing."""
    found = {(one.problem, one.sample): one for one in samples}
    return [[found.get((problem.id, index)) for index in range(k)] for problem in task.problems]


def summarize(task: Task, samples: Sequence[Sample], k: int, wall_seconds: float) -> Summary:
    """The numbers of `samples`, at most k a problem; errors and missing samples count as neither right nor wrong."""
    rows = grid(task, samples, k)
    drawn = [one for row in rows for one in row if one is not None]
    graded = [one for one in drawn if not one.is_error]
    correct = [[correctness(one) for one in row] for row in rows]
    whole = bool(graded) and len(graded) == len(task.problems) * k
    estimate = avg_at_k(correct) if graded else None
    tokens = [one.tokens for one in graded if one.tokens is not None]
    return Summary(
        avg=None if estimate is None else estimate.mean,
        se=None if estimate is None or math.isnan(estimate.se) else estimate.se,
        pass_k=pass_at_k(correct) if whole else None,
        maj_k=maj_at_k([[one.answer if one else None for one in row] for row in rows], correct) if whole else None,
        expected=len(task.problems) * k,
        verdicts=dict(Counter(str(one.verdict) for one in drawn).most_common()),
        truncated_share=share([one.finish_reason == TRUNCATED for one in graded]),
        no_answer_share=share([one.verdict is Verdict.no_answer for one in graded]),
        tokens_mean=float(np.mean(tokens)) if tokens else None,
        tokens_p95=float(np.percentile(tokens, 95)) if tokens else None,
        tokens=sum(tokens),
        tokens_per_second=sum(tokens) / wall_seconds if tokens and wall_seconds > 0 else None,
        wall_seconds=wall_seconds,
    )


def by_problem(task: Task, samples: Sequence[Sample], k: int) -> list[ProblemResult]:
    """One row a problem, in the task's order."""
    made = []
    for problem, row in zip(task.problems, grid(task, samples, k), strict=True):
        graded = [one for one in row if one is not None and not one.is_error]
        tokens = [one.tokens for one in graded if one.tokens is not None]
        made.append(
            ProblemResult(
                id=problem.id,
                text_hash=problem.text_hash,
                answer=problem.answer,
                verdicts=[None if one is None else one.verdict for one in row],
                avg=share([one.verdict is Verdict.correct for one in graded]),
                majority=majority([one.answer for one in graded]),
                tokens_mean=float(np.mean(tokens)) if tokens else None,
            )
        )
    return made


def correctness(sample: Sample | None) -> float:
    """1 for a right sample, 0 for any other response, NaN where there is none."""
    if sample is None or sample.is_error:
        return math.nan
    return float(sample.verdict is Verdict.correct)


def share(flags: Sequence[bool]) -> float | None:
    """The share of true values; None of none."""
    return sum(flags) / len(flags) if flags else None
