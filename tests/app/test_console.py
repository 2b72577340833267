"""What a run prints: the right numbers on one line, bars on a terminal, plain lines elsewhere."""

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from beam_rl import console as console_module
from beam_rl.console import Console
from beam_rl.lines import Opening, duration, eval_line, final_lines, opening_lines, step_line

STEP: dict[str, Any] = {
    "kind": "step",
    "step": 7,
    "reward_mean": 0.3125,
    "informative_share": 0.546,
    "gap_mean": 0.00312,
    "gap_max": 0.2149,
    "gap_budget": 0.01,
    "gap_mean_no_r3": None,
    "response_length_mean": 14.21,
    "tokens_per_second": 3512.4,
    "step_seconds": 1.618,
}
EVAL: dict[str, Any] = {
    "step": 0,
    "avg8": 0.521,
    "se": 0.027,
    "samples": 8,
    "problems": 96,
    "truncated_share": 0.01,
    "no_answer_share": 0.035,
}
SUMMARY: dict[str, Any] = {
    "avg8_before": 0.521,
    "avg8_after": 0.788,
    "se_before": 0.027,
    "se_after": 0.024,
    "gap_mean_worst_step": 0.0041,
    "gap_mean": 0.0031,
    "gap_max": 0.41,
    "steps": 50,
    "updates": 100,
    "startup_seconds": 41.2,
    "step_seconds_median": 1.62,
    "seconds_by_phase": {"generate": 40.0, "logprobs": 10.0, "train": 30.0, "sync": 15.0, "other": 5.0},
    "peak_rss_bytes": 5.5 * 2**30,
}
OPENING = Opening(
    title="DAPO on a tiny Beam",
    facts=[("model", "1.6 M parameters"), ("run folder", "runs/x")],
    phases=[("warm-up", 60.0), ("50 steps", 100.0), ("export", 0.0)],
)


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console's clock stands still: a phase lasts "1 s", however busy the machine is."""
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: 0.0))


def test_step_line_has_every_number() -> None:
    assert step_line(STEP, 50).plain == (
        "step  7/50  reward +0.312  informative 55%  gap 0.00312 of 0.01, max 0.215"
        "  length 14.2  3,512 tokens/s  1.62 s"
    )


def test_gap_over_its_budget_is_worded_and_coloured() -> None:
    line = step_line(STEP | {"gap_mean": 0.0131}, 50)
    assert "gap 0.0131 OVER 0.01" in line.plain
    assert [span.style for span in line.spans if "OVER" in line.plain[span.start : span.end]] == ["bold red"]
    within = step_line(STEP, 50)
    assert "bold red" not in [span.style for span in within.spans]


def test_gap_without_r3_stands_beside_the_gap() -> None:
    assert "max 0.215 (0.0342 without R3)" in step_line(STEP | {"gap_mean_no_r3": 0.0342}, 50).plain


def test_values_that_are_not_finite_do_not_end_the_run() -> None:
    nothing = {key: None for key in STEP if key not in ("kind", "step", "gap_budget")}
    assert "gap not finite" in step_line(STEP | nothing, 50).plain


def test_eval_line_has_error_and_shares() -> None:
    assert eval_line(EVAL).plain == (
        "avg@8 before training: 52.1 ± 2.7 % on 96 held-out problems (truncated 1.0 %, no answer 3.5 %)"
    )
    assert "after step 50: 52.1 %" in eval_line(EVAL | {"step": 50, "se": None}).plain


def test_opening_says_what_and_how_long() -> None:
    assert [line.plain for line in opening_lines(OPENING)] == [
        "DAPO on a tiny Beam",
        "  model       1.6 M parameters",
        "  run folder  runs/x",
        "  plan        warm-up (60 s), 50 steps (2 min), export",
        "  in all      about 3 min",
    ]


def test_final_table_has_every_number() -> None:
    text = "\n".join(line.plain for line in final_lines(SUMMARY, 0.01, Path("runs/x")))
    assert "52.1 ± 2.7 % → 78.8 ± 2.4 %  (+26.7 points)" in text
    assert "mean 0.00310, worst step 0.00410 (within the budget of 0.01), worst token 0.41" in text
    assert "generate 40 s (40%), logprobs 10 s (10%), train 30 s (30%), sync 15 s (15%), other 5 s (5%)" in text
    assert "50 steps, 100 updates, 1.62 s a step (median)" in text
    assert "runs/x/report.html" in text
    over = "\n".join(line.plain for line in final_lines(SUMMARY | {"gap_mean_worst_step": 0.02}, 0.01, Path("runs/x")))
    assert "OVER the budget" in over


def test_final_table_of_a_run_without_steps_or_evaluations() -> None:
    empty = dict.fromkeys(["avg8_before", "avg8_after", "se_before", "se_after", "gap_mean", "step_seconds_median"])
    phases = dict.fromkeys(SUMMARY["seconds_by_phase"], 0.0)
    text = "\n".join(
        line.plain for line in final_lines(SUMMARY | empty | {"seconds_by_phase": phases}, 0.01, Path("x"))
    )
    assert "not measured → not measured" in text
    assert "no step was done" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (45, "45 s"), (89, "89 s"), (100, "2 min"), (4800, "80 min"), (5460, "1 h 31 min")],
)
def test_durations_are_rough(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_output_is_whole_lines_without_escapes() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.opening(OPENING)
    with console.phase("warm-up", total=3) as bar:
        for _ in range(3):
            bar.advance()
    with console.phase("training", total=1) as bar:
        console.step(STEP, 50)
        bar.advance()
    console.evaluation(EVAL)
    console.final(SUMMARY, 0.01, Path("runs/x"))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    written = text.splitlines()
    assert "warm-up: started" in written
    assert "warm-up: done in 1 s" in written
    assert step_line(STEP, 50).plain in written  # not wrapped at 80 columns


def test_long_phase_speaks_now_and_then_where_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(console_module, "PLAIN_INTERVAL", 0.0)
    with Console(stream).phase("warm-up", total=2) as bar:
        bar.advance(2)
    assert "warm-up: 2/2 after 1 s" in stream.getvalue().splitlines()


def test_failed_phase_does_not_claim_to_be_done() -> None:
    stream = io.StringIO()
    console = Console(stream)
    with pytest.raises(RuntimeError), console.phase("warm-up"):
        raise RuntimeError
    assert "warm-up: stopped after 1 s" in stream.getvalue()
    assert "done" not in stream.getvalue()


def test_brackets_are_printed_as_they_are() -> None:
    stream = io.StringIO()
    console = Console(stream)
    with console.phase("load [red]/models/[a][/red]"):
        console.say("[bold]x[/bold]")
    assert "load [red]/models/[a][/red]: started" in stream.getvalue()
    assert "[bold]x[/bold]" in stream.getvalue()


def test_bars_follow_and_hold_each_other_on_a_terminal() -> None:
    screen = _on_terminal(
        "with c.phase('one', total=2) as bar:\n"
        "    bar.advance(); c.say('said'); bar.advance()\n"
        "with c.phase('two') as outer:\n"
        "    with c.phase('three', total=1) as inner:\n"
        "        inner.advance(); outer.advance()\n"
    )
    assert "\x1b[" in screen
    assert "said" in screen
    for name in ("one", "two", "three"):
        assert f"{name}: done in 1 s" in screen
        assert f"{name}: started" not in screen
    assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") > 0  # the cursor is back


def test_what_libraries_print_during_a_phase_goes_to_the_log_not_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    screen = _on_terminal(
        "import pathlib, sys\n"
        "from beam_rl.terminal import terminal_apart\n"
        f"with terminal_apart(pathlib.Path({str(log)!r})) as terminal:\n"
        "    c = Console(terminal)\n"
        "    with c.phase('one', total=1) as bar:\n"
        "        print('to output'); print('to error', file=sys.stderr); bar.advance()\n"
    )
    assert "one: done in 1 s" in screen
    assert "to output" not in screen
    assert "to error" not in screen
    assert set(log.read_text().splitlines()) == {"to output", "to error"}


def test_dumb_terminal_gets_plain_lines() -> None:
    screen = _on_terminal("with c.phase('one', total=1) as bar:\n    bar.advance()\n", TERM="dumb")
    assert "\x1b" not in screen
    assert "one: started" in screen


def test_bars_may_be_advanced_by_many_threads() -> None:
    screen = _on_terminal(
        "import threading\n"
        "with c.phase('one', total=400) as bar:\n"
        "    ts = [threading.Thread(target=lambda: [bar.advance() for _ in range(50)]) for _ in range(8)]\n"
        "    [t.start() for t in ts]; [t.join() for t in ts]\n"
        "c.say(f'counted {bar.done}')\n"
    )
    assert "counted 400" in screen


def test_terminal_without_unicode_does_not_end_the_run() -> None:
    script = "from beam_rl.console import Console; Console().say('52.1 ± 2.7 % → 78.8')"
    result = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "52.1 ? 2.7 % ? 78.8" in result.stdout


def _on_terminal(body: str, **environment: str) -> str:
    """What a script that uses the console `c` writes to a real pseudo-terminal."""
    still = "import types, beam_rl.console as module\nmodule.time = types.SimpleNamespace(monotonic=lambda: 0.0)\n"
    script = f"{still}from beam_rl.console import Console\nc = Console()\n{body}"
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color"} | environment
    process = subprocess.Popen([sys.executable, "-c", script], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the other end is closed
                return
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=60) == 0
    reader.join()
    os.close(master)
    return b"".join(chunks).decode()
