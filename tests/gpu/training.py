"""Forward and backward of Beams on one GPU, 8,192 tokens packed: ours and transformers' own, in turn.

Every case has the card to itself, in a process of its own. `TRANSFORMERS_REFERENCE` names a folder with a transformers
that has Beam, if the installed one has not (`pip install --no-deps --target FOLDER -r requirements/reference.txt`).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from beam_rl import apart
from tests.gpu.measure import SHAPES, TOKENS, measure, tokens

OURS: dict[str, dict[str, Any]] = {
    "ours": {"cuda_graphs": False},
    "ours, CUDA graphs": {"cuda_graphs": True},
    "ours, full recompute": {"recompute": "full"},
}
"""Engine settings by name."""
THEIRS = {"transformers": "plain", "transformers, checkpointing": "checkpointing"}


class NoOptimizer:
    """Stands for the optimizer: its state would fill the card, and is no part of forward and backward."""

    def zero_grad(self) -> None: ...


def ours(shape: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure the engine."""
    from beam_rl.model.config import BeamConfig
    from beam_rl.trainer.engine import EngineConfig, Sequence, TrainerEngine

    engine = TrainerEngine(EngineConfig(**settings))
    with patch("beam_rl.trainer.optimizer.build_optimizer", lambda *_: (NoOptimizer(), None)):
        engine.build(BeamConfig(**SHAPES[shape], architectures=["BeamForCausalLM"], dtype="bfloat16"))
    samples = [Sequence(tokens=row, loss_mask=torch.ones(len(row) - 1)) for row in tokens()]

    def step() -> None:
        engine.forward_backward(samples, lambda logprobs, *_: (-logprobs.sum() / TOKENS, {}), replay=False)

    return measure(engine.models[0], step, engine.zero_grad)


def theirs(shape: str, mode: str) -> dict[str, Any]:
    """Measure transformers."""
    paths = [os.environ.get("TRANSFORMERS_REFERENCE"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "tests.gpu.reference_training", shape, mode, str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"transformers, {shape}, {mode}:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text())


def matrix_rate() -> float:
    """FLOP/s of a large bfloat16 matrix product on this card."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - start)


def run(report: Callable[[str, Any], None]) -> None:
    rate = matrix_rate()
    torch.cuda.empty_cache()
    report("bf16 matrix rate of the card, TFLOP/s", rate / 1e12)
    for shape in SHAPES:
        compare(shape, rate, report)


def compare(shape: str, rate: float, report: Callable[[str, Any], None]) -> None:
    """Measure everybody with one shape; rate is the card's, in FLOP/s."""
    found: dict[str, dict[str, Any]] = {}
    for name, settings in OURS.items():
        found[name] = apart.call(ours, shape, settings)
        _report(f"{shape}, {name}", found[name], rate, report)
    for other, mode in THEIRS.items():
        reference = theirs(shape, mode)
        report(f"{shape}, {other}: version", reference["version"])
        _report(f"{shape}, {other}", reference, rate, report)
        for name in OURS:
            report(f"{shape}, {name} / {other}: tokens/s", reference["seconds"] / found[name]["seconds"])
            report(f"{shape}, {name} / {other}: peak memory", found[name]["bytes"] / reference["bytes"])


def _report(name: str, found: dict[str, Any], rate: float, report: Callable[[str, Any], None]) -> None:
    used = 6 * found["active"] * TOKENS / found["seconds"]
    report(f"{name}: parameters, billions", found["parameters"] / 1e9)
    report(f"{name}: active, billions", found["active"] / 1e9)
    report(f"{name}: forward + backward, ms", 1e3 * found["seconds"])
    report(f"{name}: of it kernels, ms", 1e3 * found["busy"])
    report(f"{name}: until all is launched, ms", 1e3 * found["host"])
    report(f"{name}: tokens/s", TOKENS / found["seconds"])
    report(f"{name}: TFLOP/s (6 x active x tokens)", used / 1e12)
    report(f"{name}: share of the card's matrix rate", used / rate)
    report(f"{name}: peak memory, GB", found["bytes"] / 1e9)
    report(f"{name}: longest kernels", found["kernels"])
