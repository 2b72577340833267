"""What handing over a rollout's tokens in pieces saves: tokens/s of plain vLLM, and of rollouts with it and without.

    python tests/benchmarks/pieces.py [SEQUENCES …]

The engine runs in a process of its own, as a server's does; the model is the quickstart's tiny Beam. Prints medians of
alternating repetitions and their ratios to plain vLLM.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beam_rl import apart, tiny
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.tensors import initial_tensors

RESPONSE, REPETITIONS = 64, 3
ENGINES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"scheduler_cls": None}, False),
    "token by token": ({"scheduler_cls": None}, True),
    "in pieces": ({}, True),
}
"""Engine arguments over the profile's, and whether log-probs and routes are asked for."""


def speed(model: Path, arguments: dict[str, Any], rollout: bool, count: int) -> float:
    """Tokens/s of `count` sequences, after one round that is not measured."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import SamplingParams

    from beam_rl.rollout.offline import offline_engine

    sampling = SamplingParams(
        max_tokens=RESPONSE, ignore_eos=True, detokenize=False, logprobs=0 if rollout else None, temperature=1.0
    )
    prompts: Any = [
        {"prompt_token_ids": row.tolist()}
        for row in np.random.default_rng(0).integers(1, tiny.architecture().vocab_size, (count, 8))
    ]
    with offline_engine(model, "bfloat16", 8 + RESPONSE, capture=rollout, max_num_seqs=count, **arguments) as engine:
        for _ in range(2):
            begin = time.perf_counter()
            engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
    return count * RESPONSE / seconds


def main() -> None:
    counts = [int(each) for each in sys.argv[1:]] or [64, 256]
    with tempfile.TemporaryDirectory(prefix="beam-rl-bench-") as temporary:
        model = Path(temporary) / "model"
        config = tiny.architecture()
        save_hf(model, config, initial_tensors(config, 1, torch.bfloat16))
        for count in counts:
            rates: dict[str, list[float]] = {name: [] for name in ENGINES}
            for _ in range(REPETITIONS):
                for name, (arguments, rollout) in ENGINES.items():
                    rates[name].append(apart.call(speed, model, arguments, rollout, count))
            base = statistics.median(rates["plain"])
            for name, found in rates.items():
                rate = statistics.median(found)
                print(
                    f"{count:>4} sequences  {name:<15} {rate:>7,.0f} tokens/s  {rate / base:.2f} of plain", flush=True
                )


if __name__ == "__main__":
    main()
