"""A run's folder: it goes on where it ended, belongs to one run at a time, and to one evaluation."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from beam_rl.evals.results import read
from beam_rl.model.errors import BadInput


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_works(
    server: Any, evaluate: Any, right: Any, problems: Path, tmp_path: Path
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def answer(body: Any) -> Any:
        started.set()
        go_on.wait(30)
        return right(body)

    server.answer = answer
    process = command(server, problems, tmp_path / "out")
    assert started.wait(60)
    try:
        with pytest.raises(BadInput, match="another evaluation is running"):
            evaluate()
    finally:
        go_on.set()
    assert process.wait(60) == 0
    assert read(tmp_path / "out").summary.verdicts == {"correct": 20}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 3}, "samples=2"),
        ({"temperature": 0.5}, "temperature=1.0"),
        ({"prompt": "x {problem}"}, "prompt="),
        ({"task": "other"}, "name='ten'"),
    ],
)
def test_a_folder_of_another_evaluation_is_refused_and_left_alone(
    change: dict[str, Any], said: str, evaluate: Any, tmp_path: Path
) -> None:
    evaluate()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    if "task" in change:
        (tmp_path / "other.jsonl").write_text('{"problem": "p", "answer": 1}\n')
        change = {"task": str(tmp_path / "other.jsonl")}
    with pytest.raises(BadInput, match=f"holds another evaluation.*{said}"):
        evaluate(**change)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_another_model_behind_the_same_address_is_refused(server: Any, evaluate: Any) -> None:
    evaluate()
    server.models = ["another"]
    with pytest.raises(BadInput, match="model='m', this one 'another'"):
        evaluate()


def test_a_folder_of_something_else_is_left_alone(evaluate: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(BadInput, match="neither empty nor"):
        evaluate()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_line_cut_short_by_a_kill_costs_that_sample_alone(server: Any, evaluate: Any, tmp_path: Path) -> None:
    evaluate()
    path = tmp_path / "out" / "samples.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:11]) + b"\n" + lines[11][:40])
    server.requests.clear()
    results = evaluate()
    assert len(server.requests) == 10
    assert results.summary.verdicts == {"correct": 20}
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_damaged_line_is_named_and_nothing_is_thrown_away(evaluate: Any, tmp_path: Path) -> None:
    evaluate()
    path = tmp_path / "out" / "samples.jsonl"
    lines = path.read_text().split("\n")
    lines[4] = lines[4][:30]
    path.write_text("\n".join(lines))
    with pytest.raises(BadInput, match="line 5 is damaged"):
        evaluate()
    assert path.read_text() == "\n".join(lines)


def command(server: Any, problems: Path, out: Path) -> "subprocess.Popen[bytes]":
    arguments = ["eval", str(problems), "--endpoint", server.url, "--samples", "2", "--max-tokens", "100"]
    arguments += ["--concurrency", "4", "--out", str(out)]
    with (out.parent / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "beam_rl", *arguments], stdout=log, stderr=log)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_a_killed_run_goes_on_without_drawing_anything_twice(
    how: str, server: Any, problems: Path, tmp_path: Path, right: Any
) -> None:
    answered: list[Any] = []
    lock = threading.Lock()

    def answer(body: Any) -> Any:
        with lock:
            answered.append(body)
            last = len(answered) > 10
        if last:  # half way: nothing more is answered until the process is gone
            server.released.wait(60)
        return right(body)

    server.answer = answer
    out = tmp_path / "out"
    process = command(server, problems, out)
    end = time.monotonic() + 60
    while len(done(out)) < 10:
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, getattr(signal, how))
    assert process.wait(30) == (-9 if how == "SIGKILL" else 1)
    server.released.set()
    end = time.monotonic() + 60
    while server.now:  # none of the dead client's requests may be counted as the next one's
        assert time.monotonic() < end
        time.sleep(0.02)
    assert len(done(out)) == 10
    if how != "SIGKILL":
        assert "goes on" in (tmp_path / "log").read_text()
        assert read(out).status == "incomplete"
        assert (out / "report.html").is_file()

    before = done(out)
    server.answer = right
    server.requests.clear()
    assert command(server, problems, out).wait(60) == 0, (tmp_path / "log").read_text()
    assert len(server.requests) == 10
    results = read(out)
    assert (results.status, len(results.samples), len(results.sessions)) == ("complete", 20, 2)
    assert done(out)[:10] == before


def done(out: Path) -> list[str]:
    """The journal's samples, as text."""
    path = out / "samples.jsonl"
    return [line for line in path.read_text().split("\n")[:-1] if '"sample"' in line] if path.is_file() else []
