"""Results: files that are not what they seem are refused, comparisons pair the same problems."""

import json
from pathlib import Path

import numpy as np
import pytest

from beam_rl.eval_lines import comparison, report
from beam_rl.eval_page import render
from beam_rl.evals.comparison import compare
from beam_rl.evals.results import Identity, Results, Sample, Sampling, Session, read, write
from beam_rl.evals.runner import task_record
from beam_rl.evals.summary import by_problem, summarize
from beam_rl.evals.task import Problem, Task
from beam_rl.model.errors import BadInput

K = 4


def results(right: list[int], name: str = "m", missing: int | None = None, text: str = "p") -> Results:
    """Problem i is right in its first `right[i]` samples; `missing` is a problem whose samples ended in errors."""
    task = Task("t", "here", tuple(Problem(f"p{n}", f"{text} {n}", str(n)) for n in range(len(right))))
    samples = [
        Sample(problem=f"p{n}", sample=index, verdict="error", error="HTTP 500")
        if n == missing
        else Sample(
            problem=f"p{n}", sample=index, verdict="correct" if index < count else "wrong", tokens=10 * (n + 1),
            answer=str(n) if index < count else f"<b>{index}</b>", response="</pre><script>alert(1)</script>" * 30,
            finish_reason="stop",
        )
        for n, count in enumerate(right)
        for index in range(K)
    ]  # fmt: skip
    return Results(
        status="incomplete" if missing is not None else "complete",
        task=task_record(task),
        model=Identity(model=name),
        sampling=Sampling(samples=K, temperature=1, top_p=1, max_tokens=100),
        seed_policy="none",
        warnings=["something <odd>"],
        summary=summarize(task, samples, K, 10.0),
        problems=by_problem(task, samples, K),
        samples=samples,
        sessions=[Session(started=0, ended=10)],
        software={},
    )


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    made = results([4, 1, 0])
    write(tmp_path / "results.json", made)
    assert read(tmp_path) == read(tmp_path / "results.json") == made


def test_numbers_are_those_of_the_samples() -> None:
    summary = results([4, 1, 0]).summary
    assert summary.avg == pytest.approx(5 / 12)
    assert summary.se == pytest.approx(np.std([1, 0.25, 0], ddof=1) / np.sqrt(3))
    assert summary.pass_k == pytest.approx(2 / 3)
    assert summary.maj_k == pytest.approx((1 + 1 / 4 + 0) / 3), "problem 1 has four different answers"
    assert (summary.tokens, summary.tokens_mean, summary.tokens_per_second) == (240, 20, 24)
    assert summary.tokens_p95 == 30


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not the results"),
        ('{"avg": 1}', "not the results"),
        ('{"schema": "beam-rl-eval", "version": 2}', "version 2"),
        ('{"schema": "beam-rl-eval", "version": 1}', "status"),
        ("verdict", "problems.0.verdicts.0"),
    ],
)
def test_a_file_of_something_else_is_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if content == "verdict":
        write(path, results([1]))
        content = path.read_text().replace('"correct"', '"right"')
    path.write_text(content)
    with pytest.raises(BadInput, match=said):
        read(tmp_path)


def test_comparison_is_paired_and_names_the_problems_that_changed() -> None:
    compared = compare(results([4, 1, 0, 2]), results([4, 3, 0, 1]))
    differences = np.array([0, 0.5, 0, -0.25])
    assert compared.difference.mean == pytest.approx(differences.mean())
    assert compared.difference.se == pytest.approx(differences.std(ddof=1) / 2)
    assert [(one.before.id, one.difference) for one in compared.changed] == [("p1", 0.5), ("p3", -0.25)]
    assert (compared.unchanged, compared.left_out) == (2, [])
    text = "\n".join(comparison(compared))
    assert "+6.2 points" in text
    assert "p1               1/4 → 3/4  +50.0 points" in text
    assert "0 is within the interval" in text


def test_other_problems_are_not_compared() -> None:
    with pytest.raises(BadInput, match="did not have the same problems"):
        compare(results([4, 1]), results([4, 1], text="q"))
    with pytest.raises(BadInput, match="did not have the same problems"):
        compare(results([4, 1]), results([4, 1, 0]))


def test_problems_without_a_response_are_left_out_of_a_comparison_and_named() -> None:
    compared = compare(results([4, 1, 0]), results([4, 3, 2], missing=1))
    assert compared.left_out == ["p1"]
    assert compared.difference.mean == pytest.approx(0.25)
    assert "left out: p1" in "\n".join(comparison(compared))


def test_settings_that_differ_are_remarked() -> None:
    other = results([4, 1])
    other = other.model_copy(update={"sampling": other.sampling.model_copy(update={"temperature": 0.5})})
    assert any("temperature differs: 1.0 and 0.5" in remark for remark in compare(results([4, 1]), other).remarks)


def test_the_page_is_one_file_and_shows_responses_as_text() -> None:
    page = render(results([4, 1, 0], missing=2))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;" in page
    assert "something &lt;odd&gt;" in page
    assert not any(word in page for word in ("http:", "https:", "src=", "@import", "url("))
    assert page.count('<i class="error"') >= 8


def test_a_report_without_any_response_prints_no_number() -> None:
    lines = "\n".join(report(results([0], missing=0)))
    assert "no response" in lines
    assert "nan" not in lines.lower()
    assert "4 error" in lines
    assert json.loads(results([0], missing=0).model_dump_json())["summary"]["avg"] is None
