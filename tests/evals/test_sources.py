"""Loading tasks: what is wrong with a set of problems is said before anything is drawn."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from beam_rl.evals import sources
from beam_rl.evals.arithmetic import generate, write_rows
from beam_rl.evals.sources import HubSet
from beam_rl.evals.task import from_rows, grade_response
from beam_rl.model.errors import BadInput


def aime_rows() -> list[dict[str, Any]]:
    """30 problems; some labels as public copies of AIME spell them."""
    rows: list[dict[str, Any]] = [{"problem": f"Find $x_{{{n}}}$.", "answer": str(7 * n)} for n in range(30)]
    rows[3]["answer"] = "021"
    rows[4]["answer"] = 28
    rows[20]["answer"] = r"336^\circ"
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_degrees_and_leading_zeros_in_labels_become_integers(tmp_path: Path) -> None:
    task = sources.load("aime25", write(tmp_path / "a.jsonl", aime_rows()))
    assert [problem.answer for problem in task.problems][2:6] == ["14", "21", "28", "35"]
    assert task.problems[20].answer == "336"
    assert grade_response(task.problems[20], r"\boxed{336}").verdict == "correct"
    assert grade_response(task.problems[20], r"\boxed{336^\circ}").verdict == "correct"
    assert task.message(task.problems[0]).endswith("Find $x_{0}$.")
    assert r"\boxed{}" in task.message(task.problems[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(), "29 problems; aime25 has 30"),
        (lambda rows: rows.append({"problem": "more", "answer": 1}), "31 problems"),
        (lambda rows: rows[1].update(answer="1000"), "the label is '1000'"),
        (lambda rows: rows[1].update(answer="-5"), "the label is '-5'"),
        (lambda rows: rows[1].update(answer=r"\frac{1}{2}"), "the label is"),
        (lambda rows: rows[1].update(answer=""), "row 2"),
        (lambda rows: rows[1].update(answer=None), "row 2"),
        (lambda rows: rows[1].update(answer=True), "row 2"),
        (lambda rows: rows[1].update(problem=" "), "row 2"),
        (lambda rows: rows[1].pop("answer"), 'row 2.*needs "problem" and "answer"'),
        (lambda rows: rows[1].update(problem=rows[0]["problem"]), "2 problems have the same text"),
        (lambda rows: [row.update(id="x") for row in rows[:2]], "2 problems have the same id: 'x'"),
    ],
)
def test_labels_that_cannot_be_aimes_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    rows = aime_rows()
    change(rows)
    with pytest.raises(BadInput, match=said):
        sources.load("aime25", write(tmp_path / "a.jsonl", rows))


def test_the_hash_tells_sets_apart_and_nothing_else(tmp_path: Path) -> None:
    rows = aime_rows()
    task = sources.load("aime25", write(tmp_path / "a.jsonl", rows))
    renamed = [{"id": f"other-{n}", **row} for n, row in enumerate(rows)]
    renamed[20]["answer"] = "336"
    assert sources.load("aime25", write(tmp_path / "b.jsonl", renamed)).text_hash == task.text_hash
    assert task.first(29).text_hash != task.text_hash
    rows[7]["problem"] += " "
    assert sources.load("aime25", write(tmp_path / "c.jsonl", rows)).text_hash != task.text_hash
    rows[7]["problem"] = rows[7]["problem"][:-1]
    rows[7]["answer"] = "50"
    assert sources.load("aime25", write(tmp_path / "d.jsonl", rows)).text_hash != task.text_hash


def test_parquet_json_and_json_lines_hold_the_same_task(tmp_path: Path) -> None:
    rows = [{"problem": f"p\u2028{n}", "answer": n + 0.0} for n in range(4)]
    lines = write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    tasks = [sources.load(str(path)) for path in (lines, tmp_path / "a.json", tmp_path / "a.parquet")]
    assert [problem.answer for problem in tasks[0].problems] == ["0", "1", "2", "3"]
    assert len({task.text_hash for task in tasks}) == 1


def test_training_rows_are_a_task_with_its_own_prompt_and_integers_only(tmp_path: Path) -> None:
    held_out = generate(seed=1, train=10, held_out=64).held_out
    write_rows(tmp_path / "held_out.jsonl", held_out)
    task = sources.load(str(tmp_path / "held_out.jsonl"))
    problem = task.problems[0]
    assert task.message(problem) == held_out[0].problem
    assert problem.id == held_out[0].id
    assert grade_response(problem, f"\\boxed{{{held_out[0].problem[:-2]}}}").verdict == "wrong"
    assert from_rows(task.rows(), "again", "here").text_hash == task.text_hash


def test_rows_of_several_files_keep_different_ids() -> None:
    rows = [{"prompt": [{"role": "user", "content": f"q{n}"}], "reward_spec": {"ground_truth": n}} for n in range(2)]
    both = [row | {"extra_info": {"id": "same"}} for row in rows]
    assert [problem.id for problem in from_rows(both, "x", "x").problems] == ["same#0", "same#1"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"{", "line 1 is not JSON"),
        (b'{"problem": "p", "answer": 1}\n{"problem"', "line 2 is not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1, 2]", "row 1"),
        (b'{"prompt": "p", "answer": 1}', "row 1"),
    ],
)
def test_a_file_that_is_no_task_is_refused_by_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        sources.load(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("aime26", {}, "aime25, aime24"),
        ("none.jsonl", {}, "no such file"),
        ("none.jsonl", {"data": Path("x.jsonl")}, "--data"),
        ("aime25", {"data": Path("none.jsonl")}, "no such file"),
        ("aime25", {"prompt": "Solve it."}, "has no {problem}"),
    ],
)
def test_unknown_tasks_and_useless_options_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        sources.load(name, **options)


def test_a_set_of_two_configurations_is_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As AIME 2025 lies on the Hub: two parts, and a column of another name. Here the same in a folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"question": row["problem"], "answer": str(row["answer"])} for row in aime_rows()]
    write(folder / "one.jsonl", rows[:15])
    write(folder / "two.jsonl", rows[15:])
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: I\n  data_files:\n  - split: test\n    path: one.jsonl\n"
        "- config_name: II\n  data_files:\n  - split: test\n    path: two.jsonl\n---\n"
    )
    hub = HubSet(str(folder), "test", ("I", "II"), problem="question")
    monkeypatch.setitem(sources.AIME, "aime25", hub)
    task = sources.load("aime25")
    assert task.text_hash == sources.load("aime25", write(tmp_path / "a.jsonl", aime_rows())).text_hash
    assert task.source == str(folder)
    with pytest.raises(BadInput, match=r"no column 'problem'.*--data"):
        HubSet(str(folder), "test", ("I", "II")).load()
    with pytest.raises(BadInput, match=r"cannot be loaded from the Hub.*--data"):
        HubSet(str(tmp_path / "nowhere"), "test").load()
