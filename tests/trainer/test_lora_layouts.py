"""Adapters held in parts must score, learn and merge as one process's do."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).parent / "lora_layouts.py"


@pytest.fixture
def expected(golden: Callable[[str], Path], samples, tmp_path: Path) -> Path:
    """A folder with the model, the samples, a trained adapter and one process's values."""
    spec = importlib.util.spec_from_file_location("lora_layouts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    layouts = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layouts)
    (tmp_path / "model").symlink_to(golden("tiny"))
    rows = [[s.tokens.tolist(), s.loss_mask.tolist(), s.fields["weight"].tolist()] for s in samples]
    (tmp_path / "samples.json").write_text(json.dumps(rows))
    engine = layouts.build(tmp_path / "model", {})
    tensors = {f"fresh.{name}": tensor.clone() for name, tensor in engine.export_adapter()}
    generator = torch.Generator().manual_seed(2)
    for name, parameter in engine.models[0].named_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    engine.save_adapter(tmp_path / "adapter")
    (tmp_path / "fingerprint").write_text(engine.base)
    engine.load_adapter(tmp_path / "adapter")
    scores = engine.forward_logprobs(samples, replay=False)
    tensors |= {f"logprobs.{i}": score for i, score in enumerate(scores)} | layouts.values(engine, samples)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "expected.safetensors")
    return tmp_path


@pytest.mark.parametrize("processes", [2, 4])
def test_adapters_in_every_layout_are_those_of_one_process(processes: int, expected: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*launcher, str(SCRIPT), str(expected)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
