"""Rollouts by vLLM on one GPU, in tokens/s: what log-probs and captured routes cost."""

import gc
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from beam_rl.rollout import active
from beam_rl.rollout.profile import engine_init_kwargs
from tests.gpu.checks import Checks
from tests.gpu.engines import Tell, Turns, together
from tests.gpu.measure import SHAPE
from tests.gpu.models import SKYRL, large

SEQUENCES = (64, 256)
PROMPT, RESPONSE, REPETITIONS = 128, 256, 3
RATIO = 0.95
"""Least share of plain vLLM's tokens/s that rollouts must reach."""


@dataclass(frozen=True)
class Variant:
    """An engine to measure."""

    arguments: dict[str, Any]
    logprobs: int | None
    environment: tuple[tuple[str, str], ...] = ()


def rollout(**arguments: Any) -> Variant:
    """The engine that the recipes ask SkyRL for, with one pool of KV blocks, but for these arguments."""
    recipes = {
        "enable_return_routed_experts": True,
        "worker_extension_cls": SKYRL,
        "disable_hybrid_kv_cache_manager": True,
    }
    return Variant(engine_init_kwargs("gpu") | recipes | arguments, 0)


def run(report: Tell) -> None:
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary, checks.attempt("throughput"):
        engines = {
            "plain": Variant({}, None),
            "plain, one pool": Variant({"disable_hybrid_kv_cache_manager": True}, None),
            "rollout": rollout(),
        }
        ratios = throughput(Path(temporary), report, engines, REPETITIONS, checks)
        for count, ratio in ratios["rollout"].items():
            checks.expect(ratio >= RATIO, f"rollouts of {count} sequences: {ratio:.3f} of plain vLLM's tokens/s")
    checks.done()


def throughput(
    folder: Path, report: Tell, engines: dict[str, Variant], repetitions: int, checks: Checks
) -> dict[str, dict[int, float]]:
    """Tokens/s of every engine, and its fast paths as far as the first one has others.

    Returns:
        by engine and number of sequences, the share of the first engine's tokens/s: the median over repetitions, in
        each of which all engines ran one after the other.
    """
    large().save_pretrained(folder / "large")
    jobs = {name: (measure, (variant, folder / "large", repetitions)) for name, variant in engines.items()}
    results, failed = together(jobs, folder)
    checks.failed += failed
    first = next(iter(results), None)
    ratios: dict[str, dict[int, float]] = {name: {} for name in engines}
    for name, found in results.items():
        report(f"{name}: seconds to start", found["start"])
        for count, rates in found["rates"].items():
            if not rates:
                continue
            pairs = zip(rates, results[first]["rates"][count], strict=False)
            ratios[name][count] = statistics.median(rate / base for rate, base in pairs)
            spread = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
            report(f"{name}: tokens/s of {count} sequences", f"{spread}, {ratios[name][count]:.3f} of {first}")
    for name, found in results.items():
        others = results[first]["paths"] if name != first else []
        for path in found["paths"]:
            if path not in others:
                report(f"{name}: {path.name}", f"{'on' if path.active else 'off'} {path.detail}".rstrip())
    return ratios


def measure(turns: Turns, variant: Variant, model: Path, repetitions: int) -> dict[str, Any]:
    """Tokens/s by number of sequences, of every repetition; of fewer, if another engine fails."""
    os.environ |= dict(variant.environment)
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    engine = LLM(
        str(model),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(SEQUENCES),
        gpu_memory_utilization=0.15,  # must be free at the start, however far the other engines are
        kv_cache_memory_bytes=4 * 2**30,
        **variant.arguments,
    )
    engine.apply_model(randomise)
    rates: dict[int, list[float]] = {count: [] for count in SEQUENCES}
    found = {"start": time.perf_counter() - started, "rates": rates}
    found["paths"] = active.paths(engine.collective_rpc(active.gather)[0])
    for repetition in range(repetitions + 1):
        sampling = SamplingParams(
            temperature=1.0, max_tokens=RESPONSE, ignore_eos=True, detokenize=False, logprobs=variant.logprobs
        )
        for count in SEQUENCES:
            generator = np.random.default_rng((repetition, count))  # new prompts: none is in the prefix cache
            tokens = generator.integers(0, SHAPE["vocab_size"], (count, PROMPT))
            prompts: Any = [{"prompt_token_ids": row.tolist()} for row in tokens]
            if not turns.meet():
                return found
            outputs: Any = None
            gc.collect()  # what the last outputs leave is not part of the time
            with turns.lock:
                begin = time.perf_counter()
                outputs = engine.generate(prompts, sampling, use_tqdm=False)
                seconds = time.perf_counter() - begin
            if variant.arguments.get("enable_return_routed_experts"):
                routes: Any = outputs[0].outputs[0].routed_experts
                assert routes.shape == (PROMPT + RESPONSE - 1, SHAPE["num_hidden_layers"], SHAPE["num_experts_per_tok"])
            if repetition:
                rates[count].append(count * RESPONSE / seconds)
    engine.llm_engine.engine_core.shutdown()
    return found


def randomise(model: nn.Module) -> None:
    """Fresh random weights instead of vLLM's dummies, whose routers send every token to the same experts."""
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0, 0.02, generator=generator)
