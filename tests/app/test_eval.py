"""`beam-rl eval` on a real vLLM server: its numbers, an interruption, exactness, and servers that die."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beam_rl import tiny
from beam_rl.cli import main
from beam_rl.eval_server import EngineServer, serving
from beam_rl.evals.results import read
from beam_rl.settings import TinySettings

MINUTES = 60
ENGINE = "max_model_len=96"
API_SERVER = "-m vllm.entrypoints.openai.api_server"
EFFORT = "{% if reasoning_effort is defined and reasoning_effort == 'minimal' %}{{ '1' }}{% endif %}"

pytestmark = pytest.mark.timeout(20 * MINUTES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Beam that knows some sums; its chat template writes one token more at minimal reasoning effort."""
    settings = TinySettings(
        train_problems=60, held_out_problems=64, max_term=12, max_factor=5, three_term_share=0.0,
        warmup_steps=300, warmup_batch=32, slip_share=0.25,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("eval")
    tiny.build(folder / "tiny", settings, 1, "float32", lambda done: None)
    template = folder / "tiny" / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + EFFORT)
    return folder / "tiny" / "model"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[EngineServer]:
    with serving(model, "cpu", model.parent / "server.log", 32, [ENGINE]) as one:
        yield one


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    """24 problems, 8 samples each, from the whole distribution."""
    given = ["eval", str(model.parent / "train.jsonl"), "--limit", "24", "--preset", "policy", "--max-tokens", "24"]
    return [*given, "--out", str(out), *more]


def run(log: Path, *given: str) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", "beam_rl", *given], stdout=file, stderr=file)


def finished(out: Path) -> int:
    """Samples on the disk."""
    path = out / "samples.jsonl"
    return path.read_text().count('"kind": "sample"') if path.is_file() else 0


def kill_half_way(process: "subprocess.Popen[bytes]", out: Path, log: Path, victim: Any) -> int:
    """SIGKILL what `victim` gives once half of 192 samples are done; returns how many were."""
    end = time.monotonic() + 8 * MINUTES
    while (done := finished(out)) < 96:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.01)
    os.kill(victim().pid, signal.SIGKILL)
    process.wait(timeout=2 * MINUTES)
    return done


def test_avg_at_8_is_what_counting_the_results_by_hand_gives(
    model: Path, server: EngineServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(model, tmp_path / "out", "--endpoint", server.url)) == 0
    file = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(file["samples"]) == 24 * 8
    right = 0
    for one in file["samples"]:
        label = next(row["answer"] for row in file["problems"] if row["id"] == one["problem"])
        boxed = re.search(r"\\boxed\{(-?\d+)\}$", one["response"])
        right += boxed is not None and int(boxed[1]) == int(label)  # some say -0
    assert 0 < right < 24 * 8
    assert file["summary"]["avg"] == pytest.approx(right / (24 * 8))
    assert f"{100 * right / (24 * 8):.1f} ±" in capsys.readouterr().out
    assert all(one["tokens"] >= 1 and one["finish_reason"] in ("stop", "length") for one in file["samples"])
    assert file["model"]["context"] == 96
    page = (tmp_path / "out" / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")


def test_a_run_killed_half_way_ends_with_the_same_set_of_samples(
    model: Path, server: EngineServer, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    given = arguments(model, out, "--endpoint", server.url, "--concurrency", "4")
    process = run(log, *given)
    done = kill_half_way(process, out, log, lambda: process)
    before = [json.loads(line) for line in (out / "samples.jsonl").read_text().split("\n")[:-1]]
    assert 96 <= done < 192
    assert run(log, *given).wait(timeout=5 * MINUTES) == 0, log.read_text()[-3000:]
    results = read(out)
    drawn = [(one.problem, one.sample) for one in results.samples]
    assert drawn == [(problem.id, index) for problem in results.problems for index in range(8)]
    after = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert after[: len(before)] == before
    assert sum(line["kind"] == "sample" for line in after) == 192, "nothing is drawn twice"


def test_temperature_0_gives_the_same_verdicts_twice(model: Path, server: EngineServer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        given = arguments(model, tmp_path / name, "--endpoint", server.url, "--preset", "greedy", "--samples", "2")
        assert main(given) == 0
    first, second = (read(tmp_path / name) for name in ("a", "b"))
    assert [one.verdict for one in first.samples] == [one.verdict for one in second.samples]
    assert [one.response for one in first.samples] == [one.response for one in second.samples]
    assert {one.response for one in first.samples} != {first.samples[0].response}
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def test_reasoning_effort_reaches_the_chat_template(model: Path, server: EngineServer, tmp_path: Path) -> None:
    lengths = {}
    for effort in ("minimal", "default"):
        given = arguments(model, tmp_path / effort, "--endpoint", server.url, "--samples", "1")
        assert main([*given, "--reasoning-effort", effort]) == 0
        lengths[effort] = [one.prompt_tokens or 0 for one in read(tmp_path / effort).samples]
    assert [length + 1 for length in lengths["default"]] == lengths["minimal"]


def test_a_server_of_our_own_that_dies_is_named_and_the_next_one_goes_on(
    model: Path, descendants: Any, tmp_path: Path
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    given = arguments(model, out, "--model", str(model), "--engine", ENGINE, "--concurrency", "4")
    process = run(log, *given)
    started = descendants(process)
    done = kill_half_way(process, out, log, lambda: started.running(API_SERVER))
    assert process.returncode == 1
    said = log.read_text()
    assert "the vLLM server was killed by signal 9" in said
    assert "goes on" in said
    assert finished(out) >= done
    assert read(out).status == "incomplete"
    assert started.alive(0) == [], "no process of the dead server is left"

    process = run(log, *given)
    assert process.wait(timeout=10 * MINUTES) == 0, log.read_text()[-3000:]
    results = read(out)
    assert (results.status, len(results.samples)) == ("complete", 192)
    assert results.model.path == str(model)
    assert len(results.model.config_hash or "") == len(results.model.weights_hash or "") == 64


def test_a_server_that_cannot_start_says_why(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(model, tmp_path / "out", "--model", str(model), "--engine", "max_model_len=100000")
    assert main(given) == 1
    said = capsys.readouterr().out
    assert "ended with exit code 1" in said
    assert "max_model_len" in said


def test_a_kill_while_the_server_runs_leaves_no_process(model: Path, descendants: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = run(log, *arguments(model, tmp_path / "out", "--model", str(model), "--engine", ENGINE))
    started = descendants(process)
    end = time.monotonic() + 5 * MINUTES
    while started.running(API_SERVER) is None:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(3)  # it is importing, or starting processes of its own
    started.look()
    process.kill()
    process.wait()
    assert started.alive() == []
