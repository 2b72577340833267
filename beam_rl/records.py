"""A run folder as data: the records of `metrics.jsonl`, read so that a run in progress or a resumed one makes sense."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """What a run has written so far."""

    name: str
    steps: list[Record]
    """One record a training step, in order; of a step done twice, the later one."""
    evals: list[Record]
    """One record an evaluation, in order of the step after which it ran (0: before training)."""
    summary: Record
    """`summary.json`, empty while the run is in progress."""
    recipe: str
    """The resolved recipe, as YAML."""
    resumed_after: list[int] = field(default_factory=list)
    """The steps after which the run was taken up again."""
    discarded: int = 0
    """Step records that a resume replaced."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary)


def read_run(run_dir: Path) -> RunRecords:
    """Reads a run folder; a line cut short by a kill is left out.

    Raises:
        FileNotFoundError: the folder has no `metrics.jsonl`.
    """
    steps: list[Record] = []
    evals: list[Record] = []
    resumed_after: list[int] = []
    discarded = 0
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = _parse(line)
        if record is None:
            continue
        # A resumed run goes back to its checkpoint and records the steps after it again: the first record that does
        # not move forward ends what came after it in the earlier life.
        is_step = record["kind"] == "step"
        last_kept = record["step"] - 1 if is_step else record["step"]
        kept = [step for step in steps if step["step"] <= last_kept]
        if len(kept) < len(steps):
            resumed_after.append(last_kept)
            discarded += len(steps) - len(kept)
        steps = kept
        evals = [earlier for earlier in evals if earlier["step"] <= last_kept]
        if is_step:
            steps.append(record)
        else:
            evals = [earlier for earlier in evals if earlier["step"] != record["step"]]
            evals.append(record)
    summary, recipe = run_dir / "summary.json", run_dir / "recipe.yaml"
    return RunRecords(
        name=run_dir.resolve().name,
        steps=steps,
        evals=evals,
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        resumed_after=resumed_after,
        discarded=discarded,
    )


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    known = isinstance(record, dict) and record.get("kind") in ("step", "eval")
    return record if known else None
