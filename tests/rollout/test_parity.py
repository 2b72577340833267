"""The rollout's log-probs and routes are the reference's."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl import apart
from beam_rl.model.errors import BadInput
from beam_rl.rollout.score import score
from beam_rl.trainer.responses import score_responses
from beam_rl.trainer.settings import EngineConfig

TOLERANCE = 2e-5

Golden = Callable[[str], Path]


def assert_scores(scores: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Log-probs within the tolerance; routes equal as sets for every token and layer."""
    torch.testing.assert_close(scores["token_logprobs"], reference["token_logprobs"], rtol=0, atol=TOLERANCE)
    routes = {name for name in reference if name.startswith("routes.")}
    assert {name for name in scores if name.startswith("routes.")} == routes
    for name in routes:
        assert scores[name].dtype == torch.int16
        assert torch.equal(scores[name].sort(-1).values, reference[name].sort(-1).values), name


@pytest.mark.parametrize("name", ["tiny", "groups", "long"])
def test_fp32_scores_are_the_reference(
    name: str, golden: Golden, reference: Callable[[str], dict[str, Tensor]]
) -> None:
    expected = reference(name)
    assert_scores(score(golden(name), expected["input_ids"], "float32"), expected)


def test_experts_stored_fused_are_read_as_the_same_model(
    golden: Golden, reference: Callable[[str], dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = load_file(golden("groups") / "model.safetensors")
    fused: dict[str, Tensor] = {}
    for name in [n for n in weights if ".experts.0.gate_proj" in n]:
        prefix, experts = name.split("0.gate_proj")[0], 64
        gates, ups, downs = (
            torch.stack([weights.pop(f"{prefix}{e}.{kind}_proj.weight") for e in range(experts)])
            for kind in ("gate", "up", "down")
        )
        fused[f"{prefix}gate_up_proj"] = torch.cat((gates, ups), dim=1)
        fused[f"{prefix}down_proj"] = downs
    save_file(weights | fused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((golden("groups") / "config.json").read_bytes())
    expected = reference("groups")
    assert_scores(score(tmp_path, expected["input_ids"], "float32"), expected)


def test_a_first_step_of_few_tokens_does_not_kill_the_process(golden: Golden) -> None:
    """With AMX, which a process must ask for, and only large matrices make PyTorch ask: hence a fresh process."""
    code = (
        "import sys, torch; from beam_rl.rollout.score import score; "
        "print(score(sys.argv[1], torch.tensor([[3, 4, 5]]), 'bfloat16')['token_logprobs'].tolist())"
    )
    command = [sys.executable, "-c", code, str(golden("tiny"))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(ast.literal_eval(run.stdout.splitlines()[-1])[0]) == 2


def test_bad_input_is_refused_before_an_engine_starts(golden: Golden, tmp_path: Path) -> None:
    ids = torch.arange(3, 13)[None]
    with pytest.raises(BadInput, match="--side trainer"):
        score(golden("tiny"), ids, replay={})
    with pytest.raises(BadInput, match="vocab_size"):
        score(golden("tiny"), ids + 250)
    for wrong in (ids[0], ids[:0], ids[:, :1]):
        with pytest.raises(BadInput, match="expected integers"):
            score(golden("tiny"), wrong)
    with pytest.raises(BadInput, match="at most 4095"):
        score(golden("tiny"), torch.ones(1, 4096, dtype=torch.int64))
    with pytest.raises(BadInput, match=r"config\.json"):
        score(tmp_path, ids)


def test_sampled_logprobs_are_the_trainers_at_every_temperature(
    engine: Any, golden: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    """Raw log-probs would be those of temperature 1, and the first token's ratio to the trainer's about 2."""
    starts = [prompt[:20] for prompt in prompts]
    for temperature in (0.6, 1.0, 1.2):
        engine.reset_prefix_cache()
        outputs = engine.generate(starts, tokens=12, temperature=temperature)
        picked = [
            [position[token].logprob for token, position in zip(sample.token_ids, sample.logprobs, strict=True)]
            for sample in (output.outputs[0] for output in outputs)
        ]
        scored = apart.call(
            score_responses,
            golden("tiny"),
            [np.array([*o.prompt_token_ids, *o.outputs[0].token_ids]) for o in outputs],
            [len(start) for start in starts],
            [None] * len(starts),
            EngineConfig(dtype="float32", temperature=temperature),
        )
        for ours, theirs in zip(scored, picked, strict=True):
            assert np.abs(ours.free - np.array(theirs)).max() < TOLERANCE
