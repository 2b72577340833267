"""With MXFP8 of weights only, a plain engine that gets the trainer's rounded weights computes what the trainer does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from beam_rl.model import mxfp8
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.rollout.profile import engine_init_kwargs
from beam_rl.rollout.transfer import ShmTrainer, ShmTrainerInit

WEIGHTS = Mxfp8Settings(activations=False)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_engine_is_a_plain_one(device: Literal["cpu", "gpu"]) -> None:
    assert engine_init_kwargs(device, WEIGHTS) == engine_init_kwargs(device)


def test_scores_and_routes_are_the_trainers(
    engine: Any,
    weights: dict[str, Tensor],
    prompts: list[list[int]],
    trainer_scores: Callable[..., dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    """In float32: only the order of sums differs, and no rounding of activations makes more of it."""
    plain = engine.prompt_logprobs(prompts)
    sent = list(mxfp8.round_covered(weights.items(), WEIGHTS))
    ShmTrainer.trainer_init(ShmTrainerInit(str(tmp_path), rank=0), client=engine, source=sent).send_weights()
    engine.reset_prefix_cache()
    outputs = engine.generate(prompts, tokens=1)
    routes = np.stack([np.asarray(output.outputs[0].routed_experts) for output in outputs])
    found = engine.prompt_logprobs(prompts)
    assert (found - plain).abs().mean() > 0.05, "the weights are other ones than the checkpoint's"
    scores = trainer_scores(WEIGHTS, routes)
    torch.testing.assert_close(scores["replayed"], found, rtol=0, atol=2e-5)
    sparse = (scores["routes"] >= 0).all(-1).all(0).all(0).numpy()
    own, captured = (np.sort(each[:, :, sparse].astype(np.int16)) for each in (scores["routes"].numpy(), routes))
    assert (own == captured).all()
