"""DFlash2's drafters on one GPU: whether they change what is said, sampled or routed; how many tokens are accepted."""

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.tensors import initial_tensors
from beam_rl.rollout import active, drafter
from beam_rl.rollout.drafter import DrafterShape
from beam_rl.rollout.serve_profile import ServeProfile
from tests.gpu.checks import Checks
from tests.gpu.engines import Tell, Turns, together
from tests.gpu.models import small

PROMPTS, PROMPT, RESPONSE = 64, 32, 128
"""How many are answered greedily, and tokens of each."""
SAMPLES, FIRST = 8192, 8
"""Responses drawn to one prompt, and tokens of each."""
DOUBT = 1e-4
"""Least probability of the samples' differences, of about ten tests, were the distributions equal."""
PLAIN = "no drafter"


def run(report: Tell) -> None:
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary:
        results, failed = together(engines(Path(temporary)), Path(temporary))
    checks.failed += failed
    for name, found in results.items():
        with checks.attempt(name):
            told(name, found, report, checks)
            if PLAIN in results:
                compared(name, found, results[PLAIN], report, checks)
    checks.done()


def engines(folder: Path) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The engines' jobs, for a model and a drafter that are written into the folder."""
    config = small()
    save_hf(folder / "small", config, initial_tensors(config, 1, torch.bfloat16))
    path = drafter.write_random(folder / "drafter", config, DrafterShape(), config.vocab_size - 1, seed=2)
    drafter.check_drafter(path, config)
    fixed = replace(ServeProfile.named("latency"), drafter=str(path)).speculation()
    adaptive = replace(ServeProfile.named("throughput"), drafter=str(path)).speculation()
    assert fixed is not None
    settings: dict[str, tuple[dict[str, Any] | None, bool]] = {
        PLAIN: (None, True),
        "7 drafts": (fixed, True),
        "7 drafts, drawn": (fixed | {"draft_sample_method": "probabilistic"}, True),
        "adaptive": (adaptive, False),
    }
    return {
        name: (speak, (name, folder, speculative, capture, seed))
        for seed, (name, (speculative, capture)) in enumerate(settings.items())
    }


def told(name: str, found: dict[str, Any], report: Tell, checks: Checks) -> None:
    """What an engine says of itself."""
    if found["routes"] is None:
        report(f"{name} with R3: vLLM refuses it", found["refused"])
        checks.expect(
            "incompatible with adaptive speculative verification" in (found["refused"] or ""),
            f"{name} with R3: not refused, or for another reason: {found['refused']}",
        )
    else:
        shapes = {routes.shape for routes in found["routes"]}
        checks.expect(shapes == {(PROMPT + RESPONSE - 1, 6, 8)}, f"{name}: routes of shapes {shapes}")
    if name != PLAIN:
        report(f"{name}: speculation", next(p.detail for p in found["paths"] if p.name == "speculation"))
        report(f"{name}: draft tokens accepted", f"{found['accepted']:,} of {found['drafted']:,}")
        checks.expect(found["drafted"] > 0, f"{name}: nothing was drafted")


def compared(name: str, found: dict[str, Any], plain: dict[str, Any], report: Tell, checks: Checks) -> None:
    """Greedy output, sampled distribution and captured routes against those without a drafter."""
    worst, mean = plain["deficits"][name]
    report(f"{name}: greedy tokens below the best log-prob", f"mean {mean:.2g}, at most {worst:.3f}")
    if name == PLAIN:  # scored as a prompt its own tokens are not all the best: rounding differs from decoding's
        return
    most, average = plain["deficits"][PLAIN]
    checks.expect(worst <= most + 0.5, f"{name}: a greedy token lies {worst} below the best, without drafter {most}")
    checks.expect(mean <= 2 * average + 2e-3, f"{name}: {mean} below the best on average, without drafter {average}")
    same = sum(a == b for a, b in zip(found["greedy"], plain["greedy"], strict=True))
    report(f"{name}: greedy responses equal, of {len(plain['greedy'])}", same)
    where, least = min(p_values(found["samples"], plain["samples"]).items(), key=lambda pair: pair[1])
    report(f"{name}: least p of the samples' tables", f"{least:.2g} ({where})")
    checks.expect(least > DOUBT, f"{name}: samples of another distribution, p {least:.2g} ({where})")
    if found["routes"] is not None:
        apart, of = differ(found, plain)
        report(f"{name}: routes that differ, same tokens", f"{apart} of {of} token-layers")
        checks.expect(apart < 0.05 * of, f"{name}: {apart} routes of {of} differ")


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
    engine = LLM(**arguments, enable_return_routed_experts=capture, disable_log_stats=False)
    found["paths"] = active.paths(engine.collective_rpc(active.gather)[0])
    tokens = np.random.default_rng(0).integers(0, 63, (PROMPTS, PROMPT)).tolist()
    prompts: Any = [{"prompt_token_ids": row} for row in tokens]
    greedy = SamplingParams(temperature=0.0, max_tokens=RESPONSE, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = [output.outputs[0] for output in engine.generate(prompts, greedy, use_tqdm=False)]
    found["greedy"] = [list(output.token_ids) for output in outputs]
    if capture:
        found["routes"] = [np.asarray(output.routed_experts) for output in outputs]
    draws = SamplingParams(temperature=1.0, max_tokens=FIRST, ignore_eos=True, detokenize=False)
    drawn = engine.generate(prompts[:1] * SAMPLES, draws, use_tqdm=False)
    found["samples"] = np.array([output.outputs[0].token_ids for output in drawn])
    counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    found["drafted"] = counts.get("vllm:spec_decode_num_draft_tokens", 0)
    found["accepted"] = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    np.save(folder / f"{name}.npy", np.array(found["greedy"]))
    turns.meet()  # or another one has failed: what there is is compared
    if speculative is None:
        others = sorted(folder.glob("*.npy"))
        found["deficits"] = {file.stem: deficits(engine, tokens, np.load(file).tolist()) for file in others}
    engine.llm_engine.engine_core.shutdown()
    return found


def refusal(arguments: Any) -> str | None:
    """vLLM's reason for refusing engine arguments; None: it accepts them."""
    try:
        arguments.create_engine_config()
    except ValueError as error:
        return next(line.partition(" [type=")[0].strip() for line in str(error).splitlines() if "compatible" in line)
    return None


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
