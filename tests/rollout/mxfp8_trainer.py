"""Run by `trainer_scores` in a process of its own: a trainer in MXFP8 scores prompts with the rollout's routes.

Arguments: checkpoint folder; MXFP8 settings as JSON; a file with `tokens` int64 [B, S] and `routes` uint8
[B, S, layers, topk]; a file for `replayed` float32 [B, S - 1] and `routes` int16 [B, S, layers, topk], the router's own
choice.
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file

from beam_rl.model.config import load_config
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.trainer.engine import EngineConfig, Sequence, TrainerEngine

if __name__ == "__main__":
    torch.set_num_threads(1)
    model, settings, given, out = sys.argv[1:]
    inputs = load_file(given)
    mxfp8 = Mxfp8Settings(**json.loads(settings))
    engine = TrainerEngine(EngineConfig(dtype="float32", optimizer=None, mxfp8=mxfp8))
    engine.build(load_config(model))
    engine.load_hf(model)
    samples = [
        Sequence(tokens, torch.ones(len(tokens) - 1), routes)
        for tokens, routes in zip(inputs["tokens"], inputs["routes"], strict=True)
    ]
    free = engine.score(samples, replay=False, routes=True)
    assert free.routes is not None
    replayed = engine.forward_logprobs(samples)
    save_file({"replayed": torch.stack(replayed), "routes": torch.stack(free.routes)}, out)
