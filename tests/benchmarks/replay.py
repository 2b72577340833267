"""What Rollout Routing Replay costs: a training step and a rollout with it and without, side by side.

    python tests/benchmarks/replay.py [RUN/export]

Without an argument the model is the quickstart's tiny Beam before its warm-up, which costs the same. Prints medians of
alternating repetitions, and their ratio.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from beam_rl import apart, tiny
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import load_config
from beam_rl.model.tensors import initial_tensors
from beam_rl.rollout.sample import sample
from beam_rl.trainer.settings import EngineConfig, OptimizerSettings

SAMPLES, LENGTH = 80, 20
"""One optimizer update of the quickstart."""
REPETITIONS = 15


def training(model: Path) -> dict[bool, list[float]]:
    """Seconds of forward, backward and update, with replay (True) and without."""
    from beam_rl.trainer.engine import Sequence, TrainerEngine

    torch.set_num_threads(1)
    engine = TrainerEngine(EngineConfig(optimizer=OptimizerSettings(lr=1e-6)))
    config = load_config(model)
    engine.build(config)
    engine.load_hf(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (SAMPLES, LENGTH), generator=generator)
    plain = [Sequence(tokens=row, loss_mask=torch.ones(LENGTH - 1)) for row in tokens]
    routes = engine.score(plain, replay=False, routes=True).routes
    assert routes is not None
    samples = [
        Sequence(each.tokens, each.loss_mask, routes=taken[:-1].clamp(min=0).to(torch.uint8))
        for each, taken in zip(plain, routes, strict=True)
    ]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repetition in range(REPETITIONS + 2):
        for replay in (True, False):
            start = time.perf_counter()
            engine.forward_backward(samples, lambda logprobs, *_: (-logprobs.mean(), {}), replay=replay)
            engine.optimizer_step()
            if repetition >= 2:
                seconds[replay].append(time.perf_counter() - start)
    return seconds


def rollout(model: Path, routes: bool) -> float:
    """Tokens a second of one rollout of 256 prompts, engine start not counted."""
    prompts = [[1, 4, 6 + index % 8, 7, 8, 9, 5] for index in range(256)]
    samples = apart.call(sample, model, prompts, dtype="bfloat16", tokens=24, routes=routes)
    return sum(len(each.tokens) - each.prompt for each in samples) / samples[0].batch_seconds


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="beam-rl-bench-") as temporary:
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "model"
        if len(sys.argv) == 1:
            config = tiny.architecture()
            save_hf(model, config, initial_tensors(config, 1, torch.bfloat16))
        seconds = apart.call(training, model)
        with_replay, without = (statistics.median(seconds[replay]) for replay in (True, False))
        print(
            f"training step   with R3 {with_replay:.3f} s   without {without:.3f} s   ratio {with_replay / without:.2f}"
        )
        speeds = {routes: statistics.median(rollout(model, routes) for _ in range(3)) for routes in (True, False)}
        print(
            f"rollout         with R3 {speeds[True]:,.0f} tokens/s   without {speeds[False]:,.0f} tokens/s   "
            f"ratio {speeds[True] / speeds[False]:.2f}"
        )


if __name__ == "__main__":
    main()
