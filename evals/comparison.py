"""Two evaluations of the same problems, paired by problem."""

from dataclasses import dataclass

from beam_rl.evals.results import ProblemResult, Results
from beam_rl.evals.statistics import Difference, paired_difference
from beam_rl.model.errors import BadInput

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Change:
    """A problem that one run solves more often than the other."""

    before: ProblemResult
    after: ProblemResult

    @property
    def difference(self) -> float:
        """After - before, in shares."""
        assert self.before.avg is not None
        assert self.after.avg is not None
        return self.after.avg - self.before.avg


@dataclass(frozen=True)
class Comparison:
    """What became better or worse from the first run to the second."""

    before: Results
    after: Results
    difference: Difference
    """After - before of avg@k, with the interval of paired differences."""
    changed: list[Change]
    """Problems whose share of right samples differs, the largest change first."""
    unchanged: int
    left_out: list[str]
    """Problems without a response in one of the runs."""
    remarks: list[str]
    """What differs besides the model, and what is wrong with either run."""


def compare(before: Results, after: Results) -> Comparison:
    """Pair two runs by problem. Raises BadInput: they did not have the same problems."""
    if before.task.text_hash != after.task.text_hash:
        raise BadInput(
            f"the runs did not have the same problems: {describe(before)} and {describe(after)}. Compare runs whose "
            "text hashes are equal (the same task, the same --limit)."
        )
    pairs = [Change(*pair) for pair in zip(before.problems, after.problems, strict=True)]
    paired = [pair for pair in pairs if pair.before.avg is not None and pair.after.avg is not None]
    if not paired:
        raise BadInput("no problem has a response in both runs.")
    difference = paired_difference(
        [pair.before.avg or 0.0 for pair in paired], [pair.after.avg or 0.0 for pair in paired], CONFIDENCE
    )
    changed = sorted((pair for pair in paired if pair.difference), key=lambda pair: -abs(pair.difference))
    return Comparison(
        before=before,
        after=after,
        difference=difference,
        changed=changed,
        unchanged=len(paired) - len(changed),
        left_out=[pair.before.id for pair in pairs if pair not in paired],
        remarks=remarks(before, after),
    )


def describe(results: Results) -> str:
    """A task in a reader's words."""
    return f"{results.task.name} ({results.task.problems} problems, text hash {results.task.text_hash[:12]})"


def remarks(before: Results, after: Results) -> list[str]:
    """Settings in which the runs differ, and each run's own warnings."""
    pairs = [("prompt", before.task.prompt, after.task.prompt)]
    settings = (before.sampling.model_dump(), after.sampling.model_dump())
    pairs += [(name, settings[0][name], settings[1][name]) for name in settings[0]]
    found = [f"{name} differs: {first!r} and {second!r}" for name, first, second in pairs if first != second]
    if before.software != after.software:
        found.append(f"graded by other software: {before.software} and {after.software}")
    for name, run in (("first", before), ("second", after)):
        found += [f"{name} run: {warning}" for warning in run.warnings]
    return found
