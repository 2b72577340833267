"""Speed and memory of forward and backward on one GPU: a Beam of 3.9 B parameters, 8,192 tokens in one sequence."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from beam_rl.model.config import BeamConfig
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Sequence, TrainerEngine

TOKENS = 8192
LAYERS, EXPERTS, TOPK = 12, 64, 8
REPETITIONS = 8


def beam() -> BeamConfig:
    """The shape: 3.9 B parameters, 1.25 B active."""
    return BeamConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        sliding_window=512,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * (LAYERS // 4),
        mlp_layer_types=["dense"] * 2 + ["sparse"] * (LAYERS - 2),
        moe_intermediate_size=768,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        n_group=8,
        topk_group=4,
        max_position_embeddings=16_384,
        architectures=["BeamForCausalLM"],
        dtype="bfloat16",
    )


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
    report("bf16 matrix rate of the card, TFLOP/s", rate / 1e12)
    modes: tuple[Literal["full"] | None, ...] = (None, "full")
    for recompute in modes:
        engine = TrainerEngine(EngineConfig(optimizer=OptimizerSettings(), recompute=recompute))
        engine.build(beam())
        named = [(name, p.numel()) for model in engine.models for name, p in model.named_parameters()]
        experts = sum(size for name, size in named if ".experts." in name)
        everything = sum(size for _, size in named)
        active = everything - experts + experts * TOPK / EXPERTS
        held = torch.cuda.memory_allocated()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 151_936, (TOKENS,), generator=generator)
        samples = [Sequence(tokens=tokens, loss_mask=torch.ones(TOKENS - 1))]
        seconds = []
        for repetition in range(REPETITIONS + 3):
            torch.cuda.synchronize()
            if repetition == 3:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            engine.forward_backward(samples, lambda logprobs, *_: (-logprobs.sum() / TOKENS, {}), replay=False)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            engine.zero_grad()
        median = statistics.median(seconds[3:])
        used = 6 * active * TOKENS / median
        name = f"recompute {recompute or 'none'}: "
        report(name + "parameters, billions", everything / 1e9)
        report(name + "forward + backward, ms", 1e3 * median)
        report(name + "tokens/s", TOKENS / median)
        report(name + "TFLOP/s (6 x active x tokens)", used / 1e12)
        report(name + "share of the card's matrix rate", used / rate)
        report(name + "peak beyond weights, gradients, optimizer, GB", (torch.cuda.max_memory_allocated() - held) / 1e9)
        del engine
        torch.cuda.empty_cache()
