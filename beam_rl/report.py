"""Writes `report.html` into a run folder: one file, opens offline, for a finished run or one in progress."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from beam_rl import charts
from beam_rl.charts import Limit, Series, number, percent
from beam_rl.health import WINDOW, check_run
from beam_rl.metrics import PHASES
from beam_rl.records import Record, RunRecords, read_run
from beam_rl.report_page import PAGE

_TONES = {"healthy": "good", "look": "warn", "red flag": "bad", "no data": ""}


class Tile(NamedTuple):
    """One headline number."""

    label: str
    value: str
    detail: str
    tone: str = ""


class Chart(NamedTuple):
    """One figure of the page."""

    title: str
    note: str
    svg: str


def write_report(run_dir: str | Path) -> Path:
    """Writes the report and returns its path; an earlier one is replaced in one move.

    Raises:
        FileNotFoundError: the folder has no `metrics.jsonl`.
    """
    run_dir = Path(run_dir)
    page = render(read_run(run_dir))
    path = run_dir / "report.html"
    partial = path.with_name(f"report.html.{os.getpid()}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
    return path


def render(run: RunRecords) -> str:
    """The page as text."""
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(
        run=run,
        status=_status(run),
        tiles=_tiles(run),
        charts=_charts(run),
        comparison=_comparison(run.evals),
        checks=check_run(run.steps),
        tones=_TONES,
        window=WINDOW,
        summary=_summary(run.summary),
        top=charts.TOP,
        bottom=charts.HEIGHT - charts.BOTTOM,
    )


def _status(run: RunRecords) -> str:
    parts = ["finished" if run.finished else "in progress or interrupted", f"{len(run.steps)} steps"]
    if run.steps:
        parts.append(f"{sum(step['updates'] for step in run.steps)} optimizer updates")
    if run.resumed_after:
        where = ", ".join(map(str, run.resumed_after))
        parts.append(f"resumed after step {where} ({run.discarded} steps done again)")
    return " · ".join(parts)


def _tiles(run: RunRecords) -> list[Tile]:
    tiles = []
    if run.evals:
        first, last = run.evals[0], run.evals[-1]
        label = f"avg@{last['samples']} on {last['problems']} held-out problems"
        if first is last:
            tiles.append(Tile(label, _with_error(first), "before training"))
        else:
            change = last["avg8"] - first["avg8"]
            tone = "good" if change > 0 else "bad"
            value = f"{percent(first['avg8'])} → {percent(last['avg8'])}"
            tiles.append(Tile(label, value, f"{100 * change:+.1f} points, {_errors(first, last)}", tone))
    gaps = _present(run.steps, "gap_mean")
    if gaps:
        budget = run.steps[-1]["gap_budget"]
        over = sum(not gap <= budget for gap in gaps)
        detail = f"budget {budget:g}; " + (f"over in {over} steps" if over else "never over")
        tiles.append(Tile("gap, worst step's mean", number(max(gaps)), detail, "bad" if over else "good"))
    rewards = _present(run.steps, "reward_mean")
    if rewards:
        tiles.append(Tile("reward", f"{rewards[0]:+.2f} → {rewards[-1]:+.2f}", "first and last step"))
    seconds = _present(run.steps, "step_seconds")
    if seconds:
        total = f"{sum(seconds) / 60:.1f} min in {len(seconds)} steps"
        tiles.append(Tile("median step", f"{statistics.median(seconds):.2f} s", total))
    return tiles


def _charts(run: RunRecords) -> list[Chart]:
    steps, evals = run.steps, run.evals
    x, resumed = [step["step"] for step in steps], run.resumed_after

    def values(key: str, records: Sequence[Record] = steps) -> list[float | None]:
        return [record.get(key) for record in records]

    def lines(
        label: str, *series: Series, shares: bool = False, bounds: tuple[float | None, float | None] = (None, None)
    ) -> str:
        write = percent if shares else number
        return charts.line_chart(label, x, series, write=write, bounds=bounds, resumed_after=resumed)

    samples = evals[-1]["samples"] if evals else 8
    budget = steps[-1].get("gap_budget") if steps else None
    gap = [
        Series("mean", values("gap_mean"), 1),
        Series("p99", values("gap_p99"), 4),
        Series("max", values("gap_max"), 6),
    ]
    if any(value is not None for value in values("gap_mean_no_r3")):
        gap.append(Series("mean without R3", values("gap_mean_no_r3"), 3, style="points"))
    phases = [
        Series(name, [step["seconds"][name] for step in steps], colour) for colour, name in enumerate(PHASES, start=1)
    ]
    return [
        Chart(
            f"avg@{samples} on held-out problems",
            "Mean correctness; bars are ± 1 standard error, clustered by problem.",
            charts.line_chart(
                "held-out accuracy",
                [record["step"] for record in evals],
                [Series(f"avg@{samples}", values("avg8", evals), 1, errors=values("se", evals))],
                write=percent,
                resumed_after=resumed,
            ),
        ),
        Chart(
            "Reward",
            "Mean over the step's responses, length penalty included.",
            lines("reward", Series("reward", values("reward_mean"), 2)),
        ),
        Chart(
            "Gap between trainer and rollout",
            "|log p(trainer) - log p(rollout)| a response token, log scale.",
            charts.line_chart(
                "log-prob gap",
                x,
                gap,
                log=True,
                limit=Limit("budget", budget) if budget else None,
                resumed_after=resumed,
            ),
        ),
        Chart(
            "Time by phase", "Seconds a step.", charts.stacked_chart("time by phase", x, phases, resumed_after=resumed)
        ),
        Chart(
            "Training accuracy and informative groups",
            "An informative group has both right and wrong responses; only these teach.",
            lines(
                "accuracy",
                Series("accuracy", values("accuracy"), 2),
                Series("informative groups", values("informative_share"), 3),
                shares=True,
                bounds=(0.0, 1.0),
            ),
        ),
        Chart(
            "Response length",
            "Mean tokens a response.",
            lines("response length", Series("tokens", values("response_length_mean"), 4), bounds=(0.0, None)),
        ),
        Chart(
            "Truncated and without an answer",
            "Shares of the step's responses.",
            lines(
                "truncated and no answer",
                Series("truncated", values("truncated_share"), 5),
                Series("no answer", values("no_answer_share"), 6),
                shares=True,
                bounds=(0.0, None),
            ),
        ),
        Chart(
            "Entropy",
            "Mean, in nats a token; a collapse ends exploration.",
            lines("entropy", Series("entropy", values("entropy"), 1), bounds=(0.0, None)),
        ),
        Chart(
            "Gradient norm",
            "Before clipping.",
            lines("gradient norm", Series("gradient norm", values("grad_norm"), 6), bounds=(0.0, None)),
        ),
        Chart(
            "Throughput",
            "Response tokens a second of the whole step.",
            lines("throughput", Series("tokens/s", values("tokens_per_second"), 2), bounds=(0.0, None)),
        ),
    ]


def _comparison(evals: Sequence[Record]) -> list[list[str]]:
    if len(evals) < 2:
        return []
    first, last = evals[0], evals[-1]
    rows = [
        [
            f"avg@{last['samples']} ± SE",
            _with_error(first),
            _with_error(last),
            f"{100 * (last['avg8'] - first['avg8']):+.1f} points, {_errors(first, last)}",
        ]
    ]
    for key, name in (
        ("pass8", f"pass@{last['samples']}"),
        ("truncated_share", "truncated"),
        ("no_answer_share", "no answer"),
    ):
        before, after = first.get(key), last.get(key)
        if before is not None and after is not None:
            rows.append([name, percent(before), percent(after), f"{100 * (after - before):+.1f} points"])
    return rows


def _with_error(record: Record) -> str:
    return percent(record["avg8"]) + (f" ± {percent(record['se'])}" if record["se"] is not None else "")


def _errors(first: Record, last: Record) -> str:
    """The change in units of the standard error of a difference; one problem alone has no standard error."""
    spread = ((first["se"] or 0.0) ** 2 + (last["se"] or 0.0) ** 2) ** 0.5
    return f"{(last['avg8'] - first['avg8']) / spread:+.1f} standard errors" if spread else "no error estimate"


def _summary(summary: Record) -> list[tuple[str, str]]:
    rows = []
    for key, value in summary.items():
        show = _gibibytes if key.endswith("_bytes") else _shown
        text = (
            ", ".join(f"{name} {show(part)}" for name, part in value.items())
            if isinstance(value, dict)
            else show(value)
        )
        rows.append((key.replace("_", " ").removesuffix(" bytes"), text))
    return rows


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _gibibytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def _present(records: Sequence[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]
