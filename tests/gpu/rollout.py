"""Rollouts by vLLM on one GPU: what capturing routes costs, and whether a drafter changes what is sampled."""

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.tensors import initial_tensors
from beam_rl.rollout import active, drafter
from beam_rl.rollout.drafter import DrafterShape
from beam_rl.rollout.profile import engine_init_kwargs
from beam_rl.rollout.serve_profile import ServeProfile
from tests.gpu.engines import Turns, together
from tests.gpu.measure import SHAPE

Report = Callable[[str, Any], None]
SKYRL = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap"
"""SkyRL's extension of vLLM's workers, which registers the recipe's weight transfer."""

SEQUENCES = (64, 256)
PROMPT, RESPONSE, REPETITIONS = 128, 256, 3
RATIO = 0.95
"""Least share of plain vLLM's tokens/s that rollouts must reach."""

DRAFT = {"prompts": 64, "prompt": 32, "response": 128, "samples": 8192, "first": 8}
DOUBT = 1e-4
"""Least probability of the samples' differences, of about ten tests, were the distributions equal."""


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        throughput(Path(temporary), report, variants())
        speculation(Path(temporary), report)


def large() -> BeamConfig:
    """7.2 B parameters, 1.63 B active."""
    return BeamConfig(**SHAPE, architectures=["BeamForCausalLM"], dtype="bfloat16")


# Throughput


@dataclass(frozen=True)
class Variant:
    """An engine to measure."""

    arguments: dict[str, Any]
    logprobs: int | None
    environment: tuple[tuple[str, str], ...] = ()


def variants() -> dict[str, Variant]:
    """Plain vLLM, and the engine that the recipe's GPU profile asks SkyRL for."""
    rollout = engine_init_kwargs("gpu") | {"enable_return_routed_experts": True, "worker_extension_cls": SKYRL}
    return {
        "plain": Variant({}, None),
        "rollout": Variant(rollout, 0),
        "rollout, fp8 KV": Variant(rollout | {"kv_cache_dtype": "fp8"}, 0),
    }


def throughput(folder: Path, report: Report, engines: dict[str, Variant]) -> None:
    """Tokens/s of every engine, of the first one's, and the first one's fast paths."""
    large().save_pretrained(folder / "large")
    jobs = {name: (measure, (variant, folder / "large")) for name, variant in engines.items()}
    results = together(jobs, folder)
    first = next(iter(engines))
    for name, found in results.items():
        report(f"{name}: seconds to start", found["start"])
        for count, rates in found["rates"].items():
            rate, base = statistics.median(rates), statistics.median(results[first]["rates"][count])
            spread = f"{min(rates):,.0f}-{max(rates):,.0f}"
            report(f"{name}: tokens/s of {count} sequences", f"{rate:,.0f} ({spread}), {rate / base:.3f} of {first}")
    for name, found in results.items():
        others = results[first]["paths"] if name != first else []
        for path in found["paths"]:
            if path not in others:
                report(f"{name}: {path.name}", f"{'on' if path.active else 'off'} {path.detail}".rstrip())
    slow = [
        count
        for count, rates in results.get("rollout", {"rates": {}})["rates"].items()
        if statistics.median(rates) < RATIO * statistics.median(results[first]["rates"][count])
    ]
    assert not slow, f"rollouts of {slow} sequences reach less than {RATIO} of plain vLLM's tokens/s"


def measure(turns: Turns, variant: Variant, model: Path) -> dict[str, Any]:
    """Tokens/s by number of sequences: medians are the caller's."""
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
        gpu_memory_utilization=0.22,
        kv_cache_memory_bytes=8 * 2**30,
        **variant.arguments,
    )
    engine.apply_model(randomise)
    found: dict[str, Any] = {"start": time.perf_counter() - started, "rates": {count: [] for count in SEQUENCES}}
    found["paths"] = active.paths(engine.collective_rpc(active.gather)[0])
    sampling = SamplingParams(
        temperature=1.0, max_tokens=RESPONSE, ignore_eos=True, detokenize=False, logprobs=variant.logprobs
    )
    turns.meet()
    for repetition in range(REPETITIONS + 1):
        for count in SEQUENCES:
            generator = np.random.default_rng((repetition, count))  # new prompts: none is in the prefix cache
            prompts: Any = [
                {"prompt_token_ids": row.tolist()} for row in generator.integers(0, 151_936, (count, PROMPT))
            ]
            turns.meet()
            with turns.lock:
                begin = time.perf_counter()
                outputs = engine.generate(prompts, sampling, use_tqdm=False)
                seconds = time.perf_counter() - begin
            if variant.arguments.get("enable_return_routed_experts"):
                routes = outputs[0].outputs[0].routed_experts
                assert routes.shape == (PROMPT + RESPONSE - 1, SHAPE["num_hidden_layers"], SHAPE["num_experts_per_tok"])
            if repetition:
                found["rates"][count].append(count * RESPONSE / seconds)
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


# Speculation


def small() -> BeamConfig:
    """A Beam whose vocabulary is so small that an untrained drafter is right now and then."""
    return BeamConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] + ["sparse"] * 5,
        moe_intermediate_size=128,
        num_experts=64,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        max_position_embeddings=1024,
        initializer_range=0.1,  # the tokens' probabilities differ by far more than rounding
        architectures=["BeamForCausalLM"],
        dtype="bfloat16",
    )


def speculation(folder: Path, report: Report) -> None:
    """Greedy output, sampled distribution and captured routes with a drafter, against none."""
    config = small()
    save_hf(folder / "small", config, initial_tensors(config, 1, torch.bfloat16))
    path = drafter.write_random(folder / "drafter", config, DrafterShape(), config.vocab_size - 1, seed=2)
    drafter.check_drafter(path, config)
    fixed = replace(ServeProfile.named("latency"), drafter=str(path)).speculation()
    adaptive = replace(ServeProfile.named("throughput"), drafter=str(path)).speculation()
    assert fixed is not None
    probabilistic = fixed | {"draft_sample_method": "probabilistic"}
    engines: dict[str, tuple[dict[str, Any] | None, bool]] = {
        "no drafter": (None, True),
        "7 drafts": (fixed, True),
        "7 drafts, drawn": (probabilistic, True),
        "adaptive": (adaptive, False),
    }
    jobs = {
        name: (speak, (name, folder, speculative, capture, seed))
        for seed, (name, (speculative, capture)) in enumerate(engines.items())
    }
    results = together(jobs, folder)
    plain = results["no drafter"]
    report("adaptive with R3: vLLM refuses it", results["adaptive"]["refused"])
    for name, found in results.items():
        worst, mean = plain["deficits"][name]
        report(f"{name}: greedy tokens below the best log-prob", f"mean {mean:.2g}, at most {worst:.3f}")
        assert worst < 1.0, f"{name}: a greedy token lies {worst} below the best"
        assert mean <= 2 * plain["deficits"]["no drafter"][1] + 2e-3, f"{name}: {mean} on average"
        if name == "no drafter":
            continue
        same = sum(a == b for a, b in zip(found["greedy"], plain["greedy"], strict=True))
        report(f"{name}: greedy responses equal, of {len(plain['greedy'])}", same)
        report(f"{name}: draft tokens accepted", f"{found['accepted']:,} of {found['drafted']:,}")
        assert found["drafted"] > 0
        least = min(p_values(found["samples"], plain["samples"]).items(), key=lambda pair: pair[1])
        report(f"{name}: least p of the samples' tables", f"{least[1]:.2g} ({least[0]})")
        assert least[1] > DOUBT, f"{name}: {least}"
        if found["routes"] is not None:
            apart, compared = differ(found, plain)
            report(f"{name}: routes that differ, same tokens", f"{apart} of {compared} token-layers")
            assert compared > 0
            assert apart < 0.05 * compared
        report(f"{name}: speculation", next(p.detail for p in found["paths"] if p.name == "speculation"))


def speak(
    turns: Turns, name: str, folder: Path, speculative: dict[str, Any] | None, capture: bool, seed: int
) -> dict[str, Any]:
    """What one engine says to the same prompts: greedily, and many times to the first of them."""
    from vllm import LLM, EngineArgs, SamplingParams

    arguments: dict[str, Any] = {
        "model": str(folder / "small"),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "seed": seed,
        "max_num_seqs": 128,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 * 2**30,
        "speculative_config": speculative,
        "logprobs_mode": "processed_logprobs",
    }
    found: dict[str, Any] = {"refused": None, "routes": None}
    if not capture:
        found["refused"] = refusal(EngineArgs(**arguments, enable_return_routed_experts=True))
        assert "incompatible with adaptive speculative verification" in found["refused"]
    engine = LLM(**arguments, enable_return_routed_experts=capture, disable_log_stats=False)
    found["paths"] = active.paths(engine.collective_rpc(active.gather)[0])
    tokens = np.random.default_rng(0).integers(0, 63, (DRAFT["prompts"], DRAFT["prompt"])).tolist()
    prompts: Any = [{"prompt_token_ids": row} for row in tokens]
    greedy = SamplingParams(
        temperature=0.0, max_tokens=DRAFT["response"], ignore_eos=True, detokenize=False, logprobs=0
    )
    outputs = [output.outputs[0] for output in engine.generate(prompts, greedy, use_tqdm=False)]
    found["greedy"] = [list(output.token_ids) for output in outputs]
    if capture:
        found["routes"] = [np.asarray(output.routed_experts) for output in outputs]
        shape = (DRAFT["prompt"] + DRAFT["response"] - 1, 6, 8)
        assert all(routes.shape == shape for routes in found["routes"])
    draws = SamplingParams(temperature=1.0, max_tokens=DRAFT["first"], ignore_eos=True, detokenize=False)
    drawn = engine.generate(prompts[:1] * DRAFT["samples"], draws, use_tqdm=False)
    found["samples"] = np.array([output.outputs[0].token_ids for output in drawn])
    counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    found["drafted"] = counts.get("vllm:spec_decode_num_draft_tokens", 0)
    found["accepted"] = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    np.save(folder / f"{name}.npy", np.array(found["greedy"]))
    turns.meet()
    if speculative is None:
        others = sorted(folder.glob("*.npy"))
        found["deficits"] = {file.stem: deficits(engine, tokens, np.load(file).tolist()) for file in others}
    engine.llm_engine.engine_core.shutdown()
    return found


def refusal(arguments: Any) -> str:
    """vLLM's reason for refusing engine arguments."""
    try:
        arguments.create_engine_config()
    except ValueError as error:
        return next(line.partition(" [type=")[0].strip() for line in str(error).splitlines() if "compatible" in line)
    raise AssertionError("vLLM accepts them now")


def deficits(engine: Any, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> tuple[float, float]:
    """By how much responses' tokens fall short of the best log-prob at their place: at most, and on average.

    A plain engine scores them in one pass. It rounds other sums than decoding does, so near ties are no fault.
    """
    from vllm import SamplingParams

    once = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    inputs = [{"prompt_token_ids": one + other} for one, other in zip(prompts, responses, strict=True)]
    short = []
    for output, response in zip(engine.generate(inputs, once, use_tqdm=False), responses, strict=True):
        for token, place in zip(response, output.prompt_logprobs[-len(response) :], strict=True):
            short.append(max(entry.logprob for entry in place.values()) - place[token].logprob)
    return max(short), statistics.mean(short)


def differ(found: dict[str, Any], plain: dict[str, Any]) -> tuple[int, int]:
    """Token-layers whose experts differ, of those of responses with equal tokens."""
    apart = compared = 0
    for index, response in enumerate(found["greedy"]):
        if response == plain["greedy"][index]:
            one, other = (np.sort(side["routes"][index], axis=-1) for side in (found, plain))
            apart += int((one != other).any(-1).sum())
            compared += one[..., 0].size
    return apart, compared


def p_values(found: Any, expected: Any) -> dict[str, float]:
    """Two samples [n, tokens] compared by chi-square tables: every position, and neighbours together."""
    tables = {f"token {place + 1}": (found[:, place], expected[:, place]) for place in range(4)}
    for place in (1, 2):
        pair = [8 * side[:, place] + side[:, place + 1] % 8 for side in (found, expected)]
        tables[f"tokens {place + 1} and {place + 2}"] = (pair[0], pair[1])
    return {name: homogeneous(*table) for name, table in tables.items()}


def homogeneous(one: Any, other: Any) -> float:
    """Probability of counts as different as these, were both samples drawn from one distribution."""
    counts = Counter(one.tolist()), Counter(other.tolist())
    cells = sorted(counts[0] | counts[1])
    table = torch.tensor([[side[cell] for cell in cells] for side in counts], dtype=torch.float64)
    rare = table.sum(0) < 20
    table = torch.cat([table[:, ~rare], table[:, rare].sum(1, keepdim=True)], 1)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic: Tensor = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(table.shape[1] - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
