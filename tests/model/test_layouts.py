"""Two processes hold the model in parts: it must score, replay, record and export as one process does."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from beam_rl.model.attention import context_index
from beam_rl.model.batch import PackedBatch
from beam_rl.model.checkpoint import HFCheckpoint, save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.model.names import load_hf
from beam_rl.model.tensors import initial_tensors
from beam_rl.model.transformer_config import transformer_config

LENGTHS = [9, 14, 1]


def test_two_ranks_score_replay_record_and_export_as_one(small: BeamConfig, build: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_hf(folder, small, initial_tensors(small, seed=5, dtype=torch.float32))
    model = build(small)
    load_hf([model], HFCheckpoint(folder))
    tokens = torch.randint(0, small.vocab_size, (1, sum(LENGTHS)))
    noise = torch.rand(sum(LENGTHS), small.num_hidden_layers, small.num_experts)
    routes = noise.argsort(-1)[..., : small.num_experts_per_tok].to(torch.uint8)
    captured = torch.arange(sum(LENGTHS)) % 4 > 0
    batch = PackedBatch.from_lengths(LENGTHS, routes=routes, captured=captured, record=True)
    with torch.no_grad():
        logits = model(tokens, packed_seq_params=batch)
    recorded = {f"recorded.{layer}": ids for layer, ids in batch.recorded.items()}
    inputs = {
        "tokens": tokens,
        "lengths": torch.tensor(LENGTHS),
        "routes": routes,
        "captured": captured.to(torch.uint8),
    }
    save_file(inputs | recorded | {"logits": logits.contiguous()}, folder / "expected.safetensors")

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).parent / "layouts.py"
    done = subprocess.run([*launcher, str(script), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 3}, r"tp = 3 does not divide the model's num_attention_heads \(4\)"),
        ({"tp": 4}, r"tp = 4 does not divide the model's num_key_value_heads \(2\)"),
        ({"tp": 0}, "tp = 0"),
        ({"pp": 3}, r"pp = 3 does not divide the model's num_hidden_layers \(4\)"),
        ({"pp": 8}, r"pp = 8 does not divide the model's num_hidden_layers \(4\)"),
        ({"ep": 3}, r"ep = 3 does not divide the model's num_experts \(8\)"),
        ({"ep": 16}, r"ep = 16 does not divide the model's num_experts \(8\)"),
        ({"etp": 3}, r"etp = 3 does not divide the model's moe_intermediate_size \(32\)"),
        ({"cp": 0}, "cp = 0"),
        ({"sequence_parallel": True}, "sequence_parallel = True with tp = 1"),
        ({"pp": 2, "virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size = 2"),
        ({"pp": 2, "num_layers_in_first_pipeline_stage": 1}, "num_layers_in_first_pipeline_stage = 1"),
        ({"pp": 2, "num_layers_in_last_pipeline_stage": 1}, "num_layers_in_last_pipeline_stage = 1"),
        ({"pp": 2, "pipeline_model_parallel_layout": "Et|tttL"}, "pipeline_model_parallel_layout"),
        ({"cp": 4, "hierarchical_context_parallel_sizes": [2, 2]}, "hierarchical_context_parallel_sizes"),
        ({"moe_router_fusion": True}, "moe_router_fusion = True: it would bypass the replay"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_by_name(sizes: dict[str, Any], said: str, small: BeamConfig) -> None:
    with pytest.raises(BadInput, match=said):
        transformer_config(small, params_dtype=torch.float32, **sizes)


def test_expert_parallelism_without_experts_is_refused(small: BeamConfig) -> None:
    dense = type(small)(**(small.to_dict() | {"mlp_layer_types": ["dense"] * 4}))
    with pytest.raises(BadInput, match="ep = 2: the model has no experts"):
        transformer_config(dense, params_dtype=torch.float32, ep=2)


def test_a_sequence_that_context_parallelism_cannot_cut_is_refused() -> None:
    """The trainer pads every sample to a multiple of 2 x cp; what comes another way must not be cut unequally."""
    with pytest.raises(ValueError, match="a sequence of 10 tokens does not split into 2 x 2 equal chunks"):
        context_index((8, 10), 2, 0)
