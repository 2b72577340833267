"""Run by `training.py` where transformers knows Beam: its own training step, with its fastest kernels, measured.

Arguments: name of a shape (`measure.SHAPES`), "plain" or "checkpointing" (recompute every layer in the backward pass),
JSON file to write.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, BeamConfig

from tests.gpu.measure import SHAPES, measure, tokens


def main(shape: str, mode: str, out: str) -> None:
    config = BeamConfig(**SHAPES[shape], use_cache=False)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation="flex_attention",
            experts_implementation="grouped_mm",
        )
    model.train()
    if mode == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = tokens().cuda()
    places = torch.arange(batch.shape[1], device="cuda").expand_as(batch)
    batch, places = batch.view(1, -1), places.reshape(1, -1)  # transformers takes new starts for new sequences

    def step() -> None:
        model(input_ids=batch, position_ids=places, labels=batch, use_cache=False).loss.backward()

    found = measure(model, step, model.zero_grad)
    Path(out).write_text(json.dumps(found | {"version": transformers.__version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])
