"""The commands' options: mistakes are named before anything is started or written."""

import json
import signal
from pathlib import Path

import pytest

from beam_rl.cli import main, parser
from beam_rl.eval_command import fingerprint, sampling_of, terminated_as_interrupted
from beam_rl.eval_server import free_ports

END = ["--endpoint", "http://127.0.0.1:9"]


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "task.jsonl"
    path.write_text('{"problem": "p", "answer": 1}\n')
    return str(path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([*END, "--samples", "0"], "--samples 0"),
        ([*END, "--limit", "0"], "--limit 0"),
        ([*END, "--concurrency", "0"], "--concurrency 0"),
        ([*END, "--temperature", "-1"], "--temperature -1"),
        ([*END, "--top-p", "0"], "--top-p 0"),
        ([*END, "--timeout", "nan"], "--timeout nan"),
        ([*END, "--engine", "max_model_len=10"], "--engine"),
        ([*END, "--api-key-env", "NO_SUCH_VARIABLE_HERE"], "NO_SUCH_VARIABLE_HERE"),
        (["--endpoint", "127.0.0.1:8000"], "--endpoint"),
        (["--endpoint", "http://h:99999"], "--endpoint"),
        (["--endpoint", "http://[::1"], "--endpoint"),
        (["--model", "none"], "config.json"),
    ],
)
def test_mistakes_are_named(
    more: list[str], said: str, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", task, "--out", str(tmp_path / "out"), *more]) == 2
    assert said in capsys.readouterr().err


def test_seeds_and_malformed_engine_arguments_are_refused_before_a_server_starts(
    checkpoint: Path, task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["eval", task, "--model", str(checkpoint), "--out", str(tmp_path / "out")]
    assert main([*given, "--seed", "1"]) == 2
    assert "--seed" in capsys.readouterr().err
    assert main([*given, "--engine", "eager"]) == 2
    assert "name=value" in capsys.readouterr().err
    assert main([*given, "--api-key-env", "HOME"]) == 2
    assert "--api-key-env" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named_and_nothing_is_counted(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", task, *END, "--out", str(tmp_path / "out")]) == 1
    assert "does not answer" in capsys.readouterr().out
    assert not (tmp_path / "out" / "results.json").exists()


def test_presets_give_way_to_what_is_asked_for(task: str) -> None:
    def sampled(*more: str) -> dict[str, object]:
        return sampling_of(parser().parse_args(["eval", task, *END, *more])).model_dump()

    expected = {"samples": 8, "temperature": 1.0, "top_p": 0.7, "max_tokens": 20480, "reasoning_effort": "minimal"}
    assert sampled() == expected | {"seed": None}
    assert sampled("--preset", "greedy", "--top-p", "0.5")["temperature"] == 0.0
    assert sampled("--temperature", "0")["temperature"] == 0.0
    assert sampled("--reasoning-effort", "default")["reasoning_effort"] is None


def test_grade_prints_a_verdict_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"response": r"\boxed{42}", "answer": 42},
        {"response": r"\boxed{43}", "answer": "42"},
        {"response": "42", "answer": 42},
        {"response": "42", "answer": 42, "truncated": True},
        {"response": r"\boxed{\dfrac{1}{2}}", "answer": r"\frac12"},
        {"response": "\\boxed{336}\u2028", "answer": r"336^\circ"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert main(["grade", str(tmp_path / "a.jsonl")]) == 0
    assert capsys.readouterr().out.split() == ["correct", "wrong", "no_answer", "truncated", "correct", "correct"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": 1}, '"response"'),
        ({"response": None, "answer": 1}, '"response"'),
        ({"response": "x"}, '"answer"'),
        ({"response": "x", "answer": ""}, '"answer"'),
        ({"response": "x", "answer": 1, "truncated": "no"}, '"truncated"'),
    ],
)
def test_grade_names_a_line_it_cannot_grade_and_prints_no_verdict(
    row: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"response": "x", "answer": 1}\n' + json.dumps(row) + "\n")
    assert main(["grade", str(tmp_path / "a.jsonl")]) == 2
    captured = capsys.readouterr()
    assert "row 2" in captured.err
    assert said in captured.err
    assert captured.out == ""


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    weights.write_bytes(bytes((3 << 20) - 1) + b"\1")
    second = fingerprint(tmp_path)
    assert second["weights_hash"] != first["weights_hash"]
    assert second["config_hash"] == first["config_hash"]
    (tmp_path / "config.json").write_text("{ }")
    assert fingerprint(tmp_path)["config_hash"] != first["config_hash"]


def test_an_evaluation_in_a_shells_background_hears_sigterm() -> None:
    """There SIGINT is ignored, and SIGTERM got the same handler."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ports_of_servers_are_not_among_those_of_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = free_ports(20)
    assert len(set(found)) == 20
    assert max(found) < first
