"""What `beam-rl eval` prints, as pure functions of results."""

from beam_rl.charts import percent
from beam_rl.evals.comparison import Comparison, describe
from beam_rl.evals.results import ProblemResult, Results, Summary
from beam_rl.lines import duration

SHOWN_CHANGES = 40


def report(results: Results) -> list[str]:
    """The table of numbers at the end of an evaluation, and what is wrong with them."""
    summary, k = results.summary, results.sampling.samples
    verdicts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in summary.verdicts.items())
    rows = [
        (f"avg@{k}", f"{accuracy(summary)} on {results.task.problems} problems"),
        (f"pass@{k}, maj@{k}", f"{share(summary.pass_k)}, {share(summary.maj_k)}"),
        ("truncated, no answer", f"{share(summary.truncated_share)}, {share(summary.no_answer_share)}"),
        ("samples", f"{len(results.samples)} of {summary.expected}: {verdicts or 'none'}"),
        ("tokens a response", f"mean {count(summary.tokens_mean)}, p95 {count(summary.tokens_p95)}"),
        ("speed", f"{count(summary.tokens_per_second)} tokens/s, {seconds(summary.wall_seconds)} in all"),
        ("seed policy", results.seed_policy),
        ("text hash", results.task.text_hash[:16]),
    ]
    return [*table(rows), *(f"  ! {warning}" for warning in results.warnings)]


def comparison(compared: Comparison) -> list[str]:
    """The lines of `beam-rl eval compare`."""
    before, after, change = compared.before, compared.after, compared.difference
    problems = len(compared.changed) + compared.unchanged
    interval = f"95 % interval {signed(change.low)} to {signed(change.high)} points" if problems > 1 else "no interval"
    excludes = problems > 1 and (change.low > 0 or change.high < 0)
    rows = [
        ("task", describe(before)),
        ("first", f"{accuracy(before.summary)}  {before.model.path or before.model.model}"),
        ("second", f"{accuracy(after.summary)}  {after.model.path or after.model.model}"),
        ("difference", f"{signed(change.mean)} points, {interval}, paired by {problems} problems"),
        ("", "the interval excludes 0" if excludes else "0 is within the interval" if problems > 1 else ""),
        ("changed", f"{len(compared.changed)} problems, {compared.unchanged} as before"),
    ]
    lines = [*table([row for row in rows if row[1]])]
    lines += [
        f"    {one.before.id:<16} {solved(one.before)} → {solved(one.after)}  {signed(one.difference)} points"
        for one in compared.changed[:SHOWN_CHANGES]
    ]
    if len(compared.changed) > SHOWN_CHANGES:
        lines.append(f"    … and {len(compared.changed) - SHOWN_CHANGES} more")
    if compared.left_out:
        lines.append(f"  ! without a response in one of the runs, left out: {', '.join(compared.left_out)}")
    return [*lines, *(f"  ! {remark}" for remark in compared.remarks)]


def accuracy(summary: Summary) -> str:
    """avg@k with its standard error."""
    if summary.avg is None:
        return "no response"
    return percent(summary.avg) if summary.se is None else f"{100 * summary.avg:.1f} ± {100 * summary.se:.1f} %"


def solved(problem: ProblemResult) -> str:
    """`5/8`: right of those that have a response."""
    graded = [verdict for verdict in problem.verdicts if verdict not in (None, "error")]
    return f"{sum(verdict == 'correct' for verdict in graded)}/{len(graded)}"


def signed(value: float) -> str:
    """A difference of shares in points."""
    return f"{100 * value:+.1f}"


def share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else duration(value)


def table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [f"  {label:<{width}}  {text}" for label, text in rows]
