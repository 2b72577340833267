"""Adapters that the trainer wrote, loaded by PEFT on transformers' own Beam."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import load_config
from beam_rl.model.lora_config import LoraConfig
from beam_rl.trainer.engine import EngineConfig, Sequence, TrainerEngine

SCRIPT = Path(__file__).parent / "reference_adapter.py"
CASES = {
    "all": LoraConfig(r=8, lora_alpha=16),
    "rank-stabilised": LoraConfig(r=16, lora_alpha=4, use_rslora=True),
    "attention": LoraConfig(r=4, target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "self_attn.gate_proj")),
    "experts' up, dense gate": LoraConfig(r=8, target_modules=("experts.up_proj", "mlp.gate_proj")),
    "experts' down": LoraConfig(r=8, target_modules=("experts.down_proj",)),
}


@dataclass
class Scores:
    """Log-probabilities [B, S - 1] of the reference's tokens."""

    trainer: Tensor
    merged: Tensor
    peft: Tensor


def score(folder: Path, tokens: Tensor, **settings: Any) -> tuple[TrainerEngine, Tensor]:
    """An engine on a model folder, with B away from zero if it has adapters, and its log-probabilities."""
    engine = TrainerEngine(EngineConfig(dtype="float32", optimizer=None, **settings))
    engine.build(load_config(folder))
    engine.load_hf(folder)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in engine.models[0].named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    samples = [Sequence(tokens=row, loss_mask=torch.ones(len(row) - 1)) for row in tokens]
    return engine, torch.stack(engine.forward_logprobs(samples, replay=False))


@pytest.fixture(scope="module")
def scores(
    reference: dict[str, Tensor],
    reference_environment: dict[str, str],
    golden: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Scores]:
    """Of every case; PEFT's come from one process over all of them."""
    model, tokens, folder = golden("tiny"), reference["input_ids"], tmp_path_factory.mktemp("adapters")
    ours = {}
    for case, lora in CASES.items():
        engine, adapted = score(model, tokens, lora=lora)
        engine.save_adapter(folder / "adapters" / case, base=model)
        save_hf(folder / "merged" / case, engine.hf, engine.export())
        ours[case] = adapted, score(folder / "merged" / case, tokens)[1]
    arguments = [model, model / "reference.safetensors", folder / "adapters", folder / "theirs.safetensors"]
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, env=reference_environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
    theirs = load_file(folder / "theirs.safetensors")
    return {case: Scores(*ours[case], theirs[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_peft_on_the_reference_gives_the_trainers_logprobs(
    case: str, scores: dict[str, Scores], reference: dict[str, Tensor]
) -> None:
    found = scores[case]
    assert (found.trainer - reference["token_logprobs"]).abs().max() > 0.05  # otherwise nothing is compared
    torch.testing.assert_close(found.peft, found.trainer, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.merged, found.trainer, atol=2e-5, rtol=0)
