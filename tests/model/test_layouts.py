"""Two processes hold the model in parts: it must score, replay, record and export as one process does."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from beam_rl.model.batch import PackedBatch
from beam_rl.model.checkpoint import HFCheckpoint, save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.names import load_hf
from beam_rl.model.tensors import initial_tensors

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
