"""What a run prints, as pure functions of its numbers: `console` only writes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from beam_rl.charts import number, percent


@dataclass(frozen=True)
class Opening:
    """What a run says before it starts."""

    title: str
    """One sentence: what is about to happen."""
    facts: Sequence[tuple[str, str]]
    """Label and text of what a reader should know: model, task, algorithm, precision, run folder."""
    phases: Sequence[tuple[str, float]]
    """The phases to come, in order, with their expected seconds (0: short, or not known)."""


def duration(seconds: float) -> str:
    """A rough, readable duration: `4 s`, `2 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def opening_lines(opening: Opening) -> list[Text]:
    """Title, facts and plan, with the expected time of each phase and of all together."""
    plan = ", ".join(f"{name} ({duration(seconds)})" if seconds else name for name, seconds in opening.phases)
    total = sum(seconds for _, seconds in opening.phases)
    rows = [*opening.facts, ("plan", plan)]
    if total:
        rows.append(("in all", f"about {duration(total)}"))
    return [Text(opening.title, style="bold"), *_rows(rows)]


def step_line(record: Mapping[str, Any], steps: int) -> Text:
    """One training step on one line; the gap is coloured, and worded, by whether it keeps its budget.

    `record` is a "step" record of `metrics.jsonl`; `steps` the number of steps of the whole run.
    """
    step = f"{record['step']:>{len(str(steps))}}/{steps}"
    line = Text.assemble(
        (f"step {step}", "bold"),
        f"  reward {_or_dash(record['reward_mean'], '+.3f')}",
        f"  informative {_or_dash(record['informative_share'], '.0%')}",
        "  ",
    )
    line.append_text(_gap(record))
    return line.append(
        f"  length {_or_dash(record['response_length_mean'], ',.1f')}"
        f"  {_or_dash(record['tokens_per_second'], ',.0f')} tokens/s"
        f"  {_or_dash(record['step_seconds'], '.2f')} s"
    )


def eval_line(record: Mapping[str, Any]) -> Text:
    """One evaluation on one line; `record` is an "eval" record of `metrics.jsonl`."""
    where = "before training" if record["step"] == 0 else f"after step {record['step']}"
    return Text.assemble(
        (f"avg@{record['samples']} {where}: {_accuracy(record['avg8'], record['se'])}", "bold"),
        f" on {record['problems']} held-out problems (truncated {percent(record['truncated_share'])},"
        f" no answer {percent(record['no_answer_share'])})",
    )


def final_lines(summary: Mapping[str, Any], budget: float, run_dir: Path) -> list[Text]:
    """The table at the end of a run; `summary` is what `summary.json` holds."""
    before, after = summary["avg8_before"], summary["avg8_after"]
    accuracy = f"{_accuracy(before, summary['se_before'])} → {_accuracy(after, summary['se_after'])}"
    if before is not None and after is not None:
        accuracy += f"  ({100 * (after - before):+.1f} points)"
    phases = summary["seconds_by_phase"]
    total = sum(phases.values())
    times = ", ".join(
        f"{name} {duration(seconds)} ({seconds / total:.0%})" for name, seconds in phases.items() if seconds
    )
    rows = [
        ("avg@8 held out", accuracy),
        ("gap", _gap_summary(summary, budget)),
        ("time by phase", times or "no step was done"),
        ("steps", f"{summary['steps']} steps, {summary['updates']} updates, {_median(summary)}"),
        ("start-up", f"{duration(summary['startup_seconds'])} to the first step"),
        ("memory", f"{summary['peak_rss_bytes'] / 2**30:.1f} GiB at its peak, all processes"),
        ("run folder", str(run_dir)),
        ("report", str(run_dir / "report.html")),
    ]
    return _rows(rows)


def _gap(record: Mapping[str, Any]) -> Text:
    mean, budget = record["gap_mean"], record["gap_budget"]
    if mean is None:
        return Text("gap not finite", style="bold red")
    within = mean <= budget
    text = f"gap {number(mean)} {'of' if within else 'OVER'} {budget:g}, max {_or_dash(record['gap_max'], '.3g')}"
    if record.get("gap_mean_no_r3") is not None:
        text += f" ({number(record['gap_mean_no_r3'])} without R3)"
    return Text(text, style="green" if within else "bold red")


def _gap_summary(summary: Mapping[str, Any], budget: float) -> str:
    if summary["gap_mean"] is None:
        return "not measured"
    worst = summary["gap_mean_worst_step"]
    verdict = "within" if worst <= budget else "OVER"
    return (
        f"mean {number(summary['gap_mean'])}, worst step {number(worst)} ({verdict} the budget of {budget:g}), "
        f"worst token {_or_dash(summary['gap_max'], '.3g')}"
    )


def _median(summary: Mapping[str, Any]) -> str:
    return f"{_or_dash(summary['step_seconds_median'], '.2f')} s a step (median)"


def _accuracy(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "not measured"
    return f"{100 * mean:.1f} %" if error is None else f"{100 * mean:.1f} ± {100 * error:.1f} %"


def _or_dash(value: float | None, form: str) -> str:
    """The value, or a dash for one that metrics.jsonl holds as null: it was not finite."""
    return "-" if value is None else format(value, form)


def _rows(rows: Sequence[tuple[str, str]]) -> list[Text]:
    width = max(len(label) for label, _ in rows)
    return [Text.assemble((f"  {label:<{width}}", "dim"), f"  {text}") for label, text in rows]
