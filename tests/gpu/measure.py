"""A training step's time, memory and kernels, measured alike for whoever computes it. Imports nothing but torch."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

TOKENS, SEQUENCES = 8192, 8
"""In all, packed, and how many sequences of one length they are."""
LAYERS, EXPERTS, TOPK = 24, 64, 8
WARM_UP, REPETITIONS = 4, 10

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (LAYERS // 6),
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (LAYERS - 3),
    "moe_intermediate_size": 768,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOPK,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 16_384,
}
"""Of a Beam with 7.2 B parameters, 1.63 B of them active for a token."""
SHAPES: dict[str, dict[str, Any]] = {
    "7.2 B": SHAPE,
    "2.0 B": SHAPE
    | {
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 384,
    },
}
"""By name: that one, and one half as wide."""


def tokens() -> torch.Tensor:
    """int64 [SEQUENCES, TOKENS / SEQUENCES], the same for everybody."""
    shape = SEQUENCES, TOKENS // SEQUENCES
    return torch.randint(0, SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(0))


def measure(model: torch.nn.Module, step: Callable[[], None], clear: Callable[[], None]) -> dict[str, Any]:
    """Measure forward and backward.

    Args:
        step: one forward and backward pass, which leaves gradients.
        clear: forgets them; not part of the time.

    Returns:
        seconds: median of a step.
        host: median seconds until everything of a step is launched.
        busy: seconds of a step in which a kernel runs, if one at a time does.
        bytes: the most memory ever held at once, weights and gradients included, with what PyTorch keeps for later
            (activations of CUDA graphs are of that kind).
        parameters, active: how many.
        kernels: lines of the longest: ms, calls, name.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    everything = sum(sizes.values())
    seconds, host = [], []
    gc.collect()
    gc.freeze()  # as training does
    for repetition in range(WARM_UP + REPETITIONS):
        if repetition == WARM_UP:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        clear()
    peak = torch.cuda.max_memory_reserved()
    busy, lines = _profile(step, clear)
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "host": statistics.median(host[WARM_UP:]),
        "busy": busy,
        "kernels": lines,
        "bytes": peak,
        "parameters": everything,
        "active": everything - experts + experts * TOPK / EXPERTS,
    }


def _profile(step: Callable[[], None], clear: Callable[[], None]) -> tuple[float, list[str]]:
    """Seconds of all kernels of a step, and lines of the longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    clear()
    kernels = [event for event in profiler.key_averages() if event.self_device_time_total]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    lines = [f"{event.self_device_time_total / 1e3:8.2f} {event.count:6} {event.key[:150]}" for event in kernels[:40]]
    return total / 1e6, lines
