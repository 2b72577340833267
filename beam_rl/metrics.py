"""A run's numbers on disk: `metrics.jsonl`, one JSON object a line, and `summary.json`, written at the end.

Lines have `kind`: "step" (one training step), "eval" (one evaluation), "resume" (a restart from a checkpoint). After a
restart, steps past the checkpoint are in the file twice: the earlier ones get `"rewound": true`.
"""

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from beam_rl.evals.files import write_atomically
from beam_rl.recipe import Recipe

PHASES = ("generate", "logprobs", "train", "sync", "other")
"""Where a step's seconds go."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a metrics file; a last line that a crash cut short is left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


class MetricsFile:
    """Appends to `metrics.jsonl`. Every line is one write call, so that a kill between lines leaves whole lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line. NaN and infinity become null: the file is strict JSON."""
        line = json.dumps(finite(record), allow_nan=False) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def rewind(self, step: int, time: float) -> None:
        """A restart after `step`: mark what lies beyond it, and note the restart."""
        lines = []
        for record in read_lines(self.path):
            beyond = record.get("kind") in ("step", "eval") and record["step"] > step
            lines.append(record | {"rewound": True} if beyond else record)
        lines.append({"kind": "resume", "step": step, "time": time})
        write_atomically(self.path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))

    def records(self, kind: str) -> list[dict[str, Any]]:
        """All lines of one kind that a later restart has not replaced."""
        return [record for record in read_lines(self.path) if record["kind"] == kind and not record.get("rewound")]


def finite(value: Any) -> Any:
    """`value` with every number that JSON cannot hold replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def summary(
    recipe: Recipe, steps: list[dict[str, Any]], evals: list[dict[str, Any]], startup_seconds: float, peak_rss: int
) -> dict[str, Any]:
    """The numbers of `summary.json`; those of an evaluation that did not happen are None.

    `startup_seconds`: recipe start to first training step. `peak_rss`: largest sum over all processes, bytes.
    """
    before = next((record for record in evals if record["step"] == 0), None)
    after = max((record for record in evals if record["step"] > 0), key=lambda record: record["step"], default=None)
    gaps = [record["gap_mean"] for record in steps if record["gap_mean"] is not None]
    return {
        "avg8_before": before and before["avg8"],
        "avg8_after": after and after["avg8"],
        "se_before": before and before["se"],
        "se_after": after and after["se"],
        "gap_mean_worst_step": max(gaps, default=None),
        "gap_mean": statistics.fmean(gaps) if gaps else None,
        "gap_max": max((record["gap_max"] for record in steps if record["gap_max"] is not None), default=None),
        "steps": len(steps),
        "updates": sum(record["updates"] for record in steps),
        "startup_seconds": startup_seconds,
        "step_seconds_median": statistics.median(record["step_seconds"] for record in steps) if steps else None,
        "overhead_share_median": statistics.median(map(overhead_share, steps)) if steps else None,
        "seconds_by_phase": seconds_by_phase(steps),
        "peak_rss_bytes": peak_rss,
        "seed": recipe.trainer.seed,
        "precision": recipe.beam.precision,
        "r3": recipe.beam.r3,
    }


def overhead_share(step: Mapping[str, Any]) -> float:
    """The share of a step that is neither generation nor training."""
    return (step["seconds"]["sync"] + step["seconds"]["other"]) / step["step_seconds"]


def seconds_by_phase(steps: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all steps together, by phase."""
    totals = dict.fromkeys(PHASES, 0.0)
    for record in steps:
        for phase in PHASES:
            totals[phase] += record["seconds"][phase]
    return totals
