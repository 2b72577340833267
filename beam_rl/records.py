"""A run folder as data: the records of `metrics.jsonl`, read so that a run in progress or a resumed one makes sense."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beam_rl.metrics import read_lines

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """What a run has written so far."""

    name: str
    steps: list[Record]
    """One record a training step, in order, without those that a restart from a checkpoint did again."""
    evals: list[Record]
    """One record an evaluation, in order of the step after which it ran (0: before training)."""
    summary: Record
    """`summary.json`, empty while the run is in progress."""
    recipe: str
    """The resolved recipe, as YAML."""
    resumed_after: list[int] = field(default_factory=list)
    """The steps after which the run was taken up again."""
    discarded: int = 0
    """Steps beyond the checkpoint, done again after a restart."""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary)


def read_run(run_dir: Path) -> RunRecords:
    """Reads a run folder; a line cut short by a kill is left out.

    Raises:
        FileNotFoundError: the folder has no `metrics.jsonl`.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run_dir}: not a run folder (it has no metrics.jsonl)")
    lines = list(read_lines(path))
    valid = [line for line in lines if not line.get("rewound")]
    # A dict: an evaluation that a restart repeated at its own step counts once.
    evals = {line["step"]: line for line in valid if line["kind"] == "eval"}
    summary, recipe = run_dir / "summary.json", run_dir / "recipe.yaml"
    return RunRecords(
        name=run_dir.resolve().name,
        steps=sorted((line for line in valid if line["kind"] == "step"), key=lambda line: line["step"]),
        evals=[evals[step] for step in sorted(evals)],
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else "",
        resumed_after=[line["step"] for line in lines if line["kind"] == "resume"],
        discarded=sum(line["kind"] == "step" for line in lines if line.get("rewound")),
    )
