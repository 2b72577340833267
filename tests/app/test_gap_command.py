"""`beam-rl gap` on real engines: both sides of one precision, from the command line to the table."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(600)
def test_the_gap_of_an_adapter_is_measured_and_explained(content: dict[str, Any], write: Any) -> None:
    """Of adapters too: one that changes nothing would measure its base."""
    command = [sys.executable, "-m", "beam_rl", "gap", str(write(content)), "--precision", "lora", "--prompts", "6"]
    result = subprocess.run([*command, "--explain", "--json"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "lora: rollout: done" in result.stderr
    found = json.loads(result.stdout)
    assert [(row["precision"], row["r3"]) for row in found["rows"]] == [("lora", True), ("lora", False)]
    with_r3, without = found["rows"]
    assert with_r3["tokens"] == without["tokens"] > 6
    assert with_r3["routes_differ"] == 0.0
    assert 0 < with_r3["mean"] <= with_r3["max"]
    assert "changes the weights" in found["notes"][0]
    told = found["explained"]["lora"]
    assert len(told["layers"]) == 6
    assert len(told["tokens"]) == 5


@pytest.mark.timeout(600)
def test_the_rollout_of_mxfp8_of_weights_only_has_the_trainers_weights(content: dict[str, Any], write: Any) -> None:
    """No sync brings them here; the checkpoint's own would be another model (a mean gap of 0.12)."""
    command = [sys.executable, "-m", "beam_rl", "gap", str(write(content)), "--precision", "mxfp8", "--prompts", "6"]
    result = subprocess.run([*command, "--json", "beam.mxfp8.activations=false"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    with_r3, _ = json.loads(result.stdout)["rows"]
    assert with_r3["mean"] < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "0"], "--prompts 0"),
        (["--adapter", "/nowhere"], "adapter_config.json"),
        (["beam.lora.r=12"], "multiple of 8"),
        (["--model", "/nowhere"], "/nowhere"),
        (["beam.device=gpu"], "beam.mxfp8.activations=false"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_an_engine_starts(
    options: list[str], message: str, content: dict[str, Any], write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from beam_rl.cli import main

    assert main(["gap", str(write(content)), *options]) == 2
    assert message in capsys.readouterr().err
    assert Path(content["beam"]["run_dir"]).exists() is False
