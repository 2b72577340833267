"""The report: a file that opens offline, and that tells the truth about interrupted and resumed runs."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from beam_rl.charts import Series, line_chart, number, percent
from beam_rl.health import check_run
from beam_rl.metrics import MetricsFile
from beam_rl.records import read_run
from beam_rl.report import write_report

VOID = {"meta", "br", "path", "circle"}


def step_record(step: int, rng: random.Random, **changes: Any) -> dict[str, Any]:
    progress = 1 - math.exp(-step / 20)
    seconds = {
        "generate": rng.uniform(0.7, 0.9),
        "logprobs": rng.uniform(0.15, 0.2),
        "train": rng.uniform(0.4, 0.6),
        "sync": rng.uniform(0.08, 0.13),
        "other": rng.uniform(0.05, 0.1),
    }
    record = {
        "kind": "step",
        "step": step,
        "updates": 2,
        "time": 1.7e9 + 2 * step,
        "reward_mean": -0.1 + 0.7 * progress + rng.gauss(0, 0.03),
        "accuracy": 0.45 + 0.35 * progress + rng.gauss(0, 0.015),
        "informative_share": 0.7 - 0.3 * progress,
        "gap_mean": rng.uniform(0.002, 0.004),
        "gap_p99": rng.uniform(0.02, 0.04),
        "gap_max": rng.uniform(0.1, 0.4),
        "gap_budget": 0.01,
        "gap_mean_no_r3": rng.uniform(0.02, 0.05) if step % 10 == 1 else None,
        "response_length_mean": 14 + rng.gauss(0, 0.3),
        "truncated_share": 0.01,
        "no_answer_share": 0.02,
        "tokens_per_second": rng.uniform(3000, 4000),
        "step_seconds": sum(seconds.values()),
        "seconds": seconds,
        "policy_loss": 0.01,
        "grad_norm": rng.uniform(0.3, 0.6),
        "lr": 1e-4,
        "clip_share": 0.01,
        "entropy": 0.4 - 0.1 * progress,
        "weight_version": step,
    }
    return record | changes


def eval_record(step: int, avg8: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "time": 1.7e9 + 2 * step,
        "avg8": avg8,
        "se": 0.027,
        "pass8": min(1.0, avg8 + 0.2),
        "truncated_share": 0.01,
        "no_answer_share": 0.03,
        "problems": 96,
        "samples": 8,
        "seconds": 2.0,
    }


def write_run(folder: Path, records: list[dict[str, Any]], *, finished: bool = True, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    (folder / "recipe.yaml").write_text("trainer:\n  algorithm: {name: '<dapo> & co'}\n")
    if finished:
        summary = {"avg8_before": 0.5, "avg8_after": 0.8, "peak_rss_bytes": 5 * 2**30, "seed": 1, "r3": True}
        by_phase = {"seconds_by_phase": {"generate": 40.0, "train": 25.0}, "phase_peak_rss_bytes": {"export": 2**30}}
        (folder / "summary.json").write_text(json.dumps(summary | by_phase))
    return folder


def full_run(folder: Path) -> Path:
    rng = random.Random(0)
    steps = [step_record(step, rng) for step in range(1, 51)]
    evals = [eval_record(step, 0.52 + 0.28 * (1 - math.exp(-step / 20))) for step in (0, 10, 20, 30, 40, 50)]
    records = evals[:1] + [
        record for step in steps for record in [step, *(e for e in evals[1:] if e["step"] == step["step"])]
    ]
    return write_run(folder, records)


class Structure(HTMLParser):
    """Checks that elements close in order, and collects what the page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.figures = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.figures += tag == "figure"
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def render(folder: Path) -> str:
    path = write_report(folder)
    assert path == folder / "report.html"
    page = path.read_text()
    structure = Structure(page)
    assert structure.open == []
    assert structure.figures == 10
    return page


def test_page_loads_nothing_from_the_network(tmp_path: Path) -> None:
    page = render(full_run(tmp_path / "run"))
    assert Structure(page).links == []
    assert not re.search(r"https?:|@import|url\(", page)


def test_finished_run_shows_before_and_after_with_errors(tmp_path: Path) -> None:
    page = render(full_run(tmp_path / "run"))
    assert "finished · 50 steps · 100 optimizer updates" in page
    assert "52.0 % ± 2.7 %" in page
    assert "77.7 % ± 2.7 %" in page
    assert "+25.7 points, +6.7 standard errors" in page
    assert "mean without R3" in page
    assert "peak rss" in page
    assert "5.00 GiB" in page
    assert "export 1.00 GiB" in page
    assert "never over" in page


def test_text_from_the_run_is_escaped(tmp_path: Path) -> None:
    page = render(full_run(tmp_path / "<run> & co"))
    assert "<run>" not in page
    assert "&lt;dapo&gt; &amp; co" in page


@pytest.mark.parametrize(
    "records",
    [
        [],
        [eval_record(0, 0.5)],
        [eval_record(0, 0.5), step_record(1, random.Random(0))],
        [eval_record(0, 0.5) | {"se": None}, step_record(1, random.Random(0)), eval_record(1, 1.0) | {"se": None}],
        [step_record(1, random.Random(0), gap_mean=None, gap_p99=None, gap_max=None, grad_norm=None)],
        [step_record(step, random.Random(0), gap_mean=None, gap_max=0.0, entropy=0.0) for step in (1, 2)],
    ],
    ids=["nothing yet", "first evaluation", "one step", "no error", "no gap", "zeros"],
)
def test_run_in_progress_can_be_reported(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    page = render(write_run(tmp_path / "run", records, finished=False))
    assert "in progress" in page


def test_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = write_run(tmp_path / "run", [step_record(1, rng), step_record(2, rng)], tail='{"kind":"step","st')
    assert [step["step"] for step in read_run(folder).steps] == [1, 2]
    render(folder)


def test_steps_done_again_after_a_resume_replace_the_first_ones(tmp_path: Path) -> None:
    rng = random.Random(0)
    folder = tmp_path / "run"
    first = [eval_record(0, 0.5), *(step_record(step, rng, reward_mean=0.0) for step in range(1, 11))]
    write_run(folder, [*first, eval_record(8, 0.55), eval_record(10, 0.6)])
    metrics = MetricsFile(folder)
    metrics.rewind(8, time=1.7e9)
    for step in range(9, 14):
        metrics.append(step_record(step, rng, reward_mean=1.0))
    metrics.append(eval_record(8, 0.56))
    run = read_run(folder)
    assert [step["step"] for step in run.steps] == list(range(1, 14))
    assert [step["reward_mean"] for step in run.steps] == [0.0] * 8 + [1.0] * 5
    assert [(record["step"], record["avg8"]) for record in run.evals] == [(0, 0.5), (8, 0.56)]
    assert (run.resumed_after, run.discarded) == ([8], 2)
    page = render(folder)
    assert "13 steps · 26 optimizer updates · resumed after step 8 (2 steps done again)" in page
    assert 'class="resume"' in page


def test_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        write_report(tmp_path)


def states(**changes: Any) -> dict[str, str]:
    rng = random.Random(0)
    steps = [step_record(step, rng) for step in range(1, 51)]
    steps += [step_record(step, rng, **changes) for step in range(51, 61)]
    return {check.metric: check.state for check in check_run(steps)}


def test_healthy_run_raises_no_flag() -> None:
    assert set(states().values()) == {"healthy"}


@pytest.mark.parametrize(
    ("metric", "changes"),
    [
        ("Gap, mean", {"gap_mean": 0.011}),
        ("Gap, worst token", {"gap_max": 3.0}),
        ("Reward", {"reward_mean": 0.0}),
        ("Informative groups", {"informative_share": 0.01}),
        ("Truncated responses", {"truncated_share": 0.5}),
        ("Responses without an answer", {"no_answer_share": 0.5}),
        ("Clipped tokens", {"clip_share": 0.5}),
        ("Entropy", {"entropy": 0.01}),
        ("Entropy", {"entropy": 2.0}),
        ("Response length", {"response_length_mean": 60.0}),
        ("Gradient norm", {"grad_norm": 30.0}),
        ("Gradient norm", {"grad_norm": None}),
        ("Gap, mean", {"gap_mean": None}),
        ("Seconds a step", {"step_seconds": 9.0}),
    ],
)
def test_each_fault_raises_its_own_flag(metric: str, changes: dict[str, float | None]) -> None:
    flagged = {name for name, state in states(**changes).items() if state == "red flag"}
    assert flagged == {metric}


def test_chart_leaves_a_gap_where_a_value_is_missing() -> None:
    svg = line_chart("x", [1, 2, 3, 4], [Series("a", [1.0, None, 2.0, 3.0], 1)])
    path = re.search(r'class="line c1" d="([^"]*)"', svg)
    assert path is not None
    assert re.sub(r"[^ML]", "", path.group(1)) == "MML"


def test_log_chart_places_decades_evenly_and_leaves_zero_out() -> None:
    svg = line_chart("x", [1, 2, 3, 4], [Series("a", [0.001, 0.01, 0.1, 0.0], 1)], log=True)
    path = re.search(r'class="line c1" d="([^"]*)"', svg)
    assert path is not None
    heights = [float(y) for y in re.findall(r",([0-9.]+)", path.group(1))]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00312, "0.00312"),
        (0.5, "0.500"),
        (12.345, "12.3"),
        (3456.7, "3,457"),
        (1e-6, "1.00e-06"),
        (-0.25, "-0.250"),
        (math.nan, "nan"),
    ],
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_percent_has_one_decimal() -> None:
    assert percent(0.7869) == "78.7 %"
