"""What emulated MXFP8 costs on the tiny model, on one thread: `python tests/benchmarks/mxfp8.py`.

Seconds are of processor time, so that a busy machine matters little. Every measurement runs in a process of its own,
the precisions taking turns, and the best of the rounds counts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from beam_rl.rollout.profile import CPU_ENVIRONMENT

ROUNDS = 2
SAMPLES, LENGTH = 160, 32
PROMPTS, PROMPT, RESPONSE = 256, 12, 24


def write_model(folder: Path) -> None:
    """The tiny model with random weights."""
    import torch

    from beam_rl.model.checkpoint import save_hf
    from beam_rl.model.config import BeamConfig
    from beam_rl.model.tensors import initial_tensors
    from beam_rl.tiny import ARCHITECTURE

    config = BeamConfig(**ARCHITECTURE, architectures=["BeamForCausalLM"], dtype="bfloat16")
    save_hf(folder, config, initial_tensors(config, 0, torch.bfloat16))


def settings(precision: str) -> Any:
    from beam_rl.model.mxfp8_config import Mxfp8Settings

    return Mxfp8Settings() if precision == "mxfp8" else None


def best(run: Callable[[], None], times: int) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    run()
    seconds = []
    for _ in range(times):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def trainer(model: str, precision: str) -> dict[str, float]:
    """Tokens a second of a training step, and of scoring."""
    import torch

    from beam_rl.model.config import load_config
    from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Sequence, TrainerEngine

    torch.set_num_threads(1)
    engine = TrainerEngine(EngineConfig(optimizer=OptimizerSettings(lr=1e-5), mxfp8=settings(precision)))
    engine.build(load_config(model))
    engine.load_hf(model)
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sequence(torch.randint(6, 32, (LENGTH,), generator=generator), torch.ones(LENGTH - 1)) for _ in range(SAMPLES)
    ]

    def step() -> None:
        engine.forward_backward(samples, lambda logprobs, *_: (-logprobs.sum() / SAMPLES, {}), replay=False)
        engine.optimizer_step()

    tokens = SAMPLES * LENGTH
    scoring = best(lambda: [engine.forward_logprobs(samples, replay=False)], 3)
    return {"training tokens/s": tokens / best(step, 3), "scoring tokens/s": tokens / scoring}


def rollout(model: str, precision: str) -> dict[str, float]:
    """Generated tokens a second, all prompts at once."""
    from vllm import SamplingParams

    from beam_rl.rollout.offline import offline_engine
    from beam_rl.rollout.profile import engine_init_kwargs

    sampling = SamplingParams(max_tokens=RESPONSE, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": [6 + (i * 7 + j * j) % 26 for j in range(PROMPT)]} for i in range(PROMPTS)]
    arguments = engine_init_kwargs("cpu", settings(precision)) | {"kv_cache_memory_bytes": 2**28}
    with offline_engine(model, "bfloat16", PROMPT + RESPONSE + 1, capture=True, **arguments) as engine:
        seconds = best(lambda: engine.generate(prompts, sampling, use_tqdm=False), 3)
    return {"rollout tokens/s": PROMPTS * RESPONSE / seconds}


def quantiser() -> None:
    """Microseconds of a round trip, ours and torchao's."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    from beam_rl.model import mxfp8

    def ours(x: torch.Tensor) -> None:
        mxfp8.round_trip(x, "rceil")

    def torchaos(x: torch.Tensor) -> None:
        MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL).dequantize(x.dtype)

    torch.set_num_threads(1)
    print(f"{'round trip of bfloat16':<28}{'ours':>12}{'torchao':>12}")
    for rows in (64, 5120):
        x = torch.randn(rows, 128).bfloat16()
        found = (best(partial(function, x), 50) * 1e6 for function in (ours, torchaos))
        print(f"{f'{rows} x 128':<28}" + "".join(f"{microseconds:>9.0f} µs" for microseconds in found), flush=True)


def measure(side: str, model: Path, precision: str) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, side, str(model), precision]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | CPU_ENVIRONMENT)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    quantiser()
    with tempfile.TemporaryDirectory(prefix="beam-rl-mxfp8-") as temporary:
        model = Path(temporary) / "model"
        write_model(model)
        print(f"{'':<28}{'bf16':>12}{'mxfp8':>12}{'ratio':>12}")
        for side in ("trainer", "rollout"):
            found: dict[str, dict[str, float]] = {"bf16": {}, "mxfp8": {}}
            for _ in range(ROUNDS):
                for precision, values in found.items():
                    for name, value in measure(side, model, precision).items():
                        values[name] = max(value, values.get(name, 0.0))
            for name, plain in found["bf16"].items():
                quantised = found["mxfp8"][name]
                print(f"{name:<28}{plain:>12,.0f}{quantised:>12,.0f}{quantised / plain:>12.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps({"trainer": trainer, "rollout": rollout}[sys.argv[1]](*sys.argv[2:])))
    else:
        main()
