"""The command line beyond `train`: what is wrong is said in one line, with exit code 2, and nothing is half written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from beam_rl.cli import main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("train", "score", "report", "export", "doctor"))


def test_score_writes_logprobs_and_routes(checkpoint: Path, tmp_path: Path) -> None:
    tokens, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"input_ids": torch.arange(2 * 12).reshape(2, 12) % 25}, tokens)
    assert main(["score", str(checkpoint), "--tokens", str(tokens), "--side", "trainer", "--out", str(out)]) == 0
    scores = load_file(out)
    assert scores["token_logprobs"].shape == (2, 11)
    assert scores["routes.1"].shape == (2, 12, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "{tmp}/none", "--tokens", "{tmp}/x", "--side", "trainer", "--out", "{tmp}/o"], "config.json"),
        (["score", "{model}", "--tokens", "{tmp}/x", "--side", "trainer", "--out", "{tmp}/o"], "--tokens"),
        (
            ["score", "{model}", "--tokens", "{model}/config.json", "--side", "trainer", "--out", "{tmp}/o"],
            "safetensors",
        ),
        (["report", "{tmp}"], "metrics.jsonl"),
        (["export", "{tmp}"], "recipe.yaml"),
        (["train"], "name a recipe"),
        (["train", "--resume", "{tmp}"], "not a run folder"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(tmp=tmp_path, model=checkpoint) for argument in arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
